// Package tracer is the kernel tracer: who holds an NVIDIA device now, since when, and how much VRAM to the byte, as kernel events tell it.
// The kernel side (bpf/tracer.bpf.c) counts and filters; here its records become the table of processes and the VRAM ledger.
//
// Where the kernel cannot be traced the tracer is off with a reason, which is a state and no error.
package tracer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"gpu-exporter/exporter/processes"
	"gpu-exporter/nvml/beat"
	"gpu-exporter/tracer/abi"
	"gpu-exporter/tracer/activity"
	"gpu-exporter/tracer/entries"
	"gpu-exporter/tracer/ledger"
	"gpu-exporter/tracer/probes"
)

// The modes.
const (
	ModeAuto       = "auto"
	ModeFentry     = "fentry"
	ModeTracepoint = "tracepoint"
	ModeOff        = "off"
)

// Config says what to trace. The zero Config traces the NVIDIA devices of this host, in the best mode it has.
type Config struct {
	Mode       string        // default ModeAuto
	ProcRoot   string        // default /proc
	CgroupRoot string        // default /sys/fs/cgroup
	Devices    []Device      // instead of NVIDIA's
	Prefix     string        // how the names of devices begin whose failed opens are counted; default /dev/nvidia
	Window     time.Duration // of the trailing peak; default one minute
	Linger     time.Duration // how long a control group that is gone keeps its counters; default two minutes
	Probe      bool          // count copies and allocations with probes on libcuda
	Launches   bool          // and kernel launches, which is dear
	Limits     Limits
	Logger     *slog.Logger
	Events     func(Event) // told of every event, when set; called from Run's goroutine

	sysRoot    string // default /sys
	driverRoot string // a procfs with the driver's files; default ProcRoot
	kernelLog  string // default /dev/kmsg
	facility   int    // whose records of it count; default the kernel's
	cgroupV1   bool
	controller string
	reconcile  time.Duration // how often known processes are looked at again
	noTaskBTF  bool          // as on kernels before 5.11
	attached   func(*kernel) // called once the programs are attached, when set
}

// Tracer is made by New and does its work in Run.
type Tracer struct {
	config Config

	mu       sync.Mutex
	kernel   *kernel // nil while nothing is attached
	released bool
}

// Release lets go of the driver's tracepoint of Xids, which keeps its module in use, until Resume. Nothing else of the tracer holds the driver.
func (t *Tracer) Release() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.released = true
	if t.kernel != nil {
		t.kernel.detachXid()
	}
}

// Resume undoes Release, at the next look at the driver: within ten seconds.
func (t *Tracer) Resume() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.released = false
}

// use says which kernel's tracepoint Release is about; nil: none any more.
func (t *Tracer) use(k *kernel) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.kernel = k
}

// attachXid attaches to the driver's tracepoint, unless it is released, and tells whether it is attached.
func (t *Tracer) attachXid() (bool, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var err error
	if !t.released {
		err = t.kernel.attachXid()
	}
	return t.kernel.xid != nil, err
}

// New checks the configuration.
func New(config Config) (*Tracer, error) {
	switch config.Mode {
	case "":
		config.Mode = ModeAuto
	case ModeAuto, ModeFentry, ModeTracepoint, ModeOff:
	default:
		return nil, fmt.Errorf("tracer mode %q: not auto, fentry, tracepoint or off", config.Mode)
	}
	set := func(to *time.Duration, value time.Duration) {
		if *to <= 0 {
			*to = value
		}
	}
	set(&config.Window, time.Minute)
	set(&config.Linger, 2*time.Minute)
	set(&config.reconcile, 10*time.Second)
	if config.ProcRoot == "" {
		config.ProcRoot = "/proc"
	}
	if config.CgroupRoot == "" {
		config.CgroupRoot = "/sys/fs/cgroup"
	}
	if config.sysRoot == "" {
		config.sysRoot = "/sys"
	}
	if config.driverRoot == "" {
		config.driverRoot = config.ProcRoot
	}
	if config.kernelLog == "" {
		config.kernelLog = "/dev/kmsg"
	}
	if config.Logger == nil {
		config.Logger = slog.New(slog.DiscardHandler)
	}
	if _, err := deviceRules(config.ProcRoot, config.Devices); err != nil && len(config.Devices) > 0 {
		return nil, err
	}
	config.cgroupV1, config.controller = hierarchy(config.ProcRoot)
	return &Tracer{config: config}, nil
}

