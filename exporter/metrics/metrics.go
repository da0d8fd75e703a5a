// Package metrics exposes a snapshot to Prometheus. The value of every series is taken from the snapshot at each scrape, so nothing that is gone
// is repeated, and a scrape makes no call to anything.
package metrics

import (
	"cmp"
	"iter"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	dto "github.com/prometheus/client_model/go"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/snapshot"
	"gpu-exporter/nvml/frame"
)

// Options says what to expose.
type Options struct {
	Include *regexp.Regexp // families to expose; nil: all
	Exclude *regexp.Regexp // families to leave out; nil: none

	// Fold sums processes into their containers: no series has a process_pid.
	Fold bool
	// ValueLabels adds temperature, power and memory as labels to gpu_utilization_percent: a new series with every change of one.
	ValueLabels bool
	// MaxSeries bounds the series of a scrape. Where it bites, processes are summed into their containers, and where that is not enough, containers
	// into their device, so that sums over a device stay what they were. Zero: no bound.
	MaxSeries int
	// More gives families that come after the snapshot's, and are not counted; nil: none. They are not changed.
	More func() []*dto.MetricFamily
}

// valueLabels are those that Options.ValueLabels adds.
var valueLabels = []string{"gpu_temperature_celsius", "gpu_power_usage_watts", "gpu_memory_used_bytes", "gpu_memory_total_bytes"}

// The label sets of the metrics contract.
var (
	deviceLabels    = []string{"gpu_device_uuid", "gpu_device_name", "gpu_pci_bus_id", "host_ip"}
	workloadLabels  = append(append([]string{}, deviceLabels...), "container_id", "container_name", "image_name", "process_pid")
	containerLabels = []string{"container_id", "container_name", "image_name", "host_ip"}
)

// family is one metric family, a gauge unless it says otherwise.
type family struct {
	name, help, source string
	labels             []string

	counter, summary, histogram bool
}

func (f *family) kind() dto.MetricType {
	switch {
	case f.counter:
		return dto.MetricType_COUNTER
	case f.summary:
		return dto.MetricType_SUMMARY
	case f.histogram:
		return dto.MetricType_HISTOGRAM
	}
	return dto.MetricType_GAUGE
}

func with(base []string, extra ...string) []string {
	return append(append([]string{}, base...), extra...)
}

// Where families come from.
const (
	fromNVML   = "NVML"
	fromGPM    = "NVML (GPM)"
	fromDocker = "Docker"
	fromProc   = "/proc"
	fromTracer = "tracer"
	fromProbes = "libcuda probes"
	fromItself = "exporter"

	tracerNVML = "tracer, else NVML" // by process
	nvmlTracer = "NVML and tracer"
	probesNVML = "libcuda probes, the rest NVML"
)

