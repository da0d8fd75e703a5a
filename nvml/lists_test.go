package nvml

import (
	"errors"
	"math"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"gpu-exporter/nvml/fake"
)

// TestProcessListGrows: lists from none to more than several buffers, each entry once and in order.
func TestProcessListGrows(t *testing.T) {
	s := fake.Scenario{GPUs: []fake.GPU{fake.H200(0)}}
	h, l := host(t, s)
	d := device(t, l, 0)
	var buf []ProcessInfo
	for _, n := range []int{0, 1, 2, 31, 32, 33, 100, 500, 3, 0} {
		s.GPUs[0].Processes = nil
		var want []ProcessInfo
		for i := range n {
			s.GPUs[0].Processes = append(s.GPUs[0].Processes, fake.Process{PID: 1000 + i, Memory: uint64(i) << 20})
			want = append(want, ProcessInfo{1000 + i, uint64(i) << 20, true, -1, -1})
		}
		h.Set(t, s)
		var err error
		buf, err = d.GetComputeRunningProcesses(buf[:0])
		if err != nil || !slices.Equal(buf, want) {
			t.Errorf("%d processes: got %d, %v", n, len(buf), err)
		}
		if g, err := d.GetGraphicsRunningProcesses(nil); err != nil || len(g) != 0 {
			t.Errorf("graphics: %v, %v", g, err)
		}
	}
}

// TestProcessListLayouts: the same symbol with each of the entry sizes that drivers have written.
func TestProcessListLayouts(t *testing.T) {
	for _, stride := range []int{16, 24, 32} {
		for _, n := range []int{1, 2, 3, 32, 50} {
			s := fake.Scenario{ProcessStride: stride, GPUs: []fake.GPU{fake.H200(0)}}
			var want []ProcessInfo
			for i := range n {
				s.GPUs[0].Processes = append(s.GPUs[0].Processes, fake.Process{PID: 2000 + i, Memory: uint64(i+1) << 30, MIG: &fake.Instance{GPU: i % 7, Compute: 0}})
				p := ProcessInfo{2000 + i, uint64(i+1) << 30, true, i % 7, 0}
				if stride == 16 {
					p.GPUInstance, p.ComputeInstance = -1, -1
				}
				want = append(want, p)
			}
			_, l := host(t, s)
			got, err := device(t, l, 0).GetComputeRunningProcesses(nil)
			if err != nil || !slices.Equal(got, want) {
				t.Errorf("%d entries of %d bytes: got %+v, %v", n, stride, got, err)
			}
		}
	}
}

// TestListsThatNeverFit: a driver that always asks for more is given up on, one that does so twice is not, and a count beyond the buffer is
// not believed.
func TestListsThatNeverFit(t *testing.T) {
	g := busyH200()
	g.ProcessSamples = []fake.ProcessSample{{PID: 1, Time: 1000, SM: 1}}
	s := fake.Scenario{GPUs: []fake.GPU{g}}
	h, l := host(t, s)
	d := device(t, l, 0)
	lists := map[string]func() (int, error){
		"nvmlDeviceGetComputeRunningProcesses_v3":  func() (int, error) { p, err := d.GetComputeRunningProcesses(nil); return len(p), err },
		"nvmlDeviceGetGraphicsRunningProcesses_v3": func() (int, error) { p, err := d.GetGraphicsRunningProcesses(nil); return len(p), err },
		"nvmlDeviceGetProcessUtilization":          func() (int, error) { p, err := d.GetProcessUtilization(nil, 0); return len(p), err },
		"nvmlDeviceGetSamples":                     func() (int, error) { p, err := d.GetSamples(nil, SamplesPower, 0); return len(p), err },
	}
	for name, call := range lists {
		for _, c := range []struct {
			kind  string
			arg   uint64
			times int
			want  error
		}{{fake.Insufficient, 0, 0, ErrNoValue}, {fake.Insufficient, 0, 2, nil}, {fake.Count, 4_000_000_000, 0, ErrNoValue}, {fake.Count, 100_000, 0, ErrNoValue}} {
			s.Faults = []fake.Fault{{Function: name, GPU: 0, Kind: c.kind, Arg: c.arg, Times: c.times}}
			h.Set(t, s)
			if n, err := call(); !errors.Is(err, c.want) || err == nil && n == 0 {
				t.Errorf("%s with %s %d (%d times): got %d entries, %v, want %v", name, c.kind, c.arg, c.times, n, err, c.want)
			}
		}
	}
}

