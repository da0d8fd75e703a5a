package history

import (
	"time"

	"gpu-exporter/exporter/view"
	"gpu-exporter/nvml/frame"
)

// Besides the points that are drawn, the history has means of ten seconds, from which package why tells what holds a container back. The
// memory for them is bounded: 512 GPUs of 3 KB and 1024 uses of 2 KB are 4 MB; a host of 8 GPUs and 32 containers has 0.1 MB.

const (
	// Steps is how many steps are kept.
	Steps = 60
	// StepLength is how long a step is. It is longer than the periods of all figures in it.
	StepLength = 10 * time.Second
	maxUses    = 1024
)

// Load is the mean of a GPU over one step. NaN is absent.
type Load struct {
	Seen                            float32 // snapshots in the step, one a second or more; 0: nothing is known
	Utilization, MemoryBandwidth    float32 // percent
	Clock                           float32 // Hz, of the SMs
	Memory                          float32 // bytes used
	Temperature, Power              float32 // °C, W
	Thermal, PowerLimited, Hardware float32 // part of the step in which the clocks were held down for that
	ToGPU, FromGPU                  float32 // bytes over PCIe in the step
	Uncorrected                     float32 // new uncorrected ECC errors in the step
}

// Use is what one user did on one GPU in one step. NaN is absent.
type Use struct {
	Seen            float32 // snapshots in the step in which it was there; 0: it was not
	SM              float32 // percent of SM time
	MemoryBandwidth float32 // percent
	Memory          float32 // bytes
	CPU             float32 // s of CPU time in the step
	ToGPU, FromGPU  float32 // bytes copied in the step
	Failed          float32 // requests of memory that failed in the step
}

// User is a container, or a process outside containers, on one GPU.
type User struct {
	GPU       string // UUID; empty: not known
	Container string // full id; empty: a process outside
	PID       int    // of the process outside
}

// Past is a copy of the steps, oldest first; the last one is not complete.
type Past struct {
	Start time.Time // of the first step
	Loads map[string][]Load
	Uses  map[User][]Use
}

// At returns when a step began.
func (p *Past) At(step int) time.Time { return p.Start.Add(time.Duration(step) * StepLength) }

// ring is the last Steps steps: step n at n%Steps.
type ring[T any] struct {
	steps [Steps]T
	last  int64 // the newest step that has anything
}

type steps struct {
	now      int64 // the newest step
	loads    map[string]*ring[Load]
	uses     map[User]*ring[Use]
	counters map[counter]view.Number // as they were last
	spare    map[counter]view.Number // as they were before: emptied and filled again, for a new map each second is megabytes on a large host
}

// counter is one of which a step has the increase: of a process, a container or a GPU.
type counter struct {
	user User // with the PID of each process
	name byte // of counters
}

// The counters.
const (
	cpu byte = iota
	toGPU
	fromGPU
	failed
	uncorrected
)

func newSteps() steps {
	return steps{loads: map[string]*ring[Load]{}, uses: map[User]*ring[Use]{}}
}

// step returns the entry of the current step, a new one when it is the first time; nil when there are too many.
func step[K comparable, T any](m map[K]*ring[T], k K, now int64, limit int, fresh T) *T {
	r := m[k]
	if r == nil {
		if len(m) >= limit {
			return nil
		}
		r = &ring[T]{last: -1}
		m[k] = r
	}
	at := &r.steps[now%Steps]
	if r.last != now {
		*at, r.last = fresh, now
	}
	return at
}

// advance makes the steps after the last one up to now empty, and forgets what had none for the whole time.
func advance[K comparable, T any](m map[K]*ring[T], last, now int64) {
	for k, r := range m {
		if now-r.last >= Steps {
			delete(m, k)
			continue
		}
		for n := max(last+1, now-Steps+1); n <= now; n++ {
			var none T
			r.steps[n%Steps] = none
		}
	}
}

var nothing = func() Load {
	x := absent
	return Load{0, x, x, x, x, x, x, x, x, x, x, x, x}
}()

var unused = Use{0, absent, absent, absent, absent, absent, absent, 0}

// mean takes a value into a mean of n with it.
func mean(to *float32, x view.Number, n float32) {
	switch {
	case !x.OK:
	case *to != *to:
		*to = float32(x.V)
	default:
		*to += (float32(x.V) - *to) / n
	}
}

