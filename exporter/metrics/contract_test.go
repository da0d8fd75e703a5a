package metrics

import (
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/snapshot"
	"gpu-exporter/nvml/frame"
	"gpu-exporter/tracer/activity"
)

const (
	fullID = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	uuid   = "GPU-9026ca80-8548-f41f-3e69-ccd41944a5ef"
)

// full is a host that has every figure: one GPU, a container with two processes, one of them gone, and a host process.
func full() *snapshot.Snapshot {
	u, f, n := frame.Some(uint64(1)), frame.Some(1.0), frame.Some(1)
	c := containers.Container{ID: fullID, Name: "job", Image: "image", Requests: []containers.Request{{Text: "all"}}}
	process := func(pid int, c containers.Container, alive bool) snapshot.Workload {
		if !alive {
			return snapshot.Workload{PID: pid, Container: c, CPU: f, Busy: f, Energy: f, HtoD: u, DtoH: u}
		}
		return snapshot.Workload{PID: pid, Container: c, Comm: "c", CPU: f, Alive: alive, Memory: u, Peak: u, Allocated: u, Utilization: f, MaxUtilization: f,
			MemoryBW: f, Encoder: f, Decoder: f, Busy: f, Energy: f, HtoD: u, DtoH: u}
	}
	sampled := func(bounds []float64) *snapshot.Histogram {
		return &snapshot.Histogram{Bounds: bounds, Buckets: make([]uint64, len(bounds)+1), Native: map[int]int64{}}
	}
	call := &activity.Call{Name: "rm_alloc", Count: 3, Seconds: 1, Errors: map[string]uint64{"no_memory": 1}, Buckets: []uint64{1, 2}}
	counts := &snapshot.Counts{Started: 1, Exited: map[string]uint64{"exit": 1}, Opens: map[snapshot.OpenKind]uint64{{Node: "gpu", Result: "ok"}: 1},
		Calls: map[string]*activity.Call{"rm_alloc": call}, Failures: map[string]uint64{uuid: 1}, Launches: 1}
	ratios := map[string]float64{}
	for _, r := range []string{"sm_active", "sm_occupancy", "tensor_active", "dram_active", "fp16_active", "fp32_active", "fp64_active"} {
		ratios[r] = 0.5
	}
	return &snapshot.Snapshot{
		Time: time.Unix(1, 0), Host: input.Host{IP: "192.0.2.1"},
		Sources: map[string]input.Source{input.SourceNVML: {Up: true, Restarts: map[string]uint64{"exit": 1}}, input.SourceDocker: {Up: true},
			input.SourceProcesses: {Up: true}},
		Library: frame.Library{DriverVersion: "580"},
		Devices: []snapshot.Device{{UUID: uuid, State: frame.StateOK, Info: frame.Info{Name: "H200", PCIBusID: "0000:0a:00.0", PCIeGenMax: n, PCIeWidthMax: n},
			Load: &frame.Load{Utilization: f, MemoryBandwidth: f, MemoryUsed: u, MemoryFree: u, MemoryTotal: u, MemoryReserved: u, Temperature: f,
				MemoryTemp: f, Power: f, PowerLimit: f, PState: n, Clocks: map[string]int{"sm": 1}, Throttle: u, Encoder: f, Decoder: f, JPEG: f, OFA: f},
			Health: &frame.Health{ECC: map[string]uint64{"volatile/corrected": 1}, RetiredPages: map[string]uint64{"single_bit": 1}, RemappedRows: map[string]uint64{"corrected": 1},
				RemapPending: frame.Some(false), RemapFailure: frame.Some(false), Fans: []float64{50}, PCIeGen: n, PCIeWidth: n, PCIeReplays: u, EncoderSessions: n, BAR1Used: u},
			GPM: &frame.GPM{Ratio: ratios}, NVLink: []frame.NVLink{{RX: u, TX: u, Errors: map[string]uint64{"replay": 1}}},
			MIG:    []frame.MIG{{UUID: "MIG-1", MemoryUsed: u, MemoryTotal: u, SMCount: n}},
			Energy: f, MaxUtilization: f, MaxSMActive: f, PCIeRX: u, PCIeTX: u, PCIeSource: "gpm", Throttled: map[string]float64{"sw_power_cap": 1},
			Xids: map[uint64]snapshot.Xid{79: {Count: 1, Last: time.Unix(1, 0)}}, Containers: 1, LedgerMismatch: u,
			Utilization: sampled([]float64{0, 50, 100}), Power: sampled([]float64{100, 200})}},
		Workloads: []snapshot.Workload{process(7, c, true), process(8, c, false), process(9, containers.Container{}, true),
			{Alive: true, Memory: u, Energy: frame.Some(5.0), HtoD: frame.Some(uint64(5)), DtoH: frame.Some(uint64(5))}},
		Past:       []snapshot.Workload{{Container: c, Busy: f, Energy: f, HtoD: u, DtoH: u}},
		Containers: []snapshot.Container{{Container: c, Assigned: []containers.Assignment{{UUID: uuid, Source: containers.SourceEnv}}, Processes: map[string]int{uuid: 1}}},
		Activity:   []snapshot.Activity{{Container: c, Counts: counts}},
		Tracer:     &activity.Report{Mode: "fentry", Probes: []activity.Probe{{Library: "libcuda.so.1", Up: true}, {Library: "libcuda.so.1"}}},
		TracerUp:   true,
		Calls:      []frame.Call{{Name: "nvmlInit_v2", Count: 1}},
	}
}

