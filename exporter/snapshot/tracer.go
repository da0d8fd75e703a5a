package snapshot

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/processes"
	"gpu-exporter/nvml/frame"
	"gpu-exporter/tracer/activity"
)

// tracer is what the kernel tracer reported last.
type tracer struct {
	report    *activity.Report // nil: it never spoke
	at        time.Time
	processes map[int]*activity.Process // by PID; of the report
	copied    map[key][2]uint64         // bytes of each process that were put down to a device
	groups    map[string]*Counts        // counters of each control group as they were last, by path
	xids      map[activity.Xid]bool     // those of the report: each is in several reports
}

// Counts is what the processes of one container did to the driver, since the exporter started. It is not changed once published.
type Counts struct {
	Started  uint64
	Exited   map[string]uint64 // by reason
	Opens    map[OpenKind]uint64
	Calls    map[string]*activity.Call
	Failures map[string]uint64 // failed requests of VRAM by GPU UUID
	Launches uint64
	Refused  time.Time // of the last open of nvidiactl that was not permitted; zero: none was, or one succeeded since
}

// OpenKind is a kind of open of a device node.
type OpenKind struct{ Node, Result string }

// RefusedOpens is how many opens of the driver's nodes were not permitted.
func (c *Counts) RefusedOpens() uint64 {
	n := uint64(0)
	for kind, count := range c.Opens {
		if kind.Result == "eperm" || kind.Result == "eacces" {
			n += count
		}
	}
	return n
}

func (b *Builder) tracerReport(now time.Time, r *activity.Report) {
	t := &b.tracer
	before, since := t.processes, t.at
	t.report, t.at = r, now
	t.processes = make(map[int]*activity.Process, len(r.Processes))
	for i := range r.Processes {
		if p := &r.Processes[i]; p.PID > 0 {
			t.processes[p.PID] = p
		}
	}
	for _, d := range b.devices {
		if d.procsAt.After(since) && !d.procsAt.After(now) {
			d.mismatch = frame.Some(b.mismatch(d, before))
		}
	}
	b.copies()
	if r.Mode != "off" {
		b.groups(now, r.Groups)
	}
	seen := make(map[activity.Xid]bool, len(r.Xids))
	for _, x := range r.Xids {
		if t.xids[x] {
			seen[x] = true
			continue
		}
		for _, d := range b.devices {
			if x.PCIBusID != "" && d.Info.PCIBusID == x.PCIBusID {
				if at := time.Unix(0, x.Time); d.xid(fromTracer, x.Code, at) || x.PID != 0 {
					b.tellXid(d, XidReport{Time: at, Code: x.Code, Message: x.Message}, x.PID)
				}
				seen[x] = true // until its device is known it is asked again
			}
		}
	}
	t.xids = seen
}

// tracerUp tells whether the tracer runs and its report is of now.
func (b *Builder) tracerUp(now time.Time) bool {
	r := b.tracer.report
	src, spoke := b.sources[input.SourceTracer]
	return r != nil && r.Mode != "off" && (!spoke || src.Up) && b.fresh(now, b.tracer.at, 0)
}

// facts returns what is known of a process: from /proc, else from the tracer, of the younger one where a PID was used again.
func (b *Builder) facts(pid int) (processes.Process, bool) {
	p, ok := b.processes[pid]
	if t := b.tracer.processes[pid]; t != nil && (!ok || t.StartTime > p.StartTime) {
		return processes.Process{PID: pid, StartTime: t.StartTime, Comm: containers.Clean(t.Comm, 64), Cgroup: t.Cgroup,
			Container: containers.FromCgroup(t.Cgroup)}, true
	} else if t != nil && t.StartTime == p.StartTime && p.Cgroup == "" { // it was exiting when /proc was asked
		p.Cgroup, p.Container = t.Cgroup, containers.FromCgroup(t.Cgroup)
	}
	return p, ok
}

// monitoring tells whether a process has the device open only to look at it. What the tracer did not see from its birth may hold more than
// it knows, so then NVML's word counts.
func monitoring(t *activity.Process, listed bool) bool {
	return t != nil && !t.Compute && (t.FromBirth || !listed)
}

// deviceOf returns the device that the tracer means; nil where it is not known.
func (b *Builder) deviceOf(a activity.Device) *device {
	for _, d := range b.devices {
		if a.UUID != "" && d.UUID == a.UUID {
			return d
		}
	}
	if a.UUID != "" {
		return nil
	}
	for _, d := range b.devices {
		if a.Minor.OK && d.Info.Minor == a.Minor || !a.Minor.OK && len(b.devices) == 1 {
			return d
		}
	}
	return nil
}

