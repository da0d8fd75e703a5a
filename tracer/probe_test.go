package tracer

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"gpu-exporter/tracer/activity"
)

// copier opens a device and copies with the stand-in libcuda: 1000 bytes, and 234 more as the last thing that it does.
const copier = `
#include <fcntl.h>
#include <stdio.h>
#include <stdint.h>
int cuMemcpyHtoD_v2(uint64_t, const void *, size_t), cuMemAlloc_v2(uint64_t *, size_t);
int main(void)
{
	char b[2000];
	uint64_t p;
	open("/dev/zero", O_RDONLY);
	puts("ready"); fflush(stdout);
	getchar();
	cuMemAlloc_v2(&p, 4096);
	cuMemcpyHtoD_v2(p, b, 1000);
	getchar();
	cuMemcpyHtoD_v2(p, b, 234);
	return 0;
}`

// TestProbe follows copies and allocations into the report, those that a process made just before it ended included.
func TestProbe(t *testing.T) {
	dir := t.TempDir()
	source := filepath.Join(dir, "copier.c")
	if err := os.WriteFile(source, []byte(copier), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"-O1", "-fno-omit-frame-pointer", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", dir + "/libcuda.so.1", "probes/testdata/fake_libcuda.c"},
		{"-O1", "-w", "-o", dir + "/copier", source, dir + "/libcuda.so.1", "-Wl,-rpath," + dir},
	} {
		if out, err := exec.Command("gcc", args...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	most := map[int]uint64{}
	w := start(t, func(c *Config) { c.Probe = true })
	cmd := exec.Command(dir + "/copier")
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