func gather(t *testing.T, s *snapshot.Snapshot, o Options) map[string]*dto.MetricFamily {
	t.Helper()
	list, _, err := New(func() *snapshot.Snapshot { return s }, func(*snapshot.Snapshot) float64 { return 0 }, o).Gather()
	if err == nil { // client_golang checks names, labels and duplicates where it joins what gatherers gave
		list, err = prometheus.Gatherers{prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) { return list, nil })}.Gather()
	}
	if err != nil {
		t.Fatal(err)
	}
	m := map[string]*dto.MetricFamily{}
	for _, f := range list {
		m[f.GetName()] = f
	}
	return m
}

func labelsOf(m *dto.Metric) map[string]string {
	l := map[string]string{}
	for _, p := range m.Label {
		l[p.GetName()] = p.GetValue()
	}
	return l
}

// contract is every family of the metrics contract: its type, its label set (D device, W workload, C container, - none) and further labels.
const contract = `
gpu_utilization_percent gauge W
gpu_utilization_max_percent gauge W
gpu_busy_seconds_total counter W
gpu_memory_used_bytes gauge W
gpu_memory_peak_bytes gauge W
gpu_memory_allocated_bytes gauge W
gpu_memory_total_bytes gauge W
gpu_pci_bandwidth_bytes_total counter W direction
gpu_energy_joules_total counter W
gpu_process_cpu_seconds_total counter W
gpu_process_info gauge W process_name command
gpu_memory_bandwidth_percent gauge W
gpu_encoder_percent gauge W
gpu_decoder_percent gauge W
gpu_container_info gauge C container_full_id image_id gpu_request runtime compose_project compose_service pod namespace
gpu_container_assigned gauge C gpu_device_uuid source
gpu_container_processes gauge C gpu_device_uuid
gpu_processes_started_total counter C
gpu_processes_exited_total counter C reason
gpu_device_opens_total counter C node result
gpu_driver_calls_total counter C call
gpu_driver_call_errors_total counter C call status
gpu_driver_call_duration_seconds histogram C call
gpu_allocation_failures_total counter C gpu_device_uuid
gpu_kernel_launches_total counter C
gpu_up gauge D
gpu_device_info gauge D driver_version vbios serial index minor architecture cuda_capability mig_mode
gpu_device_utilization_percent gauge D
gpu_device_utilization_max_percent gauge D
gpu_device_memory_total_bytes gauge D
gpu_device_memory_used_bytes gauge D
gpu_device_memory_free_bytes gauge D
gpu_device_memory_reserved_bytes gauge D
gpu_device_memory_bandwidth_percent gauge D
gpu_temperature_celsius gauge D
gpu_memory_temperature_celsius gauge D
gpu_power_usage_watts gauge D
gpu_power_limit_watts gauge D
gpu_device_energy_joules_total counter D
gpu_ecc_errors gauge D type severity
gpu_retired_pages gauge D cause
gpu_remapped_rows gauge D cause
gpu_row_remap_pending gauge D
gpu_row_remap_failure gauge D
gpu_xid_errors_total counter D xid
gpu_xid_last_timestamp_seconds gauge D xid
gpu_throttle_reason gauge D reason
gpu_throttle_seconds_total counter D reason
gpu_clock_hertz gauge D domain
gpu_performance_state gauge D
gpu_fan_speed_ratio gauge D fan
gpu_pcie_link_generation gauge D
gpu_pcie_link_width gauge D
gpu_pcie_link_generation_max gauge D
gpu_pcie_link_width_max gauge D
gpu_pcie_replays_total counter D
gpu_device_pcie_bytes_total counter D direction
gpu_device_pcie_info gauge D source
gpu_nvlink_bytes_total counter D link direction
gpu_nvlink_errors_total counter D link type
gpu_bar1_memory_used_bytes gauge D
gpu_encoder_sessions gauge D
gpu_device_encoder_percent gauge D
gpu_device_decoder_percent gauge D
gpu_device_jpeg_percent gauge D
gpu_device_ofa_percent gauge D
gpu_containers gauge D
gpu_sm_active_ratio gauge D
gpu_sm_active_max_ratio gauge D
gpu_sm_occupancy_ratio gauge D
gpu_tensor_active_ratio gauge D
gpu_dram_active_ratio gauge D
gpu_fp16_active_ratio gauge D
gpu_fp32_active_ratio gauge D
gpu_fp64_active_ratio gauge D
gpu_device_utilization_sample_percent histogram D
gpu_power_sample_watts histogram D
gpu_mig_info gauge D gpu_mig_uuid profile gpu_instance compute_instance
gpu_mig_memory_used_bytes gauge D gpu_mig_uuid
gpu_mig_memory_total_bytes gauge D gpu_mig_uuid
gpu_mig_multiprocessors gauge D gpu_mig_uuid
gpu_mig_processes gauge D gpu_mig_uuid
gpu_exporter_nvml_up gauge -
gpu_exporter_nvml_restarts_total counter - reason
gpu_exporter_nvml_call_duration_seconds summary - call
gpu_exporter_tracer_up gauge - mode
gpu_exporter_tracer_events_total counter -
gpu_exporter_tracer_lost_events_total counter -
gpu_exporter_probe_up gauge - library
gpu_exporter_docker_up gauge -
gpu_exporter_docker_reconnects_total counter -
gpu_exporter_snapshot_age_seconds gauge -
gpu_exporter_ledger_mismatch_bytes gauge D
gpu_exporter_process_visibility gauge - reason
gpu_exporter_series gauge -
gpu_exporter_series_limit gauge -
gpu_exporter_series_left_out gauge -
`

