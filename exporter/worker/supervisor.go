package worker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"gpu-exporter/exporter/input"
	"gpu-exporter/nvml/beat"
	"gpu-exporter/nvml/frame"
)

// The reasons for which a worker is replaced: the values of the label reason of gpu_exporter_nvml_restarts_total.
const (
	ReasonExit    = "exit"    // it ended by itself
	ReasonCrash   = "crash"   // a signal ended it
	ReasonHang    = "hang"    // no frame came, or every device hung
	ReasonStuck   = "stuck"   // a hang that not even SIGKILL ended: the process is left behind
	ReasonGarbage = "garbage" // what it printed were no frames of this version
	ReasonMemory  = "memory"  // it grew beyond the limit
	ReasonLibrary = "library" // NVML could not be loaded or initialised, or has gone
)

// Supervisor keeps one worker running. Make it with New.
type Supervisor struct {
	cfg      Config
	messages messages

	// What follows up to mu belongs to Run.
	emit     func(input.Input)
	starter  starter
	source   *input.Source // the last one emitted
	restarts map[string]uint64
	devices  map[int]deviceState
	inPIDNS  bool
	nonsense string // the complaint last logged about a line

	mu      sync.Mutex
	running *process
	stuck   []*process // left behind
	held    bool
	changed chan struct{} // closed and replaced when held changes or a worker ends
	garbage uint64
}

// deviceState is what the log last said about a device.
type deviceState struct {
	state frame.State
	since time.Time
}

// New returns a supervisor. Nothing runs before Run.
func New(c Config) *Supervisor {
	c = c.withDefaults()
	return &Supervisor{cfg: c, messages: messages{logger: c.Logger}, restarts: map[string]uint64{}, changed: make(chan struct{})}
}

// PIDs returns the running worker, if any, and those left behind: processes that are never workloads.
func (s *Supervisor) PIDs() []int {
	s.mu.Lock()
	defer s.mu.Unlock()
	var pids []int
	if s.running != nil {
		pids = append(pids, s.running.pid)
	}
	for _, p := range s.stuck {
		pids = append(pids, p.pid)
	}
	return pids
}

// Garbage returns how many lines of all workers so far were no frames.
func (s *Supervisor) Garbage() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.garbage
}

