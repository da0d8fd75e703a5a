// Package hosttest generates hosts for tests: GPUs, containers and processes that come and go, with all that may go wrong between them and the exporter.
package hosttest

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/processes"
	"gpu-exporter/nvml/frame"
	"gpu-exporter/tracer/activity"
)

var start = time.Unix(1_800_000_000, 0)

// Host is a generated host: GPUs, containers and processes that come and go.
type Host struct {
	r         *rand.Rand
	Now       time.Time // of the latest step
	gpus      []*gpu
	procs     map[int]*proc
	ids       []string
	tracer    bool
	next      int
	traceBase uint64 // what each control group has counted
}

type gpu struct {
	index    int
	mig      bool
	energy   float64
	throttle float64
	since    int64
	// What the driver has of it at all.
	hasSamples, hasEnergy, hasPCIe bool
}

type proc struct {
	pid        int
	start      uint64
	gpus       []int
	container  int // index into ids, or -1
	compute    bool
	fromBirth  bool
	mem        uint64
	htod, dtoh uint64
	cpu        float64
}

// Self and Worker are the PIDs of the exporter and its worker, which NVML lists as it does others.
const (
	Self   = 100
	Worker = 101
)

// New returns the host of a seed.
func New(seed uint64) *Host {
	r := rand.New(rand.NewPCG(seed, 1))
	h := &Host{r: r, Now: start, procs: map[int]*proc{}, tracer: r.IntN(4) > 0, next: 100}
	for i := range 1 + r.IntN(16) {
		h.gpus = append(h.gpus, &gpu{index: i, mig: r.IntN(5) == 0, energy: r.Float64() * 1e9, since: start.UnixMicro(),
			hasSamples: r.IntN(5) > 0, hasEnergy: r.IntN(5) > 0, hasPCIe: r.IntN(3) > 0})
	}
	for i := range r.IntN(20) {
		h.ids = append(h.ids, fmt.Sprintf("%012x%052d", i+1, 0))
	}
	for range r.IntN(501) {
		h.spawn()
	}
	return h
}

func (h *Host) spawn() {
	pid := h.next
	if h.r.IntN(10) == 0 {
		pid = 100 + h.r.IntN(h.next-99) // perhaps one that was used before
	}
	if h.procs[pid] != nil {
		return
	}
	h.next++
	p := &proc{pid: pid, start: uint64(h.next), container: h.r.IntN(len(h.ids)+1) - 1, compute: h.r.IntN(10) > 0, fromBirth: h.r.IntN(3) > 0}
	for range 1 + h.r.IntN(2) {
		p.gpus = append(p.gpus, h.r.IntN(len(h.gpus)))
	}
	h.procs[pid] = p
}

// sorted returns the processes in an order that does not change from run to run.
func (h *Host) sorted() []*proc {
	return slices.SortedFunc(maps.Values(h.procs), func(x, y *proc) int { return cmp.Compare(x.pid, y.pid) })
}

func (h *Host) in(i input.Input) input.Input {
	i.Time = h.Now.UnixNano()
	return i
}

// Step lets a second pass and returns what the sources say.
func (h *Host) Step() (list []input.Input) {
	first := h.Now.Equal(start)
	h.Now = h.Now.Add(time.Second)
	if first {
		defer func() { list = append([]input.Input{h.in(input.Input{Host: &input.Host{Self: []int{Self}}})}, list...) }()
	}
	for _, p := range h.sorted() {
		p.mem = uint64(h.r.IntN(1 << 30))
		p.htod += uint64(h.r.IntN(1 << 33))
		p.dtoh += uint64(h.r.IntN(1 << 20))
		p.cpu += h.r.Float64()
		if h.r.IntN(20) == 0 {
			delete(h.procs, p.pid)
		}
	}
	for range h.r.IntN(1 + len(h.procs)/10) {
		h.spawn()
	}
	if h.r.IntN(3) == 0 {
		h.spawn()
	}
	var cs []containers.Container
	for i, id := range h.ids {
		if h.r.IntN(50) > 0 {
			cs = append(cs, containers.Container{ID: id, Name: fmt.Sprint("c", i)})
		}
	}
	list = append(list, h.in(input.Input{Source: &input.Source{Name: input.SourceDocker, Up: h.r.IntN(10) > 0}}), h.in(input.Input{Containers: &input.Containers{List: cs}}))
	if h.r.IntN(15) == 0 { // a worker that was replaced
		list = append(list, h.in(input.Input{Source: &input.Source{Name: input.SourceNVML, PID: Worker}}))
	} else {
		list = append(list, h.in(input.Input{Source: &input.Source{Name: input.SourceNVML, Up: true, PID: Worker}}))
	}
	for _, g := range h.gpus {
		list = append(list, h.in(input.Input{Frame: h.frame(g)}))
	}
	if h.tracer {
		list = append(list, h.in(input.Input{Tracer: h.report()}))
	}
	facts := &input.Processes{}
	for pid := range 50 {
		facts.Asked = append(facts.Asked, 100+pid) // some of them gone
	}
	for _, p := range h.sorted() {
		if h.r.IntN(10) == 0 {
			continue // newer than the last look at /proc
		}
		facts.Asked = append(facts.Asked, p.pid)
		facts.List = append(facts.List, processes.Process{PID: p.pid, StartTime: p.start, Comm: "c", Cgroup: h.cgroup(p), Container: containers.FromCgroup(h.cgroup(p)), CPUSeconds: p.cpu})
	}
	for i := range list {
		j := h.r.IntN(i + 1) // in any order
		list[i], list[j] = list[j], list[i]
	}
	return append(list, h.in(input.Input{Processes: facts}))
}