// held returns what each process holds on each device by the tracer, and makes an entry for each.
func (b *Builder) held() map[*device]map[int]activity.Device {
	out := map[*device]map[int]activity.Device{}
	for pid, p := range b.tracer.processes {
		if !p.Compute {
			continue
		}
		for _, a := range p.Devices {
			d := b.deviceOf(a)
			if d == nil {
				continue
			}
			if out[d] == nil {
				out[d] = map[int]activity.Device{}
			}
			if have, twice := out[d][pid]; twice {
				a.Used, a.Peak, a.Allocated = frame.Sum(a.Used, have.Used), frame.Sum(a.Peak, have.Peak), frame.Sum(a.Allocated, have.Allocated)
			}
			out[d][pid] = a
			b.workload(d, pid)
		}
	}
	return out
}

// copies puts down what processes copied since the last report to the first device that each holds: the probes do not tell devices apart.
func (b *Builder) copies() {
	seen := make(map[key][2]uint64, len(b.tracer.processes))
	listed := map[int]*device{} // the first device that NVML lists a process on
	for _, i := range slices.Backward(slices.Sorted(maps.Keys(b.devices))) {
		for _, l := range b.devices[i].list {
			listed[l.PID] = b.devices[i]
		}
	}
	for pid, p := range b.tracer.processes {
		k := key{pid, p.StartTime}
		last := b.tracer.copied[k]
		now := [2]uint64{toDevice: p.HtoD, fromDevice: p.DtoH}
		d := b.firstDevice(p)
		if d == nil {
			d = listed[pid]
		}
		if !p.Compute || d == nil {
			seen[k] = last // for when its device is known
			continue
		}
		w := b.workload(d, pid)
		for i := range now {
			w.copied[i] = grow(w.copied[i], last[i], now[i])
		}
		w.copies = true
		seen[k] = now
	}
	b.tracer.copied = seen
}

// mismatch returns by how much the ledger and NVML differ over the processes that both know exactly. NVML was read between the report before and
// this one, so what a process held by then is between what it held at both.
func (b *Builder) mismatch(d *device, before map[int]*activity.Process) (bytes uint64) {
	nvml := map[int]uint64{}
	for _, p := range d.list {
		if p.MemoryUsed.OK {
			nvml[p.PID] += p.MemoryUsed.V
		}
	}
	for pid, said := range nvml {
		p := b.tracer.processes[pid]
		if p == nil || !p.Compute || !p.FromBirth {
			continue
		}
		used := b.ledger(p, d)
		if !used.OK {
			continue
		}
		low, high := used.V, used.V
		if before != nil {
			var then uint64 // nothing before it was seen
			if old := before[pid]; old != nil && old.StartTime == p.StartTime {
				then = b.ledger(old, d).V
			}
			low, high = min(low, then), max(high, then)
		}
		bytes += max(low, said) - said + max(said, high) - high
	}
	return bytes
}

// ledger returns what a process holds on a device by the tracer's ledger.
func (b *Builder) ledger(p *activity.Process, d *device) (used frame.Opt[uint64]) {
	for _, a := range p.Devices {
		if a.Used.OK && b.deviceOf(a) == d {
			used = frame.Sum(used, a.Used)
		}
	}
	return used
}

// firstDevice returns the device of a process that the tracer names first; nil where it names none that is known.
func (b *Builder) firstDevice(p *activity.Process) *device {
	for _, a := range p.Devices {
		if d := b.deviceOf(a); d != nil {
			return d
		}
	}
	return nil
}

// owner returns the container that a control group is counted for; empty outside any.
func (b *Builder) owner(cgroup string) string {
	return containers.Owner(cgroup, func(id string) bool { _, ok := b.named[id]; return ok })
}

// containerOf returns the container of a process; empty outside any.
func (b *Builder) containerOf(p processes.Process) string {
	if id := b.owner(p.Cgroup); id != "" {
		return id
	}
	return p.Container
}

// container returns what Docker says or said of a container: of one that it does not know, only the id.
func (b *Builder) container(id string) containers.Container {
	c := b.named[id]
	c.ID = id
	return c
}

