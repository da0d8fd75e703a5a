package doctor

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-exporter/exporter/assets"
	"gpu-exporter/exporter/docker"
	"gpu-exporter/exporter/view"
)

var now = time.Unix(1_750_000_000, 0)

// tree is a directory that resembles the root of a host.
type tree struct {
	t    *testing.T
	root string
	host *Host
}

func (r *tree) path(name string) string { return filepath.Join(r.root, name) }

func (r *tree) check(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

// write makes a file in place of what is there.
func (r *tree) write(name, text string) {
	r.t.Helper()
	r.remove(name)
	r.check(os.MkdirAll(filepath.Dir(r.path(name)), 0o755))
	r.check(os.WriteFile(r.path(name), []byte(text), 0o644))
}

func (r *tree) remove(name string) {
	r.t.Helper()
	r.check(os.RemoveAll(r.path(name)))
}

func (r *tree) link(name, target string) {
	r.t.Helper()
	r.remove(name)
	r.check(os.MkdirAll(filepath.Dir(r.path(name)), 0o755))
	r.check(os.Symlink(target, r.path(name)))
}

// node makes a character device. That of NVIDIA's numbers does nothing without the driver, and is never opened.
func (r *tree) node(name string, major, minor uint32, mode uint32) {
	r.t.Helper()
	r.remove(name)
	r.check(os.MkdirAll(filepath.Dir(r.path(name)), 0o755))
	r.check(unix.Mknod(r.path(name), unix.S_IFCHR|mode, int(unix.Mkdev(major, minor))))
	r.check(os.Chmod(r.path(name), fs.FileMode(mode)))
}

// says sets what the exporter says of a source that is down.
func (r *tree) says(name, reason string) {
	list := slices.DeleteFunc(r.host.Snapshot.Sources, func(s view.Source) bool { return s.Name == name })
	r.host.Snapshot.Sources = append(list, view.Source{Name: name, Reason: reason})
}

// pci puts a GPU on the bus.
func (r *tree) pci(address, driver string) {
	dir := "sys/bus/pci/devices/" + address + "/"
	r.write(dir+"vendor", "0x10de\n")
	r.write(dir+"class", "0x030200\n")
	r.write(dir+"power/runtime_status", "active\n")
	if driver != "" {
		r.link(dir+"driver", "../../../../bus/pci/drivers/"+driver)
	}
}

// rules are what systemd holds for the container.
func (r *tree) rules(text string) {
	r.write("run/systemd/transient/docker-"+r.host.Snapshot.Containers[0].ID+".scope.d/50-DeviceAllow.conf", "[Scope]\nDeviceAllow=\n"+text+"\n")
}

// nvswitch puts a switch of GPUs on the bus.
func (r *tree) nvswitch() {
	r.pci("0000:0c:00.0", "nvidia-nvswitch")
	r.write("sys/bus/pci/devices/0000:0c:00.0/class", "0x068000\n")
}

const gpuInformation = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 16\nGPU UUID: \t GPU-9026ca80-8548-f41f-3e69-ccd41944a5ef\nDevice Minor: \t 2\n"

// healthy is a host on which all is well: a GPU, its driver, Docker with the runtime, one container that uses the GPU.
func healthy(t *testing.T) *tree {
	r := &tree{t: t, root: t.TempDir()}
	r.pci("0000:0a:00.0", "nvidia")
	r.write("sys/bus/pci/devices/0000:0a:00.1/vendor", "0x10de\n") // its sound
	r.write("sys/bus/pci/devices/0000:0a:00.1/class", "0x040300\n")
	r.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: gcc 12.2.0\n")
	r.write("proc/driver/nvidia/gpus/0000:0a:00.0/information", gpuInformation)
	r.write("proc/devices", "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n508 nvidia-uvm\n\nBlock devices:\n  8 sd\n")
	r.write("proc/self/status", "Name:\tx\nCapEff:\t000001ffffffffff\n")
	r.write("proc/self/mounts", "proc /proc proc rw 0 0\ncgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n")
	r.write("proc/1/stat", "1 (systemd) S 0\n")
	r.link("proc/1/ns/pid", "pid:[4026531836]")
	r.node("dev/nvidiactl", 195, 255, 0o666)
	r.node("dev/nvidia2", 195, 2, 0o666)
	r.node("dev/nvidia-uvm", 508, 0, 0o666)
	r.write("usr/lib64/libnvidia-ml.so.580.159.04", "ELF")
	r.link("usr/lib64/libnvidia-ml.so.1", "libnvidia-ml.so.580.159.04")
	r.write("etc/cdi/nvidia.yaml", "kind: nvidia.com/gpu\n  - hostPath: /usr/lib64/libcuda.so.580.159.04\n")
	r.write("sys/kernel/btf/vmlinux", "BTF")
	r.write("sys/kernel/security/lockdown", "none [integrity] confidentiality\n")
	r.check(os.MkdirAll(r.path("sys/kernel/tracing/events"), 0o755))
	r.host = &Host{Proc: r.path("proc"), Sys: r.path("sys"), DriverRoot: r.root, Now: now, From: "here",
		Engine: docker.Info{Version: "28.5.2", API: "1.51", CgroupDriver: "cgroupfs", CgroupVersion: "2", Runtimes: []string{"nvidia", "runc"}, CDI: []string{"/etc/cdi"}},
		Snapshot: &view.Snapshot{Time: now, Driver: view.Driver{Version: "580.159.04", NVMLVersion: "13.580.159.04"},
			Sources:    []view.Source{{Name: "docker", Up: true}, {Name: "nvml", Up: true}},
			Tracer:     &view.Tracer{Mode: "tracepoint", Up: true},
			Devices:    []view.Device{{UUID: "GPU-9026ca80", PCIBusID: "0000:0a:00.0", State: "ok"}},
			Containers: []view.Container{{ID: "1387765308ae", Name: "train", Assigned: []view.Assignment{{GPUUUID: "GPU-9026ca80", Source: "device_requests"}}}}}}
	return r
}

// bad lists what is wrong, as check and state.
func bad(r *Report) (list []string) {
	for _, f := range r.Findings {
		if f.State != OK {
			list = append(list, f.Check+" "+string(f.State))
		}
	}
	return list
}

// TestHealthy: nothing is found on a host on which all is well.
func TestHealthy(t *testing.T) {
	r := Examine(healthy(t).host)
	if list := bad(r); list != nil || r.State != OK || r.State.ExitCode() != 0 || len(r.Findings) != len(Checks) {
		t.Errorf("%v: %+v", list, r)
	}
	for _, f := range r.Findings {
		if f.Evidence == "" || f.Advice != "" {
			t.Errorf("%+v", f)
		}
	}
}

// cases has one change for each fault that can be found, with what is then said.
var cases = []struct {
	fault    *Fault
	name     string
	change   func(*tree)
	evidence string
}{
	{noGPU, "no GPU", func(r *tree) { r.remove("sys/bus"); r.remove("proc/driver/nvidia/gpus"); r.host.Snapshot.Devices = nil }, "no device of vendor 0x10de"},
	{otherDriver, "nouveau", func(r *tree) { r.pci("0000:0b:00.0", "nouveau") }, "0000:0b:00.0 is bound to nouveau"},
	{otherDriver, "unbound", func(r *tree) { r.pci("0000:0b:00.0", "") }, "0000:0b:00.0 is bound to no driver"},
	{vfio, "Xen", func(r *tree) { r.pci("0000:0b:00.0", "pciback") }, "0000:0b:00.0 is bound to pciback"},
	{vfio, "vfio of another vendor", func(r *tree) { r.pci("0000:0b:00.0", "nvgrace_gpu_vfio_pci") }, "bound to nvgrace_gpu_vfio_pci"},
	{vfio, "vfio", func(r *tree) { r.pci("0000:0b:00.0", "vfio-pci") }, "0000:0b:00.0 is bound to vfio-pci"},
	{asleep, "asleep, its minor not asked for", func(r *tree) {
		r.write("sys/bus/pci/devices/0000:0a:00.0/power/runtime_status", "suspended\n")
		r.remove("dev/nvidia2")
	}, "0000:0a:00.0 is suspended"},
	{notLoaded, "no driver", func(r *tree) { r.remove("proc/driver"); r.says("nvml", "the NVIDIA driver is not loaded") }, "driver/nvidia/version is not there"},
	{noNode, "no node", func(r *tree) { r.remove("dev/nvidia2") }, "dev/nvidia2: no such file or directory"},
	{wrongNode, "another's number", func(r *tree) { r.node("dev/nvidia-uvm", 507, 0, 0o666) }, "is device 507:0, the driver's is 508:0"},
	{wrongNode, "no device", func(r *tree) { r.write("dev/nvidiactl", "") }, "dev/nvidiactl is no character device"},
	{closedNode, "for root alone", func(r *tree) { r.node("dev/nvidia2", 195, 2, 0o660) }, "dev/nvidia2 has mode 660"},
	{mismatch, "library in use", func(r *tree) { r.host.Snapshot.Driver.NVMLVersion = "12.575.57.08" }, "module 580.159.04, library 575.57.08"},
	{noExporter, "no exporter", func(r *tree) { r.host.Snapshot, r.host.Reason = nil, "no exporter answers at x" }, "no exporter answers at x"},
	{stranger, "another exporter", func(r *tree) {
		r.host.Snapshot, r.host.Reason, r.host.Stranger = nil, "it is no gpu-exporter: 404 Not Found", true
	}, "404 Not Found"},
	{otherHost, "an exporter elsewhere", func(r *tree) {
		r.write("proc/sys/kernel/random/boot_id", "1\n")
		r.host.Snapshot.Host = view.Host{Name: "far", BootID: "2"}
	}, "here, and that is far"},
	{recorded, "a recording", func(r *tree) { r.host.Snapshot.Recorded = true }, "here, and serves a recording"},
	{staleExporter, "old snapshot", func(r *tree) { r.host.Now = now.Add(time.Minute) }, "60 s old"},
	{noLibrary, "no library", func(r *tree) {
		r.says("nvml", "no usable libnvidia-ml.so.1: tried /x")
	}, "tried /x"},
	{noLibrary, "no library anywhere", func(r *tree) {
		r.says("nvml", "no usable libnvidia-ml.so.1: it is in none of 15 places where drivers have it")
	}, "and in /usr/lib/"},
	{noNVML, "NVML down", func(r *tree) {
		r.says("nvml", "nvmlInit_v2 does not return")
	}, "does not return"},
	{noNVML, "NVML silent", func(r *tree) { r.host.Snapshot.Sources = nil }, "not answered"},
	{notSeen, "GPU left out", func(r *tree) {
		r.write("proc/driver/nvidia/gpus/0000:0b:00.0/information", "GPU UUID: \t GPU-????????\nGPU Excluded:\t Yes\n")
	}, "NVreg_ExcludedGpus leaves it out"},
	{noFabric, "no fabric manager", func(r *tree) { r.nvswitch() }, "1 NVSwitches, and no process"},
	{notSeen, "GPU not in NVML", func(r *tree) {
		r.write("proc/driver/nvidia/gpus/0000:0b:00.0/information", strings.Replace(gpuInformation, "Minor: \t 2", "Minor: \t 3", 1))
		r.node("dev/nvidia3", 195, 3, 0o666)
	}, "0000:0b:00.0 is in "},
	{lost, "lost GPU", func(r *tree) {
		r.host.Snapshot.Devices[0].State, r.host.Snapshot.Devices[0].Reason = "lost", "GPU_IS_LOST"
	}, "is lost: GPU_IS_LOST"},
	{pidSpace, "PID namespace", func(r *tree) { r.link("proc/1/ns/pid", "pid:[4026532201]") }, "--pid=host"},
	{pidSpace, "PID namespace of the exporter", func(r *tree) { r.says("processes", "pid_namespace: not the host's") }, "not the host's"},
	{hidden, "hidepid", func(r *tree) { r.remove("proc/1"); r.write("proc/self/stat", "7 (x) S 1\n") }, "hidepid"},
	{stuck, "a file that hangs", func(r *tree) { r.says("processes", "hangs: /proc/7/cmdline") }, "/proc/7/cmdline"},
	{noDocker, "no Docker", func(r *tree) {
		r.host.Engine = docker.Info{Reason: "no Docker here: /var/run/docker.sock does not exist"}
	}, "does not exist"},
	{noDocker, "no socket in the exporter's container", func(r *tree) { r.says("docker", "no Docker here: /x does not exist") }, "the exporter says: no Docker here: /x"},
	{dockerDown, "Docker down for the exporter", func(r *tree) { r.says("docker", "permission denied") }, "the exporter says: permission denied"},
	{dockerDown, "Docker down", func(r *tree) { r.host.Engine = docker.Info{Reason: "permission denied on /var/run/docker.sock"} }, "permission denied"},
	{noRuntime, "no runtime", func(r *tree) { r.remove("etc/cdi"); r.host.Engine.Runtimes = []string{"runc"} }, "Docker's runtimes: runc; CDI directories, with nothing of nvidia.com: /etc/cdi"},
	{oldCDI, "old CDI", func(r *tree) {
		r.write("etc/cdi/nvidia.yaml", "kind: nvidia.com/gpu\n  - hostPath: /usr/lib64/libcuda.so.575.57.08\n")
	}, "is of version 575.57.08, the driver of 580.159.04"},
	{noCgroup, "no cgroups", func(r *tree) {
		r.write("proc/self/mounts", "proc /proc proc rw 0 0\n")
		r.host.Engine.CgroupVersion = ""
	}, "self/mounts has none"},
	{reload, "systemd does not know the GPUs", func(r *tree) {
		r.host.Engine.CgroupDriver = "systemd"
		r.rules("DeviceAllow=/dev/char/1:3 rwm\nDeviceAllow=char-* m")
	}, "version 2, Docker's driver systemd, whose rules lack the GPUs of train"},
	{refused, "failed opens", func(r *tree) {
		r.host.Snapshot.Containers[0].RefusedOpens, r.host.Snapshot.Containers[0].AccessLost = 12, now.Add(-time.Minute)
	}, "container train: /dev/nvidiactl refused, the last time 1m0s ago; 12 opens not permitted"},
	{noCaps, "capabilities", func(r *tree) { r.write("proc/self/status", "CapEff:\t0000000000080000\n") }, "not held: CAP_BPF, CAP_PERFMON, CAP_DAC_READ_SEARCH"},
	{noCaps, "the exporter's capabilities", func(r *tree) { r.host.Snapshot.Host.Capabilities = "0" }, "not held: CAP_BPF, CAP_PERFMON, CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH"},
	{noBTF, "no BTF", func(r *tree) { r.remove("sys/kernel/btf") }, "btf/vmlinux is not there"},
	{lockdown, "lockdown", func(r *tree) { r.write("sys/kernel/security/lockdown", "none integrity [confidentiality]\n") }, "[confidentiality]"},
	{lockdown, "lockdown seen from a container", func(r *tree) {
		r.write("sys/kernel/security/lockdown", "[confidentiality]\n")
		r.host.Sys = r.path("own")
		r.write("own/kernel/btf/vmlinux", "BTF")
	}, "[confidentiality]"},
	{noTracefs, "no tracefs", func(r *tree) {
		r.remove("sys/kernel/tracing/events")
		r.write("proc/self/status", "CapEff:\t000001ffffdfffff\n")
		r.host.Snapshot.Tracer = nil
	}, "no such file or directory, and CAP_SYS_ADMIN is not held"},
	{tracerDown, "no tracer", func(r *tree) { r.host.Snapshot.Tracer = &view.Tracer{Mode: "off", Reason: "needs CAP_BPF"} }, "needs CAP_BPF"},
}

// TestFaults: each fault is found where it is, with its evidence and advice, and it alone; the others are unknown at most.
func TestFaults(t *testing.T) {
	tried := map[*Fault]bool{}
	for _, c := range cases {
		tried[c.fault] = true
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			tree := healthy(t)
			c.change(tree)
			r := Examine(tree.host)
			if r.State != c.fault.State || r.State.ExitCode() != map[State]int{Warning: 1, Broken: 2}[c.fault.State] {
				t.Errorf("state %s, want %s", r.State, c.fault.State)
			}
			var wrong []Finding
			for _, f := range r.Findings {
				if f.State != OK && f.State != Unknown {
					wrong = append(wrong, f)
				}
			}
			other := func(f Finding) bool { return f.Advice != c.fault.Advice }
			if len(wrong) == 0 || slices.ContainsFunc(wrong, other) || !strings.Contains(wrong[0].Evidence, c.evidence) {
				t.Errorf("found %+v, want %q", wrong, c.evidence)
			}
			if i := slices.IndexFunc(Checks, func(k Check) bool { return slices.Contains(k.Faults, c.fault) }); i >= 0 && len(wrong) > 0 && wrong[0].Check != Checks[i].Name {
				t.Errorf("check %s says it, not %s", wrong[0].Check, Checks[i].Name)
			}
		})
	}
	for _, c := range Checks {
		for _, f := range append(c.Faults, stuck) {
			if !tried[f] {
				t.Errorf("no case shows %q", f.Sign)
			}
		}
	}
}

