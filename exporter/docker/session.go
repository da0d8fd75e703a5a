package docker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/nvml/beat"
)

// session is one connection to the engine, from the subscription to the first error. Its fields belong to the goroutine of run.
type session struct {
	w       *Watcher
	engine  stream
	version string

	results chan result
	slots   chan struct{} // one per inspect at the same time
	workers sync.WaitGroup

	seq     uint64
	pending map[string]uint64               // the newest inspect by container: an older one's answer is void
	told    map[string]containers.Container // what the list or an event said of a container: better than nothing if inspecting fails
	born    map[string]bool                 // a start was told, and nothing has been emitted of it yet
	failed  map[string]string               // why inspecting a container fails
	heard   map[string]time.Time            // when the last event about a container came
	missed  map[string]time.Time            // a list found a change that no event told: until when to wait for it
	listed  bool                            // the first list has come
	first   map[string]bool                 // containers of the first list that are not inspected yet; nil: the session is up
	dirty   bool
}

// result is the answer to one inspect.
type result struct {
	id      string
	seq     uint64
	asked   time.Time // when the list that led to it was asked for; zero: an event led to it
	c       containers.Container
	start   uint64
	running bool
	err     error
}

// listing is the answer to one list, or to a ping.
type listing struct {
	asked time.Time
	list  []containers.Container
	ping  bool
	err   error
}

// The ends of a session that are no error of the engine's answers.
var (
	errReplaced = errors.New("socket replaced")
	errStalled  = errors.New("events missing")
)

// session follows the engine until something fails.
func (w *Watcher) session(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	socket := identify(w.cfg.socket())
	if err := preflight(ctx, w.cfg.Host, w.cfg.Timeout); err != nil {
		cancel()
		return err
	}
	dialCtx, done := context.WithTimeout(ctx, w.cfg.Timeout)
	engine, version, err := w.dial(dialCtx)
	done()
	if err != nil {
		cancel()
		return err
	}
	s := &session{
		w: w, engine: engine, version: version,
		results: make(chan result, 64), slots: make(chan struct{}, w.cfg.Inspects),
		pending: map[string]uint64{}, told: map[string]containers.Container{}, born: map[string]bool{}, failed: map[string]string{},
		heard: map[string]time.Time{}, missed: map[string]time.Time{}, first: map[string]bool{},
	}
	if w.watchSession != nil {
		w.watchSession(s)
	}
	defer func() {
		cancel()
		s.workers.Wait()
		engine.close()
	}()
	return s.run(ctx, socket)
}

func (s *session) run(ctx context.Context, socket identity) error {
	cfg := s.w.cfg
	// First the subscription, then the list: what happens between the two comes as an event. The engine answers the subscription
	// a moment before it is in force; a start in the past closes that gap, and the one since the last connection.
	since := s.w.since
	if since.IsZero() {
		since = time.Now().Add(-2 * time.Second)
	}
	events, broken := s.engine.events(ctx, since)
	listings := make(chan listing, 1)
	s.ask(ctx, listings, false)

	tick := beat.New(min(time.Second, cfg.Ping))
	defer tick.Stop()
	deadline := time.NewTimer(3 * cfg.Timeout)
	defer deadline.Stop()
	asking, lastPing, lastList := true, time.Now(), time.Now()
	for {
		// Changes that are there already go out together.
		if s.first == nil && s.dirty && len(events) == 0 && len(s.results) == 0 {
			s.flush()
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case e := <-events:
			s.event(ctx, e)
		case err := <-broken:
			// A daemon that shuts down tells of its containers' deaths first.
			for len(events) > 0 {
				s.event(ctx, <-events)
			}
			if s.first == nil && s.dirty {
				s.w.flush()
			}
			return err
		case r := <-s.results:
			s.result(r)
		case l := <-listings:
			asking = false
			if l.err != nil {
				return l.err
			}
			if !l.ping {
				s.reconcile(ctx, l)
			}
		case <-deadline.C:
			s.giveUpOnFirst()
		case now := <-tick.C:
			tick.Again()
			if identify(cfg.socket()) != socket {
				return errReplaced
			}
			if s.stalled(now) {
				return errStalled
			}
			switch {
			case asking:
			case now.Sub(lastList) >= cfg.Resync:
				asking, lastList, lastPing = true, now, now
				s.ask(ctx, listings, false)
			case now.Sub(lastPing) >= cfg.Ping:
				asking, lastPing = true, now
				s.ask(ctx, listings, true)
			}
		}
		if s.first != nil && s.listed && len(s.first) == 0 {
			s.first = nil
			s.flush()
		}
	}
}

