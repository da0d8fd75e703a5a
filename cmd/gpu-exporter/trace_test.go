package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"gpu-exporter/exporter/docker/dockertest"
)

// traced makes /dev/full (1:7) count as a GPU, so that real kernel events come without one.
const traced = "--tracer.devices=1:7=gpu"

// TestTracer: what a container does to a traced device is on /metrics by its name, also when both live for a moment, and `trace` shows it as it happens.
func TestTracer(t *testing.T) {
	d := dockertest.Start(t)
	p := start(t, traced, "--docker.host="+d.Host, "--nvml.library=/none", "--linger=10s")
	p.until(t, 10*time.Second, "the tracer", func(s scrape) bool { return len(s.find("gpu_exporter_tracer_up")) > 0 })

	cmd := exec.Command(program(t), "trace", "--json", traced, "--docker.host="+d.Host)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { cmd.Process.Kill() })
	defer stop()
	time.Sleep(2 * time.Second) // until it is attached: it says so to people only

	d.Run(t, "--name", "opener", "busybox", "sh", "-c", "sleep 1; for i in 1 2 3 4 5; do cat </dev/full | head -c 1; done; sleep 600")
	kinds := map[string]bool{}
	lines := bufio.NewScanner(out)
	for !(kinds["open"] && kinds["exit"]) && lines.Scan() {
		var e tracedEvent
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			t.Fatalf("%q: %v", lines.Text(), err)
		}
		if e.ContainerName == "opener" {
			kinds[e.Kind] = true
		}
	}
	if !kinds["open"] || !kinds["exit"] {
		t.Errorf("trace showed only %v of the container", kinds)
	}
	cmd.Process.Signal(syscall.SIGTERM)
	if err := cmd.Wait(); err != nil {
		t.Errorf("trace ended with %v", err)
	}

	p.until(t, 10*time.Second, "five opens and their processes", func(s scrape) bool {
		opens := s.find("gpu_device_opens_total", "container_name", "opener", "node", "gpu", "result", "ok")
		started := s.find("gpu_processes_started_total", "container_name", "opener")
		return len(opens) == 1 && opens[0].value == 5 && len(started) == 1 && started[0].value == 5
	})
	if ready := p.get(t, "/-/ready"); !strings.Contains(ready, "tracer: up") {
		t.Errorf("ready says %q", ready)
	}

	// Short lives: a thousand processes in four containers that end with them, each of which has the device for 50 ms.
	for _, name := range []string{"short1", "short2", "short3", "short4"} {
		d.Run(t, "--name", name, "busybox", "sh", "-c",
			"i=0; while [ $i -lt 250 ]; do (exec 3</dev/full; exec sleep 0.05) & i=$((i+1)); [ $((i % 25)) != 0 ] || wait; done")
	}
	p.until(t, 30*time.Second, "a thousand processes, each with its container", func(s scrape) bool {
		for _, name := range []string{"short1", "short2", "short3", "short4"} {
			if !s.has(250, "gpu_processes_started_total", "container_name", name) || !s.has(250, "gpu_processes_exited_total", "container_name", name, "reason", "exit") {
				return false
			}
		}
		return true
	})

	// Two hundred containers in a minute leave nothing behind once the linger time is over.
	before := p.until(t, 15*time.Second, "its own figures, which it takes every ten seconds", func(s scrape) bool { return s.sum("go_goroutines") > 10 })
	descriptors := func() int {
		list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.cmd.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	opened := descriptors()
	named := func(s scrape) (n int) {
		for name := range s {
			for _, x := range s[name] {
				if x.labels["container_name"] != "" {
					n++
				}
			}
		}
		return n
	}
	began := time.Now()
	names := make(chan int)
	var runs sync.WaitGroup
	for range 4 {
		runs.Go(func() {
			for i := range names {
				if _, err := d.Command("run", "--rm", "--name", fmt.Sprint("churn", i), "--gpus", "all", "busybox", "sh", "-c", "head -c 1 </dev/full"); err != nil {
					t.Error(err)
				}
			}
		})
	}
	seen := map[string]bool{}
	look := func() (n int, s scrape) {
		s = p.scrape(t)
		for name := range s {
			for _, x := range s[name] {
				if c := x.labels["container_name"]; strings.HasPrefix(c, "churn") {
					seen[c] = true
					n++
				}
			}
		}
		return n, s
	}
	for i := range 200 {
		names <- i
		if i%20 == 0 {
			look()
		}
	}
	close(names)
	runs.Wait()
	took := time.Since(began)
	look()
	if len(seen) < 150 {
		t.Errorf("of 200 containers in %v %d were seen", took, len(seen))
	}
	for deadline := time.Now().Add(40 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		n, after := look()
		if n == 0 && after.sum("go_goroutines") <= before.sum("go_goroutines")+2 && descriptors() <= opened+2 && named(after) <= named(before) {
			t.Logf("200 containers in %v, %d of them seen, all gone %v later: %d series of containers before and %d after, %v goroutines and %v, %d descriptors and %d",
				took, len(seen), time.Since(began)-took, named(before), named(after), before.sum("go_goroutines"), after.sum("go_goroutines"), opened, descriptors())
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d series of containers that are gone; %d series of containers, before %d; %v goroutines, before %v; %d descriptors, before %d",
				n, named(after), named(before), after.sum("go_goroutines"), before.sum("go_goroutines"), descriptors(), opened)
		}
	}
	p.stop(t)
}
