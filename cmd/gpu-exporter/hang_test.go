package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"gpu-exporter/nvml/fake"
)

// procTree makes a procfs that shows the processes named, each with the files given, and process 1.
func procTree(t *testing.T, processes map[int]map[string]string) string {
	t.Helper()
	root := t.TempDir()
	if processes[1] == nil {
		processes[1] = map[string]string{}
	}
	for pid, files := range processes {
		dir := filepath.Join(root, fmt.Sprint(pid))
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		all := map[string]string{"stat": fmt.Sprintf("%d (job) S 1 %d %d 0 -1 4194304 0 0 0 0 120 30 0 0 20 0 1 0 12345 0 0\n", pid, pid, pid),
			"cgroup": "0::/\n", "cmdline": "job\x00--now\x00"}
		for name, text := range files {
			all[name] = text
		}
		for name, text := range all {
			path := filepath.Join(dir, name)
			var err error
			if text == hangs {
				err = syscall.Mkfifo(path, 0o600)
			} else {
				err = os.WriteFile(path, []byte(text), 0o644)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	return root
}

// hangs, as the text of a file, stands for one that does not open: a pipe without a writer.
const hangs = "hangs"

// TestHang: whatever hangs, /metrics answers at once, and SIGTERM ends the program and its worker.
func TestHang(t *testing.T) {
	job := sleeper(t)
	gpus := []fake.GPU{fake.H200(0), fake.A10(1)}
	hold(&gpus[0], 0, fake.Process{PID: job, Memory: gib})
	good := fake.Scenario{GPUs: gpus}
	fault := func(function string, gpu int) string {
		return fake.Install(t, fake.Scenario{GPUs: gpus, Faults: []fake.Fault{{Function: function, GPU: gpu, Kind: fake.Hang}}}).Library
	}
	library, socket := fake.Install(t, good).Library, engine(t, nil, nil)
	both := func(s scrape) bool { return s.sum("gpu_up") == 2 }
	tests := []struct {
		name                  string
		library, socket, proc string
		check                 func(s scrape) bool
	}{
		{"NVML init", fault("nvmlInit_v2", fake.AnyGPU), socket, "/proc", func(s scrape) bool {
			return s.has(0, "gpu_exporter_nvml_up") && len(s["gpu_up"]) == 0
		}},
		{"one GPU", fault("nvmlDeviceGetMemoryInfo_v2", 1), socket, "/proc", func(s scrape) bool {
			return s.has(1, "gpu_exporter_nvml_up") && s.has(0, "gpu_up", "gpu_device_name", "") && s.has(1, "gpu_up", "gpu_device_uuid", uuid(gpus[0])) &&
				len(s["gpu_temperature_celsius"]) == 1
		}},
		{"every GPU", fault("nvmlDeviceGetMemoryInfo_v2", fake.AnyGPU), socket, "/proc", func(s scrape) bool {
			return len(s["gpu_up"]) == 2 && s.sum("gpu_up") == 0 && len(s["gpu_temperature_celsius"]) == 0
		}},
		{"Docker", library, silent(t), "/proc", func(s scrape) bool { return s.has(0, "gpu_exporter_docker_up") && both(s) }},
		{"/proc, on opening", library, socket, procTree(t, map[int]map[string]string{job: {"stat": hangs}}), both},
		{"/proc, on reading a command line", library, socket, procTree(t, map[int]map[string]string{job: {"cmdline": hangs}}), both},
		{"the whole of /proc", library, socket, procTree(t, map[int]map[string]string{1: {"stat": hangs}}), both},
	}
	var running []*process
	for _, tt := range tests {
		running = append(running, launch(t, nil, "--nvml.library="+tt.library, "--docker.host=unix://"+tt.socket, "--proc="+tt.proc))
	}
	for i, tt := range tests { // all have started before one is measured: a start takes a core for a second
		running[i].serving(t)
		running[i].until(t, 10*time.Second, "what a hang leaves of "+tt.name, tt.check)
	}
	for i, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := running[i]
			slow := 0
			for range 50 {
				began := time.Now()
				p.get(t, "/metrics")
				if took := time.Since(began); took > 100*time.Millisecond {
					slow++
				}
				time.Sleep(5 * time.Millisecond)
			}
			if slow > 2 { // this machine may be busy with other things
				t.Errorf("%d of 50 scrapes took more than 100 ms", slow)
			}
			if !tt.check(p.scrape(t)) {
				t.Errorf("another picture after 50 scrapes:\n%s", p.get(t, "/metrics"))
			}
			if list := p.complaints(); len(list) > 2 {
				t.Errorf("%d complaints:\n%s", len(list), strings.Join(list, "\n"))
			}
			p.stop(t)
		})
	}
}