// tick is how often a report is made when nothing happens, and how often counters are read.
const tick = time.Second

// Run traces until the context ends, and gives emit a report at every change (soon after it, several changes together) and every second.
// It returns an error only for what cannot be: a tracer that cannot work says so in its reports.
func (t *Tracer) Run(ctx context.Context, emit func(*activity.Report)) error {
	k, mode, reason := open(&t.config)
	log := t.config.Logger
	if k == nil {
		log.LogAttrs(ctx, slog.LevelInfo, "tracer off", slog.String("reason", reason))
		return off(ctx, &t.config, reason, emit)
	}
	t.use(k)
	defer func() {
		t.use(nil)
		k.close()
	}()
	log.LogAttrs(ctx, slog.LevelInfo, "tracer attached", slog.String("mode", mode), slog.String("reason", reason))
	if t.config.attached != nil {
		t.config.attached(k)
	}
	reader, err := ringbuf.NewReader(k.collection.Maps[bpfMapEvents])
	if err != nil {
		return off(ctx, &t.config, "reading events: "+line(err), emit)
	}
	r := &run{
		tracer: t, config: &t.config, kernel: k, emit: emit, mode: mode, reason: reason, log: log,
		groups:    newGroups(&t.config, k.collection.Maps),
		processes: map[int]*process{},
		proc:      &processes.Reader{Root: t.config.ProcRoot},
		ledger:    ledger.New(ledger.Config{Window: t.config.Window}),
		lost:      map[string]uint64{},
		droppedAt: map[int]int64{},
		attached:  monotonic(unix.CLOCK_BOOTTIME),
		scans:     make(chan fullScan, 1),
	}
	r.holders.Map, r.losses.Map = k.collection.Maps[bpfMapHolders], k.collection.Maps[bpfMapLost]
	defer r.groups.close()
	if t.config.Probe {
		p, err := probes.New(probes.Config{Launches: t.config.Launches, Linger: t.config.Linger, Logger: log, Proc: t.config.ProcRoot})
		if err != nil {
			r.libraries = []activity.Probe{{Library: "libcuda.so.1", Reason: line(err)}}
			log.LogAttrs(ctx, slog.LevelWarn, "libcuda probes off", slog.Any("error", err))
		} else {
			r.probes = newProber(p)
			defer r.probes.close()
		}
	}
	records := make(chan any, 1024)
	done := make(chan struct{})
	go read(reader, records, done)
	defer func() {
		_ = reader.Close() // ends read
		close(done)
		for range records { // until read has ended
		}
	}()
	defer func() { r.kernelLog.close() }()
	r.loop(ctx, records)
	return nil
}

// off reports that there is nothing, once a second, so that a reader that comes late learns why; and the Xids in the kernel's log.
func off(ctx context.Context, config *Config, reason string, emit func(*activity.Report)) error {
	log, err := openKernelLog(config)
	if err != nil {
		config.Logger.LogAttrs(ctx, slog.LevelDebug, "Xid reports come from NVML alone", slog.Any("error", err))
	}
	defer log.close()
	var xids []activity.Xid
	every := beat.New(tick)
	defer every.Stop()
	for {
		emit(&activity.Report{Time: time.Now().UnixNano(), Mode: ModeOff, Reason: reason, LedgerReason: "the tracer is off", Xids: xids})
		select {
		case <-ctx.Done():
			return nil
		case <-every.C:
			every.Again()
		case x := <-log.xids():
			xids = append(slices.Clone(xids[max(0, len(xids)-keptXids+1):]), x)
		}
	}
}

