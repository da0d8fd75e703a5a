package tracer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"gpu-exporter/exporter/processes"
	"gpu-exporter/nvml/frame"
	"gpu-exporter/tracer/abi"
	"gpu-exporter/tracer/activity"
	"gpu-exporter/tracer/ledger"
)

// process is one that holds a device, or held one: it stays in the table until it ends.
type process struct {
	activity.Process
	holds
	group      uint64
	opened     int64 // CLOCK_MONOTONIC of its last open
	scan       bool  // look at its descriptors soon
	scanTick   bool  // and at the next tick again: a close may still have been under way
	allocated  uint64
	haveProbed bool
	launches   uint64
	dropped    uint64
	suppressed uint64
	last       int // it ended, and this answer of the probes has its last totals; until then it is still reported
}

// maxProcesses bounds the table.
const maxProcesses = 65536

// take applies one record. It tells whether the report changed.
func (r *run) take(record any) bool {
	r.events++
	switch e := record.(type) {
	case *bpfOpenEvent:
		return r.open(e)
	case *bpfEndEvent:
		switch bpfKind(e.H.Kind) {
		case bpfKindKIND_CLOSE:
			return r.closed(e)
		case bpfKindKIND_FORK:
			return r.fork(e)
		case bpfKindKIND_EXEC:
			return r.exec(e)
		}
		return r.exit(e)
	case *bpfCallEvent:
		return r.call(e)
	case *bpfXidEvent:
		return r.xid(activity.Xid{Time: r.wall(e.H.Time), PCIBusID: text(e.Dev[:]), Code: e.Code, Message: text(e.Msg[:]), PID: xidPID(text(e.Msg[:]))}, e.H.Time)
	}
	r.lostAnyway++
	return false
}

// current returns the process of a record, if it is known. Another start time under the same number is another process.
func (r *run) current(pid int, start uint64) *process {
	p := r.processes[pid]
	if p != nil && start != p.StartTime {
		r.remove(p, monotonic(unix.CLOCK_MONOTONIC))
		return nil
	}
	return p
}

// add makes the process of a record. What /proc does not tell any more is as the kernel side saw it.
func (r *run) add(pid int, start, group uint64, comm, cgroup string) *process {
	if len(r.processes) >= maxProcesses {
		r.lost["table"]++
		return nil
	}
	p := &process{group: group}
	p.PID, p.StartTime, p.Comm = pid, start, comm
	path := ""
	if facts, err := r.proc.Read(pid); err == nil && facts.StartTime == start {
		p.Comm, path = facts.Comm, facts.Cgroup
	}
	p.Cgroup = r.groups.see(group, path, cgroup)
	r.processes[pid] = p
	return p
}

func (r *run) open(e *bpfOpenEvent) bool {
	pid, start := int(e.H.Tgid), e.H.Start/userTicks
	name := text(e.Cgroup[:])
	if name == "" {
		name = "/"
	}
	if e.Result != 0 {
		if r.config.Events == nil && r.groups.byID[e.H.Group] != nil {
			return false // counted in the kernel, and nothing to learn
		}
		path := ""
		if facts, err := r.proc.Read(pid); err == nil && facts.StartTime == start {
			path = facts.Cgroup
		}
		group := r.groups.see(e.H.Group, path, name)
		r.tell(Event{Kind: "open", PID: pid, Comm: text(e.H.Comm[:]), Cgroup: group, Detail: openDetail(e)}, e.H.Time)
		return false
	}
	p := r.current(pid, start)
	if p == nil {
		if p = r.add(pid, start, e.H.Group, text(e.H.Comm[:]), name); p == nil {
			return false
		}
		// Of a process that is younger than the programs every call was seen, however it came by the device. An older one must not have had a
		// device when every process was looked at.
		young := int64(e.H.Start) > r.attached
		looked := r.scanned != 0 && int64(e.H.Time) > r.scanned && bpfKind(e.H.Kind) == bpfKindKIND_OPEN
		p.FromBirth = e.First == 1 && (young || looked) && r.seenSince(pid, e.H.Time, e.H.Group)
		if !p.FromBirth {
			r.inexact(p)
		} else { // the ledger takes who is new to it for one that events of were lost, if any were lost before
			r.ledger.Apply(ledger.Event{Kind: ledger.OpenGPU, PID: int32(pid), Start: start, Time: int64(e.H.Time), Minor: -1})
		}
		r.probes.scan(pid)
	}
	p.holds.add(e.H.Node, e.Minor)
	p.opened = int64(e.H.Time)
	gpu := ""
	if bpfNode(e.H.Node) == bpfNodeNODE_GPU {
		r.ledger.Apply(ledger.Event{Kind: ledger.OpenGPU, PID: int32(pid), Start: start, Time: int64(e.H.Time), Minor: int32(e.Minor)})
		gpu = uuidText(r.uuidOf(e.Minor))
	}
	r.tell(Event{Kind: "open", PID: pid, Comm: p.Comm, Cgroup: p.Cgroup, UUID: gpu, Detail: openDetail(e)}, e.H.Time)
	return true
}

