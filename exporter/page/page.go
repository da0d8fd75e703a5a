package page

import (
	"embed"
	"encoding/json"
	"fmt"
	"html"
	"net/http"
	"strings"
	"time"
)

//go:embed files
var files embed.FS

// policy lets the page load its own script and style and nothing else, from nowhere else. The empty icon is the one data URL.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// RegisterPage adds the page at / and its files, with a link to the metrics at path.
func (s *Server) RegisterPage(mux *http.ServeMux, path, version string) error {
	for _, f := range []struct{ at, name, kind string }{{"GET /{$}", "index.html", "text/html"}, {"GET /page.css", "page.css", "text/css"}, {"GET /page.js", "page.js", "text/javascript"}} {
		b, err := files.ReadFile("files/" + f.name)
		if err != nil {
			return err
		}
		text := string(b)
		if f.name == "index.html" {
			text = strings.NewReplacer("METRICS", html.EscapeString(strings.TrimPrefix(path, "/")), "VERSION", html.EscapeString(version)).Replace(text)
		}
		mux.HandleFunc(f.at, func(w http.ResponseWriter, _ *http.Request) {
			h := w.Header()
			h.Set("Content-Type", f.kind+"; charset=utf-8")
			h.Set("Content-Security-Policy", policy)
			h.Set("X-Content-Type-Options", "nosniff")
			h.Set("Referrer-Policy", "no-referrer")
			h.Set("Cache-Control", "no-cache")
			fmt.Fprint(w, text)
		})
	}
	mux.HandleFunc("GET /api/v1/stream", s.stream)
	return nil
}

const (
	maxStreams    = 64               // pages that are open at a time
	streamPeriod  = time.Second      // between two snapshots of a stream
	historyEvery  = 4                // snapshots from one history to the next
	historyPoints = 150              // of four seconds
	slow          = 10 * time.Second // a reader that takes longer for one event is gone
)

// stream sends the snapshot every second, and the history and what holds containers back now and then, as server-sent events, until the reader or the server goes.
func (s *Server) stream(w http.ResponseWriter, r *http.Request) {
	if s.streams.Add(1) > maxStreams {
		s.streams.Add(-1)
		http.Error(w, "too many open pages", http.StatusServiceUnavailable)
		return
	}
	defer s.streams.Add(-1)
	h := w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	control := http.NewResponseController(w)
	control.SetReadDeadline(time.Time{}) // the server's would end the request
	send := func(event string, data []byte) error {
		_, err := fmt.Fprintf(w, "event: %s\ndata: %s\n\n", event, data)
		return err
	}
	tick := time.NewTicker(streamPeriod)
	defer tick.Stop()
	for i := 0; ; i++ {
		control.SetWriteDeadline(time.Now().Add(slow))
		if i%historyEvery == 0 {
			b, err := json.Marshal(s.history.View(historyPoints))
			if err != nil || send("history", b) != nil {
				return
			}
			if b, err = s.findings(); err != nil || send("why", b) != nil {
				return
			}
		}
		b, err := s.snapshot()
		if err != nil || send("snapshot", b) != nil || control.Flush() != nil {
			return
		}
		select {
		case <-tick.C:
		case <-r.Context().Done():
			return
		case <-s.ended:
			return
		}
	}
}
