package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-exporter/exporter/docker/dockertest"
	"gpu-exporter/nvml/fake"
)

func matches(pattern, text string) bool { return regexp.MustCompile(pattern).MatchString(text) }

// TestOneOfEight: whatever NVML answers for one of eight GPUs, the other seven are read on, that one is down with one line in the log, and it comes back.
func TestOneOfEight(t *testing.T) {
	var gpus []fake.GPU
	job := sleeper(t)
	for i := range 8 {
		g := fake.H200(i)
		hold(&g, 0, fake.Process{PID: job, Memory: gib})
		gpus = append(gpus, g)
	}
	good, socket := fake.Scenario{GPUs: gpus}, engine(t, nil, nil)
	tests := []struct {
		code         uint64
		name, reason string
	}{
		{4, "NO_PERMISSION", "state=error reason=.no permission to open the GPU's device file"},
		{9, "DRIVER_NOT_LOADED", "state=error reason=.nvml: DRIVER_NOT_LOADED"},
		{10, "TIMEOUT", "state=error reason=.nvml: TIMEOUT"},
		{15, "GPU_IS_LOST", "state=lost reason=.the GPU has fallen off the bus"},
		{16, "RESET_REQUIRED", "state=error reason=.the GPU must be reset"},
		{18, "LIB_RM_VERSION_MISMATCH", "state=error reason=.nvml: LIB_RM_VERSION_MISMATCH"},
		{999, "UNKNOWN", "state=error reason=.every NVML call on the GPU fails"},
	}
	all := func(s scrape) bool { return s.sum("gpu_up") == 8 && len(s["gpu_temperature_celsius"]) == 8 }
	seven := func(s scrape) bool {
		return s.has(1, "gpu_exporter_nvml_up") && len(s["gpu_up"]) == 8 && s.sum("gpu_up") == 7 && s.has(0, "gpu_up", "gpu_device_uuid", uuid(gpus[3])) &&
			len(s["gpu_temperature_celsius"]) == 7
	}
	var running []*process
	var hosts []*fake.Host
	for range tests {
		h := fake.Install(t, good)
		hosts = append(hosts, h)
		running = append(running, launch(t, nil, "--nvml.library="+h.Library, "--docker.host=unix://"+socket, "--tracer=off"))
	}
	for i, c := range tests {
		running[i].serving(t)
		running[i].until(t, 20*time.Second, "eight GPUs", all)
		bad := good
		bad.Faults = []fake.Fault{{GPU: 3, Kind: fake.Return, Arg: c.code}}
		hosts[i].Set(t, bad)
	}
	for i, c := range tests {
		running[i].until(t, 10*time.Second, c.name+": seven GPUs", seven)
	}
	time.Sleep(2 * time.Second)
	for i, c := range tests {
		t.Run(c.name, func(t *testing.T) {
			p := running[i]
			s := p.scrape(t)
			if !seven(s) {
				t.Errorf("seconds later: %v", s["gpu_up"])
			}
			if n := s.sum("gpu_exporter_nvml_restarts_total"); n != 0 {
				t.Errorf("the worker was restarted %v times", n)
			}
			if said := p.complaints(); len(said) != 1 || !strings.Contains(said[0], "GPU cannot be read") || !matches(c.reason, said[0]) {
				t.Errorf("it says %q", said)
			}
			if ready := p.get(t, "/-/ready"); !strings.HasPrefix(ready, "ready\nnvml: up\n") {
				t.Errorf("ready says %q", ready)
			}
		})
	}
	for _, h := range hosts {
		h.Set(t, good)
	}
	for i, c := range tests {
		if c.name != "GPU_IS_LOST" { // which is left alone for 30 s: TestLost has its way back
			running[i].until(t, 15*time.Second, c.name+": eight GPUs again", all)
		}
		running[i].stop(t)
	}
}

