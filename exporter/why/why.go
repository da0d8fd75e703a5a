// Package why says what holds a container back on its GPUs: pure functions from a snapshot and ten minutes of history to findings, the gravest
// first. The page, `gpu-exporter why` and the alerts say the same sentences.
package why

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/view"
)

// Class is a kind of cause.
type Class struct {
	Name string
	Exit int // exit code of `gpu-exporter why` when the first finding is of it
}

// The classes.
var (
	Access    = &Class{"access", 10}    // it cannot use a GPU
	Fault     = &Class{"fault", 11}     // its GPU is broken
	Memory    = &Class{"memory", 12}    // the GPU's memory is full
	Throttle  = &Class{"throttle", 13}  // its GPU is slowed down
	Neighbour = &Class{"neighbour", 14} // another takes what it needs
	Copy      = &Class{"copy", 15}      // it waits for the link to the host
	Host      = &Class{"host", 16}      // it waits for its own CPU
	Idle      = &Class{"idle", 17}      // it does nothing there
)

// Cause is one thing that can hold a container back.
type Cause struct {
	Name   string
	Class  *Class
	When   string // what makes it a finding
	Advice string // what to do: sentences
	first  bool   // it is said before those that only cost time
}

// The causes. Their texts stand in a table of Markdown and in alerts: one line, without a bar.
var (
	NoAccess = &Cause{"access_refused", Access, "it was refused when it last opened NVIDIA's control node",
		"After `systemctl daemon-reload` a container loses its device rules: " +
			"restart it, and give GPUs through CDI or set the cgroup driver to cgroupfs.", true}
	NotGiven = &Cause{"no_gpu", Access, "no GPU was given to it, or what it asked for is not on this host",
		"Start it with `--gpus all`, `--gpus device=UUID` or `--device nvidia.com/gpu=0`, and compare the name with `gpu-exporter ps`.", true}
	Lost     = &Cause{"gpu_lost", Fault, "a GPU of it does not answer", "Drain the host and reset the GPU or reboot; the kernel log has its Xid.", true}
	XidFatal = &Cause{"xid_fatal", Fault, "the driver reported an Xid that means a fault of hardware or driver",
		"Drain the GPU and look at the kernel log for the process it names.", true}
	Uncorrected = &Cause{"ecc", Fault, "the GPU counted uncorrected ECC errors",
		"Jobs on it may have failed. Drain it, reset it, and run diagnostics before it is used again.", true}
	Remap = &Cause{"row_remap", Fault, "a remap of the GPU's memory rows is pending or failed",
		"Drain the GPU: reset it when the remap is pending, replace the board when it failed.", true}
	XidProgram = &Cause{"xid_program", Fault, "the driver reported an Xid that is a program's own fault as a rule",
		"Look for an illegal address or a killed process: the exporter's log names the process and its container.", true}
	XidOther = &Cause{"xid_other", Fault, "the driver reported another Xid",
		"Look it up in NVIDIA's list of Xid errors; the exporter's log names the process and its container where the driver says so.", true}
	AllocFailed = &Cause{"memory_refused", Memory, "requests of memory by it were refused",
		"See who else holds memory there, or lower its own demand.", true}

	Hot = &Cause{"throttled_thermal", Throttle, "heat holds the GPU's clocks down",
		"Check fans, air flow and inlet temperature; every container on the GPU runs slower.", false}
	Capped = &Cause{"throttled_power", Throttle, "the power limit or a power brake holds the clocks more than 5 % down while the GPU works",
		"Raise the limit with `nvidia-smi -pl` where the board and the supply allow it, or spread the work over more GPUs.", false}
	Slowed = &Cause{"throttled_hardware", Throttle, "the hardware holds the clocks down, not for heat or a power brake",
		"Check the power supply and its cables; the kernel log may say more.", false}
	LowClocks = &Cause{"low_clocks", Throttle, "the SM clock is below 70 % of its highest while the GPU works, and nothing throttles it",
		"See `nvidia-smi -q -d CLOCK`: `nvidia-smi -rgc` and `nvidia-smi -rac` remove a lock.", false}
	TakesSM = &Cause{"neighbour_sm", Neighbour, "the GPU is busy, and a neighbour has a quarter of its SM time or more",
		"Move one of them to another GPU, or give each its part with MIG.", false}
	TakesBandwidth = &Cause{"neighbour_bandwidth", Neighbour, "the GPU's memory is at work 80 % of the time, for a neighbour half of that or more",
		"Move one of them to another GPU, or give each its part with MIG.", false}
	TakesLink = &Cause{"neighbour_copies", Neighbour, "the link to the host is busy with more than 30 % of what it can move, and a neighbour copies more",
		"Move one of them to a GPU on another link.", false}
	CopyBound = &Cause{"copy_bound", Copy, "the link to the host is busy with more than 30 % of what it can move, while its SM time is below 80 %",
		"Keep the data on the GPU, copy from pinned memory, and let copies and kernels overlap.", false}
	HostBound = &Cause{"host_bound", Host, "its processes use 0.8 CPUs or more, its SM time is below 30 % and the GPU has room",
		"Profile its CPU side: give the input more workers, and the GPU larger batches or CUDA graphs.", false}
	TakesMemory = &Cause{"neighbour_memory", Neighbour, "the GPU's memory is over 90 % full, and a neighbour holds more of it than it does",
		"Move one of them to another GPU, or bound what the neighbour takes.", false}
	MemoryFull = &Cause{"memory_full", Memory, "the GPU's memory is over 90 % full",
		"Lower the batch size or the cache fraction, or move a neighbour to another GPU.", false}
	NotUsed = &Cause{"not_on_gpu", Idle, "it may use a GPU and has no process on one",
		"See its log: whether its program came up, finds a CUDA device and libcuda.so.1, and was built for CUDA.", false}
	Idling = &Cause{"idle", Idle, "it has a process on the GPU, and in the last minute or longer no work for it",
		"See what it waits for: requests, input or another rank. When it is not needed, take the GPU away from it or scale the service down.", false}
)

