package doctor

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
	noLibrary = &Fault{Broken, "no usable libnvidia-ml.so.1: …",
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
		"`systemctl daemon-reload` takes the GPUs from them. Run `nvidia-ctk system create-dev-char-symlinks --create-all` at every boot and give GPUs " +
			"through CDI (`--device nvidia.com/gpu=all`), or set `native.cgroupdriver=cgroupfs` in Docker's exec-opts; then make them anew"}
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
	recorded = &Fault{Warning, "the exporter at `--url` serves a recording",
		"end it, or name another: what is said here of NVML, driver and tracer is of the recording"}
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
	{"exporter", []*Fault{noExporter, stranger, otherHost, recorded, staleExporter}, (*Host).exporter},
	{"nvml", []*Fault{noLibrary, noNVML}, (*Host).nvml},
	{"visible", []*Fault{notSeen, lost}, (*Host).visible},
	{"fabric", []*Fault{noFabric}, (*Host).fabric},
	{"pids", []*Fault{pidSpace, hidden}, (*Host).pids},
	{"docker", []*Fault{noDocker, dockerDown}, (*Host).docker},
	{"runtime", []*Fault{noRuntime, oldCDI}, (*Host).runtime},
	{"cgroup", []*Fault{noCgroup, reload}, (*Host).cgroup},
	{"access", []*Fault{refused}, (*Host).access},
	{"capabilities", []*Fault{noCaps}, (*Host).capabilities},
	{"kernel", []*Fault{noBTF, lockdown}, (*Host).kernel},
	{"tracefs", []*Fault{noTracefs}, (*Host).tracefs},
	{"tracer", []*Fault{tracerDown}, (*Host).tracer},
}
