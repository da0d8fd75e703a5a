package metrics

import (
	"cmp"
	"slices"

	"gpu-exporter/exporter/snapshot"
	"gpu-exporter/nvml/frame"
)

// fold sums the workloads of each container on each device into one without a PID. Everything outside containers becomes one with what no process
// accounts for. The sums over a device stay what they were, and counters keep what dropped processes of running containers had.
func fold(s *snapshot.Snapshot) []snapshot.Workload {
	type key struct {
		device int
		id     string
	}
	sums := map[key]*snapshot.Workload{}
	sum := func(w *snapshot.Workload) *snapshot.Workload {
		k := key{w.Device, w.Container.ID}
		if sums[k] == nil {
			sums[k] = &snapshot.Workload{Device: w.Device, Container: w.Container}
		}
		return sums[k]
	}
	for i := range s.Workloads {
		addTo(sum(&s.Workloads[i]), &s.Workloads[i])
	}
	for i := range s.Past {
		p := &s.Past[i]
		addTo(sum(p), p)
		// It is in the unattributed one as well.
		if rest := sums[key{device: p.Device}]; rest != nil {
			rest.Energy.V -= p.Energy.V
			rest.HtoD.V -= p.HtoD.V
			rest.DtoH.V -= p.DtoH.V
		}
	}
	out := make([]snapshot.Workload, 0, len(sums))
	for _, w := range sums {
		out = append(out, *w)
	}
	slices.SortFunc(out, func(x, y snapshot.Workload) int {
		return cmp.Or(cmp.Compare(x.Device, y.Device), cmp.Compare(x.Container.ID, y.Container.ID))
	})
	return out
}

// addTo adds a process to its container. The highest sample of a container is that of its processes: their samples are not of the same moments.
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