// read decodes records until the reader is closed. A record that cannot be decoded is passed on as its error.
func read(reader *ringbuf.Reader, records chan<- any, done <-chan struct{}) {
	defer close(records)
	var raw ringbuf.Record
	for {
		if err := reader.ReadInto(&raw); err != nil {
			if errors.Is(err, os.ErrClosed) || errors.Is(err, ringbuf.ErrClosed) {
				return
			}
			continue
		}
		record, err := decode(raw.RawSample)
		if err != nil {
			record = err
		}
		select {
		case records <- record:
		case <-done:
			return
		}
	}
}

func monotonic(clock int32) int64 {
	var t unix.Timespec
	if unix.ClockGettime(clock, &t) != nil {
		return 0 // every Linux has both clocks that are asked for
	}
	return t.Nano()
}

// run is the state of one Run. It belongs to one goroutine.
type run struct {
	tracer *Tracer
	config *Config
	kernel *kernel
	emit   func(*activity.Report)
	log    *slog.Logger

	mode, reason string
	rules        rules
	version      abi.Version
	versionErr   error
	gpus         []ledger.GPU
	gpusComplete bool

	groups    *groups
	processes map[int]*process
	proc      *processes.Reader
	ledger    *ledger.Ledger
	probes    *prober
	holders   entries.Reader[uint32, bpfHolder]
	losses    entries.Reader[uint32, uint64]
	kernelLog *kernelLog // nil where the driver's tracepoint is attached, or there is none

	libraries  []activity.Probe
	report     []activity.Group // as of the last tick
	xids       []activity.Xid
	events     uint64
	lost       map[string]uint64
	lostAnyway uint64        // records that could not be read
	lostAt     int64         // monotonic: when it was found last that records of anyone were lost
	droppedAt  map[int]int64 // the same for calls of one process beyond the rate, by PID

	attached  int64 // boot-time clock: when the programs were attached
	scanned   int64 // monotonic: when the first look at every process began; 0: not done
	scans     chan fullScan
	scanning  bool
	fullSoon  bool
	lastFull  time.Time
	lastKnown time.Time
	lastHost  time.Time
	published time.Time
}

// fullScan is what a look at every process found.
type fullScan struct {
	began  int64 // CLOCK_MONOTONIC
	found  []scanned
	hidden int // processes that may not be looked at
	all    int
}

// How soon a change is reported: at once after a quiet time, so that a lone event is seen fast, and else in batches.
const (
	soon  = 2 * time.Millisecond
	batch = 5 * time.Millisecond
	quiet = 50 * time.Millisecond
)

// fullEvery is how often every process is looked at for devices that came to it unseen. Its first call shows such a process anyway.
const fullEvery = time.Minute

func (r *run) loop(ctx context.Context, records <-chan any) {
	r.host(time.Now())
	r.fullScan()
	every := beat.New(tick)
	defer every.Stop()
	var flush <-chan time.Time
	for {
		changed := false
		select {
		case <-ctx.Done():
			return
		case record, ok := <-records:
			if !ok {
				return
			}
			changed = r.take(record)
			for n := len(records); n > 0; n-- {
				changed = r.take(<-records) || changed
			}
		case found := <-r.scans:
			r.scanning = false
			r.merge(found)
			r.tick(time.Now())
			r.publish()
		case result := <-r.probes.results():
			if last := r.probed(result); len(last) > 0 {
				r.publish()
				for _, p := range last {
					r.remove(p, monotonic(unix.CLOCK_MONOTONIC))
				}
				r.publish()
			}
		case x := <-r.kernelLog.xids():
			r.xid(x, uint64(monotonic(unix.CLOCK_MONOTONIC)))
			changed = true
		case <-flush:
			flush = nil
			r.rescan(false)
			r.publish()
		case now := <-every.C:
			every.Again()
			r.rescan(true)
			r.tick(now)
			r.publish()
		}
		if changed && flush == nil {
			wait := batch
			if time.Since(r.published) > quiet {
				wait = soon
			}
			flush = time.After(wait)
		}
	}
}

