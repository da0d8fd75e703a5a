// Package frame defines the lines that nvml-worker prints and gpu-exporter reads: one JSON object per device and tick.
//
// It is a leaf: it imports neither the NVML binding nor anything of the exporter, so that the static main program and the
// dynamic worker can share it. A field that the driver does not support, or that it answered with a sentinel, is absent;
// absent is never zero.
package frame

import (
	"encoding/json"
	"time"
)

// Version is the version of the line format. A reader refuses lines of another version.
const Version = 1

// Opt is a value that may be absent. The zero Opt is absent.
type Opt[T any] struct {
	V  T
	OK bool
}

// Some returns a present value.
func Some[T any](v T) Opt[T] { return Opt[T]{V: v, OK: true} }

// Sum adds up what is present; it is absent when both are.
func Sum[T uint64 | float64](a, b Opt[T]) Opt[T] { return Opt[T]{V: a.V + b.V, OK: a.OK || b.OK} }

// IsZero reports absence; encoding/json's omitzero uses it.
func (o Opt[T]) IsZero() bool { return !o.OK }

// Get returns the value and whether it is present.
func (o Opt[T]) Get() (T, bool) { return o.V, o.OK }

// MarshalJSON writes the bare value, or null when absent.
func (o Opt[T]) MarshalJSON() ([]byte, error) {
	if !o.OK {
		return []byte("null"), nil
	}
	return json.Marshal(o.V)
}

// UnmarshalJSON reads a bare value; null is absent.
func (o *Opt[T]) UnmarshalJSON(b []byte) error {
	if string(b) == "null" {
		*o = Opt[T]{}
		return nil
	}
	if err := json.Unmarshal(b, &o.V); err != nil {
		return err
	}
	o.OK = true
	return nil
}

// Frame is one line: the state of the library, one tick of one device, or events.
type Frame struct {
	Version int   `json:"v"`
	Time    int64 `json:"time"` // Unix time in nanoseconds at which the reading was complete

	Library *Library `json:"library,omitempty"` // once after start, and whenever the library's state changes
	Device  *Device  `json:"device,omitempty"`  // once per device and tick
	Calls   []Call   `json:"calls,omitempty"`   // NVML calls made since the previous frame of this kind
	Events  []Event  `json:"events,omitempty"`  // Xid and similar events, as they happen
}

// When returns the frame's time.
func (f *Frame) When() time.Time { return time.Unix(0, f.Time) }

// Library describes the NVML library and the driver behind it.
type Library struct {
	OK            bool   `json:"ok"`
	Reason        string `json:"reason,omitempty"`         // why not OK: one line, for people
	Error         string `json:"error,omitempty"`          // NVML's name of the error, such as "DRIVER_NOT_LOADED"; empty when the library could not be loaded
	Path          string `json:"path,omitempty"`           // where the library was found, below the driver root
	DriverVersion string `json:"driver_version,omitempty"` // nvmlSystemGetDriverVersion
	NVMLVersion   string `json:"nvml_version,omitempty"`   // nvmlSystemGetNVMLVersion
	CUDAVersion   string `json:"cuda_version,omitempty"`   // nvmlSystemGetCudaDriverVersion_v2, such as "13.0"
	Devices       int    `json:"devices"`                  // nvmlDeviceGetCount_v2
	PIDNamespace  bool   `json:"pid_namespace,omitempty"`  // the worker is not in the initial PID namespace: NVML shows it no processes
}

// State says whether a device can be read.
type State string

const (
	StateOK     State = "ok"
	StateLost   State = "lost"   // fallen off the bus, or its handle cannot be had
	StateAsleep State = "asleep" // runtime-suspended: left alone
	StateHung   State = "hung"   // an NVML call on it has not returned within the deadline
	StateError  State = "error"  // any other error on every call
)

