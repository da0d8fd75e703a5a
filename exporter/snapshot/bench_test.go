package snapshot_test

import (
	"bytes"
	"testing"
	"time"

	"gpu-exporter/exporter/recording"
	"gpu-exporter/exporter/snapshot"
)

// BenchmarkSecond is one second of the built-in recording: its inputs applied and one snapshot made.
func BenchmarkSecond(b *testing.B) {
	list, err := recording.Read(bytes.NewReader(recording.Demo))
	if err != nil {
		b.Fatal(err)
	}
	seconds := float64(list[len(list)-1].Time-list[0].Time) / 1e9
	b.ReportAllocs()
	n := 0
	for b.Loop() {
		s := snapshot.NewBuilder(snapshot.Config{})
		next := list[0].Time
		for _, in := range list {
			s.Apply(in)
			if in.Time >= next {
				s.Snapshot(time.Unix(0, in.Time))
				next += 1e9
			}
		}
		n++
	}
	b.ReportMetric(b.Elapsed().Seconds()*1e6/seconds/float64(n), "µs/s")
}
