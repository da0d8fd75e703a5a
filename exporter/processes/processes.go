// Package processes reads what /proc says about a process: who it is, and which control group it is in.
package processes

// Process is what is known about one process.
type Process struct {
	PID        int     `json:"pid"`         // in the host's PID namespace
	StartTime  uint64  `json:"start_time"`  // clock ticks after boot (field 22 of stat): with PID it identifies the process
	Comm       string  `json:"comm"`        // made safe: valid UTF-8 without control characters
	Command    string  `json:"command"`     // first 80 characters of the command line, made safe; never the environment
	Cgroup     string  `json:"cgroup"`      // path of the control group
	Container  string  `json:"container"`   // full container id; empty outside any container
	CPUSeconds float64 `json:"cpu_seconds"` // utime + stime
}
