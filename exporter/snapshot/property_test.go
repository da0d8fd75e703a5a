package snapshot

import (
	"fmt"
	"math"
	"testing"
	"time"

	"gpu-exporter/exporter/snapshot/hosttest"
)

// closed fails unless, for memory, energy and PCIe bytes, the workloads of every device add up to the device, exactly.
func closed(t *testing.T, s *Snapshot) {
	t.Helper()
	for i, d := range s.Devices {
		var memory, rx, tx uint64
		var energy float64
		for _, w := range s.Workloads {
			if w.Device != i {
				continue
			}
			memory += w.Memory.V
			energy += w.Energy.V
			rx += w.HtoD.V
			tx += w.DtoH.V
		}
		if d.Load != nil && d.Load.MemoryUsed.OK && memory != d.Load.MemoryUsed.V {
			t.Fatalf("device %d: workloads hold %d, the device says %d", d.Index, memory, d.Load.MemoryUsed.V)
		}
		if d.Energy.OK && energy != d.Energy.V {
			t.Fatalf("device %d: workloads used %v J, the device says %v", d.Index, energy, d.Energy.V)
		}
		if d.PCIeRX.OK && rx != d.PCIeRX.V || d.PCIeTX.OK && tx != d.PCIeTX.V {
			t.Fatalf("device %d: workloads copied %d and %d, the device says %v and %v", d.Index, rx, tx, d.PCIeRX, d.PCIeTX)
		}
	}
}

// counters returns every counter of a snapshot under the name that its series would have.
func counters(s *Snapshot) map[string]float64 {
	m := map[string]float64{}
	for _, w := range s.Workloads {
		if w.PID != 0 && w.StartTime == 0 {
			continue // a PID that is used again is another process, and this may be either
		}
		id := fmt.Sprintf("device %d pid %d start %d container %s ", w.Device, w.PID, w.StartTime, w.Container.ID)
		m[id+"busy"], m[id+"energy"], m[id+"htod"], m[id+"dtoh"] = w.Busy.V, w.Energy.V, float64(w.HtoD.V), float64(w.DtoH.V)
	}
	for i, d := range s.Devices {
		id := fmt.Sprintf("device %d ", i)
		m[id+"energy"], m[id+"rx"], m[id+"tx"] = d.Energy.V, float64(d.PCIeRX.V), float64(d.PCIeTX.V)
		for r, v := range d.Throttled {
			m[id+r] = v
		}
		if d.Power != nil {
			m[id+"power"] = float64(d.Power.Count)
		}
	}
	for _, a := range s.Activity {
		id := "container " + a.Container.ID + " "
		m[id+"started"], m[id+"launches"] = float64(a.Counts.Started), float64(a.Counts.Launches)
		for k, n := range a.Counts.Exited {
			m[id+k] = float64(n)
		}
		for k, n := range a.Counts.Opens {
			m[id+k.Node+k.Result] = float64(n)
		}
		for k, c := range a.Counts.Calls {
			m[id+k] = float64(c.Count)
			m[id+k+" s"] = c.Seconds
		}
	}
	return m
}

// TestSumsClose generates hosts of 1 to 16 GPUs and 0 to 500 processes, with sharing, MIG, lost events and devices, PIDs used again, workers replaced and
// counters that start anew, and checks at every snapshot that the three sums close, that counters only grow, and that nothing is negative.
func TestSumsClose(t *testing.T) {
	hosts, steps := 25, 40
	if testing.Short() {
		hosts = 10
	}
	shared, copied, peaks := 0.0, uint64(0), 0
	for seed := range hosts {
		h := hosttest.New(uint64(seed))
		b := NewBuilder(Config{Linger: time.Duration(seed%4) * 3 * time.Second})
		last := map[string]float64{}
		for range steps {
			for _, in := range h.Step() {
				b.Apply(in)
			}
			s := b.Snapshot(h.Now)
			closed(t, s)
			now := counters(s)
			for k, v := range now {
				if v < 0 || v != v || math.IsInf(v, 0) {
					t.Fatalf("seed %d: %s is %v", seed, k, v)
				}
				if v < last[k] {
					t.Fatalf("seed %d: %s fell from %v to %v", seed, k, last[k], v)
				}
			}
			last = now
			for _, w := range s.Workloads {
				if w.PID == hosttest.Self || w.PID == hosttest.Worker {
					t.Fatalf("seed %d: the exporter is a workload: %+v", seed, w)
				}
				if p := b.tracer.processes[w.PID]; p != nil && w.Alive && !p.Compute && p.FromBirth && p.StartTime == w.StartTime {
					t.Fatalf("seed %d: a monitoring client is a workload: %+v", seed, w)
				}
				if w.PID != 0 {
					shared += w.Energy.V
					copied += w.HtoD.V
					if w.Peak.OK {
						peaks++
					}
					if w.Peak.OK && w.Peak.V < w.Memory.V {
						t.Fatalf("seed %d: peak %d below the use %d", seed, w.Peak.V, w.Memory.V)
					}
				}
			}
		}
	}
	if shared == 0 || copied == 0 || peaks == 0 {
		t.Fatalf("the hosts tested nothing: %v J, %d bytes, %d peaks", shared, copied, peaks)
	}
}
