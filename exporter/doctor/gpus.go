package doctor

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/processes"
	"gpu-exporter/nvml/libdir"
)

// board is a device of NVIDIA's on the PCI bus, and the driver it is bound to.
type board struct{ address, driver string }

// PCI classes. A GPU's audio and USB functions have others.
const (
	display = "0x03" // GPUs: 0x0300 with and 0x0302 without a connector
	bridge  = "0x0680"
)

func (h *Host) bus(class string) []board {
	dirs, _ := filepath.Glob(filepath.Join(h.Sys, "bus/pci/devices/*"))
	var list []board
	for _, dir := range dirs {
		if read(dir, "vendor") == "0x10de" && strings.HasPrefix(read(dir, "class"), class) {
			driver, _ := os.Readlink(filepath.Join(dir, "driver"))
			list = append(list, board{filepath.Base(dir), strings.Trim(filepath.Base(driver), ".")})
		}
	}
	return list
}

func (h *Host) gpus() (out []found) {
	list := h.bus(display)
	if len(list) == 0 {
		if h.Snapshot != nil && len(h.Snapshot.Devices) > 0 { // as in WSL, or with an NVML that stands in for a board
			return fine(fmt.Sprintf("none on the PCI bus, %d by NVML", len(h.Snapshot.Devices)))
		}
		return wrong(noGPU, "no device of vendor 0x10de and class 0x03 in "+filepath.Join(h.Sys, "bus/pci/devices"))
	}
	var good []string
	for _, g := range list {
		switch g.driver {
		case "nvidia":
			good = append(good, g.address)
		case "":
			out = append(out, found{otherDriver, g.address + " is bound to no driver"})
		default:
			fault := otherDriver
			if strings.Contains(g.driver, "vfio") || g.driver == "pci-stub" || g.driver == "pciback" {
				fault = vfio
			}
			out = append(out, found{fault, g.address + " is bound to " + g.driver})
		}
	}
	if len(good) > 0 {
		out = append(out, found{nil, few(good) + " bound to nvidia"})
	}
	return out
}

func (h *Host) power() (out []found) {
	for _, g := range h.bus(display) {
		if h.suspended(g.address) {
			out = append(out, found{asleep, g.address + " is suspended"})
		}
	}
	if out == nil {
		return fine("no GPU is suspended")
	}
	return out
}

var version = regexp.MustCompile(`\b\d{3,}\.\d+(\.\d+)?\b`)

// module returns the version of the loaded driver; empty when none is.
func (h *Host) module() string {
	line, _, _ := strings.Cut(h.proc("driver/nvidia/version"), "\n")
	return version.FindString(line)
}

func (h *Host) driver() []found {
	if v := h.module(); v != "" {
		return fine("version " + v)
	}
	if h.up(input.SourceNVML) { // as in WSL
		return fine("version " + h.Snapshot.Driver.Version + " by NVML")
	}
	return wrong(notLoaded, filepath.Join(h.Proc, "driver/nvidia/version")+" is not there")
}

// libraries returns the versions of libnvidia-ml that are on the disk.
func (h *Host) libraries() []string {
	var list []string
	for _, dir := range libdir.Directories() {
		for _, path := range h.glob(filepath.Join(dir, "libnvidia-ml.so.*")) {
			if v := strings.TrimPrefix(filepath.Base(path), "libnvidia-ml.so."); version.FindString(v) == v {
				list = append(list, v)
			}
		}
	}
	slices.Sort(list)
	return slices.Compact(list)
}

func (h *Host) versions() []found {
	module, libraries := h.module(), h.libraries()
	if h.up(input.SourceNVML) {
		if _, v, ok := strings.Cut(h.Snapshot.Driver.NVMLVersion, "."); ok && version.FindString(v) == v { // "13.580.159.04"
			libraries = []string{v}
		}
	}
	switch {
	case module == "" || len(libraries) == 0:
		return wrong(unknown, "not both are here to be compared")
	case !slices.Contains(libraries, module):
		return wrong(mismatch, "module "+module+", library "+few(libraries))
	}
	return fine("module and library " + module)
}

// driven returns the driver's directories of its GPUs, which have their PCI addresses as names.
func (h *Host) driven() []string {
	dirs, _ := filepath.Glob(filepath.Join(h.Proc, "driver/nvidia/gpus/*"))
	return dirs
}

// suspended tells whether a device of the bus sleeps.
func (h *Host) suspended(address string) bool {
	return h.sysfs("bus/pci/devices", address, "power/runtime_status") == "suspended"
}

