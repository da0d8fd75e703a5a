package nvml

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"gpu-exporter/nvml/fake"
)

func TestEveryQuery(t *testing.T) {
	_, l := host(t, fake.Scenario{GPUs: []fake.GPU{busyH200()}})
	d := device(t, l, 0)
	for _, q := range queries() {
		if got, err := q.call(d); err != nil || got != q.want {
			t.Errorf("%s: got %v, %v, want %v", q.name, got, err, q.want)
		}
	}
	for _, s := range []struct {
		name string
		call func() (string, error)
		want string
	}{{"driver", l.SystemGetDriverVersion, "580.159.04"}, {"nvml", l.SystemGetNVMLVersion, "13.580.159.04"}, {"cuda", l.SystemGetCudaDriverVersion, "13.0"}} {
		if got, err := s.call(); err != nil || got != s.want {
			t.Errorf("%s: got %q, %v, want %q", s.name, got, err, s.want)
		}
	}
	if got := l.Missing(); len(got) != 0 {
		t.Errorf("functions that the fake library lacks: %v", got)
	}
}

// TestUnsupported asks a device that supports nothing, and a driver that has nothing.
func TestUnsupported(t *testing.T) {
	_, l := host(t, fake.Scenario{GPUs: []fake.GPU{{}}})
	d := device(t, l, 0)
	for _, q := range queries() {
		switch q.name {
		case "utilization", "gpm support": // the fake answers these from its load
			continue
		}
		if got, err := q.call(d); !errors.Is(err, ErrNotSupported) {
			t.Errorf("%s of a bare device: got %v, %v, want ErrNotSupported", q.name, got, err)
		}
	}
}

