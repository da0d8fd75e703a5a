package poller

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"sort"
	"strings"
	"testing"
	"time"

	"gpu-exporter/nvml"
	"gpu-exporter/nvml/frame"
)

func copyOf(f *frame.Frame) *frame.Frame {
	b, err := json.Marshal(f)
	if err != nil {
		panic(err)
	}
	c := new(frame.Frame)
	if err := json.Unmarshal(b, c); err != nil {
		panic(err)
	}
	return c
}

// One tick of a device that has everything: each figure is where the scenario put it.
func TestReadings(t *testing.T) {
	h := newHost(t, h200(0, "process compute 100 1073741824", "process graphics 101 4096"))
	s := newStepper(t, h, Config{})
	var got *frame.Device
	var health, gpm, pcie bool
	s.steps(6, func(_ int, f *frame.Frame) {
		d := copyOf(f).Device
		if got == nil {
			got = d
		}
		health = health || d.Health != nil
		if d.GPM != nil {
			gpm = true
			if d.GPM.Window != int64(5*time.Second) || d.GPM.Ratio["sm_active"] != 0.4 || d.GPM.PCIeRX != frame.Some(200.0*(1<<20)) {
				t.Errorf("GPM %+v", d.GPM)
			}
		}
		if d.PCIe != nil {
			pcie = true
			if want := (frame.PCIe{Source: "gpm", Window: int64(5 * time.Second), RX: frame.Some[uint64](1000 << 20), TX: frame.Some[uint64](500 << 20)}); *d.PCIe != want {
				t.Errorf("PCIe %+v, want %+v", d.PCIe, want)
			}
		}
	})
	if !health || !gpm || !pcie {
		t.Errorf("health %v, GPM %v, PCIe %v within six ticks", health, gpm, pcie)
	}
	some, some64, someInt := frame.Some[float64], frame.Some[uint64], frame.Some[int]
	want := &frame.Device{
		Index: 0, UUID: "GPU-0", State: frame.StateOK,
		Info: &frame.Info{
			Name: "NVIDIA H200", PCIBusID: "0000:0a:00.0", Minor: someInt(7), Serial: "1650", VBIOS: "96.00.AF.00.01", Architecture: "hopper",
			CUDACapability: "9.0", MIGMode: frame.Some(false), MemoryTotal: some64(150754820096), PowerLimitMin: some(200), PowerLimitMax: some(700),
			PCIeGenMax: someInt(5), PCIeWidthMax: someInt(16), ClockMax: map[string]int{"graphics": 1980e6, "sm": 1980e6, "memory": 3201e6, "video": 1605e6},
			TempShutdown: some(92), TempSlowdown: some(89), PersistenceMode: frame.Some(true), ComputeMode: "default",
		},
		Load: &frame.Load{
			Utilization: some(42), MemoryBandwidth: some(7), MemoryUsed: some64(2147483648), MemoryFree: some64(150754820096 - 2147483648 - 644939776),
			MemoryTotal: some64(150754820096), MemoryReserved: some64(644939776), Temperature: some(38), MemoryTemp: some(45),
			Power: some(120.5), PowerLimit: some(700), PState: someInt(0), Clocks: map[string]int{"graphics": 1980e6, "sm": 1980e6, "memory": 3201e6, "video": 1605e6},
			Throttle: some64(4), Encoder: some(0), Decoder: some(1), JPEG: some(2), OFA: some(3),
		},
		Processes: &frame.Processes{List: []frame.Process{
			{PID: 100, MemoryUsed: some64(1 << 30), Compute: true}, {PID: 101, MemoryUsed: some64(4096), Graphics: true}}},
		Samples: got.Samples, Energy: some(5000),
		Health: &frame.Health{
			ECC:          map[string]uint64{"volatile/corrected": 1, "volatile/uncorrected": 2, "aggregate/corrected": 3, "aggregate/uncorrected": 4},
			RemappedRows: map[string]uint64{"corrected": 5, "uncorrected": 6}, RemapPending: frame.Some(true), RemapFailure: frame.Some(false),
			ThrottleSeconds: map[string]float64{"sw_power_cap": 1.5}, PCIeGen: someInt(5), PCIeWidth: someInt(16), PCIeReplays: some64(8),
			EncoderSessions: someInt(0), BAR1Used: some64(1048576),
		},
	}
	if a, b := asJSON(got), asJSON(want); a != b {
		t.Errorf("got  %s\nwant %s", a, b)
	}
}

func asJSON(v any) string {
	b, _ := json.Marshal(v)
	return string(b)
}

