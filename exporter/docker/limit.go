package docker

import (
	"bytes"
	"errors"
	"io"
)

// errTooLong is returned for an answer that no engine would give.
var errTooLong = errors.New("answer too long")

// limited bounds an answer: in all, or from one newline to the next.
type limited struct {
	body  io.ReadCloser
	left  int
	limit int
	lines bool
}

func (l *limited) Read(p []byte) (int, error) {
	if l.left <= 0 {
		return 0, errTooLong
	}
	if len(p) > l.left {
		p = p[:l.left]
	}
	n, err := l.body.Read(p)
	l.left -= n
	if l.lines {
		if i := bytes.LastIndexByte(p[:n], '\n'); i >= 0 {
			l.left = l.limit - (n - i - 1)
		}
	}
	return n, err
}

func (l *limited) Close() error { return l.body.Close() }