// Release ends the worker, so that no handle of the driver's devices is held and its modules can be unloaded, and returns when it is gone.
// None is started until Resume. The error says that the worker could not be ended, or that ctx was done first.
func (s *Supervisor) Release(ctx context.Context) error {
	s.hold(true)
	for {
		s.mu.Lock()
		running, stuck, changed := s.running != nil, len(s.alive()), s.changed
		s.mu.Unlock()
		switch {
		case !running && stuck > 0:
			return fmt.Errorf("%d worker(s) hang in the driver and cannot be ended", stuck)
		case !running:
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Resume undoes Release.
func (s *Supervisor) Resume() { s.hold(false) }

// Released tells whether Release is in force.
func (s *Supervisor) Released() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.held
}

func (s *Supervisor) hold(held bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held != held {
		s.held = held
		s.announce()
	}
}

// announce wakes those who wait for a change; mu is held.
func (s *Supervisor) announce() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// alive forgets the workers left behind that have ended after all, and returns the others; mu is held.
func (s *Supervisor) alive() []*process {
	var alive []*process
	for _, p := range s.stuck {
		select {
		case <-p.done:
		default:
			alive = append(alive, p)
		}
	}
	s.stuck = alive
	return alive
}

// Run keeps a worker running until ctx ends, and then ends it. Frames and changes of the source's state go to emit, from one goroutine.
// Run may be called once.
func (s *Supervisor) Run(ctx context.Context, emit func(input.Input)) {
	s.emit = emit
	s.starter = newStarter()
	defer close(s.starter)
	backoff := s.cfg.BackoffMin
	for ctx.Err() == nil {
		s.mu.Lock()
		held, changed, stuck := s.held, s.changed, s.alive()
		s.mu.Unlock()
		switch {
		case held:
			s.setSource(false, "released: the driver's devices are closed until resumed")
			select {
			case <-changed:
			case <-ctx.Done():
			}
			backoff = s.cfg.BackoffMin
			continue
		case len(stuck) >= s.cfg.MaxStuck:
			s.setSource(false, fmt.Sprintf("%d workers hang in the driver and cannot be ended; none is started until one of them has ended", len(stuck)))
			select {
			case <-stuck[0].done:
			case <-time.After(time.Second): // another of them may have ended
			case <-changed:
			case <-ctx.Done():
			}
			continue
		}

		o := s.once(ctx)
		if o.reason != "" {
			s.restarts[o.reason]++
		}
		if o.stopped {
			continue
		}
		s.setSource(false, o.text)
		if o.healthy >= s.cfg.Healthy {
			backoff = s.cfg.BackoffMin
		}
		s.pause(ctx, backoff, o.reason == ReasonLibrary)
		backoff = min(2*backoff, s.cfg.BackoffMax)
	}
}

// pause waits before the next start. A driver that has been loaded, or replaced, ends it early.
func (s *Supervisor) pause(ctx context.Context, d time.Duration, watch bool) {
	s.mu.Lock()
	changed := s.changed
	s.mu.Unlock()
	end := time.NewTimer(d)
	defer end.Stop()
	var look <-chan time.Time
	var before string
	if watch {
		before = s.driver()
		t := time.NewTicker(2 * time.Second)
		defer t.Stop()
		look = t.C
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
			return
		case <-end.C:
			return
		case <-look:
			if now := s.driver(); now != "" && now != before {
				return
			}
		}
	}
}

// driver returns the version of the loaded driver's module, "" if none is loaded.
func (s *Supervisor) driver() string {
	for _, root := range []string{s.cfg.DriverRoot, "/"} {
		if b, err := os.ReadFile(filepath.Join(root, "sys/module/nvidia/version")); err == nil {
			return string(b)
		}
	}
	return ""
}

// setSource emits the source's state if it changed, and logs what changed of it.
func (s *Supervisor) setSource(up bool, reason string) {
	last := s.source
	switch {
	case up && (last == nil || !last.Up):
		s.cfg.Logger.Info("NVML is up", "pid", s.pid())
	case !up && (last == nil || last.Reason != reason || last.Up):
		s.cfg.Logger.Warn("NVML is down", "reason", reason)
	}
	s.emitSource(up, reason)
}

// started emits the new worker's PID as soon as it is known. The rest of the state is as it was until the worker says more.
func (s *Supervisor) started() {
	if s.source == nil {
		s.emitSource(false, "starting")
		return
	}
	s.emitSource(s.source.Up, s.source.Reason)
}

func (s *Supervisor) emitSource(up bool, reason string) {
	src := input.Source{Name: input.SourceNVML, Up: up, Reason: reason, PID: s.pid(), Restarts: maps.Clone(s.restarts)}
	if last := s.source; last != nil && last.Up == up && last.Reason == reason && last.PID == src.PID && maps.Equal(last.Restarts, src.Restarts) {
		return
	}
	s.source = &src
	s.emit(input.Input{Time: time.Now().UnixNano(), Source: &src})
}

// pid returns the running worker's PID, 0 if there is none.
func (s *Supervisor) pid() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running == nil {
		return 0
	}
	return s.running.pid
}

// outcome is how a worker ended.
type outcome struct {
	stopped bool          // we ended it: the context is done, or Release
	reason  string        // for the count; empty: it never started
	text    string        // for people
	healthy time.Duration // from the first good library frame to the end
}

// causes of an end that come from outside the worker's output.
const (
	causeNone = iota
	causeStop
	causeMemory
)

// once runs one worker to its end.
func (s *Supervisor) once(ctx context.Context) outcome {
	prog, err := locate(s.cfg)
	if err != nil {
		return outcome{text: err.Error()}
	}
	p, err := s.starter.start(s.cfg, prog)
	if err != nil {
		return outcome{text: err.Error()}
	}
	s.mu.Lock()
	s.running = p
	held := s.held // Release may have come since Run looked
	s.mu.Unlock()
	s.started()
	s.devices = map[int]deviceState{}
	s.messages.take()
	heard := make(chan struct{})
	go func() {
		defer close(heard)
		s.messages.read(p.stderr)
	}()

	w := &watch{p: p}
	if held {
		w.end(causeStop)
	}
	quit := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() { s.watch(ctx, w, quit) })
	o := s.read(w)
	close(quit)
	watching.Wait()
	return s.finish(w, o, heard)
}