var families = []family{
	{name: "gpu_utilization_percent", source: fromNVML, help: "SM time of the process, mean of the driver's samples in the last reading.", labels: workloadLabels},
	{name: "gpu_utilization_max_percent", source: fromNVML, help: "Highest SM sample of the process in the trailing window.", labels: workloadLabels},
	{name: "gpu_memory_bandwidth_percent", source: fromNVML, help: "Memory time of the process.", labels: workloadLabels},
	{name: "gpu_encoder_percent", source: fromNVML, help: "Video encoder time of the process.", labels: workloadLabels},
	{name: "gpu_decoder_percent", source: fromNVML, help: "Video decoder time of the process.", labels: workloadLabels},
	{name: "gpu_busy_seconds_total", source: fromNVML, help: "SM time of the process, integrated.", labels: workloadLabels, counter: true},
	{name: "gpu_memory_used_bytes", source: tracerNVML, help: "Memory held by the process; the series without labels of container and process is what no process accounts for.", labels: workloadLabels},
	{name: "gpu_memory_peak_bytes", source: fromTracer, help: "Highest memory held in the trailing window, from kernel events.", labels: workloadLabels},
	{name: "gpu_memory_allocated_bytes", source: fromProbes, help: "Memory held through CUDA allocation calls.", labels: workloadLabels},
	{name: "gpu_energy_joules_total", source: fromNVML, help: "The device's energy, shared out by SM time; the series without labels of container and process has the rest.", labels: workloadLabels, counter: true},
	{name: "gpu_pci_bandwidth_bytes_total", source: probesNVML, help: "Bytes copied by the process; the series without labels of container and process has the rest of the device's traffic.", labels: with(workloadLabels, "direction"), counter: true},
	{name: "gpu_memory_total_bytes", source: fromNVML, help: "The device's memory, on every workload.", labels: workloadLabels},
	{name: "gpu_process_cpu_seconds_total", source: fromProc, help: "CPU time of the process.", labels: workloadLabels, counter: true},
	{name: "gpu_process_info", source: fromProc, help: "Name and command line of the process.", labels: with(workloadLabels, "process_name", "command")},

	{name: "gpu_container_info", source: fromDocker, help: "What Docker says of a container with a GPU.", labels: with(containerLabels, "container_full_id", "image_id", "gpu_request", "runtime", "compose_project", "compose_service", "pod", "namespace")},
	{name: "gpu_container_assigned", source: fromDocker, help: "GPUs that the container may use.", labels: with(containerLabels, "gpu_device_uuid", "source")},
	{name: "gpu_container_processes", source: nvmlTracer, help: "Processes of the container with a context on the device.", labels: with(containerLabels, "gpu_device_uuid")},

	{name: "gpu_processes_started_total", source: fromTracer, help: "Processes that opened a GPU.", labels: containerLabels, counter: true},
	{name: "gpu_processes_exited_total", source: fromTracer, help: "Processes with a GPU that ended: exit (status 0), error (another status) or signal.", labels: with(containerLabels, "reason"), counter: true},
	{name: "gpu_device_opens_total", source: fromTracer, help: "Opens of device nodes by kind and result.", labels: with(containerLabels, "node", "result"), counter: true},
	{name: "gpu_driver_calls_total", source: fromTracer, help: "Calls of the driver.", labels: with(containerLabels, "call"), counter: true},
	{name: "gpu_driver_call_errors_total", source: fromTracer, help: "Calls that the driver refused, probing of its abilities left out.", labels: with(containerLabels, "call", "status"), counter: true},
	{name: "gpu_allocation_failures_total", source: fromTracer, help: "Requests of memory that the device could not meet.", labels: with(containerLabels, "gpu_device_uuid"), counter: true},
	{name: "gpu_kernel_launches_total", source: fromProbes, help: "Kernel launches, where they are probed.", labels: containerLabels, counter: true},

	{name: "gpu_up", source: fromNVML, help: "1 if the device can be read.", labels: deviceLabels},
	{name: "gpu_device_info", source: fromNVML, help: "What does not change about the device.", labels: with(deviceLabels, "driver_version", "vbios", "serial", "index", "minor", "architecture", "cuda_capability", "mig_mode")},
	{name: "gpu_device_utilization_percent", source: fromNVML, help: "Time in which a kernel ran, of the driver's last period.", labels: deviceLabels},
	{name: "gpu_device_utilization_max_percent", source: fromNVML, help: "Highest 200 ms sample in the trailing window.", labels: deviceLabels},
	{name: "gpu_device_memory_bandwidth_percent", source: fromNVML, help: "Time in which memory was accessed.", labels: deviceLabels},
	{name: "gpu_device_memory_total_bytes", source: fromNVML, help: "Memory of the device.", labels: deviceLabels},
	{name: "gpu_device_memory_used_bytes", source: fromNVML, help: "Memory in use, without the driver's reserved part.", labels: deviceLabels},
	{name: "gpu_device_memory_free_bytes", source: fromNVML, help: "Memory not in use.", labels: deviceLabels},
	{name: "gpu_device_memory_reserved_bytes", source: fromNVML, help: "Memory that the driver keeps for itself.", labels: deviceLabels},
	{name: "gpu_bar1_memory_used_bytes", source: fromNVML, help: "BAR1 memory in use.", labels: deviceLabels},
	{name: "gpu_temperature_celsius", source: fromNVML, help: "GPU sensor.", labels: deviceLabels},
	{name: "gpu_memory_temperature_celsius", source: fromNVML, help: "Memory sensor.", labels: deviceLabels},
	{name: "gpu_power_usage_watts", source: fromNVML, help: "Power drawn.", labels: deviceLabels},
	{name: "gpu_power_limit_watts", source: fromNVML, help: "Power limit in force.", labels: deviceLabels},
	{name: "gpu_device_energy_joules_total", source: fromNVML, help: "Energy since the driver was loaded.", labels: deviceLabels, counter: true},
	{name: "gpu_performance_state", source: fromNVML, help: "P-state, 0 fastest.", labels: deviceLabels},
	{name: "gpu_clock_hertz", source: fromNVML, help: "Clock by domain.", labels: with(deviceLabels, "domain")},
	{name: "gpu_device_encoder_percent", source: fromNVML, help: "Video encoder.", labels: deviceLabels},
	{name: "gpu_device_decoder_percent", source: fromNVML, help: "Video decoder.", labels: deviceLabels},
	{name: "gpu_device_jpeg_percent", source: fromNVML, help: "JPEG engine.", labels: deviceLabels},
	{name: "gpu_device_ofa_percent", source: fromNVML, help: "Optical-flow engine.", labels: deviceLabels},
	{name: "gpu_throttle_reason", source: fromNVML, help: "1 while the reason holds the clocks down.", labels: with(deviceLabels, "reason")},
	{name: "gpu_throttle_seconds_total", source: fromNVML, help: "Time for which the reason held the clocks down.", labels: with(deviceLabels, "reason"), counter: true},
	{name: "gpu_ecc_errors", source: fromNVML, help: "ECC errors since the driver was loaded (volatile) or in the board's life (aggregate).", labels: with(deviceLabels, "type", "severity")},
	{name: "gpu_retired_pages", source: fromNVML, help: "Pages of memory retired.", labels: with(deviceLabels, "cause")},
	{name: "gpu_remapped_rows", source: fromNVML, help: "Rows of memory remapped.", labels: with(deviceLabels, "cause")},
	{name: "gpu_row_remap_pending", source: fromNVML, help: "1 if a remap waits for a reset.", labels: deviceLabels},
	{name: "gpu_row_remap_failure", source: fromNVML, help: "1 if a remap failed.", labels: deviceLabels},
	{name: "gpu_xid_errors_total", source: nvmlTracer, help: "Xid reports since the exporter started.", labels: with(deviceLabels, "xid"), counter: true},
	{name: "gpu_xid_last_timestamp_seconds", source: nvmlTracer, help: "When the Xid was last reported.", labels: with(deviceLabels, "xid")},
	{name: "gpu_fan_speed_ratio", source: fromNVML, help: "Fan speed of its maximum.", labels: with(deviceLabels, "fan")},
	{name: "gpu_pcie_link_generation", source: fromNVML, help: "PCIe generation now.", labels: deviceLabels},
	{name: "gpu_pcie_link_width", source: fromNVML, help: "PCIe lanes now.", labels: deviceLabels},
	{name: "gpu_pcie_link_generation_max", source: fromNVML, help: "Highest PCIe generation of device and slot.", labels: deviceLabels},
	{name: "gpu_pcie_link_width_max", source: fromNVML, help: "Most PCIe lanes of device and slot.", labels: deviceLabels},
	{name: "gpu_pcie_replays_total", source: fromNVML, help: "PCIe replays.", labels: deviceLabels, counter: true},
	{name: "gpu_device_pcie_bytes_total", source: fromNVML, help: "PCIe traffic, protocol overhead included.", labels: with(deviceLabels, "direction"), counter: true},
	{name: "gpu_device_pcie_info", source: fromNVML, help: "Where the PCIe traffic is read from: gpm, fields or throughput (sampled).", labels: with(deviceLabels, "source")},
	{name: "gpu_nvlink_bytes_total", source: fromNVML, help: "Traffic of an NVLink.", labels: with(deviceLabels, "link", "direction"), counter: true},
	{name: "gpu_nvlink_errors_total", source: fromNVML, help: "Errors of an NVLink.", labels: with(deviceLabels, "link", "type"), counter: true},
	{name: "gpu_mig_info", source: fromNVML, help: "MIG instances. Their figures are parts of the device's.", labels: with(deviceLabels, "gpu_mig_uuid", "profile", "gpu_instance", "compute_instance")},
	{name: "gpu_mig_memory_used_bytes", source: fromNVML, help: "Memory in use of a MIG instance.", labels: with(deviceLabels, "gpu_mig_uuid")},
	{name: "gpu_mig_memory_total_bytes", source: fromNVML, help: "Memory of a MIG instance.", labels: with(deviceLabels, "gpu_mig_uuid")},
	{name: "gpu_mig_multiprocessors", source: fromNVML, help: "Multiprocessors of a MIG instance.", labels: with(deviceLabels, "gpu_mig_uuid")},
	{name: "gpu_mig_processes", source: fromNVML, help: "Processes on a MIG instance.", labels: with(deviceLabels, "gpu_mig_uuid")},
	{name: "gpu_encoder_sessions", source: fromNVML, help: "Encoder sessions.", labels: deviceLabels},
	{name: "gpu_containers", source: nvmlTracer, help: "Containers with a process on the device.", labels: deviceLabels},
	{name: "gpu_sm_active_max_ratio", source: fromGPM, help: "Highest short reading of SM activity in the trailing window (GPM).", labels: deviceLabels},
	{name: "gpu_sm_active_ratio", source: fromGPM, help: "SM activity (GPM).", labels: deviceLabels},
	{name: "gpu_sm_occupancy_ratio", source: fromGPM, help: "Warps resident of those possible (GPM).", labels: deviceLabels},
	{name: "gpu_tensor_active_ratio", source: fromGPM, help: "Tensor pipe activity (GPM).", labels: deviceLabels},
	{name: "gpu_dram_active_ratio", source: fromGPM, help: "Memory bandwidth of the maximum (GPM).", labels: deviceLabels},
	{name: "gpu_fp16_active_ratio", source: fromGPM, help: "FP16 pipe activity (GPM).", labels: deviceLabels},
	{name: "gpu_fp32_active_ratio", source: fromGPM, help: "FP32 pipe activity (GPM).", labels: deviceLabels},
	{name: "gpu_fp64_active_ratio", source: fromGPM, help: "FP64 pipe activity (GPM).", labels: deviceLabels},

	{name: "gpu_exporter_nvml_up", source: fromNVML, help: "1 if NVML can be read."},
	{name: "gpu_exporter_nvml_restarts_total", source: fromNVML, help: "Replacements of the NVML worker.", labels: []string{"reason"}, counter: true},
	{name: "gpu_exporter_docker_up", source: fromDocker, help: "1 if Docker answers."},
	{name: "gpu_exporter_docker_reconnects_total", source: fromDocker, help: "Reconnections to Docker.", counter: true},
	{name: "gpu_exporter_tracer_up", source: fromTracer, help: "1 if the kernel tracer runs.", labels: []string{"mode"}},
	{name: "gpu_exporter_tracer_events_total", source: fromTracer, help: "Kernel events read.", counter: true},
	{name: "gpu_exporter_tracer_lost_events_total", source: fromTracer, help: "Kernel events lost.", counter: true},
	{name: "gpu_exporter_probe_up", source: fromProbes, help: "1 if the calls into a libcuda are seen.", labels: []string{"library"}},
	{name: "gpu_exporter_ledger_mismatch_bytes", source: nvmlTracer, help: "Bytes by which the tracer's ledger and NVML differ, over the processes that both know.", labels: deviceLabels},
	{name: "gpu_exporter_process_visibility", source: fromProc, help: "1 if every process is seen; else 0, and why.", labels: []string{"reason"}},
	{name: "gpu_exporter_snapshot_age_seconds", source: fromItself, help: "Age of the snapshot served."},

	{name: "gpu_exporter_nvml_call_duration_seconds", source: fromNVML, help: "Time spent in NVML calls.", labels: []string{"call"}, summary: true},
	{name: "gpu_driver_call_duration_seconds", source: fromTracer, help: "Time spent in the driver; calls that are seldom made are other.", labels: with(containerLabels, "call"), histogram: true},
	{name: "gpu_device_utilization_sample_percent", source: fromNVML, help: "The driver's samples of utilisation, one per 200 ms.", labels: deviceLabels, histogram: true},
	{name: "gpu_power_sample_watts", source: fromNVML, help: "The driver's samples of power, one per 20 ms.", labels: deviceLabels, histogram: true},
}

