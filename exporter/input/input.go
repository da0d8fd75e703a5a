// Package input defines what the snapshot is made of: every fact that reaches the exporter from outside is one Input. The
// sources (worker, docker, processes, tracer) emit Inputs, the recorder writes them to a file as they pass, and replay feeds
// them back; so a replayed host runs the real attribution code.
package input

import (
	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/processes"
	"gpu-exporter/nvml/frame"
	"gpu-exporter/tracer/activity"
)

// Input is one fact. Exactly one of the pointers is set.
type Input struct {
	Time       int64            `json:"time"`                 // Unix ns at which it was observed
	Host       *Host            `json:"host,omitempty"`       // once at start
	Frame      *frame.Frame     `json:"frame,omitempty"`      // one line of the NVML worker
	Containers *Containers      `json:"containers,omitempty"` // the full set, when it changed
	Processes  *Processes       `json:"processes,omitempty"`  // facts of every process of interest, at every tick
	Tracer     *activity.Report `json:"tracer,omitempty"`     // the tracer's state, when it changed and at every tick
	Source     *Source          `json:"source,omitempty"`     // a source went up or down
}

// Host is where the exporter runs.
type Host struct {
	IP            string `json:"ip"`
	Name          string `json:"name"`
	KernelVersion string `json:"kernel,omitempty"`
	BootID        string `json:"boot_id,omitempty"`      // tells one boot of a host from all others
	Capabilities  string `json:"capabilities,omitempty"` // the exporter's effective ones, hexadecimal
	Self          []int  `json:"self,omitempty"`         // PIDs of the exporter and its worker: never workloads
}

// Containers is the set of running containers.
type Containers struct {
	List []containers.Container `json:"list"`
}

// Processes is the set of processes of interest: those NVML or the tracer named. A PID that was asked for and is not in the
// list no longer exists.
type Processes struct {
	Asked []int               `json:"asked"`
	List  []processes.Process `json:"list"`
}

// The sources.
const (
	SourceNVML   = "nvml"
	SourceDocker = "docker"
	SourceTracer = "tracer"
	// SourceProcesses is up when /proc shows every process; the reason starts with a token and a colon, such as "hidepid: ".
	SourceProcesses = "processes"
)

// Source is the state of a source, sent whenever it changes.
type Source struct {
	Name     string            `json:"name"`
	Up       bool              `json:"up"`
	Reason   string            `json:"reason,omitempty"`   // why down: one line, for people
	PID      int               `json:"pid,omitempty"`      // the source's own process, if it has one: never a workload
	Restarts map[string]uint64 `json:"restarts,omitempty"` // restarts or reconnects so far, by reason
}