func openDetail(e *bpfOpenEvent) string {
	node := nodeName(e.H.Node)
	if bpfNode(e.H.Node) == bpfNodeNODE_GPU {
		node = fmt.Sprintf("gpu%d", e.Minor)
	}
	return node + " " + abi.ErrnoName(e.Result)
}

func (r *run) uuidOf(minor uint32) ledger.UUID {
	for _, g := range r.gpus {
		if uint32(g.Minor) == minor {
			return g.UUID
		}
	}
	return ledger.UUID{}
}

func (r *run) closed(e *bpfEndEvent) bool {
	p := r.current(int(e.H.Tgid), e.H.Start/userTicks)
	if p == nil {
		return false
	}
	p.scan, p.scanTick = true, true
	return true
}

func (r *run) fork(e *bpfEndEvent) bool {
	parent := r.current(int(e.H.Tgid), e.H.Start/userTicks)
	child, start := int(e.Child), e.ChildStart/userTicks
	r.current(child, start) // whoever had the number is gone
	r.ledger.Apply(ledger.Event{Kind: ledger.Fork, PID: int32(child), Start: start, Time: int64(e.H.Time)})
	if parent == nil || r.processes[child] != nil {
		return false
	}
	p := r.add(child, start, e.H.Group, parent.Comm, "")
	if p == nil {
		return false
	}
	if !strings.HasPrefix(p.Cgroup, "/") {
		p.Cgroup = parent.Cgroup
	}
	p.FromBirth = parent.FromBirth && r.seenSince(child, e.H.Time, e.H.Group)
	if !p.FromBirth {
		r.inexact(p)
	}
	p.holds = parent.holds
	p.minors = maps.Clone(parent.minors)
	p.scan, p.scanTick = true, true
	if parent.any() {
		r.tell(Event{Kind: "fork", PID: child, Comm: p.Comm, Cgroup: p.Cgroup, Detail: fmt.Sprintf("of %d", parent.PID)}, e.H.Time)
	}
	return parent.any()
}

// exec: descriptors that are closed with exec are closed by now, and what was made through them is gone.
func (r *run) exec(e *bpfEndEvent) bool {
	p := r.current(int(e.H.Tgid), e.H.Start/userTicks)
	if p == nil {
		return false
	}
	p.Compute = false
	p.Comm = text(e.H.Comm[:])
	r.ledger.Apply(ledger.Event{Kind: ledger.Exec, PID: int32(p.PID), Start: p.StartTime, Time: int64(e.H.Time)})
	if !p.FromBirth {
		r.inexact(p) // what was lost may have come later than this
	}
	if facts, err := r.proc.Read(p.PID); err == nil && facts.StartTime == p.StartTime && facts.Cgroup != "" {
		p.Cgroup = facts.Cgroup
	}
	had := p.any()
	r.look(p)
	if had {
		r.tell(Event{Kind: "exec", PID: p.PID, Comm: p.Comm, Cgroup: p.Cgroup}, e.H.Time)
	}
	return true
}

func (r *run) exit(e *bpfEndEvent) bool {
	p := r.current(int(e.H.Tgid), e.H.Start/userTicks)
	if p == nil {
		return false
	}
	detail := fmt.Sprintf("exit %d", e.Code>>8&0xff)
	if signal := e.Code & 0x7f; signal != 0 {
		detail = fmt.Sprintf("signal %d", signal)
	}
	r.tell(Event{Kind: "exit", PID: p.PID, Comm: p.Comm, Cgroup: p.Cgroup, Detail: detail}, e.H.Time)
	if p.haveProbed || p.Compute {
		if number, ok := r.probes.ask(); ok {
			p.last = number
			r.ledger.Apply(ledger.Event{Kind: ledger.Exit, PID: int32(p.PID), Start: p.StartTime, Time: int64(e.H.Time)})
			return true
		}
	}
	r.remove(p, int64(e.H.Time))
	return true
}