// TestDriverReloaded: the driver is unloaded under the exporter, and another version of it and of its library takes its place. Meanwhile there are no
// readings, and a reason; then the new one's.
func TestDriverReloaded(t *testing.T) {
	gpus := []fake.GPU{fake.H200(0), fake.H200(1)}
	h := fake.Install(t, fake.Scenario{GPUs: gpus, Driver: "535.129.03"})
	p := start(t, "--nvml.library="+h.Library, "--docker.host=unix://"+engine(t, nil, nil), "--tracer=off")
	driver := func(version string) func(scrape) bool {
		return func(s scrape) bool {
			return s.sum("gpu_up") == 2 && len(s.find("gpu_device_info", "driver_version", version)) == 2
		}
	}
	down := func(reason string) {
		t.Helper()
		p.until(t, 10*time.Second, reason, func(s scrape) bool {
			return s.has(0, "gpu_exporter_nvml_up") && s.sum("gpu_up") == 0 && len(s["gpu_temperature_celsius"]) == 0 && strings.Contains(p.get(t, "/-/ready"), "nvml: down: "+reason)
		})
	}
	p.until(t, 10*time.Second, "the old driver", driver("535.129.03"))
	unloaded := fake.Scenario{GPUs: gpus, Driver: "550.54.15", Faults: []fake.Fault{{GPU: fake.AnyGPU, Kind: fake.Return, Arg: 9}}}
	h.Set(t, unloaded)
	down("the NVIDIA driver is not loaded")

	// The new library replaces the file, as a package does; the module is not there yet, and then it is another version's for a while.
	b, err := os.ReadFile(fake.BuildWithout(t, fake.Driver470...))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(h.Library+".new", b, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(h.Library+".new", h.Library); err != nil {
		t.Fatal(err)
	}
	unloaded.Faults[0].Arg = 18
	h.Set(t, unloaded)
	down("the NVIDIA library and the loaded kernel module are of different versions")
	h.Set(t, fake.Scenario{GPUs: gpus, Driver: "550.54.15"})
	s := p.until(t, 20*time.Second, "the new driver", driver("550.54.15"))
	if len(s["gpu_sm_active_ratio"]) > 0 {
		t.Error("the library that was replaced is still in use: the new one has no GPM")
	}
	if said := p.complaints(); len(said) > 4 { // each reason once, and each GPU at most
		t.Errorf("%d complaints:\n%s", len(said), strings.Join(said, "\n"))
	}
	p.stop(t)
}

// TestEngineGoes: Docker breaks off in the middle of an answer, is gone with its socket, and comes back with another one and another API version.
func TestEngineGoes(t *testing.T) {
	dir, err := os.MkdirTemp("", "engine") // short: a socket's path has 107 bytes at most
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	path := filepath.Join(dir, "s")
	// at puts an engine at the path. What it returns ends it, with its connections and its socket.
	at := func(socket string) (end func()) {
		proxy := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(&url.URL{Scheme: "http", Host: "docker"}) }, FlushInterval: -1,
			ErrorLog: log.New(io.Discard, "", 0),
			Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "unix", socket)
			}}}
		l, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		server := &http.Server{Handler: proxy, ErrorLog: log.New(io.Discard, "", 0)}
		go server.Serve(l)
		t.Cleanup(func() { server.Close() })
		return func() {
			server.Close()
			l.Close() // where it has not begun to serve
		}
	}
	end := at(engine(t, []map[string]any{inspected(id(1), "one")}, nil))
	p := start(t, "--nvml.library=/none", "--docker.host=unix://"+path, "--tracer=off")
	named := func(name string) func(scrape) bool {
		return func(s scrape) bool {
			return s.has(1, "gpu_exporter_docker_up") && len(s["gpu_container_info"]) == 1 && s.has(1, "gpu_container_info", "container_name", name)
		}
	}
	p.until(t, 10*time.Second, "a container", named("one"))
	end() // the event stream breaks off, and the socket is gone
	p.until(t, 10*time.Second, "no Docker", func(s scrape) bool {
		return s.has(0, "gpu_exporter_docker_up") && strings.Contains(p.get(t, "/-/ready"), "docker: down: ")
	})
	var broken atomic.Int32
	end = at(engine(t, nil, func(w http.ResponseWriter, r *http.Request, path string) bool {
		if path != "/containers/json" {
			return false
		}
		broken.Add(1)
		w.Header().Set("Content-Length", "1000")
		fmt.Fprint(w, `[{"Id":"`)
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	}))
	for deadline := time.Now().Add(15 * time.Second); broken.Load() == 0; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it does not ask again")
		}
	}
	end()
	at(engine(t, []map[string]any{inspected(id(2), "two")}, func(w http.ResponseWriter, r *http.Request, path string) bool {
		if path == "/_ping" {
			w.Header().Set("Api-Version", "1.44")
		}
		return path == "/_ping"
	}))
	p.until(t, 20*time.Second, "the container of the new engine", named("two"))
	if said := p.complaints(); len(said) > 4 {
		t.Errorf("%d complaints:\n%s", len(said), strings.Join(said, "\n"))
	}
	p.stop(t)
}