// bounds are the families that tell of the bound on series. They are always there, the limit where there is one, and count themselves.
var bounds = []family{
	{name: "gpu_exporter_series", source: fromItself, help: "Series of this scrape."},
	{name: "gpu_exporter_series_limit", source: fromItself, help: "The bound on series of a scrape (--metrics.max-series)."},
	{name: "gpu_exporter_series_left_out", source: fromItself, help: "Series fewer than this scrape would have without the bound."},
}

// Family describes a metric family.
type Family struct {
	Name, Help string
	Type       string // as in the text format: gauge, counter, histogram, summary
	Source     string // what tells of it
	Labels     []string
}

// Families describes every family that a scrape may have, but those of Options.More.
func Families() []Family {
	var list []Family
	for _, f := range slices.Concat(families, bounds) {
		list = append(list, Family{Name: f.name, Help: f.help, Type: strings.ToLower(f.kind().String()), Source: f.source, Labels: f.labels})
	}
	return list
}

// Gatherer exposes the latest snapshot.
type Gatherer struct {
	latest func() *snapshot.Snapshot
	age    func(*snapshot.Snapshot) float64
	o      Options
	idle   atomic.Pointer[exposition] // of a scrape that is over; nil: none has been, or others use theirs
	texts  atomic.Pointer[exposition] // the same, for the text formats

	mu sync.Mutex
	// The form of workloads in use. It only becomes coarser: counters of the unattributed series would fall were it to go back.
	detail int
	since  map[key]snapshot.Workload // see fold
	cut    bool                      // the latest scrape lacks series that did not fit in its form either
}

