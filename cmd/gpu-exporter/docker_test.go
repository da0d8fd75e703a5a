package main

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-exporter/exporter/docker/dockertest"
	"gpu-exporter/nvml/fake"
)

const (
	gib = 1 << 30
	mib = 1 << 20
)

// uuid returns the UUID of a fake GPU.
func uuid(g fake.GPU) string { return g.Values["uuid"] }

// hold gives a fake GPU processes, and a rest of memory that none of them accounts for.
func hold(g *fake.GPU, rest uint64, processes ...fake.Process) {
	used := rest
	for _, p := range processes {
		used += p.Memory
	}
	g.Processes = processes
	g.Set("memory", uint64(150754820096), 644939776, used)
}

// sleeper starts a process that does nothing, outside any container.
func sleeper(t *testing.T) int {
	t.Helper()
	cmd := exec.Command("sleep", "600")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	return cmd.Process.Pid
}

// pid returns the host PID of a container's first process.
func pid(t *testing.T, d *dockertest.Daemon, name string) int {
	t.Helper()
	n, err := strconv.Atoi(d.Docker(t, "inspect", "-f", "{{.State.Pid}}", name))
	if err != nil || n == 0 {
		t.Fatalf("container %s: pid %d, %v", name, n, err)
	}
	return n
}