// flush emits the containers, and the state: connected, with or without a complaint.
func (s *session) flush() {
	s.dirty = false
	s.w.flush()
	reason := ""
	if len(s.failed) > 0 {
		// The smallest id, so that the reason does not change with the order of a map.
		reason = s.failed[slices.Min(slices.Collect(maps.Keys(s.failed)))]
	}
	s.w.up(s.version, reason)
}

// ask lists, or pings, in the background.
func (s *session) ask(ctx context.Context, to chan<- listing, ping bool) {
	s.workers.Go(func() {
		ctx, cancel := context.WithTimeout(ctx, s.w.cfg.Timeout)
		defer cancel()
		l := listing{asked: time.Now(), ping: ping}
		if ping {
			l.err = s.engine.ping(ctx)
		} else {
			l.list, l.err = s.engine.list(ctx)
		}
		to <- l // has room: one at a time
	})
}

// reconcile compares a list with what is known. The first list of a session leads to an inspect of every container; a later one
// only of those that it says something new about. What an event has told meanwhile is newer than the list.
func (s *session) reconcile(ctx context.Context, l listing) {
	listed := make(map[string]bool, len(l.list))
	for _, c := range l.list {
		listed[c.ID] = true
		s.told[c.ID] = c
		if _, asked := s.pending[c.ID]; s.newer(c.ID, l.asked) || asked {
			if !s.listed && asked {
				s.first[c.ID] = true
			}
			continue
		}
		e := s.w.known[c.ID]
		switch {
		case !s.listed:
			s.first[c.ID] = true
		case e == nil, e.partial, e.c.Name != c.Name, e.start != 0 && s.w.proc.startTime(e.c.PID) != e.start:
		default:
			continue
		}
		s.inspect(ctx, c.ID, l.asked)
	}
	for id := range s.w.known {
		switch {
		case listed[id] || s.newer(id, l.asked):
		case !s.listed:
			delete(s.w.known, id)
			s.dirty = true
		default:
			s.inspect(ctx, id, l.asked)
		}
	}
	s.listed = true
	maps.DeleteFunc(s.told, func(id string, _ containers.Container) bool { return !listed[id] && s.w.known[id] == nil })
	maps.DeleteFunc(s.heard, func(_ string, t time.Time) bool { return t.Before(l.asked) })
}

// newer tells whether an event about a container came after a list was asked for.
func (s *session) newer(id string, asked time.Time) bool {
	t, ok := s.heard[id]
	return ok && !t.Before(asked)
}

// event applies one event.
func (s *session) event(ctx context.Context, e event) {
	if e.time.After(s.w.since) {
		s.w.since = e.time
	}
	switch e.action {
	case "die", "destroy":
		s.heard[e.id] = time.Now()
		delete(s.missed, e.id)
		s.glimpse(e.id, s.told[e.id])
		if k := s.w.known[e.id]; k != nil && (e.time.IsZero() || !e.time.Before(k.c.Started)) {
			s.remove(e.id)
		}
		// An answer that is under way may be from before the death.
		if _, ok := s.pending[e.id]; ok {
			s.inspect(ctx, e.id, time.Time{})
		}
	case "start", "restart", "rename", "update", "stop":
		s.heard[e.id] = time.Now()
		delete(s.missed, e.id)
		if c := e.container(); c.Name != "" {
			s.told[e.id] = c
		}
		if e.action == "start" && s.w.known[e.id] == nil {
			s.born[e.id] = true
		}
		s.inspect(ctx, e.id, time.Time{})
	}
}

