package snapshot

import (
	"fmt"
	"testing"
	"time"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/processes"
	"gpu-exporter/nvml/frame"
	"gpu-exporter/tracer/activity"
)

var t0 = time.Unix(1_800_000_000, 0)

const idA = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"

func tick(at time.Time, d frame.Device) input.Input {
	d.UUID, d.State = fmt.Sprintf("GPU-%d", d.Index), frame.StateOK
	return input.Input{Time: at.UnixNano(), Frame: &frame.Frame{Time: at.UnixNano(), Device: &d}}
}

func procs(at time.Time, list ...processes.Process) input.Input {
	p := &input.Processes{List: list}
	for _, x := range list {
		p.Asked = append(p.Asked, x.PID)
	}
	return input.Input{Time: at.UnixNano(), Processes: p}
}

func dockerHas(at time.Time, cs ...containers.Container) input.Input {
	return input.Input{Time: at.UnixNano(), Containers: &input.Containers{List: cs}}
}

func dockerUp(at time.Time) input.Input {
	return input.Input{Time: at.UnixNano(), Source: &input.Source{Name: input.SourceDocker, Up: true}}
}

func load(used uint64) *frame.Load {
	return &frame.Load{MemoryUsed: frame.Some(used), MemoryTotal: frame.Some(uint64(1 << 40))}
}

func list(pairs ...uint64) *frame.Processes {
	p := &frame.Processes{List: []frame.Process{}}
	for i := 0; i < len(pairs); i += 2 {
		p.List = append(p.List, frame.Process{PID: int(pairs[i]), MemoryUsed: frame.Some(pairs[i+1]), Compute: true})
	}
	return p
}

func find(s *Snapshot, pid int) *Workload {
	for i := range s.Workloads {
		if s.Workloads[i].PID == pid {
			return &s.Workloads[i]
		}
	}
	return nil
}

// TestBusyIsTheIntegral counts each sample once, however often it is delivered, and gives the exact integral.
func TestBusyIsTheIntegral(t *testing.T) {
	b := NewBuilder(Config{})
	us := t0.UnixMicro()
	batch := func(from, to int) *frame.Samples {
		s := &frame.Samples{ProcessSince: us + int64(from)*200_000, ProcessUntil: us + int64(to)*200_000}
		for i := from + 1; i <= to; i++ {
			s.Process = append(s.Process, frame.ProcessSample{PID: 7, Time: us + int64(i)*200_000, SM: float64(50 * (i % 2))})
		}
		return s
	}
	last := 0.0
	for i := range 10 {
		now := t0.Add(time.Duration(i+1) * 2 * time.Second)
		d := frame.Device{Load: load(100), Processes: list(7, 50), Samples: batch(i*10, (i+1)*10)}
		b.Apply(tick(now, d))
		b.Apply(tick(now, d)) // delivered twice
		b.Apply(procs(now, processes.Process{PID: 7, StartTime: 1}))
		w := find(b.Snapshot(now), 7)
		if w.Busy.V < last {
			t.Fatalf("busy fell from %v to %v", last, w.Busy.V)
		}
		last = w.Busy.V
	}
	if want := 20 * 0.25; last < want-1e-9 || last > want+1e-9 {
		t.Fatalf("busy %v s, want %v", last, want)
	}
	if w := find(b.Snapshot(t0.Add(20*time.Second)), 7); w.MaxUtilization.V != 50 {
		t.Fatalf("maximum %v, want 50", w.MaxUtilization.V)
	}
}