// Device is what one tick read of one device. The groups are read at different rates: a nil group was not read in this tick,
// and the reader keeps the previous one with its age.
type Device struct {
	Index  int    `json:"index"`          // NVML's index; differs from the minor number and from CUDA's ordinal
	UUID   string `json:"uuid,omitempty"` // "GPU-…"; empty only if the device was never readable
	State  State  `json:"state"`
	Reason string `json:"reason,omitempty"` // why State is not ok

	Info      *Info        `json:"info,omitempty"`      // with the first frame, then every few minutes
	Load      *Load        `json:"load,omitempty"`      // every tick
	Processes *Processes   `json:"processes,omitempty"` // every tick
	Samples   *Samples     `json:"samples,omitempty"`   // every 2 to 5 s
	Health    *Health      `json:"health,omitempty"`    // every few seconds, always complete
	Energy    Opt[float64] `json:"energy,omitzero"`     // J since the driver was loaded; every 10 s or so: the call is dear
	PCIe      *PCIe        `json:"pcie,omitempty"`      // traffic since the previous PCIe group
	NVLink    []NVLink     `json:"nvlink,omitempty"`    // active links, with Health
	GPM       *GPM         `json:"gpm,omitempty"`       // Hopper and later
	MIG       []MIG        `json:"mig,omitempty"`       // the instances, when MIG is on
}

// Info is what does not change while the driver stays loaded.
type Info struct {
	Name            string         `json:"name"`                      // nvmlDeviceGetName
	PCIBusID        string         `json:"pci_bus_id"`                // lower case, 4-digit domain: "0000:0a:00.0"
	Minor           Opt[int]       `json:"minor,omitzero"`            // N of /dev/nvidiaN
	Serial          string         `json:"serial,omitempty"`          // board serial number
	VBIOS           string         `json:"vbios,omitempty"`           // nvmlDeviceGetVbiosVersion
	Architecture    string         `json:"architecture,omitempty"`    // "hopper", …
	CUDACapability  string         `json:"cuda_capability,omitempty"` // "9.0"
	MIGMode         Opt[bool]      `json:"mig_mode,omitzero"`         // current mode
	MemoryTotal     Opt[uint64]    `json:"memory_total,omitzero"`     // bytes
	PowerLimitMin   Opt[float64]   `json:"power_limit_min,omitzero"`  // W
	PowerLimitMax   Opt[float64]   `json:"power_limit_max,omitzero"`  // W
	PCIeGenMax      Opt[int]       `json:"pcie_gen_max,omitzero"`     // of device and slot together
	PCIeWidthMax    Opt[int]       `json:"pcie_width_max,omitzero"`   // lanes
	ClockMax        map[string]int `json:"clock_max,omitempty"`       // Hz by domain: graphics, sm, memory, video
	TempSlowdown    Opt[float64]   `json:"temp_slowdown,omitzero"`    // °C at which hardware slows the clocks
	TempShutdown    Opt[float64]   `json:"temp_shutdown,omitzero"`    // °C
	NVLinks         Opt[int]       `json:"nvlinks,omitzero"`          // number of links the device has
	Addressing      string         `json:"addressing,omitempty"`      // "hmm", "ats" for unified-memory devices
	NUMANode        Opt[int]       `json:"numa_node,omitzero"`        // of the PCI device
	PersistenceMode Opt[bool]      `json:"persistence_mode,omitzero"` // nvmlDeviceGetPersistenceMode
	ComputeMode     string         `json:"compute_mode,omitempty"`    // default, prohibited, exclusive_process
}