// TestContract: each family has its type and its labels, and there is no family beside them.
func TestContract(t *testing.T) {
	got := gather(t, full(), Options{MaxSeries: 1000})
	d := []string{"gpu_device_uuid", "gpu_device_name", "gpu_pci_bus_id", "host_ip"}
	c := []string{"container_id", "container_name", "image_name"}
	sets := map[string][]string{"D": d, "W": slices.Concat(d, c, []string{"process_pid"}), "C": append(c[:3:3], "host_ip"), "-": nil}
	for line := range strings.Lines(strings.TrimSpace(contract)) {
		w := strings.Fields(line)
		f := got[w[0]]
		if f == nil {
			t.Errorf("no family %s", w[0])
			continue
		}
		delete(got, w[0])
		if have := strings.ToLower(f.GetType().String()); have != w[1] {
			t.Errorf("%s is a %s, not a %s", w[0], have, w[1])
		}
		want := slices.Sorted(slices.Values(slices.Concat(sets[w[2]], w[3:])))
		if have := slices.Sorted(maps.Keys(labelsOf(f.Metric[0]))); !slices.Equal(have, want) {
			t.Errorf("%s has the labels %v, not %v", w[0], have, want)
		}
		for i := range families {
			if families[i].name == w[0] && families[i].help == "" {
				t.Errorf("%s has no help", w[0])
			}
		}
	}
	for name := range got {
		t.Errorf("%s is not in the contract", name)
	}
	problems, err := promlint.NewWithMetricFamilies(slices.Collect(maps.Values(gather(t, full(), Options{MaxSeries: 1000})))).Lint()
	if err != nil || len(problems) > 0 {
		t.Errorf("promlint: %v, %v", problems, err)
	}
}