// TestBadProcesses: entries that cannot be are dropped, an amount that is none leaves the process.
func TestBadProcesses(t *testing.T) {
	g := fake.H200(0)
	g.Processes = []fake.Process{{PID: 0, Memory: 5}, {PID: -1, Memory: 5}, {PID: 7, Memory: math.MaxUint64}, {PID: 8, Memory: math.MaxInt64 - 1}, {PID: 9, Memory: 1},
		{PID: 9, Memory: 2}}
	_, l := host(t, fake.Scenario{GPUs: []fake.GPU{g}})
	got, err := device(t, l, 0).GetComputeRunningProcesses(nil)
	want := []ProcessInfo{{7, 0, false, -1, -1}, {8, 0, false, -1, -1}, {9, 1, true, -1, -1}, {9, 2, true, -1, -1}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("got %+v, %v, want %+v (twice the same PID is for the caller to judge)", got, err, want)
	}
}

func TestProcessUtilization(t *testing.T) {
	g := fake.H200(0)
	s := fake.Scenario{GPUs: []fake.GPU{g}}
	h, l := host(t, s)
	d := device(t, l, 0)

	if got, err := d.GetProcessUtilization(nil, 0); err != nil || len(got) != 0 {
		t.Errorf("all idle (NOT_FOUND): got %v, %v, want an empty list", got, err)
	}

	s.GPUs[0].ProcessSamples = []fake.ProcessSample{
		{PID: 10, Time: 1_000_000, SM: 50, Memory: 20, Encoder: 1, Decoder: 2},
		{PID: 10, Time: 1_200_000, SM: 100},
		{PID: 11, Time: 1_200_000, SM: 101},                   // impossible
		{PID: 11, Time: 1_200_000, SM: 1, Memory: 0xffffffff}, // impossible
		{PID: 0, Time: 1_200_000, SM: 1},                      // nobody
		{PID: 12, Time: -1, SM: 1},                            // 2^64-1
		{PID: 13, Time: 0, SM: 1},
		{PID: 14, Time: 1_400_000, SM: 0},
	}
	h.Set(t, s)
	got, err := d.GetProcessUtilization(nil, 0)
	want := []ProcessUtilization{{10, 1_000_000, 50, 20, 1, 2}, {10, 1_200_000, 100, 0, 0, 0}, {14, 1_400_000, 0, 0, 0, 0}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("got %+v, %v, want %+v", got, err, want)
	}
	// Only what is newer, even from a driver that gives everything again.
	for _, stale := range []bool{false, true} {
		if stale {
			s.GPUs[0].Set("stale_samples")
			h.Set(t, s)
		}
		if got, err := d.GetProcessUtilization(nil, 1_200_000); err != nil || !slices.Equal(got, want[2:]) {
			t.Errorf("since the second sample (stale %v): got %+v, %v", stale, got, err)
		}
	}
	s.GPUs[0].Set("no_process_samples")
	h.Set(t, s)
	if _, err := d.GetProcessUtilization(nil, 0); !errors.Is(err, ErrNotSupported) {
		t.Errorf("not supported: %v", err)
	}
}

