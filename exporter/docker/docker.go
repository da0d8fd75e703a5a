// Package docker follows the containers of a Docker engine: it subscribes to the engine's events, lists, inspects, and applies the
// events. It only looks, never touches. Docker that is absent, hangs or answers nonsense is a state with a reason, not an error.
package docker

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/input"
)

// DefaultHost is where Docker listens unless told otherwise.
const DefaultHost = "unix:///var/run/docker.sock"

// Config says which engine to follow and when to lose patience with it. Zero values take the defaults named.
type Config struct {
	// Host is the engine's address as in DOCKER_HOST: "unix:///path", a plain path, or "tcp://host:port". Empty: DefaultHost.
	Host string
	// ProcRoot is a /proc of the host's PID namespace. From it come the device nodes inside containers, and whether a container
	// still lives while Docker is down. Empty: "/proc".
	ProcRoot string

	Timeout    time.Duration // for one answer; 5 s
	Resync     time.Duration // pause between lists, which find what the events missed; 1 min
	Ping       time.Duration // pause between signs of life; 10 s
	StallAfter time.Duration // an event that a list has proved missing may still come for so long; 3 s
	BackoffMin time.Duration // pause before the first reconnection; 100 ms. It doubles with each.
	BackoffMax time.Duration // longest pause; 30 s. While nothing listens at all it is 2 s.
	StaleAfter time.Duration // with Docker down, containers of which /proc says nothing are forgotten after this; 1 min
	Inspects   int           // at the same time; 4

	// Logger gets one line per change of state. Nil: slog.Default.
	Logger *slog.Logger
}

func (c Config) withDefaults() Config {
	for _, d := range []struct {
		v   *time.Duration
		def time.Duration
	}{
		{&c.Timeout, 5 * time.Second}, {&c.Resync, time.Minute}, {&c.Ping, 10 * time.Second}, {&c.StallAfter, 3 * time.Second},
		{&c.BackoffMin, 100 * time.Millisecond}, {&c.BackoffMax, 30 * time.Second}, {&c.StaleAfter, time.Minute},
	} {
		if *d.v <= 0 {
			*d.v = d.def
		}
	}
	if c.Host == "" {
		c.Host = DefaultHost
	}
	if strings.HasPrefix(c.Host, "/") {
		c.Host = "unix://" + c.Host
	}
	if c.ProcRoot == "" {
		c.ProcRoot = "/proc"
	}
	if c.Inspects <= 0 {
		c.Inspects = 4
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

// socket returns the path of the engine's socket, or "" where it is not a unix socket.
func (c Config) socket() string {
	path, ok := strings.CutPrefix(c.Host, "unix://")
	if !ok {
		return ""
	}
	return path
}

// Watcher follows one engine. Make it with New; its fields belong to Run.
type Watcher struct {
	cfg  Config
	proc proc
	dial func(ctx context.Context) (stream, string, error) // the engine and its API version; tests replace it

	emit   func(input.Input)
	known  map[string]*entry      // running containers by full id; kept while Docker is down
	list   []containers.Container // as last emitted
	listed bool                   // list has been emitted
	source *input.Source          // as last emitted
	lost   map[string]uint64      // connections lost, by kind
	since  time.Time              // of the last event
	downAt time.Time              // zero: up
	logged map[string]bool        // the reasons logged since the last connection that held
	partly string                 // the complaint logged while connected

	watchSession func(*session) // for tests: gets every session when it begins
}

// entry is one running container.
type entry struct {
	c containers.Container
	// start is the start time of the container's first process, from /proc/<pid>/stat; zero where /proc does not show that process.
	start uint64
	// partial is true while only the list or an event told of it, because inspecting it fails.
	partial bool
}

// New returns a watcher. Nothing runs before Run.
func New(c Config) *Watcher {
	c = c.withDefaults()
	w := &Watcher{cfg: c, proc: proc{root: c.ProcRoot}, known: map[string]*entry{}, lost: map[string]uint64{}, logged: map[string]bool{}}
	w.dial = func(ctx context.Context) (stream, string, error) {
		a, err := dial(ctx, c.Host, c.Timeout)
		if err != nil {
			return nil, "", err
		}
		return a, a.client.ClientVersion(), nil
	}
	return w
}

// Run follows the engine until the context ends. It emits the full set of running containers whenever that changed, and the state
// of the source whenever that changed.
func (w *Watcher) Run(ctx context.Context, emit func(input.Input)) {
	w.emit = emit
	backoff := w.cfg.BackoffMin
	for {
		seen := identify(w.cfg.socket())
		began := time.Now()
		err := w.session(ctx)
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > 10*time.Second {
			backoff = w.cfg.BackoffMin
		}
		// One that answers and then fails, again and again, is one outage, and so is one that never answers, for as long as that is waited for.
		if w.source != nil && w.source.Up && time.Since(began) > w.cfg.Timeout {
			clear(w.logged)
		}
		f := diagnose(w.cfg.Host, err)
		w.down(f)
		limit := w.cfg.BackoffMax
		if f.cheap {
			limit = min(limit, 2*time.Second)
		}
		if !w.wait(ctx, min(backoff, limit), seen) {
			return
		}
		backoff = min(2*backoff, w.cfg.BackoffMax)
	}
}

// wait pauses, but not longer than until another socket is there, and meanwhile forgets containers that end. It returns false when
// the context ended.
func (w *Watcher) wait(ctx context.Context, d time.Duration, seen identity) bool {
	end := time.NewTimer(d)
	defer end.Stop()
	look := time.NewTicker(min(d, 500*time.Millisecond))
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-end.C:
			w.prune(time.Now())
			return true
		case now := <-look.C:
			w.prune(now)
			if id := identify(w.cfg.socket()); id != seen && id != (identity{}) {
				return true
			}
		}
	}
}

