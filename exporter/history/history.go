// Package history keeps the last ten minutes of every GPU and container in memory: one point per second, for the page and for
// `gpu-exporter top`, and means of ten seconds for package why.
package history

import (
	"cmp"
	"encoding/json"
	"math"
	"slices"
	"strconv"
	"sync"
	"time"

	"gpu-exporter/exporter/view"
	"gpu-exporter/nvml/frame"
)

const (
	// Points is how many points a series has, one per second.
	Points = 600
	// maxSeries bounds the GPUs and containers that are kept; those above it have no history.
	maxSeries = 512
)

// Values are the points of a series, oldest first; nil: none is known. NaN is absent, null in JSON.
type Values []float32

// MarshalJSON writes the points with four digits: they are drawn, not added up.
func (v Values) MarshalJSON() ([]byte, error) {
	b := make([]byte, 0, 2+6*len(v))
	b = append(b, '[')
	for i, x := range v {
		if i > 0 {
			b = append(b, ',')
		}
		if math.IsNaN(float64(x)) || math.IsInf(float64(x), 0) {
			b = append(b, "null"...)
		} else {
			b = strconv.AppendFloat(b, float64(x), 'g', 4, 32)
		}
	}
	return append(b, ']'), nil
}

// UnmarshalJSON reads what MarshalJSON wrote.
func (v *Values) UnmarshalJSON(b []byte) error {
	var list []*float32
	if err := json.Unmarshal(b, &list); err != nil {
		return err
	}
	*v = make(Values, len(list))
	for i, x := range list {
		if (*v)[i] = absent; x != nil {
			(*v)[i] = *x
		}
	}
	return nil
}

// Device is the history of a GPU.
type Device struct {
	UUID        string `json:"uuid"`
	Index       int    `json:"index"`
	Utilization Values `json:"utilization_percent,omitempty"`
	Memory      Values `json:"memory_used_bytes,omitempty"`
	Power       Values `json:"power_watts,omitempty"`
	Temperature Values `json:"temperature_celsius,omitempty"`
	PCIeRX      Values `json:"pcie_host_to_device_bytes_per_second,omitempty"`
	PCIeTX      Values `json:"pcie_device_to_host_bytes_per_second,omitempty"`
}

// Container is the history of a container: the sums over its processes.
type Container struct {
	ID          string `json:"id"` // full
	Name        string `json:"name,omitempty"`
	Utilization Values `json:"utilization_percent,omitempty"`
	Memory      Values `json:"memory_used_bytes,omitempty"`
}

// View is a copy of the history.
type View struct {
	Time       time.Time   `json:"time"`         // of the last point; zero: there is none yet
	Step       int         `json:"step_seconds"` // between two points
	Devices    []Device    `json:"devices"`      // by index
	Containers []Container `json:"containers"`   // by name
}

// series is one GPU or container. A ring of figure f at second s is rings[f][s%Points].
type series struct {
	rings [][Points]float32
	index int
	name  string
	last  int64 // second of its newest point
	rates []rate
}

// rate makes bytes per second of a counter that is read more seldom than points are made.
type rate struct {
	count, value float64
	at           time.Time
}

// settled is after how long a counter that stands still is a rate of 0.
const settled = 5 * time.Second

func (r *rate) next(n view.Number, now time.Time) float64 {
	since := now.Sub(r.at)
	switch {
	case !n.OK:
		*r = rate{}
		return math.NaN()
	case r.at.IsZero() || n.V < r.count:
		*r = rate{count: n.V, at: now, value: math.NaN()}
	case n.V > r.count && since > 0:
		*r = rate{count: n.V, at: now, value: (n.V - r.count) / since.Seconds()}
	case since > settled:
		r.value, r.at = 0, now
	}
	return r.value
}

// History is safe for use by several goroutines.
type History struct {
	mu         sync.Mutex
	last       int64 // the newest second; 0: none
	devices    map[string]*series
	containers map[string]*series
	steps      steps
}

// New returns an empty history.
func New() *History {
	return &History{devices: map[string]*series{}, containers: map[string]*series{}, steps: newSteps()}
}

