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

	"gpu-exporter/exporter/docker"
	"gpu-exporter/exporter/input"
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
}

// New returns an exporter whose snapshot is empty until Run has inputs.
func New(c Config) *Exporter {
	e := &Exporter{cfg: c}
	e.latest.Store(&snapshot.Snapshot{Time: time.Now()})
	return e
}

// Latest returns the latest snapshot; never nil.
func (e *Exporter) Latest() *snapshot.Snapshot { return e.latest.Load() }

// settle is how long changes are gathered before a snapshot is made of them.
const settle = 5 * time.Millisecond

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
		emit(input.Input{Time: time.Now().UnixNano(), Host: &input.Host{IP: e.cfg.HostIP, Name: name, Self: []int{os.Getpid()}}})
		sources.Go(func() { worker.New(e.cfg.Worker).Run(ctx, emit) })
		sources.Go(func() { docker.New(e.cfg.Docker).Run(ctx, emit) })
		sources.Go(func() { procs.Run(ctx, emit) })
		sources.Go(func() {
			err := kernel.Run(ctx, func(r *activity.Report) { emit(input.Input{Time: r.Time, Tracer: r}) })
			if err != nil {
				e.cfg.Logger.Error("tracer stopped", "err", err)
			}
		})
	}

	b := snapshot.NewBuilder(e.cfg.Snapshot)
	tick := time.NewTicker(time.Second) // readings age though nothing comes
	defer tick.Stop()
	pending := time.NewTimer(time.Hour)
	defer pending.Stop()
	due := false
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
			if !due {
				due = true
				pending.Reset(settle)
			}
		case <-pending.C:
			due = false
			e.latest.Store(b.Snapshot(time.Now()))
			tick.Reset(time.Second)
		case <-tick.C:
			e.latest.Store(b.Snapshot(time.Now()))
		}
	}
}
