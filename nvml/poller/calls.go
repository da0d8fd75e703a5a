package poller

import (
	"time"

	"gpu-exporter/nvml"
	"gpu-exporter/nvml/frame"
)

// callStats sums the NVML calls of one device by function.
type callStats struct {
	index map[string]int
	calls []frame.Call
}

func (s *callStats) add(name string, took time.Duration, r nvml.Return) {
	i, ok := s.index[name]
	if !ok {
		if s.index == nil {
			s.index = map[string]int{}
		}
		i = len(s.calls)
		s.index[name] = i
		s.calls = append(s.calls, frame.Call{Name: name, Buckets: make([]uint64, len(frame.CallBuckets)+1)})
	}
	c := &s.calls[i]
	c.Count++
	switch r {
	case nvml.Success, nvml.ErrNotSupported, nvml.ErrNotFound, nvml.ErrInsufficientSize, nvml.ErrTimeout:
	default:
		c.Errors++
	}
	seconds := took.Seconds()
	c.Seconds += seconds
	b := 0
	for b < len(frame.CallBuckets) && seconds > frame.CallBuckets[b] {
		b++
	}
	c.Buckets[b]++
}

// drain returns what was added since the last time.
func (s *callStats) drain() []frame.Call {
	var out []frame.Call
	for i := range s.calls {
		c := &s.calls[i]
		if c.Count == 0 {
			continue
		}
		last := 0
		for b, n := range c.Buckets {
			if n > 0 {
				last = b + 1
			}
		}
		out = append(out, frame.Call{Name: c.Name, Count: c.Count, Errors: c.Errors, Seconds: c.Seconds, Buckets: append([]uint64(nil), c.Buckets[:last]...)})
		c.Count, c.Errors, c.Seconds = 0, 0, 0
		clear(c.Buckets)
	}
	return out
}
