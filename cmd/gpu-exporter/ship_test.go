package main

import (
	"debug/elf"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"gpu-exporter/exporter/docker/dockertest"
)

// maxSize is what the program and the image may weigh.
const maxSize = 20 << 20

// TestARM64: the program for arm64 is static, holds a worker for arm64, and serves the built-in recording.
func TestARM64(t *testing.T) {
	emulator, err := exec.LookPath("qemu-aarch64-static")
	if err != nil {
		t.Fatal("qemu-aarch64-static is missing: apt-get install qemu-user-static")
	}
	path, err := buildFor("arm64")
	if err != nil {
		t.Fatal(err)
	}
	f, err := elf.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if f.Machine != elf.EM_AARCH64 {
		t.Errorf("the program is for %v", f.Machine)
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			t.Error("the program has an interpreter: it is not static")
		}
	}
	p := launch(t, func(c *exec.Cmd) {
		c.Args = append([]string{emulator, path}, c.Args[1:]...)
		c.Path = emulator
	}, "--replay=demo")
	p.serving(t)
	p.until(t, time.Minute, "a series of the container that holds memory", func(s scrape) bool {
		return len(s.find("gpu_memory_used_bytes", "container_name", "notebook")) == 1
	})
}

// TestImage: `make image` builds an image of the program alone, without a registry, under the name that the README and the compose file run,
// and a container of it serves.
func TestImage(t *testing.T) {
	d := dockertest.Start(t)
	docker := func(args ...string) string {
		t.Helper()
		cmd := exec.Command("docker", args...)
		cmd.Env = append(os.Environ(), "DOCKER_HOST="+d.Host)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("docker %s: %v\n%s", strings.Join(args, " "), err, out)
		}
		return strings.TrimSpace(string(out))
	}
	cmd := exec.Command("make", "-C", "../..", "image", "BIN=bin/image-test")
	cmd.Env = append(os.Environ(), "DOCKER_HOST="+d.Host)
	t.Cleanup(func() { os.RemoveAll("../../bin/image-test") })
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("make image: %v\n%s", err, out)
	}
	if size, err := strconv.Atoi(docker("image", "inspect", "-f", "{{.Size}}", "gpu-exporter:latest")); err != nil || size > maxSize {
		t.Errorf("the image has %d bytes (%v), want at most %d", size, err, maxSize)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	l.Close()
	docker("run", "-d", "--name", "it", "--network", "host", "gpu-exporter:latest", "--replay=demo", "--web.listen-address="+address)
	p := &process{address: address}
	var last error
	for range 100 {
		c, err := net.Dial("tcp", address)
		if last = err; err == nil {
			c.Close()
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	if last != nil {
		t.Fatal(fmt.Errorf("the container does not serve: %w\n%s", last, docker("logs", "it")))
	}
	p.until(t, 30*time.Second, "a series of the container that holds memory", func(s scrape) bool {
		return len(s.find("gpu_memory_used_bytes", "container_name", "notebook")) == 1
	})
}
