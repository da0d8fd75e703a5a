package docker

import (
	"bytes"
	"context"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/input"
)

// sink collects what a watcher emits and logs.
type sink struct {
	mu      sync.Mutex
	list    map[string]containers.Container // by name
	lists   int
	sources []input.Source
	log     bytes.Buffer
	changed chan struct{}
}

// watch runs a watcher until the test ends, and then sees that no goroutine is left.
func watch(t *testing.T, c Config) *sink {
	t.Helper()
	s := &sink{changed: make(chan struct{})}
	c.Logger = slog.New(slog.NewTextHandler(lockedWriter{s}, nil))
	before := runtime.NumGoroutine()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	w := New(c)
	go func() {
		defer close(done)
		w.Run(ctx, s.emit)
	}()
	t.Cleanup(func() {
		cancel()
		select {
		case <-done:
		case <-time.After(5 * time.Second):
			t.Error("Run does not end with its context")
		}
		for end := time.Now().Add(3 * time.Second); runtime.NumGoroutine() > before; time.Sleep(5 * time.Millisecond) {
			if time.Now().After(end) {
				stacks := make([]byte, 1<<16)
				t.Errorf("%d goroutines before, %d after:\n%s", before, runtime.NumGoroutine(), stacks[:runtime.Stack(stacks, true)])
				break
			}
		}
		if t.Failed() {
			t.Logf("log:\n%s", s.logged())
		}
	})
	return s
}

type lockedWriter struct{ s *sink }

func (w lockedWriter) Write(p []byte) (int, error) {
	w.s.mu.Lock()
	defer w.s.mu.Unlock()
	return w.s.log.Write(p)
}

func (s *sink) emit(in input.Input) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if in.Containers != nil {
		s.lists++
		s.list = map[string]containers.Container{}
		for _, c := range in.Containers.List {
			s.list[c.Name] = c
		}
	}
	if in.Source != nil {
		s.sources = append(s.sources, *in.Source)
	}
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *sink) logged() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.log.String()
}

// lines counts the log lines that contain a text.
func (s *sink) lines(text string) int { return strings.Count(s.logged(), text) }

// state is what was emitted last.
type state struct {
	list   map[string]containers.Container
	source input.Source
}

// wait waits until what was emitted fulfils a condition, and fails the test when it does not in time.
func (s *sink) wait(t *testing.T, limit time.Duration, what string, ok func(state) bool) state {
	t.Helper()
	timeout := time.After(limit)
	for {
		s.mu.Lock()
		st := state{list: s.list}
		if n := len(s.sources); n > 0 {
			st.source = s.sources[n-1]
		}
		changed := s.changed
		s.mu.Unlock()
		if ok(st) {
			return st
		}
		select {
		case <-changed:
		case <-timeout:
			t.Fatalf("not within %v: %s; containers %v, source %+v", limit, what, st.list, st.source)
		}
	}
}

func up(s state) bool { return s.source.Up }

func down(text string) func(state) bool {
	return func(s state) bool {
		return s.source.Name != "" && !s.source.Up && strings.Contains(s.source.Reason, text)
	}
}

func has(names ...string) func(state) bool {
	return func(s state) bool {
		if s.list == nil {
			return false
		}
		for _, n := range names {
			if _, ok := s.list[n]; !ok {
				return false
			}
		}
		return true
	}
}

func hasNot(name string) func(state) bool {
	return func(s state) bool {
		_, ok := s.list[name]
		return s.list != nil && !ok
	}
}