// TestMismatchOnDisk: with NVML down, what is on the disk tells the version.
func TestMismatchOnDisk(t *testing.T) {
	r := healthy(t)
	r.says("nvml", "the NVIDIA library and the loaded kernel module are of different versions")
	r.remove("usr/lib64/libnvidia-ml.so.580.159.04")
	r.write("usr/lib64/libnvidia-ml.so.575.57.08", "ELF")
	report := Examine(r.host)
	i := slices.IndexFunc(report.Findings, func(f Finding) bool { return f.Check == "versions" })
	if f := report.Findings[i]; f.State != Broken || f.Evidence != "module 580.159.04, library 575.57.08" {
		t.Errorf("%+v", f)
	}
}

// TestKinds: what resembles a fault and is none.
func TestKinds(t *testing.T) {
	for name, change := range map[string]func(*tree){
		"systemd knows the GPUs": func(r *tree) {
			r.host.Engine.CgroupDriver = "systemd"
			r.rules("DeviceAllow=/dev/char/195:255 rwm\nDeviceAllow=/dev/char/195:0 rwm")
		},
		"systemd knows every node of the driver": func(r *tree) {
			r.host.Engine.CgroupDriver = "systemd"
			r.rules("DeviceAllow=char-nvidia rwm")
		},
		"a container that may do all": func(r *tree) {
			r.host.Engine.CgroupDriver = "systemd"
			r.host.Snapshot.Containers[0].Request = "privileged"
		},
		"systemd's rules are not to be seen": func(r *tree) { r.host.Engine.CgroupDriver = "systemd" },
		"systemd without containers on GPUs": func(r *tree) {
			r.host.Engine.CgroupDriver = "systemd"
			r.host.Snapshot.Containers = nil
		},
		"refused a GPU that is not its own": func(r *tree) { r.host.Snapshot.Containers[0].RefusedOpens = 3 },
		"the exporter may do what this process may not": func(r *tree) {
			r.write("proc/self/status", "CapEff:\t0000000000000000\n")
			r.remove("proc/1")
			r.host.Snapshot.Host.Capabilities = "1ffffffffff"
			r.host.Snapshot.Sources = append(r.host.Snapshot.Sources, view.Source{Name: "processes", Up: true})
			r.remove("sys/kernel/tracing")
		},
		"WSL": func(r *tree) { r.remove("sys/bus"); r.remove("proc/driver") },
		"the hook alone": func(r *tree) {
			r.remove("etc/cdi")
			r.host.Engine.Runtimes = nil
			r.write("usr/bin/nvidia-container-runtime-hook", "")
		},
		"CDI in a directory that is a link on the host": func(r *tree) {
			r.remove("etc/cdi")
			r.link("var/run", "/nowhere")
			r.write("run/cdi/nvidia.yaml", "kind: nvidia.com/gpu\n")
			r.host.Engine.Runtimes, r.host.Engine.CDI = nil, []string{"/var/run/cdi"}
		},
		"a fabric manager": func(r *tree) { r.nvswitch(); r.write("proc/44/comm", "nv-fabricmanage\n") },
		"NVSwitches of a virtual machine": func(r *tree) {
			r.nvswitch()
			r.link("sys/bus/pci/devices/0000:0c:00.0/driver", "../../../../bus/pci/drivers/vfio-pci")
		},
		"cgroup version 1": func(r *tree) {
			r.write("proc/self/mounts", "cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n")
			r.host.Engine.CgroupVersion = "1"
		},
		"SYS_ADMIN stands for BPF and PERFMON": func(r *tree) { r.write("proc/self/status", "CapEff:\t0000000000280004\n") },
		"tracefs is mounted by the exporter":   func(r *tree) { r.remove("sys/kernel/tracing/events") },
		"a kernel without lockdown":            func(r *tree) { r.remove("sys/kernel/security") },
		"CDI alone":                            func(r *tree) { r.host.Engine.Runtimes = []string{"runc"} },
		"a specification of somebody else":     func(r *tree) { r.write("etc/cdi/other.yaml", "kind: vendor.com/nic\nlibcuda.so.111.11\n") },
		"an NVML without a bus, as in WSL":     func(r *tree) { r.remove("sys/bus") },
		"an older exporter":                    func(r *tree) { r.host.Snapshot.Tracer = nil },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tree := healthy(t)
			change(tree)
			r := Examine(tree.host)
			for _, f := range r.Findings {
				if f.State != OK && f.State != Unknown {
					t.Errorf("%+v", f)
				}
			}
		})
	}
}

