package doctor

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/processes"
	"gpu-exporter/exporter/view"
	"gpu-exporter/nvml/libdir"
)

// What can be wrong. The advice stands in a table of Markdown and on a terminal: one line, without a bar.
var (
	noGPU = &Fault{Broken, "the PCI bus has no NVIDIA GPU",
		"`lspci -d 10de:` must show one: seat the board, or pass it through to this virtual machine"}
	otherDriver = &Fault{Broken, "a GPU is bound to another driver (nouveau) or to none",
		"blacklist nouveau, load `nvidia`, and see `dmesg` for why it does not take the GPU"}
	vfio = &Fault{Warning, "a GPU is bound to VFIO, so it is a virtual machine's",
		"nothing, if it is meant so; else `driverctl unset-override ADDRESS`"}
	asleep = &Fault{Warning, "a GPU is suspended: it has no figures and is not woken for them",
		"nothing, if it shall save power; else write `on` to its `power/control` in sysfs"}
	notLoaded = &Fault{Broken, "the NVIDIA driver is not loaded",
		"`modprobe nvidia`; if that fails, install the driver for this kernel and see `dmesg`"}
	noLibrary = &Fault{Broken, "no usable libnvidia-ml.so.1: tried …",
		"install the driver's libraries, or name the file with `--nvml.library`; in a container set `--driver-root`"}
	noNVML = &Fault{Broken, "NVML is down for another reason",
		"do what the reason says; if NVML hangs, a GPU does: see `dmesg` for Xid errors"}
	mismatch = &Fault{Broken, "library and loaded kernel module are of different versions",
		"reload the driver or reboot; the exporter recovers by itself"}
	noNode = &Fault{Broken, "a device node is missing",
		"`nvidia-modprobe -c 0 -u` makes them, with `-c N` for each GPU; in a container mount the host's /dev"}
	wrongNode = &Fault{Broken, "a device node is of another device",
		"remove it and run `nvidia-modprobe -c 0 -u`"}
	closedNode = &Fault{Warning, "only root may open a device node",
		"containers of other users fail: set `NVreg_DeviceFileMode=0666` for module nvidia, and `chmod 666` now"}
	notSeen = &Fault{Broken, "the driver has a GPU that NVML does not show",
		"see `dmesg` for why it did not start; a reset or a reboot brings it back, unless NVreg_ExcludedGpus names it"}
	lost = &Fault{Broken, "a GPU does not answer: lost, hung or in error",
		"drain the host and reset the GPU or reboot; see `dmesg` for its Xid"}
	noFabric = &Fault{Broken, "CUDA error 802 (system not yet initialized): NVSwitches without their fabric manager",
		"`systemctl start nvidia-fabricmanager`, of the driver's version"}
	noCaps = &Fault{Warning, "capabilities are missing",
		"run as root, or with those in the unit of `gpu-exporter assets export DIR`; without them there are no kernel events"}
	noBTF = &Fault{Warning, "the kernel has no BTF",
		"use a kernel with CONFIG_DEBUG_INFO_BTF, 5.8 or later; all but kernel events works without"}
	lockdown = &Fault{Warning, "the kernel is locked down (confidentiality)",
		"boot with `lockdown=integrity`; all but kernel events works without"}
	noTracefs = &Fault{Warning, "tracefs cannot be read or mounted",
		"`mount -t tracefs tracefs /sys/kernel/tracing`, or give CAP_SYS_ADMIN"}
	tracerDown = &Fault{Warning, "the kernel tracer is off",
		"do what the reason says; opens, failed requests and copies of containers are missing without it"}
	pidSpace = &Fault{Broken, "this is not the host's PID namespace, so processes have no names",
		"run the container with `--pid=host`"}
	hidden = &Fault{Broken, "/proc does not show the processes of others",
		"run as root, or without `hidepid`; mount the host's /proc"}
	noCgroup = &Fault{Broken, "no control groups, so no process has a container",
		"mount cgroup2 on /sys/fs/cgroup; in a container use `--pid=host`"}
	reload = &Fault{Warning, "cgroup driver systemd, and containers whose GPUs systemd does not know of",
		"`systemctl daemon-reload` takes the GPUs from them: give GPUs through CDI (`--device nvidia.com/gpu=all`), or set " +
			"`native.cgroupdriver=cgroupfs` in Docker's exec-opts"}
	noCharLinks = &Fault{Warning, "cgroup driver systemd, and no /dev/char/195:255",
		"`systemctl daemon-reload` takes the GPUs from containers: `nvidia-ctk system create-dev-char-symlinks --create-all`, at every boot"}
	noDocker = &Fault{Warning, "docker: no Docker here: … does not exist",
		"mount the socket into the exporter's container; on a host without Docker nothing, and no names"}
	dockerDown = &Fault{Broken, "docker: down: permission denied, nobody listens, no answer",
		"run as root or in the socket's group; `systemctl status docker`"}
	noRuntime = &Fault{Warning, "Docker has neither NVIDIA's runtime nor a CDI specification",
		"install nvidia-container-toolkit, then `nvidia-ctk runtime configure` and restart Docker, or " +
			"`nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`"}
	oldCDI = &Fault{Broken, "a CDI specification is of another version than the driver",
		"`nvidia-ctk cdi generate --output=FILE`: containers are given libraries that are not there"}
	refused = &Fault{Broken, "a container is refused its device nodes",
		"restart the container: `systemctl daemon-reload` took its device rules; CDI or the cgroupfs driver keep them"}
	noExporter = &Fault{Broken, "no exporter answers at `--url`",
		"start it, or correct the address; with basic auth it is `GPU_EXPORTER_URL=http://USER:PASSWORD@HOST:9400`"}
	stranger = &Fault{Broken, "listen tcp :9400: bind: address already in use",
		"another exporter, such as dcgm-exporter, has the port: `--web.listen-address=:9401`, and `--url=http://127.0.0.1:9401` here"}
	otherHost = &Fault{Broken, "the exporter at `--url` runs on another host",
		"run doctor there"}
	staleExporter = &Fault{Broken, "the exporter's snapshot is old",
		"see its log; restart it"}
	stuck = &Fault{Broken, "a check gets no answer from the kernel",
		"see `dmesg`: a driver hangs; reset the GPU or reboot"}
)