// host reads again what changes rarely: majors, the driver, its GPUs, its tracepoint.
func (r *run) host(now time.Time) {
	r.lastHost = now
	if rules, err := deviceRules(r.config.ProcRoot, r.config.Devices); err == nil {
		r.setRules(rules)
	}
	version, err := driverVersion(r.config.driverRoot)
	if version != r.version || r.lastKnown.IsZero() || (err == nil) != (r.versionErr == nil) {
		if r.version != (abi.Version{}) && version != r.version {
			r.ledger.Apply(ledger.Event{Kind: ledger.Lost, Time: monotonic(unix.CLOCK_MONOTONIC)}) // the driver was replaced
			r.gpusComplete = false
		}
		r.version, r.versionErr = version, err
		if err == nil {
			r.versionErr = version.Supported()
		}
		if err := r.kernel.collection.Maps[bpfMapRules].Put(uint32(0), statusRules(version)); err != nil {
			r.log.Warn("setting the driver's rules", slog.Any("error", err))
		}
	}
	if !r.gpusComplete {
		r.gpus, r.gpusComplete = hostGPUs(r.config.driverRoot)
		r.ledger.SetGPUs(r.gpus)
	}
	attached, err := r.tracer.attachXid()
	if err != nil {
		r.log.Warn("Xid reports are not seen", slog.Any("error", err))
	}
	switch {
	case attached:
		r.kernelLog.close()
		r.kernelLog = nil
	case r.kernelLog == nil:
		log, err := openKernelLog(r.config)
		if err != nil {
			r.log.Debug("Xid reports come from NVML alone", slog.Any("error", err))
		}
		r.kernelLog = log
	}
}

// setRules tells the kernel side which devices to trace, where that changed.
func (r *run) setRules(new rules) {
	maps := r.kernel.collection.Maps
	put := func(name string, key, value uint32) {
		if err := maps[name].Put(key, value); err != nil {
			r.log.Warn("choosing devices", slog.Any("error", err))
		}
	}
	for d, node := range new.minors {
		if r.rules.minors[d] != node {
			put(bpfMapMinors, d.major<<20|d.minor, node)
		}
	}
	for major, rule := range new.majors {
		if r.rules.majors[major] != rule {
			put(bpfMapMajors, major, rule)
		}
	}
	for major := range r.rules.majors {
		if _, ok := new.majors[major]; !ok {
			put(bpfMapMajors, major, 0)
		}
	}
	r.rules = new
}

// fullScan begins a look at every process, beside the loop: a host may have many.
func (r *run) fullScan() {
	if r.scanning {
		r.fullSoon = true
		return
	}
	r.scanning, r.fullSoon, r.lastFull = true, false, time.Now()
	root, rules, out := r.config.ProcRoot, r.rules, r.scans
	go func() {
		began := monotonic(unix.CLOCK_MONOTONIC)
		found, hidden, all := scanAll(root, &rules)
		out <- fullScan{began, found, hidden, all} // has room for one
	}()
}

// tick reads the counters, looks for losses, and reconciles from time to time.
func (r *run) tick(now time.Time) {
	r.readLost()
	r.readHolders()
	if now.Sub(r.lastHost) >= r.config.reconcile {
		r.host(now)
	}
	if now.Sub(r.lastKnown) >= r.config.reconcile {
		r.lastKnown = now
		r.reconcile()
	}
	if r.fullSoon || now.Sub(r.lastFull) >= fullEvery {
		r.fullScan()
	}
	used := map[uint64]bool{}
	for _, p := range r.processes {
		used[p.group] = true
	}
	groups, err := r.groups.read(now, func(id uint64) bool { return used[id] })
	if err != nil {
		r.log.Warn("reading counters", slog.Any("error", err))
		return // those of the last tick stand
	}
	r.report = groups
	r.probes.ask()
}

