package main

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-exporter/nvml/fake"
)

// using lists what a process and its children have open or mapped below a directory.
func using(t *testing.T, parent int, dir string) (list []string) {
	t.Helper()
	for _, pid := range append(descendants(parent), parent) {
		fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
		for _, fd := range fds {
			if to, _ := os.Readlink(fd); strings.HasPrefix(to, dir) {
				list = append(list, fmt.Sprint(pid, " has open ", to))
			}
		}
		maps, _ := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
		if strings.Contains(string(maps), dir) {
			list = append(list, fmt.Sprint(pid, " has mapped what is in ", dir))
		}
	}
	return list
}

// statusOf makes a request and returns its status.
func statusOf(t *testing.T, method, url string, header ...string) int {
	t.Helper()
	r, err := http.NewRequest(method, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		if r.Header.Set(header[i], header[i+1]); header[i] == "Host" {
			r.Host = header[i+1]
		}
	}
	a, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	a.Body.Close()
	return a.StatusCode
}

// port returns the port at which the program listens at an address, a regular expression.
func port(t *testing.T, p *process, address string) string {
	t.Helper()
	m := regexp.MustCompile(`msg="Listening on" address=` + address + `:(\d+)`)
	for range 100 {
		if found := m.FindStringSubmatch(p.log.String()); found != nil {
			return found[1]
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Fatalf("it does not listen at %s:\n%s", address, p.log.String())
	return ""
}

// TestReleaseDriver: after /-/release neither the exporter nor a child of it has a device node or the library of the driver open or mapped, the driver can
// be replaced by another version, and after /-/resume the new one is read. Who is not on this host or has no password may not ask.
func TestReleaseDriver(t *testing.T) {
	gpu := fake.H200(0)
	hold(&gpu, 0, fake.Process{PID: sleeper(t), Memory: gib})
	h := fake.Install(t, fake.Scenario{GPUs: []fake.GPU{gpu}, Driver: "535.129.03"})
	dir := filepath.Dir(h.Library)
	node := filepath.Join(dir, "nvidia0")
	if err := unix.Mknod(node, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 7))); err != nil {
		t.Fatal(err)
	}
	// The worker, with a device open as the real library has it.
	wrapper := file(t, fmt.Sprintf("#!/bin/sh\nexec 9<%s\nexec %s \"$@\"\n", node, filepath.Join(filepath.Dir(program(t)), "nvml-worker")))
	p := start(t, "--nvml.library="+h.Library, "--nvml.worker="+wrapper, "--docker.host=unix://"+engine(t, nil, nil), "--web.listen-address=:0")
	p.address = net.JoinHostPort("127.0.0.1", port(t, p, `127\.0\.0\.1`))
	base, own := "http://"+p.address, "http://"+net.JoinHostPort(defaultAddress(), port(t, p, `\[::\]`))
	p.until(t, 10*time.Second, "the old driver", func(s scrape) bool { return len(s.find("gpu_device_info", "driver_version", "535.129.03")) == 1 })
	if n := len(using(t, p.cmd.Process.Pid, dir)); n != 2 {
		t.Fatalf("%d uses of the driver, want the node and the library: the test shows nothing", n)
	}

	for _, c := range []struct {
		name, method, url string
		header            []string
		want              int
	}{
		{"GET", "GET", base, nil, http.StatusMethodNotAllowed},
		{"through a proxy", "POST", base, []string{"X-Forwarded-For", "192.0.2.1"}, http.StatusForbidden},
		{"a page's script", "POST", base, []string{"Origin", "http://evil.example", "Sec-Fetch-Site", "cross-site"}, http.StatusForbidden},
		{"a name that leads here", "POST", base, []string{"Host", "evil.example:9400"}, http.StatusForbidden},
		{"another address", "POST", own, nil, http.StatusForbidden},
		{"another address, and a name that lies", "POST", own, []string{"Host", "localhost:9400"}, http.StatusForbidden},
		{"a password that nobody asked for", "POST", base, []string{"X-Forwarded-For", "192.0.2.1", "Authorization", "Basic dXNlcjpwYXNz"}, http.StatusForbidden},
	} {
		if got := statusOf(t, c.method, c.url+"/-/release", c.header...); got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
	}
	time.Sleep(200 * time.Millisecond)
	if p.scrape(t).sum("gpu_exporter_nvml_up") != 1 {
		t.Error("released by who may not")
	}

	if got := statusOf(t, "POST", base+"/-/release"); got != http.StatusOK {
		t.Fatalf("release: %d", got)
	}
	if list := using(t, p.cmd.Process.Pid, dir); len(list) > 0 {
		t.Errorf("released, and yet: %s", strings.Join(list, "; "))
	}
	if list := using(t, p.cmd.Process.Pid, "/dev/nvidia"); len(list) > 0 {
		t.Errorf("released, and yet: %s", strings.Join(list, "; "))
	}
	p.until(t, 5*time.Second, "no readings", func(s scrape) bool { return s.has(0, "gpu_exporter_nvml_up") && len(s["gpu_temperature_celsius"]) == 0 })
	if ready := p.get(t, "/-/ready"); !strings.Contains(ready, "nvml: down: released") {
		t.Errorf("ready says %q", ready)
	}
	h.Set(t, fake.Scenario{GPUs: []fake.GPU{gpu}, Driver: "550.54.15"}) // another driver is installed
	time.Sleep(3 * time.Second)
	if list := descendants(p.cmd.Process.Pid); len(list) > 0 {
		t.Errorf("a worker was started while released: %v", list)
	}
	if got := statusOf(t, "POST", base+"/-/resume"); got != http.StatusOK {
		t.Fatalf("resume: %d", got)
	}
	p.until(t, 10*time.Second, "the new driver", func(s scrape) bool {
		return s.has(1, "gpu_exporter_nvml_up") && len(s.find("gpu_device_info", "driver_version", "550.54.15")) == 1 && len(s["gpu_memory_used_bytes"]) == 2
	})
	p.stop(t)
}

// TestReleaseAuth: where passwords are demanded, who has one may release from anywhere, and nobody without.
func TestReleaseAuth(t *testing.T) {
	config := file(t, "basic_auth_users:\n  user: $2a$04$Njl2obcqtcFxfocY9Sr4dOukQMbrTNivD3gXi2GpStdsXrWwWVG5e\n")
	p := start(t, "--nvml.library=/none", "--docker.host=unix:///none", "--tracer=off", "--web.config.file="+config)
	for _, c := range []struct {
		user string
		want int
	}{{"", http.StatusUnauthorized}, {"user:wrong@", http.StatusUnauthorized}, {"user:pass@", http.StatusOK}} {
		if got := statusOf(t, "POST", "http://"+c.user+p.address+"/-/release", "X-Forwarded-For", "192.0.2.1"); got != c.want {
			t.Errorf("with %q: %d, want %d", c.user, got, c.want)
		}
	}
	p.stop(t)
}

// TestReleaseOfReplay: a recording has no driver to let go of.
func TestReleaseOfReplay(t *testing.T) {
	p := start(t, "--replay=demo")
	if got := statusOf(t, "POST", "http://"+p.address+"/-/release"); got != http.StatusNotFound {
		t.Errorf("release: %d", got)
	}
	p.stop(t)
}
