package tracer

import (
	"os"
	"os/exec"
	"slices"
	"testing"

	"gpu-exporter/tracer/activity"
)

// programs builds testdata/programs and returns their folder. Where no compiler is they are given: scripts/test-vm.
func programs(t *testing.T) string {
	t.Helper()
	if dir := os.Getenv("GPU_EXPORTER_TEST_PROGRAMS"); dir != "" {
		return dir
	}
	dir := t.TempDir()
	if out, err := exec.Command("testdata/programs/build", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return dir
}

// TestProbe follows copies and allocations into the report, those that a process made just before it ended included.
func TestProbe(t *testing.T) {
	dir := programs(t)
	most := map[int]uint64{}
	w := start(t, func(c *Config) { c.Probe = true })
	cmd := exec.Command(dir + "/copier")
	cmd.Env = []string{"LD_LIBRARY_PATH=" + dir}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Wait() }()
	defer in.Close()
	pid := cmd.Process.Pid
	w.until("the library probed", func(r *activity.Report) bool {
		return process1(r, pid) != nil && slices.ContainsFunc(r.Probes, func(p activity.Probe) bool { return p.Up })
	})
	if _, err := in.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	r := w.until("the first copy", func(r *activity.Report) bool { p := process1(r, pid); return p != nil && p.HtoD == 1000 })
	if p := process1(r, pid); p.DtoH != 0 || len(p.Devices) != 1 || p.Devices[0].Allocated.V != 4096 {
		t.Errorf("%+v", p)
	}
	w.mu.Lock()
	w.each = func(r *activity.Report) {
		if p := process1(r, pid); p != nil {
			most[pid] = max(most[pid], p.HtoD)
		}
	}
	w.mu.Unlock()
	in.Close()
	w.notHeld(pid)
	w.mu.Lock()
	defer w.mu.Unlock()
	if most[pid] != 1234 {
		t.Errorf("the last figure is %d bytes, want 1234", most[pid])
	}
}
