package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gpu-exporter/nvml/fake"
)

// TestTimerSlack: every thread of the program and of the worker lets the kernel wake it up to a millisecond late, so that Go's monitor thread, which
// sleeps 20 microseconds at a time while anything runs, does not take a third of the CPU time.
func TestTimerSlack(t *testing.T) {
	h := fake.Install(t, fake.Scenario{GPUs: []fake.GPU{fake.H200(0)}})
	p := start(t, "--nvml.library="+h.Library, "--docker.host=unix://"+engine(t, nil, nil))
	p.until(t, 20*time.Second, "a reading", func(s scrape) bool { return len(s.find("gpu_temperature_celsius")) > 0 })
	for _, pid := range append(descendants(p.cmd.Process.Pid), p.cmd.Process.Pid) {
		tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
		if len(tasks) < 3 {
			t.Errorf("process %d has %d threads", pid, len(tasks))
		}
		for _, task := range tasks {
			slack, err := os.ReadFile("/proc/" + filepath.Base(task) + "/timerslack_ns")
			if err != nil {
				continue // the thread has ended, or the test may not look
			}
			if strings.TrimSpace(string(slack)) != "1000000" {
				t.Errorf("thread %s of process %d has a timer slack of %s ns", filepath.Base(task), pid, strings.TrimSpace(string(slack)))
			}
		}
	}
}
