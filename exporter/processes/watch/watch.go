// Package watch follows the processes of interest: their facts at every tick, and their end as it happens.
package watch

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/processes"
	"gpu-exporter/nvml/beat"
)

// Config says how a Watcher works. Zero values take the defaults named.
type Config struct {
	Root     string        // "/proc"
	Interval time.Duration // 1 s
	// Patience is how long the reading of all processes may take before the file that it is at is taken for hung; 2 s.
	Patience time.Duration
	// PIDsForeign is true when the PIDs of Root are not those of the exporter's own PID namespace: then exits are noticed at the
	// next tick only.
	PIDsForeign bool
	Logger      *slog.Logger // nil: slog.Default
}

// Watcher reports the processes of interest at every tick, and at once when one of them is gone or when others become of interest.
type Watcher struct {
	cfg    Config
	reader *processes.Reader
	wake   chan struct{}
	source *input.Source // the last one emitted
	ticks  int
	empty  bool // the last batch had asked for nothing
	look   processes.Visibility
	behind map[file]*pass // passes that do not come back, by the file they are at

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
	if c.Patience <= 0 {
		c.Patience = 2 * time.Second
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return &Watcher{cfg: c, reader: &processes.Reader{Root: c.Root}, wake: make(chan struct{}, 1), behind: map[file]*pass{}, look: processes.Visible}
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
	ticker := beat.New(w.cfg.Interval)
	defer ticker.Stop()
	for ctx.Err() == nil { // once stopped, the reading that is under way still uses the reader
		if !w.tick(ctx, exits, emit) {
			continue
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			ticker.Again()
		case <-w.wake:
		case <-exits.ended:
		}
	}
}

// maxBehind bounds the passes that do not come back. With so many, nothing more is read until one of them does.
const maxBehind = 16

// lookEvery is the number of ticks after which /proc as a whole is looked at again.
const lookEvery = 10

// tick reads every wanted process once. It returns false when a file hung, which is avoided from then on: the others are to be read at once.
func (w *Watcher) tick(ctx context.Context, exits *exits, emit func(input.Input)) bool {
	now := time.Now()
	avoid := make(map[file]bool, len(w.behind))
	for f, p := range w.behind {
		select {
		case <-p.done:
			delete(w.behind, f)
		default:
			avoid[f] = true
		}
	}
	if len(w.behind) >= maxBehind {
		return true
	}
	w.mu.Lock()
	want := slices.Clone(w.want)
	w.mu.Unlock()
	p := &pass{reader: w.reader, exits: exits, root: w.cfg.Root, want: want, look: w.ticks%lookEvery == 0, avoid: avoid, done: make(chan struct{}), seen: w.look}
	go p.run()
	patience := time.NewTimer(w.cfg.Patience)
	defer patience.Stop()
	select {
	case <-p.done:
	case <-ctx.Done():
		return true
	case <-patience.C:
		w.behind[p.stuck()] = p
		w.reader = &processes.Reader{Root: w.cfg.Root} // the other one is still in use
		w.visibility(now, false, emit)
		return false
	}
	w.ticks++
	w.look = p.seen
	keep := func(pid int) bool {
		_, ok := slices.BinarySearch(want, pid)
		return ok
	}
	w.reader.Forget(keep)
	exits.keep(keep)
	if !w.empty || len(want) > 0 {
		emit(input.Input{Time: now.UnixNano(), Processes: &input.Processes{Asked: p.asked, List: p.list}})
	}
	w.empty = len(want) == 0
	w.visibility(now, p.hidden, emit)
	return true
}

// visibility reports what /proc shows, if that changed.
func (w *Watcher) visibility(now time.Time, hidden bool, emit func(input.Input)) {
	v := w.look
	if v == processes.Visible && hidden {
		v = processes.Hidden
	}
	reason := v.Reason()
	if len(w.behind) > 0 {
		// The smallest, so that the reason does not change with the order of a map.
		f := slices.MinFunc(slices.Collect(maps.Keys(w.behind)), func(a, b file) int { return cmp.Or(cmp.Compare(a.pid, b.pid), cmp.Compare(a.name, b.name)) })
		v, reason = processes.Hangs, fmt.Sprintf("%s (%s/%v)", processes.Hangs.Reason(), w.cfg.Root, f)
	}
	src := &input.Source{Name: input.SourceProcesses, Up: v == processes.Visible, Reason: reason}
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
