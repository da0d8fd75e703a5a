// Package snapshot joins what NVML, Docker, /proc and the kernel tracer say into one immutable picture that adds up.
//
// A Builder takes Inputs one by one and is a pure function of them: it reads no clock and makes no call, so a recording gives the same
// picture as the host it came from. For memory, the sum over all workloads of a device, the explicit unattributed one included, is the
// device's own figure.
package snapshot

import (
	"time"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/input"
	"gpu-exporter/nvml/frame"
)

// Snapshot is the host at one moment. It is not changed once made.
type Snapshot struct {
	Time       time.Time
	Host       input.Host
	Sources    map[string]input.Source // by name; a source that never spoke is not in it
	Library    frame.Library
	Devices    []Device    // every device ever seen, by index
	Workloads  []Workload  // by device, then PID; the unattributed one of each device last
	Containers []Container // running ones that asked for a GPU or have a process on one
	Calls      []frame.Call
}

// Device is one GPU. A device that cannot be read keeps its identity and loses its readings.
type Device struct {
	Index  int
	UUID   string
	State  frame.State
	Reason string
	Info   frame.Info

	// The groups are nil when they were never read, or not for three of their periods.
	Load   *frame.Load
	Health *frame.Health
	GPM    *frame.GPM

	Energy         frame.Opt[float64] // J
	MaxUtilization frame.Opt[float64] // percent: highest 200 ms sample of the window
	PCIeRX, PCIeTX frame.Opt[float64] // bytes since the exporter started
	PCIeSource     string
	Throttled      map[string]float64 // s by reason, since the exporter started
	Xids           map[uint64]Xid
	Containers     int // containers with a process on it
}

// Xid counts one kind of error report of the driver.
type Xid struct {
	Count uint64
	Last  time.Time
}

// Workload is one process on one device; PID 0 is what no process of the device accounts for.
type Workload struct {
	Device    int // index into Snapshot.Devices
	PID       int
	Container containers.Container // zero outside any container; only ID when Docker does not know it
	Comm      string
	Command   string
	CPU       frame.Opt[float64] // s

	Alive          bool               // false: gone, its counters linger
	Memory         frame.Opt[uint64]  // bytes
	Utilization    frame.Opt[float64] // percent of SM time, mean of the driver's samples in the last reading
	MaxUtilization frame.Opt[float64] // percent: highest sample of the window
	MemoryBW       frame.Opt[float64] // percent
	Encoder        frame.Opt[float64] // percent
	Decoder        frame.Opt[float64] // percent
	Busy           frame.Opt[float64] // s of SM time since first seen
}

// Container is a container with what it may use and uses.
type Container struct {
	containers.Container
	Assigned  []containers.Assignment
	Processes map[string]int // processes with a context, by device UUID
}
