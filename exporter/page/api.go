// Package page serves the snapshot to people and their programs: JSON under /api/v1, and the live page.
package page

import (
	"context"
	"encoding/json"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"gpu-exporter/exporter/history"
	"gpu-exporter/exporter/snapshot"
	"gpu-exporter/exporter/view"
	"gpu-exporter/exporter/why"
)

// Server keeps the history of what latest returns, and answers requests.
type Server struct {
	latest  func() *snapshot.Snapshot
	history *history.History
	ended   chan struct{} // closed when Run returns
	streams atomic.Int64

	now, why cached
}

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
	return &Server{latest: latest, history: history.New(), ended: make(chan struct{})}
}

// Run keeps the history until ctx ends, and ends all streams then. It is called once.
func (s *Server) Run(ctx context.Context) {
	defer close(s.ended)
	// Snapshots come once in a second, not at its beginning: looking twice in it misses none.
	tick := time.NewTicker(500 * time.Millisecond)
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
		}
	}
}

// Register adds the server's paths to a mux.
func (s *Server) Register(mux *http.ServeMux) {
	mux.HandleFunc("GET /api/v1/snapshot", func(w http.ResponseWriter, _ *http.Request) {
		b, err := s.snapshot()
		answer(w, b, err)
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
		b, err := json.Marshal(s.history.View(points))
		answer(w, b, err)
	})
	mux.HandleFunc("GET /api/v1/why", func(w http.ResponseWriter, r *http.Request) {
		now := s.latest()
		report, err := why.New(view.New(now), view.Others(now), s.history.Past()).Ask(r.URL.Query().Get("container"))
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		b, err := json.Marshal(report)
		answer(w, b, err)
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

func answer(w http.ResponseWriter, b []byte, err error) {
	if err != nil {
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