// TestBusy: the fake's own samples come every 200 ms of real time, each once, and a spike shows in its sample only.
func TestBusy(t *testing.T) {
	g := fake.H200(0)
	g.Busy = []fake.Busy{{PID: 77, SM: 80, Memory: 30}, {PID: 78, SM: 90, PeriodMillis: 1000, OnMillis: 100}}
	_, l := host(t, fake.Scenario{GPUs: []fake.GPU{g}})
	d := device(t, l, 0)
	now := time.Now().UnixMicro()
	since := now - 5_000_000
	got, err := d.GetProcessUtilization(nil, since)
	if err != nil {
		t.Fatal(err)
	}
	var steady, spikes []int64
	for _, p := range got {
		if p.Time <= since || p.Time > now+1_000_000 || p.Time%200_000 != 0 {
			t.Errorf("sample at %d", p.Time)
		}
		switch {
		case p.PID == 77 && p.SM == 80 && p.Memory == 30:
			steady = append(steady, p.Time)
		case p.PID == 78 && p.SM == 45:
			spikes = append(spikes, p.Time)
		case p.PID == 78 && p.SM == 0: // idle is a sample too
		default:
			t.Errorf("sample %+v", p)
		}
	}
	if len(steady) < 24 || len(steady) > 27 || len(spikes) < 4 || len(spikes) > 6 {
		t.Errorf("%d steady samples and %d spikes in 5 s", len(steady), len(spikes))
	}
	last := steady[len(steady)-1]
	time.Sleep(210 * time.Millisecond)
	got, err = d.GetProcessUtilization(nil, last)
	if err != nil || len(got) == 0 {
		t.Fatalf("after another period: %v, %v", got, err)
	}
	for _, p := range got {
		if p.Time <= last {
			t.Errorf("given twice: %+v", p)
		}
	}
	u, m, err := d.GetUtilizationRates()
	if err != nil || u < 80 || m != 30 {
		t.Errorf("utilisation %v, %v, %v", u, m, err)
	}
}

func TestSamples(t *testing.T) {
	g := busyH200()
	g.Samples = []fake.Sample{{Ring: 1, Time: 1_000_000, Value: "10"}, {Ring: 1, Time: 1_200_000, Value: "101"}, {Ring: 1, Time: 1_400_000, Value: "4294967295"},
		{Ring: 1, Time: 0, Value: "1"}, {Ring: 1, Time: math.MaxUint64, Value: "1"}, {Ring: 1, Time: 1_600_000, Value: "100"}}
	s := fake.Scenario{GPUs: []fake.GPU{g}}
	h, l := host(t, s)
	d := device(t, l, 0)
	got, err := d.GetSamples(nil, SamplesUtilization, 0)
	want := []RingSample{{1_000_000, 10}, {1_600_000, 100}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("got %+v, %v, want %+v", got, err, want)
	}
	if got, err := d.GetSamples(nil, SamplesUtilization, 1_600_000); err != nil || len(got) != 0 {
		t.Errorf("nothing newer: got %+v, %v", got, err)
	}
	now := time.Now().UnixMicro()
	power, err := d.GetSamples(nil, SamplesPower, 0)
	if err != nil || len(power) < 118 || len(power) > 120 {
		t.Fatalf("%d power samples, %v", len(power), err)
	}
	for i, p := range power {
		if p.Value != 543.21 || p.Time < now-2_500_000 || i > 0 && p.Time-power[i-1].Time != 20_000 {
			t.Errorf("power sample %d: %+v", i, p)
		}
	}
	// Doubles, as some drivers give them.
	s.GPUs[0].Set("sample_type", 0)
	s.GPUs[0].Samples = []fake.Sample{{Ring: 0, Time: 5, Value: "1500.5"}, {Ring: 0, Time: 6, Value: "nan"}, {Ring: 0, Time: 7, Value: "-1"}, {Ring: 0, Time: 8, Value: "inf"},
		{Ring: 0, Time: 9, Value: "1e12"}}
	h.Set(t, s)
	if got, err := d.GetSamples(nil, SamplesPower, 0); err != nil || !slices.Equal(got, []RingSample{{5, 1.5005}}) {
		t.Errorf("doubles: got %+v, %v", got, err)
	}
	s.GPUs[0].Set("no_samples")
	h.Set(t, s)
	if _, err := d.GetSamples(nil, SamplesPower, 0); !errors.Is(err, ErrNotSupported) {
		t.Errorf("not supported: %v", err)
	}
}

