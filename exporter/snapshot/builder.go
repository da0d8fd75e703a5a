package snapshot

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/processes"
	"gpu-exporter/nvml/frame"
)

// Config sets the builder's time constants. Zero values take the defaults named.
type Config struct {
	Interval time.Duration // period of the cheap readings; 1 s
	Window   time.Duration // over which maxima are taken; 60 s
	Linger   time.Duration // for which the counters of a gone process stay; 2 min
}

// Builder keeps what the inputs said. It is used by one goroutine.
type Builder struct {
	cfg        Config
	host       input.Host
	sources    map[string]input.Source
	library    frame.Library
	devices    map[int]*device
	containers []containers.Container
	processes  map[int]processes.Process
	asked      map[int]bool
	calls      map[string]*frame.Call
}

// device is what is known of one GPU.
type device struct {
	Device
	loadAt, procsAt, healthAt, gpmAt, samplesAt time.Time
	samplesPeriod, healthPeriod, gpmPeriod      time.Duration
	list                                        []frame.Process
	workloads                                   map[key]*workload
	utilization                                 []frame.Sample // of the window
	sampled                                     bool
	throttleAt                                  time.Time
}

// key tells a process: a PID may be used again.
type key struct {
	pid   int
	start uint64
}

// workload is what is counted for a process on a device.
type workload struct {
	container     string
	facts         processes.Process
	busy          float64
	last          int64 // µs: the newest sample counted
	mean          frame.ProcessSample
	window        []frame.ProcessSample
	named         bool                 // Docker knew its container once
	lastContainer containers.Container // what Docker said of it last
	goneAt        time.Time            // zero: alive
}

// NewBuilder returns a builder that knows nothing yet.
func NewBuilder(c Config) *Builder {
	if c.Interval <= 0 {
		c.Interval = time.Second
	}
	if c.Window <= 0 {
		c.Window = time.Minute
	}
	if c.Linger < 0 {
		c.Linger = 0
	} else if c.Linger == 0 {
		c.Linger = 2 * time.Minute
	}
	return &Builder{cfg: c, sources: map[string]input.Source{}, devices: map[int]*device{}, processes: map[int]processes.Process{},
		asked: map[int]bool{}, calls: map[string]*frame.Call{}}
}

// Apply takes one fact.
func (b *Builder) Apply(in input.Input) {
	now := time.Unix(0, in.Time)
	switch {
	case in.Host != nil:
		b.host = *in.Host
	case in.Source != nil:
		b.sources[in.Source.Name] = *in.Source
		if in.Source.Name == input.SourceNVML && !in.Source.Up {
			for _, d := range b.devices {
				d.forget()
			}
		}
	case in.Containers != nil:
		b.containers = in.Containers.List
	case in.Processes != nil:
		clear(b.processes)
		clear(b.asked)
		for _, pid := range in.Processes.Asked {
			b.asked[pid] = true
		}
		for _, p := range in.Processes.List {
			b.processes[p.PID] = p
		}
	case in.Frame != nil:
		b.frame(now, in.Frame)
	}
}

func (b *Builder) frame(now time.Time, f *frame.Frame) {
	for _, c := range f.Calls {
		b.call(c)
	}
	for _, e := range f.Events {
		for _, d := range b.devices {
			if e.Kind != "xid" || d.UUID != e.UUID {
				continue
			}
			x := d.Xids[e.Value]
			x.Count++
			x.Last = time.Unix(0, e.Time)
			if d.Xids == nil {
				d.Xids = map[uint64]Xid{}
			}
			d.Xids[e.Value] = x
		}
	}
	if f.Library != nil {
		b.library = *f.Library
	}
	if f.Device != nil {
		b.device(now, f.Device)
	}
}

func (b *Builder) call(c frame.Call) {
	sum := b.calls[c.Name]
	if sum == nil {
		sum = &frame.Call{Name: c.Name, Buckets: make([]uint64, len(frame.CallBuckets)+1)}
		b.calls[c.Name] = sum
	}
	sum.Count += c.Count
	sum.Errors += c.Errors
	sum.Seconds += c.Seconds
	for i, n := range c.Buckets[:min(len(c.Buckets), len(sum.Buckets))] {
		sum.Buckets[i] += n
	}
}

