package table

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"gpu-exporter/exporter/view"
	"gpu-exporter/nvml/frame"
)

// Row is a process on a GPU, what no process accounts for, or in a tree a container above its processes.
type Row struct {
	view.Workload            // GPU is -1 on a container's row: it may have several
	Total         view.Bytes // memory of its GPUs
	Started       time.Time  // of its container; zero: not known
	Launches      view.Bytes // of kernels, by its container
	Depth         int        // in a tree: 0 for a container, 1 for its processes
}

// Label names the row: its container, or that it has none.
func (r *Row) Label() string {
	switch {
	case r.Depth > 0 && r.PID > 0:
		return cmp.Or(r.ProcessName, "process")
	case r.ContainerName != "":
		return r.ContainerName
	case r.ContainerID != "":
		return "(unknown)" // the engine does not know it
	case r.PID == 0 && r.GPU >= 0:
		return "(unattributed)"
	}
	return "(host)"
}

// Keys are the names of the orders.
var Keys = []string{"gpu", "util", "max", "mem", "name", "pid", "age"}

// compare returns the order of a key. What has no value comes last.
func compare(key string) func(a, b *Row) int {
	down := func(a, b view.Number) int {
		return cmp.Or(cmp.Compare(truth(b.OK), truth(a.OK)), cmp.Compare(b.V, a.V))
	}
	util := func(a, b *Row) int { return down(a.Utilization, b.Utilization) }
	mem := func(a, b *Row) int {
		return cmp.Or(cmp.Compare(truth(b.Memory.OK), truth(a.Memory.OK)), cmp.Compare(b.Memory.V, a.Memory.V))
	}
	switch key {
	case "util":
		return util
	case "max":
		return func(a, b *Row) int { return down(a.MaxUtilization, b.MaxUtilization) }
	case "mem":
		return mem
	case "name":
		return func(a, b *Row) int {
			return cmp.Or(cmp.Compare(truth(a.ContainerName == ""), truth(b.ContainerName == "")), cmp.Compare(a.ContainerName, b.ContainerName))
		}
	case "pid":
		return func(a, b *Row) int {
			return cmp.Or(cmp.Compare(truth(a.PID == 0), truth(b.PID == 0)), cmp.Compare(a.PID, b.PID))
		}
	case "age": // the youngest first
		return func(a, b *Row) int {
			return cmp.Or(cmp.Compare(truth(a.Started.IsZero()), truth(b.Started.IsZero())), b.Started.Compare(a.Started))
		}
	}
	return func(a, b *Row) int {
		return cmp.Or(cmp.Compare(a.GPU, b.GPU), cmp.Compare(truth(a.PID == 0), truth(b.PID == 0)), util(a, b), mem(a, b))
	}
}

func truth(b bool) int {
	if b {
		return 1
	}
	return 0
}

// Rows returns the workloads of a view that have the text in one of their names, in the order of a key. Ties are in the order of GPU and PID.
func Rows(s *view.Snapshot, key, filter string) []Row {
	of := map[string]*view.Container{}
	for i := range s.Containers {
		of[s.Containers[i].ID] = &s.Containers[i]
	}
	total := map[string]view.Bytes{}
	for i := range s.Devices {
		total[s.Devices[i].UUID] = s.Devices[i].MemoryTotal
	}
	var rows []Row
	for _, w := range s.Workloads {
		if Match(&w, filter) {
			r := Row{Workload: w, Total: total[w.GPUUUID]}
			if c := of[w.ContainerID]; c != nil {
				r.Started, r.Launches = c.Started, c.Launches
			}
			rows = append(rows, r)
		}
	}
	sortRows(rows, key)
	return rows
}

func sortRows(rows []Row, key string) {
	order := compare(key)
	slices.SortStableFunc(rows, func(a, b Row) int {
		return cmp.Or(order(&a, &b), cmp.Compare(a.GPU, b.GPU), cmp.Compare(truth(a.PID == 0), truth(b.PID == 0)), cmp.Compare(a.PID, b.PID))
	})
}

// Match tells whether a workload has the text in its container, image, process, PID or GPU. Case does not matter.
func Match(w *view.Workload, text string) bool {
	if text == "" {
		return true
	}
	text = strings.ToLower(text)
	for _, s := range []string{w.ContainerName, w.ContainerID, w.Image, w.ProcessName, w.Command, w.GPUUUID, fmt.Sprint(w.PID)} {
		if strings.Contains(strings.ToLower(s), text) {
			return true
		}
	}
	return false
}

// Tree puts each container above its rows, with the sums over them. Containers are in the order of the key, and so are the rows of each.
func Tree(rows []Row, key string) []Row {
	members := map[string][]Row{} // rows by group
	var heads []Row
	for _, r := range rows {
		k := group(&r)
		if members[k] == nil {
			head := Row{Workload: view.Workload{GPU: -1, ContainerID: r.ContainerID, ContainerName: r.ContainerName, Image: r.Image}, Started: r.Started, Launches: r.Launches}
			if r.PID == 0 {
				head = r // what no process accounts for is its own head
			}
			heads = append(heads, head)
		}
		members[k] = append(members[k], r)
	}
	for i := range heads {
		h := &heads[i]
		h.Memory, h.Total, h.Allocated, h.PCIeRX, h.PCIeTX = view.Bytes{}, view.Bytes{}, view.Bytes{}, view.Bytes{}, view.Bytes{}
		seen := map[string]bool{}
		for _, r := range members[group(h)] {
			h.Utilization, h.Memory = frame.Sum(h.Utilization, r.Utilization), frame.Sum(h.Memory, r.Memory)
			h.Allocated, h.PCIeRX, h.PCIeTX = frame.Sum(h.Allocated, r.Allocated), frame.Sum(h.PCIeRX, r.PCIeRX), frame.Sum(h.PCIeTX, r.PCIeTX)
			if !seen[r.GPUUUID] {
				seen[r.GPUUUID] = true
				h.Total = frame.Sum(h.Total, r.Total)
			}
		}
	}
	sortRows(heads, key)
	var out []Row
	for _, h := range heads {
		out = append(out, h)
		for _, r := range members[group(&h)] {
			if r.PID != 0 {
				r.Depth = 1
				out = append(out, r)
			}
		}
	}
	return out
}

// group names what a row is put under: its container, the host, or what no process of its GPU accounts for.
func group(r *Row) string {
	switch {
	case r.ContainerID != "":
		return r.ContainerID
	case r.PID == 0 && r.GPU >= 0:
		return "unattributed " + r.GPUUUID
	}
	return "host"
}