func TestFields(t *testing.T) {
	g := busyH200()
	g.Fields = append(g.Fields, fake.Field{ID: 500, Type: 3, Value: "-1"}, fake.Field{ID: 501, Type: 0, Value: "nan"}, fake.Field{ID: 502, Type: 9, Value: "1"},
		fake.Field{ID: 503, Type: 5, Value: "-2"}, fake.Field{ID: 504, Type: 0, Value: "2.5"})
	_, l := host(t, fake.Scenario{GPUs: []fake.GPU{g}})
	d := device(t, l, 0)
	f := []Field{{ID: FieldMemoryTemp}, {ID: FieldNVLinkDataTx}, {ID: FieldNVLinkDataTx, Scope: 9}, {ID: 500}, {ID: 501}, {ID: 502}, {ID: 503}, {ID: 504}, {ID: 1}}
	if err := d.GetFieldValues(f); err != nil {
		t.Fatal(err)
	}
	want := []struct {
		v   float64
		err error
	}{{38, nil}, {4096, nil}, {0, ErrNotSupported}, {0, ErrNoValue}, {0, ErrNoValue}, {0, ErrNoValue}, {0, ErrNoValue}, {2.5, nil}, {0, ErrNotSupported}}
	for i, w := range want {
		if f[i].Value != w.v || !errors.Is(f[i].Err, w.err) {
			t.Errorf("field %d scope %d: got %v, %v, want %v, %v", f[i].ID, f[i].Scope, f[i].Value, f[i].Err, w.v, w.err)
		}
	}
	for _, n := range []int{0, 17} {
		if err := d.GetFieldValues(make([]Field, n)); !errors.Is(err, ErrInvalidArgument) {
			t.Errorf("%d fields: %v", n, err)
		}
	}
}

// TestFieldWraps: the 32-bit PCIe byte counters start again.
func TestFieldWraps(t *testing.T) {
	g := fake.A10(0)
	g.Fields = []fake.Field{{ID: FieldPCIeTxBytes, Type: 1, Value: "0", Rate: 54_000_000_000}}
	_, l := host(t, fake.Scenario{GPUs: []fake.GPU{g}})
	d := device(t, l, 0)
	wraps, last := 0, 0.0
	for start := time.Now(); time.Since(start) < 400*time.Millisecond; time.Sleep(5 * time.Millisecond) {
		f := []Field{{ID: FieldPCIeTxBytes}}
		if err := d.GetFieldValues(f); err != nil || f[0].Err != nil {
			t.Fatal(err, f[0].Err)
		}
		if f[0].Value > math.MaxUint32 {
			t.Fatalf("%v is more than 32 bits", f[0].Value)
		}
		if f[0].Value < last {
			wraps++
		}
		last = f[0].Value
	}
	if wraps < 2 {
		t.Errorf("wrapped %d times in 400 ms at 54 GB/s", wraps)
	}
}

func TestGPM(t *testing.T) {
	g := busyH200()
	g.GPM[GPMOccupancy] = math.NaN()
	g.GPM[GPMTensor] = 250
	g.GPM[GPMFP16] = 100.2
	s := fake.Scenario{GPUs: []fake.GPU{g, fake.A10(1)}}
	_, l := host(t, s)
	d, other := device(t, l, 0), device(t, l, 1)
	if ok, err := other.GPMSupported(); err != nil || ok {
		t.Errorf("an A10 has GPM: %v, %v", ok, err)
	}
	first, err := l.GPMSampleAlloc()
	if err != nil {
		t.Fatal(err)
	}
	second, err := l.GPMSampleAlloc()
	if err != nil {
		t.Fatal(err)
	}
	values := []GPMValue{{ID: GPMSM}, {ID: GPMPCIeRx}, {ID: GPMOccupancy}, {ID: GPMTensor}, {ID: GPMFP16}, {ID: 444}}
	if err := d.GPMMetricsGet(first, second, values); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("without samples: %v", err)
	}
	for _, s := range []*GPMSample{first, second} {
		if err := d.GPMSampleGet(s); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.GPMMetricsGet(first, second, values); err != nil {
		t.Fatal(err)
	}
	for i, w := range []GPMValue{{GPMSM, 0.875, nil}, {GPMPCIeRx, 1 << 30, nil}, {GPMOccupancy, 0, ErrNoValue}, {GPMTensor, 0, ErrNoValue}, {GPMFP16, 1, nil}, {444, 0, ErrNotSupported}} {
		if values[i].Value != w.Value || !errors.Is(values[i].Err, w.Err) {
			t.Errorf("metric %d: got %v, %v, want %v, %v", w.ID, values[i].Value, values[i].Err, w.Value, w.Err)
		}
	}
	if err := d.GPMMetricsGet(first, second, nil); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("no metrics: %v", err)
	}
	if err := other.GPMSampleGet(first); !errors.Is(err, ErrNotSupported) {
		t.Errorf("sample of an A10: %v", err)
	}
	if err := errors.Join(first.Free(), second.Free()); err != nil {
		t.Error(err)
	}
}

