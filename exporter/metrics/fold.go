package metrics

import (
	"cmp"
	"slices"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/snapshot"
	"gpu-exporter/nvml/frame"
)

// key is a container on a device; the empty id is what is in none.
type key struct {
	device int
	id     string
}

// fold sums the workloads of each container on each device into one without a PID. Everything outside containers becomes one with what no process
// accounts for. The sums over a device stay what they were, and counters keep what dropped processes of running containers had. With whole, each
// device has one workload, which no container or process is named in.
//
// since is what dropped processes had when the fold began, if it did not begin with the exporter: that stays where it was seen. Of containers that
// are gone it is deleted from since.
func fold(s *snapshot.Snapshot, whole bool, since map[key]snapshot.Workload) []snapshot.Workload {
	sums := map[key]*snapshot.Workload{}
	sum := func(w *snapshot.Workload) *snapshot.Workload {
		c := w.Container
		if whole {
			c = containers.Container{}
		}
		k := key{w.Device, c.ID}
		if sums[k] == nil {
			sums[k] = &snapshot.Workload{Device: w.Device, Container: c}
		}
		return sums[k]
	}
	rests := map[int]*snapshot.Workload{} // what no process accounts for, by device
	for i := range s.Workloads {
		w := &s.Workloads[i]
		addTo(sum(w), w)
		if w.PID == 0 {
			rests[w.Device] = w
		}
	}
	past := make(map[key]bool, len(s.Past))
	for _, p := range s.Past {
		k := key{p.Device, p.Container.ID}
		past[k] = true
		if was, ok := since[k]; ok && !subtract(&p, &was) {
			delete(since, k) // a container that came back
		}
		addTo(sum(&p), &p)
		// It is in the unattributed one as well, where the device has the figure.
		if rest := rests[p.Device]; rest != nil {
			to := sum(rest)
			if rest.Energy.OK {
				to.Energy.V -= p.Energy.V
			}
			if rest.HtoD.OK {
				to.HtoD.V -= p.HtoD.V
			}
			if rest.DtoH.OK {
				to.DtoH.V -= p.DtoH.V
			}
		}
	}
	for k := range since {
		if !past[k] {
			delete(since, k)
		}
	}
	out := make([]snapshot.Workload, 0, len(sums))
	for _, w := range sums {
		w.Busy.V, w.CPU.V = snapshot.Microseconds(w.Busy.V), snapshot.Microseconds(w.CPU.V)
		out = append(out, *w)
	}
	slices.SortFunc(out, func(x, y snapshot.Workload) int {
		return cmp.Or(cmp.Compare(x.Device, y.Device), cmp.Compare(x.Container.ID, y.Container.ID))
	})
	return out
}

// subtract takes from the counters of w what they were; where one is less than that, it takes nothing and returns false.
func subtract(w, was *snapshot.Workload) bool {
	if w.Busy.V < was.Busy.V || w.CPU.V < was.CPU.V || w.Energy.V < was.Energy.V || w.HtoD.V < was.HtoD.V || w.DtoH.V < was.DtoH.V {
		return false
	}
	w.Busy.V, w.CPU.V, w.Energy.V = w.Busy.V-was.Busy.V, w.CPU.V-was.CPU.V, w.Energy.V-was.Energy.V
	w.HtoD.V, w.DtoH.V = w.HtoD.V-was.HtoD.V, w.DtoH.V-was.DtoH.V
	return true
}

// addTo adds a process to its container. The highest sample of a container is that of its processes: their samples are not of the same moments. Its
// peak of memory is the sum of theirs, which may have been at different moments: it never held more.
func addTo(sum, w *snapshot.Workload) {
	sum.Alive = sum.Alive || w.Alive
	sum.CPU = frame.Sum(sum.CPU, w.CPU)
	sum.Memory = frame.Sum(sum.Memory, w.Memory)
	sum.Peak = frame.Sum(sum.Peak, w.Peak)
	sum.Allocated = frame.Sum(sum.Allocated, w.Allocated)
	sum.Busy = frame.Sum(sum.Busy, w.Busy)
	sum.Energy = frame.Sum(sum.Energy, w.Energy)
	sum.HtoD = frame.Sum(sum.HtoD, w.HtoD)
	sum.DtoH = frame.Sum(sum.DtoH, w.DtoH)
	for _, p := range []struct{ to, from *frame.Opt[float64] }{{&sum.Utilization, &w.Utilization}, {&sum.MemoryBW, &w.MemoryBW},
		{&sum.Encoder, &w.Encoder}, {&sum.Decoder, &w.Decoder}} {
		*p.to = frame.Sum(*p.to, *p.from)
		p.to.V = min(p.to.V, 100)
	}
	if w.MaxUtilization.OK {
		sum.MaxUtilization = frame.Some(max(sum.MaxUtilization.V, w.MaxUtilization.V))
	}
}