// forget drops what must not be repeated once the device cannot be read; identity and counters stay.
func (d *device) forget() {
	d.Load, d.Health, d.GPM, d.list = nil, nil, nil, nil
	d.Energy = frame.Opt[float64]{}
	d.utilization, d.sampled = nil, false
}

func (b *Builder) device(now time.Time, f *frame.Device) {
	d := b.devices[f.Index]
	if d == nil || (f.UUID != "" && d.UUID != "" && d.UUID != f.UUID) {
		// A new index, or another board behind it.
		d = &device{workloads: map[key]*workload{}}
		b.devices[f.Index] = d
	}
	d.Index, d.State, d.Reason = f.Index, f.State, f.Reason
	if f.UUID != "" {
		d.UUID = f.UUID
	}
	if f.Info != nil {
		d.Info = *f.Info
	}
	if f.State == frame.StateLost || f.State == frame.StateHung || f.State == frame.StateAsleep {
		d.forget()
	}
	if f.Load != nil {
		d.throttle(now)
		d.Load, d.loadAt = f.Load, now
	}
	if f.Processes != nil {
		d.list, d.procsAt = f.Processes.List, now
	}
	if f.Health != nil {
		d.healthPeriod, d.healthAt = period(d.healthAt, now), now
		d.Health = f.Health
	}
	if f.GPM != nil {
		d.gpmPeriod, d.gpmAt = period(d.gpmAt, now), now
		d.GPM = f.GPM
	}
	if f.Energy.OK {
		d.Energy = f.Energy
	}
	if p := f.PCIe; p != nil {
		d.PCIeSource = p.Source
		if p.RX.OK {
			d.PCIeRX = frame.Some(d.PCIeRX.V + float64(p.RX.V))
		}
		if p.TX.OK {
			d.PCIeTX = frame.Some(d.PCIeTX.V + float64(p.TX.V))
		}
	}
	if f.Samples != nil {
		if f.Samples.ProcessUntil > 0 {
			d.samplesPeriod, d.samplesAt = period(d.samplesAt, now), now
		}
		b.samples(now, d, f.Samples)
	}
	for _, p := range d.list {
		b.workload(d, p.PID) // an entry for every listed process
	}
}

// period is how far apart two readings of a group are, within reason.
func period(last, now time.Time) time.Duration {
	if last.IsZero() {
		return 30 * time.Second
	}
	return min(max(now.Sub(last), time.Second), time.Minute)
}

// throttleReasons are the bits of nvmlClocksEventReasons that hold clocks down, by their label.
var throttleReasons = []struct {
	bit  uint64
	name string
}{{0x1, "gpu_idle"}, {0x2, "applications_clocks"}, {0x4, "sw_power_cap"}, {0x8, "hw_slowdown"}, {0x10, "sync_boost"}, {0x20, "sw_thermal_slowdown"},
	{0x40, "hw_thermal_slowdown"}, {0x80, "hw_power_brake"}, {0x100, "display_clocks"}}

// ThrottleReasons returns each reason with whether the mask has it.
func ThrottleReasons(mask uint64) map[string]bool {
	m := make(map[string]bool, len(throttleReasons))
	for _, r := range throttleReasons {
		m[r.name] = mask&r.bit != 0
	}
	return m
}

// throttle adds the time since the previous reading to the reasons that held then.
func (d *device) throttle(now time.Time) {
	if d.Load != nil && d.Load.Throttle.OK && !d.throttleAt.IsZero() && now.Sub(d.throttleAt) < time.Minute {
		if d.Throttled == nil {
			d.Throttled = map[string]float64{}
		}
		for name, on := range ThrottleReasons(d.Load.Throttle.V) {
			held := 0.0 // a reason that never held has a series of 0
			if on {
				held = max(0, now.Sub(d.throttleAt).Seconds())
			}
			d.Throttled[name] += held
		}
	}
	d.throttleAt = now
}

