package poller

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"gpu-exporter/nvml"
	"gpu-exporter/nvml/frame"
)

var t0 = time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)

func TestDue(t *testing.T) {
	var next time.Time
	var at []int
	// Ticks that come a little early and a little late, for 20 s: a 2 s group is due ten times.
	for i := range 20 {
		now := t0.Add(time.Duration(i)*time.Second + time.Duration(i%3-1)*20*time.Millisecond)
		if due(now, &next, 2*time.Second) {
			at = append(at, i)
		}
	}
	if want := []int{0, 2, 4, 6, 8, 10, 12, 14, 16, 18}; !reflect.DeepEqual(at, want) {
		t.Errorf("due at %v, want %v", at, want)
	}
	// After a long pause it is due once, not for each period that was missed.
	late := t0.Add(time.Hour)
	if !due(late, &next, 2*time.Second) || due(late.Add(time.Second), &next, 2*time.Second) || !due(late.Add(2*time.Second), &next, 2*time.Second) {
		t.Error("missed periods are made up for")
	}
}

// TestFirstPeriod: the first tick is at any moment, the others at whole seconds. The power ring holds 2.4 s, so its second reading may not be later.
func TestFirstPeriod(t *testing.T) {
	for first := time.Duration(0); first < time.Second; first += 50 * time.Millisecond {
		began := t0.Add(first)
		d := newDevice(&poller{cfg: Config{now: func() time.Time { return began }}.withDefaults(), lib: &nvml.Library{}}, 0)
		if !due(began, &d.powerAt, 2*time.Second) {
			t.Fatalf("not due at the first tick, %v after the second", first)
		}
		for i := 1; ; i++ {
			if now := t0.Add(time.Duration(i) * time.Second); due(now, &d.powerAt, 2*time.Second) {
				if gap := now.Sub(began); gap > 2*time.Second || gap < time.Second {
					t.Errorf("began %v after the second: the next reading is %v later", first, gap)
				}
				break
			}
		}
	}
}

func TestMerge(t *testing.T) {
	list := merge(nil, []nvml.ProcessInfo{
		{PID: 10, UsedMemory: 5, HasMemory: true, GPUInstance: -1, ComputeInstance: -1},
		{PID: 11, GPUInstance: -1, ComputeInstance: -1},
		{PID: 10, UsedMemory: 7, HasMemory: true, GPUInstance: -1, ComputeInstance: -1}, // the same again
		{PID: 10, UsedMemory: 9, HasMemory: true, GPUInstance: 1, ComputeInstance: 0},   // its part on a MIG device
	}, false)
	list = merge(list, []nvml.ProcessInfo{
		{PID: 11, UsedMemory: 0, HasMemory: true, GPUInstance: -1, ComputeInstance: -1},
		{PID: 12, UsedMemory: 1, HasMemory: true, GPUInstance: -1, ComputeInstance: -1},
	}, true)
	want := []frame.Process{
		{PID: 10, MemoryUsed: frame.Some[uint64](7), Compute: true},
		{PID: 11, MemoryUsed: frame.Some[uint64](0), Compute: true, Graphics: true},
		{PID: 10, MemoryUsed: frame.Some[uint64](9), Compute: true, GPUInst: frame.Some(1), CIInst: frame.Some(0)},
		{PID: 12, MemoryUsed: frame.Some[uint64](1), Graphics: true},
	}
	if !reflect.DeepEqual(list, want) {
		t.Errorf("got %+v\nwant %+v", list, want)
	}
}