// information returns a value that the driver gives for the GPU of a directory; empty: none, or the GPU sleeps, and is not to be woken by the question.
func (h *Host) information(dir, field string) string {
	if h.suspended(filepath.Base(dir)) {
		return ""
	}
	for line := range strings.Lines(read(dir, "information")) {
		if name, value, _ := strings.Cut(line, ":"); name == field {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// node is a device node that the driver needs.
type node struct {
	path         string
	major, minor uint32
}

// wanted lists the nodes by the driver's own word. Its major is 195 always; that of UVM is given out at its load.
func (h *Host) wanted() []node {
	list := []node{{"dev/nvidiactl", 195, 255}}
	for _, dir := range h.driven() {
		if n, err := strconv.ParseUint(h.information(dir, "Device Minor"), 10, 20); err == nil {
			list = append(list, node{fmt.Sprintf("dev/nvidia%d", n), 195, uint32(n)})
		}
	}
	for line := range strings.Lines(h.proc("devices")) {
		if f := strings.Fields(line); len(f) == 2 && f[1] == "nvidia-uvm" {
			if major, err := strconv.ParseUint(f[0], 10, 12); err == nil {
				list = append(list, node{"dev/nvidia-uvm", uint32(major), 0})
			}
		}
	}
	return list
}

func (h *Host) nodes() (out []found) {
	if h.module() == "" {
		return wrong(unknown, "no kernel module is loaded that needs them")
	}
	var good []string
	for _, n := range h.wanted() {
		path := h.file(n.path)
		var st unix.Stat_t
		err := unix.Stat(path, &st)
		major, minor := unix.Major(st.Rdev), unix.Minor(st.Rdev)
		switch {
		case err != nil:
			out = append(out, found{noNode, fmt.Sprintf("%s: %v", path, err)})
		case st.Mode&unix.S_IFMT != unix.S_IFCHR:
			out = append(out, found{wrongNode, path + " is no character device"})
		case major != n.major || minor != n.minor:
			out = append(out, found{wrongNode, fmt.Sprintf("%s is device %d:%d, the driver's is %d:%d", path, major, minor, n.major, n.minor)})
		case st.Mode&0o006 != 0o006:
			out = append(out, found{closedNode, fmt.Sprintf("%s has mode %03o", path, st.Mode&0o777)})
		default:
			good = append(good, "/"+n.path)
		}
	}
	if len(good) > 0 {
		out = append(out, found{nil, few(good)})
	}
	return out
}

func (h *Host) visible() (out []found) {
	if !h.up(input.SourceNVML) {
		return wrong(unknown, "not known without NVML")
	}
	shown := map[string]bool{}
	for _, d := range h.Snapshot.Devices {
		shown[d.PCIBusID] = true
		switch d.State {
		case "ok", "asleep": // check power says what is asleep
		default:
			out = append(out, found{lost, fmt.Sprintf("GPU %d (%s) is %s: %s", d.Index, d.UUID, d.State, d.Reason)})
		}
	}
	for _, dir := range h.driven() {
		if address := filepath.Base(dir); !shown[address] {
			evidence := address + " is in " + filepath.Dir(dir) + " and not in NVML's list"
			if h.information(dir, "GPU Excluded") == "Yes" {
				evidence += ": the module's parameter NVreg_ExcludedGpus leaves it out"
			}
			out = append(out, found{notSeen, evidence})
		}
	}
	if out == nil {
		return fine(fmt.Sprintf("GPUs that NVML shows: %d; the driver has no other", len(h.Snapshot.Devices)))
	}
	return out
}

// fabric looks for the manager of the switches that this host's driver has, by its process, whose name is cut at 15 characters.
func (h *Host) fabric() []found {
	switches := h.bus(bridge)
	switches = slices.DeleteFunc(switches, func(b board) bool { return b.driver != "nvidia-nvswitch" })
	if len(switches) == 0 {
		return fine("no NVSwitch that needs a manager")
	}
	evidence := fmt.Sprintf("%d NVSwitches", len(switches))
	if processes.Look(h.Proc) != processes.Visible {
		return wrong(unknown, evidence+"; /proc does not show other processes")
	}
	files, _ := filepath.Glob(filepath.Join(h.Proc, "[0-9]*/comm"))
	for _, file := range files {
		if read(file) == "nv-fabricmanage" {
			return fine(evidence + ", fabric manager with PID " + filepath.Base(filepath.Dir(file)))
		}
	}
	return wrong(noFabric, evidence+", and no process nv-fabricmanager")
}
