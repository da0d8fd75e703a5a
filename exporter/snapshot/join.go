package snapshot

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/input"
	"gpu-exporter/nvml/frame"
	"gpu-exporter/tracer/activity"
)

// Snapshot returns the picture at now.
func (b *Builder) Snapshot(now time.Time) *Snapshot {
	s := &Snapshot{Time: now, Recorded: b.cfg.Recorded, Host: b.host, Sources: maps.Clone(b.sources), Library: b.library, Running: b.containers}
	for _, name := range slices.Sorted(maps.Keys(b.calls)) {
		s.Calls = append(s.Calls, *b.calls[name])
	}
	known := make(map[string]*containers.Container, len(b.containers))
	for i := range b.containers {
		known[b.containers[i].ID] = &b.containers[i]
	}
	self := map[int]bool{}
	for _, pid := range b.host.Self {
		self[pid] = true
	}
	for _, src := range b.sources {
		if src.PID != 0 {
			self[src.PID] = true
		}
	}
	s.Tracer, s.TracerUp = b.tracer.report, b.tracerUp(now)
	var held map[*device]map[int]activity.Device
	settle := time.Duration(0) // without probes the rest is all there is
	if s.TracerUp {
		held = b.held()
		settle = pcieSettle
	} else {
		b.tracer.processes = nil
	}
	used := map[string]map[string]int{} // container id -> device UUID -> processes
	var gpus []containers.GPU
	most := len(b.devices)
	for _, d := range b.devices {
		most += len(d.workloads)
	}
	s.Workloads = make([]Workload, 0, most)
	for _, i := range slices.Sorted(maps.Keys(b.devices)) {
		d := b.devices[i]
		out := d.Device
		if !b.fresh(now, d.loadAt, 0) {
			out.Load, out.MIG = nil, nil
			if d.State == frame.StateOK {
				out.State, out.Reason = frame.StateError, "no reading for three intervals"
			}
		}
		if !b.fresh(now, d.healthAt, d.healthPeriod) {
			out.Health, out.NVLink = nil, nil
		}
		if !b.fresh(now, d.gpmAt, d.gpmPeriod) {
			out.GPM = nil
		}
		out.Throttled, out.Xids = maps.Clone(d.Throttled), maps.Clone(d.Xids)
		out.MaxUtilization, out.MaxSMActive = b.highest(now, d.utilization), b.highest(now, d.smActive)
		if d.State == frame.StateOK {
			g := containers.GPU{UUID: d.UUID, Index: d.Index, Minor: -1, PCIBusID: d.Info.PCIBusID}
			for i, m := range d.MIG {
				g.MIG = append(g.MIG, containers.MIG{UUID: m.UUID, Index: i, GI: m.GPUInst, CI: m.CIInst})
			}
			if d.Info.Minor.OK {
				g.Minor = d.Info.Minor.V
			}
			gpus = append(gpus, g)
		}
		n := len(s.Devices)
		ws := b.workloads(now, d, n, known, self, held[d])
		on := map[string]bool{}
		for _, w := range ws {
			if id := w.Container.ID; id != "" && w.Alive {
				if used[id] == nil {
					used[id] = map[string]int{}
				}
				used[id][d.UUID]++
				on[id] = true
			}
		}
		out.Containers = len(on)
		rest := Workload{Device: n, Alive: true}
		if out.Load != nil && out.Load.MemoryUsed.OK && b.fresh(now, d.procsAt, 0) {
			// NVML reads the device before its processes: when they hold more than it said, its figure is the older one.
			var sum uint64
			for _, w := range ws {
				sum += w.Memory.V
			}
			load := *out.Load
			load.MemoryUsed.V = max(load.MemoryUsed.V, sum)
			out.Load = &load
			rest.Memory = frame.Some(load.MemoryUsed.V - sum)
		}
		if s.TracerUp && s.Tracer.Ledger && b.fresh(now, d.procsAt, 0) {
			out.LedgerMismatch = d.mismatch
		}
		if d.energy.raw.OK {
			out.Energy, rest.Energy = frame.Some(d.energy.total), frame.Some(d.energy.rest)
		}
		var copied [2]uint64
		for _, w := range ws {
			copied[toDevice] += w.HtoD.V
			copied[fromDevice] += w.DtoH.V
		}
		for i, f := range []struct{ device, rest *frame.Opt[uint64] }{{&out.PCIeRX, &rest.HtoD}, {&out.PCIeTX, &rest.DtoH}} {
			if *f.device = d.pcie[i].close(now, copied[i], settle); f.device.OK || d.pcie[i].rest > 0 { // what gone processes copied stays in any case
				*f.rest = frame.Some(d.pcie[i].rest)
			}
		}
		if rest.Memory.OK || rest.Energy.OK || rest.HtoD.OK || rest.DtoH.OK {
			ws = append(ws, rest)
		}
		s.Past = append(s.Past, d.pasts(n, known, ws)...)
		s.Devices = append(s.Devices, out)
		s.Workloads = append(s.Workloads, ws...)
	}
	for _, c := range b.containers {
		sc := Container{Container: c, Assigned: containers.Resolve(c, gpus), Processes: used[c.ID]}
		if len(c.Requests) > 0 || len(sc.Assigned) > 0 || len(sc.Processes) > 0 {
			s.Containers = append(s.Containers, sc)
		}
	}
	slices.SortFunc(s.Containers, func(x, y Container) int { return cmp.Compare(x.ID, y.ID) })
	s.Activity = b.activity()
	for id, gone := range b.goneAt {
		if b.counts[id] == nil && now.Sub(gone) > b.cfg.Linger+time.Minute {
			delete(b.named, id)
			delete(b.goneAt, id)
		}
	}
	return s
}