func TestEvents(t *testing.T) {
	s := fake.Scenario{GPUs: []fake.GPU{fake.H200(0), fake.A10(1), fake.Old(2)}}
	s.GPUs[0].Events = []fake.Event{{Type: EventXid, Data: 13}} // before the registration: not news
	h, l := host(t, s)
	set, err := l.EventSetCreate()
	if err != nil {
		t.Fatal(err)
	}
	d0, d1, old := device(t, l, 0), device(t, l, 1), device(t, l, 2)
	for _, d := range []*Device{d0, d1} {
		if err := set.Register(d, EventXid|EventDoubleBitECC|1<<40); err != nil {
			t.Fatal(err)
		}
	}
	if err := set.Register(old, EventXid); !errors.Is(err, ErrNotSupported) {
		t.Errorf("a device without events: %v", err)
	}
	if _, err := set.Wait(10 * time.Millisecond); !errors.Is(err, ErrTimeout) {
		t.Errorf("no news: %v", err)
	}
	go func() {
		time.Sleep(30 * time.Millisecond)
		s.GPUs[0].Events = append(s.GPUs[0].Events, fake.Event{Type: EventXid, Data: 79, MIG: &fake.Instance{GPU: 2, Compute: 1}})
		s.GPUs[1].Events = append(s.GPUs[1].Events, fake.Event{Type: EventSingleBitECC}, fake.Event{Type: EventDoubleBitECC})
		s.WriteFile(h.Scenario)
	}()
	for _, want := range []Event{{d0.Handle(), EventXid, 79, 2, 1}, {d1.Handle(), EventDoubleBitECC, 0, -1, -1}} {
		if got, err := set.Wait(5 * time.Second); err != nil || got != want {
			t.Errorf("got %+v, %v, want %+v", got, err, want)
		}
	}
	if _, err := set.Wait(10 * time.Millisecond); !errors.Is(err, ErrTimeout) {
		t.Errorf("each event once: %v", err)
	}
	if err := set.Free(); err != nil {
		t.Error(err)
	}
}