// TestMissingSymbols binds a library that has nothing but what it takes to open a device: each other call is ErrFunctionNotFound.
func TestMissingSymbols(t *testing.T) {
	needed := []string{"nvmlInit_v2", "nvmlShutdown", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2"}
	var without []string
	for _, s := range Symbols() {
		if !slices.Contains(needed, s) {
			without = append(without, s)
		}
	}
	_, l := host(t, fake.Scenario{GPUs: []fake.GPU{busyH200()}}, without...)
	d := device(t, l, 0)
	for _, q := range queries() {
		if got, err := q.call(d); !errors.Is(err, ErrFunctionNotFound) {
			t.Errorf("%s: got %v, %v, want ErrFunctionNotFound", q.name, got, err)
		}
	}
	for name, call := range map[string]func() error{
		"compute processes":  func() error { _, err := d.GetComputeRunningProcesses(nil); return err },
		"graphics processes": func() error { _, err := d.GetGraphicsRunningProcesses(nil); return err },
		"process samples":    func() error { _, err := d.GetProcessUtilization(nil, 0); return err },
		"samples":            func() error { _, err := d.GetSamples(nil, SamplesPower, 0); return err },
		"fields":             func() error { return d.GetFieldValues(make([]Field, 1)) },
		"mig device":         func() error { _, err := d.GetMigDeviceHandleByIndex(0); return err },
		"attributes":         func() error { _, err := d.GetAttributes(); return err },
		"events":             func() error { _, err := l.EventSetCreate(); return err },
		"gpm":                func() error { _, err := l.GPMSampleAlloc(); return err },
		"driver version":     func() error { _, err := l.SystemGetDriverVersion(); return err },
	} {
		if err := call(); !errors.Is(err, ErrFunctionNotFound) {
			t.Errorf("%s: got %v, want ErrFunctionNotFound", name, err)
		}
	}
	if got := l.Missing(); len(got) != int(numFunctions)-4 {
		t.Errorf("%d functions missing, want %d: %v", len(got), numFunctions-4, got)
	}
}

// TestOldDrivers: what is missing there is one missing field, and what exists in an older version is read by its layout.
func TestOldDrivers(t *testing.T) {
	gpu := busyH200()
	gpu.Processes = []fake.Process{{PID: 10, Memory: 1 << 20}, {PID: 11, Memory: 2 << 20}, {PID: 12, Memory: 3 << 20}}
	for _, c := range []struct {
		name    string
		without []string
	}{{"470", fake.Driver470}, {"390", fake.Driver390}} {
		_, l := host(t, fake.Scenario{GPUs: []fake.GPU{gpu}}, c.without...)
		d := device(t, l, 0)
		m, err := d.GetMemoryInfo()
		if want := (Memory{Total: 150754820096, Used: 644939776 + 5<<30, Free: 150754820096 - 644939776 - 5<<30}); err != nil || m != want {
			t.Errorf("%s: memory by version 1: got %+v, %v, want %+v", c.name, m, err, want)
		}
		p, err := d.GetComputeRunningProcesses(nil)
		want := []ProcessInfo{{10, 1 << 20, true, -1, -1}, {11, 2 << 20, true, -1, -1}, {12, 3 << 20, true, -1, -1}}
		if err != nil || !slices.Equal(p, want) {
			t.Errorf("%s: processes: got %+v, %v, want %+v", c.name, p, err, want)
		}
		if v, err := d.GetCurrentClocksEventReasons(); err != nil || v != 4 {
			t.Errorf("%s: throttle reasons by the old name: got %v, %v", c.name, v, err)
		}
		if _, err := d.GetJpgUtilization(); !errors.Is(err, ErrFunctionNotFound) {
			t.Errorf("%s: jpeg: got %v, want ErrFunctionNotFound", c.name, err)
		}
		if n, err := d.GetNumFans(); c.name == "470" && (err != nil || n != 2) || c.name == "390" && !errors.Is(err, ErrFunctionNotFound) {
			t.Errorf("%s: %d fans, %v: 470 tells no number but has speeds, 390 has neither", c.name, n, err)
		}
		if v, err := d.GetTemperature(); err != nil || v != 64 {
			t.Errorf("%s: temperature: got %v, %v", c.name, v, err)
		}
	}
}

// TestReturnCodes lets one function return each code that NVML knows, and one that it does not.
func TestReturnCodes(t *testing.T) {
	s := fake.Scenario{GPUs: []fake.GPU{busyH200()}}
	h, l := host(t, s)
	d := device(t, l, 0)
	codes := []Return{77, 0xffffffff}
	for r := range returnNames {
		if r != Success && r != ErrNoValue {
			codes = append(codes, r)
		}
	}
	for _, r := range codes {
		s.Faults = []fake.Fault{{Function: "nvmlDeviceGetTemperature", GPU: 0, Kind: fake.Return, Arg: uint64(r)}}
		h.Set(t, s)
		if _, err := d.GetTemperature(); !errors.Is(err, r) {
			t.Errorf("%s: got %v", r.Name(), err)
		}
		if v, err := d.GetPowerUsage(); err != nil || v != 543.21 {
			t.Errorf("%s: another function: got %v, %v", r.Name(), v, err)
		}
	}
	if got := Return(77).Error(); got != "nvml: CODE_77" {
		t.Errorf("unknown code: %q", got)
	}
	if got := fmt.Errorf("reading: %w", ErrGPUIsLost).Error(); got != "reading: nvml: GPU_IS_LOST" {
		t.Errorf("wrapped: %q", got)
	}
}

// TestFaultOnEveryQuery: an error of any function reaches its caller.
func TestFaultOnEveryQuery(t *testing.T) {
	s := fake.Scenario{GPUs: []fake.GPU{busyH200()}}
	h, l := host(t, s)
	d := device(t, l, 0)
	for _, q := range queries() {
		s.Faults = []fake.Fault{{Function: q.function, GPU: 0, Kind: fake.Return, Arg: uint64(ErrGPUIsLost)}}
		h.Set(t, s)
		if got, err := q.call(d); !errors.Is(err, ErrGPUIsLost) {
			t.Errorf("%s: got %v, %v, want ErrGPUIsLost", q.name, got, err)
		}
	}
}

// TestSentinels is the table of values that mean "not available": none may come out as a value.
func TestSentinels(t *testing.T) {
	s := fake.Scenario{GPUs: []fake.GPU{busyH200()}}
	h, l := host(t, s)
	d := device(t, l, 0)
	const both = 0
	for _, c := range []struct {
		name    string
		pattern uint64
		bits    int // which results it is a sentinel for
	}{
		{"all bits", math.MaxUint64, both},
		{"all bits but one", math.MaxUint64 - 1, 64},
		{"2^32-1 twice", 0xffffffff_ffffffff, both},
		{"2^32-2 twice", 0xfffffffe_fffffffe, both},
		{"-16 twice", 0xfffffff0_fffffff0, both},
		{"int64 max", math.MaxInt64, 64},
		{"int64 max - 13 (9223372036854775794)", math.MaxInt64 - 13, 64},
		{"int64 min", 1 << 63, 64},
		{"int64 min + 1", 1<<63 + 1, 64},
		{"NaN", math.Float64bits(math.NaN()), 64},
	} {
		for _, q := range queries() {
			if q.bits == 0 || c.bits != both && q.bits != c.bits {
				continue
			}
			s.Faults = []fake.Fault{{Function: q.function, GPU: 0, Kind: fake.Fill, Arg: c.pattern}}
			h.Set(t, s)
			if got, err := q.call(d); !errors.Is(err, ErrNoValue) {
				t.Errorf("%s of %s: got %v, %v, want ErrNoValue", c.name, q.name, got, err)
			}
		}
	}
	// 32-bit values that only some functions can tell from real ones.
	for _, c := range []struct {
		pattern uint32
		names   []string
	}{
		{101, []string{"utilization", "encoder", "decoder", "jpeg", "ofa", "persistence", "retired pending", "nvlink", "mig mode", "pstate", "compute mode",
			"architecture", "gpm support", "fans", "pcie link", "mig count"}},
		{32, []string{"pstate"}},
		{251, []string{"temperature", "threshold", "memory temperature"}},
		{0, []string{"memory temperature"}},
		{math.MaxInt32, []string{"minor", "temperature", "power", "power limit", "clock", "encoder sessions", "retired", "remapped", "fan speed",
			"capability", "throughput"}},
		{1 << 31, []string{"minor", "temperature", "power", "power limits", "clock max", "remapped", "throughput"}},
	} {
		for _, q := range queries() {
			if !slices.Contains(c.names, q.name) {
				continue
			}
			s.Faults = []fake.Fault{{Function: q.function, GPU: 0, Kind: fake.Fill, Arg: uint64(c.pattern) | uint64(c.pattern)<<32}}
			h.Set(t, s)
			if got, err := q.call(d); !errors.Is(err, ErrNoValue) {
				t.Errorf("%d of %s: got %v, %v, want ErrNoValue", c.pattern, q.name, got, err)
			}
		}
	}
}

// TestMemoryThatCannotBe: parts above the total.
func TestMemoryThatCannotBe(t *testing.T) {
	g := busyH200()
	s := fake.Scenario{GPUs: []fake.GPU{g}}
	h, l := host(t, s)
	d := device(t, l, 0)
	for _, m := range [][3]uint64{{0, 0, 0}, {1 << 30, 0, 2 << 30}, {1 << 30, 2 << 30, 0}, {1 << 51, 0, 0}} {
		s.GPUs[0].Set("memory", m[0], m[1], m[2])
		h.Set(t, s)
		if got, err := d.GetMemoryInfo(); !errors.Is(err, ErrNoValue) {
			t.Errorf("memory %v: got %+v, %v, want ErrNoValue", m, got, err)
		}
	}
}

// TestGarbage fills every answer with random bytes: whatever is taken for a value must be possible.
func TestGarbage(t *testing.T) {
	s := fake.Scenario{GPUs: []fake.GPU{busyH200()}}
	h, l := host(t, s)
	d := device(t, l, 0)
	rnd := rand.New(rand.NewPCG(1, 2))
	first, err := l.GPMSampleAlloc()
	if err != nil {
		t.Fatal(err)
	}
	if err := d.GPMSampleGet(first); err != nil {
		t.Fatal(err)
	}
	for range 150 {
		pattern := rnd.Uint64() >> rnd.UintN(64)
		s.Faults = []fake.Fault{{GPU: 0, Kind: fake.Fill, Arg: pattern}, {Function: "nvmlGpmMetricsGet", GPU: fake.AnyGPU, Kind: fake.Fill, Arg: pattern}}
		h.Set(t, s)
		for _, q := range queries() {
			got, err := q.call(d)
			if err != nil {
				continue
			}
			switch v := got.(type) {
			case float64:
				if math.IsNaN(v) || v < 0 || v > 1e15 {
					t.Errorf("%s from %#x: %v", q.name, pattern, v)
				}
			case int:
				if v < 0 {
					t.Errorf("%s from %#x: %v", q.name, pattern, v)
				}
			case uint64:
				if v > math.MaxInt64 {
					t.Errorf("%s from %#x: %v", q.name, pattern, v)
				}
			case Memory:
				if v.Used > v.Total || v.Total > 1<<50 {
					t.Errorf("%s from %#x: %+v", q.name, pattern, v)
				}
			case string:
				for _, r := range v {
					if r < ' ' || r > '~' {
						t.Errorf("%s from %#x: %q", q.name, pattern, v)
					}
				}
			}
		}
		for _, list := range []func([]ProcessInfo) ([]ProcessInfo, error){d.GetComputeRunningProcesses, d.GetGraphicsRunningProcesses} {
			p, _ := list(nil)
			for _, p := range p {
				if p.PID <= 0 || p.PID > math.MaxInt32 || p.HasMemory && p.UsedMemory >= 1<<50 || p.GPUInstance < -1 || p.GPUInstance > maxInstance {
					t.Errorf("process from %#x: %+v", pattern, p)
				}
			}
		}
		pu, _ := d.GetProcessUtilization(nil, 0)
		for _, p := range pu {
			if p.PID <= 0 || p.Time <= 0 || max(p.SM, p.Memory, p.Encoder, p.Decoder) > 100 {
				t.Errorf("process sample from %#x: %+v", pattern, p)
			}
		}
		ring, _ := d.GetSamples(nil, SamplesUtilization, 0)
		for _, r := range ring {
			if r.Time <= 0 || r.Value < 0 || r.Value > 100 {
				t.Errorf("sample from %#x: %+v", pattern, r)
			}
		}
		values := []GPMValue{{ID: GPMSM}, {ID: GPMPCIeRx}}
		if err := d.GPMMetricsGet(first, first, values); err == nil {
			if v := values[0]; v.Err == nil && (v.Value < 0 || v.Value > 1) {
				t.Errorf("GPM ratio from %#x: %+v", pattern, v)
			}
			if v := values[1]; v.Err == nil && (v.Value < 0 || v.Value > 1<<50) {
				t.Errorf("GPM rate from %#x: %+v", pattern, v)
			}
		}
	}
}

// TestMinorIsNotIndex: four devices whose /dev/nvidiaN numbers run the other way.
func TestMinorIsNotIndex(t *testing.T) {
	var s fake.Scenario
	for i := range 4 {
		s.GPUs = append(s.GPUs, fake.A10(i))
	}
	_, l := host(t, s)
	if n, err := l.DeviceGetCount(); err != nil || n != 4 {
		t.Fatalf("got %d devices, %v", n, err)
	}
	uuids := map[string]bool{}
	for i := range 4 {
		d := device(t, l, i)
		if m, err := d.GetMinorNumber(); err != nil || m != 7-i {
			t.Errorf("device %d has minor %d, %v, want %d", i, m, err, 7-i)
		}
		u, _ := d.GetUUID()
		uuids[u] = true
	}
	if len(uuids) != 4 {
		t.Errorf("UUIDs: %v", uuids)
	}
	if _, err := l.DeviceGetHandleByIndex(4); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("device 4: %v", err)
	}
}

