// Package snapshot joins what NVML, Docker, /proc and the kernel tracer say into one immutable picture that adds up.
//
// A Builder takes Inputs one by one and is a pure function of them: it reads no clock and makes no call, so a recording gives the same
// picture as the host it came from. For memory, energy and PCIe bytes, the sum over all workloads of a device, the explicit unattributed one
// included, is the device's own figure.
package snapshot

import (
	"time"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/processes"
	"gpu-exporter/nvml/frame"
	"gpu-exporter/tracer/activity"
)

// Snapshot is the host at one moment. It is not changed once made.
type Snapshot struct {
	Time       time.Time
	Recorded   bool // of a recording, not of this host
	Host       input.Host
	Sources    map[string]input.Source // by name; a source that never spoke is not in it
	Library    frame.Library
	Devices    []Device               // every device ever seen, by index
	Workloads  []Workload             // by device, then PID; the unattributed one of each device last
	Past       []Workload             // what processes dropped after the linger time had counted, by device and container that still runs; the empty one has the others'; no part of the sums
	Containers []Container            // running ones that asked for a GPU or have a process on one
	Running    []containers.Container // all that Docker told of
	Activity   []Activity             // what containers did to the driver, by container id; the empty id is everything outside containers
	Tracer     *activity.Report
	TracerUp   bool // the tracer runs and Tracer is fresh
	Calls      []frame.Call
}

// Device is one GPU. A device that cannot be read keeps its identity and its counters and loses its readings.
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
	NVLink []frame.NVLink
	MIG    []frame.MIG

	Energy         frame.Opt[float64] // J: the driver's counter, going on where the driver starts it anew; a multiple of 1/1024
	MaxUtilization frame.Opt[float64] // percent: highest 200 ms sample of the window
	MaxSMActive    frame.Opt[float64] // 0 to 1: highest short GPM reading of the window
	PCIeRX, PCIeTX frame.Opt[uint64]  // bytes to and from the device since the exporter started
	PCIeSource     string             // "gpm", "fields" or "throughput"
	Throttled      map[string]float64 // s by reason, since the exporter started
	Xids           map[uint64]Xid
	Containers     int               // containers with a process on it
	LedgerMismatch frame.Opt[uint64] // bytes by which the tracer's ledger and NVML differ, summed over the processes that both know
	Utilization    *Histogram        // percent: every 200 ms sample since the exporter started; nil: none yet
	Power          *Histogram        // W: every 20 ms sample
}

// Xid counts one kind of error report of the driver.
type Xid struct {
	Count uint64
	Last  time.Time
	// The process that the driver named in the last one, and its container; PID is 0 where it named none.
	Process   processes.Process
	Container containers.Container
}

// Workload is one process on one device; PID 0 is what no process of the device accounts for.
type Workload struct {
	Device    int // index into Snapshot.Devices
	PID       int
	StartTime uint64               // clock ticks after boot: with PID it tells a process; 0 until it is known
	Container containers.Container // zero outside any container; only ID when Docker does not know it
	Comm      string
	Command   string
	CPU       frame.Opt[float64] // s

	Alive          bool               // false: gone, its counters linger
	Memory         frame.Opt[uint64]  // bytes
	Peak           frame.Opt[uint64]  // bytes: highest Memory of the window, from kernel events only
	Allocated      frame.Opt[uint64]  // bytes held through CUDA allocation calls
	Utilization    frame.Opt[float64] // percent of SM time, mean of the driver's samples in the last reading
	MaxUtilization frame.Opt[float64] // percent: highest sample of the window
	MemoryBW       frame.Opt[float64] // percent
	Encoder        frame.Opt[float64] // percent
	Decoder        frame.Opt[float64] // percent
	Busy           frame.Opt[float64] // s of SM time since first seen
	Energy         frame.Opt[float64] // J: its part of the device's, a multiple of 1/1024
	HtoD, DtoH     frame.Opt[uint64]  // bytes copied to and from the device
}

// Container is a container with what it may use and uses.
type Container struct {
	containers.Container
	Assigned  []containers.Assignment
	Processes map[string]int // processes with a context, by device UUID
}

// Activity counts what the processes of one container did to the driver, since the exporter started.
type Activity struct {
	Container containers.Container // zero: outside any container; only ID when Docker does not know it
	Counts    *Counts
}
