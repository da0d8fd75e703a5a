package poller

import (
	"slices"
	"time"

	"gpu-exporter/nvml"
	"gpu-exporter/nvml/frame"
)

// rings remembers how far each of a device's sample rings has been delivered, in Unix microseconds by the driver's clock, which is the wall
// clock. One memory shared by several devices would lose samples.
type rings struct {
	started bool
	process int64 // newest process sample delivered
	covered int64 // up to where process samples are known
	util    int64
	power   int64

	putil []nvml.ProcessUtilization
	ring  []nvml.RingSample
	seen  map[pidTime]int
}

type pidTime struct {
	pid int
	t   int64
}

const (
	// settle is how late the driver may add a process sample. Time that is older and has none was idle.
	settle = time.Second
	// ahead is how far in the future a timestamp may be before it is garbage.
	ahead = time.Second
)

// samples empties those of the driver's rings that are due since the last time, each by its own last timestamp, so that every sample is
// delivered exactly once.
func (d *device) samples(now time.Time) *frame.Samples {
	cfg := &d.p.cfg
	processDue, utilDue, powerDue := due(now, &d.processAt, cfg.Samples), due(now, &d.utilAt, cfg.Util), due(now, &d.powerAt, cfg.Power)
	if !processDue && !utilDue && !powerDue {
		return nil
	}
	r, s := &d.rings, &d.out.samples
	*s = frame.Samples{Process: s.Process[:0], Utilization: s.Utilization[:0], Power: s.Power[:0]}
	t := now.UnixMicro()
	future := t + ahead.Microseconds()
	if !r.started {
		// What was sampled before is not counted: a worker before this one may have delivered it.
		*r = rings{started: true, process: t, covered: t, util: t, power: t, putil: r.putil, ring: r.ring, seen: r.seen}
	}
	// A wall clock that was set back must not silence the rings until it has caught up.
	for _, last := range []*int64{&r.process, &r.covered, &r.util, &r.power} {
		if *last > future {
			*last = t - d.p.cfg.Samples.Microseconds()
		}
	}
	if processDue && d.may("process_utilization") {
		list, err := d.dev.GetProcessUtilization(r.putil[:0], r.process)
		if d.ok("process_utilization", err) {
			r.putil = list
			s.Process = r.take(s.Process, list, future)
			s.ProcessSince = r.covered
			r.covered = max(r.covered, r.process, t-settle.Microseconds())
			s.ProcessUntil = r.covered
		}
	}
	if utilDue {
		s.Utilization = d.ring(s.Utilization, "samples_utilization", nvml.SamplesUtilization, &r.util, future)
	}
	if powerDue {
		s.Power = d.ring(s.Power, "samples_power", nvml.SamplesPower, &r.power, future)
	}
	return s
}

// take appends the samples that are new and possible to out. A PID that is named twice at one time counts once, with the larger figure.
func (r *rings) take(out []frame.ProcessSample, list []nvml.ProcessUtilization, future int64) []frame.ProcessSample {
	newest := r.process
	if r.seen == nil {
		r.seen = map[pidTime]int{}
	}
	clear(r.seen)
	for _, p := range list {
		if p.Time <= r.process || p.Time > future {
			continue
		}
		newest = max(newest, p.Time)
		s := frame.ProcessSample{PID: p.PID, Time: p.Time, SM: p.SM, Memory: p.Memory, Enc: p.Encoder, Dec: p.Decoder}
		key := pidTime{p.PID, p.Time}
		if i, twice := r.seen[key]; twice {
			if s.SM > out[i].SM {
				out[i] = s
			}
			continue
		}
		r.seen[key] = len(out)
		out = append(out, s)
	}
	r.process = newest
	return out
}

// ring appends the new samples of one of the device's own rings to out, oldest first.
func (d *device) ring(out []frame.Sample, key string, which uint32, last *int64, future int64) []frame.Sample {
	if !d.may(key) {
		return out
	}
	list, err := d.dev.GetSamples(d.rings.ring[:0], which, *last)
	if !d.ok(key, err) {
		return out
	}
	d.rings.ring = list
	slices.SortFunc(list, func(a, b nvml.RingSample) int {
		switch {
		case a.Time < b.Time:
			return -1
		case a.Time > b.Time:
			return 1
		}
		return 0
	})
	for _, s := range list {
		if s.Time <= *last || s.Time > future {
			continue
		}
		*last = s.Time
		out = append(out, frame.Sample{Time: s.Time, Value: s.Value})
	}
	return out
}