// Causes are all causes; of those that cost as much, the first is said first.
var Causes = []*Cause{NoAccess, NotGiven, Lost, XidFatal, Uncorrected, Remap, AllocFailed, XidProgram, XidOther, Hot, Capped, Slowed, LowClocks,
	TakesSM, TakesBandwidth, TakesLink, CopyBound, HostBound, TakesMemory, MemoryFull, NotUsed, Idling}

// The Xids that mean a fault of hardware or driver, and those that are a program's own fault as a rule.
var (
	FatalXids   = []uint64{48, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140}
	ProgramXids = []uint64{13, 31, 32, 43, 45}
)

// Finding is a cause with its evidence.
type Finding struct {
	Cause     string    `json:"cause"`
	Class     string    `json:"class"`
	GPU       string    `json:"gpu_uuid,omitempty"` // empty: no GPU in particular
	Text      string    `json:"text"`               // a sentence
	Evidence  []string  `json:"evidence,omitempty"`
	Advice    string    `json:"advice"`
	Seconds   float64   `json:"seconds,omitempty"`   // for which it held, of those looked at
	Since     time.Time `json:"since,omitzero"`      // when it began the last time
	Neighbour *Party    `json:"neighbour,omitempty"` // who takes what it needs
	cause     *Cause
	cost      float64 // about which part of its speed it costs
}

// Party is a container, or a process outside containers.
type Party struct {
	Container string `json:"container,omitempty"` // name
	ID        string `json:"container_id,omitempty"`
	Image     string `json:"image,omitempty"`
	PID       int    `json:"pid,omitempty"` // of the process outside containers
	Process   string `json:"process,omitempty"`
}

// String is the party as people call it.
func (p *Party) String() string {
	switch {
	case p.Container != "":
		return "container " + containers.Clean(p.Container, 128)
	case p.ID != "":
		return "container " + containers.Clean(containers.ShortID(p.ID), 64)
	}
	return strings.TrimSpace("process " + strconv.Itoa(p.PID) + " " + containers.Clean(p.Process, 64))
}

// Report is what is found of one party.
type Report struct {
	Time     time.Time  `json:"time"`
	Party    Party      `json:"party"`
	Seconds  float64    `json:"seconds"` // for which it was on a GPU, of the last ten minutes
	Uses     []Use      `json:"uses"`
	Findings []*Finding `json:"findings"`
	Blind    []string   `json:"blind,omitempty"` // what could not be looked at, and why
}

// Use is what it did on one GPU, in the mean of the time looked at.
type Use struct {
	GPU    int         `json:"gpu"`
	UUID   string      `json:"gpu_uuid"`
	SM     view.Number `json:"sm_percent,omitzero"`
	CPU    view.Number `json:"cpus,omitzero"` // CPU time per time
	Memory view.Bytes  `json:"memory_used_bytes,omitzero"`
}

