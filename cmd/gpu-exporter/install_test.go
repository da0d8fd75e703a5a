package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-exporter/exporter/assets"
	"gpu-exporter/nvml/fake"
)

// privileges returns what /proc says of the privileges of every thread of a process, of each field all values that are there.
func privileges(t *testing.T, pid int) map[string][]string {
	t.Helper()
	all := map[string][]string{}
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			continue // that thread has ended
		}
		for line := range strings.Lines(string(text)) {
			name, value, _ := strings.Cut(line, ":")
			if value = strings.TrimSpace(value); (strings.HasPrefix(name, "Cap") || name == "NoNewPrivs") && !slices.Contains(all[name], value) {
				all[name] = append(all[name], value)
			}
		}
	}
	if len(all) == 0 {
		t.Fatalf("no threads of %d", pid)
	}
	return all
}

// opened tells whether a process has a file open.
func opened(pid int, path string) bool {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	return slices.ContainsFunc(files, func(f string) bool { to, _ := os.Readlink(f); return to == path })
}

// TestLeastPrivilege: started by root with all privileges, neither the exporter nor its worker keeps a capability that its flags do not need, in any
// thread, nor can it get one back.
func TestLeastPrivilege(t *testing.T) {
	gpu := fake.H200(0)
	hold(&gpu, 0, fake.Process{PID: sleeper(t), Memory: gib})
	h := fake.Install(t, fake.Scenario{GPUs: []fake.GPU{gpu}})
	const always = 1<<unix.CAP_SYS_PTRACE | 1<<unix.CAP_DAC_READ_SEARCH | 1<<unix.CAP_SYS_ADMIN | 1<<unix.CAP_SYSLOG
	const traces = 1<<unix.CAP_BPF | 1<<unix.CAP_PERFMON
	for name, c := range map[string]struct {
		flags []string
		keeps uint64
	}{
		"the default":    {nil, always | traces},
		"no tracer":      {[]string{"--tracer=off"}, always},
		"a driver root":  {[]string{"--tracer=off", "--driver-root=/./../"}, always | 1<<unix.CAP_SYS_CHROOT},
		"another socket": {[]string{"--tracer=off", "--docker.host=unix:///none"}, always | 1<<unix.CAP_DAC_OVERRIDE},
		"a port of root": {[]string{"--tracer=off", "--web.listen-address=127.0.0.1:999"}, always | 1<<unix.CAP_NET_BIND_SERVICE},
	} {
		t.Run(name, func(t *testing.T) {
			p := start(t, append(c.flags, "--nvml.library="+h.Library)...)
			s := p.until(t, 20*time.Second, "the GPU and its process", func(s scrape) bool {
				return s.sum("gpu_up") == 1 && len(s.find("gpu_process_info", "process_name", "sleep")) == 1 && (c.flags != nil || s.sum("gpu_exporter_tracer_up") == 1)
			})
			s.want(t, 1, "gpu_exporter_process_visibility", "reason", "ok")
			kin := descendants(p.cmd.Process.Pid)
			if len(kin) != 1 {
				t.Fatalf("children %v, want the worker", kin)
			}
			mask, none := fmt.Sprintf("%016x", c.keeps), fmt.Sprintf("%016x", 0)
			want := map[string]string{"CapInh": none, "CapPrm": mask, "CapEff": mask, "CapBnd": mask, "CapAmb": none, "NoNewPrivs": "1"}
			for _, pid := range append(kin, p.cmd.Process.Pid) {
				for name, values := range privileges(t, pid) {
					if len(values) != 1 || values[0] != want[name] {
						t.Errorf("process %d (the exporter is %d): %s is %v, want %s", pid, p.cmd.Process.Pid, name, values, want[name])
					}
				}
			}
			for _, line := range p.complaints() {
				if !strings.Contains(line, "docker") {
					t.Errorf("it says %s", line)
				}
			}
			p.stop(t)
		})
	}
}

const others = 10 // processes of another user; a host may have some that nobody may look at

// nobodies starts processes of another user and returns the PID of one.
func nobodies(t *testing.T) (pid int) {
	t.Helper()
	for range others {
		cmd := exec.Command("sleep", "600")
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
		pid = cmd.Process.Pid
	}
	return pid
}

// hiddenProcesses returns of how many processes the open files could not be read.
func hiddenProcesses(log string) (n int) {
	if m := regexp.MustCompile(`open files of some processes cannot be read.* processes=(\d+)`).FindStringSubmatch(log); m != nil {
		n, _ = strconv.Atoi(m[1])
	}
	return n
}