// TestCgroupVersion: version 1 is what has controllers, also beside version 2 (hybrid), in any order.
func TestCgroupVersion(t *testing.T) {
	const v2, memory, named = "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n", "cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n",
		"cgroup /sys/fs/cgroup/systemd cgroup rw,xattr,name=systemd 0 0\n"
	for mounts, want := range map[string]string{v2: "version 2", memory: "version 1", v2 + memory + named: "version 1", named + memory + v2: "version 1",
		named + v2: "version 2", "half a line cgroup": ""} {
		tree := healthy(t)
		tree.write("proc/self/mounts", mounts)
		tree.host.Engine.CgroupVersion, tree.host.Engine.CgroupDriver = "", ""
		for _, f := range Examine(tree.host).Findings {
			if f.Check == "cgroup" && (f.Evidence != want && want != "" || f.State == OK != (want != "")) {
				t.Errorf("%q: %+v, want %q", mounts, f, want)
			}
		}
	}
}

// TestNothing: an empty tree, files that are directories, and text from outside in the evidence.
func TestNothing(t *testing.T) {
	dir := t.TempDir()
	for range 2 {
		r := Examine(&Host{Proc: dir, Sys: dir, DriverRoot: dir, Reason: "gone\x1b[2J\n"})
		if r.State != Broken || len(r.Findings) < len(Checks) {
			t.Errorf("%+v", r)
		}
		for _, f := range r.Findings {
			if strings.ContainsAny(f.Evidence, "\x1b\n") {
				t.Errorf("%q", f.Evidence)
			}
		}
		for _, name := range []string{"self/status", "self/mounts", "devices", "driver/nvidia/version", "kernel/security/lockdown", "etc/cdi/nvidia.yaml"} {
			if err := os.MkdirAll(filepath.Join(dir, name), 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
				t.Fatal(err)
			}
		}
	}
}