// ExitCode is 0 without a finding, else that of the first one's class.
func (r *Report) ExitCode() int {
	if len(r.Findings) == 0 {
		return 0
	}
	for _, c := range Causes {
		if c.Name == r.Findings[0].Cause {
			return c.Class.Exit
		}
	}
	return 1
}

// target is what is asked about.
type target struct {
	Party
	container *view.Container // nil: none that Docker told of
	other     bool            // neither asked for a GPU nor is on one
}

// targets are all that can be asked about: the containers of the view and the others, and processes outside containers.
func targets(v *view.Snapshot, others []view.Container) []target {
	var out []target
	known := map[string]bool{}
	for n, list := range [][]view.Container{v.Containers, others} {
		for i := range list {
			c := &list[i]
			known[c.ID] = true
			out = append(out, target{Party{Container: c.Name, ID: c.ID, Image: c.Image}, c, n > 0})
		}
	}
	pids := map[int]bool{}
	for i := range v.Workloads {
		switch w := &v.Workloads[i]; {
		case w.ContainerID != "" && !known[w.ContainerID]:
			known[w.ContainerID] = true
			out = append(out, target{Party: Party{Container: w.ContainerName, ID: w.ContainerID, Image: w.Image}})
		case w.ContainerID == "" && w.PID != 0 && !pids[w.PID]:
			pids[w.PID] = true
			out = append(out, target{Party: Party{PID: w.PID, Process: w.ProcessName}})
		}
	}
	return out
}

// ErrUnknown says that nothing has the name.
var ErrUnknown = errors.New("no running container has this name or id, and no process on a GPU this PID")

// find returns what a name, an id or the beginning of one, or a PID means.
func (h *Scene) find(name string) (*target, error) {
	pid, _ := strconv.Atoi(name)
	for _, is := range []func(*target) bool{
		func(t *target) bool { return t.ID != "" && (t.Container == name || t.ID == name) },
		func(t *target) bool { return pid > 0 && t.has(pid, h.view) },
		func(t *target) bool { return len(name) >= 3 && strings.HasPrefix(t.ID, name) },
	} {
		var found *target
		n := 0
		for i := range h.targets {
			if t := &h.targets[i]; is(t) {
				found = t
				n++
			}
		}
		if n > 1 {
			return nil, fmt.Errorf("%d running containers have this name or an id that begins so: give more of the id", n)
		}
		if n == 1 {
			return found, nil
		}
	}
	return nil, ErrUnknown
}

// has tells whether a process is the target or belongs to it.
func (t *target) has(pid int, v *view.Snapshot) bool {
	return t.PID == pid || t.container != nil && t.container.PID == pid ||
		t.ID != "" && slices.ContainsFunc(v.Workloads, func(w view.Workload) bool { return w.PID == pid && w.ContainerID == t.ID })
}

// Table is the reference of all causes, in Markdown.
func Table() string {
	var b strings.Builder
	b.WriteString("| finding | exit code | when | do |\n|---|---|---|---|\n")
	for _, c := range Causes {
		fmt.Fprintf(&b, "| %s | %d %s | %s | %s |\n", c.Name, c.Class.Exit, c.Class.Name, c.When, c.Advice)
	}
	return b.String()
}

// Ask says what holds back what a name, an id or the beginning of one, or a PID means.
func (h *Scene) Ask(name string) (*Report, error) {
	t, err := h.find(name)
	if err != nil {
		return nil, err
	}
	return h.explain(t), nil
}

// First returns the first finding of each container of the view, by its id.
func (h *Scene) First() map[string]*Finding {
	out := map[string]*Finding{}
	for i := range h.targets {
		t := &h.targets[i]
		if t.ID == "" || t.other {
			continue
		}
		if r := h.explain(t); len(r.Findings) > 0 {
			out[t.ID] = r.Findings[0]
		}
	}
	return out
}

// explain looks for everything that holds a target back.
func (h *Scene) explain(t *target) *Report {
	r := &Report{Time: h.view.Time, Party: t.Party, Uses: []Use{}, Findings: []*Finding{}}
	(&look{h, t, r}).gpus()
	slices.SortStableFunc(r.Findings, func(a, b *Finding) int {
		if a.cause.first != b.cause.first {
			if a.cause.first {
				return -1
			}
			return 1
		}
		if !a.cause.first && a.cost != b.cost {
			return cmp.Compare(b.cost, a.cost)
		}
		return cmp.Compare(slices.Index(Causes, a.cause), slices.Index(Causes, b.cause))
	})
	return r
}
