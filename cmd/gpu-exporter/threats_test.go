package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"gpu-exporter/exporter/docker/dockertest"
	"gpu-exporter/nvml/fake"
)

// hostileName is what the hostile program calls itself: a command name has 15 bytes.
const hostileName = "\x1b[2J\n\"}{\\=,\xff"

// hostile is a program that does to its device, without end, what might hurt who watches: opens, and calls of every number with parameters
// of no sense at addresses of no memory.
func hostile(what string) {
	if err := os.WriteFile("/proc/self/comm", []byte(hostileName), 0); err != nil {
		panic(err)
	}
	fd, err := unix.Open("/dev/full", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		panic(err)
	}
	for n := uint32(0); ; n++ {
		switch what {
		case "opens":
			if again, err := unix.Open("/dev/full", unix.O_RDONLY|unix.O_CLOEXEC, 0); err == nil {
				unix.Close(again)
			}
		case "calls":
			// Any number with any size of parameters that it claims, at any address.
			_, _, _ = unix.RawSyscall(unix.SYS_IOCTL, uintptr(fd), uintptr(3<<30|n%0x4000<<16|'F'<<8|n&0xff), uintptr(uint64(n)*0x9e3779b97f4a7c15))
		default: // quiet
			time.Sleep(time.Hour)
		}
	}
}

// TestThreats floods the exporter from a real container with opens, driver calls, processes and forged parameters, under hostile names. It answers in
// time, stays small, counts the neighbour to the unit, and nothing of the names breaks the exposition or the log.
func TestThreats(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	d := dockertest.Start(t)
	labels := file(t, "huge="+strings.Repeat("x", 60_000)+"\n")
	run := func(name, what string) {
		d.Run(t, "--name", name, "--label-file", labels, "--env", "GPU_EXPORTER_HOSTILE="+what, "-v", self+":/hostile:ro",
			"busybox", "/hostile", "\x1b[31m\nred\xff")
	}
	run("quiet", "quiet")
	d.Run(t, "--name", "neighbour", "busybox")
	gpu := fake.H200(0)
	hold(&gpu, 100*mib, fake.Process{PID: pid(t, d, "quiet"), Memory: gib}, fake.Process{PID: pid(t, d, "neighbour"), Memory: 2 * gib})
	h := fake.Install(t, fake.Scenario{GPUs: []fake.GPU{gpu}})
	p := start(t, "--tracer.devices=1:7=ctl", "--docker.host="+d.Host, "--nvml.library="+h.Library)
	p.until(t, 20*time.Second, "the tracer and both processes", func(s scrape) bool {
		return s.sum("gpu_exporter_tracer_up") == 1 && len(s.find("gpu_process_info")) == 2
	})

	run("opens", "opens")
	run("calls", "calls")
	d.Run(t, "--name", "processes", "busybox", "sh", "-c", "while :; do ( : </dev/full ); done")
	worst := time.Duration(0)
	for i := range 50 {
		if i%10 == 0 {
			d.Docker(t, "exec", "neighbour", "sh", "-c", ": </dev/full")
		}
		began := time.Now()
		p.get(t, "/metrics")
		worst = max(worst, time.Since(began))
		time.Sleep(50 * time.Millisecond)
	}
	if worst > 2*time.Second { // three programs and the exporter share two processors
		t.Errorf("a scrape took %v", worst)
	}
	s := p.until(t, 10*time.Second, "five opens of the neighbour", func(s scrape) bool {
		return s.has(5, "gpu_device_opens_total", "container_name", "neighbour", "node", "ctl", "result", "ok")
	})
	for _, name := range []string{"opens", "calls", "processes"} {
		d.Docker(t, "kill", name)
	}
	s.want(t, 2*gib, "gpu_memory_used_bytes", "container_name", "neighbour")
	s.want(t, 5, "gpu_processes_started_total", "container_name", "neighbour")
	s.none(t, "gpu_driver_calls_total", "container_name", "neighbour")
	if n := s.sum("gpu_driver_calls_total", "container_name", "calls"); n < 10_000 {
		t.Errorf("%v calls are no flood", n)
	}
	if n := s.sum("gpu_device_opens_total", "container_name", "opens"); n < 10_000 {
		t.Errorf("%v opens are no flood", n)
	}
	if n := s.sum("gpu_processes_started_total", "container_name", "processes"); n < 100 {
		t.Errorf("%v processes are no flood", n)
	}
	if n := len(s.find("gpu_driver_calls_total", "container_name", "calls")); n < 10 || n > 60 {
		t.Errorf("256 numbers of calls are %d series", n)
	}
	if s.sum("gpu_driver_calls_total", "container_name", "calls", "call", "ctl_other") == 0 {
		t.Error("no calls of numbers without a name")
	}
	if n := s.sum("gpu_exporter_series"); n > 2000 {
		t.Errorf("%v series", n)
	}
	if memory := s.sum("process_resident_memory_bytes"); memory > 200*mib {
		t.Errorf("it takes %.0f MiB", memory/mib)
	}
	if log := p.log.String(); strings.ContainsAny(log, "\x1b\x00") || len(log) > 16<<10 {
		t.Errorf("%d bytes in the log, or control characters: %.2000q", len(log), log)
	}
	found := 0
	for name := range s {
		for _, x := range s[name] {
			for label, value := range x.labels {
				if len(value) > 1024 || strings.ContainsAny(value, "\x1b\n") || !utf8.ValidString(value) {
					t.Errorf("%s: %s is %.100q, %d bytes", name, label, value, len(value))
				}
				if label == "process_name" && strings.Contains(value, `"}{\=,`) {
					found++
				}
			}
		}
	}
	if found != 1 {
		t.Errorf("the hostile name is there %d times, want once: %v", found, s["gpu_process_info"])
	}
	ps := exec.Command(program(t), "ps", "--url=http://"+p.address)
	if out, err := ps.Output(); err != nil || strings.Contains(string(out), "\x1b") || !utf8.Valid(out) || !strings.Contains(string(out), "neighbour") {
		t.Errorf("ps: %v, %q", err, out)
	}
	t.Logf("%v opens, %v calls and %v processes in the flood; the slowest of 50 scrapes %v, %v series, %.0f MiB, %v events lost",
		s.sum("gpu_device_opens_total", "container_name", "opens"), s.sum("gpu_driver_calls_total", "container_name", "calls"),
		s.sum("gpu_processes_started_total", "container_name", "processes"), worst, s.sum("gpu_exporter_series"), s.sum("process_resident_memory_bytes")/mib,
		s.sum("gpu_exporter_tracer_lost_events_total"))
	p.stop(t)
}