// Each group is read at its own rate: the dear calls rarely, the process list every second.
func TestTiers(t *testing.T) {
	h := newHost(t, h200(0))
	s := newStepper(t, h, Config{})
	seen := map[string]int{}
	s.steps(60, func(_ int, f *frame.Frame) {
		for name, present := range map[string]bool{"info": f.Device.Info != nil, "load": f.Device.Load != nil, "processes": f.Device.Processes != nil,
			"samples": f.Device.Samples != nil, "energy": f.Device.Energy.OK, "health": f.Device.Health != nil, "gpm": f.Device.GPM != nil, "calls": f.Calls != nil} {
			if present {
				seen[name]++
			}
		}
	})
	if want := map[string]int{"info": 1, "load": 60, "processes": 60, "samples": 40, "energy": 6, "health": 6, "gpm": 11, "calls": 6}; !reflect.DeepEqual(seen, want) {
		t.Errorf("groups in 60 s: %v, want %v", seen, want)
	}
	calls := h.calls(0)
	for name, want := range map[string]int{
		"nvmlDeviceGetTotalEnergyConsumption": 6, "nvmlDeviceGetProcessUtilization": 20, "nvmlDeviceGetSamples": 36,
		"nvmlGpmSampleGet": 12, "nvmlDeviceGetPcieThroughput": 0, "nvmlDeviceGetTemperature": 60,
		"nvmlDeviceGetComputeRunningProcesses_v3": 60, "nvmlDeviceGetGraphicsRunningProcesses_v3": 60,
		"nvmlDeviceGetMemoryInfo_v2": 61, "nvmlDeviceGetName": 1, "nvmlDeviceGetHandleByIndex_v2": 1, "nvmlDeviceGetTotalEccErrors": 24,
		"nvmlDeviceGetNumFans": 1, "nvmlDeviceGetNvLinkState": 1, // not supported: asked once
	} {
		if calls[name] != want {
			t.Errorf("%s: %d calls in 60 s, want %d", name, calls[name], want)
		}
	}
}

// What a device does not support is absent, and not asked for again before ten minutes have passed.
func TestNotSupportedOnce(t *testing.T) {
	h := newHost(t, plain(0))
	s := newStepper(t, h, Config{})
	var last string
	s.steps(590, func(_ int, f *frame.Frame) { last = asJSON(f.Device) })
	if want := `{"index":0,"uuid":"GPU-0","state":"ok","load":{"utilization":1,"memory_bandwidth":1,"memory_used":1000,"memory_free":999000,` +
		`"memory_total":1000000,"memory_reserved":0},"processes":{"list":[]}}`; last != want {
		t.Errorf("got  %s\nwant %s", last, want)
	}
	names := []string{"nvmlDeviceGetTemperature", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetProcessUtilization", "nvmlDeviceGetTotalEnergyConsumption",
		"nvmlDeviceGetPerformanceState", "nvmlDeviceGetEncoderUtilization", "nvmlGpmQueryDeviceSupport", "nvmlDeviceGetNumFans", "nvmlDeviceGetRemappedRows"}
	calls := h.calls(0)
	for _, name := range names {
		if calls[name] != 1 {
			t.Errorf("%s: %d calls in ten minutes", name, calls[name])
		}
	}
	s.steps(20, nil)
	calls = h.calls(0)
	for _, name := range names {
		if calls[name] != 2 {
			t.Errorf("%s: %d calls after ten minutes", name, calls[name])
		}
	}
}

