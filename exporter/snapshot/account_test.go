package snapshot

import (
	"strings"
	"testing"
	"time"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/processes"
	"gpu-exporter/nvml/frame"
	"gpu-exporter/tracer/activity"
)

func report(at time.Time, r activity.Report) input.Input {
	if r.Mode == "" {
		r.Mode = "fentry"
	}
	return input.Input{Time: at.UnixNano(), Tracer: &r}
}

// TestEnergyShares: 1000 J in 10 s, one process busy for half of them and another for a quarter: 500 J, 250 J and the rest, also over a worker that is replaced
// and a counter that starts anew.
func TestEnergyShares(t *testing.T) {
	b := NewBuilder(Config{Linger: time.Minute})
	step := func(at time.Time, joules float64, from time.Time, sm map[int]float64) *Snapshot {
		d := frame.Device{Load: load(100), Processes: list(7, 10, 8, 10), Energy: frame.Some(joules)}
		if len(sm) > 0 {
			d.Samples = &frame.Samples{ProcessSince: from.UnixMicro(), ProcessUntil: at.UnixMicro()}
			for pid, v := range sm {
				d.Samples.Process = append(d.Samples.Process, frame.ProcessSample{PID: pid, Time: at.UnixMicro(), SM: v})
			}
		}
		b.Apply(procs(at, processes.Process{PID: 7, StartTime: 1}, processes.Process{PID: 8, StartTime: 2}))
		b.Apply(tick(at, d))
		s := b.Snapshot(at)
		closed(t, s)
		return s
	}
	step(t0, 5000, t0, nil)
	t1 := t0.Add(10 * time.Second)
	s := step(t1, 6000, t0, map[int]float64{7: 50, 8: 25})
	if a, c, rest := find(s, 7).Energy.V, find(s, 8).Energy.V, find(s, 0).Energy.V; a != 500 || c != 250 || rest != 5250 {
		t.Fatalf("shares %v and %v J, rest %v", a, c, rest)
	}
	b.Apply(input.Input{Time: t1.UnixNano(), Source: &input.Source{Name: input.SourceNVML}})
	t2 := t1.Add(10 * time.Second)
	s = step(t2, 100, t1, map[int]float64{7: 100}) // the driver was loaded anew: what was used meanwhile is not known
	if v := s.Devices[0].Energy.V; v != 6000 {
		t.Fatalf("the device's counter is %v J after a reset, want 6000", v)
	}
	t3 := t2.Add(10 * time.Second)
	s = step(t3, 1100, t2, map[int]float64{7: 100})
	if a, all := find(s, 7).Energy.V, s.Devices[0].Energy.V; a != 1500 || all != 7000 {
		t.Fatalf("after a reset %v of %v J, want 1500 of 7000", a, all)
	}
}

// TestPCIeNotTwice: a copy that the device's figure has before the probe tells of it is not counted in the rest first. The rest is the protocol's overhead.
func TestPCIeNotTwice(t *testing.T) {
	b := NewBuilder(Config{Linger: time.Minute})
	copied := uint64(0)
	var s *Snapshot
	for i := range 60 {
		at := t0.Add(time.Duration(i) * time.Second)
		var told uint64
		if i < 40 {
			told = 108
		}
		b.Apply(tick(at, frame.Device{Load: load(100), Processes: list(7, 10), PCIe: &frame.PCIe{Source: "gpm", RX: frame.Some(told), TX: frame.Some(uint64(0))}}))
		if i >= 2 && i < 42 {
			copied += 100 // the probes are 2 s later
		}
		b.Apply(report(at, activity.Report{Processes: []activity.Process{{PID: 7, StartTime: 1, Compute: true, HtoD: copied, Devices: []activity.Device{{UUID: "GPU-0"}}}}}))
		s = b.Snapshot(at)
		closed(t, s)
	}
	if a, rest, all := find(s, 7).HtoD.V, find(s, 0).HtoD.V, s.Devices[0].PCIeRX.V; a != 4000 || rest != 320 || all != 4320 {
		t.Fatalf("%d copied, rest %d, device %d; want 4000, 320, 4320", a, rest, all)
	}
}

