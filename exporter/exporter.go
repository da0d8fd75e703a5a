// Package exporter wires the sources to the snapshot: one goroutine owns the builder, takes every input, and publishes an immutable
// snapshot that scrapes read.
package exporter

import (
	"context"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/docker"
	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/processes"
	"gpu-exporter/exporter/processes/watch"
	"gpu-exporter/exporter/recording"
	"gpu-exporter/exporter/snapshot"
	"gpu-exporter/exporter/worker"
	"gpu-exporter/tracer"
	"gpu-exporter/tracer/activity"
)

// Config says what to watch.
type Config struct {
	Worker   worker.Config
	Docker   docker.Config
	Tracer   tracer.Config
	ProcRoot string
	HostIP   string
	Snapshot snapshot.Config

	Record string        // file to record the inputs in; empty: none
	Replay []input.Input // served instead of this host; nil: this host
	Logger *slog.Logger
}

// Exporter publishes snapshots.
type Exporter struct {
	cfg    Config
	latest atomic.Pointer[snapshot.Snapshot]
	worker *worker.Supervisor
	tracer atomic.Pointer[tracer.Tracer] // nil before Run
}

// New returns an exporter whose snapshot is empty until Run has inputs.
func New(c Config) *Exporter {
	e := &Exporter{cfg: c, worker: worker.New(c.Worker)}
	e.latest.Store(&snapshot.Snapshot{Time: time.Now(), Recorded: c.Replay != nil})
	return e
}

// Latest returns the latest snapshot; never nil.
func (e *Exporter) Latest() *snapshot.Snapshot { return e.latest.Load() }

// Release lets go of the driver: it ends the worker and detaches from the driver's tracepoint, so that no device, library or module of it is in use by
// the exporter and the driver can be unloaded or replaced. Until Resume there are no readings of NVML. The error says that a worker could not be ended.
func (e *Exporter) Release(ctx context.Context) error {
	if t := e.tracer.Load(); t != nil {
		t.Release()
	}
	return e.worker.Release(ctx)
}

// Resume undoes Release.
func (e *Exporter) Resume() {
	if t := e.tracer.Load(); t != nil {
		t.Resume()
	}
	e.worker.Resume()
}

// How long inputs are gathered before a snapshot is made of them: changes for a moment, and what comes every second, as all sources tick together, until
// the sources have had their turn. Longer where a snapshot is dear, so that they take a twentieth of one core at most.
const (
	settle = 2 * time.Millisecond
	gather = 50 * time.Millisecond
	share  = 20
)

// Run watches until ctx ends.
func (e *Exporter) Run(ctx context.Context) error {
	var record *recording.Writer
	if e.cfg.Record != "" {
		w, err := recording.Create(e.cfg.Record)
		if err != nil {
			return err
		}
		record = w
		defer w.Close()
	}
	kernel, err := tracer.New(e.cfg.Tracer)
	if err != nil {
		return err
	}
	e.tracer.Store(kernel)
	inputs := make(chan input.Input, 1024)
	emit := func(in input.Input) {
		select {
		case inputs <- in:
		case <-ctx.Done():
		}
	}
	var sources sync.WaitGroup
	defer sources.Wait()
	var procs *watch.Watcher // nil in a replay, which has the facts of its processes
	if e.cfg.Replay != nil {
		sources.Go(func() {
			for ctx.Err() == nil {
				recording.Play(ctx, e.cfg.Replay, emit)
			}
		})
	} else {
		procs = watch.New(watch.Config{Root: e.cfg.ProcRoot, Interval: e.cfg.Snapshot.Interval, Logger: e.cfg.Logger})
		name, _ := os.Hostname()
		own := processes.ReadOwn(e.cfg.ProcRoot)
		emit(input.Input{Time: time.Now().UnixNano(), Host: &input.Host{IP: e.cfg.HostIP, Name: name, Self: []int{os.Getpid()},
			KernelVersion: own.Kernel, BootID: own.BootID, Capabilities: own.Capabilities}})
		sources.Go(func() { e.worker.Run(ctx, emit) })
		sources.Go(func() { docker.New(e.cfg.Docker).Run(ctx, emit) })
		sources.Go(func() { procs.Run(ctx, emit) })
		sources.Go(func() {
			err := kernel.Run(ctx, func(r *activity.Report) { emit(input.Input{Time: r.Time, Tracer: r}) })
			if err != nil {
				e.cfg.Logger.Error("tracer stopped", "err", err)
			}
		})
	}

	cfg := e.cfg.Snapshot
	cfg.Recorded = e.cfg.Replay != nil
	cfg.OnXid = func(x snapshot.XidReport) { logXid(e.cfg.Logger, x) }
	b := snapshot.NewBuilder(cfg)
	tick := time.NewTicker(2 * time.Second) // readings age though nothing comes
	defer tick.Stop()
	pending := time.NewTimer(time.Hour)
	defer pending.Stop()
	var due time.Time // when the next snapshot is to be made; zero: there is nothing new
	var last news
	var rest time.Duration // after the last snapshot
	for {
		select {
		case <-ctx.Done():
			return nil
		case in := <-inputs:
			if record != nil {
				if err := record.Write(in); err != nil {
					e.cfg.Logger.Error("recording stopped", "err", err)
					record = nil
				}
			}
			b.Apply(in)
			if procs != nil && (in.Frame != nil && in.Frame.Device != nil || in.Tracer != nil) {
				procs.Want(b.PIDs())
			}
			wait := max(gather, rest)
			if last.changed(&in) {
				wait = max(settle, rest)
			}
			if at := time.Now().Add(wait); due.IsZero() || at.Before(due) {
				due = at
				pending.Reset(wait)
			}
		case <-pending.C:
			due = time.Time{}
			began := time.Now()
			e.latest.Store(b.Snapshot(began))
			rest = min(share*time.Since(began), time.Second)
			tick.Reset(2 * time.Second)
		case <-tick.C:
			e.latest.Store(b.Snapshot(time.Now()))
		}
	}
}

// news is what tells a change from figures that come every second.
type news struct {
	events    uint64 // of the tracer
	holders   int
	xids      int
	processes int
}

// changed tells whether an input has something to tell at once.
func (n *news) changed(in *input.Input) bool {
	before := *n
	switch {
	case in.Tracer != nil:
		n.events, n.holders, n.xids = in.Tracer.Events, len(in.Tracer.Processes), len(in.Tracer.Xids)
	case in.Processes != nil:
		n.processes = len(in.Processes.List)
	case in.Frame != nil:
		return len(in.Frame.Events) > 0 || in.Frame.Library != nil
	default:
		return true
	}
	return *n != before
}

// logXid writes a line on an error report of the driver: what no series can hold, the process and the driver's words.
func logXid(l *slog.Logger, x snapshot.XidReport) {
	attrs := []any{"xid", x.Code, "gpu_device_uuid", x.UUID, "gpu_pci_bus_id", x.PCIBusID}
	if x.Process.PID != 0 {
		attrs = append(attrs, "process_pid", x.Process.PID, "process_name", containers.Clean(x.Process.Comm, 64), "container_id", containers.ShortID(x.Container.ID),
			"container_name", containers.Clean(x.Container.Name, 128), "image_name", containers.Clean(x.Container.Image, 128))
	}
	if x.Message != "" {
		attrs = append(attrs, "message", containers.Clean(x.Message, 200))
	}
	l.Warn("the driver reported an Xid", attrs...)
}