// prune forgets, while Docker is down, the containers whose first process has ended.
func (w *Watcher) prune(now time.Time) {
	changed := false
	for id, e := range w.known {
		if e.start != 0 && w.proc.startTime(e.c.PID) == e.start {
			continue
		}
		if e.start == 0 && now.Sub(w.downAt) < w.cfg.StaleAfter {
			continue
		}
		delete(w.known, id)
		changed = true
	}
	if changed {
		w.flush()
	}
}

// flush emits the containers if they differ from what was emitted last.
func (w *Watcher) flush() {
	list := make([]containers.Container, 0, len(w.known))
	for _, id := range slices.Sorted(maps.Keys(w.known)) {
		list = append(list, w.known[id].c)
	}
	if w.listed && slices.EqualFunc(list, w.list, containers.Container.Equal) {
		return
	}
	w.list, w.listed = list, true
	w.emit(input.Input{Time: time.Now().UnixNano(), Containers: &input.Containers{List: list}})
}

// maxLogged bounds the lines about one outage.
const maxLogged = 8

// down reports that the engine cannot be followed.
func (w *Watcher) down(f failure) {
	if w.source != nil && w.source.Up {
		w.lost[f.kind]++
	}
	if w.downAt.IsZero() {
		w.downAt = time.Now()
	}
	w.state(false, f.reason)
	// An engine in trouble may change its symptoms back and forth.
	if !w.logged[f.reason] && len(w.logged) < maxLogged {
		w.logged[f.reason] = true
		w.cfg.Logger.Warn("docker is not available: containers have no names", "reason", f.reason)
	}
}

// up reports that the engine is being followed. reason is empty, or says what does not work.
func (w *Watcher) up(version, reason string) {
	first := w.source == nil || !w.source.Up
	w.downAt = time.Time{}
	w.state(true, reason)
	switch {
	case first:
		w.partly = reason
		w.cfg.Logger.Info("docker connected", "host", w.cfg.Host, "api", version, "containers", len(w.known))
		if reason != "" {
			w.cfg.Logger.Warn("docker answers only in part", "reason", reason)
		}
	case reason != w.partly && reason != "":
		w.partly = reason
		w.cfg.Logger.Warn("docker answers only in part", "reason", reason)
	case reason != w.partly:
		w.partly = reason
		w.cfg.Logger.Info("docker answers in full again")
	}
}

func (w *Watcher) state(up bool, reason string) {
	src := &input.Source{Name: input.SourceDocker, Up: up, Reason: reason, Restarts: maps.Clone(w.lost)}
	if s := w.source; s != nil && s.Up == up && s.Reason == reason && maps.Equal(s.Restarts, src.Restarts) {
		return
	}
	w.source = src
	w.emit(input.Input{Time: time.Now().UnixNano(), Source: src})
}