// TestGone: a container that ended has no gauge in the next snapshot, keeps its counters for the linger time, and then nothing.
func TestGone(t *testing.T) {
	b := NewBuilder(Config{Linger: 2 * time.Minute})
	c := containers.Container{ID: idA, Name: "job", Image: "image", Started: t0}
	d := frame.Device{Load: load(100), Processes: list(7, 50), Samples: &frame.Samples{ProcessSince: t0.UnixMicro(), ProcessUntil: t0.UnixMicro() + 200_000,
		Process: []frame.ProcessSample{{PID: 7, Time: t0.UnixMicro() + 200_000, SM: 80}}}}
	b.Apply(dockerUp(t0))
	b.Apply(dockerHas(t0, c))
	b.Apply(tick(t0, d))
	b.Apply(procs(t0, processes.Process{PID: 7, StartTime: 1, Cgroup: "/docker/" + idA, Container: idA, CPUSeconds: 1.25}))
	w := find(b.Snapshot(t0), 7)
	if w == nil || !w.Alive || w.Container.Name != "job" || w.Memory.V != 50 {
		t.Fatalf("before: %+v", w)
	}
	b.Apply(dockerHas(t0))
	s := b.Snapshot(t0.Add(10 * time.Millisecond))
	closed(t, s)
	w = find(s, 7)
	if w == nil || w.Alive || w.Memory.OK || !w.Busy.OK || w.CPU != frame.Some(1.25) || w.Container.Name != "job" {
		t.Fatalf("after the container's end: %+v", w)
	}
	if w := find(b.Snapshot(t0.Add(3*time.Minute)), 7); w != nil {
		t.Fatalf("after the linger time: %+v", w)
	}
}

// TestStale: a reading older than three of its intervals is dropped, and the device says so; what has a longer interval stays longer.
func TestStale(t *testing.T) {
	b := NewBuilder(Config{})
	b.Apply(tick(t0, frame.Device{Load: load(100), Processes: list(7, 50)}))
	s := b.Snapshot(t0.Add(4 * time.Second))
	if s.Devices[0].Load != nil || s.Devices[0].State == frame.StateOK || len(s.Workloads) != 0 && s.Workloads[0].Memory.OK {
		t.Fatalf("stale readings shown: %+v %+v", s.Devices[0], s.Workloads)
	}
	for i := range 21 { // health, GPM, samples and NVLink every 10 s, for 20 s
		at := t0.Add(time.Duration(i) * time.Second)
		d := frame.Device{Load: load(100), Processes: list(7, 50)}
		if i%10 == 0 {
			d.Health, d.NVLink, d.GPM = &frame.Health{PCIeGen: frame.Some(4)}, []frame.NVLink{{Link: 1}}, &frame.GPM{Ratio: map[string]float64{"sm_active": 1}}
			d.Samples = &frame.Samples{ProcessSince: at.Add(-10 * time.Second).UnixMicro(), ProcessUntil: at.UnixMicro(), Process: []frame.ProcessSample{{PID: 7, Time: at.UnixMicro(), SM: 50}}}
		}
		b.Apply(tick(at, d))
		b.Snapshot(at)
	}
	for after, want := range map[int]bool{29: true, 31: false} {
		at := t0.Add(time.Duration(20+after) * time.Second)
		b.Apply(tick(at, frame.Device{Load: load(100), Processes: list(7, 50)}))
		s := b.Snapshot(at)
		d, w := s.Devices[0], find(s, 7)
		if d.Load == nil || (d.Health != nil) != want || (d.NVLink != nil) != want || (d.GPM != nil) != want || w.Utilization.OK != want || !w.Busy.OK {
			t.Errorf("%d s after the last: load %v, health %v, NVLink %v, GPM %v, %+v", after, d.Load != nil, d.Health, d.NVLink, d.GPM, w)
		}
	}
}

