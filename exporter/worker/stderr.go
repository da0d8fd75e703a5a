package worker

import (
	"errors"
	"io"
	"log/slog"
	"strings"
	"sync"
)

// messages passes the worker's standard error on to the log, each distinct line once.
type messages struct {
	logger *slog.Logger

	mu    sync.Mutex
	seen  map[string]bool
	last  string
	crash string // the headline of a Go crash; what follows it is a stack trace
}

// maxMessages bounds the memory that distinct lines may take, and the log that a babbling worker may fill.
const maxMessages = 200

// maxMessage is how much of a line is kept.
const maxMessage = 512

// read copies until the stream ends.
func (m *messages) read(r io.Reader) {
	l := newLines(r, 4<<10, 64<<10)
	for {
		line, err := l.next()
		if errors.Is(err, errTooLong) {
			continue
		}
		if err != nil {
			return
		}
		m.line(cleanTo(maxMessage, string(line)))
	}
}

func (m *messages) line(s string) {
	if s == "" {
		return
	}
	m.mu.Lock()
	trace := m.crash != ""
	if !trace && crashes(s) {
		m.crash = s
	}
	m.last = s
	fresh := !trace && !m.seen[s] && len(m.seen) < maxMessages
	if fresh {
		if m.seen == nil {
			m.seen = map[string]bool{}
		}
		m.seen[s] = true
	}
	m.mu.Unlock()
	switch {
	case trace:
		m.logger.Debug(name+" says", "line", s)
	case fresh:
		m.logger.Warn(name+" says", "line", s)
	}
}

// crashes tells whether a line is the headline of a crash. A fault inside the C library ends a Go program not by the signal but through the
// runtime's handler, with exit status 2.
func crashes(s string) bool {
	for _, p := range []string{"SIG", "fatal error: ", "panic: ", "unexpected fault address", "runtime: "} {
		if strings.HasPrefix(s, p) {
			return true
		}
	}
	return false
}

// take returns the latest line and the headline of the crash, if any, since the last call.
func (m *messages) take() (last, crash string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	last, crash = m.last, m.crash
	m.last, m.crash = "", ""
	return last, crash
}

// cleanTo makes a text of at most max bytes that is fit for a log and for a reason: one line, and nothing a terminal would obey.
func cleanTo(max int, s string) string {
	if len(s) > max {
		s = s[:max]
	}
	return strings.TrimSpace(strings.Map(func(r rune) rune {
		if r < ' ' || r >= 0x7f && r < 0xa0 {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "")))
}
