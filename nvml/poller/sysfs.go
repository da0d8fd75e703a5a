package poller

import (
	"context"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"time"

	"gpu-exporter/nvml/frame"
)

// sysfsGPUs returns the bus ids of NVIDIA's GPUs ("0000:0a:00.0"), in order, without touching one.
func sysfsGPUs(root string) []string {
	dir := filepath.Join(root, "bus/pci/devices")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	var ids []string
	for _, e := range entries {
		// 0x0300 is a VGA controller, 0x0302 a 3D controller; the GPU's audio and USB functions are other classes.
		if attribute(dir, e.Name(), "vendor") == "0x10de" && strings.HasPrefix(attribute(dir, e.Name(), "class"), "0x03") {
			ids = append(ids, e.Name())
		}
	}
	sort.Strings(ids)
	return ids
}

// suspended tells whether the kernel has suspended a PCI device.
func suspended(root, busID string) bool {
	return busID != "" && attribute(filepath.Join(root, "bus/pci/devices"), busID, "power/runtime_status") == "suspended"
}

// numaNode returns the NUMA node of a PCI device; absent where the kernel knows none (-1).
func numaNode(root, busID string) frame.Opt[int] {
	if busID == "" {
		return frame.Opt[int]{}
	}
	n, err := strconv.Atoi(attribute(filepath.Join(root, "bus/pci/devices"), busID, "numa_node"))
	if err != nil || n < 0 {
		return frame.Opt[int]{}
	}
	return frame.Some(n)
}

func attribute(dir, device, name string) string {
	b, err := os.ReadFile(dir + "/" + device + "/" + name)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// waitAwake returns true at once unless there are NVIDIA GPUs and every one is suspended. Then it waits, telling so, until one is awake; false
// says that ctx is done. nvmlInit opens, and so wakes, every GPU.
func (p *poller) waitAwake(ctx context.Context) bool {
	told := false
	for {
		gpus := sysfsGPUs(p.cfg.SysFS)
		asleep := 0
		for _, id := range gpus {
			if suspended(p.cfg.SysFS, id) {
				asleep++
			}
		}
		if asleep == 0 || asleep < len(gpus) {
			return true
		}
		if !told {
			told = true
			p.tell(frame.Library{Reason: "every GPU is suspended, and starting NVML would wake them", Path: p.lib.Path(), Devices: len(gpus),
				PIDNamespace: inPIDNamespace(p.cfg.Proc)})
		}
		if p.cfg.Once {
			return false
		}
		select {
		case <-ctx.Done():
			return false
		case now := <-time.After(p.cfg.Interval):
			p.watch(now)
		}
	}
}