// Load is the cheap part: read at every tick.
type Load struct {
	Utilization     Opt[float64]   `json:"utilization,omitzero"`      // percent of the last driver period in which a kernel ran
	MemoryBandwidth Opt[float64]   `json:"memory_bandwidth,omitzero"` // percent of the period in which memory was read or written
	MemoryUsed      Opt[uint64]    `json:"memory_used,omitzero"`      // bytes, NVML v2: without the reserved part
	MemoryFree      Opt[uint64]    `json:"memory_free,omitzero"`      // bytes
	MemoryTotal     Opt[uint64]    `json:"memory_total,omitzero"`     // bytes
	MemoryReserved  Opt[uint64]    `json:"memory_reserved,omitzero"`  // bytes
	Temperature     Opt[float64]   `json:"temperature,omitzero"`      // °C, GPU sensor
	MemoryTemp      Opt[float64]   `json:"memory_temp,omitzero"`      // °C, field 82
	Power           Opt[float64]   `json:"power,omitzero"`            // W
	PowerLimit      Opt[float64]   `json:"power_limit,omitzero"`      // W, enforced
	PState          Opt[int]       `json:"pstate,omitzero"`           // 0 fastest to 15
	Clocks          map[string]int `json:"clocks,omitempty"`          // Hz by domain: graphics, sm, memory, video
	Throttle        Opt[uint64]    `json:"throttle,omitzero"`         // nvmlDeviceGetCurrentClocksEventReasons bit mask
	Encoder         Opt[float64]   `json:"encoder,omitzero"`          // percent
	Decoder         Opt[float64]   `json:"decoder,omitzero"`          // percent
	JPEG            Opt[float64]   `json:"jpeg,omitzero"`             // percent
	OFA             Opt[float64]   `json:"ofa,omitzero"`              // percent
}

// Processes is the running-process list of a device: compute and graphics lists joined, one entry per PID.
type Processes struct {
	List []Process `json:"list"` // empty: none runs
}

// Process is one entry of nvmlDeviceGetComputeRunningProcesses / GraphicsRunningProcesses.
type Process struct {
	PID        int         `json:"pid"`                   // host PID
	MemoryUsed Opt[uint64] `json:"memory_used,omitzero"`  // bytes; absent where the driver does not tell
	Compute    bool        `json:"compute,omitempty"`     // in the compute list
	Graphics   bool        `json:"graphics,omitempty"`    // in the graphics list
	GPUInst    Opt[int]    `json:"gpu_instance,omitzero"` // MIG
	CIInst     Opt[int]    `json:"compute_instance,omitzero"`
}

// Samples is what the driver's own sample rings held since the previous Samples group of this device: each sample is delivered
// exactly once.
type Samples struct {
	Process []ProcessSample `json:"process,omitempty"` // nvmlDeviceGetProcessUtilization, 200 ms
	// ProcessSince and ProcessUntil bound the window that Process covers, in Unix microseconds. With no sample in it every
	// process was idle throughout. Both 0: the call failed or is not supported.
	ProcessSince int64    `json:"process_since,omitempty"`
	ProcessUntil int64    `json:"process_until,omitempty"`
	Utilization  []Sample `json:"utilization,omitempty"` // percent, 200 ms
	Power        []Sample `json:"power,omitempty"`       // W, 20 ms
}

// ProcessSample is one 200 ms sample of one process.
type ProcessSample struct {
	PID    int     `json:"pid"`
	Time   int64   `json:"t"`             // Unix microseconds
	SM     float64 `json:"sm"`            // percent, 0 to 100
	Memory float64 `json:"mem,omitempty"` // percent
	Enc    float64 `json:"enc,omitempty"` // percent
	Dec    float64 `json:"dec,omitempty"` // percent
}

// Sample is one entry of a device's sample ring.
type Sample struct {
	Time  int64   `json:"t"` // Unix microseconds
	Value float64 `json:"v"`
}

// Health is what changes seldom. A field absent from it is not supported by the device.
type Health struct {
	ECC             map[string]uint64  `json:"ecc,omitempty"`              // errors by "volatile|aggregate" + "/" + "corrected|uncorrected"
	RetiredPages    map[string]uint64  `json:"retired_pages,omitempty"`    // pages by cause: single_bit, double_bit
	RetiredPending  Opt[bool]          `json:"retired_pending,omitzero"`   //
	RemappedRows    map[string]uint64  `json:"remapped_rows,omitempty"`    // rows by cause: corrected, uncorrected
	RemapPending    Opt[bool]          `json:"remap_pending,omitzero"`     //
	RemapFailure    Opt[bool]          `json:"remap_failure,omitzero"`     //
	ThrottleSeconds map[string]float64 `json:"throttle_seconds,omitempty"` // s by reason, where the driver counts it itself
	Fans            []float64          `json:"fans,omitempty"`             // percent of the maximum, by fan number
	PCIeGen         Opt[int]           `json:"pcie_gen,omitzero"`          // now
	PCIeWidth       Opt[int]           `json:"pcie_width,omitzero"`        // lanes, now
	PCIeReplays     Opt[uint64]        `json:"pcie_replays,omitzero"`      //
	EncoderSessions Opt[int]           `json:"encoder_sessions,omitzero"`  //
	BAR1Used        Opt[uint64]        `json:"bar1_used,omitzero"`         // bytes
}