// TestLinger: a process that is gone keeps every counter of its own, and no gauge.
func TestLinger(t *testing.T) {
	got := gather(t, full(), Options{})
	for line := range strings.Lines(strings.TrimSpace(contract)) {
		w := strings.Fields(line)
		if w[2] != "W" {
			continue
		}
		has := slices.ContainsFunc(got[w[0]].Metric, func(m *dto.Metric) bool { return labelsOf(m)["process_pid"] == "8" })
		if counter := w[1] == "counter"; has != counter {
			t.Errorf("%s, a %s: a gone process has it: %v", w[0], w[1], has)
		}
	}
}

// TestValueLabels: the template of 12 labels, to the letter.
func TestValueLabels(t *testing.T) {
	f := gather(t, full(), Options{ValueLabels: true})["gpu_utilization_percent"]
	want := []string{"container_id", "container_name", "gpu_device_name", "gpu_device_uuid", "gpu_memory_total_bytes", "gpu_memory_used_bytes", "gpu_pci_bus_id",
		"gpu_power_usage_watts", "gpu_temperature_celsius", "host_ip", "image_name", "process_pid"}
	l := labelsOf(f.Metric[slices.IndexFunc(f.Metric, func(m *dto.Metric) bool { return labelsOf(m)["container_name"] == "job" })])
	if have := slices.Sorted(maps.Keys(l)); !slices.Equal(have, want) {
		t.Fatalf("labels %v, want %v", have, want)
	}
	if l["gpu_temperature_celsius"] != "1" || l["gpu_memory_total_bytes"] != "1" || l["container_id"] != fullID[:12] {
		t.Fatalf("values %v", l)
	}
}

// TestRelabelling: the two usual rules work on our labels. Prometheus anchors the expression and uses this very engine.
func TestRelabelling(t *testing.T) {
	f := gather(t, full(), Options{})["gpu_utilization_percent"]
	l := labelsOf(f.Metric[slices.IndexFunc(f.Metric, func(m *dto.Metric) bool { return labelsOf(m)["container_name"] == "job" })])
	for _, r := range []struct{ label, regex, want string }{{"container_id", "(.{12}).*", "0123456789ab"}, {"gpu_device_uuid", "GPU-(.{8})-.*", "9026ca80"}} {
		m := regexp.MustCompile("^(?s:" + r.regex + ")$").FindStringSubmatch(l[r.label])
		if m == nil || m[1] != r.want {
			t.Errorf("%s=%q gives %q, want %s", r.label, l[r.label], m, r.want)
		}
	}
}

