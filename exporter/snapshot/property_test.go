package snapshot

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/processes"
	"gpu-exporter/nvml/frame"
	"gpu-exporter/tracer/activity"
)

// closed fails unless, for memory, energy and PCIe bytes, the workloads of every device add up to the device, exactly.
func closed(t *testing.T, s *Snapshot) {
	t.Helper()
	for i, d := range s.Devices {
		var memory, rx, tx uint64
		var energy float64
		for _, w := range s.Workloads {
			if w.Device != i {
				continue
			}
			memory += w.Memory.V
			energy += w.Energy.V
			rx += w.HtoD.V
			tx += w.DtoH.V
		}
		if d.Load != nil && d.Load.MemoryUsed.OK && memory != d.Load.MemoryUsed.V {
			t.Fatalf("device %d: workloads hold %d, the device says %d", d.Index, memory, d.Load.MemoryUsed.V)
		}
		if d.Energy.OK && energy != d.Energy.V {
			t.Fatalf("device %d: workloads used %v J, the device says %v", d.Index, energy, d.Energy.V)
		}
		if d.PCIeRX.OK && rx != d.PCIeRX.V || d.PCIeTX.OK && tx != d.PCIeTX.V {
			t.Fatalf("device %d: workloads copied %d and %d, the device says %v and %v", d.Index, rx, tx, d.PCIeRX, d.PCIeTX)
		}
	}
}

// counters returns every counter of a snapshot under the name that its series would have.
func counters(s *Snapshot) map[string]float64 {
	m := map[string]float64{}
	for _, w := range s.Workloads {
		if w.PID != 0 && w.StartTime == 0 {
			continue // a PID that is used again is another process, and this may be either
		}
		id := fmt.Sprintf("device %d pid %d start %d ", w.Device, w.PID, w.StartTime)
		m[id+"busy"], m[id+"energy"], m[id+"htod"], m[id+"dtoh"] = w.Busy.V, w.Energy.V, float64(w.HtoD.V), float64(w.DtoH.V)
	}
	for i, d := range s.Devices {
		id := fmt.Sprintf("device %d ", i)
		m[id+"energy"], m[id+"rx"], m[id+"tx"] = d.Energy.V, float64(d.PCIeRX.V), float64(d.PCIeTX.V)
		for r, v := range d.Throttled {
			m[id+r] = v
		}
		if d.Power != nil {
			m[id+"power"] = float64(d.Power.Count)
		}
	}
	for _, a := range s.Activity {
		id := "container " + a.Container.ID + " "
		m[id+"started"], m[id+"launches"] = float64(a.Counts.Started), float64(a.Counts.Launches)
		for k, n := range a.Counts.Exited {
			m[id+k] = float64(n)
		}
		for k, n := range a.Counts.Opens {
			m[id+k.Node+k.Result] = float64(n)
		}
		for k, c := range a.Counts.Calls {
			m[id+k] = float64(c.Count)
			m[id+k+" s"] = c.Seconds
		}
	}
	return m
}

// host is a generated host: GPUs, containers and processes that come and go.
type host struct {
	r         *rand.Rand
	now       time.Time
	gpus      []*gpu
	procs     map[int]*proc
	ids       []string
	tracer    bool
	next      int
	traceBase uint64
}

type gpu struct {
	index    int
	mig      bool
	energy   float64
	throttle float64
	since    int64
	up       bool
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

func newHost(seed uint64) *host {
	r := rand.New(rand.NewPCG(seed, 1))
	h := &host{r: r, now: t0, procs: map[int]*proc{}, tracer: r.IntN(4) > 0, next: 100}
	for i := range 1 + r.IntN(16) {
		h.gpus = append(h.gpus, &gpu{index: i, mig: r.IntN(5) == 0, energy: r.Float64() * 1e9, since: t0.UnixMicro(), up: true})
	}
	for i := range r.IntN(20) {
		h.ids = append(h.ids, fmt.Sprintf("%064x", i+1))
	}
	for range r.IntN(501) {
		h.spawn()
	}
	return h
}

func (h *host) spawn() {
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
func (h *host) sorted() []*proc {
	return slices.SortedFunc(maps.Values(h.procs), func(x, y *proc) int { return cmp.Compare(x.pid, y.pid) })
}

func (h *host) in(i input.Input) input.Input {
	i.Time = h.now.UnixNano()
	return i
}

// step lets a second pass and returns what the sources say.
func (h *host) step() (list []input.Input) {
	h.now = h.now.Add(time.Second)
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
		list = append(list, h.in(input.Input{Source: &input.Source{Name: input.SourceNVML}}))
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

func (h *host) cgroup(p *proc) string {
	if p.container < 0 {
		return "/user.slice"
	}
	return "/docker/" + h.ids[p.container]
}

func (h *host) frame(g *gpu) *frame.Frame {
	r := h.r
	d := &frame.Device{Index: g.index, UUID: fmt.Sprintf("GPU-%d", g.index), State: frame.StateOK}
	f := &frame.Frame{Time: h.now.UnixNano(), Device: d}
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
	if r.IntN(2) == 0 {
		until := h.now.UnixMicro() - int64(r.IntN(1_000_000))
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
	if r.IntN(4) == 0 {
		if r.IntN(10) == 0 {
			g.energy = r.Float64() * 100 // the driver was loaded anew
		}
		d.Energy = frame.Some(g.energy)
	}
	if r.IntN(2) == 0 {
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
func (h *host) report() *activity.Report {
	r := h.r
	rep := &activity.Report{Time: h.now.UnixNano(), Mode: "fentry", Ledger: r.IntN(10) > 0}
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

// TestSumsClose generates hosts of 1 to 16 GPUs and 0 to 500 processes, with sharing, MIG, lost events and devices, PIDs used again, workers replaced and
// counters that start anew, and checks at every snapshot that the three sums close, that counters only grow, and that nothing is negative.
func TestSumsClose(t *testing.T) {
	hosts, steps := 25, 40
	if testing.Short() {
		hosts = 10
	}
	shared, copied, peaks := 0.0, uint64(0), 0
	for seed := range hosts {
		h := newHost(uint64(seed))
		b := NewBuilder(Config{Linger: time.Duration(seed%4) * 3 * time.Second})
		last := map[string]float64{}
		for range steps {
			for _, in := range h.step() {
				b.Apply(in)
			}
			s := b.Snapshot(h.now)
			closed(t, s)
			now := counters(s)
			for k, v := range now {
				if v < 0 || v != v || math.IsInf(v, 0) {
					t.Fatalf("seed %d: %s is %v", seed, k, v)
				}
				if v < last[k] {
					t.Fatalf("seed %d: %s fell from %v to %v", seed, k, last[k], v)
				}
			}
			last = now
			for _, w := range s.Workloads {
				if w.PID != 0 {
					shared += w.Energy.V
					copied += w.HtoD.V
					if w.Peak.OK {
						peaks++
					}
					if w.Peak.OK && w.Peak.V < w.Memory.V {
						t.Fatalf("seed %d: peak %d below the use %d", seed, w.Peak.V, w.Memory.V)
					}
				}
			}
		}
	}
	if shared == 0 || copied == 0 || peaks == 0 {
		t.Fatalf("the hosts tested nothing: %v J, %d bytes, %d peaks", shared, copied, peaks)
	}
}
