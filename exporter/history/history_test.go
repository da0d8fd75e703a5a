package history

import (
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"gpu-exporter/exporter/view"
	"gpu-exporter/nvml/frame"
)

var t0 = time.Unix(1_800_000_000, 0) // a multiple of 600

func at(second int, load float64, workloads ...view.Workload) *view.Snapshot {
	return &view.Snapshot{Time: t0.Add(time.Duration(second) * time.Second), Workloads: workloads,
		Devices: []view.Device{{Index: 1, UUID: "GPU-1", Utilization: frame.Some(load), PCIeRX: frame.Some(float64(second / 2 * 2 * 1000))}}}
}

func in(id string, load float64, memory uint64) view.Workload {
	return view.Workload{ContainerID: id, ContainerName: "c" + id, Utilization: frame.Some(load), Memory: frame.Some(memory), PID: 1}
}

// TestPoints: one point per second, sums per container, absent where nothing was said, and a counter that is read every other second is a
// steady rate.
func TestPoints(t *testing.T) {
	h := New()
	h.Add(at(0, 10, in("a", 40, 100), in("a", 50, 11), view.Workload{PID: 9, Utilization: frame.Some(7.0)}))
	h.Add(at(1, 20))
	for s := 4; s <= 9; s++ {
		h.Add(at(s, float64(s)))
	}
	v := h.View(Points)
	if len(v.Devices) != 1 || len(v.Containers) != 1 || v.Step != 1 || !v.Time.Equal(t0.Add(9*time.Second)) {
		t.Fatalf("%+v", v)
	}
	tail := func(x Values) string {
		if x == nil {
			return "none"
		}
		return fmt.Sprint(x[len(x)-11:])
	}
	d, c := v.Devices[0], v.Containers[0]
	for _, x := range []struct{ name, got, want string }{
		{"utilization", tail(d.Utilization), "[NaN 10 20 NaN NaN 4 5 6 7 8 9]"},
		{"power", tail(d.Power), "none"},
		{"pcie", tail(d.PCIeRX), "[NaN NaN NaN NaN NaN 1000 1000 1000 1000 1000 1000]"},
		{"container", c.ID + c.Name + tail(c.Utilization), "aca[NaN 90 NaN NaN NaN NaN NaN NaN NaN NaN NaN]"},
		{"memory", tail(c.Memory), "[NaN 111 NaN NaN NaN NaN NaN NaN NaN NaN NaN]"},
	} {
		if x.got != x.want {
			t.Errorf("%s: %s, want %s", x.name, x.got, x.want)
		}
	}
	b, err := json.Marshal(d.Utilization[Points-10:])
	if err != nil || string(b) != "[10,20,null,null,4,5,6,7,8,9]" {
		t.Errorf("%s, %v", b, err)
	}
	var back Values
	if err := json.Unmarshal(b, &back); err != nil || fmt.Sprint(back) != "[10 20 NaN NaN 4 5 6 7 8 9]" {
		t.Errorf("read back: %v, %v", back, err)
	}
}

// TestView: fewer points are the highest of their seconds, and a second stays in the same point as time goes on.
func TestView(t *testing.T) {
	h := New()
	for s := range 1000 {
		h.Add(at(s, float64(s%100)))
	}
	for _, n := range []int{1, 7, 100, 150, Points} {
		v := h.View(n)
		if u := v.Devices[0].Utilization; len(u) != n || v.Step*n < Points {
			t.Errorf("%d points of %d s: %d", n, v.Step, len(u))
		}
	}
	if u := h.View(6).Devices[0].Utilization; fmt.Sprint(u) != "[99 99 99 99 99 99]" {
		t.Error(u)
	}
	before := h.View(60).Devices[0].Utilization
	h.Add(at(1000, 0))
	after := h.View(60).Devices[0].Utilization
	if fmt.Sprint(before[2:]) != fmt.Sprint(after[1:59]) {
		t.Errorf("the points moved:\n%v\n%v", before, after)
	}
}

// TestBounds: what is gone for ten minutes is forgotten, the number of series is bounded, and a clock that is set does no harm.
func TestBounds(t *testing.T) {
	h := New()
	var many []view.Workload
	for i := range 2 * maxSeries {
		many = append(many, in(fmt.Sprint(i), 1, 1))
	}
	h.Add(at(0, 1, many...))
	if n := len(h.View(1).Containers); n != maxSeries {
		t.Errorf("%d containers", n)
	}
	for s := 1; s < Points; s++ {
		h.Add(at(s, 1))
	}
	if n := len(h.View(1).Containers); n != maxSeries {
		t.Errorf("%d containers just before the time", n)
	}
	h.Add(at(Points, 1))
	if n := len(h.View(1).Containers); n != 0 {
		t.Errorf("%d containers after it", n)
	}
	for _, s := range []int{Points - 5, 1 << 30, -1 << 30, 3, 4} {
		h.Add(at(s, 5))
	}
	u := h.View(Points).Devices[0].Utilization
	known := 0
	for _, x := range u {
		if !math.IsNaN(float64(x)) {
			known++
		}
	}
	if known != 2 || u[Points-1] != 5 {
		t.Errorf("%d points after the clock was set: %v", known, u[Points-5:])
	}
}

// TestEmpty: a history without points is JSON without nulls.
func TestEmpty(t *testing.T) {
	b, err := json.Marshal(New().View(Points))
	if err != nil || strings.Contains(string(b), "null") {
		t.Errorf("%s, %v", b, err)
	}
}
