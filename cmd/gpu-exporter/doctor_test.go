package main

import (
	"encoding/json"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"gpu-exporter/exporter/doctor"
	"gpu-exporter/nvml/fake"
)

// TestDoctor: it says what a running exporter sees and what this host lacks, as text and as JSON, with the exit code of the worst.
func TestDoctor(t *testing.T) {
	noDocker := "--docker.host=unix://" + filepath.Join(t.TempDir(), "none")
	p := start(t, "--replay=demo")
	p.until(t, 30*time.Second, "a process", func(s scrape) bool { return len(s.find("gpu_memory_used_bytes", "container_name", "hold")) == 1 })
	url := "--url=http://" + p.address
	r := ran(t, "doctor", url, noDocker, "--driver-root="+t.TempDir())
	for _, line := range []string{`ok       exporter      it answers at http://127\.0\.0\.1:\d+`, `ok       nvml          version 13\.580\.159\.04, 1 GPUs`,
		`warning  docker        no Docker here: .*/none does not exist\n +do: mount the socket.*`} {
		if !regexp.MustCompile(`(?m)^` + line + `$`).MatchString(r.stdout) {
			t.Errorf("%+v lacks %s", r, line)
		}
	}
	var report doctor.Report
	j := ran(t, "doctor", "--json", url, noDocker)
	if err := json.Unmarshal([]byte(j.stdout), &report); err != nil || len(report.Findings) < len(doctor.Checks) || j.code != report.State.ExitCode() || j.stderr != "" {
		t.Errorf("%v: %+v", err, j)
	}
	p.stop(t)
	if r := ran(t, "doctor", url, noDocker); r.code != 2 || !strings.Contains(r.stdout, "\nbroken   exporter      no exporter answers at http") {
		t.Errorf("%+v", r)
	}
}

// TestDoctorSamples: without an exporter doctor samples the host itself.
func TestDoctorSamples(t *testing.T) {
	args := psHost(t, fake.Scenario{GPUs: []fake.GPU{fake.H200(0), fake.A10(1)}})
	args[0] = "doctor"
	r := ran(t, args...)
	if !strings.Contains(r.stdout, "none runs here: this host was sampled") || !strings.Contains(r.stdout, "ok       gpus          none on the PCI bus, 2 by NVML\n") {
		t.Errorf("%+v", r)
	}
	ran(t, "doctor", "--replay=demo").oneLine(t, 2, "not at a recording")
	ran(t, "doctor", "--url=nonsense").oneLine(t, 2, "not of the form")
}