// TestThousandContainers: an engine with 1000 containers. All are there, each once.
func TestThousandContainers(t *testing.T) {
	var all []map[string]any
	for i := range 1000 {
		all = append(all, inspected(id(i+1), fmt.Sprint("job-", i)))
	}
	p := start(t, "--nvml.library=/none", "--docker.host=unix://"+engine(t, all, nil), "--tracer=off")
	s := p.until(t, 10*time.Second, "all containers", func(s scrape) bool { return len(s["gpu_container_info"]) == len(all) })
	for i := range all {
		s.want(t, 1, "gpu_container_info", "container_name", fmt.Sprint("job-", i), "container_full_id", id(i+1))
	}
	s.want(t, 1, "gpu_exporter_docker_up")
	p.stop(t)
}

// TestLiveRestore: the engine is stopped and started again, and its containers run on. They keep their names at every scrape, and the same series.
func TestLiveRestore(t *testing.T) {
	d := dockertest.Start(t)
	if err := os.WriteFile(filepath.Join(d.Dir, "daemon.json"), []byte(`{"live-restore": true}`), 0o644); err != nil {
		t.Fatal(err)
	}
	d.Restart(t)
	d.Run(t, "--name", "kept", "--gpus", "all", "busybox")
	inside := pid(t, d, "kept")
	gpu := fake.H200(0)
	hold(&gpu, 10*mib, fake.Process{PID: inside, Memory: gib})
	h := fake.Install(t, fake.Scenario{GPUs: []fake.GPU{gpu}})
	p := start(t, "--nvml.library="+h.Library, "--docker.host="+d.Host, "--tracer=off")
	held := func(s scrape) bool {
		return len(s["gpu_memory_used_bytes"]) == 2 && s.has(gib, "gpu_memory_used_bytes", "container_name", "kept", "process_pid", fmt.Sprint(inside))
	}
	p.until(t, 10*time.Second, "the container's memory", held)
	stopped := make(chan struct{})
	go func() { defer close(stopped); d.Stop() }()
	down := false
	for ended := false; !ended || !down; {
		select {
		case <-stopped:
			ended = true
		case <-time.After(50 * time.Millisecond):
		}
		s := p.scrape(t)
		if down = s.has(0, "gpu_exporter_docker_up"); !held(s) {
			t.Fatalf("without the engine (down: %v): %v", down, s["gpu_memory_used_bytes"])
		}
	}
	d.Restart(t)
	s := p.until(t, 15*time.Second, "the engine", func(s scrape) bool {
		if !held(s) {
			t.Fatalf("when the engine comes back: %v", s["gpu_memory_used_bytes"])
		}
		return s.has(1, "gpu_exporter_docker_up")
	})
	if now := pid(t, d, "kept"); now != inside {
		t.Fatalf("the container did not live on: pid %d, %d before", now, inside)
	}
	s.want(t, 1, "gpu_container_info", "container_name", "kept")
	d.Docker(t, "kill", "kept")
	p.until(t, 2*time.Second, "no series of a container that ended afterwards", func(s scrape) bool {
		return len(s.find("gpu_memory_used_bytes", "container_name", "kept")) == 0
	})
	p.stop(t)
}

// TestRecordDiskFull: a recording that cannot be written on ends with one line, and everything else goes on.
func TestRecordDiskFull(t *testing.T) {
	h := fake.Install(t, fake.Scenario{GPUs: []fake.GPU{fake.H200(0)}})
	p := start(t, "--record=/dev/full", "--nvml.library="+h.Library, "--docker.host=unix://"+engine(t, nil, nil), "--tracer=off")
	p.until(t, 10*time.Second, "the GPU", func(s scrape) bool { return s.sum("gpu_up") == 1 })
	time.Sleep(6 * time.Second) // what is older than 5 s is written
	p.scrape(t).want(t, 1, "gpu_up")
	if said := p.complaints(); len(said) != 1 || !strings.Contains(said[0], "recording stopped") || !strings.Contains(said[0], "no space left on device") {
		t.Errorf("it says %q", said)
	}
	p.stop(t)
}

