package main

import (
	"bytes"
	"encoding/json"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"gpu-exporter/exporter/docker/dockertest"
	"gpu-exporter/exporter/doctor"
	"gpu-exporter/nvml/fake"
)

// TestDoctor: it says what a running exporter sees and what this host lacks, as text and as JSON, with the exit code of the worst.
func TestDoctor(t *testing.T) {
	noDocker := "--docker.host=unix://" + filepath.Join(t.TempDir(), "none")
	p := start(t, "--replay=demo")
	p.until(t, 10*time.Second, "a GPU", func(s scrape) bool { return len(s.find("gpu_device_memory_used_bytes")) == 1 })
	url := "--url=http://" + p.address
	r := ran(t, "doctor", url, noDocker, "--driver-root="+t.TempDir())
	if r.code != 1 || r.stderr != "" {
		t.Errorf("%+v, want exit code 1: no Docker is a warning", r)
	}
	for _, line := range []string{`warning  exporter      it answers at http://127\.0\.0\.1:\d+, and serves a recording`, `ok       nvml          version 13\.580\.159\.04, GPUs: 1`,
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

// TestDoctorInterrupted: a signal ends it at once, though Docker is silent, and half an answer is none.
func TestDoctorInterrupted(t *testing.T) {
	var out, errs bytes.Buffer
	cmd := exec.Command(program(t), "doctor", "--docker.host=unix://"+silent(t))
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(time.Second)
	cmd.Process.Signal(syscall.SIGINT)
	begin := time.Now()
	cmd.Wait() // how it ended is compared below
	result{cmd.ProcessState.ExitCode(), out.String(), errs.String()}.oneLine(t, 2, "interrupted")
	if d := time.Since(begin); d > 3*time.Second {
		t.Errorf("it took %v", d)
	}
}

// TestDoctorHost: with a real engine all is well and the exit code is 0; a container that is refused the driver's node is told from one that is not, until
// it is started anew.
func TestDoctorHost(t *testing.T) {
	d := dockertest.Start(t)
	engine := "--docker.host=" + d.Host
	d.Run(t, "--name", "well", "--gpus", "all", "busybox")
	p := start(t, engine, "--nvml.library="+fake.Install(t, fake.Scenario{GPUs: []fake.GPU{fake.H200(0)}}).Library)
	p.until(t, 10*time.Second, "the tracer and the containers", func(s scrape) bool {
		return len(s.find("gpu_container_info")) == 1 && s.has(1, "gpu_exporter_tracer_up")
	})
	args := []string{"doctor", "--url=http://" + p.address, engine}
	if r := ran(t, args...); r.code != 0 || r.stderr != "" || strings.Contains(r.stdout, " do: ") {
		t.Errorf("%+v", r)
	}
	// Its device rules do not allow the node, as after a reload. Started anew it does not open it.
	d.Run(t, "--name", "lost", "--gpus", "all", "busybox", "sh", "-c", "[ -e /once ] || { touch /once; mknod /dev/nvidiactl c 195 255; cat </dev/nvidiactl; }; sleep 600")
	p.until(t, 10*time.Second, "the refused open", func(s scrape) bool {
		return s.has(1, "gpu_device_opens_total", "container_name", "lost", "node", "ctl", "result", "eperm")
	})
	access := regexp.MustCompile(`\nbroken +access +container lost: /dev/nvidiactl refused, the last time \d+s ago; 1 opens not permitted\n +do: restart the container`)
	if r := ran(t, args...); r.code != 2 || !access.MatchString(r.stdout) || strings.Count(r.stdout, "broken") != 1 {
		t.Errorf("%+v", r)
	}
	d.Docker(t, "restart", "-t", "0", "lost")
	r := ran(t, args...)
	for end := time.Now().Add(10 * time.Second); r.code != 0 && time.Now().Before(end); r = ran(t, args...) {
		time.Sleep(200 * time.Millisecond)
	}
	if r.code != 0 {
		t.Errorf("%+v", r)
	}
}