// The forms in which workloads are shown, each with fewer series than the one before.
const (
	byProcess = iota
	byContainer
	byDevice
)

// New returns a gatherer of latest, which must not return nil. age tells a snapshot's age in seconds.
func New(latest func() *snapshot.Snapshot, age func(*snapshot.Snapshot) float64, o Options) *Gatherer {
	return &Gatherer{latest: latest, age: age, o: o, detail: o.detail()}
}

// detail is the form of workloads that is asked for.
func (o Options) detail() int {
	if o.Fold {
		return byContainer
	}
	return byProcess
}

// Detail tells in which form workloads are shown; another number means that their series are others.
func (g *Gatherer) Detail() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.detail
}

// Cut tells whether the latest scrape lacks series for which there was no room.
func (g *Gatherer) Cut() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.cut
}

// opt adds a series unless its value is absent.
func opt[T int | uint64 | float64](e *exposition, name string, v frame.Opt[T], labels ...string) {
	if v.OK {
		e.put(name, float64(v.V), labels...)
	}
}

// each goes through a map, where the bound cuts series off in order: what is cut must not be another at each scrape.
func each[K comparable, V any](e *exposition, m map[K]V, compare func(K, K) int) iter.Seq2[K, V] {
	return func(yield func(K, V) bool) { walk(e.inOrder, m, compare, yield) } // so small that it is inlined and allocates nothing
}