// TestEventsOfOldDriver: version 1 of the wait knows no MIG instances.
func TestEventsOfOldDriver(t *testing.T) {
	s := fake.Scenario{GPUs: []fake.GPU{fake.H200(0)}}
	h, l := host(t, s, fake.Driver390...)
	set, err := l.EventSetCreate()
	if err != nil {
		t.Fatal(err)
	}
	d := device(t, l, 0)
	if err := set.Register(d, EventXid); err != nil {
		t.Fatal(err)
	}
	s.GPUs[0].Events = []fake.Event{{Type: EventXid, Data: 31}}
	h.Set(t, s)
	if got, err := set.Wait(time.Second); err != nil || got != (Event{d.Handle(), EventXid, 31, -1, -1}) {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestMIG(t *testing.T) {
	g := fake.H200(0)
	g.Set("mig_mode", 1)
	g.MIG = []fake.MIG{
		{UUID: "MIG-11111111-2222-3333-4444-555555555555", Name: "NVIDIA H200 MIG 1g.18gb", Instance: fake.Instance{GPU: 7, Compute: 0}, SMs: 16, GPUSlices: 1, Slices: 1, MemoryMiB: 16384, Used: 1 << 30},
		{UUID: "MIG-66666666-2222-3333-4444-555555555555", Name: "NVIDIA H200 MIG 3g.71gb", Instance: fake.Instance{GPU: 2, Compute: 0}, SMs: 60, GPUSlices: 3, Slices: 3, MemoryMiB: 72448},
	}
	g.Processes = []fake.Process{{PID: 5, Memory: 1 << 30, MIG: &fake.Instance{GPU: 7}}, {PID: 6, Memory: 2 << 30, MIG: &fake.Instance{GPU: 2}}}
	_, l := host(t, fake.Scenario{GPUs: []fake.GPU{g}})
	d := device(t, l, 0)
	if on, err := d.MIGModeEnabled(); err != nil || !on {
		t.Fatalf("MIG mode: %v, %v", on, err)
	}
	n, err := d.GetMaxMigDeviceCount()
	if err != nil || n != 7 {
		t.Fatalf("places: %d, %v", n, err)
	}
	var found []*Device
	for i := range n {
		m, err := d.GetMigDeviceHandleByIndex(i)
		if err != nil {
			if !errors.Is(err, ErrNotFound) {
				t.Errorf("place %d: %v", i, err)
			}
			continue
		}
		found = append(found, m)
	}
	if len(found) != 2 {
		t.Fatalf("%d MIG devices", len(found))
	}
	for i, want := range g.MIG {
		m := found[i]
		if u, err := m.GetUUID(); err != nil || u != want.UUID {
			t.Errorf("uuid %q, %v", u, err)
		}
		if id, err := m.GetGpuInstanceID(); err != nil || id != want.Instance.GPU {
			t.Errorf("GPU instance %d, %v", id, err)
		}
		if id, err := m.GetComputeInstanceID(); err != nil || id != want.Instance.Compute {
			t.Errorf("compute instance %d, %v", id, err)
		}
		if a, err := m.GetAttributes(); err != nil || a != (Attributes{want.SMs, want.GPUSlices, want.Slices, want.MemoryMiB}) {
			t.Errorf("attributes %+v, %v", a, err)
		}
		if mem, err := m.GetMemoryInfo(); err != nil || mem.Total != want.MemoryMiB<<20 || mem.Used != want.Used {
			t.Errorf("memory %+v, %v", mem, err)
		}
		p, err := m.GetComputeRunningProcesses(nil)
		if err != nil || len(p) != 1 || p[0].PID != 5+i || p[0].GPUInstance != want.Instance.GPU {
			t.Errorf("processes %+v, %v", p, err)
		}
		if _, err := m.GetTemperature(); !errors.Is(err, ErrNotSupported) {
			t.Errorf("temperature of an instance: %v", err)
		}
	}
}

func TestCallLog(t *testing.T) {
	log := filepath.Join(t.TempDir(), "calls")
	_, l := host(t, fake.Scenario{Log: log, GPUs: []fake.GPU{fake.H200(0), fake.A10(1)}})
	d := device(t, l, 1)
	d.GetTemperature()
	d.GetTemperature()
	calls, err := fake.Calls(log)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, c := range calls {
		if c.Function == "nvmlDeviceGetTemperature" && c.GPU == 1 && c.Time > 0 && c.Thread > 0 {
			n++
		}
	}
	if n != 2 {
		t.Errorf("%d calls in the log %+v, want 2", n, calls)
	}
}

func FuzzDecodeProcesses(f *testing.F) {
	f.Add(uint64(4242), uint64(1<<30), uint64(0xffffffff_ffffffff), uint64(untouched), 1, 3)
	f.Add(uint64(0), uint64(math.MaxUint64), uint64(7), uint64(0), 2, 1)
	f.Fuzz(func(t *testing.T, a, b, c, d uint64, n, version int) {
		words := make([]uint64, 8*strideWords)
		for i := range words {
			words[i] = []uint64{a, b, c, d}[i%4]
		}
		n = min(max(n, 0), 8)
		stride := layout(words, n, version)
		for i := range n {
			p, ok := decodeProcess(words[i*stride/8 : (i+1)*stride/8])
			if ok && (p.PID <= 0 || p.HasMemory && p.UsedMemory >= 1<<50 || p.GPUInstance > maxInstance) {
				t.Errorf("%+v", p)
			}
		}
	})
}

func FuzzNumber(f *testing.F) {
	f.Add(uint32(0), []byte("\x00\x00\x00\x00\x00\x00\xf8\x7f"))
	f.Add(uint32(3), []byte("\xff\xff\xff\xff\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, kind uint32, b []byte) {
		var raw [8]byte
		copy(raw[:], b)
		if v, ok := number(kind, raw); ok && (math.IsNaN(v) || math.IsInf(v, 0) || v < 0) {
			t.Errorf("type %d of %x is %v", kind, raw, v)
		}
	})
}
