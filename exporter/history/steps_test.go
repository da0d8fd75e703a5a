package history

import (
	"fmt"
	"math"
	"runtime"
	"testing"
	"time"
	"unsafe"

	"gpu-exporter/exporter/view"
	"gpu-exporter/nvml/frame"
)

// second is a host with a process in a container, one outside, and failed requests, as it is in one second.
func second(n int, sm, cpu float64, failed uint64) *view.Snapshot {
	return &view.Snapshot{Time: t0.Add(time.Duration(n) * time.Second),
		Devices: []view.Device{{UUID: "GPU-1", State: "ok", Temperature: frame.Some(float64(n)), Throttle: []string{"sw_power_cap"}, PCIeRX: frame.Some(float64(n) * 100),
			ECC: map[string]uint64{"volatile/uncorrected": uint64(n / 25)}}},
		Workloads: []view.Workload{{GPUUUID: "GPU-1", ContainerID: "a", PID: 1, Utilization: frame.Some(sm), CPU: frame.Some(cpu), Memory: frame.Some[uint64](5)},
			{GPUUUID: "GPU-1", ContainerID: "a", PID: 2, Utilization: frame.Some(10.0), CPU: frame.Some(100.0)}, {GPUUUID: "GPU-1", PID: 3}, {GPUUUID: "GPU-1", Memory: frame.Some[uint64](7)}},
		Containers: []view.Container{{ID: "a", FailedRequests: map[string]uint64{"GPU-1": failed}}}}
}

// TestSteps: a step has the means of its snapshots, sums over the processes of a container, and what counters counted; what is absent is not zero,
// and a step in which nothing was seen says so.
func TestSteps(t *testing.T) {
	h := New()
	for n := range 30 {
		if n < 10 || n >= 20 {
			h.Add(second(n, float64(n%2*40), float64(n)/2, uint64(n/20*3)))
		}
	}
	p := h.Past()
	if len(p.Loads) != 1 || len(p.Uses) != 2 || !p.At(Steps-1).Equal(t0.Add(20*time.Second)) {
		t.Fatalf("%+v", p)
	}
	l, u, o := p.Loads["GPU-1"], p.Uses[User{GPU: "GPU-1", Container: "a"}], p.Uses[User{GPU: "GPU-1", PID: 3}]
	if len(l) != Steps || len(u) != Steps {
		t.Fatalf("%d and %d steps", len(l), len(u))
	}
	for _, x := range []struct{ name, got, want string }{
		{"loads", fmt.Sprint(l[Steps-3:]), "[{10 NaN NaN NaN NaN 4.5 NaN 0 1 0 900 NaN 0} {0 0 0 0 0 0 0 0 0 0 0 0 0} {10 NaN NaN NaN NaN 24.5 NaN 0 1 0 2000 NaN 1}]"},
		{"uses", fmt.Sprint(u[Steps-3:]), "[{10 30 NaN 5 4.5 NaN NaN 0} {0 0 0 0 0 0 0 0} {10 30 NaN 5 10 NaN NaN 3}]"},
		{"outside", fmt.Sprint(o[Steps-1]), "{10 NaN NaN NaN NaN NaN NaN 0}"},
		{"before", fmt.Sprint(l[0].Seen, u[0].Seen), "0 0"},
	} {
		if x.got != x.want {
			t.Errorf("%s: %s, want %s", x.name, x.got, x.want)
		}
	}
	before := fmt.Sprint(p)
	h.Add(second(31, 90, 99, 50))
	if fmt.Sprint(p) != before {
		t.Error("the copy changed with the history")
	}
}

// TestStepsBound: the steps are within the memory that is stated, what is gone for ten minutes is forgotten, a counter that falls counts nothing, and a
// clock that is set does no harm.
func TestStepsBound(t *testing.T) {
	if bytes := maxSeries*unsafe.Sizeof(ring[Load]{}) + maxUses*unsafe.Sizeof(ring[Use]{}); bytes > 4_000_000 {
		t.Errorf("%d bytes", bytes)
	}
	h := New()
	s := second(0, 1, 50, 0)
	for i := range 2 * maxUses {
		s.Workloads = append(s.Workloads, view.Workload{GPUUUID: "GPU-1", PID: 10 + i})
		s.Devices = append(s.Devices, view.Device{UUID: fmt.Sprint(i), State: "ok"})
	}
	h.Add(s)
	if p := h.Past(); len(p.Uses) != maxUses || len(p.Loads) != maxSeries {
		t.Errorf("%d uses, %d loads", len(p.Uses), len(p.Loads))
	}
	for n := 1; n <= 10*Steps; n++ {
		h.Add(second(n, 1, 50-float64(n%2), 0))
	}
	p := h.Past()
	if len(p.Uses) != 2 || len(p.Loads) != 1 {
		t.Errorf("%d uses, %d loads after ten minutes", len(p.Uses), len(p.Loads))
	}
	if u := p.Uses[User{GPU: "GPU-1", Container: "a"}]; u[5].CPU != 5 || u[5].Failed != 0 {
		t.Errorf("%+v", u[5])
	}
	h.Add(second(1<<30, 1, 1, 7))
	p = h.Past()
	if u := p.Uses[User{GPU: "GPU-1", Container: "a"}]; len(p.Uses) != 2 || u[Steps-1].Failed != 0 || !math.IsNaN(float64(u[Steps-1].CPU)) || u[Steps-2].Seen != 0 {
		t.Errorf("after the clock was set: %+v", p.Uses)
	}
}

// TestAddAllocates: what a second of 1000 containers with 4 processes each allocates. Their counters are kept in maps that are used again.
func TestAddAllocates(t *testing.T) {
	s := &view.Snapshot{Devices: []view.Device{{UUID: "GPU-1", State: "ok"}}}
	for i := range 4000 {
		s.Workloads = append(s.Workloads, view.Workload{GPUUUID: "GPU-1", ContainerID: fmt.Sprint(i / 4), PID: i + 1, CPU: frame.Some(float64(i)),
			PCIeRX: frame.Some[uint64](1), PCIeTX: frame.Some[uint64](1)})
	}
	h, n := New(), 0
	add := func() {
		s.Time = t0.Add(time.Duration(n) * time.Second)
		h.Add(s)
		n++
	}
	for range 3 {
		add()
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range 10 {
		add()
	}
	runtime.ReadMemStats(&after)
	each := (after.TotalAlloc - before.TotalAlloc) / 10
	t.Logf("%d bytes a second", each)
	if each > 1_000_000 {
		t.Errorf("a second allocates %d bytes", each)
	}
}