// TestSignals: however the exporter is ended, also by a signal that it cannot see, its worker ends with it.
func TestSignals(t *testing.T) {
	h := fake.Install(t, fake.Scenario{GPUs: []fake.GPU{fake.H200(0)}})
	socket := engine(t, nil, nil)
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGABRT, syscall.SIGKILL} {
		t.Run(sig.String(), func(t *testing.T) {
			p := start(t, "--nvml.library="+h.Library, "--docker.host=unix://"+socket, "--tracer=off")
			p.until(t, 10*time.Second, "the GPU", func(s scrape) bool { return s.sum("gpu_up") == 1 })
			kin := descendants(p.cmd.Process.Pid)
			if len(kin) != 1 {
				t.Fatalf("children %v, want the worker", kin)
			}
			p.cmd.Process.Signal(sig)
			select {
			case <-p.exited:
			case <-time.After(8 * time.Second):
				t.Fatalf("it does not end:\n%s", p.log.String())
			}
			if orderly := sig == syscall.SIGTERM || sig == syscall.SIGINT; orderly && p.err != nil {
				t.Errorf("it ends with %v", p.err)
			}
			for deadline := time.Now().Add(3 * time.Second); running(kin[0]); time.Sleep(20 * time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatalf("its worker %d outlives it", kin[0])
				}
			}
		})
	}
}

// TestForkFails: where no process and no thread can be made any more, the exporter serves on and says so, and has a worker again when there is room.
func TestForkFails(t *testing.T) {
	h := fake.Install(t, fake.Scenario{GPUs: []fake.GPU{fake.H200(0)}})
	if err := os.Chmod(filepath.Dir(filepath.Dir(h.Library)), 0o755); err != nil { // it runs as a user, whom the limit is for
		t.Fatal(err)
	}
	user := &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 54321, Gid: 54321}}
	p := launch(t, func(c *exec.Cmd) { c.SysProcAttr = user }, "--nvml.library="+h.Library, "--docker.host=unix://"+engine(t, nil, nil))
	p.serving(t)
	up := func(s scrape) bool { return s.has(1, "gpu_exporter_nvml_up") && s.sum("gpu_up") == 1 }
	p.until(t, 10*time.Second, "the GPU", up)
	var hard unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NPROC, &hard); err != nil {
		t.Fatal(err)
	}
	limit := func(n uint64) {
		t.Helper()
		number := "unlimited"
		if n != unix.RLIM_INFINITY {
			number = fmt.Sprint(n)
		}
		cmd := exec.Command("prlimit", "--pid", fmt.Sprint(p.cmd.Process.Pid), "--nproc="+number+":")
		cmd.SysProcAttr = user
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("prlimit: %v: %s", err, out)
		}
	}
	limit(1)
	for _, worker := range descendants(p.cmd.Process.Pid) {
		syscall.Kill(worker, syscall.SIGKILL)
	}
	p.until(t, 10*time.Second, "no worker", func(s scrape) bool {
		return s.has(0, "gpu_exporter_nvml_up") && strings.Contains(p.get(t, "/-/ready"), "resource temporarily unavailable")
	})
	for range 50 {
		time.Sleep(100 * time.Millisecond)
		p.scrape(t)
	}
	limit(hard.Max)
	p.until(t, 20*time.Second, "the GPU again", up)
	p.stop(t)
}

// TestTwoExporters: two on one host see the same, neither sees the other for a workload, and one more on the port of the first says so in one line.
func TestTwoExporters(t *testing.T) {
	gpu := fake.H200(0)
	job := sleeper(t)
	hold(&gpu, 100*mib, fake.Process{PID: job, Memory: gib})
	h := fake.Install(t, fake.Scenario{GPUs: []fake.GPU{gpu}})
	flags := []string{traced, "--nvml.library=" + h.Library, "--docker.host=unix://" + engine(t, nil, nil)}
	both := []*process{launch(t, nil, flags...), launch(t, nil, flags...)}
	for _, p := range both {
		p.serving(t)
		s := p.until(t, 20*time.Second, "the process and the tracer", func(s scrape) bool {
			return s.sum("gpu_exporter_tracer_up") == 1 && s.has(gib, "gpu_memory_used_bytes", "process_pid", fmt.Sprint(job))
		})
		if n := len(s["gpu_memory_used_bytes"]); n != 2 {
			t.Errorf("%d workloads: %v", n, s["gpu_memory_used_bytes"])
		}
	}
	third := exec.Command(program(t), append(flags, "--web.listen-address="+both[0].address)...)
	out, err := third.CombinedOutput()
	if err == nil || third.ProcessState.ExitCode() != 1 || strings.Count(string(out), "address already in use; --web.listen-address=:9401 takes another port\n") != 1 {
		t.Errorf("on a port that is taken: %v\n%s", err, out)
	}
	if err := exec.Command("head", "-c", "1", "/dev/full").Run(); err != nil {
		t.Fatal(err)
	}
	for _, p := range both {
		p.until(t, 10*time.Second, "the open", func(s scrape) bool { return s.sum("gpu_device_opens_total", "node", "gpu", "result", "ok") >= 1 })
		p.stop(t)
	}
}