// Over three minutes, every sample of each of two devices is delivered exactly once, in contiguous windows, each device by its own clock. The
// driver keeps 14 s of utilisation and 2.4 s of power, as measured, gives old samples again, and garbage among the new ones.
func TestSamplesExactlyOnce(t *testing.T) {
	t.Parallel()
	start := time.Now().Truncate(time.Second)
	const length = 180 * time.Second
	type line struct {
		at   time.Duration
		text string
	}
	want := [2]map[string]int{{}, {}}
	var slow, fast [2][]line
	for g := range 2 {
		// The two devices sample at different moments; one shared memory of the last timestamp would lose some of the later one's.
		offset := time.Duration(30+g*97) * time.Millisecond
		for at := offset; at < length; at += 200 * time.Millisecond {
			µs := start.Add(at).UnixMicro()
			for pid := 100; pid < 102; pid++ {
				sm := int(at/time.Millisecond)/200%97 + g
				slow[g] = append(slow[g], line{at, fmt.Sprintf("psample %d %d %d 1 0 0", pid, µs, sm)})
				want[g][fmt.Sprint("process ", pid, " ", µs, " ", sm)]++
			}
			slow[g] = append(slow[g], line{at, fmt.Sprintf("sample 1 %d %d", µs, int(at/time.Second)%100)})
			want[g][fmt.Sprint("util ", µs, " ", int(at/time.Second)%100)]++
		}
		for at := offset; at < length; at += 20 * time.Millisecond {
			µs := start.Add(at).UnixMicro()
			fast[g] = append(fast[g], line{at, fmt.Sprintf("sample 0 %d %d", µs, 1000*(1+int(at/time.Second)))})
			want[g][fmt.Sprint("power ", µs, " ", 1+int(at/time.Second))]++
		}
	}
	host := func(now time.Duration) []string {
		var gpus []string
		for g := range 2 {
			lines := []string{"stale_samples 1"}
			for _, ring := range []struct {
				lines []line
				keeps time.Duration
			}{{slow[g], 14 * time.Second}, {fast[g], 2400 * time.Millisecond}} {
				for _, l := range ring.lines {
					if l.at <= now && l.at > now-ring.keeps {
						lines = append(lines, l.text)
					}
				}
			}
			µs := start.Add(now).UnixMicro()
			for _, garbage := range []string{"0 %d 50 0 0 0", "100 %d 4294967295 0 0 0", "100 %d 101 0 0 0", "4294967295 %d 50 0 0 0"} {
				lines = append(lines, "psample "+fmt.Sprintf(garbage, µs))
			}
			lines = append(lines, "psample 100 0 50 0 0 0", "psample 100 18446744073709551615 50 0 0 0", fmt.Sprintf("psample 100 %d 50 0 0 0", µs+60e6),
				fmt.Sprintf("sample 1 %d 101", µs), fmt.Sprintf("sample 0 %d 4294967295", µs), fmt.Sprintf("sample 0 %d 7", µs+60e6))
			gpus = append(gpus, h200(g, lines...))
		}
		return gpus
	}
	h := newHost(t, host(0)...)
	s := newStepper(t, h, Config{})
	s.now = start
	got := [2]map[string]int{{}, {}}
	var until [2]int64
	see := func(i int, f *frame.Frame) {
		sm := f.Device.Samples
		if sm == nil {
			return
		}
		for _, v := range sm.Utilization {
			got[i][fmt.Sprint("util ", v.Time, " ", v.Value)]++
		}
		for _, v := range sm.Power {
			got[i][fmt.Sprint("power ", v.Time, " ", v.Value)]++
		}
		if sm.ProcessUntil == 0 {
			return // not their turn
		}
		if until[i] != 0 && sm.ProcessSince != until[i] {
			t.Errorf("device %d: a window from %d after one to %d", i, sm.ProcessSince, until[i])
		}
		if sm.ProcessUntil < sm.ProcessSince {
			t.Errorf("device %d: window %d to %d", i, sm.ProcessSince, sm.ProcessUntil)
		}
		for _, p := range sm.Process {
			if p.Time <= sm.ProcessSince || p.Time > sm.ProcessUntil {
				t.Errorf("device %d: sample %d outside its window %d to %d", i, p.Time, sm.ProcessSince, sm.ProcessUntil)
			}
			got[i][fmt.Sprint("process ", p.PID, " ", p.Time, " ", p.SM)]++
		}
		until[i] = sm.ProcessUntil
	}
	for now := time.Duration(0); now < length+12*time.Second; now += time.Second {
		h.set(host(now)...)
		s.steps(1, see)
	}
	for i := range 2 {
		var wrong []string
		for k, n := range got[i] {
			if n != want[i][k] {
				wrong = append(wrong, fmt.Sprintf("%s: %d times, want %d", k, n, want[i][k]))
			}
		}
		for k := range want[i] {
			if got[i][k] == 0 {
				wrong = append(wrong, k+": lost")
			}
		}
		if len(wrong) > 0 {
			sort.Strings(wrong)
			t.Errorf("device %d: %d of %d samples wrong: %s …", i, len(wrong), len(want[i]), strings.Join(wrong[:min(5, len(wrong))], "; "))
		}
	}
}

// A wall clock that is set back an hour does not silence the rings for an hour.
func TestClockSetBack(t *testing.T) {
	start := time.Now().Truncate(time.Second)
	back := start.Add(-time.Hour)
	h := newHost(t, h200(0, fmt.Sprintf("psample 9 %d 50 0 0 0", start.Add(1500*time.Millisecond).UnixMicro()), "stale_samples 1",
		fmt.Sprintf("psample 9 %d 60 0 0 0", back.Add(3500*time.Millisecond).UnixMicro())))
	s := newStepper(t, h, Config{})
	s.now = start
	var got []float64
	see := func(_ int, f *frame.Frame) {
		if f.Device.Samples != nil {
			for _, p := range f.Device.Samples.Process {
				got = append(got, p.SM)
			}
		}
	}
	s.steps(4, see)
	s.now = back
	for _, d := range s.devices {
		d.processAt = time.Time{} // the schedule itself runs by the monotonic clock
	}
	s.steps(8, see)
	if !reflect.DeepEqual(got, []float64{50, 60}) {
		t.Errorf("samples %v, want 50 and 60", got)
	}
}