// TestLostDevice: one GPU falls off the bus, the other keeps answering, and it comes back.
func TestLostDevice(t *testing.T) {
	s := fake.Scenario{GPUs: []fake.GPU{busyH200(), fake.A10(1)}}
	h, l := host(t, s)
	d0, d1 := device(t, l, 0), device(t, l, 1)
	s.GPUs[0].Set("lost")
	h.Set(t, s)
	if _, err := d0.GetTemperature(); !errors.Is(err, ErrGPUIsLost) {
		t.Errorf("lost device: %v", err)
	}
	if _, err := l.DeviceGetHandleByIndex(0); !errors.Is(err, ErrGPUIsLost) {
		t.Errorf("handle of a lost device: %v", err)
	}
	if _, err := d1.GetTemperature(); err != nil {
		t.Errorf("the other device: %v", err)
	}
	s.GPUs[0].Unset("lost")
	h.Set(t, s)
	if v, err := d0.GetTemperature(); err != nil || v != 64 {
		t.Errorf("device that is back: %v, %v", v, err)
	}
}

// TestHang: a call that does not return leaves calls on another device alone, the hooks name it, and it ends when the driver lets go.
func TestHang(t *testing.T) {
	s := fake.Scenario{GPUs: []fake.GPU{busyH200(), fake.A10(1)}, Faults: []fake.Fault{{Function: "nvmlDeviceGetPowerUsage", GPU: 0, Kind: fake.Hang}}}
	h, l := host(t, s)
	entered := make(chan string, 16)
	d0 := device(t, l, 0)
	watched := device(t, l.With(Config{OnEnter: func(name string) { entered <- name }}), 0)
	<-entered // opening the handle
	d1 := device(t, l, 1)
	done := make(chan error, 1)
	go func() {
		_, err := watched.GetPowerUsage()
		done <- err
	}()
	if name := <-entered; name != "nvmlDeviceGetPowerUsage" {
		t.Errorf("entered %s", name)
	}
	if v, err := d0.GetTemperature(); err != nil || v != 64 {
		t.Errorf("another call on the device: %v, %v", v, err)
	}
	if _, err := d1.GetPowerUsage(); err != nil {
		t.Errorf("the same call on another device: %v", err)
	}
	select {
	case err := <-done:
		t.Fatalf("the call returned: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	s.Faults = nil
	h.Set(t, s)
	if err := <-done; err != nil {
		t.Errorf("after the hang: %v", err)
	}
}

func TestDelayAndTimes(t *testing.T) {
	s := fake.Scenario{GPUs: []fake.GPU{busyH200()}, Faults: []fake.Fault{
		{Function: "nvmlDeviceGetTemperature", GPU: 0, Kind: fake.Delay, Arg: 60},
		{Function: "nvmlDeviceGetPowerUsage", GPU: fake.AnyGPU, Kind: fake.Return, Arg: uint64(ErrUnknown), Times: 2}}}
	_, l := host(t, s)
	d := device(t, l, 0)
	start := time.Now()
	if v, err := d.GetTemperature(); err != nil || v != 64 {
		t.Errorf("delayed: %v, %v", v, err)
	}
	if took := time.Since(start); took < 60*time.Millisecond {
		t.Errorf("delayed by %v", took)
	}
	for i, want := range []error{ErrUnknown, ErrUnknown, nil} {
		if _, err := d.GetPowerUsage(); !errors.Is(err, want) {
			t.Errorf("call %d: %v, want %v", i, err, want)
		}
	}
}

// TestThreads calls one library from many goroutines, each with a device of its own, while the scenario changes.
func TestThreads(t *testing.T) {
	s := fake.Scenario{GPUs: []fake.GPU{busyH200(), fake.A10(1), fake.Old(2)}}
	h, l := host(t, s)
	var wg sync.WaitGroup
	for w := range 12 {
		d := device(t, l, w%3)
		wg.Go(func() {
			for range 60 {
				for _, q := range queries() {
					q.call(d)
				}
				d.GetComputeRunningProcesses(nil)
				d.GetProcessUtilization(nil, 0)
				d.GetSamples(nil, SamplesPower, 0)
				if v, err := d.GetTemperature(); err != nil || v != 64 && v != 31 {
					t.Errorf("temperature: %v, %v", v, err)
				}
			}
		})
	}
	for range 10 {
		h.Set(t, s)
		time.Sleep(2 * time.Millisecond)
	}
	wg.Wait()
}

func TestHooks(t *testing.T) {
	_, l := host(t, fake.Scenario{GPUs: []fake.GPU{busyH200()}}, "nvmlDeviceGetJpgUtilization")
	type call struct {
		name string
		took time.Duration
		r    Return
	}
	var calls []call
	v := l.With(Config{OnCall: func(name string, took time.Duration, r Return) { calls = append(calls, call{name, took, r}) }})
	d := device(t, v, 0)
	d.GetTemperature()
	d.GetJpgUtilization() // never made, so not reported
	d.GetTemperatureThreshold(99)
	want := []string{"nvmlDeviceGetHandleByIndex_v2 SUCCESS", "nvmlDeviceGetTemperature SUCCESS", "nvmlDeviceGetTemperatureThreshold INVALID_ARGUMENT"}
	var got []string
	for _, c := range calls {
		got = append(got, c.name+" "+c.r.Name())
		if c.took <= 0 || c.took > 10*time.Second {
			t.Errorf("%s took %v", c.name, c.took)
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestNormalizePCIBusID(t *testing.T) {
	for in, want := range map[string]string{
		"00000000:3B:00.0": "0000:3b:00.0", "0000:0a:00.0": "0000:0a:00.0", "00010000:01:00.0": "10000:01:00.0", "0002:C1:1F.7": "0002:c1:1f.7",
		"": "", "garbage": "", "0000:0a:00": "", "0000:1ff:00.0": "", "0000:00:20.0": "", "0000:00:00.8": "", "-1:00:00.0": "",
	} {
		got, err := NormalizePCIBusID(in)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%q: got %q, %v, want %q", in, got, err, want)
		}
	}
}

func FuzzNormalizePCIBusID(f *testing.F) {
	f.Add("00000000:3B:00.0")
	f.Add("0002:C1:1F.7 trailing")
	f.Add("\x00:\xff:.")
	f.Fuzz(func(t *testing.T, s string) {
		got, err := NormalizePCIBusID(s)
		if err != nil {
			return
		}
		if again, err := NormalizePCIBusID(got); err != nil || again != got {
			t.Errorf("%q gives %q, which gives %q, %v", s, got, again, err)
		}
	})
}