// inspect asks for a container in the background. An earlier answer that is still to come is void.
func (s *session) inspect(ctx context.Context, id string, asked time.Time) {
	s.seq++
	seq := s.seq
	s.pending[id] = seq
	s.workers.Go(func() {
		select {
		case s.slots <- struct{}{}:
			defer func() { <-s.slots }()
		case <-ctx.Done():
			return
		}
		r := result{id: id, seq: seq, asked: asked}
		r.c, r.start, r.running, r.err = s.look(ctx, id)
		select {
		case s.results <- r:
		case <-ctx.Done():
		}
	})
}

// look inspects one container and looks into it.
func (s *session) look(ctx context.Context, id string) (c containers.Container, start uint64, running bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.w.cfg.Timeout)
	defer cancel()
	raw, err := s.engine.inspect(ctx, id)
	if err != nil {
		return c, 0, false, err
	}
	if c, running, err = containers.FromInspect(raw); err != nil {
		return c, 0, false, err
	}
	if c.ID != id {
		return c, 0, false, fmt.Errorf("inspecting container %s: the answer is about another container", containers.ShortID(id))
	}
	if running {
		start, c.Nodes = s.w.proc.look(ctx, c.PID, c.ID)
	}
	return c, start, running, nil
}

// result applies the answer to an inspect.
func (s *session) result(r result) {
	if s.pending[r.id] != r.seq {
		return
	}
	delete(s.pending, r.id)
	delete(s.first, r.id)
	had := s.w.known[r.id]
	switch {
	case r.err == nil && r.running:
		s.set(r.id, &entry{c: r.c, start: r.start})
	case r.err == nil:
		s.glimpse(r.id, r.c)
		s.remove(r.id)
	case errors.Is(r.err, errNoContainer):
		s.glimpse(r.id, s.told[r.id])
		s.remove(r.id)
	default:
		s.fail(r.id, r.err)
	}
	// A list came first with a container more or less: its event should follow at once.
	if !r.asked.IsZero() && s.first == nil && (had == nil) != (s.w.known[r.id] == nil) && !s.newer(r.id, r.asked) {
		s.missed[r.id] = time.Now().Add(s.w.cfg.StallAfter)
	}
}

// glimpse emits a container that ended before it was known, so that what it did on a GPU in its short life has a name.
func (s *session) glimpse(id string, c containers.Container) {
	if s.born[id] && c.ID == id && s.first == nil {
		s.set(id, &entry{c: c, partial: true})
		s.flush()
	}
}

func (s *session) set(id string, e *entry) {
	s.w.known[id] = e
	delete(s.born, id)
	if !e.partial {
		delete(s.failed, id)
	}
	s.dirty = true
}

func (s *session) remove(id string) {
	if s.w.known[id] != nil || s.failed[id] != "" {
		s.dirty = true
	}
	delete(s.w.known, id)
	delete(s.failed, id)
	delete(s.told, id)
	delete(s.born, id)
}

// fail keeps what is known of a container that cannot be inspected, or else what the list or the event said.
func (s *session) fail(id string, err error) {
	reason := diagnose(s.w.cfg.Host, err).reason
	if s.failed[id] != reason {
		s.failed[id] = reason
		s.dirty = true
	}
	if c, ok := s.told[id]; ok && s.w.known[id] == nil {
		s.set(id, &entry{c: c, partial: true})
	}
}

// giveUpOnFirst stops waiting for the inspects of the first list: what the list said has to do until they come.
func (s *session) giveUpOnFirst() {
	for id := range s.first {
		s.fail(id, context.DeadlineExceeded)
		delete(s.first, id)
	}
}

// stalled tells whether an event that a list proved missing did not come.
func (s *session) stalled(now time.Time) bool {
	for _, until := range s.missed {
		if now.After(until) {
			return true
		}
	}
	return false
}