// TestHTTPLimits: who connects and says nothing, says too much or asks for what is not there keeps nobody else from an answer.
func TestHTTPLimits(t *testing.T) {
	p := start(t, "--nvml.library=/none", "--docker.host=unix:///none", "--tracer=off")
	var held []net.Conn
	for range 500 {
		c, err := net.Dial("tcp", p.address)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		fmt.Fprint(c, "GET /metrics HTTP/1.1\r\nHost: x\r\nX-Slow: ")
		held = append(held, c)
	}
	began := time.Now()
	p.get(t, "/metrics")
	if took := time.Since(began); took > time.Second {
		t.Errorf("a scrape beside 500 half requests took %v", took)
	}
	big, err := http.NewRequest("GET", "http://"+p.address+"/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	big.Header.Set("X-Big", strings.Repeat("x", 1<<20))
	if r, err := http.DefaultClient.Do(big); err == nil { // it may close before it was all sent
		r.Body.Close()
		if r.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
			t.Errorf("a header of 1 MiB: %s", r.Status)
		}
	}
	for _, path := range []string{"/debug/pprof/", "/debug/vars", "/../../etc/passwd", "/%2e%2e/etc/passwd", "/-/quit", "/-/reload"} {
		r, err := http.Get("http://" + p.address + path)
		if err != nil {
			t.Fatal(err)
		}
		r.Body.Close()
		if r.StatusCode != http.StatusNotFound {
			t.Errorf("%s: %s", path, r.Status)
		}
	}
	for _, c := range held[:10] { // they are given up after the time for a header, 5 s
		c.SetReadDeadline(time.Now().Add(10 * time.Second))
		if _, err := io.ReadAll(c); err != nil {
			t.Fatalf("a half request is held open: %v", err)
		}
	}
	p.stop(t)
}

// TestConnections: one address opens more connections than there may be, says nothing, half a request or a whole one on them, and keeps them. Another one
// that was there before keeps its connection and is answered on it, as are new ones, and the exporter's descriptors stay bounded.
func TestConnections(t *testing.T) {
	p := start(t, "--nvml.library=/none", "--docker.host=unix:///none", "--tracer=off")
	other := &http.Transport{DialContext: (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}).DialContext, MaxConnsPerHost: 1}
	defer other.CloseIdleConnections()
	get := func() (reused bool) {
		t.Helper()
		trace := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{GotConn: func(i httptrace.GotConnInfo) { reused = i.Reused }})
		r, err := http.NewRequestWithContext(trace, "GET", "http://"+p.address+"/-/healthy", nil)
		if err != nil {
			t.Fatal(err)
		}
		a, err := other.RoundTrip(r)
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, a.Body)
		a.Body.Close()
		return reused
	}
	get()
	for i := range 4 * maxConnections {
		c, err := net.Dial("tcp", p.address)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		io.WriteString(c, []string{"", "GET /-/healthy HTTP/1.1\r\nHost: x\r\nX-Slow: ", "GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n"}[i%3]) // it may be closed already
	}
	began := time.Now()
	if !get() {
		t.Error("the other address has lost its connection")
	}
	p.get(t, "/metrics") // from the address that has too many
	if took := time.Since(began); took > time.Second {
		t.Errorf("answers took %v", took)
	}
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.cmd.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		if len(files) < maxConnections+100 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d descriptors are open", len(files))
		}
	}
	p.stop(t)
}
