package main

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"gpu-exporter/nvml/fake"
)

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

// TestNothingHere: without a GPU and without Docker it starts, warns once of each, and serves.
func TestNothingHere(t *testing.T) {
	none := filepath.Join(t.TempDir(), "none")
	p := start(t, "--nvml.library="+none, "--docker.host=unix://"+none)
	time.Sleep(4 * time.Second) // several ticks and restarts: still one line each
	s := p.scrape(t)
	s.want(t, 0, "gpu_exporter_nvml_up")
	s.want(t, 0, "gpu_exporter_docker_up")
	if list := p.complaints(); len(list) != 2 {
		t.Errorf("%d warnings, want 2:\n%s", len(list), p.log.String())
	}
	if got := p.get(t, "/-/ready"); !strings.HasSuffix(got, "\nwhat to do: gpu-exporter doctor\n") || !strings.Contains(got, "nvml: down: no usable libnvidia-ml.so.1: tried "+none) {
		t.Errorf("ready says %q", got)
	}
	p.stop(t)
}

// TestDemo: the built-in recording shows series per container.
func TestDemo(t *testing.T) {
	p := start(t, "--replay=demo")
	p.until(t, 30*time.Second, "a series of the container that holds memory", func(s scrape) bool {
		return len(s.find("gpu_memory_used_bytes", "container_id", "a8067bc45d21", "container_name", "notebook")) == 1
	})
	if got := p.get(t, "/-/ready"); !strings.HasPrefix(got, "ready\nthis is a recording, not this host\n") || !strings.Contains(got, "tracer: up, with tracepoint") {
		t.Errorf("ready says %q", got)
	}
	p.stop(t)
}

// TestValueLabels: the template of twelve labels to the letter, with the values that the families of their own have; it is warned of. And what comes of
// the client library is there.
func TestValueLabels(t *testing.T) {
	gpu := fake.H200(0)
	job := sleeper(t)
	hold(&gpu, 100*mib, fake.Process{PID: job, Memory: gib})
	gpu.Busy = []fake.Busy{{PID: job, SM: 50}}
	h := fake.Install(t, fake.Scenario{GPUs: []fake.GPU{gpu}})
	p := start(t, "--metrics.value-labels", "--host-ip=192.0.2.7", "--nvml.library="+h.Library, "--docker.host=unix://"+engine(t, nil, nil), "--tracer=off", "--nvml.interval=100ms")
	s := p.until(t, 15*time.Second, "utilisation", func(s scrape) bool {
		return len(s.find("gpu_utilization_percent", "process_pid", strconv.Itoa(job))) == 1
	})
	want := map[string]string{"container_id": "", "container_name": "", "image_name": "", "gpu_device_uuid": uuid(gpu), "gpu_device_name": "NVIDIA H200", "gpu_pci_bus_id": "0000:0a:00.0",
		"gpu_temperature_celsius": "31", "gpu_power_usage_watts": "76.5", "gpu_memory_used_bytes": "1073741824", "gpu_memory_total_bytes": "150754820096",
		"process_pid": strconv.Itoa(job), "host_ip": "192.0.2.7"}
	if got := s.find("gpu_utilization_percent", "process_pid", strconv.Itoa(job))[0].labels; !maps.Equal(got, want) {
		t.Errorf("labels %v, want %v", got, want)
	}
	if said := p.complaints(); len(said) != 1 || !strings.Contains(said[0], "--metrics.value-labels makes a new series") {
		t.Errorf("complaints %q", said)
	}
	for _, name := range []string{"gpu_exporter_build_info", "go_goroutines", "go_memstats_alloc_bytes", "process_cpu_seconds_total", "process_resident_memory_bytes"} {
		if len(s[name]) != 1 {
			t.Errorf("%d series of %s", len(s[name]), name)
		}
	}
	p.stop(t)
}

// TestFastGPM: short readings of SM activity are made when they are asked for, and only then.
func TestFastGPM(t *testing.T) {
	gpu := fake.H200(0)
	gpu.GPM = map[int]float64{2: 87.5}
	h := fake.Install(t, fake.Scenario{GPUs: []fake.GPU{gpu}})
	base := []string{"--nvml.library=" + h.Library, "--docker.host=unix://" + engine(t, nil, nil), "--nvml.interval=100ms", "--tracer=off"}
	fast := start(t, append(base, "--nvml.gpm-fast=50ms")...)
	plain := start(t, base...)
	fast.until(t, 20*time.Second, "the highest short reading", func(s scrape) bool {
		found := s.find("gpu_sm_active_max_ratio")
		return len(found) == 1 && found[0].value == 0.875
	})
	s := plain.until(t, 20*time.Second, "the usual reading", func(s scrape) bool { return len(s.find("gpu_sm_active_ratio")) == 1 })
	if found := s.find("gpu_sm_active_max_ratio"); len(found) != 0 {
		t.Errorf("short readings without the flag: %v", found)
	}
}

// TestScrapeCut: a scraper that goes away in the middle is no error of the exporter's; what else goes wrong is.
func TestScrapeCut(t *testing.T) {
	var out bytes.Buffer
	l := scrapeLog{slog.New(slog.NewTextHandler(&out, nil))}
	l.Println("error encoding and sending metric family:", fmt.Errorf("flush: %w", &net.OpError{Op: "write", Net: "tcp", Err: syscall.EPIPE}))
	if out.Len() > 0 {
		t.Errorf("logged %q", out.String())
	}
	l.Println("error gathering metrics:", errors.New("two series of one name"))
	if got := out.String(); !strings.Contains(got, "level=ERROR") || !strings.Contains(got, "two series of one name") {
		t.Errorf("logged %q", got)
	}
}
