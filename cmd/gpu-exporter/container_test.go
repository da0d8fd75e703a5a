package main

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-exporter/exporter/assets"
	"gpu-exporter/exporter/docker/dockertest"
	"gpu-exporter/nvml/fake"
)

// withImage starts an engine that has the image gpu-exporter:latest: the program and nothing else.
func withImage(t *testing.T) (d *dockertest.Daemon, size int64) {
	t.Helper()
	d = dockertest.Start(t)
	binary, err := os.ReadFile(program(t))
	if err != nil {
		t.Fatal(err)
	}
	image := filepath.Join(t.TempDir(), "image.tar")
	f, err := os.Create(image)
	if err != nil {
		t.Fatal(err)
	}
	w := tar.NewWriter(f)
	if err := w.WriteHeader(&tar.Header{Name: "gpu-exporter", Mode: 0o755, Size: int64(len(binary))}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(binary); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	d.Docker(t, "import", "--change", `ENTRYPOINT ["/gpu-exporter"]`, image, "gpu-exporter:latest")
	return d, info.Size()
}

// documentedRun returns the arguments of the README's `docker run -d`, with the engine's own socket.
func documentedRun(t *testing.T, d *dockertest.Daemon) []string {
	t.Helper()
	b, err := os.ReadFile(root + "README.md")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^    docker run -d ((?:.*\\\n)*.*)$`).FindSubmatch(b)
	if m == nil {
		t.Fatal("README.md has no docker run -d")
	}
	text := strings.NewReplacer("\\\n", " ", "-v /var/run/docker.sock:", "-v "+d.Socket+":").Replace(string(m[1]))
	out, err := exec.Command("sh", "-c", `printf '%s\n' `+text).Output() // it may have quotes
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(strings.TrimSpace(string(out)), "\n")
}

// containerDevices sees that a container with the exporter's options may open NVIDIA's device nodes, and only with the rule for them. This host has no
// such driver, so that what is allowed says so.
func containerDevices(t *testing.T, d *dockertest.Daemon) {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mknod(dir+"/nvidiactl", unix.S_IFCHR|0o666, int(unix.Mkdev(195, 255))); err != nil {
		t.Fatal(err)
	}
	options := documentedRun(t, d)
	options = options[slices.Index(options, "--pid=host"):slices.Index(options, "gpu-exporter:latest")]
	for _, rule := range []bool{true, false} {
		list, want := options, "No such device"
		if !rule {
			list = slices.DeleteFunc(slices.Clone(options), func(o string) bool { return strings.HasPrefix(o, "--device-cgroup-rule=") })
			want = "Operation not permitted"
		}
		name := fmt.Sprint("devices-", rule)
		d.Run(t, slices.Concat([]string{"--name", name, "-v", dir + ":/nodes"}, list, []string{"busybox", "sh", "-c", ": <>/nodes/nvidiactl"})...)
		d.Docker(t, "wait", name)
		if text := containerLog(t, d, name); !strings.Contains(text, want) {
			t.Errorf("with a rule for the devices: %v; opening one says %q, want %q", rule, text, want)
		}
	}
}

// TestFromScratch: in an image that holds the program and nothing else, run as the README says, that is without --privileged, the host's NVML is loaded,
// the kernel is traced, and the host's containers and all processes' open files are seen. It could do nothing else: the host is read-only, and it has
// only the capabilities that it is given by name.
func TestFromScratch(t *testing.T) {
	d, size := withImage(t)
	if size >= 20_000_000 {
		t.Errorf("an image of %d bytes, want less than 20 MB", size)
	}
	job := d.Run(t, "--name", "job", "--gpus", `"device=0"`, "busybox")
	gpu := fake.H200(0)
	host, inside := sleeper(t), pid(t, d, "job")
	hold(&gpu, 10*mib, fake.Process{PID: inside, Memory: 2 * gib}, fake.Process{PID: host, Memory: gib})
	h := fake.Install(t, fake.Scenario{GPUs: []fake.GPU{gpu}})

	arguments := documentedRun(t, d)
	if slices.Contains(arguments, "--privileged") || !slices.Contains(arguments, "--read-only") || !slices.Contains(arguments, "--cap-drop=ALL") {
		t.Errorf("the README's container has more privileges than it needs: %q", arguments)
	}
	nobodies(t)
	d.Run(t, append(arguments, "--nvml.library="+h.Library, "--web.listen-address=127.0.0.1:0", "--tracer.devices=1:7=ctl")...)
	p := &process{exited: make(chan struct{})}
	for i := 0; p.address == ""; i++ {
		if m := listening.FindStringSubmatch(containerLog(t, d, "gpu-exporter")); m != nil {
			p.address = m[1]
		} else if i == 100 {
			t.Fatalf("it does not serve:\n%s", containerLog(t, d, "gpu-exporter"))
		} else {
			time.Sleep(50 * time.Millisecond)
		}
	}
	s := p.until(t, 10*time.Second, "the fake GPU's processes with the host's container", func(s scrape) bool {
		return s.has(2*gib, "gpu_memory_used_bytes", "container_name", "job", "container_id", job[:12], "image_name", "busybox", "process_pid", fmt.Sprint(inside))
	})
	s.want(t, gib, "gpu_memory_used_bytes", "container_name", "", "process_pid", fmt.Sprint(host))
	s.want(t, 1, "gpu_container_assigned", "container_name", "job", "gpu_device_uuid", uuid(gpu))
	s.want(t, s.sum("gpu_memory_used_bytes"), "gpu_device_memory_used_bytes")
	s.want(t, 1, "gpu_exporter_nvml_up")
	s.want(t, 1, "gpu_exporter_docker_up")
	if len(s.find("gpu_process_cpu_seconds_total", "process_pid", fmt.Sprint(host))) != 1 {
		t.Error("no CPU time of the host's process")
	}
	p.until(t, 20*time.Second, "the tracer", func(s scrape) bool { return s.sum("gpu_exporter_tracer_up") == 1 })
	d.Docker(t, "exec", "job", "sh", "-c", ": </dev/full")
	p.until(t, 10*time.Second, "an open of the job's", func(s scrape) bool {
		return s.has(1, "gpu_device_opens_total", "container_name", "job", "node", "ctl", "result", "ok")
	})
	text := containerLog(t, d, "gpu-exporter")
	if hiddenProcesses(text) >= others || strings.Contains(text, "kernel's log") {
		t.Errorf("it cannot see everything:\n%s", text)
	}
	if !opened(pid(t, d, "gpu-exporter"), "/dev/kmsg") {
		t.Errorf("it does not read the kernel's log:\n%s", text)
	}
	containerDevices(t, d)
	doctors(t, d, "--url=http://"+p.address)
	kin := descendants(pid(t, d, "gpu-exporter"))
	if len(kin) != 1 {
		t.Errorf("%d children of the exporter, want the worker", len(kin))
	}
	d.Docker(t, "kill", "-s", "TERM", "gpu-exporter")
	if code := d.Docker(t, "wait", "gpu-exporter"); code != "0" {
		t.Errorf("exit code %s", code)
	}
	for _, pid := range kin {
		if running(pid) {
			t.Errorf("worker %d outlives the container", pid)
		}
	}
	if text := containerLog(t, d, "gpu-exporter"); strings.Contains(text, "level=ERROR") {
		t.Errorf("log:\n%s", text)
	}
}

// doctors runs doctor in containers: in one like the exporter's, where it finds the host's things, and in ones that lack what it needs, where it says so.
func doctors(t *testing.T, d *dockertest.Daemon, url string) {
	t.Helper()
	for i, c := range []struct {
		args  []string
		lines []string
	}{
		{[]string{"--privileged", "--pid=host", "--network=host", "-v", "/:/host:ro", "-v", d.Socket + ":/var/run/docker.sock", "gpu-exporter", "doctor", "--driver-root=/host", url},
			[]string{"ok +exporter +it answers at http", "ok +gpus +none on the PCI bus, 1 by NVML", "ok +docker +version", "ok +pids", "ok +runtime +runtime nvidia", "ok +capabilities"}},
		{[]string{"gpu-exporter", "doctor"},
			[]string{"broken +nvml +no glibc under /", "broken +pids +pid_namespace", "warning +docker +no Docker here", "warning +capabilities +not held: CAP_BPF"}},
		{[]string{"--user=1000", "--cap-drop=ALL", "--read-only", "gpu-exporter", "doctor", "--proc=/none"},
			[]string{"broken +driver +/none", "broken +pids +proc_unreadable", "unknown +capabilities", "broken +cgroup +/none"}},
	} {
		name := fmt.Sprint("doctor", i)
		d.Run(t, append([]string{"--name", name}, c.args...)...)
		code, text := d.Docker(t, "wait", name), containerLog(t, d, name)
		for _, line := range c.lines {
			if !regexp.MustCompile("(?m)^" + line).MatchString(text) {
				t.Errorf("doctor %v lacks %q:\n%s", c.args, line, text)
			}
		}
		if want := map[bool]string{true: "2", false: "0"}[strings.Contains(text, "broken")]; code != want {
			t.Errorf("doctor %v: exit code %s, want %s:\n%s", c.args, code, want, text)
		}
	}
}

// containerLog returns what a container wrote, standard error included.
func containerLog(t *testing.T, d *dockertest.Daemon, name string) string {
	t.Helper()
	b, err := os.ReadFile(d.Docker(t, "inspect", "-f", "{{.LogPath}}", name))
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	var text strings.Builder
	for lines := json.NewDecoder(bytes.NewReader(b)); ; {
		var line struct{ Log string }
		if lines.Decode(&line) != nil { // the end, or half a line
			return text.String()
		}
		text.WriteString(line.Log)
	}
}

// TestCompose: the compose file starts the exporter, which sees the host's processes and containers.
func TestCompose(t *testing.T) {
	d, _ := withImage(t)
	dir := t.TempDir()
	if err := assets.Export(dir, false); err != nil {
		t.Fatal(err)
	}
	job := d.Run(t, "--name", "job", "--gpus", `"device=0"`, "busybox")
	compose := func(args ...string) {
		t.Helper()
		cmd := exec.Command("docker-compose", append([]string{"-p", "test", "-f", dir + "/install/compose.yaml"}, args...)...)
		cmd.Env = append(os.Environ(), "DOCKER_HOST="+d.Host, "DOCKER_SOCKET="+d.Socket, "GPU_EXPORTER_ADDRESS=127.0.0.1:0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("docker-compose %v: %v (apt-get install docker-compose)\n%s", args, err, out)
		}
	}
	compose("up", "-d")
	p := &process{exited: make(chan struct{})}
	for i := 0; p.address == ""; i++ {
		if m := listening.FindStringSubmatch(containerLog(t, d, "gpu-exporter")); m != nil {
			p.address = m[1]
		} else if i == 100 {
			t.Fatalf("it does not serve:\n%s", containerLog(t, d, "gpu-exporter"))
		} else {
			time.Sleep(50 * time.Millisecond)
		}
	}
	s := p.until(t, 10*time.Second, "the container that asks for a GPU", func(s scrape) bool {
		return len(s.find("gpu_container_info", "container_id", job[:12], "container_name", "job")) == 1
	})
	s.want(t, 1, "gpu_exporter_docker_up")
	s.want(t, 1, "gpu_exporter_process_visibility", "reason", "ok")
	// Prometheus finds it through the engine, as the configuration beside the compose file says.
	prom := runPrometheus(t, scrapeJob(t, "gpu-exporter-docker", "localhost:9400", p.address, "/var/run/docker.sock", d.Socket))
	prom.until(t, 20*time.Second, `gpu_container_info{container_name="job"} and on (instance, job) up{job="gpu-exporter"} == 1`,
		func(list []series) bool { return len(list) == 1 })
	compose("down")
}
