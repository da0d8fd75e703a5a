package main

import (
	"bytes"
	"debug/elf"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// program builds the real binary once per test run, as it ships but for the embedded worker.
func program(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "gpu-exporter")
	cmd := exec.Command("go", "build", "-o", path, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("building: %v\n%s", err, out)
	}
	return path
}

// TestStatic: no interpreter, no shared library, and no way for purego to get in.
func TestStatic(t *testing.T) {
	f, err := elf.Open(program(t))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			t.Error("the program has an interpreter: it is not static")
		}
	}
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(out), "purego") || strings.Contains(string(out), "gpu-exporter/nvml\n") {
		t.Error("the main program imports purego or package nvml")
	}
}

// start runs the program and returns its address and its log.
func start(t *testing.T, path string, args ...string) (string, *bytes.Buffer, *exec.Cmd) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	l.Close()
	log := &bytes.Buffer{}
	cmd := exec.Command(path, append(args, "--web.listen-address="+address)...)
	cmd.Stderr = log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	for range 100 {
		if r, err := http.Get("http://" + address + "/-/healthy"); err == nil {
			r.Body.Close()
			return address, log, cmd
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Fatalf("it does not answer: %s", log)
	return "", nil, nil
}

func get(t *testing.T, url string) string {
	t.Helper()
	r, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestNothingHere: without a GPU and without Docker it starts, warns once of each, and serves.
func TestNothingHere(t *testing.T) {
	none := filepath.Join(t.TempDir(), "none")
	address, log, cmd := start(t, program(t), "--nvml.library="+none, "--docker.host=unix://"+none)
	time.Sleep(4 * time.Second) // several ticks and restarts: still one line each
	body := get(t, "http://"+address+"/metrics")
	for _, want := range []string{"\ngpu_exporter_nvml_up 0\n", "\ngpu_exporter_docker_up 0\n"} {
		if !strings.Contains(body, want) {
			t.Errorf("no %q", want)
		}
	}
	cmd.Process.Signal(syscall.SIGTERM)
	if err := cmd.Wait(); err != nil {
		t.Errorf("SIGTERM: %v", err)
	}
	if n := strings.Count(log.String(), "level=WARN"); n != 2 {
		t.Errorf("%d warnings, want 2:\n%s", n, log)
	}
}

// TestDemo: the built-in recording shows series per container.
func TestDemo(t *testing.T) {
	address, _, _ := start(t, program(t), "--replay=demo")
	deadline := time.Now().Add(30 * time.Second)
	for {
		body := get(t, "http://"+address+"/metrics")
		if strings.Contains(body, `gpu_memory_used_bytes{container_id="52d05af6c921",container_name="hold"`) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("no series of the container that holds memory")
		}
		time.Sleep(500 * time.Millisecond)
	}
}

// TestWrongFlags: one line and exit code 2.
func TestWrongFlags(t *testing.T) {
	path := program(t)
	for _, args := range [][]string{{"--no-such-flag"}, {"--metrics.include=("}, {"--nvml.interval=-1s"}, {"--replay=/no/such/file"},
		{"--web.config.file=/no/such/file"}, {"--docker.host=ftp://x"}} {
		var stderr bytes.Buffer
		cmd := exec.Command(path, args...)
		cmd.Stderr = &stderr
		err := cmd.Run()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != 2 || strings.Count(stderr.String(), "\n") != 1 {
			t.Errorf("%v: %v, %q", args, err, stderr.String())
		}
	}
}