// TestLedgerMismatch: NVML's list is compared with what the ledger had at the reports before and after it, so a program that allocates is no difference,
// and what is truly one stays it.
func TestLedgerMismatch(t *testing.T) {
	b := NewBuilder(Config{})
	b.Apply(tick(t0, frame.Device{Load: load(1000), Processes: list()}))
	at := func(ms int) time.Time { return t0.Add(time.Duration(ms) * time.Millisecond) }
	ledger := func(ms int, used ...uint64) {
		r := activity.Report{Ledger: true}
		for i, bytes := range used {
			r.Processes = append(r.Processes, activity.Process{PID: 7 + i, StartTime: 1, Compute: true, FromBirth: true,
				Devices: []activity.Device{{UUID: "GPU-0", Used: frame.Some(bytes)}}})
		}
		b.Apply(report(at(ms), r))
	}
	check := func(ms int, want uint64) {
		t.Helper()
		if m := b.Snapshot(at(ms)).Devices[0].LedgerMismatch; m != frame.Some(want) {
			t.Errorf("at %d ms: %v, want %d", ms, m, want)
		}
	}
	ledger(100)
	b.Apply(tick(at(500), frame.Device{Load: load(1000), Processes: list(7, 100)}))
	ledger(600, 300) // it was born and allocated 100, then 200
	check(600, 0)
	b.Apply(tick(at(1000), frame.Device{Load: load(1000), Processes: list(7, 300, 8, 10)}))
	check(1000, 0)          // the list of now is not compared yet
	ledger(1100, 200, 4000) // both changed
	check(1100, 0)
	ledger(1200, 900, 1) // no list in between: nothing new is known
	check(1200, 0)
	b.Apply(tick(at(1500), frame.Device{Load: load(1000), Processes: list(7, 1000, 8, 10)}))
	ledger(1600, 950, 1)
	check(1600, 59) // 50 more than it ever held, and 9
	b.Apply(tick(at(2000), frame.Device{Load: load(1000), Processes: list(7, 900)}))
	ledger(2100, 950, 1)
	check(2100, 50) // less than it ever held
}

// TestLedger: where the tracer saw a process from its birth its ledger is the figure; else NVML's is. Who only looks at the device is no workload.
func TestLedger(t *testing.T) {
	b := NewBuilder(Config{})
	b.Apply(tick(t0, frame.Device{Load: load(1000), Processes: list(7, 100, 8, 200)}))
	held := []activity.Device{{UUID: "GPU-0", Used: frame.Some(uint64(150)), Peak: frame.Some(uint64(400)), Allocated: frame.Some(uint64(120))}}
	b.Apply(report(t0, activity.Report{Ledger: true, Processes: []activity.Process{
		{PID: 7, StartTime: 1, Compute: true, FromBirth: true, Devices: held}, {PID: 8, StartTime: 1, Compute: true, Devices: held},
		{PID: 9, StartTime: 1, FromBirth: true, Devices: held}, {PID: 10, StartTime: 1, Compute: true, FromBirth: true, Devices: held}}}))
	s := b.Snapshot(t0)
	closed(t, s)
	seen, based := find(s, 7), find(s, 8)
	if seen.Memory.V != 150 || seen.Peak.V != 400 || seen.Allocated.V != 120 || based.Memory.V != 200 || based.Peak.OK {
		t.Errorf("seen from birth %+v, based on NVML %+v", seen, based)
	}
	if find(s, 9) != nil || find(s, 10) == nil || find(s, 10).Memory.V != 150 {
		t.Errorf("a monitoring client %+v, a process that NVML does not list yet %+v", find(s, 9), find(s, 10))
	}
	if m := s.Devices[0].LedgerMismatch; m != frame.Some(uint64(50)) {
		t.Errorf("mismatch %v", m)
	}
	if pids := b.PIDs(); len(pids) != 3 {
		t.Errorf("PIDs %v", pids)
	}
	if s := b.Snapshot(t0.Add(10 * time.Second)); s.TracerUp || find(s, 10) != nil {
		t.Error("a report of 10 s ago is still believed")
	}
}

// TestRefused: access is lost with the last refused open of nvidiactl, until one succeeds; refusals of a single GPU do not count.
func TestRefused(t *testing.T) {
	b := NewBuilder(Config{Linger: time.Minute})
	b.Apply(dockerHas(t0, containers.Container{ID: idA, Name: "job"}))
	at := t0
	check := func(want time.Time, opens ...activity.Open) {
		t.Helper()
		at = at.Add(time.Second)
		b.Apply(report(at, activity.Report{Groups: []activity.Group{{Cgroup: "/docker/" + idA, Opens: opens}}}))
		for _, a := range b.Snapshot(at).Activity {
			if a.Container.ID == idA && !a.Counts.Refused.Equal(want) {
				t.Errorf("at %v: %v, want %v", at, a.Counts.Refused, want)
			}
		}
	}
	ok, gpu := activity.Open{Node: "ctl", Result: "ok", Count: 1}, activity.Open{Node: "gpu", Result: "eperm", Count: 5}
	check(time.Time{}, ok, gpu)
	lost := t0.Add(2 * time.Second)
	check(lost, ok, gpu, activity.Open{Node: "ctl", Result: "eperm", Count: 1})
	check(lost, ok, gpu, activity.Open{Node: "ctl", Result: "eperm", Count: 1})
	lost = t0.Add(4 * time.Second)
	check(lost, ok, activity.Open{Node: "ctl", Result: "eperm", Count: 2})
	ok.Count = 2
	check(time.Time{}, ok, activity.Open{Node: "ctl", Result: "eperm", Count: 3})
}

