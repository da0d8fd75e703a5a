package snapshot

import (
	"cmp"
	"iter"
	"maps"
	"slices"
	"time"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/processes"
	"gpu-exporter/nvml/frame"
)

// Config sets the builder's time constants. Zero values of the first two take the defaults named.
type Config struct {
	Interval time.Duration // period of the cheap readings; 1 s
	Window   time.Duration // over which maxima are taken; 60 s
	Linger   time.Duration // for which the counters of a gone process stay; zero: not at all
	Recorded bool          // the inputs are a recording's, not of this host

	// OnXid is told each error report of the driver once, and once more where NVML told of it before the tracer named the process. Nil: nobody.
	OnXid func(XidReport)
}

// Builder keeps what the inputs said. It is used by one goroutine.
type Builder struct {
	cfg        Config
	now        time.Time // of the newest input
	host       input.Host
	sources    map[string]input.Source
	library    frame.Library
	devices    map[int]*device
	containers []containers.Container
	processes  map[int]processes.Process
	asked      map[int]bool
	calls      map[string]*frame.Call
	tracer     tracer
	named      map[string]containers.Container // running containers, and gone ones that something still counts for, by id
	goneAt     map[string]time.Time            // of those that are gone
	counts     map[string]*Counts              // by container id
}

// device is what is known of one GPU.
type device struct {
	Device
	loadAt, procsAt, healthAt, gpmAt, samplesAt time.Time
	samplesPeriod, healthPeriod, gpmPeriod      time.Duration
	list                                        []frame.Process
	mismatch                                    frame.Opt[uint64] // of the ledger and the last list that reports of the tracer enclose
	workloads                                   map[key]*workload
	utilization                                 []frame.Sample // of the window
	smActive                                    []frame.Sample // of the window
	lastUtilization, lastPower, lastSMActive    int64          // µs: the newest sample counted
	sampled                                     bool
	throttleAt                                  time.Time
	throttled                                   map[string]float64 // s: the driver's own counters by reason
	energy                                      energyAccount
	pcie                                        [2]pcieAccount   // by direction
	past                                        map[string]*past // by container id; empty: in none that runs
	reports                                     []xidReport
}

// maxWorkloads bounds the entries of one device: a driver that names more than this is not believed.
const maxWorkloads = 1 << 14

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
	since         time.Time            // when the entry was made
	shown         bool                 // it was in a snapshot
	energy        float64              // J
	busyShared    float64              // s: the part of busy that energy was given for
	copied        [2]uint64            // bytes by direction
	copies        bool                 // the tracer tells what it copies
	cpu           frame.Opt[float64]   // s: as /proc had it last
	cpuLeft       float64              // s: the part of cpu that leave moved away
}

// NewBuilder returns a builder that knows nothing yet.
func NewBuilder(c Config) *Builder {
	if c.Interval <= 0 {
		c.Interval = time.Second
	}
	if c.Window <= 0 {
		c.Window = time.Minute
	}
	return &Builder{cfg: c, sources: map[string]input.Source{}, devices: map[int]*device{}, processes: map[int]processes.Process{},
		asked: map[int]bool{}, calls: map[string]*frame.Call{}, named: map[string]containers.Container{}, goneAt: map[string]time.Time{}}
}

// Apply takes one fact.
func (b *Builder) Apply(in input.Input) {
	now := time.Unix(0, in.Time)
	b.now = now
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
		for id := range b.named {
			if _, ok := b.goneAt[id]; !ok {
				b.goneAt[id] = now
			}
		}
		for _, c := range b.containers {
			b.named[c.ID] = c
			delete(b.goneAt, c.ID)
		}
	case in.Processes != nil:
		clear(b.processes)
		clear(b.asked)
		for _, pid := range in.Processes.Asked {
			b.asked[pid] = true
		}
		for _, p := range in.Processes.List {
			b.processes[p.PID] = p
		}
	case in.Tracer != nil:
		b.tracerReport(now, in.Tracer)
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
			if e.Kind == "xid" && d.UUID == e.UUID {
				if at := time.Unix(0, e.Time); d.xid(fromNVML, e.Value, at) {
					b.tellXid(d, XidReport{Time: at, Code: e.Value}, 0)
				}
			}
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
		sum = &frame.Call{Name: c.Name} // without buckets: nothing shows them
		b.calls[c.Name] = sum
	}
	sum.Count += c.Count
	sum.Errors += c.Errors
	sum.Seconds += c.Seconds
}

// forget drops what must not be repeated once the device cannot be read; identity and counters stay.
func (d *device) forget() {
	d.Load, d.Health, d.GPM, d.NVLink, d.MIG, d.list = nil, nil, nil, nil, nil, nil
	d.utilization, d.smActive, d.sampled = nil, nil, false
}