// Checks are all checks, in the order in which one thing needs the other.
var Checks = []Check{
	{"gpus", []*Fault{noGPU, otherDriver, vfio}, (*Host).gpus},
	{"power", []*Fault{asleep}, (*Host).power},
	{"driver", []*Fault{notLoaded}, (*Host).driver},
	{"nodes", []*Fault{noNode, wrongNode, closedNode}, (*Host).nodes},
	{"versions", []*Fault{mismatch}, (*Host).versions},
	{"exporter", []*Fault{noExporter, stranger, otherHost, staleExporter}, (*Host).exporter},
	{"nvml", []*Fault{noLibrary, noNVML}, (*Host).nvml},
	{"visible", []*Fault{notSeen, lost}, (*Host).visible},
	{"fabric", []*Fault{noFabric}, (*Host).fabric},
	{"pids", []*Fault{pidSpace, hidden}, (*Host).pids},
	{"docker", []*Fault{noDocker, dockerDown}, (*Host).docker},
	{"runtime", []*Fault{noRuntime, oldCDI}, (*Host).runtime},
	{"cgroup", []*Fault{noCgroup, reload, noCharLinks}, (*Host).cgroup},
	{"access", []*Fault{refused}, (*Host).access},
	{"capabilities", []*Fault{noCaps}, (*Host).capabilities},
	{"kernel", []*Fault{noBTF, lockdown}, (*Host).kernel},
	{"tracefs", []*Fault{noTracefs}, (*Host).tracefs},
	{"tracer", []*Fault{tracerDown}, (*Host).tracer},
}

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
		if h.sysfs("bus/pci/devices", g.address, "power/runtime_status") == "suspended" {
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

// information returns a value that the driver gives for the GPU of a directory; empty: none.
func information(dir, field string) string {
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
		if n, err := strconv.ParseUint(information(dir, "Device Minor"), 10, 20); err == nil {
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

// source returns the state of a source of the exporter; nil: there is no exporter, or it has not said.
func (h *Host) source(name string) *view.Source {
	if h.Snapshot != nil {
		for i := range h.Snapshot.Sources {
			if s := &h.Snapshot.Sources[i]; s.Name == name {
				return s
			}
		}
	}
	return nil
}

func (h *Host) up(name string) bool {
	s := h.source(name)
	return s != nil && s.Up
}

// traced tells whether the exporter's tracer runs.
func (h *Host) traced() bool {
	return h.Snapshot != nil && h.Snapshot.Tracer != nil && h.Snapshot.Tracer.Up
}

// meet reads what /proc says of this process, and parts with an exporter of another host: what it sees and what is here do not belong together.
func (h *Host) meet() {
	h.own = processes.ReadOwn(h.Proc)
	if h.Snapshot == nil {
		return
	}
	if id := h.Snapshot.Host.BootID; id != "" && h.own.BootID != "" && id != h.own.BootID {
		h.elsewhere = cmp.Or(h.Snapshot.Host.Name, "another host")
		h.Snapshot = nil
	} else if h.Snapshot.Host.Capabilities != "" {
		h.own.Capabilities = h.Snapshot.Host.Capabilities
	}
}

func (h *Host) exporter() []found {
	switch {
	case h.elsewhere != "":
		return wrong(otherHost, fmt.Sprintf("%s, and that is %s", h.From, h.elsewhere))
	case h.Snapshot == nil && h.Stranger:
		return wrong(stranger, h.Reason)
	case h.Snapshot == nil:
		return wrong(noExporter, h.Reason)
	case h.Now.Sub(h.Snapshot.Time) > staleAfter:
		return wrong(staleExporter, fmt.Sprintf("its snapshot is %.0f s old", h.Now.Sub(h.Snapshot.Time).Seconds()))
	}
	return fine(h.From)
}

func (h *Host) nvml() []found {
	if h.Snapshot == nil {
		return wrong(unknown, "not known without an exporter")
	}
	switch s := h.source(input.SourceNVML); {
	case s == nil:
		return wrong(noNVML, "it has not answered yet")
	case s.Up:
		return fine(fmt.Sprintf("version %s, %d GPUs", h.Snapshot.Driver.NVMLVersion, len(h.Snapshot.Devices)))
	case strings.HasPrefix(s.Reason, "no usable libnvidia-ml"):
		return wrong(noLibrary, s.Reason)
	case strings.Contains(s.Reason, "driver is not loaded"):
		return wrong(notLoaded, s.Reason)
	case strings.Contains(s.Reason, "different versions"):
		return wrong(mismatch, s.Reason)
	default:
		return wrong(noNVML, s.Reason)
	}
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
			if information(dir, "GPU Excluded") == "Yes" {
				evidence += ": the module's parameter NVreg_ExcludedGpus leaves it out"
			}
			out = append(out, found{notSeen, evidence})
		}
	}
	if out == nil {
		return fine(fmt.Sprintf("NVML shows %d GPUs, the driver has no other", len(h.Snapshot.Devices)))
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

// pids asks the exporter first: it may run in a container, and doctor beside it.
func (h *Host) pids() []found {
	reason := processes.Look(h.Proc).Reason()
	if s := h.source(input.SourceProcesses); s != nil {
		reason = s.Reason
	}
	switch kind, _, _ := strings.Cut(reason, ":"); processes.Visibility(kind) {
	case "":
		return fine("/proc shows the host's processes")
	case processes.PIDNamespace:
		return wrong(pidSpace, reason)
	case processes.Hangs:
		return wrong(stuck, reason)
	default:
		return wrong(hidden, reason)
	}
}

func (h *Host) docker() []found {
	reason := h.Engine.Reason
	if s := h.source(input.SourceDocker); reason == "" && s != nil && !s.Up {
		reason = "the exporter says: " + s.Reason
	}
	switch {
	case strings.Contains(reason, "no Docker here"):
		return wrong(noDocker, reason)
	case reason != "":
		return wrong(dockerDown, reason)
	}
	return fine("version " + h.Engine.Version + ", API " + h.Engine.API)
}

func (h *Host) runtime() (out []found) {
	var good []string
	for _, r := range h.Engine.Runtimes {
		if strings.Contains(r, "nvidia") {
			good = append(good, "runtime "+r)
		}
	}
	for _, dir := range []string{"usr/bin", "usr/local/bin"} { // Docker's --gpus needs the hook alone
		if path := h.file(dir + "/nvidia-container-runtime-hook"); exists(path) {
			good = append(good, path)
		}
	}
	directories := h.Engine.CDI
	if h.Engine.Reason != "" { // other engines look there too
		directories = []string{"/etc/cdi", "/var/run/cdi"}
	}
	module := h.module()
	for _, dir := range directories {
		// In a container the host's link from /var/run to /run would lead to the container's.
		if below, ok := strings.CutPrefix(dir, "/var/run/"); ok {
			dir = "/run/" + below
		}
		for _, path := range h.glob(filepath.Join(dir, "*")) {
			text := read(path)
			if !strings.Contains(text, "nvidia.com/") {
				continue
			}
			v := strings.TrimPrefix(cdiLibrary.FindString(text), "libcuda.so.")
			if module != "" && v != "" && v != module {
				out = append(out, found{oldCDI, fmt.Sprintf("%s is of version %s, the driver of %s", path, v, module)})
				continue
			}
			good = append(good, path)
		}
	}
	switch {
	case len(good) > 0:
		out = append(out, found{nil, few(good)})
	case out == nil && h.Engine.Reason != "":
		return wrong(unknown, "not known without Docker")
	case out == nil:
		return wrong(noRuntime, fmt.Sprintf("Docker's runtimes: %s; no specification of nvidia.com in %s", few(h.Engine.Runtimes), few(directories)))
	}
	return out
}

var cdiLibrary = regexp.MustCompile(`libcuda\.so\.\d{3,}\.\d+(\.\d+)?`)

func (h *Host) cgroup() []found {
	kind := ""
	for line := range strings.Lines(h.proc("self/mounts")) {
		if f := strings.Fields(line); len(f) > 2 && strings.HasPrefix(f[2], "cgroup") {
			kind = max(kind, map[string]string{"cgroup": "version 1", "cgroup2": "version 2"}[f[2]])
		}
	}
	if h.Engine.CgroupVersion != "" {
		kind = "version " + h.Engine.CgroupVersion
	}
	if kind == "" {
		return wrong(noCgroup, filepath.Join(h.Proc, "self/mounts")+" has none")
	}
	if h.Engine.CgroupDriver != "" {
		kind += ", Docker's driver " + h.Engine.CgroupDriver
	}
	if h.Engine.CgroupDriver != "systemd" {
		return fine(kind)
	}
	var hooked, given []string
	if h.Snapshot != nil {
		for _, c := range h.Snapshot.Containers {
			// systemd knows the devices that Docker gives itself, not those that NVIDIA's hook adds to the control group.
			switch {
			case slices.ContainsFunc(c.Assigned, func(a view.Assignment) bool { return a.Source == "device_requests" || a.Source == "env" }):
				hooked = append(hooked, c.Name)
			case len(c.Assigned) > 0:
				given = append(given, c.Name)
			}
		}
	}
	if len(hooked) > 0 {
		return wrong(reload, kind+"; GPUs through NVIDIA's hook: "+few(hooked))
	}
	// And it finds the nodes that runc names to it by their links in /dev/char, which udev makes of most devices, but not of NVIDIA's.
	if link := h.file("dev/char/195:255"); len(given) > 0 && !exists(link) {
		return wrong(noCharLinks, kind+"; "+link+" is not there; GPUs: "+few(given))
	}
	return fine(kind)
}

func (h *Host) access() (out []found) {
	if !h.traced() {
		return wrong(unknown, "not known without the tracer")
	}
	for _, c := range h.Snapshot.Containers {
		if !c.AccessLost.IsZero() {
			out = append(out, found{refused, fmt.Sprintf("container %s: /dev/nvidiactl refused, the last time %v ago; %d opens not permitted",
				c.Name, max(0, h.Now.Sub(c.AccessLost)).Round(time.Second), c.RefusedOpens)})
		}
	}
	switch {
	case out != nil:
		return out
	case h.Sampled:
		return wrong(unknown, "nothing refused in a few seconds; an exporter that runs knows more")
	}
	return fine("no container has lost its device nodes")
}

// needed are the capabilities that the exporter uses beyond those of any process.
var needed = []struct {
	name string
	bit  int
}{{"BPF", unix.CAP_BPF}, {"PERFMON", unix.CAP_PERFMON}, {"SYS_PTRACE", unix.CAP_SYS_PTRACE}, {"DAC_READ_SEARCH", unix.CAP_DAC_READ_SEARCH}}

// effective returns the exporter's effective ones as bits.
func (h *Host) effective() (bits uint64, ok bool) {
	bits, err := strconv.ParseUint(h.own.Capabilities, 16, 64)
	return bits, err == nil
}

func (h *Host) capabilities() []found {
	bits, ok := h.effective()
	if !ok {
		return wrong(unknown, "/proc does not tell")
	}
	var missing []string
	for _, c := range needed {
		// SYS_ADMIN stands for the first two.
		if bits>>c.bit&1 == 0 && !((c.bit == unix.CAP_BPF || c.bit == unix.CAP_PERFMON) && bits>>unix.CAP_SYS_ADMIN&1 != 0) {
			missing = append(missing, "CAP_"+c.name)
		}
	}
	if missing != nil {
		return wrong(noCaps, "not held: "+strings.Join(missing, ", "))
	}
	return fine("all that are used are held")
}

func (h *Host) kernel() (out []found) {
	if btf := filepath.Join(h.Sys, "kernel/btf/vmlinux"); !exists(btf) {
		out = append(out, found{noBTF, btf + " is not there"})
	}
	text := h.sysfs("kernel/security/lockdown")
	if strings.Contains(text, "[confidentiality]") {
		out = append(out, found{lockdown, "lockdown: " + text})
	}
	if out == nil {
		return fine(fmt.Sprintf("%s with BTF, lockdown %s", cmp.Or(h.own.Kernel, "a kernel"), cmp.Or(text, "none")))
	}
	return out
}

func (h *Host) tracefs() []found {
	_, err := os.Stat(filepath.Join(h.Sys, "kernel/tracing/events"))
	switch bits, ok := h.effective(); {
	case err == nil:
		return fine("mounted")
	case h.traced():
		return fine("not mounted here; the exporter has it")
	case ok && bits>>unix.CAP_SYS_ADMIN&1 == 0:
		return wrong(noTracefs, fmt.Sprintf("%v, and CAP_SYS_ADMIN is not held", err))
	}
	return fine("not mounted; the exporter mounts it for itself")
}

func (h *Host) tracer() []found {
	switch {
	case h.Snapshot == nil || h.Snapshot.Tracer == nil:
		return wrong(unknown, "not known without an exporter")
	case !h.Snapshot.Tracer.Up:
		return wrong(tracerDown, h.Snapshot.Tracer.Reason)
	case h.Snapshot.Tracer.Reason != "":
		return fine("runs with " + h.Snapshot.Tracer.Mode + "; " + h.Snapshot.Tracer.Reason)
	}
	return fine("runs with " + h.Snapshot.Tracer.Mode)
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// few joins names, and counts those after the first five.
func few(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	if len(names) > 5 {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:5], ", "), len(names)-5)
	}
	return strings.Join(names, ", ")
}