func TestTake(t *testing.T) {
	r := rings{process: 1000}
	got := r.take(nil, []nvml.ProcessUtilization{
		{PID: 1, Time: 900, SM: 50},   // before the last
		{PID: 1, Time: 1000, SM: 50},  // the last itself
		{PID: 1, Time: 1200, SM: 10},  //
		{PID: 2, Time: 1200, SM: 20},  // another process at the same time
		{PID: 1, Time: 1200, SM: 30},  // the same process again: the larger counts
		{PID: 1, Time: 1400, SM: 40},  //
		{PID: 2, Time: 1400, SM: 0},   // idle is a sample too
		{PID: 2, Time: 99999, SM: 99}, // in the future
	}, 5000)
	want := []frame.ProcessSample{{PID: 1, Time: 1200, SM: 30}, {PID: 2, Time: 1200, SM: 20}, {PID: 1, Time: 1400, SM: 40}, {PID: 2, Time: 1400}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if r.process != 1400 {
		t.Errorf("newest %d, want 1400: the one in the future must not count", r.process)
	}
	if again := r.take(nil, []nvml.ProcessUtilization{{PID: 1, Time: 1400, SM: 40}}, 5000); len(again) != 0 {
		t.Errorf("delivered twice: %+v", again)
	}
}

func TestWrapTime(t *testing.T) {
	for _, c := range []struct {
		link [2]int
		want time.Duration
	}{
		{[2]int{5, 16}, 68 * time.Millisecond}, {[2]int{4, 16}, 136 * time.Millisecond}, {[2]int{3, 8}, 545 * time.Millisecond},
		{[2]int{0, 0}, 35 * time.Millisecond}, {[2]int{99, 16}, 35 * time.Millisecond},
	} {
		if got := wrapTime(c.link).Round(time.Millisecond); got != c.want {
			t.Errorf("%v: %v, want %v", c.link, got, c.want)
		}
	}
}

func TestPCIeCounters(t *testing.T) {
	c := &pcieCounters{wrap: 80 * time.Millisecond}
	at := func(ms int) time.Time { return t0.Add(time.Duration(ms) * time.Millisecond) }
	read := func(ms int, rx, tx uint32) { c.add([2]uint32{rx, tx}, at(ms), at(ms+1)) }
	read(0, 4_294_967_000, 10)
	if c.drain() != nil {
		t.Error("a figure out of one reading")
	}
	read(40, 704, 30) // wrapped: 1000 bytes
	read(80, 1704, 30)
	read(180, 5, 5) // too late: may have wrapped any number of times
	read(220, 105, 6)
	got := c.drain()
	want := &frame.PCIe{Source: "fields", RX: frame.Some[uint64](2100), TX: frame.Some[uint64](21), Window: int64(120 * time.Millisecond)}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if c.drain() != nil {
		t.Error("delivered twice")
	}
}

func TestCallStats(t *testing.T) {
	var s callStats
	s.add("a", 5*time.Microsecond, nvml.Success)
	s.add("a", 2*time.Millisecond, nvml.ErrUnknown)
	s.add("a", 20*time.Second, nvml.ErrNotSupported)
	s.add("b", 0, nvml.ErrNotFound)
	got := s.drain()
	want := []frame.Call{
		{Name: "a", Count: 3, Errors: 1, Seconds: 20.002005, Buckets: []uint64{1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1}},
		{Name: "b", Count: 1, Buckets: []uint64{1}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	s.add("b", time.Microsecond, nvml.Success)
	if got := s.drain(); len(got) != 1 || got[0].Name != "b" || got[0].Count != 1 {
		t.Errorf("after a drain: %+v", got)
	}
}

func TestState(t *testing.T) {
	for _, c := range []struct {
		err   error
		state frame.State
		want  string
	}{
		{nvml.ErrGPUIsLost, frame.StateLost, "GPU_IS_LOST"},
		{nvml.ErrGPUNotFound, frame.StateLost, "GPU_NOT_FOUND"},
		{nvml.ErrResetRequired, frame.StateError, "RESET_REQUIRED"},
		{nvml.ErrUnknown, frame.StateError, "UNKNOWN"},
		{nvml.ErrNoPermission, frame.StateError, "NO_PERMISSION"},
		{fmt.Errorf("wrapped: %w", nvml.ErrGPUIsLost), frame.StateLost, "GPU_IS_LOST"},
		{nvml.ErrIRQIssue, frame.StateError, "IRQ_ISSUE"},
	} {
		if s, why := state(c.err); s != c.state || !strings.Contains(why, c.want) {
			t.Errorf("%v: %s %q", c.err, s, why)
		}
	}
}

func TestUnusable(t *testing.T) {
	for _, c := range []struct {
		err          error
		reason, name string
	}{
		{nvml.ErrDriverNotLoaded, "the NVIDIA driver is not loaded", "DRIVER_NOT_LOADED"},
		{nvml.ErrLibRMVersionMismatch, "different versions", "LIB_RM_VERSION_MISMATCH"},
		{nvml.ErrNoPermission, "no permission", "NO_PERMISSION"},
		{&nvml.NotFoundError{Tried: []nvml.Tried{{Path: "/a/lib", Err: errors.New("not there")}}}, "/a/lib (not there)", ""},
	} {
		l := Unusable(c.err).Library
		if l.OK || !strings.Contains(l.Reason, c.reason) || l.Error != c.name {
			t.Errorf("%v: %+v", c.err, l)
		}
	}
}

func TestEvent(t *testing.T) {
	for _, c := range []struct {
		in   nvml.Event
		want frame.Event
		ok   bool
	}{
		{nvml.Event{Type: nvml.EventXid, Data: 79, GPUInstance: -1, ComputeInstance: -1}, frame.Event{UUID: "u", Kind: "xid", Value: 79}, true},
		{nvml.Event{Type: nvml.EventDoubleBitECC, Data: 5, GPUInstance: 2, ComputeInstance: 0},
			frame.Event{UUID: "u", Kind: "ecc_double", GPUInst: frame.Some(2), CIInst: frame.Some(0)}, true},
		{nvml.Event{Type: 0x10, GPUInstance: -1, ComputeInstance: -1}, frame.Event{}, false},
	} {
		got, ok := event(c.in, "u")
		if ok != c.ok || ok && got != c.want {
			t.Errorf("%+v: %+v %v", c.in, got, ok)
		}
	}
}

// sysfs makes a tree with PCI devices: bus id to runtime status.
func sysfs(t *testing.T, status map[string]string) string {
	t.Helper()
	root := t.TempDir()
	write := func(id, name, text string) {
		file := filepath.Join(root, "bus/pci/devices", id, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for id, s := range status {
		write(id, "vendor", "0x10de")
		write(id, "class", "0x030200")
		write(id, "numa_node", "1")
		write(id, "power/runtime_status", s)
	}
	write("0000:00:01.0", "vendor", "0x8086")
	write("0000:00:01.0", "class", "0x030000")
	write("0000:0a:00.1", "vendor", "0x10de")
	write("0000:0a:00.1", "class", "0x040300") // the GPU's audio function
	write("0000:0a:00.1", "numa_node", "-1")
	return root
}

func TestSysfs(t *testing.T) {
	root := sysfs(t, map[string]string{"0000:0a:00.0": "suspended", "0000:05:00.0": "active"})
	if got, want := sysfsGPUs(root), []string{"0000:05:00.0", "0000:0a:00.0"}; !reflect.DeepEqual(got, want) {
		t.Errorf("GPUs %v, want %v", got, want)
	}
	if !suspended(root, "0000:0a:00.0") || suspended(root, "0000:05:00.0") || suspended(root, "") || suspended(root, "0000:77:00.0") {
		t.Error("suspended is wrong")
	}
	if n := numaNode(root, "0000:05:00.0"); n != frame.Some(1) {
		t.Errorf("NUMA node %+v", n)
	}
	if n := numaNode(root, "0000:0a:00.1"); n.OK {
		t.Errorf("NUMA node -1 is %+v", n)
	}
	if got := sysfsGPUs(filepath.Join(root, "nothing")); got != nil {
		t.Errorf("GPUs out of nothing: %v", got)
	}
}

func TestPIDNamespace(t *testing.T) {
	proc := t.TempDir()
	if inPIDNamespace(proc) {
		t.Error("an unreadable link is taken for a namespace")
	}
	if err := os.MkdirAll(filepath.Join(proc, "self/ns"), 0o755); err != nil {
		t.Fatal(err)
	}
	for link, want := range map[string]bool{"pid:[4026531836]": false, "pid:[4026532299]": true} {
		file := filepath.Join(proc, "self/ns/pid")
		os.Remove(file)
		if err := os.Symlink(link, file); err != nil {
			t.Fatal(err)
		}
		if got := inPIDNamespace(proc); got != want {
			t.Errorf("%s: %v", link, got)
		}
	}
}
