package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"gpu-exporter/exporter/assets"
	"gpu-exporter/nvml/fake"
)

// TestUnitCapabilities: with the capabilities of the systemd unit and no others, every source works.
func TestUnitCapabilities(t *testing.T) {
	unit, err := assets.Files.ReadFile("install/gpu-exporter.service")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^CapabilityBoundingSet=(.+)$`).FindStringSubmatch(string(unit))
	if m == nil {
		t.Fatal("the unit bounds no capabilities")
	}
	var caps strings.Builder
	for _, c := range strings.Fields(m[1]) {
		caps.WriteString(",+" + strings.ToLower(strings.TrimPrefix(c, "CAP_")))
	}
	job := sleeper(t)
	gpu := fake.H200(0)
	hold(&gpu, 0, fake.Process{PID: job, Memory: gib})
	h := fake.Install(t, fake.Scenario{GPUs: []fake.GPU{gpu}})
	setpriv, err := exec.LookPath("setpriv")
	if err != nil {
		t.Fatal(err)
	}
	p := launch(t, func(c *exec.Cmd) {
		c.Args = append([]string{"setpriv", "--no-new-privs", "--bounding-set=-all" + caps.String(), "--inh-caps=-all", c.Path}, c.Args[1:]...)
		c.Path = setpriv
	}, "--nvml.library="+h.Library, "--docker.host=unix://"+engine(t, nil, nil))
	p.serving(t)
	s := p.until(t, 20*time.Second, "the kernel tracer", func(s scrape) bool { return s.sum("gpu_exporter_tracer_up") == 1 })
	s.want(t, 1, "gpu_exporter_nvml_up")
	s.want(t, 1, "gpu_exporter_docker_up")
	s = p.until(t, 10*time.Second, "the process with its name", func(s scrape) bool { return len(s.find("gpu_process_info", "process_name", "sleep")) == 1 })
	s.none(t, "gpu_exporter_tracer_up", "mode", "off")
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", p.cmd.Process.Pid))
	if !slices.ContainsFunc(files, func(f string) bool { to, _ := os.Readlink(f); return to == "/dev/kmsg" }) {
		t.Error("it does not read the kernel's log")
	}
	p.stop(t)
}