// workload returns the entry of a process, making it when it is new.
func (b *Builder) workload(d *device, pid int) *workload {
	facts := b.processes[pid]
	k := key{pid, facts.StartTime}
	if w := d.workloads[k]; w != nil {
		return w
	}
	// Known before /proc was read: the entry without a start time is the same process.
	if facts.StartTime != 0 {
		if w := d.workloads[key{pid: pid}]; w != nil {
			delete(d.workloads, key{pid: pid})
			d.workloads[k] = w
			return w
		}
	} else {
		for have, w := range d.workloads {
			if have.pid == pid && w.goneAt.IsZero() {
				return w
			}
		}
	}
	w := &workload{}
	d.workloads[k] = w
	return w
}

// usualSample is the driver's period, for a sample of which nothing tells the beginning.
const usualSample = 200_000 // µs

// samples counts each new process sample once. The value of a sample is the mean of its process since the time that the driver was asked from,
// or since the process's sample before it: driver 580 delivers one sample per process and call, and the same instant reads 99 % when asked
// from 2 s ago and 87 % from the start of its memory.
func (b *Builder) samples(now time.Time, d *device, s *frame.Samples) {
	if s.ProcessUntil > 0 {
		d.sampled = true
		for _, w := range d.workloads {
			w.mean = frame.ProcessSample{}
		}
		list := slices.Clone(s.Process)
		slices.SortStableFunc(list, func(x, y frame.ProcessSample) int { return cmp.Compare(x.Time, y.Time) })
		span := float64(s.ProcessUntil - s.ProcessSince)
		for _, p := range list {
			if p.PID <= 0 || p.SM < 0 || p.SM > 100 || p.SM != p.SM {
				continue
			}
			w := b.workload(d, p.PID)
			if p.Time <= w.last {
				continue
			}
			length := p.Time - max(s.ProcessSince, w.last)
			if span <= 0 || length <= 0 || length > int64(span) {
				length = usualSample
			}
			w.last = p.Time
			w.busy += p.SM / 100 * float64(length) / 1e6
			w.window = append(w.window, p)
			if span > 0 {
				share := min(float64(length)/span, 1)
				w.mean.SM = min(w.mean.SM+p.SM*share, 100)
				w.mean.Memory = min(w.mean.Memory+p.Memory*share, 100)
				w.mean.Enc = min(w.mean.Enc+p.Enc*share, 100)
				w.mean.Dec = min(w.mean.Dec+p.Dec*share, 100)
			}
		}
	}
	for _, u := range s.Utilization {
		if u.Value >= 0 && u.Value <= 100 {
			d.utilization = append(d.utilization, u)
		}
	}
	oldest := now.Add(-b.cfg.Window).UnixMicro()
	d.utilization = slices.DeleteFunc(d.utilization, func(u frame.Sample) bool { return u.Time < oldest })
	for _, w := range d.workloads {
		w.window = slices.DeleteFunc(w.window, func(p frame.ProcessSample) bool { return p.Time < oldest })
	}
}

// PIDs returns the processes that the devices name: those of interest to the reader of /proc.
func (b *Builder) PIDs() []int {
	var pids []int
	for _, d := range b.devices {
		for _, p := range d.list {
			pids = append(pids, p.PID)
		}
	}
	slices.Sort(pids)
	return slices.Compact(pids)
}

// fresh tells whether a reading may still be shown.
func (b *Builder) fresh(now, at time.Time, period time.Duration) bool {
	return !at.IsZero() && now.Sub(at) <= 3*max(period, b.cfg.Interval)
}

