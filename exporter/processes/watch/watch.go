// Package watch follows the processes of interest: their facts at every tick, and their end as it happens.
package watch

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/processes"
)

// Config says how a Watcher works. Zero values take the defaults named.
type Config struct {
	Root     string        // "/proc"
	Interval time.Duration // 1 s
	// PIDsForeign is true when the PIDs of Root are not those of the exporter's own PID namespace: then exits are noticed at the
	// next tick only.
	PIDsForeign bool
	Logger      *slog.Logger // nil: slog.Default
}

// Watcher reports the processes of interest at every tick, and at once when one of them is gone or when others become of interest.
type Watcher struct {
	cfg    Config
	reader processes.Reader
	wake   chan struct{}
	source *input.Source // the last one emitted
	ticks  int
	empty  bool // the last batch had asked for nothing
	look   processes.Visibility

	mu   sync.Mutex
	want []int // sorted
}

// New returns a watcher. Nothing runs before Run.
func New(c Config) *Watcher {
	if c.Root == "" {
		c.Root = "/proc"
	}
	if c.Interval <= 0 {
		c.Interval = time.Second
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return &Watcher{cfg: c, reader: processes.Reader{Root: c.Root}, wake: make(chan struct{}, 1)}
}

// maxWanted bounds the processes of interest: more cannot come from real GPUs.
const maxWanted = 1 << 16

// Want sets the processes of interest, in the host's PID namespace. It may be called at any time and copies pids. New ones are
// read at once.
func (w *Watcher) Want(pids []int) {
	want := slices.DeleteFunc(slices.Clone(pids), func(pid int) bool { return pid <= 0 })
	slices.Sort(want)
	want = slices.Compact(want)
	if len(want) > maxWanted {
		want = want[:maxWanted]
	}
	w.mu.Lock()
	more := slices.ContainsFunc(want, func(pid int) bool {
		_, known := slices.BinarySearch(w.want, pid)
		return !known
	})
	w.want = want
	w.mu.Unlock()
	if more {
		select {
		case w.wake <- struct{}{}:
		default:
		}
	}
}

// Run emits an input.Processes at every tick, at once when Want names new processes, and at once when a wanted process ends; and an
// input.Source at the start and whenever what /proc shows changes. It returns when the context ends.
func (w *Watcher) Run(ctx context.Context, emit func(input.Input)) {
	exits := newExits(w.cfg)
	defer exits.close()
	ticker := time.NewTicker(w.cfg.Interval)
	defer ticker.Stop()
	for {
		w.tick(exits, emit)
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		case <-w.wake:
		case <-exits.ended:
		}
	}
}

// tick reads every wanted process once.
func (w *Watcher) tick(exits *exits, emit func(input.Input)) {
	w.mu.Lock()
	want := slices.Clone(w.want)
	w.mu.Unlock()
	now := time.Now()
	list, hidden := make([]processes.Process, 0, len(want)), false
	for _, pid := range want {
		// The exit watch comes first: what /proc then says is about the watched process, or a later one of the same PID.
		exits.watch(pid)
		p, err := w.reader.Read(pid)
		switch {
		case err == nil:
			list = append(list, p)
		case errors.Is(err, processes.ErrHidden):
			hidden = true
		default:
			exits.drop(pid)
		}
	}
	keep := func(pid int) bool {
		_, ok := slices.BinarySearch(want, pid)
		return ok
	}
	w.reader.Forget(keep)
	exits.keep(keep)
	if !w.empty || len(want) > 0 {
		emit(input.Input{Time: now.UnixNano(), Processes: &input.Processes{Asked: want, List: list}})
	}
	w.empty = len(want) == 0
	w.visibility(now, hidden, emit)
}

// lookEvery is the number of ticks after which /proc as a whole is looked at again.
const lookEvery = 10

func (w *Watcher) visibility(now time.Time, hidden bool, emit func(input.Input)) {
	if w.ticks%lookEvery == 0 {
		w.look = processes.Look(w.cfg.Root)
	}
	w.ticks++
	v := w.look
	if v == processes.Visible && hidden {
		v = processes.Hidden
	}
	src := &input.Source{Name: input.SourceProcesses, Up: v == processes.Visible, Reason: v.Reason()}
	if w.source != nil && w.source.Reason == src.Reason {
		return
	}
	switch {
	case !src.Up:
		w.cfg.Logger.Warn("processes are not all visible", "reason", src.Reason)
	case w.source != nil:
		w.cfg.Logger.Info("processes are visible again")
	}
	w.source = src
	emit(input.Input{Time: now.UnixNano(), Source: src})
}