// TestDocker: real containers and a real host process on two fake GPUs, through the real binary. Every label and figure is right, each GPU's
// memory adds up, and what happens to a container shows within a second.
func TestDocker(t *testing.T) {
	d := dockertest.Start(t)
	gpus := []fake.GPU{fake.H200(0), fake.H200(1)} // of minors 7 and 6
	first, second := uuid(gpus[0]), uuid(gpus[1])
	node := func(minor int) []string {
		path := filepath.Join(d.Dir, fmt.Sprint("nvidia", minor))
		if err := unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(195, uint32(minor)))); err != nil {
			t.Fatal(err)
		}
		return []string{"--device", fmt.Sprintf("%s:/dev/nvidia%d", path, minor)}
	}
	node6, node7 := node(6), node(7)
	one := d.Run(t, append([]string{"--name", "one", "--gpus", `"device=1"`}, append(node6, "busybox")...)...)
	two := d.Run(t, append([]string{"--name", "two", "--gpus", "all"}, append(append(node6, node7...), "busybox")...)...)
	d.Run(t, append([]string{"--name", "part", "--gpus", "all"}, append(node7, "busybox")...)...)
	d.Run(t, "--name", "none", "busybox")
	d.Docker(t, "exec", "-d", "one", "sleep", "601")
	var child int
	for line := range strings.Lines(d.Docker(t, "top", "one", "-eo", "pid,args")) {
		if f := strings.Fields(line); len(f) > 2 && f[len(f)-1] == "601" {
			child, _ = strconv.Atoi(f[0])
		}
	}
	pid1, pid2, host := pid(t, d, "one"), pid(t, d, "two"), sleeper(t)
	if child == 0 || child == pid1 {
		t.Fatal("no second process in container one")
	}
	hold(&gpus[0], 500*mib, fake.Process{PID: pid2, Memory: 2 * gib}, fake.Process{PID: host, Memory: 3 * gib})
	hold(&gpus[1], 300*mib, fake.Process{PID: pid1, Memory: 4*gib + 4096}, fake.Process{PID: child, Memory: gib}, fake.Process{PID: pid2, Memory: 5 * gib})
	gpus[1].Busy = []fake.Busy{{PID: pid1, SM: 80, Memory: 30}}
	h := fake.Install(t, fake.Scenario{GPUs: gpus})

	p := start(t, "--nvml.library="+h.Library, "--docker.host="+d.Host, "--host-ip=192.0.2.7", "--nvml.interval=200ms")
	series := func(device, name, id, image string, pid any) []string {
		return []string{"gpu_device_uuid", device, "gpu_device_name", "NVIDIA H200", "host_ip", "192.0.2.7", "container_id", id, "container_name", name,
			"image_name", image, "process_pid", fmt.Sprint(pid)}
	}
	in1 := func(pid int) []string { return series(second, "one", one[:12], "busybox", pid) }
	s := p.until(t, 10*time.Second, "container one busy on the second GPU", func(s scrape) bool {
		busy := s.find("gpu_busy_seconds_total", in1(pid1)...)
		return len(busy) == 1 && busy[0].value > 0 && len(s.find("gpu_memory_used_bytes", series(first, "two", two[:12], "busybox", pid2)...)) == 1
	})

	t.Run("memory", func(t *testing.T) {
		const used = "gpu_memory_used_bytes"
		s.want(t, 4*gib+4096, used, in1(pid1)...)
		s.want(t, gib, used, in1(child)...)
		s.want(t, 5*gib, used, series(second, "two", two[:12], "busybox", pid2)...)
		s.want(t, 2*gib, used, series(first, "two", two[:12], "busybox", pid2)...)
		s.want(t, 3*gib, used, series(first, "", "", "", host)...)
		s.want(t, 500*mib, used, series(first, "", "", "", "")...)
		s.want(t, 300*mib, used, series(second, "", "", "", "")...)
		if n := len(s[used]); n != 7 {
			t.Errorf("%d series, want 7: %v", n, s[used])
		}
		for _, u := range []string{first, second} {
			s.want(t, s.sum(used, "gpu_device_uuid", u), "gpu_device_memory_used_bytes", "gpu_device_uuid", u)
		}
		for _, x := range s["gpu_memory_total_bytes"] {
			if x.value != 150754820096 {
				t.Errorf("total %v", x)
			}
		}
		if a, b := len(s["gpu_memory_total_bytes"]), len(s[used]); a != b {
			t.Errorf("%d totals for %d workloads", a, b)
		}
	})
	t.Run("load", func(t *testing.T) {
		s.want(t, 80, "gpu_utilization_max_percent", in1(pid1)...)
		s.want(t, 0, "gpu_utilization_percent", in1(child)...)
		s.want(t, 0, "gpu_busy_seconds_total", series(first, "", "", "", host)...)
	})
	t.Run("containers", func(t *testing.T) {
		info := func(name, request string) []string { return []string{"container_name", name, "gpu_request", request} }
		s.want(t, 1, "gpu_container_info", append(info("one", "device=1;node:"+filepath.Join(d.Dir, "nvidia6")), "container_full_id", one)...)
		s.none(t, "gpu_container_info", "container_name", "none")
		s.want(t, 2, "gpu_container_processes", "container_name", "one", "gpu_device_uuid", second)
		s.want(t, 1, "gpu_container_processes", "container_name", "two", "gpu_device_uuid", first)
		s.want(t, 1, "gpu_containers", "gpu_device_uuid", first)
		s.want(t, 2, "gpu_containers", "gpu_device_uuid", second)
		assigned := func(name, device string) []string {
			return []string{"container_name", name, "gpu_device_uuid", device, "source", "device_requests"}
		}
		for _, a := range [][]string{assigned("one", second), assigned("two", first), assigned("two", second), assigned("part", first)} {
			s.want(t, 1, "gpu_container_assigned", a...)
		}
		if n := len(s["gpu_container_assigned"]); n != 4 {
			t.Errorf("%d assignments, want 4: %v", n, s["gpu_container_assigned"])
		}
	})
	t.Run("why", func(t *testing.T) {
		for _, x := range []struct{ name, text string }{
			{"none", "1. It was started without a GPU: neither --gpus, CDI, the NVIDIA runtime nor a device node.\n   no_gpu: it has run for "},
			{"part", "1. It may use a GPU, but none of its processes has opened one for work.\n   not_on_gpu: it asked for all;node:" + filepath.Join(d.Dir, "nvidia7") + "; it may use GPU 0 " + first + ", by device_requests; it has run for "},
			{two[:12], "container two; image busybox; GPU 0"},
			{strconv.Itoa(child), "container one; image busybox; GPU 1"},
		} {
			if r := ran(t, "why", "--url=http://"+p.address, x.name); !strings.Contains(r.stdout, x.text) || r.stderr != "" {
				t.Errorf("%s: %+v", x.name, r)
			}
		}
	})
	t.Run("the exporter itself", func(t *testing.T) {
		mine := append(descendants(p.cmd.Process.Pid), p.cmd.Process.Pid)
		if len(mine) != 2 {
			t.Fatalf("exporter and worker are %v", mine)
		}
		with := append([]fake.GPU(nil), gpus...)
		hold(&with[0], 500*mib, append(gpus[0].Processes, fake.Process{PID: mine[0], Memory: mib}, fake.Process{PID: mine[1], Memory: mib})...)
		h.Set(t, fake.Scenario{GPUs: with})
		s := p.until(t, 3*time.Second, "the device's new figure", func(s scrape) bool {
			return s.has(5*gib+502*mib, "gpu_device_memory_used_bytes", "gpu_device_uuid", first)
		})
		for _, x := range mine {
			s.none(t, "gpu_memory_used_bytes", "process_pid", fmt.Sprint(x))
		}
		s.want(t, 502*mib, "gpu_memory_used_bytes", series(first, "", "", "", "")...)
	})
	t.Run("rename", func(t *testing.T) {
		d.Docker(t, "rename", "two", "zwei")
		s := p.until(t, time.Second, "the new name", func(s scrape) bool {
			return len(s.find("gpu_memory_used_bytes", series(first, "zwei", two[:12], "busybox", pid2)...)) == 1
		})
		for name := range s {
			s.none(t, name, "container_name", "two")
		}
	})
	t.Run("stop", func(t *testing.T) {
		d.Docker(t, "stop", "one")
		p.until(t, time.Second, "no memory of the stopped container", func(s scrape) bool {
			return len(s.find("gpu_memory_used_bytes", "container_name", "one")) == 0
		})
		s := p.until(t, 5*time.Second, "nor that the engine has it", func(s scrape) bool { // which is told apart
			return len(s.find("gpu_memory_used_bytes", "container_name", "one"))+len(s.find("gpu_container_info", "container_name", "one")) == 0
		})
		for name := range s {
			if !strings.HasSuffix(name, "_total") {
				s.none(t, name, "container_name", "one")
			}
		}
		if busy := s.find("gpu_busy_seconds_total", in1(pid1)...); len(busy) != 1 || busy[0].value <= 0 {
			t.Errorf("the counter of the ended process: %v", busy)
		}
		s.want(t, s.sum("gpu_memory_used_bytes", "gpu_device_uuid", second), "gpu_device_memory_used_bytes", "gpu_device_uuid", second)
	})
	t.Run("same name, another container", func(t *testing.T) {
		d.Docker(t, "rm", "one")
		again := d.Run(t, append([]string{"--name", "one", "--gpus", `"device=1"`}, append(node6, "busybox")...)...)
		if again == one {
			t.Fatal("the same id")
		}
		with := append([]fake.GPU(nil), gpus...)
		now := pid(t, d, "one")
		hold(&with[1], 300*mib, fake.Process{PID: now, Memory: 7 * gib}, fake.Process{PID: pid2, Memory: 5 * gib})
		with[1].Busy = nil
		h.Set(t, fake.Scenario{GPUs: with})
		s := p.until(t, 3*time.Second, "the new container's memory", func(s scrape) bool {
			return s.has(7*gib, "gpu_memory_used_bytes", series(second, "one", again[:12], "busybox", now)...)
		})
		for name := range s {
			if !strings.HasSuffix(name, "_total") {
				s.none(t, name, "container_id", one[:12])
			}
		}
		if was, is := s.find("gpu_busy_seconds_total", in1(pid1)...), s.find("gpu_busy_seconds_total", series(second, "one", again[:12], "busybox", now)...); len(was) != 1 || len(is) > 0 && is[0].value >= was[0].value {
			t.Errorf("counters of the old container %v and of the new one %v", was, is)
		}
		s.want(t, 1, "gpu_container_info", "container_name", "one", "container_full_id", again)
	})
	if list := p.complaints(); len(list) > 0 {
		t.Errorf("complaints: %s", strings.Join(list, "\n"))
	}
	p.stop(t)
}
