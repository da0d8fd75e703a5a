package tracer

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/snapshot"
	"gpu-exporter/nvml/frame"
	"gpu-exporter/tracer/activity"
)

// inVM skips a test that needs the module of scripts/vm-module.
func inVM(t *testing.T) {
	t.Helper()
	if os.Getenv("GPU_EXPORTER_TEST_VM") == "" {
		t.Skip("needs a kernel module: scripts/test-vm")
	}
}

func loadModule(t *testing.T) {
	t.Helper()
	file, err := os.Open("/lib/nvidia_xid.ko")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := unix.FinitModule(int(file.Fd()), "", 0); err != nil {
		t.Fatal(err)
	}
}

// unload unloads the module: the kernel lets go a moment after the last descriptor.
func unload(t *testing.T) {
	t.Helper()
	var err error
	for range 100 {
		if err = unix.DeleteModule("nvidia_xid", unix.O_NONBLOCK); !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EBUSY) {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	if err != nil {
		t.Errorf("unloading the module: %v", err)
	}
}

// TestRelease unloads the driver under a tracer that has been told to let go of it, and loads it again: Xids are seen as soon as it is resumed, not
// before.
func TestRelease(t *testing.T) {
	inVM(t)
	root := t.TempDir()
	writeDriver(t, root)
	t.Cleanup(func() { unload(t) })
	w := start(t, func(c *Config) { c.driverRoot, c.reconcile = root, 100*time.Millisecond })
	attached := func() bool {
		w.tracer.mu.Lock()
		defer w.tracer.mu.Unlock()
		return w.tracer.kernel.xid != nil
	}
	wait := func() {
		t.Helper()
		for deadline := time.Now().Add(10 * time.Second); !attached(); time.Sleep(20 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal("it does not attach")
			}
		}
	}
	loadModule(t)
	wait()
	if err := unix.DeleteModule("nvidia_xid", unix.O_NONBLOCK); err == nil {
		t.Fatal("a tracer that is attached does not hold the module: the test shows nothing")
	}
	w.tracer.Release()
	unload(t)
	loadModule(t)
	time.Sleep(5 * tick / 2) // two looks at the driver
	if attached() {
		t.Error("it attached while it was released")
	}
	w.tracer.Resume()
	wait()
}

