package why_test

import (
	"fmt"
	"testing"
	"time"

	"gpu-exporter/exporter/history"
	"gpu-exporter/exporter/view"
	"gpu-exporter/exporter/why"
	"gpu-exporter/nvml/frame"
)

// BenchmarkFirst is what an open page costs every four seconds: the first finding of each of 128 containers, 16 on each of 8 GPUs; 120 have one.
func BenchmarkFirst(b *testing.B) {
	s, h := crowded()
	for b.Loop() {
		if n := len(why.New(s, nil, h.Past()).First()); n != 120 {
			b.Fatal(n)
		}
	}
}

// BenchmarkAdd is what the history costs every second.
func BenchmarkAdd(b *testing.B) {
	s, h := crowded()
	for b.Loop() {
		s.Time = s.Time.Add(time.Second)
		h.Add(s)
	}
}

func crowded() (*view.Snapshot, *history.History) {
	s, h := &view.Snapshot{}, history.New()
	for i := range 8 {
		s.Devices = append(s.Devices, view.Device{Index: i, UUID: fmt.Sprint("GPU-", i), State: "ok", Utilization: frame.Some(99.0),
			PCIeRX: frame.Some(0.0), PCIeLink: frame.Some(64e9)})
	}
	for i := range 128 {
		id := fmt.Sprintf("%064d", i)
		s.Containers = append(s.Containers, view.Container{ID: id, Name: id[60:]})
		s.Workloads = append(s.Workloads, view.Workload{GPU: i % 8, GPUUUID: fmt.Sprint("GPU-", i%8), PID: i + 1, ContainerID: id,
			Utilization: frame.Some(6.0), CPU: frame.Some(0.0)})
	}
	for i := range 8 {
		s.Workloads[i].Utilization.V = 30
	}
	for second := range 700 {
		s.Time = t0.Add(time.Duration(second) * time.Second)
		for i := range s.Workloads {
			s.Workloads[i].CPU.V++
		}
		h.Add(s)
	}
	return s, h
}