var causes = map[bpfCause]string{
	bpfCauseLOST_RING: "ringbuf", bpfCauseLOST_HOLDERS: "map_holders", bpfCauseLOST_THREADS: "map_threads", bpfCauseLOST_CALLS: "map_calls",
	bpfCauseLOST_ERRORS: "map_errors", bpfCauseLOST_OPENS: "map_opens", bpfCauseLOST_GROUPS: "map_groups", bpfCauseLOST_RATE: "rate",
	bpfCauseLOST_SHARE: "share",
}

// readLost reads the counts of what was lost, and marks who is no longer exact. Nothing is told of a process before that was done.
func (r *run) readLost() {
	all, rate, share := false, false, false
	if r.lostAnyway > r.lost["decode"] {
		r.lost["decode"], all = r.lostAnyway, true
	}
	err := r.losses.Each(func(cause uint32, n *uint64) {
		name := causes[bpfCause(cause)]
		if name == "" || *n == r.lost[name] {
			return
		}
		r.lost[name] = *n
		switch bpfCause(cause) {
		case bpfCauseLOST_RING, bpfCauseLOST_THREADS, bpfCauseLOST_HOLDERS:
			all = true
		case bpfCauseLOST_RATE:
			rate = true
		case bpfCauseLOST_SHARE:
			share = true
		}
	})
	if err != nil {
		r.log.Warn("reading losses", slog.Any("error", err))
		r.lost["unread"]++ // perhaps nothing
		all = true
	}
	now := monotonic(unix.CLOCK_MONOTONIC)
	if all {
		r.lostAll(now)
	}
	if rate || share {
		groups := r.groups.lose(now, r.readHolders)
		for _, p := range r.processes {
			if groups[p.group] {
				r.inexact(p)
			}
		}
	}
	r.fullSoon = r.fullSoon || all || share // ends and opens unseen are found so
}

// readHolders looks for processes whose records were cut: calls beyond the rate are the loss of the one process that makes so many.
func (r *run) readHolders() {
	now := monotonic(unix.CLOCK_MONOTONIC)
	for pid, at := range r.droppedAt {
		if now-at > int64(time.Minute) { // no record waits so long
			delete(r.droppedAt, pid)
		}
	}
	_ = r.holders.Each(func(pid uint32, h *bpfHolder) { // what could not be read is seen at the next tick
		p := r.processes[int(pid)]
		if h.Dropped > 0 && (p == nil || h.Dropped > p.dropped) {
			r.droppedAt[int(pid)] = now // it may be another process of this number, whose records are not read yet
		}
		if p == nil {
			return
		}
		if h.Dropped > p.dropped {
			r.inexact(p)
			r.groups.drop(h.Group, h.Dropped-p.dropped)
		}
		if h.Suppressed > p.suppressed {
			p.scan = true
		}
		p.dropped, p.suppressed = h.Dropped, h.Suppressed
	})
}

// lostAll: whoever was there, known or not yet, may have lost events.
func (r *run) lostAll(now int64) {
	r.lostAt = now
	r.ledger.Apply(ledger.Event{Kind: ledger.Lost, Time: now})
	for _, p := range r.processes {
		p.FromBirth = false
	}
}

// seenSince tells whether nothing was lost, of anyone, of a group and of a process, since a record was made that may be read only now.
func (r *run) seenSince(pid int, time, group uint64) bool {
	return int64(time) > max(r.lostAt, r.groups.lost[group].seen, r.droppedAt[pid])
}

func (r *run) inexact(p *process) {
	p.FromBirth = false
	r.ledger.Apply(ledger.Event{Kind: ledger.Lost, PID: int32(p.PID), Time: monotonic(unix.CLOCK_MONOTONIC)})
}
