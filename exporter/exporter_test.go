package exporter

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-exporter/exporter/docker"
	"gpu-exporter/exporter/worker"
	"gpu-exporter/tracer"
	"gpu-exporter/tracer/activity"
)

// TestSoon measures how soon a process that opens a device is in the snapshot, and how soon one that was killed is not, on a quiet host and on one where
// another process opens the device without a pause. /dev/full stands for the GPU.
func TestSoon(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	none := filepath.Join(t.TempDir(), "none")
	e := New(Config{
		ProcRoot: "/proc", Worker: worker.Config{Path: none}, Docker: docker.Config{Host: "unix://" + none},
		Tracer: tracer.Config{Mode: tracer.ModeTracepoint, Devices: []tracer.Device{{Major: 1, Minor: 7, Node: "gpu"}}},
	})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- e.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	holds := func(pid int) bool {
		r := e.Latest().Tracer
		return r != nil && slices.ContainsFunc(r.Processes, func(p activity.Process) bool { return p.PID == pid })
	}
	until := func(what string, ok func() bool) time.Duration {
		t.Helper()
		began := time.Now()
		for !ok() {
			if time.Since(began) > 10*time.Second {
				t.Fatalf("not in 10 s: %s", what)
			}
			time.Sleep(100 * time.Microsecond)
		}
		return time.Since(began)
	}
	until("the tracer attached", func() bool { return e.Latest().TracerUp })
	measure := func(name string, pause, limit time.Duration) {
		var seen, gone []time.Duration
		for range 30 {
			time.Sleep(pause)
			fd, err := unix.Open("/dev/full", unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			seen = append(seen, until("an open", func() bool { return holds(os.Getpid()) }))
			unix.Close(fd)
			until("a close", func() bool { return !holds(os.Getpid()) })
		}
		for range 10 {
			cmd := exec.Command("/bin/sh", "-c", "exec 3</dev/full; exec sleep 600")
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			until("a process", func() bool { return holds(cmd.Process.Pid) })
			time.Sleep(pause)
			_ = cmd.Process.Kill()
			gone = append(gone, until("the end of a process", func() bool { return !holds(cmd.Process.Pid) }))
			_ = cmd.Wait()
		}
		slices.Sort(seen)
		slices.Sort(gone)
		t.Logf("%s: open to snapshot median %v, at most %v; killed to gone median %v, at most %v",
			name, seen[len(seen)/2], seen[len(seen)-1], gone[len(gone)/2], gone[len(gone)-1])
		if median := seen[len(seen)/2]; median > limit { // single ones may wait for a processor
			t.Errorf("%s: open to snapshot %v, want %v", name, median, limit)
		}
		if slowest := gone[len(gone)-1]; slowest > time.Second {
			t.Errorf("%s: killed to gone %v, want 1s", name, slowest)
		}
	}
	measure("quiet", 60*time.Millisecond, 10*time.Millisecond)
	busy := exec.Command("/bin/sh", "-c", "while :; do : </dev/full; done")
	if err := busy.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = busy.Process.Kill()
		_ = busy.Wait()
	}()
	measure("busy", 0, 15*time.Millisecond)
}
