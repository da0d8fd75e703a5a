package metrics_test

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"gpu-exporter/exporter/processes"
	"gpu-exporter/nvml/fake"
	"gpu-exporter/nvml/poller"
)

// The functions that read figures of a device, by what they answer in.
var (
	percents = []string{"UtilizationRates", "EncoderUtilization", "DecoderUtilization", "JpgUtilization", "OfaUtilization"}
	words    = append([]string{"Temperature", "PowerUsage", "EnforcedPowerLimit", "ClockInfo", "MaxClockInfo", "PerformanceState", "FanSpeed_v2", "PcieThroughput",
		"PcieReplayCounter", "CurrPcieLinkGeneration", "CurrPcieLinkWidth", "MaxPcieLinkGeneration", "MaxPcieLinkWidth", "MinorNumber", "EncoderStats", "RemappedRows",
		"RetiredPages"}, percents...)
	longs = []string{"MemoryInfo_v2", "BAR1MemoryInfo", "TotalEnergyConsumption", "TotalEccErrors"}
)

// fullHost is a host that has every figure which the library can play, with two processes of a container, a fan and all that a sentinel may stand for.
func fullHost(t *testing.T) *host {
	h := &host{scenario: &fake.Scenario{GPUs: []fake.GPU{fake.H200(0)}}}
	h.contain(t, "job", fmt.Sprintf(gpus, -1, "null"), 7)
	h.run(0, 100, gib, "job", fake.Busy{}, nil)
	h.run(0, 101, 2*gib, "job", fake.Busy{}, nil)
	h.set(0, 150754820096, 644939776, 100<<20)
	g := &h.scenario.GPUs[0]
	for key, words := range map[string][]any{"utilization": {42, 7}, "encoder": {5}, "decoder": {6}, "jpeg": {7}, "ofa": {8}, "fans": {1}, "fan_speed": {30}, "energy": {5000},
		"retired_pages": {1, 2}, "ecc": {1, 2, 3, 4}, "pcie_replays": {8}, "encoder_sessions": {1}, "throttle": {4}} {
		g.Set(key, words...)
	}
	for id := range g.GPM {
		g.GPM[id] = 40
	}
	now := time.Now().Add(300 * time.Millisecond)
	g.ProcessSamples = []fake.ProcessSample{{PID: 100, Time: now.UnixMicro(), SM: 50, Memory: 10}}
	g.Samples = []fake.Sample{{Ring: 1, Time: uint64(now.UnixMicro()), Value: "42"}, {Ring: 0, Time: uint64(now.UnixMicro()), Value: "120000"}}
	return h
}

// served runs a host for half a second and returns what is exposed of it.
func (h *host) served(t *testing.T) map[string]float64 {
	t.Helper()
	const often = 20 * time.Millisecond
	s := last(h.during(t, 500*time.Millisecond, poller.Config{Interval: often, Samples: often, Power: often, Util: often, Energy: often, Health: often, GPM: often, Info: often}))
	values, _ := samples(t, exposition(t, s, "text/plain"))
	return values
}

// moves tells whether a series has another value in another run of the same host, or says how many others there are.
func moves(series string) bool {
	for _, name := range []string{"gpu_throttle_seconds_total", "gpu_busy_seconds_total", "gpu_exporter_series", "gpu_utilization_percent", "gpu_memory_bandwidth_percent",
		"gpu_device_pcie_bytes_total", "gpu_pci_bandwidth_bytes_total"} {
		if strings.HasPrefix(series, name) {
			return true
		}
	}
	return false
}