// remove takes a process out of the table and the ledger.
func (r *run) remove(p *process, time int64) {
	delete(r.processes, p.PID)
	r.ledger.Apply(ledger.Event{Kind: ledger.Exit, PID: int32(p.PID), Start: p.StartTime, Time: time})
}

// call applies a driver call: to the ledger where the driver is known.
func (r *run) call(e *bpfCallEvent) bool {
	pid, start := int(e.H.Tgid), e.H.Start/userTicks
	p := r.current(pid, start)
	if p == nil { // its open was lost
		if p = r.add(pid, start, e.H.Group, text(e.H.Comm[:]), ""); p == nil {
			return false
		}
		r.inexact(p)
		p.holds.add(e.H.Node, 0)
		p.minors = nil // which GPU is not known; a look at its descriptors tells
		p.scan = true
	}
	changed := false
	if !p.Compute && e.context(r.version) {
		p.Compute, changed = true, true
		r.probes.scan(pid)
		r.tell(Event{Kind: "context", PID: pid, Comm: p.Comm, Cgroup: p.Cgroup, UUID: r.onlyGPU(p)}, e.H.Time)
	}
	if r.versionErr != nil {
		return changed
	}
	event, ok := abi.Decode(r.version, e.ioctl())
	if !ok {
		return changed
	}
	event.Start, event.Seq, event.File = start, e.Seq, e.File
	var freed uint64
	if event.Kind == ledger.Free && r.config.Events != nil {
		freed = r.ledger.Held(event.Client, event.Handle)
	}
	failure, failed := r.ledger.Apply(event)
	switch {
	case failed:
		add(&r.groups.more(p.Cgroup).failures, uuidText(failure.GPU), 1)
		r.tell(Event{Kind: "oom", PID: pid, Comm: p.Comm, Cgroup: p.Cgroup, UUID: cmp.Or(uuidText(failure.GPU), r.onlyGPU(p)), Size: failure.Size}, e.H.Time)
	case event.Kind == ledger.Lost:
		p.FromBirth = false
	case event.Kind == ledger.Memory && ledger.Succeeded(event.Status):
		r.tell(Event{Kind: "alloc", PID: pid, Comm: p.Comm, Cgroup: p.Cgroup, UUID: r.onlyGPU(p), Size: event.Size}, e.H.Time)
	case event.Kind == ledger.Free && freed > 0 && ledger.Succeeded(event.Status):
		r.tell(Event{Kind: "free", PID: pid, Comm: p.Comm, Cgroup: p.Cgroup, UUID: r.onlyGPU(p), Size: freed}, e.H.Time)
	}
	return true
}

// onlyGPU names the GPU of a process that has one.
func (r *run) onlyGPU(p *process) string {
	if len(p.minors) != 1 {
		return ""
	}
	for minor := range p.minors {
		return uuidText(r.uuidOf(minor))
	}
	return ""
}

// A report has the Xids since the last one, of which the GPU may give hundreds at once, and a few that came before.
const (
	maxXids  = 1024
	keptXids = 32
)

// xid takes a report, at a time of CLOCK_MONOTONIC.
func (r *run) xid(x activity.Xid, at uint64) bool {
	if len(r.xids) < maxXids {
		r.xids = append(r.xids, x)
	} else {
		r.lost["xids"]++
	}
	event := Event{Kind: "xid", PID: x.PID, Detail: fmt.Sprintf("%d: %s", x.Code, x.Message)}
	if p := r.processes[x.PID]; p != nil {
		event.Comm, event.Cgroup = p.Comm, p.Cgroup
	}
	for _, g := range r.gpus {
		if id, ok := parseBus(x.PCIBusID); ok && g.ID == id {
			event.UUID = uuidText(g.UUID)
		}
	}
	r.tell(event, at)
	return true
}

// xidPID finds the process in a message such as "pid=1234, name=python, Graphics SM …" or "pid='<unknown>'": 0 where there is none.
func xidPID(message string) int {
	_, rest, _ := strings.Cut(message, "pid=")
	digits := rest[:len(rest)-len(strings.TrimLeft(rest, "0123456789"))]
	pid, err := strconv.ParseUint(digits, 10, 22) // as many as the kernel has
	if err != nil {
		return 0
	}
	return int(pid)
}

