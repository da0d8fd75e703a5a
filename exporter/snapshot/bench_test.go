package snapshot_test

import (
	"bytes"
	"testing"
	"time"

	"gpu-exporter/exporter/recording"
	"gpu-exporter/exporter/snapshot"
	"gpu-exporter/exporter/snapshot/hosttest"
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

// large returns a builder that knows a large host, and its snapshot.
func large(gpus, busy, idle int) (*snapshot.Builder, func() *snapshot.Snapshot) {
	b := snapshot.NewBuilder(snapshot.Config{})
	list := hosttest.Large(gpus, busy, idle)
	for _, in := range list {
		b.Apply(in)
	}
	return b, func() *snapshot.Snapshot { return b.Snapshot(time.Unix(0, list[len(list)-1].Time)) }
}

// TestSnapshotAllocates little: per container that is on a GPU with its processes, and next to nothing for one that is on none.
func TestSnapshotAllocates(t *testing.T) {
	_, none := large(16, 0, 0)
	_, busy := large(16, 1000, 0)
	_, idle := large(16, 0, 1000)
	if n := len(busy().Workloads); n != 1000*hosttest.LargeProcesses+16 {
		t.Fatalf("%d workloads", n)
	}
	base := testing.AllocsPerRun(5, func() { none() })
	if base > 130 {
		t.Errorf("a snapshot of 16 GPUs allocates %v times", base)
	}
	if n := (testing.AllocsPerRun(5, func() { busy() }) - base) / 1000; n > 9 {
		t.Errorf("a snapshot allocates %.1f times for each container with %d processes", n, hosttest.LargeProcesses)
	}
	if n := (testing.AllocsPerRun(5, func() { idle() }) - base) / 1000; n > 0.1 {
		t.Errorf("a snapshot allocates %.1f times for each container that is on no GPU", n)
	}
}

// BenchmarkLarge is a snapshot of 16 GPUs, 1000 containers and 4000 processes, and the application of two seconds' inputs.
func BenchmarkLarge(b *testing.B) {
	_, snap := large(16, 1000, 0)
	b.Run("snapshot", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			snap()
		}
	})
	b.Run("apply", func(b *testing.B) {
		list := hosttest.Large(16, 1000, 0)
		s := snapshot.NewBuilder(snapshot.Config{})
		b.ReportAllocs()
		for b.Loop() {
			for _, in := range list {
				s.Apply(in)
			}
		}
	})
}