// Add makes the snapshot the point of its second. A second without a snapshot has absent points.
func (h *History) Add(s *view.Snapshot) {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := s.Time.Unix()
	switch {
	case now < h.last-Points || now > h.last+Points: // the clock was set, or nobody called for long
		clear(h.devices)
		clear(h.containers)
		h.steps = newSteps()
	case now < h.last:
		return
	default:
		h.advance(now)
	}
	h.last = now
	h.steps.add(s)
	for i := range s.Devices {
		d := &s.Devices[i]
		r := h.get(h.devices, d.UUID, 6)
		if r == nil {
			continue
		}
		if r.rates == nil {
			r.rates = make([]rate, 2)
		}
		r.index = d.Index
		r.put(now, of(d.Utilization), bytes(d.MemoryUsed), of(d.Power), of(d.Temperature), r.rates[0].next(d.PCIeRX, s.Time), r.rates[1].next(d.PCIeTX, s.Time))
	}
	type sum struct {
		name        string
		utilization view.Number
		memory      view.Bytes
	}
	sums := map[string]*sum{} // also of containers that Docker does not know
	for i := range s.Workloads {
		if w := &s.Workloads[i]; w.ContainerID != "" {
			c := sums[w.ContainerID]
			if c == nil {
				c = &sum{name: w.ContainerName}
				sums[w.ContainerID] = c
			}
			c.utilization, c.memory = frame.Sum(c.utilization, w.Utilization), frame.Sum(c.memory, w.Memory)
		}
	}
	for id, c := range sums {
		if r := h.get(h.containers, id, 2); r != nil {
			r.name = c.name
			r.put(now, of(c.utilization), bytes(c.memory))
		}
	}
}

// advance makes the seconds after the last one up to now absent, and forgets what had no point for the whole time.
func (h *History) advance(now int64) {
	for _, m := range []map[string]*series{h.devices, h.containers} {
		for id, r := range m {
			if now-r.last >= Points {
				delete(m, id)
				continue
			}
			for f := range r.rings {
				for s := h.last + 1; s <= now; s++ {
					r.rings[f][s%Points] = absent
				}
			}
		}
	}
}

var absent = float32(math.NaN())

func (h *History) get(m map[string]*series, id string, figures int) *series {
	r := m[id]
	if r == nil && len(m) < maxSeries {
		r = &series{rings: make([][Points]float32, figures)}
		for f := range r.rings {
			for i := range r.rings[f] {
				r.rings[f][i] = absent
			}
		}
		m[id] = r
	}
	return r
}

func (r *series) put(second int64, values ...float64) {
	r.last = second
	for f, v := range values {
		r.rings[f][second%Points] = float32(v)
	}
}

func of(n view.Number) float64 {
	if !n.OK {
		return math.NaN()
	}
	return n.V
}

func bytes(n view.Bytes) float64 { return of(number(n)) }

// View returns the last Points seconds in n points of equal length, each the highest of its seconds; n is 1 to Points.
func (h *History) View(n int) *View {
	h.mu.Lock()
	defer h.mu.Unlock()
	step := int64((Points + n - 1) / n)
	v := &View{Step: int(step), Devices: []Device{}, Containers: []Container{}}
	if h.last == 0 {
		return v
	}
	// Points end at multiples of the step, so that the same second is in the same point each time.
	end := (h.last/step + 1) * step
	start := end - int64(n)*step
	v.Time = time.Unix(end-1, 0)
	values := func(r *series, f int) Values {
		list, known := make(Values, n), false
		for i := range list {
			list[i] = absent
			for s := start + int64(i)*step; s < start+int64(i+1)*step; s++ {
				if s > h.last || s <= h.last-Points {
					continue
				}
				if x := r.rings[f][s%Points]; !(x <= list[i]) && x == x {
					list[i], known = x, true
				}
			}
		}
		if !known {
			return nil
		}
		return list
	}
	for uuid, r := range h.devices {
		v.Devices = append(v.Devices, Device{UUID: uuid, Index: r.index, Utilization: values(r, 0), Memory: values(r, 1), Power: values(r, 2),
			Temperature: values(r, 3), PCIeRX: values(r, 4), PCIeTX: values(r, 5)})
	}
	for id, r := range h.containers {
		v.Containers = append(v.Containers, Container{ID: id, Name: r.name, Utilization: values(r, 0), Memory: values(r, 1)})
	}
	slices.SortFunc(v.Devices, func(a, b Device) int { return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.UUID, b.UUID)) })
	slices.SortFunc(v.Containers, func(a, b Container) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID)) })
	return v
}