func (h *Host) cgroup(p *proc) string {
	if p.container < 0 {
		return "/user.slice"
	}
	return "/docker/" + h.ids[p.container]
}

func (h *Host) frame(g *gpu) *frame.Frame {
	r := h.r
	d := &frame.Device{Index: g.index, UUID: fmt.Sprintf("GPU-%d", g.index), State: frame.StateOK}
	f := &frame.Frame{Time: h.Now.UnixNano(), Device: d}
	if r.IntN(40) == 0 {
		d.State = frame.StateLost
		return f
	}
	d.Info = &frame.Info{PCIBusID: fmt.Sprintf("0000:%02x:00.0", g.index), Minor: frame.Some(g.index)}
	d.Load = &frame.Load{MemoryUsed: frame.Some(uint64(r.IntN(1 << 36))), MemoryTotal: frame.Some(uint64(1 << 40)), Throttle: frame.Some(uint64(r.IntN(512)))}
	d.Processes = &frame.Processes{List: []frame.Process{}}
	if g.mig {
		d.MIG = []frame.MIG{{UUID: "MIG-a", GPUInst: 1}, {UUID: "MIG-b", GPUInst: 2}}
	}
	for _, p := range h.sorted() {
		for _, i := range p.gpus {
			if i != g.index || !p.compute && r.IntN(2) == 0 {
				continue
			}
			e := frame.Process{PID: p.pid, Compute: true}
			if r.IntN(20) > 0 {
				e.MemoryUsed = frame.Some(p.mem)
			}
			if m := r.IntN(3); g.mig && m < 2 {
				d.MIG[m].Processes = append(d.MIG[m].Processes, e)
			} else {
				d.Processes.List = append(d.Processes.List, e)
			}
		}
	}
	if g.hasSamples && r.IntN(2) == 0 {
		until := h.Now.UnixMicro() - int64(r.IntN(1_000_000))
		if until > g.since {
			d.Samples = &frame.Samples{ProcessSince: g.since, ProcessUntil: until, Power: []frame.Sample{{Time: until, Value: r.Float64() * 700}, {Time: until - 20_000, Value: -1}},
				Utilization: []frame.Sample{{Time: until, Value: r.Float64() * 110}}}
			for _, p := range h.sorted() {
				d.Samples.Process = append(d.Samples.Process, frame.ProcessSample{PID: p.pid, Time: g.since + r.Int64N(until-g.since) + 1, SM: r.Float64() * 120})
			}
			g.since = until
		}
	}
	g.energy += r.Float64() * 700
	if g.hasEnergy && r.IntN(4) == 0 {
		if r.IntN(10) == 0 {
			g.energy = r.Float64() * 100 // the driver was loaded anew
		}
		d.Energy = frame.Some(g.energy)
	}
	if g.hasPCIe && r.IntN(2) == 0 {
		d.PCIe = &frame.PCIe{Source: "gpm", RX: frame.Some(uint64(r.IntN(1 << 34))), TX: frame.Some(uint64(r.IntN(1 << 34)))}
	}
	if r.IntN(5) == 0 {
		if g.throttle += r.Float64(); r.IntN(10) == 0 {
			g.throttle = 0
		}
		d.Health = &frame.Health{ThrottleSeconds: map[string]float64{"sw_power_cap": g.throttle, "hw_power_brake_slowdown": g.throttle}}
	}
	return f
}

// report is what a tracer with losses says; now and then it is replaced, and counts from nothing.
func (h *Host) report() *activity.Report {
	r := h.r
	rep := &activity.Report{Time: h.Now.UnixNano(), Mode: "fentry", Ledger: r.IntN(10) > 0}
	if h.traceBase += uint64(r.IntN(1000)); r.IntN(30) == 0 {
		h.traceBase = 0
		for _, p := range h.sorted() {
			p.htod, p.dtoh = 0, 0
		}
	}
	for _, p := range h.sorted() {
		if r.IntN(100) == 0 {
			continue // its open was lost
		}
		q := activity.Process{PID: p.pid, StartTime: p.start, Comm: "c", Cgroup: h.cgroup(p), Compute: p.compute, FromBirth: p.fromBirth && r.IntN(50) > 0, HtoD: p.htod, DtoH: p.dtoh}
		for _, i := range p.gpus {
			a := activity.Device{UUID: fmt.Sprintf("GPU-%d", i)}
			switch r.IntN(10) {
			case 0:
				a = activity.Device{Minor: frame.Some(i)}
			case 1:
				a = activity.Device{}
			}
			if q.FromBirth {
				a.Used, a.Peak, a.Allocated = frame.Some(p.mem), frame.Some(p.mem*2), frame.Some(p.mem/2)
			}
			q.Devices = append(q.Devices, a)
		}
		rep.Processes = append(rep.Processes, q)
	}
	for i, id := range h.ids {
		n := h.traceBase * uint64(i+1)
		for _, sub := range []string{"", "/sub"} {
			rep.Groups = append(rep.Groups, activity.Group{Cgroup: "/docker/" + id + sub, Started: n, Launches: n, Exited: map[string]uint64{"exit": n},
				Opens: []activity.Open{{Node: "gpu", Result: "ok", Count: n}}, Calls: []activity.Call{{Name: "rm_alloc", Count: n, Seconds: float64(n), Buckets: []uint64{n}}}})
		}
	}
	return rep
}
