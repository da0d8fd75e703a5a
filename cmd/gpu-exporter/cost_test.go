package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"gpu-exporter/nvml/fake"
)

// TestWakeUps: what happens every second happens together. Each wake-up costs about as much as a reading of NVML. The limit is twice what was seen.
func TestWakeUps(t *testing.T) {
	h := fake.Install(t, fake.Scenario{GPUs: []fake.GPU{fake.H200(0)}})
	p := start(t, "--nvml.library="+h.Library, "--docker.host=unix://"+engine(t, nil, nil))
	p.until(t, 20*time.Second, "a reading", func(s scrape) bool { return len(s.find("gpu_temperature_celsius")) > 0 })
	sleeps := func() (n int) {
		tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", p.cmd.Process.Pid))
		for _, task := range tasks {
			status, _ := os.ReadFile(task) // "" of a thread that has ended
			for line := range strings.Lines(string(status)) {
				if text, ok := strings.CutPrefix(line, "voluntary_ctxt_switches:"); ok {
					v, err := strconv.Atoi(strings.TrimSpace(text))
					if err != nil {
						t.Fatal(err)
					}
					n += v
				}
			}
		}
		return n
	}
	var each []int
	for before, i := sleeps(), 0; i < 5; i++ {
		time.Sleep(time.Second)
		now := sleeps()
		each = append(each, now-before)
		before = now
	}
	slices.Sort(each)
	t.Logf("wake-ups in each of five seconds: %v", each)
	if median := each[len(each)/2]; median > 40 || median == 0 {
		t.Errorf("%d wake-ups a second, want at most 40", median)
	}
}

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