// watch is the one worker's state that its reader and its watcher share.
type watch struct {
	p     *process
	mu    sync.Mutex
	cause int
}

// end makes the reader return, for a cause; the first one counts.
func (w *watch) end(cause int) {
	w.mu.Lock()
	if w.cause == causeNone {
		w.cause = cause
	}
	w.mu.Unlock()
	w.p.stdout.SetReadDeadline(time.Unix(1, 0))
}

func (w *watch) why() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.cause
}

// watch ends the worker when ctx is done, on Release, and when it has grown too big.
func (s *Supervisor) watch(ctx context.Context, w *watch, quit <-chan struct{}) {
	size := beat.New(min(5*time.Second, s.cfg.HangAfter))
	defer size.Stop()
	for {
		s.mu.Lock()
		held, changed := s.held, s.changed
		s.mu.Unlock()
		if held {
			w.end(causeStop)
			return
		}
		select {
		case <-quit:
			return
		case <-ctx.Done():
			w.end(causeStop)
			return
		case <-changed:
		case <-size.C:
			size.Again()
			if s.cfg.MemoryLimit > 0 && resident(w.p.pid) > s.cfg.MemoryLimit {
				w.end(causeMemory)
				return
			}
		}
	}
}

// resident returns the process's resident memory in bytes, 0 if unknown.
func resident(pid int) int64 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	var size, rss int64
	if err == nil {
		fmt.Sscan(string(b), &size, &rss)
	}
	return rss * int64(os.Getpagesize())
}

// read passes the worker's frames on until there are no more, or none that are worth waiting for.
func (s *Supervisor) read(w *watch) (o outcome) {
	in := newLines(w.p.stdout, 64<<10, s.cfg.MaxLine)
	patience := s.cfg.StartTimeout
	silence := "no reading came for " + patience.String() + " after its start"
	var upSince time.Time
	defer func() {
		if !upSince.IsZero() {
			o.healthy = time.Since(upSince)
		}
	}()
	garbage := 0
	deadline := time.Now().Add(patience)
	for {
		w.p.stdout.SetReadDeadline(deadline)
		if w.why() != causeNone {
			return o // it ended us before the deadline above was set
		}
		line, err := in.next()
		var f *frame.Frame
		switch {
		case err == nil:
			f, err = decode(line)
		case errors.Is(err, errTooLong):
		case errors.Is(err, os.ErrDeadlineExceeded):
			if w.why() == causeNone {
				o.reason, o.text = ReasonHang, name+" hangs: "+silence
			}
			return o
		default:
			return o // the end of its output
		}
		if err != nil {
			garbage++
			s.mu.Lock()
			s.garbage++
			s.mu.Unlock()
			if text := cleanTo(maxMessage, err.Error()); garbage == 1 && text != s.nonsense {
				s.nonsense = text
				s.cfg.Logger.Warn(name+" printed a line that is no frame", "reason", text)
			}
			if errors.Is(err, errVersion) || garbage >= s.cfg.MaxGarbage {
				o.reason, o.text = ReasonGarbage, name+" does not print frames: "+cleanTo(maxMessage, err.Error())
				return o
			}
			continue // garbage is no sign of life: the deadline stays
		}
		garbage = 0
		if f.Library != nil {
			s.library(f.Library)
			if f.Library.OK && upSince.IsZero() {
				upSince = time.Now()
			}
			o.text = libraryReason(f.Library)
		}
		s.emit(input.Input{Time: time.Now().UnixNano(), Frame: f})
		if f.Device != nil {
			if text := s.device(f.Device); text != "" {
				o.reason, o.text = ReasonHang, text
				return o
			}
		}
		patience, silence = s.cfg.HangAfter, "no reading came for "+s.cfg.HangAfter.String()
		deadline = time.Now().Add(patience)
	}
}