// highest returns the highest sample of the window.
func (b *Builder) highest(now time.Time, list []frame.Sample) (most frame.Opt[float64]) {
	oldest := now.Add(-b.cfg.Window).UnixMicro()
	for _, s := range list {
		if s.Time >= oldest {
			most = frame.Some(max(most.V, s.Value))
		}
	}
	return most
}

// pasts lists what the dropped processes of containers that still run, or still have a process among ws, had counted, and last what all others had.
func (d *device) pasts(n int, known map[string]*containers.Container, ws []Workload) []Workload {
	if len(d.past) == 0 {
		return nil
	}
	names := map[string]containers.Container{}
	for id := range d.past {
		if c := known[id]; c != nil {
			names[id] = *c
		}
	}
	for _, w := range ws {
		if w.Container.ID != "" && d.past[w.Container.ID] != nil {
			names[w.Container.ID] = w.Container
		}
	}
	var out []Workload
	show := func(p *past, c containers.Container) {
		// What was never counted is absent, not 0.
		out = append(out, Workload{Device: n, Container: c, Busy: positive(p.busy), Energy: positive(p.energy), CPU: positive(p.cpu),
			HtoD: positive(p.copied[toDevice]), DtoH: positive(p.copied[fromDevice])})
	}
	for _, id := range slices.Sorted(maps.Keys(d.past)) {
		p := d.past[id]
		switch c, ok := names[id]; {
		case ok:
			show(p, c)
		case id != "":
			delete(d.past, id)
			others := d.pastOf("")
			others.busy, others.cpu = Microseconds(others.busy+p.busy), Microseconds(others.cpu+p.cpu)
		}
	}
	if p := d.past[""]; p != nil {
		show(p, containers.Container{})
	}
	return out
}

func positive[T uint64 | float64](v T) (o frame.Opt[T]) {
	if v > 0 {
		o = frame.Some(v)
	}
	return o
}