// TestFold: without processes no series has a PID, the sums over the device stay, and a container keeps what its dropped processes had.
func TestFold(t *testing.T) {
	plain, folded := gather(t, full(), Options{}), gather(t, full(), Options{Fold: true})
	sum := func(f *dto.MetricFamily, container string) (v float64) {
		for _, m := range f.Metric {
			if container == "*" || labelsOf(m)["container_name"] == container {
				v += m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
		}
		return v
	}
	for _, name := range []string{"gpu_memory_used_bytes", "gpu_energy_joules_total", "gpu_pci_bandwidth_bytes_total"} {
		if p, f := sum(plain[name], "*"), sum(folded[name], "*"); p != f {
			t.Errorf("%s: %v with processes, %v without", name, p, f)
		}
		for _, m := range folded[name].Metric {
			if pid := labelsOf(m)["process_pid"]; pid != "" {
				t.Errorf("%s has a series of process %s", name, pid)
			}
		}
	}
	// Two processes of 1 J each, and 1 J of those before; the rest of 5 J has that joule too, and the host process its own.
	if v := sum(folded["gpu_energy_joules_total"], "job"); v != 3 {
		t.Errorf("the container used %v J, want 3", v)
	}
	if v := sum(folded["gpu_energy_joules_total"], ""); v != 5 {
		t.Errorf("the rest is %v J, want 5", v)
	}
	if folded["gpu_process_info"] != nil {
		t.Error("gpu_process_info without processes")
	}
}

// seriesIn counts as Prometheus does.
func seriesIn(m map[string]*dto.MetricFamily) (n int) {
	for _, f := range m {
		for _, x := range f.Metric {
			switch {
			case x.Histogram != nil:
				n += len(x.Histogram.Bucket) + 3
			case x.Summary != nil:
				n += 2
			default:
				n++
			}
		}
	}
	return n
}

// TestMaxSeries: the bound holds at every height, says what it left out, and takes processes before devices: first they are summed into containers.
func TestMaxSeries(t *testing.T) {
	all := seriesIn(gather(t, full(), Options{}))
	for most := 4; most < all+10; most += 7 {
		m := gather(t, full(), Options{MaxSeries: most})
		n := seriesIn(m) - 1 // the limit's own
		value := func(name string) int { return int(m[name].Metric[0].GetGauge().GetValue()) }
		left := value("gpu_exporter_series_left_out")
		if n > most || value("gpu_exporter_series") != n+1 || n+left != all || (left > 0) != (all+1 > most) || value("gpu_exporter_series_limit") != most {
			t.Fatalf("bound %d: %d series, %d left out, %d in all", most, n, left, all)
		}
		if m["gpu_energy_joules_total"] != nil && m["gpu_device_energy_joules_total"] == nil {
			t.Fatalf("bound %d: processes without their device", most)
		}
		if used := m["gpu_memory_used_bytes"]; left > 0 && used != nil && labelsOf(used.Metric[len(used.Metric)-1])["process_pid"] != "" {
			t.Fatalf("bound %d: processes although the bound bites", most)
		}
	}
}

// TestSeriesCount: the README says how many series a GPU, a process and a container make, and how many a kind of driver call makes in each.
func TestSeriesCount(t *testing.T) {
	count := func(change func(*snapshot.Snapshot)) int {
		s := full()
		change(s)
		return seriesIn(gather(t, s, Options{}))
	}
	all := count(func(*snapshot.Snapshot) {})
	process := all - count(func(s *snapshot.Snapshot) { s.Workloads = slices.Delete(s.Workloads, 0, 1) })
	call := all - count(func(s *snapshot.Snapshot) { s.Activity[0].Counts.Calls = nil })
	container := all - count(func(s *snapshot.Snapshot) { s.Containers, s.Activity = nil, nil }) - call
	b, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	device := seriesIn(gather(t, demo(t), Options{Include: regexp.MustCompile("^gpu_.*"), Exclude: regexp.MustCompile("^gpu_(exporter|container|driver|process|memory_(used|total|b)|utilization|busy|energy|pci_|encoder_p|decoder_p).*")})) - 2
	want := fmt.Sprintf("%d series per GPU (an H200), %d per process, %d per container, and %d per container and kind of driver call", device, process, container, call)
	if !strings.Contains(strings.Join(strings.Fields(string(b)), " "), want) {
		t.Errorf("README.md does not say: %s", want)
	}
}

// TestNative: a histogram has both forms, and they agree.
func TestNative(t *testing.T) {
	h := gather(t, demo(t), Options{})["gpu_device_utilization_sample_percent"].Metric[0].Histogram
	native := int64(h.GetZeroCount())
	var sum int64
	for _, d := range h.PositiveDelta {
		sum += d
		native += sum
	}
	if h.GetSampleCount() < 100 || uint64(native) != h.GetSampleCount() || len(h.Bucket) == 0 || h.Bucket[len(h.Bucket)-1].GetCumulativeCount() != h.GetSampleCount() {
		t.Fatalf("%d samples, %d in native buckets: %v", h.GetSampleCount(), native, h.Bucket)
	}
}