// add takes a snapshot into its step.
func (t *steps) add(s *view.Snapshot) {
	now := s.Time.Unix() / int64(StepLength/time.Second)
	advance(t.loads, t.now, now)
	advance(t.uses, t.now, now)
	t.now = now
	last := t.counters
	if t.spare == nil {
		t.spare = map[counter]view.Number{}
	}
	clear(t.spare)
	t.counters, t.spare = t.spare, last
	// count adds to a figure what its counter counted since the last snapshot.
	count := func(to *float32, c counter, n view.Number) {
		if !n.OK {
			return
		}
		t.counters[c] = n
		if was := last[c]; was.OK {
			if *to != *to {
				*to = 0
			}
			*to += float32(max(0, n.V-was.V))
		}
	}
	for i := range s.Devices {
		d := &s.Devices[i]
		l := step(t.loads, d.UUID, now, maxSeries, nothing)
		if l == nil || d.State != string(frame.StateOK) {
			continue
		}
		l.Seen++
		clock, known := d.Clocks["sm"]
		thermal, power, hardware := d.Limits()
		for _, f := range []struct {
			to *float32
			x  view.Number
		}{{&l.Utilization, d.Utilization}, {&l.MemoryBandwidth, d.MemoryBandwidth}, {&l.Clock, view.Number{V: float64(clock), OK: known}},
			{&l.Memory, number(d.MemoryUsed)}, {&l.Temperature, d.Temperature}, {&l.Power, d.Power},
			{&l.Thermal, part(thermal)}, {&l.PowerLimited, part(power)}, {&l.Hardware, part(hardware)}} {
			mean(f.to, f.x, l.Seen)
		}
		u := User{GPU: d.UUID}
		count(&l.ToGPU, counter{u, toGPU}, d.PCIeRX)
		count(&l.FromGPU, counter{u, fromGPU}, d.PCIeTX)
		errors, known := d.ECC["volatile/uncorrected"]
		count(&l.Uncorrected, counter{u, uncorrected}, view.Number{V: float64(errors), OK: known})
	}
	type sum struct {
		sm, bandwidth view.Number
		memory        view.Bytes
	}
	sums := map[User]*sum{}
	for i := range s.Workloads {
		w := &s.Workloads[i]
		if w.PID == 0 {
			continue
		}
		u := UserOf(w)
		x := sums[u]
		if x == nil {
			x = &sum{}
			sums[u] = x
		}
		x.sm, x.bandwidth, x.memory = frame.Sum(x.sm, w.Utilization), frame.Sum(x.bandwidth, w.MemoryBandwidth), frame.Sum(x.memory, w.Memory)
		if use := step(t.uses, u, now, maxUses, unused); use != nil {
			u.PID = w.PID
			count(&use.CPU, counter{u, cpu}, w.CPU)
			count(&use.ToGPU, counter{u, toGPU}, number(w.PCIeRX))
			count(&use.FromGPU, counter{u, fromGPU}, number(w.PCIeTX))
		}
	}
	for u, x := range sums {
		if use := step(t.uses, u, now, maxUses, unused); use != nil {
			use.Seen++
			mean(&use.SM, x.sm, use.Seen)
			mean(&use.MemoryBandwidth, x.bandwidth, use.Seen)
			mean(&use.Memory, number(x.memory), use.Seen)
		}
	}
	for i := range s.Containers {
		c := &s.Containers[i]
		for gpu, n := range c.FailedRequests {
			u := User{GPU: gpu, Container: c.ID}
			k := counter{u, failed}
			t.counters[k] = view.Number{V: float64(n), OK: true}
			// It counts since the exporter started: where there was no count, all is new.
			if more := float64(n) - last[k].V; more > 0 && last != nil {
				if use := step(t.uses, u, now, maxUses, unused); use != nil {
					use.Failed += float32(more)
				}
			}
		}
	}
}

// UserOf returns the user that a process belongs to.
func UserOf(w *view.Workload) User {
	if w.ContainerID != "" {
		return User{GPU: w.GPUUUID, Container: w.ContainerID}
	}
	return User{GPU: w.GPUUUID, PID: w.PID}
}

func number(n view.Bytes) view.Number { return view.Number{V: float64(n.V), OK: n.OK} }

func part(held bool) view.Number {
	if held {
		return view.Number{V: 1, OK: true}
	}
	return view.Number{OK: true}
}

// Past returns a copy of the steps.
func (h *History) Past() *Past {
	h.mu.Lock()
	defer h.mu.Unlock()
	t := &h.steps
	return &Past{Start: time.Unix((t.now-Steps+1)*int64(StepLength/time.Second), 0), Loads: ordered(t.loads, t.now), Uses: ordered(t.uses, t.now)}
}

// ordered copies rings, the oldest step first.
func ordered[K comparable, T any](m map[K]*ring[T], now int64) map[K][]T {
	out := make(map[K][]T, len(m))
	for k, r := range m {
		first := int((now + 1) % Steps)
		out[k] = append(append(make([]T, 0, Steps), r.steps[first:]...), r.steps[:first]...)
	}
	return out
}