// PCIe is the device's traffic since the previous PCIe reading, in bytes, already unwrapped by the worker.
type PCIe struct {
	Source string      `json:"source"`      // "gpm", "fields" or "throughput"
	RX     Opt[uint64] `json:"rx,omitzero"` // host to device, bytes since the previous reading
	TX     Opt[uint64] `json:"tx,omitzero"` // device to host, bytes since the previous reading
	Window int64       `json:"window"`      // ns that RX and TX cover
}

// NVLink is one active link.
type NVLink struct {
	Link   int               `json:"link"`
	RX     Opt[uint64]       `json:"rx,omitzero"`      // bytes, counter
	TX     Opt[uint64]       `json:"tx,omitzero"`      // bytes, counter
	Errors map[string]uint64 `json:"errors,omitempty"` // by type: replay, recovery, crc_flit, crc_data
}

// GPM holds the profiling metrics of Hopper and later, as means over Window.
type GPM struct {
	Window int64              `json:"window"`             // ns
	Ratio  map[string]float64 `json:"ratio"`              // 0 to 1: sm_active, sm_occupancy, tensor_active, dram_active, fp16_active, fp32_active, fp64_active, graphics_active
	PCIeRX Opt[float64]       `json:"pcie_rx,omitzero"`   // bytes/s, host to device
	PCIeTX Opt[float64]       `json:"pcie_tx,omitzero"`   // bytes/s
	NVLRX  Opt[float64]       `json:"nvlink_rx,omitzero"` // bytes/s, all links
	NVLTX  Opt[float64]       `json:"nvlink_tx,omitzero"` // bytes/s
	// SMActive are the readings of short windows (100 ms) since the previous frame, when fast sampling is on.
	SMActive []Sample `json:"sm_active,omitempty"`
}

// MIG is one MIG device (a GPU instance with a compute instance).
type MIG struct {
	UUID        string      `json:"uuid"` // "MIG-…"
	GPUInst     int         `json:"gpu_instance"`
	CIInst      int         `json:"compute_instance"`
	Profile     string      `json:"profile,omitempty"` // such as "1g.18gb"
	MemoryUsed  Opt[uint64] `json:"memory_used,omitzero"`
	MemoryTotal Opt[uint64] `json:"memory_total,omitzero"`
	SMCount     Opt[int]    `json:"sm_count,omitzero"`
	Processes   []Process   `json:"processes,omitempty"`
}

// Event is an NVML event.
type Event struct {
	Time    int64    `json:"time"`            // Unix ns at which it was received
	UUID    string   `json:"uuid,omitempty"`  // device
	Kind    string   `json:"kind"`            // "xid", "ecc_single", "ecc_double"
	Value   uint64   `json:"value,omitempty"` // the Xid number
	GPUInst Opt[int] `json:"gpu_instance,omitzero"`
	CIInst  Opt[int] `json:"compute_instance,omitzero"`
}

// Call sums the calls of one NVML function since the previous frame.
type Call struct {
	Name    string   `json:"name"`              // such as "nvmlDeviceGetTemperature"
	Count   uint64   `json:"n"`                 //
	Errors  uint64   `json:"errors,omitempty"`  // other than NOT_SUPPORTED and NOT_FOUND
	Seconds float64  `json:"s"`                 // time spent inside NVML
	Buckets []uint64 `json:"buckets,omitempty"` // counts per bucket of CallBuckets, last one +Inf; trailing zeros left out
}

// CallBuckets are the upper bounds in seconds of Call.Buckets.
var CallBuckets = []float64{0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 1}
