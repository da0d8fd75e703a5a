package worker

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"gpu-exporter/nvml/frame"
)

var (
	errTooLong = errors.New("line too long")
	errEmpty   = errors.New("a line that says nothing")
	errVersion = errors.New("format version")
)

// maxDevices bounds the device index that a frame may name.
const maxDevices = 1024

// lines reads lines of bounded length.
type lines struct {
	r   *bufio.Reader
	max int
	buf []byte
	cut bool // in the middle of a line of which errTooLong has been returned
}

func newLines(r io.Reader, size, max int) *lines {
	return &lines{r: bufio.NewReaderSize(r, size), max: max}
}

// next returns the next line without its end, valid until the next call. errTooLong says that a line is being skipped; of
// one that does not end it says so again for every l.max bytes. A line that the end of the stream cuts off is dropped: half a line is worth nothing.
func (l *lines) next() ([]byte, error) {
	if cap(l.buf) > 1<<20 {
		l.buf = nil // one huge line must not cost its memory for ever
	}
	l.buf = l.buf[:0]
	skipped := 0
	for {
		part, err := l.r.ReadSlice('\n')
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return nil, err
		}
		if l.cut {
			if skipped += len(part); err == nil {
				l.cut, skipped = false, 0
			} else if skipped > 16*l.max {
				skipped = 0
				return nil, errTooLong
			}
			continue
		}
		if len(l.buf)+len(part) > l.max {
			l.cut = err != nil
			return nil, errTooLong
		}
		if err == nil && len(l.buf) == 0 {
			return part[:len(part)-1], nil
		}
		l.buf = append(l.buf, part...)
		if err == nil {
			return l.buf[:len(l.buf)-1], nil
		}
	}
}

// decode reads one line as a frame, and refuses what no worker of this version writes.
func decode(line []byte) (*frame.Frame, error) {
	f := new(frame.Frame)
	if err := json.Unmarshal(line, f); err != nil {
		var v struct {
			Version int `json:"v"`
		}
		if json.Unmarshal(line, &v) == nil && v.Version != 0 && v.Version != frame.Version {
			f.Version = v.Version
			return nil, wrongVersion(v.Version)
		}
		return nil, fmt.Errorf("not a frame: %w", err)
	}
	switch {
	case f.Version != frame.Version && f.Version != 0:
		return nil, wrongVersion(f.Version)
	case f.Version == 0, f.Time <= 0, f.Library == nil && f.Device == nil && len(f.Events) == 0 && len(f.Calls) == 0:
		return nil, errEmpty
	case f.Device != nil && (f.Device.Index < 0 || f.Device.Index >= maxDevices || f.Device.State == ""):
		return nil, errEmpty
	}
	return f, nil
}

func wrongVersion(v int) error {
	return fmt.Errorf("%w %d, this exporter reads %d: the two programs are of different releases", errVersion, v, frame.Version)
}
