// Package recording keeps a host in a file: every input of the snapshot, one JSON object per line, compressed with gzip.
package recording

import (
	"bufio"
	"compress/gzip"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"gpu-exporter/exporter/input"
)

// Demo is the built-in recording: 85 s of an H200 (scripts/gpu-host-demo) with a server that answers in bursts,
// a training job that takes what it can get, a notebook that only holds memory, and a host process.
//
//go:embed demo.ndjson.gz
var Demo []byte

// maxLine bounds one line of a recording.
const maxLine = 16 << 20

// Writer appends inputs to a recording. It is used by one goroutine.
type Writer struct {
	f     *os.File
	gz    *gzip.Writer
	enc   *json.Encoder
	flush time.Time
}

// Create starts a recording in a new file.
func Create(path string) (*Writer, error) {
	f, err := os.Create(path)
	if err != nil {
		return nil, fmt.Errorf("creating the recording: %w", err)
	}
	gz := gzip.NewWriter(f)
	return &Writer{f: f, gz: gz, enc: json.NewEncoder(gz)}, nil
}

// Write appends one input. What is older than 5 s is in the file even if the process is killed.
func (w *Writer) Write(in input.Input) error {
	if err := w.enc.Encode(in); err != nil {
		return fmt.Errorf("writing the recording: %w", err)
	}
	if now := time.Now(); now.Sub(w.flush) > 5*time.Second {
		w.flush = now
		if err := w.gz.Flush(); err != nil {
			return fmt.Errorf("writing the recording: %w", err)
		}
	}
	return nil
}

// Close completes the file.
func (w *Writer) Close() error { return errors.Join(w.gz.Close(), w.f.Close()) }

// Read returns the inputs of a recording. A tail that was cut off is left out.
func Read(r io.Reader) ([]input.Input, error) {
	gz, err := gzip.NewReader(r)
	if err != nil {
		return nil, fmt.Errorf("reading the recording: %w", err)
	}
	var list []input.Input
	lines := bufio.NewScanner(gz)
	lines.Buffer(nil, maxLine)
	for lines.Scan() {
		var in input.Input
		if err := json.Unmarshal(lines.Bytes(), &in); err != nil {
			if !lines.Scan() {
				break // the last line, cut
			}
			return nil, fmt.Errorf("reading the recording: line %d: %w", len(list)+1, err)
		}
		list = append(list, in)
	}
	if err := lines.Err(); err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
		return nil, fmt.Errorf("reading the recording: %w", err)
	}
	if len(list) == 0 {
		return nil, errors.New("reading the recording: it is empty")
	}
	return list, nil
}

// Play emits the inputs at their own pace, moved to now, once.
func Play(ctx context.Context, list []input.Input, emit func(input.Input)) {
	start := time.Now().UnixNano()
	shift := start - list[0].Time
	for _, in := range list {
		at := time.Unix(0, in.Time+shift)
		if wait := time.Until(at); wait > 0 {
			select {
			case <-ctx.Done():
				return
			case <-time.After(wait):
			}
		}
		if ctx.Err() != nil {
			return
		}
		emit(Shift(in, shift))
	}
}

// Shift returns in with every point in time moved by ns, so that what runs there is not what runs at another time under the same PID.
func Shift(in input.Input, ns int64) input.Input {
	in.Time += ns
	later := func(start uint64) uint64 { // in clock ticks of 10 ms
		if start == 0 {
			return 0 // not known
		}
		return start + uint64(ns/1e7)
	}
	if in.Processes != nil {
		p := *in.Processes
		p.List = append(p.List[:0:0], p.List...)
		for i := range p.List {
			p.List[i].StartTime = later(p.List[i].StartTime)
		}
		in.Processes = &p
	}
	if in.Tracer != nil {
		r := *in.Tracer
		r.Time += ns
		r.Xids = append(r.Xids[:0:0], r.Xids...)
		for i := range r.Xids {
			r.Xids[i].Time += ns
		}
		r.Processes = append(r.Processes[:0:0], r.Processes...)
		for i := range r.Processes {
			r.Processes[i].StartTime = later(r.Processes[i].StartTime)
		}
		in.Tracer = &r
	}
	if in.Containers != nil {
		c := *in.Containers
		c.List = append(c.List[:0:0], c.List...)
		for i := range c.List {
			c.List[i].Started = c.List[i].Started.Add(time.Duration(ns))
		}
		in.Containers = &c
	}
	if in.Frame == nil {
		return in
	}
	f := *in.Frame
	f.Time += ns
	f.Events = append(f.Events[:0:0], f.Events...)
	for i := range f.Events {
		f.Events[i].Time += ns
	}
	if f.Device != nil && f.Device.Samples != nil {
		d := *f.Device
		s := *d.Samples
		µs := ns / 1000
		if s.ProcessUntil != 0 {
			s.ProcessSince += µs
			s.ProcessUntil += µs
		}
		s.Process = append(s.Process[:0:0], s.Process...)
		for i := range s.Process {
			s.Process[i].Time += µs
		}
		s.Utilization = append(s.Utilization[:0:0], s.Utilization...)
		for i := range s.Utilization {
			s.Utilization[i].Time += µs
		}
		s.Power = append(s.Power[:0:0], s.Power...)
		for i := range s.Power {
			s.Power[i].Time += µs
		}
		d.Samples = &s
		f.Device = &d
	}
	in.Frame = &f
	return in
}