// TestXidTracepoint has the kernel report Xids at the driver's tracepoint, which the module of scripts/vm-module defines as the driver does. The
// module comes after the tracer, as a driver does that is loaded late. Each report is told once, with its GPU, number, time, process and text, and
// counted once by the snapshot; what a text may hold harms nothing.
func TestXidTracepoint(t *testing.T) {
	inVM(t)
	const bus = "0000:0a:00.0" // as in writeDriver
	root := t.TempDir()
	writeDriver(t, root)
	t.Cleanup(func() { unload(t) }) // after the tracer, which holds the module
	w := start(t, func(c *Config) { c.driverRoot, c.reconcile = root, 100*time.Millisecond })
	loadModule(t)
	trigger, err := os.OpenFile("/proc/nvidia_xid", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer trigger.Close()
	report := func(device string, code uint32, message string) {
		t.Helper()
		if _, err := fmt.Fprintf(trigger, "%s|%d|%s", device, code, message); err != nil {
			t.Fatal(err)
		}
	}
	for attached := false; !attached; time.Sleep(50 * time.Millisecond) {
		report(bus, 1, "is anybody there?")
		w.mu.Lock()
		attached = slices.ContainsFunc(w.events, func(e Event) bool { return e.Kind == "xid" })
		w.mu.Unlock()
	}
	time.Sleep(50 * time.Millisecond) // the last question is answered
	holder, _, _ := startChild(t, nil, "open", "/dev/zero")
	w.held(holder.Process.Pid)
	b := snapshot.NewBuilder(snapshot.Config{})
	device := frame.Device{UUID: drivenUUID, Info: &frame.Info{PCIBusID: bus}, Load: &frame.Load{}}
	b.Apply(input.Input{Time: time.Now().UnixNano(), Frame: &frame.Frame{Device: &device}})
	w.mu.Lock()
	w.events = nil
	w.each = func(r *activity.Report) { b.Apply(input.Input{Time: r.Time, Tracer: r}) }
	w.mu.Unlock()

	long := strings.Repeat("x", 1000)
	fault := fmt.Sprintf("pid=%d, name=python, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS", holder.Process.Pid)
	cases := []struct {
		device         string
		code           uint32
		message, shown string // shown: empty: as it is
	}{
		{bus, 31, fault, ""},
		{bus, 79, "GPU has fallen off the bus.", ""},
		{bus, 1<<32 - 1, "pid='<unknown>', name=<unknown>, |%s%n\\\"{}", ""},
		{bus, 45, "\x1b[31m a\nb\r\t\x7f", "?[31m a?b???"},
		{bus, 46, "\xff\xfepid=\xc3\x28", "?pid=?("},
		{bus, 47, "pid=99999999999999999999", ""},
		{bus, 48, " ", ""},
		{bus, 49, long, long[:159]},
		{"ffff:ff:1f.7", 50, "no such GPU", ""},
		{long[:100], 51, "no such address", ""},
		{"", 52, "no address", ""},
	}
	began := time.Now()
	for _, c := range cases {
		report(c.device, c.code, c.message)
	}
	const storm = 300 // as when every multiprocessor of a GPU reports
	for i := range storm {
		report(bus, 13, fmt.Sprintf("Graphics SM Warp Exception on (GPC %d, TPC 0, SM 0): Out Of Range Address", i))
	}
	ended := time.Now()
	var told []Event
	for deadline := time.Now().Add(5 * time.Second); len(told) < len(cases)+storm && time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		w.mu.Lock()
		told = slices.DeleteFunc(slices.Clone(w.events), func(e Event) bool { return e.Kind != "xid" })
		w.mu.Unlock()
	}
	if len(told) != len(cases)+storm {
		t.Fatalf("told of %d, want %d: %+v", len(told), len(cases)+storm, told)
	}
	const slack = time.Millisecond // the two clocks are read one after the other
	for i, e := range told {
		at, uuid, pid, detail := time.Unix(0, e.Time), drivenUUID, 0, ""
		if i < len(cases) {
			c := cases[i]
			shown := c.message
			if c.shown != "" {
				shown = c.shown
			}
			detail = fmt.Sprintf("%d: %s", c.code, shown)
			if c.device != bus {
				uuid = ""
			}
		} else {
			detail = fmt.Sprintf("13: Graphics SM Warp Exception on (GPC %d, TPC 0, SM 0): Out Of Range Address", i-len(cases))
		}
		if i == 0 {
			pid = holder.Process.Pid
			if p := process1(w.until("it", func(*activity.Report) bool { return true }), pid); e.Comm != p.Comm || e.Cgroup != p.Cgroup || e.Cgroup == "" {
				t.Errorf("the process: %+v", e)
			}
		}
		if e.PID != pid || e.UUID != uuid || e.Detail != detail || at.Before(began.Add(-slack)) || at.After(ended.Add(slack)) {
			t.Errorf("%d: %+v, want %q of %q by %d between %v and %v", i, e, detail, uuid, pid, began, ended)
		}
	}
	time.Sleep(2 * tick) // in further reports they are told again
	w.mu.Lock()
	defer w.mu.Unlock()
	w.each = nil
	if n := len(w.last.Xids); n != keptXids || w.last.Xids[n-1].PCIBusID != bus || w.last.Xids[n-1].Code != 13 {
		t.Errorf("the last report has %d: %+v", n, w.last.Xids)
	}
	if len(w.last.Lost) > 0 {
		t.Errorf("lost %v", w.last.Lost)
	}
	xids := b.Snapshot(time.Now()).Devices[0].Xids
	for code, want := range map[uint64]uint64{13: storm, 31: 1, 45: 1, 46: 1, 47: 1, 48: 1, 49: 1, 50: 0, 51: 0, 52: 0, 79: 1, 1<<32 - 1: 1} {
		if xids[code].Count != want {
			t.Errorf("Xid %d: %+v, want %d", code, xids[code], want)
		}
	}
}
