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
	seen    map[string]bool // every name ever emitted
	sources []input.Source
	log     bytes.Buffer
	changed chan struct{}
}

// watch runs a watcher until the test ends, and then sees that no goroutine is left.
func watch(t *testing.T, c Config) *sink {
	t.Helper()
	s := &sink{changed: make(chan struct{}), seen: map[string]bool{}}
	c.Logger = slog.New(slog.NewTextHandler(lockedWriter{s}, nil))
	before, _ := goroutines()
	first := before[0] == 0 // no other watcher runs beside this one
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
		for end := time.Now().Add(3 * time.Second); ; time.Sleep(5 * time.Millisecond) {
			after, stacks := goroutines()
			if after[0] <= before[0] && (!first || after[1] <= before[1]) {
				break
			}
			if time.Now().After(end) {
				t.Errorf("goroutines are left: %v before, %v after:\n%s", before, after, stacks)
				break
			}
		}
		if t.Failed() {
			t.Logf("log:\n%s", s.logged())
		}
	})
	return s
}

// goroutines counts those of this package and the client, and those of connections.
func goroutines() (counts []int, stacks []byte) {
	stacks = make([]byte, 1<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	counts = []int{0, 0}
	for stack := range bytes.SplitSeq(stacks, []byte("\n\n")) {
		switch text := string(stack); {
		case strings.Contains(text, "docker.(*Watcher)"), strings.Contains(text, "docker.(*session)"), strings.Contains(text, "docker.(*api)"),
			strings.Contains(text, "docker.(*proc)"), strings.Contains(text, "client.(*Client)"):
			counts[0]++
		case strings.Contains(text, "http.(*persistConn)"):
			counts[1]++
		}
	}
	return counts, stacks
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
			s.seen[c.Name] = true
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

// patience is for machines that run other tests beside this one; what must be quick is measured in TestDeathIsQuick.
const patience = 3

// wait waits until what was emitted fulfils a condition, and fails the test when it does not in time.
func (s *sink) wait(t *testing.T, limit time.Duration, what string, ok func(state) bool) state {
	t.Helper()
	timeout := time.After(patience * limit)
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