// TestReusedPID: another process under the same PID starts from nothing.
func TestReusedPID(t *testing.T) {
	b := NewBuilder(Config{})
	sample := func(at time.Time) *frame.Samples {
		return &frame.Samples{ProcessSince: at.UnixMicro() - 200_000, ProcessUntil: at.UnixMicro(), Process: []frame.ProcessSample{{PID: 7, Time: at.UnixMicro(), SM: 100}}}
	}
	b.Apply(procs(t0, processes.Process{PID: 7, StartTime: 1, Comm: "old"}))
	b.Apply(tick(t0, frame.Device{Load: load(100), Processes: list(7, 50), Samples: sample(t0)}))
	b.Snapshot(t0)
	t1 := t0.Add(time.Second)
	b.Apply(procs(t1, processes.Process{PID: 7, StartTime: 2, Comm: "new"}))
	b.Apply(tick(t1, frame.Device{Load: load(100), Processes: list(7, 10)}))
	for _, w := range b.Snapshot(t1).Workloads {
		if w.PID == 7 && w.Alive && (w.Comm != "new" || w.Busy.V != 0 || w.Memory.V != 10) {
			t.Fatalf("the new process inherited: %+v", w)
		}
	}
}

// TestExitingGroup: of a process that was exiting when /proc was asked, the tracer knows the container; of an earlier process of that PID it does not.
func TestExitingGroup(t *testing.T) {
	for start, want := range map[uint64]string{1: idA, 2: ""} {
		b := NewBuilder(Config{})
		b.Apply(dockerHas(t0, containers.Container{ID: idA, Name: "job"}))
		b.Apply(procs(t0, processes.Process{PID: 7, StartTime: start, Comm: "python"}))
		b.Apply(report(t0, activity.Report{Processes: []activity.Process{{PID: 7, StartTime: 1, Cgroup: "/docker/" + idA, Compute: true}}}))
		b.Apply(tick(t0, frame.Device{Load: load(100), Processes: list(7, 50)}))
		if w := find(b.Snapshot(t0), 7); w == nil || w.Container.ID != want {
			t.Errorf("start %d: %+v, want container %q", start, w, want)
		}
	}
}

// TestNothingLeft: of 200 containers that came and went in a minute, with processes on the GPU, samples, copies, opens and names, no map keeps an entry
// once the linger time is over, nor of the PIDs and control groups.
func TestNothingLeft(t *testing.T) {
	b := NewBuilder(Config{Linger: 10 * time.Second})
	stays := containers.Container{ID: idA, Name: "stays"}
	b.Apply(dockerUp(t0))
	at := func(ms int) time.Time { return t0.Add(time.Duration(ms) * time.Millisecond) }
	sizes := func() map[string]int {
		d := b.devices[0]
		past := 0
		for id := range d.past {
			if id != "" { // one for all that are gone
				past++
			}
		}
		return map[string]int{"containers": len(b.containers), "processes": len(b.processes), "asked": len(b.asked), "named": len(b.named), "goneAt": len(b.goneAt), "counts": len(b.counts),
			"workloads": len(d.workloads), "past": past, "list": len(d.list), "traced": len(b.tracer.processes), "copied": len(b.tracer.copied), "groups": len(b.tracer.groups),
			"wanted": len(b.PIDs()), "devices": len(b.devices), "sources": len(b.sources)}
	}
	run := func(ms int, ids ...int) {
		now := at(ms)
		cs := []containers.Container{stays}
		facts := []processes.Process{{PID: 1000, StartTime: 1, Cgroup: "/docker/" + idA, Container: idA}}
		d := frame.Device{Load: load(1 << 30), Processes: list(1000, 50), Samples: &frame.Samples{ProcessSince: at(ms - 300).UnixMicro(), ProcessUntil: now.UnixMicro()}, Energy: frame.Some(float64(ms)),
			PCIe: &frame.PCIe{Source: "gpm", RX: frame.Some(uint64(100))}}
		r := activity.Report{Groups: []activity.Group{{Cgroup: "/docker/" + idA, Started: 1}}}
		for _, i := range ids {
			id := fmt.Sprintf("%064x", i)
			cs = append(cs, containers.Container{ID: id, Name: fmt.Sprint("c", i)})
			p := processes.Process{PID: 2000 + i, StartTime: uint64(i), Cgroup: "/docker/" + id, Container: id}
			facts = append(facts, p)
			d.Processes.List = append(d.Processes.List, frame.Process{PID: p.PID, MemoryUsed: frame.Some(uint64(10)), Compute: true})
			d.Samples.Process = append(d.Samples.Process, frame.ProcessSample{PID: p.PID, Time: now.UnixMicro(), SM: 50})
			r.Processes = append(r.Processes, activity.Process{PID: p.PID, StartTime: p.StartTime, Cgroup: p.Cgroup, Compute: true, HtoD: 10, Devices: []activity.Device{{UUID: "GPU-0"}}})
			r.Groups = append(r.Groups, activity.Group{Cgroup: p.Cgroup, Started: 1, Opens: []activity.Open{{Node: "gpu", Result: "ok", Count: 1}}})
		}
		b.Apply(dockerHas(now, cs...))
		b.Apply(procs(now, facts...))
		b.Apply(tick(now, d))
		b.Apply(report(now, r))
		closed(t, b.Snapshot(now))
	}
	run(0)
	before, most := sizes(), 0
	for i := range 200 {
		run((i+1)*300, i+1, i+2)
		most = max(most, len(b.devices[0].workloads))
	}
	for i := range 100 { // the linger time, and the minute for which a name is kept
		run(60_300 + i*1000)
	}
	if after := sizes(); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("after them %v, before %v", after, before)
	}
	if most < 20 {
		t.Errorf("at most %d processes lingered: the test tests nothing", most)
	}
}

