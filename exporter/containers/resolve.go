package containers

import (
	"slices"
	"strconv"
	"strings"
)

// GPU is what the resolver must know of one GPU that NVML can open.
type GPU struct {
	UUID     string // "GPU-…"
	Index    int    // NVML's index
	Minor    int    // N of /dev/nvidiaN; negative: not known
	PCIBusID string // such as "0000:0a:00.0"
	MIG      []MIG  // its MIG devices, in NVML's order
}

// MIG is one MIG device of a GPU.
type MIG struct {
	UUID  string // "MIG-…"
	Index int    // NVML's index on its GPU
	GI    int    // GPU instance; negative: not known
	CI    int    // compute instance; negative: not known
}

// Assignment is one GPU, or one MIG device of it, that a container may use.
type Assignment struct {
	UUID   string // of the GPU
	MIG    string // of the MIG device; empty: the whole GPU
	Source Source
}

// Resolve returns which GPUs a container may use, each once, with the first way in which it was given. "All" are the GPUs of the
// list whose node the container really has, where its nodes are known. An id that names no GPU, or more than one, gives none.
func Resolve(c Container, gpus []GPU) []Assignment {
	as, _ := ResolveAll(c, gpus)
	return as
}

// ResolveAll is Resolve, and also returns the ids that name no GPU of the list, or more than one.
func ResolveAll(c Container, gpus []GPU) (as []Assignment, unresolved []string) {
	add := func(a Assignment) {
		if !slices.ContainsFunc(as, func(b Assignment) bool { return a.UUID == b.UUID && a.MIG == b.MIG }) {
			as = append(as, a)
		}
	}
	for _, r := range c.Requests {
		if r.All {
			for _, g := range gpus {
				if c.has(g) {
					add(Assignment{UUID: g.UUID, Source: r.Source})
				}
			}
		}
		for index := range min(r.Count, len(gpus)) { // dockerd asks for the devices 0 to Count-1
			if i := slices.IndexFunc(gpus, func(g GPU) bool { return g.Index == index }); i >= 0 {
				add(Assignment{UUID: gpus[i].UUID, Source: r.Source})
			}
		}
		for _, id := range r.IDs {
			uuid, mig, ok := find(c, id, gpus)
			if !ok {
				unresolved = append(unresolved, id)
				continue
			}
			add(Assignment{UUID: uuid, MIG: mig, Source: r.Source})
		}
	}
	return as, unresolved
}

// has tells whether a container has the node of a GPU, or may have it.
func (c Container) has(g GPU) bool {
	return c.Nodes == nil || g.Minor < 0 || slices.Contains(c.Nodes, g.Minor)
}

// find returns what one id names.
func find(c Container, id string, gpus []GPU) (uuid, mig string, ok bool) {
	if strings.HasPrefix(id, "/") {
		return findNode(c, id, gpus)
	}
	if index, ok := atoi(id); ok {
		return unique(gpus, func(g GPU) bool { return g.Index == index })
	}
	if gpu, index, cut := strings.Cut(id, ":"); cut {
		g, ok1 := atoi(gpu)
		m, ok2 := atoi(index)
		if ok1 && ok2 {
			return uniqueMIG(gpus, func(gpu GPU, mig MIG) bool { return gpu.Index == g && mig.Index == m })
		}
		return unique(gpus, func(g GPU) bool { return g.PCIBusID != "" && sameBusID(g.PCIBusID, id) })
	}
	lower := strings.ToLower(id)
	switch {
	case strings.HasPrefix(lower, "mig-gpu-"): // drivers before 470: MIG-GPU-<uuid>/<gi>/<ci>
		gpu, instances, _ := strings.Cut(lower[len("mig-"):], "/")
		gi, ci, _ := strings.Cut(instances, "/")
		g, ok1 := atoi(gi)
		m, ok2 := atoi(ci)
		if !ok1 || !ok2 {
			return "", "", false
		}
		return uniqueMIG(gpus, func(x GPU, y MIG) bool { return strings.EqualFold(x.UUID, gpu) && y.GI == g && y.CI == m })
	case strings.HasPrefix(lower, "mig-") && len(lower) > len("mig-"):
		if uuid, mig, ok := uniqueMIG(gpus, func(_ GPU, y MIG) bool { return strings.EqualFold(y.UUID, id) }); ok {
			return uuid, mig, ok
		}
		return uniqueMIG(gpus, func(_ GPU, y MIG) bool { return hasPrefixFold(y.UUID, lower) })
	case strings.HasPrefix(lower, "gpu-") && len(lower) > len("gpu-"):
		if uuid, mig, ok := unique(gpus, func(g GPU) bool { return strings.EqualFold(g.UUID, id) }); ok {
			return uuid, mig, ok
		}
		return unique(gpus, func(g GPU) bool { return hasPrefixFold(g.UUID, lower) })
	}
	return "", "", false
}

// findNode returns the GPU of a device node. What the container really has outweighs what the path is called.
func findNode(c Container, path string, gpus []GPU) (uuid, mig string, ok bool) {
	minor, ok := nodeMinor(path)
	if !ok || c.Nodes != nil && !slices.Contains(c.Nodes, minor) {
		return "", "", false
	}
	return unique(gpus, func(g GPU) bool { return g.Minor == minor })
}

func unique(gpus []GPU, match func(GPU) bool) (uuid, mig string, ok bool) {
	for _, g := range gpus {
		if match(g) {
			if ok {
				return "", "", false
			}
			uuid, ok = g.UUID, true
		}
	}
	return uuid, "", ok
}

func uniqueMIG(gpus []GPU, match func(GPU, MIG) bool) (uuid, mig string, ok bool) {
	for _, g := range gpus {
		for _, m := range g.MIG {
			if match(g, m) {
				if ok {
					return "", "", false
				}
				uuid, mig, ok = g.UUID, m.UUID, true
			}
		}
	}
	return uuid, mig, ok
}

func hasPrefixFold(s, lowerPrefix string) bool {
	return len(s) >= len(lowerPrefix) && strings.EqualFold(s[:len(lowerPrefix)], lowerPrefix)
}

// sameBusID compares PCI bus ids whatever the width of the domain: "0000:0a:00.0" and "00000000:0A:00.0".
func sameBusID(a, b string) bool {
	return strings.EqualFold(strings.TrimLeft(a, "0"), strings.TrimLeft(b, "0"))
}

// atoi reads a plain decimal number of at most four digits: an index or a minor.
func atoi(s string) (int, bool) {
	if s == "" || len(s) > 4 || strings.Trim(s, "0123456789") != "" {
		return 0, false
	}
	n, err := strconv.Atoi(s)
	return n, err == nil
}

func itoa(n int) string { return strconv.Itoa(n) }
