package dockertest_test

import (
	"os"
	"strings"
	"testing"
	"time"

	"gpu-exporter/exporter/docker/dockertest"
)

// TestLife starts a daemon, runs a container of each image, kills the daemon and sees that nothing is left of it.
func TestLife(t *testing.T) {
	var dir string
	t.Run("daemon", func(t *testing.T) {
		began := time.Now()
		d := dockertest.Start(t)
		t.Logf("ready after %v", time.Since(began))
		dir = d.Dir
		id := d.Run(t, "--name", "one", "busybox")
		if len(id) != 64 {
			t.Errorf("id %q", id)
		}
		if out := d.Docker(t, "exec", "one", "sh", "-c", "echo $((6*7))"); out != "42" {
			t.Errorf("exec printed %q", out)
		}
		d.Run(t, "--gpus", "all", "--name", "two", "busybox")
		d.Run(t, "--runtime", "nvidia", "--name", "three", "busybox")
		d.Run(t, "-v", "/bin/busybox:/busybox:ro", "empty", "/busybox", "sleep", "100")
		d.Run(t, "--privileged", "--name", "four", "busybox")
		d.Docker(t, "exec", "--privileged", "four", "true")
		d.Kill()
		if d.PID() != 0 {
			t.Error("the daemon is there after Kill")
		}
	})
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("%s is left: %v", dir, err)
	}
	if mounts, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(mounts), dir) {
		t.Errorf("mounts are left, or %v", err)
	}
}