func walk[K comparable, V any](inOrder bool, m map[K]V, compare func(K, K) int, yield func(K, V) bool) {
	if !inOrder {
		maps.All(m)(yield)
		return
	}
	for _, k := range slices.SortedFunc(maps.Keys(m), compare) {
		if !yield(k, m[k]) {
			return
		}
	}
}

func byNode(x, y snapshot.OpenKind) int {
	return cmp.Or(cmp.Compare(x.Node, y.Node), cmp.Compare(x.Result, y.Result))
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// Gather implements prometheus.TransactionalGatherer: the families are good until done is called.
func (g *Gatherer) Gather() (list []*dto.MetricFamily, done func(), err error) {
	e := g.idle.Swap(nil)
	if e == nil {
		e = newExposition(g.o, false)
	}
	g.collect(e)
	list, err = e.finish()
	if g.o.More != nil {
		e.list = append(list, g.o.More()...)
	}
	return e.list, func() { g.idle.Store(e) }, err
}

// collect adds every series, in the form that the bound allows.
func (g *Gatherer) collect(e *exposition) {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.latest()
	fits := g.series(e, s, g.o.detail())
	all := e.sent + e.leftOut
	if e.leftOut > 0 && g.detail == byProcess {
		g.since = make(map[key]snapshot.Workload, len(s.Past))
		for _, p := range s.Past {
			g.since[key{p.Device, p.Container.ID}] = p
		}
		g.detail = byContainer
	}
	if g.detail != g.o.detail() {
		fits = g.series(e, s, g.detail)
	}
	if !fits && g.detail != byDevice {
		g.detail = byDevice
		g.series(e, s, g.detail)
	}
	if g.cut = e.leftOut > 0; g.cut && !e.inOrder {
		e.inOrder = true
		g.series(e, s, g.detail)
	}
	sent := e.sent
	e.most = 0
	e.put("gpu_exporter_series", float64(sent))
	e.put("gpu_exporter_series_left_out", float64(max(0, all-sent)))
	if g.o.MaxSeries > 0 {
		e.put("gpu_exporter_series_limit", float64(g.o.MaxSeries))
	}
	e.most = g.o.MaxSeries
}

// series adds every series, with workloads in the given form, and returns whether those of the workloads fit. What comes last is what is cut off.
func (g *Gatherer) series(e *exposition, s *snapshot.Snapshot, detail int) (fits bool) {
	e.begin()
	e.sent = 3 // those that tell of the bound
	own(e, s)
	e.put("gpu_exporter_snapshot_age_seconds", g.age(s))
	base := make([][]string, len(s.Devices))
	seen := make(map[string]bool, len(s.Devices))
	for i, d := range s.Devices {
		uuid := d.UUID
		if uuid == "" {
			uuid = "unknown-" + strconv.Itoa(d.Index) // could never be opened, and counts as one that is not up
		}
		if seen[uuid] {
			continue // of a driver that gives two devices one name, the first
		}
		seen[uuid] = true
		base[i] = []string{uuid, d.Info.Name, d.Info.PCIBusID, s.Host.IP}
		device(e, s, &s.Devices[i], base[i])
	}
	for i := range s.Containers {
		container(e, s, &s.Containers[i])
	}
	workloads := s.Workloads
	if detail != byProcess {
		workloads = fold(s, detail == byDevice, g.since)
	}
	for _, rest := range []bool{true, false} {
		for i := range workloads {
			w := &workloads[i]
			if unattributed := w.PID == 0 && w.Container.ID == ""; unattributed == rest && base[w.Device] != nil {
				g.workload(e, s, w, base[w.Device])
			}
		}
	}
	fits = e.leftOut == 0
	for i := range s.Activity {
		did(e, s, &s.Activity[i])
	}
	for _, call := range s.Calls {
		// Two series a call: buckets of fifty calls were five of six series of a host with one GPU, and most of a scrape's cost.
		e.summary("gpu_exporter_nvml_call_duration_seconds", call.Count, call.Seconds, call.Name)
	}
	return fits
}

// own sends what the exporter says of itself.
func own(e *exposition, s *snapshot.Snapshot) {
	up := func(name string) float64 { return truth(s.Sources[name].Up) }
	e.put("gpu_exporter_nvml_up", up(input.SourceNVML))
	e.put("gpu_exporter_docker_up", up(input.SourceDocker))
	for reason, n := range each(e, s.Sources[input.SourceNVML].Restarts, cmp.Compare) {
		e.put("gpu_exporter_nvml_restarts_total", float64(n), reason)
	}
	var reconnects uint64
	for _, n := range s.Sources[input.SourceDocker].Restarts {
		reconnects += n
	}
	e.put("gpu_exporter_docker_reconnects_total", float64(reconnects))
	if src, ok := s.Sources[input.SourceProcesses]; ok {
		reason := "ok"
		if !src.Up {
			reason, _, _ = strings.Cut(src.Reason, ":")
		}
		e.put("gpu_exporter_process_visibility", truth(src.Up), reason)
	}
	r := s.Tracer
	if r == nil {
		if _, ok := s.Sources[input.SourceTracer]; ok {
			e.put("gpu_exporter_tracer_up", 0, "off")
		}
		return
	}
	e.put("gpu_exporter_tracer_up", truth(s.TracerUp), r.Mode)
	e.put("gpu_exporter_tracer_events_total", float64(r.Events))
	var lost uint64
	for _, n := range r.Lost {
		lost += n
	}
	e.put("gpu_exporter_tracer_lost_events_total", float64(lost))
	if s.TracerUp {
		probes := map[string]bool{}
		for _, p := range r.Probes { // containers may have their libraries under one name
			probes[p.Library] = p.Up && (probes[p.Library] || !has(probes, p.Library))
		}
		for library, up := range each(e, probes, cmp.Compare) {
			e.put("gpu_exporter_probe_up", truth(up), library)
		}
	}
}

func has[K comparable, V any](m map[K]V, k K) bool {
	_, ok := m[k]
	return ok
}

// driverBuckets are the duration buckets of activity.Call that are exposed: 8 µs, 131 µs, 1 ms, 8 ms, 134 ms and 1.07 s. All of them would be
// 40 series per call and container.
var driverBuckets = []int{12, 16, 19, 22, 26, 29}

// driverBounds are their upper bounds in seconds.
var driverBounds = func() (bounds []float64) {
	for _, i := range driverBuckets {
		bounds = append(bounds, math.Ldexp(1e-9, i+1))
	}
	return bounds
}()

// did sends what one container did to the driver.
func did(e *exposition, s *snapshot.Snapshot, a *snapshot.Activity) {
	base := []string{containers.ShortID(a.Container.ID), a.Container.Name, a.Container.Image, s.Host.IP}
	c := a.Counts
	e.put("gpu_processes_started_total", float64(c.Started), base...)
	for reason, n := range each(e, c.Exited, cmp.Compare) {
		e.put("gpu_processes_exited_total", float64(n), e.with(base, reason)...)
	}
	for k, n := range each(e, c.Opens, byNode) {
		e.put("gpu_device_opens_total", float64(n), e.with(base, k.Node, k.Result)...)
	}
	for uuid, n := range each(e, c.Failures, cmp.Compare) {
		e.put("gpu_allocation_failures_total", float64(n), e.with(base, uuid)...)
	}
	if c.Launches > 0 {
		e.put("gpu_kernel_launches_total", float64(c.Launches), base...)
	}
	for name, call := range each(e, c.Calls, cmp.Compare) {
		e.put("gpu_driver_calls_total", float64(call.Count), e.with(base, name)...)
		for status, n := range each(e, call.Errors, cmp.Compare) {
			e.put("gpu_driver_call_errors_total", float64(n), e.with(base, name, status)...)
		}
	}
	durations(e, base, c)
}

// timed are the calls whose durations have histograms of their own: those that allocate, free and map, and the one that does the rest. A CUDA
// process makes some 25 kinds of calls, most of them once.
var timed = [...]string{"rm_alloc", "rm_free", "rm_control", "rm_map_memory", "uvm_map_external_allocation", "other"}

// durations sends the histograms of the time in the driver; calls that are not timed apart are "other".
func durations(e *exposition, base []string, c *snapshot.Counts) {
	var sums [len(timed)]struct {
		seconds float64
		count   uint64
		upTo    [6]uint64 // by driverBuckets
		any     bool
	}
	// In order: sums of the same numbers in another order differ in their last bit, and a counter that falls by that has begun anew.
	for _, name := range slices.Sorted(maps.Keys(c.Calls)) {
		call := c.Calls[name]
		i := slices.Index(timed[:], name)
		if i < 0 {
			i = len(timed) - 1
		}
		h := &sums[i]
		h.seconds += call.Seconds
		h.any = h.any || len(call.Buckets) > 0
		for bucket, n := range call.Buckets {
			h.count += n
			for k, last := range driverBuckets {
				if bucket <= last {
					h.upTo[k] += n
				}
			}
		}
	}
	for i := range sums {
		if h := &sums[i]; h.any {
			e.buckets("gpu_driver_call_duration_seconds", driverBounds, h.upTo[:], h.count, h.seconds, e.with(base, timed[i])...)
		}
	}
}

func device(e *exposition, s *snapshot.Snapshot, d *snapshot.Device, base []string) {
	l := func(extra ...string) []string {
		if len(extra) == 0 {
			return base
		}
		return e.with(base, extra...)
	}
	e.put("gpu_up", truth(d.State == frame.StateOK), l()...)
	minor, mig := "", ""
	if d.Info.Minor.OK {
		minor = strconv.Itoa(d.Info.Minor.V)
	}
	if d.Info.MIGMode.OK {
		mig = map[bool]string{false: "off", true: "on"}[d.Info.MIGMode.V]
	}
	e.put("gpu_device_info", 1, l(s.Library.DriverVersion, d.Info.VBIOS, d.Info.Serial, strconv.Itoa(d.Index), minor, d.Info.Architecture, d.Info.CUDACapability, mig)...)
	for xid, x := range each(e, d.Xids, cmp.Compare) {
		n := strconv.FormatUint(xid, 10)
		e.put("gpu_xid_errors_total", float64(x.Count), l(n)...)
		e.put("gpu_xid_last_timestamp_seconds", float64(x.Last.UnixMilli())/1000, l(n)...)
	}
	for reason, v := range each(e, d.Throttled, cmp.Compare) {
		e.put("gpu_throttle_seconds_total", v, l(reason)...)
	}
	opt(e, "gpu_device_pcie_bytes_total", d.PCIeRX, l("host_to_device")...)
	opt(e, "gpu_device_pcie_bytes_total", d.PCIeTX, l("device_to_host")...)
	e.histogram("gpu_device_utilization_sample_percent", d.Utilization, base...)
	e.histogram("gpu_power_sample_watts", d.Power, base...)
	if d.PCIeSource != "" {
		e.put("gpu_device_pcie_info", 1, l(d.PCIeSource)...)
	}
	opt(e, "gpu_device_energy_joules_total", d.Energy, l()...)
	opt(e, "gpu_exporter_ledger_mismatch_bytes", d.LedgerMismatch, l()...)
	if d.State != frame.StateOK {
		return
	}
	e.put("gpu_containers", float64(d.Containers), l()...)
	opt(e, "gpu_device_utilization_max_percent", d.MaxUtilization, l()...)
	opt(e, "gpu_sm_active_max_ratio", d.MaxSMActive, l()...)
	opt(e, "gpu_pcie_link_generation_max", d.Info.PCIeGenMax, l()...)
	opt(e, "gpu_pcie_link_width_max", d.Info.PCIeWidthMax, l()...)
	if r := d.Load; r != nil {
		opt(e, "gpu_device_utilization_percent", r.Utilization, l()...)
		opt(e, "gpu_device_memory_bandwidth_percent", r.MemoryBandwidth, l()...)
		opt(e, "gpu_device_memory_total_bytes", r.MemoryTotal, l()...)
		opt(e, "gpu_device_memory_used_bytes", r.MemoryUsed, l()...)
		opt(e, "gpu_device_memory_free_bytes", r.MemoryFree, l()...)
		opt(e, "gpu_device_memory_reserved_bytes", r.MemoryReserved, l()...)
		opt(e, "gpu_temperature_celsius", r.Temperature, l()...)
		opt(e, "gpu_memory_temperature_celsius", r.MemoryTemp, l()...)
		opt(e, "gpu_power_usage_watts", r.Power, l()...)
		opt(e, "gpu_power_limit_watts", r.PowerLimit, l()...)
		opt(e, "gpu_performance_state", r.PState, l()...)
		opt(e, "gpu_device_encoder_percent", r.Encoder, l()...)
		opt(e, "gpu_device_decoder_percent", r.Decoder, l()...)
		opt(e, "gpu_device_jpeg_percent", r.JPEG, l()...)
		opt(e, "gpu_device_ofa_percent", r.OFA, l()...)
		for domain, hz := range each(e, r.Clocks, cmp.Compare) {
			e.put("gpu_clock_hertz", float64(hz), l(domain)...)
		}
		if r.Throttle.OK {
			for reason, on := range snapshot.ThrottleReasons(r.Throttle.V) {
				e.put("gpu_throttle_reason", truth(on), l(reason)...)
			}
		}
	}
	if h := d.Health; h != nil {
		opt(e, "gpu_bar1_memory_used_bytes", h.BAR1Used, l()...)
		for k, n := range each(e, h.ECC, cmp.Compare) {
			typ, severity, _ := strings.Cut(k, "/")
			e.put("gpu_ecc_errors", float64(n), l(typ, severity)...)
		}
		for cause, n := range each(e, h.RetiredPages, cmp.Compare) {
			e.put("gpu_retired_pages", float64(n), l(cause)...)
		}
		for cause, n := range each(e, h.RemappedRows, cmp.Compare) {
			e.put("gpu_remapped_rows", float64(n), l(cause)...)
		}
		if h.RemapPending.OK {
			e.put("gpu_row_remap_pending", truth(h.RemapPending.V), l()...)
		}
		if h.RemapFailure.OK {
			e.put("gpu_row_remap_failure", truth(h.RemapFailure.V), l()...)
		}
		for fan, percent := range h.Fans {
			e.put("gpu_fan_speed_ratio", percent/100, l(strconv.Itoa(fan))...)
		}
		opt(e, "gpu_pcie_link_generation", h.PCIeGen, l()...)
		opt(e, "gpu_pcie_link_width", h.PCIeWidth, l()...)
		opt(e, "gpu_pcie_replays_total", h.PCIeReplays, l()...)
		opt(e, "gpu_encoder_sessions", h.EncoderSessions, l()...)
	}
	for _, k := range d.NVLink {
		link := strconv.Itoa(k.Link)
		opt(e, "gpu_nvlink_bytes_total", k.RX, l(link, "receive")...)
		opt(e, "gpu_nvlink_bytes_total", k.TX, l(link, "transmit")...)
		for typ, n := range each(e, k.Errors, cmp.Compare) {
			e.put("gpu_nvlink_errors_total", float64(n), l(link, typ)...)
		}
	}
	for _, m := range d.MIG {
		e.put("gpu_mig_info", 1, l(m.UUID, m.Profile, instance(m.GPUInst), instance(m.CIInst))...)
		opt(e, "gpu_mig_memory_used_bytes", m.MemoryUsed, l(m.UUID)...)
		opt(e, "gpu_mig_memory_total_bytes", m.MemoryTotal, l(m.UUID)...)
		opt(e, "gpu_mig_multiprocessors", m.SMCount, l(m.UUID)...)
		e.put("gpu_mig_processes", float64(len(m.Processes)), l(m.UUID)...)
	}
	if d.GPM != nil {
		for name, v := range each(e, d.GPM.Ratio, cmp.Compare) {
			e.put("gpu_"+name+"_ratio", v, l()...)
		}
	}
}

// instance returns the number of a MIG instance; it is negative where it is not known.
func instance(n int) string {
	if n < 0 {
		return ""
	}
	return strconv.Itoa(n)
}

func (g *Gatherer) workload(e *exposition, s *snapshot.Snapshot, w *snapshot.Workload, base []string) {
	pid := ""
	if w.PID != 0 {
		pid = strconv.Itoa(w.PID)
	}
	labels := e.with(base, containers.ShortID(w.Container.ID), w.Container.Name, w.Container.Image, pid)
	opt(e, "gpu_busy_seconds_total", w.Busy, labels...)
	opt(e, "gpu_energy_joules_total", w.Energy, labels...)
	opt(e, "gpu_pci_bandwidth_bytes_total", w.HtoD, e.with(labels, "host_to_device")...)
	opt(e, "gpu_pci_bandwidth_bytes_total", w.DtoH, e.with(labels, "device_to_host")...)
	opt(e, "gpu_process_cpu_seconds_total", w.CPU, labels...)
	if !w.Alive {
		return
	}
	opt(e, "gpu_memory_used_bytes", w.Memory, labels...)
	if load := s.Devices[w.Device].Load; load != nil {
		opt(e, "gpu_memory_total_bytes", load.MemoryTotal, labels...)
	}
	opt(e, "gpu_memory_peak_bytes", w.Peak, labels...)
	opt(e, "gpu_memory_allocated_bytes", w.Allocated, labels...)
	if g.o.ValueLabels {
		opt(e, "gpu_utilization_percent", w.Utilization, e.with(labels, values(s.Devices[w.Device].Load, w.Memory)...)...)
	} else {
		opt(e, "gpu_utilization_percent", w.Utilization, labels...)
	}
	opt(e, "gpu_utilization_max_percent", w.MaxUtilization, labels...)
	opt(e, "gpu_memory_bandwidth_percent", w.MemoryBW, labels...)
	opt(e, "gpu_encoder_percent", w.Encoder, labels...)
	opt(e, "gpu_decoder_percent", w.Decoder, labels...)
	if w.Comm != "" {
		e.put("gpu_process_info", 1, e.with(labels, w.Comm, w.Command)...)
	}
}

// values returns the values of valueLabels; what is absent is empty.
func values(load *frame.Load, used frame.Opt[uint64]) []string {
	out := make([]string, len(valueLabels))
	if load != nil {
		out[0], out[1], out[3] = text(load.Temperature), text(load.Power), text(load.MemoryTotal)
	}
	out[2] = text(used)
	return out
}

func text[T uint64 | float64](v frame.Opt[T]) string {
	if !v.OK {
		return ""
	}
	return strconv.FormatFloat(float64(v.V), 'f', -1, 64)
}

func container(e *exposition, s *snapshot.Snapshot, c *snapshot.Container) {
	base := []string{containers.ShortID(c.ID), c.Name, c.Image, s.Host.IP}
	e.put("gpu_container_info", 1, e.with(base, c.ID, c.ImageID, c.RequestText(), c.Runtime, c.Project, c.Service, c.Pod, c.Namespace)...)
	sent := map[string]bool{}
	for _, a := range c.Assigned {
		if k := a.UUID + string(a.Source); !sent[k] {
			sent[k] = true
			e.put("gpu_container_assigned", 1, e.with(base, a.UUID, string(a.Source))...)
		}
	}
	for uuid, n := range each(e, c.Processes, cmp.Compare) {
		e.put("gpu_container_processes", float64(n), e.with(base, uuid)...)
	}
}