// In real time: a process that is busy for a part of each second has contiguous samples that add up to it.
func TestRealTimeSamples(t *testing.T) {
	t.Parallel()
	h := newHost(t, h200(0, "busy 100 100 10 0 0", "process compute 100 1000"))
	out, _ := start(t, h, Config{Interval: 50 * time.Millisecond, Samples: 300 * time.Millisecond})
	frames := out.wait(t, "ten process samples", func(fs []*frame.Frame) bool { return len(processSamples(fs)) >= 10 })
	var before int64
	for _, p := range processSamples(frames) {
		if before != 0 && p.Time != before+200_000 {
			t.Errorf("sample at %d after one at %d", p.Time, before)
		}
		if before = p.Time; p.SM != 100 || p.PID != 100 {
			t.Errorf("sample %+v", p)
		}
	}
}

func processSamples(fs []*frame.Frame) (s []frame.ProcessSample) {
	for _, f := range fs {
		if f.Device != nil && f.Device.Samples != nil {
			s = append(s, f.Device.Samples.Process...)
		}
	}
	return s
}

// One device of eight hangs: it is reported with the call's name, at every watch, and the other seven go on; when the call returns, so does the device.
func TestOneHungOfEight(t *testing.T) {
	t.Parallel()
	var gpus []string
	for i := range 8 {
		gpus = append(gpus, h200(i))
	}
	h := newHost(t, gpus...)
	out, _ := start(t, h, Config{Interval: 20 * time.Millisecond, Deadline: 100 * time.Millisecond, Samples: time.Minute})
	out.wait(t, "all devices", func(fs []*frame.Frame) bool { return len(states(fs)) == 8 })
	h.set(append(gpus, "fault nvmlDeviceGetTemperature 3 hang")...)
	out.wait(t, "the hung state", func(fs []*frame.Frame) bool { return states(fs)[3].State == frame.StateHung })
	n := len(out.all())
	fs := out.wait(t, "ten more ticks of the others, and three reports", func(fs []*frame.Frame) bool {
		for i := range 8 {
			if i != 3 && count(fs[n:], i) < 10 {
				return false
			}
		}
		return count(fs[n:], 3) >= 3
	})
	d := states(fs)[3]
	if d.State != frame.StateHung || d.UUID != "GPU-3" || !strings.Contains(d.Reason, "nvmlDeviceGetTemperature") || d.Load != nil {
		t.Errorf("hung device: %s", asJSON(d))
	}
	for _, f := range fs[n:] {
		if f.Device != nil && (f.Device.State == frame.StateHung) != (f.Device.Index == 3) {
			t.Fatalf("state of device %d: %s", f.Device.Index, f.Device.State)
		}
	}
	h.set(gpus...)
	out.wait(t, "the device back", func(fs []*frame.Frame) bool { return states(fs)[3].State == frame.StateOK })
}

// states returns the latest frame of each device.
func states(fs []*frame.Frame) map[int]*frame.Device {
	m := map[int]*frame.Device{}
	for _, f := range fs {
		if f.Device != nil {
			m[f.Device.Index] = f.Device
		}
	}
	return m
}

func count(fs []*frame.Frame, index int) (n int) {
	for _, f := range fs {
		if f.Device != nil && f.Device.Index == index {
			n++
		}
	}
	return n
}

// A GPU that falls off the bus is lost, with a reason, hardly asked, and comes back by itself; the other one does not notice.
func TestLost(t *testing.T) {
	h := newHost(t, h200(0), h200(1))
	s := newStepper(t, h, Config{})
	s.steps(5, nil)
	h.set(h200(0), h200(1), "fault * 1 return 15")
	h.forgetCalls()
	s.steps(60, func(i int, f *frame.Frame) {
		want := []frame.State{frame.StateOK, frame.StateLost}[i]
		if f.Device.State != want || f.Device.UUID != fmt.Sprint("GPU-", i) {
			t.Fatalf("device %d: %s", i, asJSON(f.Device))
		}
		if i == 1 && (!strings.Contains(f.Device.Reason, "fallen off the bus") || f.Device.Load != nil || f.Device.Info != nil) {
			t.Fatalf("lost device: %s", asJSON(f.Device))
		}
	})
	if calls := h.calls(1); len(calls) > 2 || calls["nvmlDeviceGetHandleByIndex_v2"] > 2 {
		t.Errorf("calls on a lost GPU in a minute: %v", calls)
	}
	h.set(h200(0), h200(1))
	var info bool
	var last *frame.Device
	s.steps(31, func(i int, f *frame.Frame) {
		if i == 1 {
			last = f.Device
			info = info || f.Device.Info != nil
		}
	})
	if last.State != frame.StateOK || last.Load == nil || !info {
		t.Errorf("after it came back: %s, info %v", asJSON(last), info)
	}
}

