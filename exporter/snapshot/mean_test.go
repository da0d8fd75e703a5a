package snapshot

import (
	"math"
	"testing"
	"time"

	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/processes"
	"gpu-exporter/nvml/frame"
)

// TestOneSamplePerCall: driver 580 answers each call with one sample per process, the mean since the time asked from. A process at 99 % must
// read 99 %, not the share that a 200 ms sample has of a 2 s window. The numbers are an H200's.
func TestOneSamplePerCall(t *testing.T) {
	b := NewBuilder(Config{})
	at := []int64{1796137299895666, 1796137301895587, 1796137303895560, 1796137305895226}
	sm := []float64{98, 89, 99}
	want := 0.0
	for i, v := range sm {
		now := time.UnixMicro(at[i+1])
		b.Apply(input.Input{Time: now.UnixNano(), Processes: &input.Processes{Asked: []int{633}, List: []processes.Process{{PID: 633, StartTime: 1}}}})
		b.Apply(tick(now, frame.Device{Load: load(100), Processes: list(633, 50), Samples: &frame.Samples{ProcessSince: at[i], ProcessUntil: at[i+1],
			Process: []frame.ProcessSample{{PID: 633, Time: at[i+1], SM: v}}}}))
		w := find(b.Snapshot(now), 633)
		if math.Abs(w.Utilization.V-v) > 1e-9 {
			t.Errorf("utilisation %v, want %v", w.Utilization.V, v)
		}
		want += v / 100 * float64(at[i+1]-at[i]) / 1e6
		if math.Abs(w.Busy.V-want) > 1e-6 {
			t.Errorf("busy %v s, want %v", w.Busy.V, want)
		}
	}
}