// groups adds what control groups counted since the last report to their containers. A group that is gone leaves what it counted to its
// container, and a container is forgotten with its last group.
func (b *Builder) groups(now time.Time, list []activity.Group) {
	groups := make(map[string]*Counts, len(list))
	for _, g := range list {
		if groups[g.Cgroup] == nil {
			groups[g.Cgroup] = newCounts()
		}
		groups[g.Cgroup].count(g)
	}
	sums := map[string]*Counts{}
	for path, n := range groups {
		id := b.owner(path)
		if sums[id] == nil {
			sums[id] = newCounts()
			if was := b.counts[id]; was != nil {
				sums[id].grow(newCounts(), was)
			}
		}
		was := b.tracer.groups[path]
		if was == nil {
			was = newCounts()
		}
		sums[id].grow(was, n)
	}
	for id, sum := range sums {
		was := b.counts[id]
		if was == nil {
			was = newCounts()
		}
		sum.refuse(now, was)
	}
	if sums[""] == nil && b.counts[""] != nil {
		sums[""] = b.counts[""]
	}
	b.tracer.groups, b.counts = groups, sums
}

// refuse notes whether the driver's control node, which every program opens first, was refused since the counts were as they were.
func (c *Counts) refuse(now time.Time, was *Counts) {
	more := func(result string) bool { kind := OpenKind{"ctl", result}; return c.Opens[kind] > was.Opens[kind] }
	switch c.Refused = was.Refused; {
	case more("ok"):
		c.Refused = time.Time{}
	case more("eperm"):
		c.Refused = now
	}
}

func newCounts() *Counts {
	return &Counts{Exited: map[string]uint64{}, Opens: map[OpenKind]uint64{}, Calls: map[string]*activity.Call{}, Failures: map[string]uint64{}}
}

// maxBuckets bounds the duration buckets of a call: the last one is for half a millennium.
const maxBuckets = 64

// count adds a group's counters.
func (c *Counts) count(g activity.Group) {
	n := newCounts()
	n.Started, n.Launches, n.Exited, n.Failures = g.Started, g.Launches, g.Exited, g.Failures
	for _, o := range g.Opens {
		n.Opens[OpenKind{o.Node, o.Result}] += o.Count
	}
	var unnamed []*activity.Call
	for i := range g.Calls {
		if strings.Contains(g.Calls[i].Name, "_0x") {
			unnamed = append(unnamed, &g.Calls[i])
			continue
		}
		n.Calls[g.Calls[i].Name] = &g.Calls[i]
	}
	c.grow(newCounts(), n)
	for _, call := range unnamed {
		// The caller chooses the number. Those that the driver has not are one call for each kind of node, or a program could make a thousand series.
		node, _, _ := strings.Cut(call.Name, "_0x")
		c.grow(newCounts(), &Counts{Calls: map[string]*activity.Call{node + "_other": call}})
	}
}

// grow adds what was counted from last to now. Neither is changed.
func (c *Counts) grow(last, now *Counts) {
	c.Started = grow(c.Started, last.Started, now.Started)
	c.Launches = grow(c.Launches, last.Launches, now.Launches)
	growMap(c.Exited, last.Exited, now.Exited)
	growMap(c.Failures, last.Failures, now.Failures)
	growMap(c.Opens, last.Opens, now.Opens)
	for name, x := range now.Calls {
		was, sum := last.Calls[name], c.Calls[name]
		if was == nil || x.Count < was.Count {
			was = &activity.Call{} // it began anew, all of it
		}
		if sum == nil {
			sum = &activity.Call{Name: name, Errors: map[string]uint64{}}
			c.Calls[name] = sum
		}
		sum.Count = grow(sum.Count, was.Count, x.Count)
		sum.Seconds += max(0, x.Seconds-was.Seconds)
		growMap(sum.Errors, was.Errors, x.Errors)
		for i, n := range x.Buckets[:min(len(x.Buckets), maxBuckets)] {
			if i == len(sum.Buckets) {
				sum.Buckets = append(sum.Buckets, 0)
			}
			before := uint64(0)
			if i < len(was.Buckets) {
				before = was.Buckets[i]
			}
			sum.Buckets[i] = grow(sum.Buckets[i], before, n)
		}
	}
}

func growMap[K comparable](sum, last, now map[K]uint64) {
	for k, n := range now {
		sum[k] = grow(sum[k], last[k], n)
	}
}

// activity lists the counts by container, under the name that Docker has or had for it.
func (b *Builder) activity() []Activity {
	out := make([]Activity, 0, len(b.counts))
	for id, c := range b.counts {
		out = append(out, Activity{Container: b.container(id), Counts: c})
	}
	slices.SortFunc(out, func(x, y Activity) int { return cmp.Compare(x.Container.ID, y.Container.ID) })
	return out
}