// What one failing call means: its own field's absence, unless none works.
func TestUnknown(t *testing.T) {
	h := newHost(t, h200(0), "fault nvmlDeviceGetTemperature 0 return 999")
	s := newStepper(t, h, Config{})
	s.steps(25, func(_ int, f *frame.Frame) {
		d := f.Device
		if d.State != frame.StateOK || d.Load.Temperature.OK || !d.Load.Power.OK {
			t.Fatalf("one call fails: %s", asJSON(d))
		}
	})
	if n := h.calls(0)["nvmlDeviceGetTemperature"]; n != 3 {
		t.Errorf("%d calls of the failing function in 25 s, want 3", n)
	}
	h.set(h200(0), "fault * 0 return 999")
	s.steps(15, func(_ int, f *frame.Frame) {
		if d := f.Device; d.State != frame.StateError || !strings.Contains(d.Reason, "UNKNOWN") || d.Load != nil {
			t.Fatalf("every call fails: %s", asJSON(d))
		}
	})
	h.set(h200(0))
	var last frame.State
	s.steps(12, func(_ int, f *frame.Frame) { last = f.Device.State })
	if last != frame.StateOK {
		t.Errorf("after that: %s", last)
	}
}

// A reset that is due, and a device file that may not be opened.
func TestDeviceErrors(t *testing.T) {
	for code, want := range map[int]string{16: "RESET_REQUIRED", 4: "NO_PERMISSION", 19: "IN_USE"} {
		h := newHost(t, h200(0), fmt.Sprintf("fault nvmlDeviceGetHandleByIndex_v2 0 return %d", code))
		s := newStepper(t, h, Config{})
		s.steps(3, func(_ int, f *frame.Frame) {
			if d := f.Device; d.State != frame.StateError || !strings.Contains(d.Reason, want) {
				t.Errorf("%d: %s", code, asJSON(d))
			}
		})
	}
}

