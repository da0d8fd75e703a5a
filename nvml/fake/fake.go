// Package fake builds a library with the binary interface of libnvidia-ml.so.1 and no GPU behind it, and writes the scenario that it
// plays. The library is C, compiled by gcc when first asked for, so programs meet it as they meet the real one: through dlopen.
//
// A scenario is a text file, one statement per line: system-wide values and faults, then a section per GPU that starts with "gpu", and
// within it a section per MIG device that starts with "mig". The library reads the file again when it has changed; write it by rename,
// as WriteFile does. It is found at the library's own path with ".scenario" added, else in the environment variable
// FAKE_NVML_SCENARIO. Without a file, nvmlInit says DRIVER_NOT_LOADED.
//
// A value that a section lacks answers NOT_SUPPORTED. The statements and their words, in NVML's units:
//
//	driver VERSION · nvml VERSION · cuda 13000        system versions
//	log PATH                                          append "UNIX_NS THREAD FUNCTION GPU" for every call
//	process_stride 16|24|32                           entry size of the _v3 process lists: drivers have shipped all three
//	fault FUNCTION GPU KIND ARGUMENT [TIMES]          see Fault
//
//	uuid · name · serial · vbios TEXT                 identity
//	pci 00000000:3b:00 · minor N                      address, N of /dev/nvidiaN
//	architecture N · cuda_capability MAJOR MINOR · persistence 0|1 · compute_mode N
//	memory TOTAL RESERVED USED · bar1 TOTAL USED      bytes
//	utilization GPU MEMORY                            percent; from the busy lines if absent
//	encoder · decoder · jpeg · ofa N                  percent
//	temperature N · temperature_threshold N…          °C, thresholds by number from 0
//	power · power_limit MW · power_limits MIN MAX     milliwatts
//	energy MJ [MW]                                    millijoules, and what is gained per second of uptime
//	clock · clock_max GRAPHICS SM MEMORY VIDEO        MHz
//	pstate N · throttle MASK · violation NS…          violation times by policy number
//	pcie_generation · pcie_width · pcie_generation_max · pcie_width_max · pcie_replays N
//	pcie_throughput TX RX                             KiB/s
//	ecc VC VU AC AU                                   volatile and aggregate, corrected and uncorrected
//	retired_pages SINGLE DOUBLE · retired_pending 0|1 · remapped_rows CORRECTED UNCORRECTED PENDING FAILURE
//	fans N · fan_speed N…                             percent, by fan
//	encoder_sessions N · mig_mode 0|1 · event_types MASK
//	process compute|graphics PID BYTES [GI CI]        running-process lists
//	busy PID SM MEM ENC DEC [PERIOD_MS ON_MS]         a load, sampled every 200 ms of real time
//	psample PID UNIX_US SM MEM ENC DEC                a process sample as given
//	sample RING UNIX_US VALUE · sample_type N         a ring's samples as given (0 power, 1 utilisation), nvmlValueType_t
//	stale_samples · no_samples · no_process_samples   give old samples again; rings not supported
//	field ID SCOPE TYPE VALUE [RATE]                  GetFieldValues; RATE per second of uptime, 32-bit values wrap
//	gpm METRIC VALUE                                  percent or MiB/s
//	nvlink LINK ACTIVE REPLAY RECOVERY CRC_FLIT CRC_DATA
//	event TYPE DATA [GI CI]                           news when added after the registration
//	lost                                              the handle cannot be had
//
//	uuid · name · memory · gpu_instance · compute_instance · attributes SMS GPU_SLICES COMPUTE_SLICES MIB     of a MIG device
package fake

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// TB is what this package needs of testing.TB, so that programs which are no tests can use it too.
type TB interface {
	Helper()
	Fatalf(format string, args ...any)
	TempDir() string
}

// Scenario is a host as the library plays it.
type Scenario struct {
	Driver, NVML  string // versions; defaults are those of the host in testdata
	CUDA          int    // such as 13000
	Log           string // file that gets a line per call: see Calls
	ProcessStride int    // see process_stride; 0 leaves it right
	Faults        []Fault
	GPUs          []GPU
}

// Fault makes a function misbehave.
type Fault struct {
	Function string // the symbol, or "" for all
	GPU      int    // index, or AnyGPU
	Kind     string
	Arg      uint64 // by kind
	Times    int    // how often, 0 for always
}

// AnyGPU in Fault.GPU means every call, those without a device included.
const AnyGPU = -1

// The kinds of faults.
const (
	Return       = "return"       // return code Arg at once
	Hang         = "hang"         // do not return until the scenario says otherwise
	Delay        = "delay"        // return Arg milliseconds late
	Crash        = "crash"        // SIGSEGV
	Abort        = "abort"        // SIGABRT
	Exit         = "exit"         // end the process with status Arg
	Fill         = "fill"         // succeed, with every result made of the 8 bytes of Arg
	Count        = "count"        // succeed, claiming Arg entries
	Insufficient = "insufficient" // answer that the buffer is one entry too small
)

// GPU is one device.
type GPU struct {
	Values map[string]string // single statements by their first word: see the package comment

	Processes      []Process
	Busy           []Busy
	ProcessSamples []ProcessSample
	Samples        []Sample
	Fields         []Field
	GPM            map[int]float64
	NVLinks        []NVLink
	Events         []Event
	MIG            []MIG
}

// Process is an entry of a running-process list.
type Process struct {
	PID      int
	Memory   uint64 // bytes
	Graphics bool
	MIG      *Instance // nil outside MIG
}

// Instance names a part of a GPU.
type Instance struct{ GPU, Compute int }