// workloads lists the processes of one device, living and lingering, and drops those that are to be shown no more.
func (b *Builder) workloads(now time.Time, d *device, n int, known map[string]*containers.Container, self map[int]bool, held map[int]activity.Device) []Workload {
	listed := map[int]frame.Process{}
	if b.fresh(now, d.procsAt, 0) {
		for _, p := range d.list {
			// A process with several MIG instances counts with all of them.
			if have, ok := listed[p.PID]; ok {
				p.MemoryUsed = frame.Sum(p.MemoryUsed, have.MemoryUsed)
			}
			listed[p.PID] = p
		}
	}
	out, keys := make([]Workload, 0, len(d.workloads)+1), make([]key, 0, len(d.workloads)) // and what no process accounts for
	for _, k := range d.sortedKeys() {
		w := d.workloads[k]
		p, inList := listed[k.pid]
		a, holds := held[k.pid]
		traced := b.tracer.processes[k.pid]
		_, inProc := b.processes[k.pid]
		facts, ok := b.facts(k.pid)
		alive := inList || holds
		if ok && k.start != 0 && facts.StartTime != k.start {
			alive = false // the PID is another process's now
		}
		if !inProc && b.asked[k.pid] {
			alive = false // /proc no longer has it
		}
		if self[k.pid] || alive && monitoring(traced, inList) {
			d.leave(w)
			continue
		}
		if alive && ok {
			if id := b.containerOf(facts); id != w.container {
				d.leave(w) // what it counted so far was counted elsewhere, and stays there
				w.container = id
			}
			w.facts = facts
		}
		c := containers.Container{ID: w.container}
		switch running := known[w.container]; {
		case running != nil:
			c = *running
			w.named, w.lastContainer = true, c
		case w.named:
			c = w.lastContainer
			if b.sources[input.SourceDocker].Up {
				alive = false // Docker said that the container ended: its processes are gone or going
			}
		}
		if alive {
			w.goneAt = time.Time{}
		} else if w.goneAt.IsZero() {
			w.goneAt = now
		}
		if !alive && now.Sub(w.goneAt) >= b.cfg.Linger {
			d.leave(w)
			delete(d.workloads, k)
			continue
		}
		if !alive && !w.shown {
			continue // a name in a sample and nothing else: no process was ever seen
		}
		w.shown = true
		o := Workload{Device: n, PID: k.pid, StartTime: k.start, Container: c, Comm: w.facts.Comm, Command: w.facts.Command, Alive: alive}
		if facts, ok := b.processes[k.pid]; ok && alive {
			w.cpu = frame.Some(max(w.cpu.V, facts.CPUSeconds))
		}
		if w.cpu.OK {
			o.CPU = frame.Some(Microseconds(w.cpu.V - w.cpuLeft))
		}
		if d.sampled || w.busy > 0 {
			o.Busy = frame.Some(Microseconds(w.busy))
		}
		if o.Busy.OK && d.energy.raw.OK || w.energy > 0 {
			o.Energy = frame.Some(w.energy)
		}
		if w.copies {
			o.HtoD, o.DtoH = frame.Some(w.copied[toDevice]), frame.Some(w.copied[fromDevice])
		}
		if alive {
			b.gauges(now, d, w, &o, p, a, traced)
		}
		// Labels name a process by its PID alone, so a PID that is used again has one series: the living process's, else the younger one's.
		if i := len(out) - 1; i >= 0 && out[i].PID == k.pid {
			if out[i].Alive && !alive {
				d.leave(w)
				delete(d.workloads, k)
				continue
			}
			d.leave(d.workloads[keys[i]])
			delete(d.workloads, keys[i])
			out, keys = out[:i], keys[:i]
		}
		out, keys = append(out, o), append(keys, k)
	}
	return out
}

// gauges fills in what is only shown of the living.
func (b *Builder) gauges(now time.Time, d *device, w *workload, o *Workload, p frame.Process, a activity.Device, traced *activity.Process) {
	o.Memory, o.Allocated = p.MemoryUsed, a.Allocated
	if traced != nil && traced.FromBirth && b.tracer.report.Ledger && a.Used.OK {
		o.Memory = a.Used
		o.Peak = frame.Some(max(a.Peak.V, a.Used.V))
	}
	if d.sampled && b.fresh(now, d.samplesAt, d.samplesPeriod) {
		o.Utilization, o.MemoryBW = frame.Some(w.mean.SM), frame.Some(w.mean.Memory)
		o.Encoder, o.Decoder = frame.Some(w.mean.Enc), frame.Some(w.mean.Dec)
		o.MaxUtilization = frame.Some(0.0)
		for _, x := range w.window {
			o.MaxUtilization.V = max(o.MaxUtilization.V, x.SM)
		}
	}
}