// wall makes Unix ns of CLOCK_MONOTONIC ns.
func (r *run) wall(at uint64) int64 {
	return time.Now().UnixNano() - (monotonic(unix.CLOCK_MONOTONIC) - int64(at))
}

func (r *run) tell(e Event, at uint64) {
	if r.config.Events == nil {
		return
	}
	e.Time = r.wall(at)
	r.config.Events(e)
}

// look reads which devices a process holds now.
func (r *run) look(p *process) {
	now := monotonic(unix.CLOCK_MONOTONIC)
	found, err := scan(r.config.ProcRoot, &r.rules, p.PID)
	if errors.Is(err, os.ErrNotExist) {
		return // its exit is on the way; a lost one is found by reconcile
	}
	if err != nil {
		return // what events told stands
	}
	r.set(p, found, now)
}

// set replaces what a process holds by what was found at a moment, unless it opened something since.
func (r *run) set(p *process, found holds, at int64) {
	if p.opened > at {
		return
	}
	had := p.any()
	p.holds = found
	if had && !found.any() {
		// All descriptors are closed: so are the driver's objects that were made through them.
		r.ledger.Apply(ledger.Event{Kind: ledger.Exec, PID: int32(p.PID), Start: p.StartTime, Time: at})
		p.Compute = false
	}
}

// rescan looks at the processes whose events said that something may have changed.
func (r *run) rescan(tick bool) {
	for _, p := range r.processes {
		if p.scan || tick && p.scanTick {
			if p.scan = false; tick {
				p.scanTick = false
			}
			r.look(p)
		}
	}
}

// reconcile looks at every known process again: one that ended or closed its devices unseen, or was moved.
func (r *run) reconcile() {
	for _, p := range r.processes {
		start, err := processes.StartTime(r.config.ProcRoot, p.PID)
		if errors.Is(err, processes.ErrGone) || err == nil && start != p.StartTime {
			r.remove(p, monotonic(unix.CLOCK_MONOTONIC))
			continue
		}
		if facts, err := r.proc.Read(p.PID); err == nil && facts.StartTime == p.StartTime && facts.Cgroup != "" {
			p.Cgroup, p.Comm = facts.Cgroup, facts.Comm
		}
		r.look(p)
		if p.Compute {
			r.probes.scan(p.PID)
		}
	}
	r.proc.Forget(func(pid int) bool { return r.processes[pid] != nil })
	// Holders that ended unseen: the kernel side's own record of them could not be lost, but a process found by a scan that ended before it was
	// booked would stay.
	r.holders.Drop(func(pid uint32) bool {
		if r.processes[int(pid)] != nil {
			return false
		}
		_, err := os.Stat(fmt.Sprintf("%s/%d", r.config.ProcRoot, pid))
		return errors.Is(err, os.ErrNotExist)
	})
}

// merge takes in a look at every process.
func (r *run) merge(all fullScan) {
	first := r.scanned == 0
	r.scanned = monotonic(unix.CLOCK_MONOTONIC)
	if first && all.hidden > 0 {
		level := slog.LevelInfo
		if all.hidden > all.all/8 { // no single process that guards itself: CAP_SYS_PTRACE is missing (kernel threads count among all)
			level = slog.LevelWarn
		}
		r.log.Log(context.Background(), level, "open files of some processes cannot be read: which of them hold a device is seen at their next call", slog.Int("processes", all.hidden))
	}
	found := map[int]bool{}
	for _, s := range all.found {
		found[s.pid] = true
		start, err := processes.StartTime(r.config.ProcRoot, s.pid)
		if err != nil {
			continue // gone
		}
		p := r.current(s.pid, start)
		if p != nil {
			r.set(p, s.holds, all.began)
			continue
		}
		group := r.groups.id(s.pid)
		if p = r.add(s.pid, start, group, "", ""); p == nil {
			continue
		}
		p.holds = s.holds
		r.inexact(p)
		for minor := range p.minors {
			r.ledger.Apply(ledger.Event{Kind: ledger.OpenGPU, PID: int32(p.PID), Start: start, Time: all.began, Minor: int32(minor)})
		}
		// Whether it computes cannot be told, for the calls that would prove it were made before: NVML's list of processes must say.
		r.probes.scan(s.pid)
		holder := bpfHolder{Group: group, Flags: holderOpened}
		if err := r.kernel.collection.Maps[bpfMapHolders].Update(uint32(s.pid), &holder, updateNew); err != nil && !errors.Is(err, os.ErrExist) {
			r.lost["map_holders_scan"]++
		}
	}
	for _, p := range r.processes {
		if !found[p.PID] {
			p.scan = true
		}
	}
	r.rescan(false)
	if !first {
		r.reconcile()
	}
}