// TestGroups: counters of control groups go to their containers, of any depth; a group that ends leaves its own behind, and what is in no container is one.
func TestGroups(t *testing.T) {
	b := NewBuilder(Config{Linger: time.Minute})
	b.Apply(dockerHas(t0, containers.Container{ID: idA, Name: "job"}))
	group := func(path string, n uint64) activity.Group {
		return activity.Group{Cgroup: path, Started: n, Opens: []activity.Open{{Node: "gpu", Result: "eperm", Count: n}},
			Calls: []activity.Call{{Name: "rm_alloc", Count: n, Seconds: float64(n), Buckets: []uint64{0, n}, Errors: map[string]uint64{"no_memory": n}}}}
	}
	check := func(job, host uint64, gs ...activity.Group) {
		t.Helper()
		b.Apply(report(t0, activity.Report{Groups: gs}))
		got := map[string]*Counts{}
		for _, a := range b.Snapshot(t0).Activity {
			got[a.Container.Name] = a.Counts
		}
		for name, n := range map[string]uint64{"job": job, "": host} {
			c := got[name]
			if n == 0 && c == nil {
				continue
			}
			call := c.Calls["rm_alloc"]
			if c.Started != n || c.Opens[OpenKind{"gpu", "eperm"}] != n || call.Count != n || call.Seconds != float64(n) || call.Buckets[1] != n || call.Errors["no_memory"] != n {
				t.Errorf("%q: %+v, call %+v, want %d of each", name, c, call, n)
			}
		}
	}
	check(3, 5, group("/docker/"+idA, 1), group("/docker/"+idA+"/sub", 2), group("/user.slice", 5))
	check(4, 9, group("/docker/"+idA, 2), group("/user.slice", 5), group("/user.slice", 4)) // of two with one name, the sum
	check(5, 10, group("/docker/"+idA, 1), group("/system.slice", 1))                       // a tracer that began anew
	check(0, 10)
}

// TestXidOnce: NVML and the tracer tell of the same Xids, in either order, and the tracer tells of each several times.
func TestXidOnce(t *testing.T) {
	told := 0
	b := NewBuilder(Config{OnXid: func(XidReport) { told++ }})
	b.Apply(tick(t0, frame.Device{Load: load(1), Info: &frame.Info{PCIBusID: "0000:0a:00.0"}}))
	xid := func(s int, code uint64) activity.Xid {
		return activity.Xid{Time: t0.Add(time.Duration(s) * time.Second).UnixNano(), PCIBusID: "0000:0a:00.0", Code: code}
	}
	event := func(s int, code uint64) {
		at := t0.Add(time.Duration(s) * time.Second).UnixNano()
		b.Apply(input.Input{Time: at, Frame: &frame.Frame{Events: []frame.Event{{Time: at, UUID: "GPU-0", Kind: "xid", Value: code}}}})
	}
	event(0, 13)
	b.Apply(report(t0, activity.Report{Xids: []activity.Xid{xid(1, 13), xid(2, 13), xid(2, 79)}}))
	b.Apply(report(t0, activity.Report{Xids: []activity.Xid{xid(1, 13), xid(2, 13), xid(2, 79), xid(60, 31)}}))
	event(3, 13)
	event(70, 79) // a minute later: another one
	x := b.Snapshot(t0).Devices[0].Xids
	if x[13].Count != 2 || x[79].Count != 2 || x[31].Count != 1 || told != 5 {
		t.Fatalf("%+v, told %d times", x, told)
	}
}