// TestSentinels: each value that means absent, from each function of the library that may answer with it, up to what is served. No series has another
// value than without it, and none is new; what it stood for has no series. What no process accounts for is the one that follows.
func TestSentinels(t *testing.T) {
	nan := math.Float64bits(math.NaN())
	twice := func(v uint32) uint64 { return uint64(v) | uint64(v)<<32 }
	all := slices.Concat(words, longs)
	rows := []struct {
		name      string
		fill      uint64
		functions []string // nil: the scenario is changed instead
		change    func(h *host)
		gone      []string // families without a series that they have in order
	}{
		{name: "2^32-1", fill: twice(math.MaxUint32), functions: all,
			gone: []string{"gpu_temperature_celsius", "gpu_power_usage_watts", "gpu_clock_hertz", "gpu_fan_speed_ratio", "gpu_device_memory_used_bytes", "gpu_ecc_errors"}},
		{name: "2^32-2", fill: twice(math.MaxUint32 - 1), functions: words, gone: []string{"gpu_temperature_celsius", "gpu_performance_state", "gpu_pcie_link_width"}},
		{name: "negative as 32 bits", fill: twice(0xfffffff0), functions: words, gone: []string{"gpu_encoder_sessions", "gpu_remapped_rows", "gpu_retired_pages"}},
		{name: "2^64-1", fill: math.MaxUint64, functions: all, gone: []string{"gpu_device_energy_joules_total", "gpu_ecc_errors", "gpu_bar1_memory_used_bytes"}},
		{name: "2^64-2", fill: math.MaxUint64 - 1, functions: longs, gone: []string{"gpu_device_energy_joules_total", "gpu_ecc_errors", "gpu_device_memory_total_bytes"}},
		{name: "int64 max", fill: math.MaxInt64, functions: longs, gone: []string{"gpu_device_energy_joules_total", "gpu_ecc_errors", "gpu_device_memory_total_bytes"}},
		{name: "int64 max - 13", fill: math.MaxInt64 - 13, functions: longs, gone: []string{"gpu_device_energy_joules_total", "gpu_ecc_errors", "gpu_memory_total_bytes"}},
		{name: "int64 max + 1", fill: 1 << 63, functions: longs, gone: []string{"gpu_device_energy_joules_total", "gpu_ecc_errors"}},
		{name: "NaN as 64 bits", fill: nan, functions: longs, gone: []string{"gpu_device_energy_joules_total", "gpu_ecc_errors"}},
		{name: "above 100 %", fill: twice(101), functions: percents, gone: []string{"gpu_device_utilization_percent", "gpu_device_memory_bandwidth_percent",
			"gpu_device_encoder_percent", "gpu_device_decoder_percent", "gpu_device_jpeg_percent", "gpu_device_ofa_percent"}},
		{name: "NaN of GPM", change: func(h *host) { h.gpm(math.NaN()) }, gone: []string{"gpu_sm_active_ratio", "gpu_dram_active_ratio"}},
		{name: "negative of GPM", change: func(h *host) { h.gpm(-1) }, gone: []string{"gpu_sm_active_ratio", "gpu_tensor_active_ratio"}},
		{name: "above 100 % of GPM", change: func(h *host) { h.gpm(101) }, gone: []string{"gpu_sm_active_ratio", "gpu_fp32_active_ratio"}},
		{name: "memory of a process 2^64-1", change: func(h *host) { h.scenario.GPUs[0].Processes[0].Memory = math.MaxUint64 }, gone: []string{`gpu_memory_used_bytes 100`}},
		{name: "PID 0", change: func(h *host) { h.list(fake.Process{PID: 0, Memory: 5 * gib}) }},
		{name: "PID 2^32-1", change: func(h *host) { h.list(fake.Process{PID: math.MaxUint32, Memory: 5 * gib}) }},
		{name: "PID twice", change: func(h *host) { h.list(fake.Process{PID: 100, Memory: gib}) }},
		{name: "PID dead", change: func(h *host) {
			h.processes = slices.DeleteFunc(h.processes, func(p processes.Process) bool { return p.PID == 101 })
			h.dead = append(h.dead, 101)
		}, gone: []string{"gpu_memory_used_bytes 101", "gpu_utilization_percent 101"}},
		{name: "samples of the future", change: func(h *host) { h.sample(time.Minute, 90) }},
		{name: "samples not after the last", change: func(h *host) { h.sample(-time.Minute, 90) }},
		{name: "samples at time 0", change: func(h *host) { h.sample(-time.Since(time.UnixMicro(0)), 90) }},
		{name: "samples above 100 %", change: func(h *host) { h.sample(200*time.Millisecond, 101) }},
		{name: "samples of 2^32-1", change: func(h *host) { h.sample(200*time.Millisecond, math.MaxUint32) }},
		{name: "samples of PID 0", change: func(h *host) {
			h.scenario.GPUs[0].ProcessSamples = append(h.scenario.GPUs[0].ProcessSamples, fake.ProcessSample{Time: time.Now().Add(200 * time.Millisecond).UnixMicro(), SM: 90})
		}},
	}
	clean := fullHost(t).served(t)
	of := func(values map[string]float64, what string) (n int) {
		family, pid, one := strings.Cut(what, " ")
		for k := range values {
			if strings.HasPrefix(k, family+"{") && (!one || strings.Contains(k, `process_pid="`+pid+`"`)) {
				n++
			}
		}
		return n
	}
	const rest = `gpu_memory_used_bytes{container_id="",`
	for _, tt := range rows {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			h := fullHost(t)
			for _, f := range tt.functions {
				h.scenario.Faults = append(h.scenario.Faults, fake.Fault{Function: "nvmlDeviceGet" + f, GPU: 0, Kind: fake.Fill, Arg: tt.fill})
			}
			if tt.change != nil {
				tt.change(h)
			}
			got := h.served(t)
			for k, v := range got {
				want, ok := clean[k]
				switch {
				case !ok && strings.HasPrefix(k, "gpu_device_info{"): // without the minor, which is a label
				case !ok:
					t.Errorf("new: %s %v", k, v)
				case tt.name == "PID dead" && strings.HasPrefix(k, "gpu_container_processes{"):
					if v != 1 {
						t.Errorf("%s is %v, want 1: the other one is dead", k, v)
					}
				case v != want && !moves(k) && !strings.HasPrefix(k, rest):
					t.Errorf("%s is %v, want %v or nothing", k, v, want)
				case v != v || v < 0 || strings.Contains(k, "_percent{") && v > 100:
					t.Errorf("%s is %v", k, v)
				}
			}
			for _, what := range tt.gone {
				if of(clean, what) == 0 || of(got, what) > 0 {
					t.Errorf("%s: %d series in order, %d now", what, of(clean, what), of(got, what))
				}
			}
			used, device := 0.0, -1.0
			for k, v := range got {
				if strings.HasPrefix(k, "gpu_memory_used_bytes{") {
					used += v
				}
				if strings.HasPrefix(k, "gpu_device_memory_used_bytes{") {
					device = v
				}
			}
			if device >= 0 && used != device {
				t.Errorf("workloads hold %v, the device %v", used, device)
			}
			if of(got, "gpu_up") != 1 || tt.gone == nil && len(got) != len(clean) {
				t.Errorf("%d series, %d in order", len(got), len(clean))
			}
		})
	}
	// Without samples of its own, none of the rows about samples could fail.
	if of(clean, "gpu_utilization_max_percent 100") != 1 || of(clean, "gpu_power_sample_watts_count") != 1 || of(clean, "gpu_device_utilization_max_percent") != 1 {
		t.Errorf("the host in order has no samples: %v", clean)
	}
}

func (h *host) gpm(v float64) {
	for id := range h.scenario.GPUs[0].GPM {
		h.scenario.GPUs[0].GPM[id] = v
	}
}

func (h *host) list(p fake.Process) {
	g := &h.scenario.GPUs[0]
	g.Processes = append(g.Processes, p)
}

// sample adds a sample to each of the driver's rings, this far from now.
func (h *host) sample(from time.Duration, v uint32) {
	g := &h.scenario.GPUs[0]
	at := time.Now().Add(from).UnixMicro()
	g.ProcessSamples = append(g.ProcessSamples, fake.ProcessSample{PID: 100, Time: at, SM: v})
	g.Samples = append(g.Samples, fake.Sample{Ring: 1, Time: uint64(at), Value: fmt.Sprint(v)})
	if v > 100 {
		v = math.MaxUint32 // 101 mW is a power
	}
	g.Samples = append(g.Samples, fake.Sample{Ring: 0, Time: uint64(at), Value: fmt.Sprint(v)})
}
