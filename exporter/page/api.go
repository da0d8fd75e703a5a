// Package page serves the snapshot to people and their programs: JSON under /api/v1, and the live page.
package page

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"gpu-exporter/exporter/history"
	"gpu-exporter/exporter/snapshot"
	"gpu-exporter/exporter/untaken"
	"gpu-exporter/exporter/view"
	"gpu-exporter/exporter/why"
	"gpu-exporter/nvml/beat"
)

// Server keeps the history of what latest returns, and answers requests.
type Server struct {
	latest  func() *snapshot.Snapshot
	history *history.History
	ended   chan struct{} // closed when Run returns
	streams atomic.Int64
	untaken untaken.Bound

	now, why cached
}

// maxUntaken bounds the bytes that wait for readers. The history of many containers is 3 MB, and who reads slowly may take half a minute.
const maxUntaken = 32 << 20

// cached is the JSON of a snapshot, made once for all who ask.
type cached struct {
	mu   sync.Mutex
	made *snapshot.Snapshot
	text []byte
}

func (c *cached) of(s *snapshot.Snapshot, view func() any) ([]byte, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.made != s {
		b, err := json.Marshal(view())
		if err != nil {
			return nil, err
		}
		c.made, c.text = s, b
	}
	return c.text, nil
}

// New returns a server of the snapshots that latest returns; it must not return nil. Without Run it has no history.
func New(latest func() *snapshot.Snapshot) *Server {
	return &Server{untaken: untaken.Bound{Most: maxUntaken}, latest: latest, history: history.New(), ended: make(chan struct{})}
}

// Run keeps the history until ctx ends, and ends all streams then. It is called once.
func (s *Server) Run(ctx context.Context) {
	defer close(s.ended)
	tick := beat.New(time.Second) // snapshots are made once in a second, soon after its beginning
	defer tick.Stop()
	var added *snapshot.Snapshot
	for {
		if now := s.latest(); now != added {
			added = now
			s.history.Add(view.New(now))
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			tick.Again()
		}
	}
}

// Register adds the server's paths to a mux.
func (s *Server) Register(mux *http.ServeMux) {
	mux.HandleFunc("GET /api/v1/snapshot", func(w http.ResponseWriter, _ *http.Request) {
		s.answer(w, s.snapshot)
	})
	mux.HandleFunc("GET /api/v1/history", func(w http.ResponseWriter, r *http.Request) {
		points := history.Points
		if text := r.URL.Query().Get("points"); text != "" {
			n, err := strconv.Atoi(text)
			if err != nil || n < 1 || n > history.Points {
				http.Error(w, "points must be 1 to "+strconv.Itoa(history.Points), http.StatusBadRequest)
				return
			}
			points = n
		}
		s.answer(w, func() ([]byte, error) { return json.Marshal(s.history.View(points)) })
	})
	mux.HandleFunc("GET /api/v1/why", func(w http.ResponseWriter, r *http.Request) {
		s.answer(w, func() ([]byte, error) {
			now := s.latest()
			report, err := why.New(view.New(now), view.Others(now), s.history.Past()).Ask(r.URL.Query().Get("container"))
			if err != nil {
				return nil, refusal{err}
			}
			return json.Marshal(report)
		})
	})
}

// snapshot returns the latest snapshot as JSON.
func (s *Server) snapshot() ([]byte, error) {
	now := s.latest()
	return s.now.of(now, func() any { return view.New(now) })
}

// findings returns the first finding of each container as JSON.
func (s *Server) findings() ([]byte, error) {
	now := s.latest()
	return s.why.of(now, func() any { return why.New(view.New(now), nil, s.history.Past()).First() })
}

// refusal is an error of who asks.
type refusal struct{ error }

// answer writes a text, unless too much waits for slow readers.
func (s *Server) answer(w http.ResponseWriter, text func() ([]byte, error)) {
	var b []byte
	taken, err := s.untaken.Make(func() (int, error) {
		var err error
		b, err = text()
		return len(b), err
	})
	defer taken()
	var refused refusal
	switch {
	case errors.Is(err, untaken.Err):
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	case errors.As(err, &refused):
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	case err != nil:
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	w.Write(b)
	w.Write([]byte{'\n'})
}