// TestStuck: a check that the kernel does not answer is a finding, and the others are made.
func TestStuck(t *testing.T) {
	never := make(chan struct{})
	defer close(never)
	r := examine(&Host{}, []Check{{"a", nil, func(*Host) []found { <-never; return nil }}, {"b", nil, func(*Host) []found { return fine("well") }}}, time.Millisecond)
	if len(r.Findings) != 2 || r.State != Broken || r.Findings[0].Advice != stuck.Advice || r.Findings[1].State != OK {
		t.Errorf("%+v", r)
	}
}

// TestMany: of a check with many findings the first are listed, and the rest is counted.
func TestMany(t *testing.T) {
	r := healthy(t)
	for range 50 {
		r.host.Snapshot.Containers = append(r.host.Snapshot.Containers, view.Container{Name: "\x1b[2J", AccessLost: now})
	}
	report := Examine(r.host)
	if n := len(report.Findings); n != len(Checks)+20 || report.State != Broken {
		t.Errorf("%d findings, %s", n, report.State)
	}
	if i := slices.IndexFunc(report.Findings, func(f Finding) bool { return f.Evidence == "and 30 more" && f.State == Broken }); i < 0 {
		t.Errorf("%+v", report.Findings)
	}
}

// TestUnit: the systemd unit grants the capabilities whose lack is a fault.
func TestUnit(t *testing.T) {
	unit, err := assets.Files.ReadFile("install/gpu-exporter.service")
	if err != nil {
		t.Fatal(err)
	}
	granted := regexp.MustCompile(`(?m)^CapabilityBoundingSet=.*$`).FindString(string(unit)) + " "
	for _, c := range needed {
		if !strings.Contains(granted, "CAP_"+c.name+" ") {
			t.Errorf("%q lacks %s", granted, c.name)
		}
	}
}

// TestText: every fault says what to do in one line that fits a table.
func TestText(t *testing.T) {
	for _, c := range Checks {
		for _, f := range c.Faults {
			if f.Sign == "" || f.Advice == "" || strings.ContainsAny(f.Sign+f.Advice, "|\n") || f.State != Warning && f.State != Broken {
				t.Errorf("%s: %+v", c.Name, f)
			}
		}
	}
	if n := strings.Count(Table(), "\n"); n < 25 {
		t.Errorf("the table has %d lines", n)
	}
}