// A driver that goes away under the worker ends it, with a reason.
func TestDriverGone(t *testing.T) {
	t.Parallel()
	h := newHost(t, h200(0))
	out, result := start(t, h, Config{Interval: 20 * time.Millisecond})
	out.wait(t, "frames", func(fs []*frame.Frame) bool { return len(states(fs)) == 1 })
	h.set(h200(0), "fault * * return 9")
	select {
	case err := <-result:
		if !errors.Is(err, ErrUnusable) || !errors.Is(err, nvml.ErrDriverNotLoaded) {
			t.Errorf("Run returned %v", err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("Run goes on without a driver")
	}
	fs := out.all()
	if l := fs[len(fs)-1].Library; l == nil || l.OK || l.Error != "DRIVER_NOT_LOADED" || l.Reason != "the NVIDIA driver is not loaded" {
		t.Errorf("last frame %s", asJSON(fs[len(fs)-1]))
	}
}

// Each way in which nvmlInit fails is one library frame and the end.
func TestInitFails(t *testing.T) {
	for code, want := range map[int]string{9: "DRIVER_NOT_LOADED", 18: "LIB_RM_VERSION_MISMATCH", 4: "NO_PERMISSION", 999: "UNKNOWN"} {
		h := newHost(t, h200(0), fmt.Sprintf("fault nvmlInit_v2 * return %d", code))
		out := &sink{}
		err := Run(t.Context(), h.lib, Config{SysFS: t.TempDir()}, out.emit)
		fs := out.all()
		if !errors.Is(err, ErrUnusable) || len(fs) != 1 || fs[0].Library == nil || fs[0].Library.OK || fs[0].Library.Error != want || fs[0].Library.Reason == "" {
			t.Errorf("%d: %v, frames %s", code, err, asJSON(fs))
		}
	}
}

// The library frame of a good start.
func TestLibrary(t *testing.T) {
	h := newHost(t, h200(0), h200(1))
	out := &sink{}
	if err := Run(t.Context(), h.lib, Config{SysFS: t.TempDir(), Once: true}, out.emit); err != nil {
		t.Fatal(err)
	}
	fs := out.all()
	want := frame.Library{OK: true, Path: h.path, DriverVersion: "580.159.04", NVMLVersion: "13.580.159.04", CUDAVersion: "13.0", Devices: 2,
		PIDNamespace: inPIDNamespace("/proc")}
	if len(fs) != 3 || fs[0].Library == nil || *fs[0].Library != want || len(states(fs)) != 2 {
		t.Errorf("frames of one round: %s", asJSON(fs))
	}
	for _, f := range fs {
		if f.Version != frame.Version || time.Since(f.When()) > time.Minute {
			t.Errorf("frame %s", asJSON(f))
		}
	}
}

// A host without a GPU keeps saying so: silence would be taken for a hang.
func TestNoDevices(t *testing.T) {
	h := newHost(t)
	p := newPoller(h.lib, Config{SysFS: t.TempDir()}, func(*frame.Frame) {})
	out := &sink{}
	p.emit = out.emit
	if err := p.init(); err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	for range 30 {
		now = now.Add(time.Second)
		p.cfg.now = func() time.Time { return now }
		p.watch(now)
	}
	if n := len(out.all()); n < 7 || n > 9 {
		t.Errorf("%d frames in 30 s, want one every 4 s", n)
	}
}

// A suspended GPU is not touched by a single call, and read again when it is awake.
func TestAsleep(t *testing.T) {
	h := newHost(t, h200(0), h200(1))
	root := sysfs(t, map[string]string{"0000:0a:00.0": "active", "0000:0b:00.0": "suspended"})
	s := newStepper(t, h, Config{SysFS: root})
	see := func(i int, f *frame.Frame) {
		want := []frame.State{frame.StateOK, frame.StateAsleep}[i]
		if f.Device.State != want {
			t.Fatalf("device %d: %s", i, asJSON(f.Device))
		}
	}
	s.steps(20, see)
	if calls := h.calls(1); len(calls) != 0 {
		t.Errorf("calls on a GPU that was asleep from the start: %v", calls)
	}
	status := filepath.Join(root, "bus/pci/devices/0000:0b:00.0/power/runtime_status")
	if err := os.WriteFile(status, []byte("active\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	s.steps(5, func(i int, f *frame.Frame) {
		if f.Device.State != frame.StateOK {
			t.Fatalf("awake: %s", asJSON(f.Device))
		}
	})
	if err := os.WriteFile(status, []byte("suspended\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	h.forgetCalls()
	s.steps(20, see)
	if calls := h.calls(1); len(calls) != 0 {
		t.Errorf("calls on a GPU that fell asleep: %v", calls)
	}
}

// While every GPU is suspended NVML is not even started, and the worker says that it lives.
func TestAllAsleep(t *testing.T) {
	t.Parallel()
	h := newHost(t, h200(0))
	root := sysfs(t, map[string]string{"0000:0a:00.0": "suspended"})
	out, _ := start(t, h, Config{SysFS: root, Interval: 20 * time.Millisecond})
	fs := out.wait(t, "the library frame", func(fs []*frame.Frame) bool { return len(fs) > 0 })
	if l := fs[0].Library; l == nil || l.OK || !strings.Contains(l.Reason, "suspended") {
		t.Errorf("frame %s", asJSON(fs[0]))
	}
	time.Sleep(100 * time.Millisecond)
	if calls := h.calls(-1); len(calls) != 0 {
		t.Errorf("calls while every GPU sleeps: %v", calls)
	}
	if err := os.WriteFile(filepath.Join(root, "bus/pci/devices/0000:0a:00.0/power/runtime_status"), []byte("active\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	out.wait(t, "the device", func(fs []*frame.Frame) bool { d := states(fs)[0]; return d != nil && d.State == frame.StateOK })
}

// A process in both lists, a PID named twice, PID 0 and a sentinel for the memory.
func TestProcesses(t *testing.T) {
	h := newHost(t, h200(0, "process compute 100 1000", "process graphics 100 900", "process compute 101 -1", "process compute 102 50", "process compute 102 70",
		"process compute 0 5", "process graphics 103 1"))
	s := newStepper(t, h, Config{})
	s.steps(2, func(_ int, f *frame.Frame) {
		want := []frame.Process{
			{PID: 100, MemoryUsed: frame.Some[uint64](1000), Compute: true, Graphics: true}, {PID: 101, Compute: true},
			{PID: 102, MemoryUsed: frame.Some[uint64](70), Compute: true}, {PID: 103, MemoryUsed: frame.Some[uint64](1), Graphics: true}}
		if got := f.Device.Processes.List; !reflect.DeepEqual(got, want) {
			t.Errorf("got  %s\nwant %s", asJSON(got), asJSON(want))
		}
	})
}

// MIG devices are listed with memory and processes, and follow what the administrator does to them.
func TestMIG(t *testing.T) {
	mig := func(gi int) string {
		return fmt.Sprintf("mig\nuuid MIG-%d\ngpu_instance %d\ncompute_instance 0\nattributes 16 1 1 18000\nmemory 19000000000 0 %d\n", gi, gi, 1000*gi)
	}
	on := strings.Replace(h200(0), "mig_mode 0", "mig_mode 1", 1)
	h := newHost(t, on+"process compute 100 500 1 0\nprocess compute 101 600 2 0\n"+mig(1)+mig(2))
	s := newStepper(t, h, Config{})
	var got []frame.MIG
	s.steps(3, func(_ int, f *frame.Frame) { got = f.Device.MIG })
	want := []frame.MIG{}
	for gi := 1; gi <= 2; gi++ {
		want = append(want, frame.MIG{UUID: fmt.Sprint("MIG-", gi), GPUInst: gi, CIInst: 0, Profile: "1g.18gb", MemoryUsed: frame.Some(uint64(1000 * gi)),
			MemoryTotal: frame.Some[uint64](19000000000), SMCount: frame.Some(16), Processes: []frame.Process{
				{PID: 99 + gi, MemoryUsed: frame.Some(uint64(400 + 100*gi)), Compute: true, GPUInst: frame.Some(gi), CIInst: frame.Some(0)}}})
	}
	if a, b := asJSON(got), asJSON(want); a != b {
		t.Errorf("got  %s\nwant %s", a, b)
	}
	h.set(on + mig(1))
	s.steps(12, func(_ int, f *frame.Frame) { got = f.Device.MIG })
	if len(got) != 1 || got[0].UUID != "MIG-1" || got[0].Processes != nil {
		t.Errorf("after one was destroyed: %s", asJSON(got))
	}
}

// Without GPM, the byte counters give every byte although they wrap, if they may be read often enough; else the throughput calls are made rarely.
func TestPCIeWithoutGPM(t *testing.T) {
	const rate = 6_000_000_000 // bytes a second: wraps every 716 ms
	device := plain(0, "pcie_generation_max 4", "pcie_width_max 16", "pcie_throughput 1000 2000", fmt.Sprintf("field 198 0 1 0 %d", int64(rate)), "field 197 0 1 0 1000000")
	t.Run("fields", func(t *testing.T) {
		t.Parallel()
		h := newHost(t, device)
		out, _ := start(t, h, Config{Interval: 100 * time.Millisecond, PCIeBudget: 1})
		fs := out.wait(t, "two seconds of traffic", func(fs []*frame.Frame) bool { _, _, w := traffic(fs, "fields"); return w > 2 })
		rx, tx, window := traffic(fs, "fields")
		if r := rx / window / rate; r < 0.97 || r > 1.03 {
			t.Errorf("received %.0f bytes/s, want %d", rx/window, int64(rate))
		}
		if r := tx / window / 1e6; r < 0.97 || r > 1.03 {
			t.Errorf("sent %.0f bytes/s, want 1e6", tx/window)
		}
		if n := h.calls(0)["nvmlDeviceGetPcieThroughput"]; n != 0 {
			t.Errorf("%d blocking calls", n)
		}
	})
	t.Run("too dear", func(t *testing.T) {
		h := newHost(t, device, "fault nvmlDeviceGetFieldValues 0 delay 1")
		s := newStepper(t, h, Config{})
		var all []*frame.Frame
		s.steps(31, func(_ int, f *frame.Frame) { all = append(all, copyOf(f)) })
		rx, tx, window := traffic(all, "throughput")
		if window != 30 || rx != 30*2000*1024 || tx != 30*1000*1024 {
			t.Errorf("%v received, %v sent in %v s", rx, tx, window)
		}
		if n := h.calls(0)["nvmlDeviceGetPcieThroughput"]; n != 14 {
			t.Errorf("%d blocking calls in 31 s, want 14", n)
		}
	})
}

func traffic(fs []*frame.Frame, source string) (rx, tx, window float64) {
	for _, f := range fs {
		if f.Device != nil && f.Device.PCIe != nil && f.Device.PCIe.Source == source {
			rx += float64(f.Device.PCIe.RX.V)
			tx += float64(f.Device.PCIe.TX.V)
			window += float64(f.Device.PCIe.Window) / 1e9
		}
	}
	return rx, tx, window
}

// Only active links are listed, with bytes from whichever counters the device has, and errors by kind.
func TestNVLink(t *testing.T) {
	h := newHost(t, h200(0, "nvlink 0 1 1 2 3 4", "nvlink 1 0 0 0 0 0", "nvlink 2 1 0 0 0 0", "field 139 0 2 10", "field 138 0 2 20", "field 204 2 2 5000", "field 202 2 2 6000"))
	s := newStepper(t, h, Config{})
	var got []frame.NVLink
	s.steps(1, func(_ int, f *frame.Frame) { got = f.Device.NVLink })
	want := []frame.NVLink{
		{Link: 0, RX: frame.Some[uint64](10240), TX: frame.Some[uint64](20480), Errors: map[string]uint64{"replay": 1, "recovery": 2, "crc_flit": 3, "crc_data": 4}},
		{Link: 2, RX: frame.Some[uint64](5000), TX: frame.Some[uint64](6000), Errors: map[string]uint64{"replay": 0, "recovery": 0, "crc_flit": 0, "crc_data": 0}}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %s, want %s", asJSON(got), asJSON(want))
	}
}

// An Xid reaches the output once, under its device; what happened before the start does not.
func TestEvents(t *testing.T) {
	t.Parallel()
	h := newHost(t, h200(0), h200(1, "event 8 13"))
	out, _ := start(t, h, Config{Interval: 20 * time.Millisecond})
	for deadline := time.Now().Add(10 * time.Second); h.calls(-1)["nvmlEventSetWait_v2"] < 2; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("nobody waits for events")
		}
	}
	h.set(h200(0, "event 8 79"), h200(1, "event 8 13", "event 8 31 2 0"))
	out.wait(t, "two events", func(fs []*frame.Frame) bool { return len(events(fs)) >= 2 })
	time.Sleep(50 * time.Millisecond)
	got := events(out.all())
	sort.Slice(got, func(i, j int) bool { return got[i].UUID < got[j].UUID })
	for i := range got {
		if time.Since(time.Unix(0, got[i].Time)) > time.Minute {
			t.Errorf("time %d", got[i].Time)
		}
		got[i].Time = 0
	}
	want := []frame.Event{{UUID: "GPU-0", Kind: "xid", Value: 79}, {UUID: "GPU-1", Kind: "xid", Value: 31, GPUInst: frame.Some(2), CIInst: frame.Some(0)}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %s, want %s", asJSON(got), asJSON(want))
	}
}

func events(fs []*frame.Frame) (e []frame.Event) {
	for _, f := range fs {
		e = append(e, f.Events...)
	}
	return e
}

// Short GPM readings come in order, about as often as asked for.
func TestFastGPM(t *testing.T) {
	t.Parallel()
	h := newHost(t, h200(0))
	out, _ := start(t, h, Config{Interval: 50 * time.Millisecond, GPM: 100 * time.Millisecond, FastGPM: 10 * time.Millisecond})
	fs := out.wait(t, "twenty readings", func(fs []*frame.Frame) bool { return len(fast(fs)) >= 20 })
	var before int64
	for _, s := range fast(fs) {
		if s.Value != 0.4 || s.Time <= before {
			t.Errorf("%+v after %d", s, before)
		}
		before = s.Time
	}
}

func fast(fs []*frame.Frame) (s []frame.Sample) {
	for _, f := range fs {
		if f.Device != nil && f.Device.GPM != nil {
			s = append(s, f.Device.GPM.SMActive...)
		}
	}
	return s
}

// The statistics of the calls: all that were made, by function.
func TestCalls(t *testing.T) {
	h := newHost(t, h200(0), "fault nvmlDeviceGetPowerUsage 0 return 999")
	s := newStepper(t, h, Config{})
	sum := map[string]frame.Call{}
	s.steps(21, func(_ int, f *frame.Frame) {
		for _, c := range copyOf(f).Calls {
			n := sum[c.Name]
			sum[c.Name] = frame.Call{Count: n.Count + c.Count, Errors: n.Errors + c.Errors, Seconds: n.Seconds + c.Seconds}
			var total uint64
			for _, b := range c.Buckets {
				total += b
			}
			if total != c.Count || c.Count == 0 {
				t.Errorf("buckets of %+v", c)
			}
		}
	})
	calls := h.calls(0)
	for _, name := range []string{"nvmlDeviceGetTemperature", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetProcessUtilization", "nvmlDeviceGetNumFans"} {
		if got := sum[name]; got.Count != uint64(calls[name]) || got.Seconds <= 0 {
			t.Errorf("%s: %+v, made %d", name, got, calls[name])
		}
	}
	if got := sum["nvmlDeviceGetPowerUsage"]; got.Errors != got.Count {
		t.Errorf("errors: %+v", got)
	}
	if got := sum["nvmlDeviceGetNumFans"]; got.Errors != 0 {
		t.Errorf("not supported is no error: %+v", got)
	}
}

// A tick in the steady state hardly allocates: what remains is what purego and the operating system's file need.
func TestSteadyTickAllocates(t *testing.T) {
	h := newHost(t, h200(0, "process compute 100 1000", "process compute 101 1000"))
	s := newStepper(t, h, Config{Info: time.Hour, Health: time.Hour, GPM: time.Hour, Energy: time.Hour})
	enc := json.NewEncoder(io.Discard)
	s.steps(3, func(_ int, f *frame.Frame) { _ = enc.Encode(f) })
	reading := testing.AllocsPerRun(50, func() { s.steps(1, nil) })
	writing := testing.AllocsPerRun(50, func() { s.steps(1, func(_ int, f *frame.Frame) { _ = enc.Encode(f) }) }) - reading
	t.Logf("%v allocations to read one device, %v to write its frame", reading, writing)
	if reading > 60 || writing > 150 {
		t.Errorf("%v allocations to read one device, %v to write its frame", reading, writing)
	}
}