// Busy is a process's load in percent. With a Period it is there only for the first On of each.
type Busy struct {
	PID                          int
	SM, Memory, Encoder, Decoder int
	PeriodMillis, OnMillis       int
}

// ProcessSample is one given sample.
type ProcessSample struct {
	PID                          int
	Time                         int64 // Unix microseconds
	SM, Memory, Encoder, Decoder uint32
}

// Sample is one given entry of a device's ring.
type Sample struct {
	Ring  int
	Time  uint64 // Unix microseconds
	Value string
}

// Field is an answer of GetFieldValues.
type Field struct {
	ID, Scope int
	Type      int // nvmlValueType_t
	Value     string
	Rate      uint64 // per second
}

// NVLink is a link.
type NVLink struct {
	Link                               int
	Active                             bool
	Replay, Recovery, CRCFlit, CRCData uint64
}

// Event is an event; see the package comment for when it is delivered.
type Event struct {
	Type, Data uint64
	MIG        *Instance
}

// MIG is a MIG device.
type MIG struct {
	UUID, Name string
	Instance   Instance
	SMs        int
	GPUSlices  int
	Slices     int // of compute
	MemoryMiB  uint64
	Used       uint64 // bytes
}

// Set gives a value, replacing the previous one.
func (g *GPU) Set(key string, words ...any) {
	s := fmt.Sprintln(words...)
	if g.Values == nil {
		g.Values = map[string]string{}
	}
	g.Values[key] = strings.TrimSuffix(s, "\n")
}

// Unset takes values away: they become NOT_SUPPORTED.
func (g *GPU) Unset(keys ...string) {
	for _, k := range keys {
		delete(g.Values, k)
	}
}

// String returns the scenario as the library reads it.
func (s Scenario) String() string {
	var b strings.Builder
	line := func(words ...any) { fmt.Fprintln(&b, words...) }
	line("driver", or(s.Driver, "580.159.04"))
	line("nvml", or(s.NVML, "13.580.159.04"))
	if s.CUDA == 0 {
		s.CUDA = 13000
	}
	line("cuda", s.CUDA)
	if s.Log != "" {
		line("log", s.Log)
	}
	if s.ProcessStride != 0 {
		line("process_stride", s.ProcessStride)
	}
	for _, f := range s.Faults {
		gpu := strconv.Itoa(f.GPU)
		if f.GPU == AnyGPU {
			gpu = "*"
		}
		words := []any{"fault", or(f.Function, "*"), gpu, f.Kind, fmt.Sprintf("%#x", f.Arg)}
		if f.Times > 0 {
			words = append(words, f.Times)
		}
		line(words...)
	}
	for i := range s.GPUs {
		s.GPUs[i].write(line)
	}
	return b.String()
}

func (g *GPU) write(line func(words ...any)) {
	line("gpu")
	for _, k := range slices.Sorted(maps.Keys(g.Values)) {
		line(k, g.Values[k])
	}
	for _, p := range g.Processes {
		kind := "compute"
		if p.Graphics {
			kind = "graphics"
		}
		line(append([]any{"process", kind, p.PID, p.Memory}, p.MIG.words()...)...)
	}
	for _, p := range g.Busy {
		line("busy", p.PID, p.SM, p.Memory, p.Encoder, p.Decoder, p.PeriodMillis, p.OnMillis)
	}
	for _, p := range g.ProcessSamples {
		line("psample", p.PID, p.Time, p.SM, p.Memory, p.Encoder, p.Decoder)
	}
	for _, p := range g.Samples {
		line("sample", p.Ring, p.Time, p.Value)
	}
	for _, f := range g.Fields {
		line("field", f.ID, f.Scope, f.Type, f.Value, f.Rate)
	}
	for _, id := range slices.Sorted(maps.Keys(g.GPM)) {
		line("gpm", id, g.GPM[id])
	}
	for _, n := range g.NVLinks {
		active := 0
		if n.Active {
			active = 1
		}
		line("nvlink", n.Link, active, n.Replay, n.Recovery, n.CRCFlit, n.CRCData)
	}
	for _, e := range g.Events {
		line(append([]any{"event", e.Type, e.Data}, e.MIG.words()...)...)
	}
	for _, m := range g.MIG {
		line("mig")
		line("uuid", m.UUID)
		line("name", m.Name)
		line("gpu_instance", m.Instance.GPU)
		line("compute_instance", m.Instance.Compute)
		line("attributes", m.SMs, m.GPUSlices, m.Slices, m.MemoryMiB)
		line("memory", m.MemoryMiB<<20, 0, m.Used)
	}
}

func (i *Instance) words() []any {
	if i == nil {
		return nil
	}
	return []any{i.GPU, i.Compute}
}

func or(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}

// WriteFile writes the scenario to path in one step, so that a library which is playing it never sees half of it.
func (s Scenario) WriteFile(path string) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".scenario-*")
	if err != nil {
		return fmt.Errorf("writing scenario: %w", err)
	}
	defer os.Remove(f.Name())
	if _, err := f.WriteString(s.String()); err != nil {
		f.Close()
		return fmt.Errorf("writing scenario: %w", err)
	}
	if err := f.Chmod(0o644); err != nil {
		f.Close()
		return fmt.Errorf("writing scenario: %w", err)
	}
	if err := f.Close(); err != nil {
		return fmt.Errorf("writing scenario: %w", err)
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return fmt.Errorf("writing scenario: %w", err)
	}
	return nil
}

// Write is WriteFile for tests.
func (s Scenario) Write(t TB, path string) {
	t.Helper()
	if err := s.WriteFile(path); err != nil {
		t.Fatalf("%v", err)
	}
}