const (
	holderOpened = 1 // HOLDER_OPENED of the C side
	updateNew    = 1 // BPF_NOEXIST
)

// probed takes in what the probes counted. It returns the processes that ended and have their last totals now.
func (r *run) probed(result probed) (last []*process) {
	r.probes.got++
	for pid, t := range result.totals {
		p := r.processes[pid]
		if p == nil {
			continue
		}
		if t.Launches > p.launches {
			r.groups.more(p.Cgroup).launches += t.Launches - p.launches
		}
		p.HtoD, p.DtoH, p.Launches, p.launches = t.HtoD, t.DtoH, t.Launches, t.Launches
		p.allocated, p.haveProbed = t.Allocated, true
	}
	r.libraries = result.libraries
	if result.lost > 0 {
		r.lost["probes"] = result.lost
	}
	for _, p := range r.processes {
		if p.last != 0 && p.last <= r.probes.got {
			last = append(last, p)
		}
	}
	return last
}

// publish gives out a report, of which nothing is wrong that was lost by now.
func (r *run) publish() {
	r.readLost()
	r.give()
}

func (r *run) give() {
	now := time.Now()
	r.published = now
	report := &activity.Report{
		Time: now.UnixNano(), Mode: r.mode, Reason: r.reason, Ledger: r.versionErr == nil, Groups: r.report, Probes: r.libraries,
		Events: r.events, Xids: r.xids,
	}
	if r.versionErr != nil {
		report.LedgerReason = r.versionErr.Error()
	}
	for cause, n := range r.lost {
		if n > 0 {
			if report.Lost == nil {
				report.Lost = map[string]uint64{}
			}
			report.Lost[cause] = n
		}
	}
	at := monotonic(unix.CLOCK_MONOTONIC)
	for _, p := range r.processes {
		if p.any() {
			report.Processes = append(report.Processes, r.process(p, at))
		}
	}
	slices.SortFunc(report.Processes, func(a, b activity.Process) int { return cmp.Compare(a.PID, b.PID) })
	r.emit(report)
	r.xids = r.xids[max(0, len(r.xids)-keptXids):]
}

// process makes the report's copy of a process.
func (r *run) process(p *process, now int64) activity.Process {
	out := p.Process
	out.Devices = nil
	for minor := range p.minors {
		out.Devices = append(out.Devices, activity.Device{UUID: uuidText(r.uuidOf(minor)), Minor: frame.Some(int(minor))})
	}
	slices.SortFunc(out.Devices, func(a, b activity.Device) int { return cmp.Compare(a.Minor.V, b.Minor.V) })
	if r.versionErr == nil {
		var room [8]ledger.Use
		uses, exact := r.ledger.Uses(int32(p.PID), now, room[:0])
		out.FromBirth = out.FromBirth && exact
		// Bytes whose GPU is not known yet could be on any: then no figure is exact.
		unplaced := slices.ContainsFunc(uses, func(u ledger.Use) bool { return u.GPU == ledger.UUID{} && u.Used > 0 })
		if exact && !unplaced && p.FromBirth {
			r.used(&out, p, uses)
		}
	}
	if p.haveProbed && len(out.Devices) == 1 { // the probes do not tell GPUs apart
		out.Devices[0].Allocated = frame.Some(p.allocated)
	}
	return out
}

func (r *run) used(out *activity.Process, p *process, uses []ledger.Use) {
	if p.Compute {
		for i := range out.Devices {
			if out.Devices[i].UUID != "" {
				out.Devices[i].Used, out.Devices[i].Peak = frame.Some(uint64(0)), frame.Some(uint64(0))
			}
		}
	}
	for _, u := range uses {
		uuid := uuidText(u.GPU)
		if uuid == "" {
			continue
		}
		at := slices.IndexFunc(out.Devices, func(d activity.Device) bool { return d.UUID == uuid })
		if at < 0 {
			out.Devices = append(out.Devices, activity.Device{UUID: uuid})
			at = len(out.Devices) - 1
		}
		out.Devices[at].Used, out.Devices[at].Peak = frame.Some(u.Used), frame.Some(u.Peak)
	}
}
