package nvml

import (
	"testing"
	"time"

	"github.com/ebitengine/purego"

	"gpu-exporter/nvml/fake"
)

// poll is every call that a poller repeats, on a device with processes and samples.
func poll(t testing.TB) map[string]func() error {
	g := busyH200()
	for i := range 50 {
		g.Processes = append(g.Processes, fake.Process{PID: 5000 + i, Memory: 1 << 20})
		g.ProcessSamples = append(g.ProcessSamples, fake.ProcessSample{PID: 5000 + i, Time: 1_000_000, SM: 2})
	}
	for i := range 71 {
		g.Samples = append(g.Samples, fake.Sample{Ring: 0, Time: uint64(1 + i), Value: "1000"}, fake.Sample{Ring: 1, Time: uint64(1 + i), Value: "50"})
	}
	_, plain := host(t, fake.Scenario{GPUs: []fake.GPU{g}})
	var count uint64
	l := plain.With(Config{OnEnter: func(string) { count++ }, OnCall: func(_ string, took time.Duration, _ Return) { count += uint64(took) & 1 }})
	d := device(t, l, 0)
	calls := map[string]func() error{}
	for _, q := range []struct {
		name string
		call func() (float64, error)
	}{{"Temperature", d.GetTemperature}, {"MemoryTemperature", d.GetMemoryTemperature}, {"PowerUsage", d.GetPowerUsage}, {"EnforcedPowerLimit", d.GetEnforcedPowerLimit},
		{"TotalEnergyConsumption", d.GetTotalEnergyConsumption}, {"EncoderUtilization", d.GetEncoderUtilization}, {"DecoderUtilization", d.GetDecoderUtilization},
		{"JpgUtilization", d.GetJpgUtilization}, {"OfaUtilization", d.GetOfaUtilization},
		{"ViolationStatus", func() (float64, error) { return d.GetViolationStatus(0) }}, {"FanSpeed", func() (float64, error) { return d.GetFanSpeed(0) }},
		{"PcieThroughput", func() (float64, error) { return d.GetPcieThroughput(true) }}} {
		calls[q.name] = func() error { _, err := q.call(); return err }
	}
	calls["MemoryInfo"] = func() error { _, err := d.GetMemoryInfo(); return err }
	calls["BAR1MemoryInfo"] = func() error { _, _, err := d.GetBAR1MemoryInfo(); return err }
	calls["UtilizationRates"] = func() error { _, _, err := d.GetUtilizationRates(); return err }
	calls["ClockInfo"] = func() error { _, err := d.GetClockInfo(ClockSM); return err }
	calls["PerformanceState"] = func() error { _, err := d.GetPerformanceState(); return err }
	calls["CurrentClocksEventReasons"] = func() error { _, err := d.GetCurrentClocksEventReasons(); return err }
	calls["TotalEccErrors"] = func() error { _, err := d.GetTotalEccErrors(true, true); return err }
	calls["RetiredPages"] = func() error { _, err := d.GetRetiredPages(true); return err }
	calls["RemappedRows"] = func() error { _, err := d.GetRemappedRows(); return err }
	calls["PcieLink"] = func() error { _, _, err := d.GetPcieLink(); return err }
	calls["PcieReplayCounter"] = func() error { _, err := d.GetPcieReplayCounter(); return err }
	calls["EncoderSessions"] = func() error { _, err := d.GetEncoderSessions(); return err }
	calls["NvLinkState"] = func() error { _, err := d.GetNvLinkState(0); return err }
	calls["NvLinkErrorCounter"] = func() error { _, err := d.GetNvLinkErrorCounter(0, NvLinkReplay); return err }
	fields := []Field{{ID: FieldPCIeTxBytes}, {ID: FieldPCIeRxBytes}, {ID: FieldThrottlePower}}
	calls["FieldValues"] = func() error { return d.GetFieldValues(fields) }
	var procs []ProcessInfo
	calls["ComputeRunningProcesses"] = func() (err error) { procs, err = d.GetComputeRunningProcesses(procs[:0]); return err }
	calls["GraphicsRunningProcesses"] = func() (err error) { procs, err = d.GetGraphicsRunningProcesses(procs[:0]); return err }
	var samples []ProcessUtilization
	calls["ProcessUtilization"] = func() (err error) { samples, err = d.GetProcessUtilization(samples[:0], 0); return err }
	var ring []RingSample
	calls["SamplesPower"] = func() (err error) { ring, err = d.GetSamples(ring[:0], SamplesPower, 0); return err }
	calls["SamplesUtilization"] = func() (err error) { ring, err = d.GetSamples(ring[:0], SamplesUtilization, 0); return err }
	first, err1 := l.GPMSampleAlloc()
	second, err2 := l.GPMSampleAlloc()
	if err1 != nil || err2 != nil {
		t.Fatal(err1, err2)
	}
	calls["GPMSampleGet"] = func() error { return d.GPMSampleGet(second) }
	values := []GPMValue{{ID: GPMSM}, {ID: GPMOccupancy}, {ID: GPMDRAM}, {ID: GPMPCIeRx}, {ID: GPMPCIeTx}}
	if err := d.GPMSampleGet(first); err != nil {
		t.Fatal(err)
	}
	if err := d.GPMSampleGet(second); err != nil {
		t.Fatal(err)
	}
	calls["GPMMetricsGet"] = func() error { return d.GPMMetricsGet(first, second, values) }
	set, err := l.EventSetCreate()
	if err != nil {
		t.Fatal(err)
	}
	calls["EventSetWait"] = func() error {
		if _, err := set.Wait(0); err != ErrTimeout {
			return err
		}
		return nil
	}
	return calls
}

// TestPollingDoesNotAllocate holds for every repeated call, hooks included.
func TestPollingDoesNotAllocate(t *testing.T) {
	for name, call := range poll(t) {
		if err := call(); err != nil { // the first call may size a buffer
			t.Errorf("%s: %v", name, err)
			continue
		}
		n := testing.AllocsPerRun(50, func() { call() })
		if n != 0 && !raceDetector {
			t.Errorf("%s allocates %v times", name, n)
		}
	}
}

// BenchmarkCall measures each repeated call against the fake library. Most of each figure is the fake's: it looks at its scenario file
// every time. BenchmarkGateway is the part of this package.
func BenchmarkCall(b *testing.B) {
	for name, call := range poll(b) {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := call(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkGateway measures what a call costs on this side, with a function behind it that returns at once.
func BenchmarkGateway(b *testing.B) {
	addr, err := purego.Dlsym(purego.RTLD_DEFAULT, "abs")
	if err != nil {
		b.Fatal(err)
	}
	l := &Library{}
	l.addr[fnInit] = addr
	b.ReportAllocs()
	for b.Loop() {
		if r := l.call(fnInit, 7); r != 7 {
			b.Fatal(r)
		}
	}
}