// TestWithoutCapability takes capabilities away and sees what is missing, as docs/threats.md tells, and that nothing else is.
func TestWithoutCapability(t *testing.T) {
	nobody := nobodies(t)
	gpu := fake.H200(0)
	hold(&gpu, 0, fake.Process{PID: nobody, Memory: gib})
	h := fake.Install(t, fake.Scenario{GPUs: []fake.GPU{gpu}})
	socket := engine(t, nil, nil)
	setpriv, err := exec.LookPath("setpriv")
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		without             string
		traced, hidden, log bool
	}{
		{"", true, false, true},
		{"bpf", true, false, true}, // CAP_SYS_ADMIN stands for it
		{"perfmon", true, false, true},
		{"bpf sys_admin", false, false, true},
		{"perfmon sys_admin", false, false, true},
		{"sys_ptrace", true, true, true},
		{"dac_read_search", true, true, true},
		{"syslog", true, false, false},
	}
	var running []*process
	for _, tt := range tests {
		caps := ""
		for _, c := range []string{"bpf", "perfmon", "sys_admin", "sys_ptrace", "dac_read_search", "syslog"} {
			if !slices.Contains(strings.Fields(tt.without), c) {
				caps += ",+" + c
			}
		}
		running = append(running, launch(t, func(c *exec.Cmd) {
			c.Args = append([]string{"setpriv", "--bounding-set=-all" + caps, "--inh-caps=-all", c.Path}, c.Args[1:]...)
			c.Path = setpriv
		}, "--nvml.library="+h.Library, "--docker.host=unix://"+socket))
	}
	for i, tt := range tests {
		p := running[i]
		p.serving(t)
		s := p.until(t, 20*time.Second, "without "+tt.without+": the GPU and its process, and a word of the tracer's", func(s scrape) bool {
			return s.sum("gpu_up") == 1 && len(s["gpu_exporter_tracer_up"]) == 1 && len(s.find("gpu_process_info", "process_name", "sleep")) == 1
		})
		if up := s.sum("gpu_exporter_tracer_up") == 1; up != tt.traced {
			t.Errorf("without %s the tracer is up: %v\n%s", tt.without, up, p.get(t, "/-/ready"))
		}
		s.want(t, 1, "gpu_exporter_docker_up")
		if tt.traced {
			for deadline := time.Now().Add(10 * time.Second); tt.hidden && !strings.Contains(p.log.String(), "open files of some processes cannot be read") && time.Now().Before(deadline); {
				time.Sleep(20 * time.Millisecond)
			}
			if hidden := hiddenProcesses(p.log.String()); (hidden >= others) != tt.hidden {
				t.Errorf("without %s %d processes are hidden", tt.without, hidden)
			}
		}
		if got := opened(p.cmd.Process.Pid, "/dev/kmsg"); got != tt.log {
			t.Errorf("without %s it reads the kernel's log: %v", tt.without, got)
		}
		p.stop(t)
	}
}

// TestUnitCapabilities: with the capabilities of the systemd unit and no others, every source works.
func TestUnitCapabilities(t *testing.T) {
	unit, err := assets.Files.ReadFile("install/gpu-exporter.service")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^CapabilityBoundingSet=(.+)$`).FindStringSubmatch(string(unit))
	if m == nil {
		t.Fatal("the unit bounds no capabilities")
	}
	var caps strings.Builder
	for _, c := range strings.Fields(m[1]) {
		caps.WriteString(",+" + strings.ToLower(strings.TrimPrefix(c, "CAP_")))
	}
	job := sleeper(t)
	gpu := fake.H200(0)
	hold(&gpu, 0, fake.Process{PID: job, Memory: gib})
	h := fake.Install(t, fake.Scenario{GPUs: []fake.GPU{gpu}})
	setpriv, err := exec.LookPath("setpriv")
	if err != nil {
		t.Fatal(err)
	}
	p := launch(t, func(c *exec.Cmd) {
		c.Args = append([]string{"setpriv", "--no-new-privs", "--bounding-set=-all" + caps.String(), "--inh-caps=-all", c.Path}, c.Args[1:]...)
		c.Path = setpriv
	}, "--nvml.library="+h.Library, "--docker.host=unix://"+engine(t, nil, nil))
	p.serving(t)
	s := p.until(t, 20*time.Second, "the kernel tracer", func(s scrape) bool { return s.sum("gpu_exporter_tracer_up") == 1 })
	s.want(t, 1, "gpu_exporter_nvml_up")
	s.want(t, 1, "gpu_exporter_docker_up")
	s = p.until(t, 10*time.Second, "the process with its name", func(s scrape) bool { return len(s.find("gpu_process_info", "process_name", "sleep")) == 1 })
	s.none(t, "gpu_exporter_tracer_up", "mode", "off")
	if !opened(p.cmd.Process.Pid, "/dev/kmsg") {
		t.Error("it does not read the kernel's log")
	}
	p.stop(t)
}