// TestRenumbered: a driver that is loaded anew without a GPU gives its number to another. Each keeps what it counted, the missing one is lost, and both
// are themselves again when it is back, whichever is told of first. Two GPUs of one UUID that are read at a time stay two.
func TestRenumbered(t *testing.T) {
	for _, first := range []int{0, 1} {
		b, now := NewBuilder(Config{}), t0
		joules := []float64{1000, 5000}
		say := func(index int, uuid int) {
			now = now.Add(time.Second)
			joules[uuid] += 10
			b.Apply(input.Input{Time: now.UnixNano(), Frame: &frame.Frame{Device: &frame.Device{Index: index, UUID: fmt.Sprint("GPU-", uuid), State: frame.StateOK,
				Load: load(1), Energy: frame.Some(joules[uuid])}}})
		}
		reload := func() {
			b.Apply(input.Input{Time: now.UnixNano(), Source: &input.Source{Name: input.SourceNVML}})
			b.Apply(input.Input{Time: now.UnixNano(), Source: &input.Source{Name: input.SourceNVML, Up: true}})
		}
		want := func(index int, uuid int, state frame.State) {
			t.Helper()
			s := b.Snapshot(now)
			if len(s.Devices) != 2 {
				t.Fatalf("%d devices", len(s.Devices))
			}
			if d := s.Devices[index]; d.UUID != fmt.Sprint("GPU-", uuid) || d.Index != index || d.State != state || d.Energy.V != joules[uuid] {
				t.Errorf("at %d is %s (%d) %s with %v J, want GPU-%d %s with %v J", index, d.UUID, d.Index, d.State, d.Energy.V, uuid, state, joules[uuid])
			}
		}
		say(0, 0)
		say(1, 1)
		say(0, 0)
		reload()
		say(0, 1)
		want(0, 1, frame.StateOK)
		want(1, 0, frame.StateLost)
		reload()
		say(first, first)
		say(1-first, 1-first)
		want(0, 0, frame.StateOK)
		want(1, 1, frame.StateOK)
	}
	b := NewBuilder(Config{})
	for i := range 6 {
		b.Apply(input.Input{Time: t0.UnixNano(), Frame: &frame.Frame{Device: &frame.Device{Index: i % 2, UUID: "GPU-X", State: frame.StateOK, Load: load(uint64(i % 2))}}})
	}
	if s := b.Snapshot(t0); len(s.Devices) != 2 || s.Devices[0].Load.MemoryUsed.V != 0 || s.Devices[1].Load.MemoryUsed.V != 1 {
		t.Errorf("of two GPUs with one UUID there are %+v", s.Devices)
	}
}
