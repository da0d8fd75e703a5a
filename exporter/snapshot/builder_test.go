package snapshot

import (
	"fmt"
	"testing"
	"time"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/processes"
	"gpu-exporter/nvml/frame"
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

// TestStale: a reading older than three intervals is dropped, and the device says so.
func TestStale(t *testing.T) {
	b := NewBuilder(Config{})
	b.Apply(tick(t0, frame.Device{Load: load(100), Processes: list(7, 50)}))
	s := b.Snapshot(t0.Add(4 * time.Second))
	if s.Devices[0].Load != nil || s.Devices[0].State == frame.StateOK || len(s.Workloads) != 0 && s.Workloads[0].Memory.OK {
		t.Fatalf("stale readings shown: %+v %+v", s.Devices[0], s.Workloads)
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
