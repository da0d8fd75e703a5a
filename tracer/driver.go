package tracer

import (
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"gpu-exporter/tracer/abi"
	"gpu-exporter/tracer/ledger"
)

// Device says which device nodes to trace, and as what.
type Device struct {
	Major uint32
	Minor int    // -1: every minor of the major
	Node  string // "gpu", "ctl", "uvm" or "caps"
}

// rmMajor is NVIDIA's own: GPUs, nvidiactl (minor 255) and modeset (254, left alone).
const rmMajor = 195

var nodeNames = [...]string{bpfNodeNODE_GPU: "gpu", bpfNodeNODE_CTL: "ctl", bpfNodeNODE_UVM: "uvm", bpfNodeNODE_CAPS: "caps"}

func nodeName(node uint32) string {
	if node == 0 || int(node) >= len(nodeNames) {
		return "unknown"
	}
	return nodeNames[node]
}

// device is a device number.
type device struct{ major, minor uint32 }

// rules say which devices are traced. The kernel side has the same in its maps.
type rules struct {
	majors map[uint32]uint32 // a node, or one of bpfNodeRULE_…
	minors map[device]uint32
}

// node returns the kind of a device node; 0: not traced.
func (r *rules) node(d device) uint32 {
	switch rule := r.majors[d.major]; bpfNode(rule) {
	case bpfNodeRULE_RM:
		switch {
		case d.minor == 255:
			return uint32(bpfNodeNODE_CTL)
		case d.minor < 248:
			return uint32(bpfNodeNODE_GPU)
		}
		return 0
	case bpfNodeRULE_MINORS:
		return r.minors[d]
	default:
		return rule
	}
}

// deviceRules returns the rules for the devices that the host has now, or those of the configuration.
func deviceRules(root string, override []Device) (rules, error) {
	r := rules{majors: map[uint32]uint32{}, minors: map[device]uint32{}}
	for _, d := range override {
		node := uint32(0)
		for n, name := range nodeNames {
			if name == d.Node && name != "" {
				node = uint32(n)
			}
		}
		if node == 0 || d.Major >= 4096 {
			return r, fmt.Errorf("choosing devices: no such device or kind: %+v", d)
		}
		if d.Minor < 0 {
			r.majors[d.Major] = node
			continue
		}
		r.majors[d.Major] = uint32(bpfNodeRULE_MINORS)
		r.minors[device{d.Major, uint32(d.Minor)}] = node
	}
	if len(override) > 0 {
		return r, nil
	}
	r.majors[rmMajor] = uint32(bpfNodeRULE_RM)
	text, err := readFile(root + "/devices")
	if err != nil {
		return r, fmt.Errorf("reading the majors of devices: %w", err)
	}
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) != 2 {
			continue
		}
		major, err := strconv.ParseUint(fields[0], 10, 12)
		if err != nil || major == rmMajor {
			continue
		}
		switch name := fields[1]; {
		case name == "nvidia-uvm":
			r.majors[uint32(major)] = uint32(bpfNodeNODE_UVM)
		case strings.HasPrefix(name, "nvidia-caps"):
			r.majors[uint32(major)] = uint32(bpfNodeNODE_CAPS)
		}
	}
	return r, nil
}

// driverVersion reads the version of the loaded driver, from a line such as
// "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build".
func driverVersion(root string) (abi.Version, error) {
	text, err := readFile(root + "/driver/nvidia/version")
	if err != nil {
		return abi.Version{}, fmt.Errorf("reading the driver's version: %w", err)
	}
	line, _, _ := strings.Cut(text, "\n")
	for field := range strings.FieldsSeq(line) {
		if version, err := abi.ParseVersion(field); err == nil {
			return version, nil
		}
	}
	return abi.Version{}, fmt.Errorf("reading the driver's version: none in %.100q", line)
}

// hostGPUs reads the GPUs of the host. complete is false while the driver has not told every UUID: it does so when a GPU is first used.
func hostGPUs(root string) (gpus []ledger.GPU, complete bool) {
	files, _ := filepath.Glob(root + "/driver/nvidia/gpus/*/information") // the pattern is sound
	complete = len(files) > 0
	for _, file := range files {
		text, err := readFile(file)
		gpu, ok := parseGPU(text)
		if err != nil || !ok {
			complete = false
			continue
		}
		if gpu.UUID == (ledger.UUID{}) {
			complete = false
		}
		gpus = append(gpus, gpu)
	}
	return gpus, complete
}

// parseGPU reads an information file. A UUID that the driver does not know yet ("GPU-????????-…") is zero.
func parseGPU(text string) (gpu ledger.GPU, ok bool) {
	haveID, haveMinor := false, false
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(line, ":")
		value = strings.TrimSpace(value)
		switch strings.TrimSpace(name) {
		case "GPU UUID":
			gpu.UUID, _ = parseUUID(value)
		case "Bus Location":
			gpu.ID, haveID = parseBus(value)
		case "Device Minor":
			n, err := strconv.ParseUint(value, 10, 20)
			gpu.Minor, haveMinor = int32(n), err == nil
		}
	}
	return gpu, haveID && haveMinor
}

// parseBus makes the driver's gpuId of a PCI address: domain<<16 | bus<<8 | device.
func parseBus(text string) (id uint32, ok bool) {
	var domain, bus, slot, function uint32
	if n, err := fmt.Sscanf(text, "%x:%x:%x.%x", &domain, &bus, &slot, &function); n != 4 || err != nil || bus > 255 || slot > 31 {
		return 0, false
	}
	return domain&0xffff<<16 | bus<<8 | slot, true
}

func parseUUID(text string) (uuid ledger.UUID, ok bool) {
	text, found := strings.CutPrefix(text, "GPU-")
	if !found || len(text) != 36 {
		return uuid, false
	}
	raw, err := hex.DecodeString(strings.ReplaceAll(text, "-", ""))
	if err != nil || len(raw) != 16 {
		return uuid, false
	}
	return ledger.UUID(raw), true
}

func uuidText(u ledger.UUID) string {
	if u == (ledger.UUID{}) {
		return ""
	}
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", u[0:4], u[4:6], u[6:8], u[8:10], u[10:16])
}

// statusRules tells the kernel side where each call has its status word; nowhere, for a driver that is not known.
func statusRules(v abi.Version) (s bpfStatusRules) {
	if v.Supported() != nil {
		return s
	}
	for nr, offset := range v.RMStatus() {
		s.RmStatus[nr] = uint8(offset + 1)
	}
	for nr, offset := range v.UVMStatus() {
		s.UvmStatus[nr] = uint16(offset + 1)
	}
	at := func(size int) uint8 {
		offset, ok := v.AllocStatus(size)
		if !ok {
			return 0
		}
		return uint8(offset + 1)
	}
	s.RmStatus[0x2b], s.AllocStatus40, s.AllocStatus32 = at(48), at(40), at(32)
	return s
}

// maxFile bounds what is read of one file of /proc.
const maxFile = 1 << 20

func readFile(path string) (string, error) {
	file, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, maxFile))
	return string(data), err
}