// TestXidProcess: an error report is told with the process that the driver named and its container, also when NVML spoke first.
func TestXidProcess(t *testing.T) {
	var told []XidReport
	b := NewBuilder(Config{OnXid: func(x XidReport) { told = append(told, x) }})
	b.Apply(tick(t0, frame.Device{Load: load(1), Info: &frame.Info{PCIBusID: "0000:0a:00.0"}}))
	id, inner := strings.Repeat("ab", 32), strings.Repeat("cd", 32) // an engine in a container: ours knows the outer one
	b.Apply(input.Input{Time: t0.UnixNano(), Containers: &input.Containers{List: []containers.Container{{ID: id, Name: "train", Image: "torch"}}}})
	b.Apply(input.Input{Time: t0.UnixNano(), Processes: &input.Processes{Asked: []int{7}, List: []processes.Process{{PID: 7, StartTime: 1, Comm: "python", Container: inner, Cgroup: "/docker/" + id + "/docker/" + inner}}}})
	at := t0.UnixNano()
	b.Apply(input.Input{Time: at, Frame: &frame.Frame{Events: []frame.Event{{Time: at, UUID: "GPU-0", Kind: "xid", Value: 31}}}})
	x := activity.Xid{Time: at, PCIBusID: "0000:0a:00.0", Code: 31, PID: 7, Message: "pid=7, name=python, MMU Fault"}
	for range 2 {
		b.Apply(report(t0, activity.Report{Xids: []activity.Xid{x}}))
	}
	if len(told) != 2 || told[0].Process.PID != 0 || told[0].UUID != "GPU-0" {
		t.Fatalf("%+v", told)
	}
	if got := told[1]; got.Process.Comm != "python" || got.Container.Name != "train" || got.Message != x.Message || got.Code != 31 {
		t.Errorf("%+v", got)
	}
	if n := b.Snapshot(t0).Devices[0].Xids[31].Count; n != 1 {
		t.Errorf("counted %d times", n)
	}
}

// TestThrottle: the driver's own counters are used where it has them, under the names of the reasons.
func TestThrottle(t *testing.T) {
	b := NewBuilder(Config{})
	for i := range 11 {
		at := t0.Add(time.Duration(i) * time.Second)
		d := frame.Device{Load: load(1)}
		d.Load.Throttle = frame.Some(uint64(0x84)) // power cap and power brake, both always on by the mask
		if i%10 == 0 {
			d.Health = &frame.Health{ThrottleSeconds: map[string]float64{"hw_power_brake_slowdown": 100 + float64(i)/4}}
		}
		b.Apply(tick(at, d))
	}
	got := b.Snapshot(t0.Add(10 * time.Second)).Devices[0].Throttled
	if got["hw_power_brake"] != 2.5 || got["sw_power_cap"] != 10 || len(got) != len(throttleReasons) {
		t.Fatalf("%v", got)
	}
}

// TestSamplesOnce: a sample that is delivered again, or that cannot be, is not counted; and no snapshot changes afterwards.
func TestSamplesOnce(t *testing.T) {
	b := NewBuilder(Config{})
	at := t0.UnixMicro()
	d := frame.Device{Load: load(1), Samples: &frame.Samples{Power: []frame.Sample{{Time: at - 3, Value: 100}, {Time: at - 2, Value: 700}, {Time: at - 1, Value: -5}},
		Utilization: []frame.Sample{{Time: at - 2, Value: 0}, {Time: at - 1, Value: 90}, {Time: at + 1e9, Value: 50}, {Time: at, Value: 101}}}}
	b.Apply(tick(t0, d))
	first := b.Snapshot(t0).Devices[0]
	b.Apply(input.Input{Time: t0.UnixNano(), Source: &input.Source{Name: input.SourceNVML}}) // a worker that was replaced
	b.Apply(tick(t0, d))
	d.Samples = &frame.Samples{Utilization: []frame.Sample{{Time: at + 200_000, Value: 30}}}
	b.Apply(tick(t0.Add(time.Second), d))
	last := b.Snapshot(t0.Add(time.Second)).Devices[0]
	if first.Power.Count != 2 || first.Power.Sum != 800 || last.Power.Count != 2 || first.Utilization.Count != 2 || first.Utilization.Zero != 1 ||
		last.Utilization.Count != 3 || last.Utilization.Sum != 120 {
		t.Fatalf("power %+v, utilisation first %+v, last %+v", last.Power, first.Utilization, last.Utilization)
	}
}

// TestNoLinger: with no linger time a gone process leaves nothing.
func TestNoLinger(t *testing.T) {
	b := NewBuilder(Config{})
	b.Apply(tick(t0, frame.Device{Load: load(100), Processes: list(7, 50)}))
	b.Apply(procs(t0, processes.Process{PID: 7, StartTime: 1}))
	if find(b.Snapshot(t0), 7) == nil {
		t.Fatal("no process")
	}
	b.Apply(tick(t0, frame.Device{Load: load(100), Processes: list()}))
	if w := find(b.Snapshot(t0), 7); w != nil {
		t.Fatalf("%+v", w)
	}
}