// Snapshot returns the picture at now.
func (b *Builder) Snapshot(now time.Time) *Snapshot {
	s := &Snapshot{Time: now, Host: b.host, Sources: maps.Clone(b.sources), Library: b.library}
	for _, name := range slices.Sorted(maps.Keys(b.calls)) {
		c := *b.calls[name]
		c.Buckets = slices.Clone(c.Buckets)
		s.Calls = append(s.Calls, c)
	}
	known := make(map[string]containers.Container, len(b.containers))
	for _, c := range b.containers {
		known[c.ID] = c
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
	used := map[string]map[string]int{} // container id -> device UUID -> processes
	var gpus []containers.GPU
	for _, i := range slices.Sorted(maps.Keys(b.devices)) {
		d := b.devices[i]
		out := d.Device
		if !b.fresh(now, d.loadAt, 0) {
			out.Load = nil
			if d.State == frame.StateOK {
				out.State, out.Reason = frame.StateError, "no reading for three intervals"
			}
		}
		if !b.fresh(now, d.healthAt, d.healthPeriod) {
			out.Health = nil
		}
		if !b.fresh(now, d.gpmAt, d.gpmPeriod) {
			out.GPM = nil
		}
		out.Throttled, out.Xids = maps.Clone(d.Throttled), maps.Clone(d.Xids)
		for _, u := range d.utilization {
			if u.Time >= now.Add(-b.cfg.Window).UnixMicro() {
				out.MaxUtilization = frame.Some(max(out.MaxUtilization.V, u.Value))
			}
		}
		if d.State == frame.StateOK {
			g := containers.GPU{UUID: d.UUID, Index: d.Index, Minor: -1, PCIBusID: d.Info.PCIBusID}
			if d.Info.Minor.OK {
				g.Minor = d.Info.Minor.V
			}
			gpus = append(gpus, g)
		}
		n := len(s.Devices)
		ws := b.workloads(now, d, n, known, self)
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
		if out.Load != nil && out.Load.MemoryUsed.OK && b.fresh(now, d.procsAt, 0) {
			// NVML reads the device before its processes: when they hold more than it said, its figure is the older one.
			var sum uint64
			for _, w := range ws {
				sum += w.Memory.V
			}
			load := *out.Load
			load.MemoryUsed.V = max(load.MemoryUsed.V, sum)
			out.Load = &load
			ws = append(ws, Workload{Device: n, Alive: true, Memory: frame.Some(load.MemoryUsed.V - sum)})
		}
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
	return s
}

// workloads lists the processes of one device, living and lingering.
func (b *Builder) workloads(now time.Time, d *device, n int, known map[string]containers.Container, self map[int]bool) []Workload {
	listed := map[int]frame.Process{}
	current := b.fresh(now, d.procsAt, 0)
	if current {
		for _, p := range d.list {
			// A process with several MIG instances counts with all of them.
			if have, ok := listed[p.PID]; ok && p.MemoryUsed.OK {
				p.MemoryUsed = frame.Some(p.MemoryUsed.V + have.MemoryUsed.V)
			}
			listed[p.PID] = p
		}
	}
	var out []Workload
	for k, w := range d.workloads {
		p, alive := listed[k.pid]
		facts, ok := b.processes[k.pid]
		if ok && k.start != 0 && facts.StartTime != k.start {
			alive = false // the PID is another process's now
		}
		if !ok && b.asked[k.pid] {
			alive = false // /proc no longer has it
		}
		if alive && ok {
			w.facts = facts
			w.container = containers.Owner(facts.Cgroup, func(id string) bool { _, is := known[id]; return is })
			if w.container == "" {
				w.container = facts.Container
			}
		}
		c, running := known[w.container]
		switch {
		case running:
			w.named, w.lastContainer = true, c
		case w.named:
			c = w.lastContainer
			if b.sources[input.SourceDocker].Up {
				alive = false // Docker said that the container ended: its processes are gone or going
			}
		default:
			c = containers.Container{ID: w.container}
		}
		if self[k.pid] {
			continue
		}
		if alive {
			w.goneAt = time.Time{}
		} else if w.goneAt.IsZero() {
			w.goneAt = now
		}
		if !alive && now.Sub(w.goneAt) >= b.cfg.Linger {
			delete(d.workloads, k)
			continue
		}
		if !alive && w.facts.PID == 0 {
			continue // a name in a sample and nothing else: no process was ever seen
		}
		o := Workload{Device: n, PID: k.pid, Container: c, Comm: w.facts.Comm, Command: w.facts.Command, Alive: alive}
		if d.sampled || w.busy > 0 {
			o.Busy = frame.Some(w.busy)
		}
		if alive {
			o.Memory = p.MemoryUsed
			if ok {
				o.CPU = frame.Some(facts.CPUSeconds)
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
		out = append(out, o)
	}
	// Labels name a process by its PID alone, so a PID that is used again has one series: the living process's.
	slices.SortFunc(out, func(x, y Workload) int {
		switch {
		case x.PID != y.PID:
			return cmp.Compare(x.PID, y.PID)
		case x.Alive == y.Alive:
			return 0
		case x.Alive:
			return -1
		}
		return 1
	})
	return slices.CompactFunc(out, func(x, y Workload) bool { return x.PID == y.PID })
}