func (b *Builder) device(now time.Time, f *frame.Device) {
	d := b.devices[f.Index]
	if d == nil || (f.UUID != "" && d.UUID != "" && d.UUID != f.UUID) {
		d = b.place(f, d) // a new index, or another board behind it
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
		d.Load, d.MIG, d.loadAt = f.Load, f.MIG, now
	}
	if f.Processes != nil {
		d.list, d.procsAt = withMIG(f.Processes.List, f.MIG), now
	}
	if f.Health != nil {
		d.healthPeriod, d.healthAt = period(d.healthAt, now), now
		d.Health, d.NVLink = f.Health, f.NVLink
		d.driverThrottle(f.Health.ThrottleSeconds)
	}
	if f.GPM != nil {
		d.gpmPeriod, d.gpmAt = period(d.gpmAt, now), now
		d.GPM = f.GPM
		fresh := newer(now, &d.lastSMActive, f.GPM.SMActive, 1)
		d.smActive = b.window(now, append(d.smActive, fresh...))
	}
	if f.Samples != nil {
		b.samples(now, d, f.Samples)
	}
	if f.Energy.OK {
		b.energy(now, d, f.Energy.V) // after the samples: it is shared out by them
	}
	if p := f.PCIe; p != nil {
		d.PCIeSource = p.Source
		for i, n := range []frame.Opt[uint64]{toDevice: p.RX, fromDevice: p.TX} {
			if n.OK {
				d.pcie[i].add(now, n.V)
			}
		}
	}
	for _, p := range d.list {
		b.workload(d, p.PID) // an entry for every listed process
	}
}

// place returns the device of a frame and puts it at the frame's index, where d is so far; nil: none. A driver that is loaded anew without a GPU that was
// lost numbers the others anew. They keep what they counted, and the lost one stays, as such, at the number that is free.
func (b *Builder) place(f *frame.Device, d *device) *device {
	for index, other := range b.devices {
		// One that is being read is no other: a driver may give two GPUs one UUID.
		if f.UUID == "" || other.UUID != f.UUID || other.Load != nil {
			continue
		}
		delete(b.devices, index)
		if d != nil && d.UUID != "" {
			d.Index, d.State, d.Reason = index, frame.StateLost, "the driver does not list the GPU any more"
			d.forget()
			b.devices[index] = d
		}
		b.devices[f.Index] = other
		return other
	}
	d = &device{workloads: map[key]*workload{}, past: map[string]*past{}}
	b.devices[f.Index] = d
	return d
}