// library follows the state of the library.
func (s *Supervisor) library(l *frame.Library) {
	s.setSource(l.OK, libraryReason(l))
	if l.PIDNamespace && !s.inPIDNS {
		s.cfg.Logger.Warn("NVML shows no processes to a program in a PID namespace of its own: run the exporter in the host's (docker run --pid=host)")
	}
	s.inPIDNS = l.PIDNamespace
}

// maxReason bounds a reason: the list of all paths at which the library was looked for must fit.
const maxReason = 4 << 10

// libraryReason returns why the library cannot be used, "" if it can.
func libraryReason(l *frame.Library) string {
	if l.OK {
		return ""
	}
	if r := cleanTo(maxReason, l.Reason); r != "" {
		return r
	}
	return "NVML cannot be used"
}

// device follows the state of one device. It returns a reason to replace the worker: every device has been hung for too long.
func (s *Supervisor) device(d *frame.Device) string {
	now := time.Now()
	before, known := s.devices[d.Index]
	if !known || before.state != d.State {
		s.devices[d.Index] = deviceState{d.State, now}
		attrs := []any{"index", d.Index, "uuid", cleanTo(maxMessage, d.UUID), "state", cleanTo(maxMessage, string(d.State))}
		switch {
		case d.State != frame.StateOK && d.State != frame.StateAsleep:
			s.cfg.Logger.Warn("GPU cannot be read", append(attrs, "reason", cleanTo(maxMessage, d.Reason))...)
		case known:
			s.cfg.Logger.Info("GPU changed its state", attrs...)
		}
	}
	for _, v := range s.devices {
		if v.state != frame.StateHung || now.Sub(v.since) < s.cfg.AllHungAfter {
			return ""
		}
	}
	return "every GPU hangs: " + cleanTo(maxMessage, d.Reason)
}

// finish ends the worker, if it has not, and says how it ended.
func (s *Supervisor) finish(w *watch, o outcome, heard <-chan struct{}) outcome {
	p, cause := w.p, w.why()
	switch cause {
	case causeStop:
		o.stopped = true
	case causeMemory:
		o.reason, o.text = ReasonMemory, fmt.Sprintf("%s grew beyond %d MiB", name, s.cfg.MemoryLimit>>20)
	}
	p.stdin.Close()
	ended, killed := false, false
	if cause == causeStop || o.reason == "" {
		// Asked to end, or its output has ended: it should be about to.
		ended = p.gone(s.cfg.StopGrace)
	}
	if !ended {
		killed = true
		s.cfg.kill(p)
		ended = p.gone(s.cfg.KillGrace)
	}
	if ended {
		select {
		case <-heard:
		case <-time.After(time.Second): // a child of the worker's may still hold its standard error
		}
	}
	p.stdout.Close()
	p.stderr.Close()

	last, crash := s.messages.take()
	switch {
	case !ended:
		if o.reason = ReasonStuck; o.text == "" {
			o.text = name + " hangs in the driver and cannot be ended"
		}
		s.cfg.Logger.Error(name+" cannot be ended and is left behind", "pid", p.pid)
	case o.stopped, o.reason != "":
	default:
		status, _ := p.state.Sys().(syscall.WaitStatus)
		switch {
		case killed && o.text == "":
			o.reason, o.text = ReasonHang, name+" closed its output and did not end"
		case status.Signaled() && !killed:
			o.reason, o.text = ReasonCrash, fmt.Sprintf("%s crashed: %s", name, status.Signal())
		case crash != "":
			o.reason, o.text = ReasonCrash, fmt.Sprintf("%s crashed: %s", name, crash)
		case o.text != "":
			o.reason = ReasonLibrary // its last word about the library
		default:
			o.reason, o.text = ReasonExit, fmt.Sprintf("%s ended with status %d", name, status.ExitStatus())
			if last != "" {
				o.text += ": " + last
			}
		}
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	s.running = nil
	if !ended {
		s.stuck = append(s.stuck, p)
	}
	s.announce()
	return o
}
