// Package activity holds what the kernel tracer reports: which processes hold which GPU, and what their containers did to the
// driver. It is a leaf, so that recordings, the snapshot and the terminal view can use it without loading BPF.
package activity

import "gpu-exporter/nvml/frame"

// Report is the tracer's whole state at one moment. It is immutable once published.
type Report struct {
	Time         int64  `json:"time"`                    // Unix ns
	Mode         string `json:"mode"`                    // "fentry", "tracepoint" or "off"
	Reason       string `json:"reason,omitempty"`        // why off, or why less than asked for
	Ledger       bool   `json:"ledger"`                  // the VRAM ledger understands this driver
	LedgerReason string `json:"ledger_reason,omitempty"` // why not

	Processes []Process `json:"processes,omitempty"` // every process that holds an NVIDIA device now
	Groups    []Group   `json:"groups,omitempty"`    // counters by control group, kept while it lives and for the linger time after
	Probes    []Probe   `json:"probes,omitempty"`    // libcuda files found

	Events uint64            `json:"events"`         // ring-buffer records read
	Lost   map[string]uint64 `json:"lost,omitempty"` // records or counts lost, by cause: ringbuf, map_calls, map_inflight, …
	Xids   []Xid             `json:"xids,omitempty"` // those since the last report and a few before, oldest first
}

// Process is one process (not thread) that has an NVIDIA device node open.
type Process struct {
	PID       int    `json:"pid"`        // in the host's PID namespace
	StartTime uint64 `json:"start_time"` // field 22 of /proc/<pid>/stat (clock ticks after boot): tells a reused PID apart
	Comm      string `json:"comm"`
	Cgroup    string `json:"cgroup"` // path as in /proc/<pid>/cgroup, or at least its last component
	// Compute is true once the process registered an address space with UVM or made a channel. Monitoring clients such as nvidia-smi never do.
	Compute bool `json:"compute"`
	// FromBirth is true when the process was seen from its first open on, with no event lost since: its figures are exact.
	FromBirth bool     `json:"from_birth"`
	Devices   []Device `json:"devices,omitempty"`
	HtoD      uint64   `json:"htod,omitempty"`     // bytes copied host to device through libcuda, since the process was first seen
	DtoH      uint64   `json:"dtoh,omitempty"`     // bytes, device to host
	Launches  uint64   `json:"launches,omitempty"` // kernel launches, if probed
}

// Device is what a process holds on one GPU. Minor tells the GPU where the tracer knows only the node; UUID where it knows it.
type Device struct {
	UUID      string            `json:"uuid,omitempty"`     // "GPU-…"
	Minor     frame.Opt[int]    `json:"minor,omitzero"`     // N of /dev/nvidiaN
	Used      frame.Opt[uint64] `json:"used,omitzero"`      // VRAM bytes in the driver's accounting; present only where the ledger is exact
	Peak      frame.Opt[uint64] `json:"peak,omitzero"`      // highest Used in the trailing window
	Allocated frame.Opt[uint64] `json:"allocated,omitzero"` // bytes held through CUDA allocation calls (libcuda probes)
}

// Group counts, monotonically, what the processes of one control group did.
type Group struct {
	Cgroup   string            `json:"cgroup"`
	Started  uint64            `json:"started,omitempty"` // processes that opened an NVIDIA device for the first time
	Exited   map[string]uint64 `json:"exited,omitempty"`  // by reason: "exit" (status 0), "error" (other status), "signal" (killed)
	Opens    []Open            `json:"opens,omitempty"`
	Calls    []Call            `json:"calls,omitempty"`
	Failures map[string]uint64 `json:"failures,omitempty"` // failed VRAM requests by GPU UUID ("" unknown), the driver's retries folded
	Launches uint64            `json:"launches,omitempty"`
}

// Open counts opens of one kind of node with one result.
type Open struct {
	Node   string `json:"node"`   // "gpu", "ctl", "uvm" or "caps"
	Result string `json:"result"` // "ok" or the errno in lower case, such as "eperm"
	Count  uint64 `json:"n"`
}

// Call sums the ioctls of one number.
type Call struct {
	Name    string            `json:"name"` // such as "rm_alloc", "rm_control", "uvm_map_external_allocation", else "ctl_0x2b"
	Count   uint64            `json:"n"`
	Seconds float64           `json:"s"`                 // time inside the driver
	Errors  map[string]uint64 `json:"errors,omitempty"`  // by status, such as "no_memory"; capability probing left out
	Buckets []uint64          `json:"buckets,omitempty"` // bucket i counts durations in [2^i, 2^(i+1)) ns
}

// Probe is one libcuda file that is mapped by some process.
type Probe struct {
	Library string `json:"library"` // path as seen by the first process, made safe
	Up      bool   `json:"up"`
	Reason  string `json:"reason,omitempty"`
}

// Xid is a GPU error report of the driver.
type Xid struct {
	Time     int64  `json:"time"` // Unix ns
	PCIBusID string `json:"pci_bus_id"`
	Code     uint64 `json:"code"`
	PID      int    `json:"pid,omitempty"` // where the message names one
	Message  string `json:"message,omitempty"`
}