// withMIG adds the processes that only the MIG devices list.
func withMIG(list []frame.Process, mig []frame.MIG) []frame.Process {
	if len(mig) == 0 {
		return list
	}
	whole := map[int]bool{}
	for _, p := range list {
		whole[p.PID] = true
	}
	for _, m := range mig {
		for _, p := range m.Processes {
			if !whole[p.PID] {
				list = append(slices.Clip(list), p)
			}
		}
	}
	return list
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

// ThrottleReasons goes through the reasons, each with whether the mask has it.
func ThrottleReasons(mask uint64) iter.Seq2[string, bool] {
	return func(yield func(string, bool) bool) {
		for _, r := range throttleReasons {
			if !yield(r.name, mask&r.bit != 0) {
				return
			}
		}
	}
}

// throttle adds the time since the previous reading to the reasons that held then.
// Reasons that the driver counts itself are left to it.
func (d *device) throttle(now time.Time) {
	if d.Load != nil && d.Load.Throttle.OK && !d.throttleAt.IsZero() && now.Sub(d.throttleAt) < time.Minute {
		if d.Throttled == nil {
			d.Throttled = map[string]float64{}
		}
		for name, on := range ThrottleReasons(d.Load.Throttle.V) {
			held := 0.0 // a reason that never held has a series of 0
			if _, counted := d.throttled[name]; on && !counted {
				held = max(0, now.Sub(d.throttleAt).Seconds())
			}
			d.Throttled[name] += held
		}
	}
	d.throttleAt = now
}

// driverThrottle adds what the driver itself counted since the last reading, under the names of ThrottleReasons.
func (d *device) driverThrottle(counted map[string]float64) {
	if len(counted) > 0 && d.throttled == nil {
		d.throttled = map[string]float64{}
	}
	if len(counted) > 0 && d.Throttled == nil {
		d.Throttled = map[string]float64{}
	}
	for name, v := range counted {
		if name == "hw_power_brake_slowdown" {
			name = "hw_power_brake"
		}
		if last, ok := d.throttled[name]; ok {
			d.Throttled[name] += max(0, v-last)
		} else {
			d.Throttled[name] += 0
		}
		d.throttled[name] = v
	}
}

// workload returns the entry of a process, making it when it is new.
func (b *Builder) workload(d *device, pid int) *workload {
	facts, _ := b.facts(pid)
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
	w := &workload{since: b.now}
	if len(d.workloads) < maxWorkloads {
		d.workloads[k] = w
	}
	return w
}

func (d *device) sortedKeys() []key {
	return slices.SortedFunc(maps.Keys(d.workloads), func(x, y key) int {
		return cmp.Or(cmp.Compare(x.pid, y.pid), cmp.Compare(x.start, y.start))
	})
}

// usualSample is the driver's period, for a sample of which nothing tells the beginning.
const usualSample = 200_000 // µs

// samples counts each new process sample once. The value of a sample is the mean of its process since the time that the driver was asked from,
// or since the process's sample before it: driver 580 delivers one sample per process and call, and the same instant reads 99 % when asked
// from 2 s ago and 87 % from the start of its memory.
func (b *Builder) samples(now time.Time, d *device, s *frame.Samples) {
	if s.ProcessUntil > s.ProcessSince { // a window of no length, such as a worker's first, says nothing
		d.sampled = true
		d.samplesPeriod, d.samplesAt = period(d.samplesAt, now), now
		for _, w := range d.workloads {
			w.mean = frame.ProcessSample{}
		}
		list := slices.Clone(s.Process)
		slices.SortStableFunc(list, func(x, y frame.ProcessSample) int { return cmp.Compare(x.Time, y.Time) })
		span := float64(s.ProcessUntil - s.ProcessSince)
		d.energy.covered += max(span, 0) / 1e6
		future := now.Add(ahead).UnixMicro()
		for _, p := range list {
			if p.PID <= 0 || p.SM < 0 || p.SM > 100 || p.SM != p.SM {
				continue
			}
			w := b.workload(d, p.PID)
			if w.last > future {
				w.last = 0
			}
			if p.Time <= w.last || p.Time > future {
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
	utilization := newer(now, &d.lastUtilization, s.Utilization, 100)
	d.Utilization = d.Utilization.with(percentBounds, values(utilization))
	d.Power = d.Power.with(wattBounds, values(newer(now, &d.lastPower, s.Power, maxWatts)))
	d.utilization = b.window(now, append(d.utilization, utilization...))
	oldest := now.Add(-b.cfg.Window).UnixMicro()
	for _, w := range d.workloads {
		w.window = slices.DeleteFunc(w.window, func(p frame.ProcessSample) bool { return p.Time < oldest })
	}
}

// maxWatts is more than any device draws.
const maxWatts = 1e5

// ahead is how far in the future a sample may be. One that is further was taken before the clock was set back.
const ahead = time.Second

// newer returns the samples after *last that are possible, and moves *last on, so that each sample counts once however often it is delivered.
func newer(now time.Time, last *int64, list []frame.Sample, most float64) []frame.Sample {
	future := now.Add(ahead).UnixMicro()
	if *last > future {
		*last = 0
	}
	list = slices.Clone(list)
	slices.SortStableFunc(list, func(x, y frame.Sample) int { return cmp.Compare(x.Time, y.Time) })
	return slices.DeleteFunc(list, func(s frame.Sample) bool {
		if s.Time <= *last || s.Time > future || !(s.Value >= 0 && s.Value <= most) {
			return true
		}
		*last = s.Time
		return false
	})
}

func values(list []frame.Sample) []float64 {
	out := make([]float64, len(list))
	for i, s := range list {
		out[i] = s.Value
	}
	return out
}

// window drops what is older than the window.
func (b *Builder) window(now time.Time, list []frame.Sample) []frame.Sample {
	oldest := now.Add(-b.cfg.Window).UnixMicro()
	return slices.DeleteFunc(list, func(s frame.Sample) bool { return s.Time < oldest })
}

// PIDs returns the processes that the devices or the tracer name: those of interest to the reader of /proc.
func (b *Builder) PIDs() []int {
	var pids []int
	for _, d := range b.devices {
		for _, p := range d.list {
			pids = append(pids, p.PID)
		}
	}
	for pid, p := range b.tracer.processes {
		if p.Compute {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	return slices.Compact(pids)
}

// fresh tells whether a reading may still be shown.
func (b *Builder) fresh(now, at time.Time, period time.Duration) bool {
	return !at.IsZero() && now.Sub(at) <= 3*max(period, b.cfg.Interval)
}
