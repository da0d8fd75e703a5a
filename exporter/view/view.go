// Package view is the snapshot as people's programs read it: plain structs with stable JSON names. The page, `gpu-exporter ps` and
// `gpu-exporter top` read nothing else. A field that is absent was not read or is not supported; absent is never zero.
package view

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"gpu-exporter/exporter/snapshot"
	"gpu-exporter/nvml/frame"
)

// Number is a figure that may be absent.
type Number = frame.Opt[float64]

// Bytes is a size that may be absent.
type Bytes = frame.Opt[uint64]

// Snapshot is a host at one moment.
type Snapshot struct {
	Time       time.Time   `json:"time"`
	Recorded   bool        `json:"recorded,omitempty"` // of a recording, not of this host
	Host       Host        `json:"host"`
	Driver     Driver      `json:"driver"`
	Sources    []Source    `json:"sources"`
	Tracer     *Tracer     `json:"tracer,omitempty"` // absent: it has not spoken
	Devices    []Device    `json:"devices"`
	Workloads  []Workload  `json:"workloads"`
	Containers []Container `json:"containers"`
}

// Host is where the exporter runs.
type Host struct {
	Name   string `json:"name,omitempty"`
	IP     string `json:"ip,omitempty"`
	Kernel string `json:"kernel,omitempty"`
	BootID string `json:"boot_id,omitempty"` // tells one boot of a host from all others
	// Capabilities are the exporter's effective ones, hexadecimal as in /proc/self/status.
	Capabilities string `json:"capabilities,omitempty"`
}

// Driver has the versions of the driver and its library.
type Driver struct {
	Version     string `json:"version,omitempty"`
	NVMLVersion string `json:"nvml_version,omitempty"`
	CUDAVersion string `json:"cuda_version,omitempty"`
}

// Source is where facts come from, such as nvml or docker.
type Source struct {
	Name   string `json:"name"`
	Up     bool   `json:"up"`
	Reason string `json:"reason,omitempty"` // why it is down
}

// Tracer is the state of the kernel tracer.
type Tracer struct {
	Mode   string `json:"mode"`             // fentry, tracepoint or off
	Up     bool   `json:"up"`               // it runs and its report is of now
	Reason string `json:"reason,omitempty"` // why it is off, or does less than it could
}

// Device is one GPU.
type Device struct {
	Index    int    `json:"index"` // NVML's
	UUID     string `json:"uuid"`
	Name     string `json:"name,omitempty"`
	PCIBusID string `json:"pci_bus_id,omitempty"`
	State    string `json:"state"`            // ok, lost, asleep, hung or error
	Reason   string `json:"reason,omitempty"` // why it is not ok

	Utilization       Number             `json:"utilization_percent,omitzero"`
	MaxUtilization    Number             `json:"utilization_max_percent,omitzero"` // highest sample of the window
	MemoryBandwidth   Number             `json:"memory_bandwidth_percent,omitzero"`
	MemoryUsed        Bytes              `json:"memory_used_bytes,omitzero"`
	MemoryFree        Bytes              `json:"memory_free_bytes,omitzero"`
	MemoryReserved    Bytes              `json:"memory_reserved_bytes,omitzero"`
	MemoryTotal       Bytes              `json:"memory_total_bytes,omitzero"`
	Temperature       Number             `json:"temperature_celsius,omitzero"`
	MemoryTemperature Number             `json:"memory_temperature_celsius,omitzero"`
	Power             Number             `json:"power_watts,omitzero"`
	PowerLimit        Number             `json:"power_limit_watts,omitzero"`
	Energy            Number             `json:"energy_joules_total,omitzero"`
	Clocks            map[string]int     `json:"clocks_hertz,omitempty"`           // by domain
	MaxClocks         map[string]int     `json:"clocks_max_hertz,omitempty"`       // by domain
	Throttle          []string           `json:"throttle_reasons,omitempty"`       // those that hold now, gpu_idle included
	ThrottleSeconds   map[string]float64 `json:"throttle_seconds_total,omitempty"` // by reason, since the exporter started
	PCIeRX            Number             `json:"pcie_host_to_device_bytes_total,omitzero"`
	PCIeTX            Number             `json:"pcie_device_to_host_bytes_total,omitzero"`
	PCIeLink          Number             `json:"pcie_link_bytes_per_second,omitzero"` // about what its link moves at most, in each direction
	Ratios            map[string]float64 `json:"ratios,omitempty"`                    // 0 to 1: sm_active, tensor_active, dram_active, …
	ECC               map[string]uint64  `json:"ecc_errors,omitempty"`                // by type and severity, such as volatile/uncorrected
	RemapPending      bool               `json:"row_remap_pending,omitempty"`
	RemapFailed       bool               `json:"row_remap_failed,omitempty"`
	Xids              []Xid              `json:"xids,omitempty"`
}

// Limits tells whether heat, power or hardware holds the clocks down now. The driver's bit for hardware is set with those for heat and power
// brake too, so it counts alone.
func (d *Device) Limits() (thermal, power, hardware bool) {
	for _, r := range d.Throttle {
		switch r {
		case "sw_thermal_slowdown", "hw_thermal_slowdown":
			thermal = true
		case "sw_power_cap", "hw_power_brake":
			power = true
		case "hw_slowdown":
			hardware = true
		}
	}
	return thermal, power, hardware && !thermal && !power
}

// Xid is one kind of error report of the driver since the exporter started.
type Xid struct {
	Xid   uint64    `json:"xid"`
	Count uint64    `json:"count"`
	Last  time.Time `json:"last"`
	// The process that the driver named in the last one.
	PID           int    `json:"pid,omitempty"`
	ProcessName   string `json:"process_name,omitempty"`
	ContainerID   string `json:"container_id,omitempty"` // full; empty: outside any container
	ContainerName string `json:"container_name,omitempty"`
}

// Workload is one process on one GPU. The one without a PID is what no process of the GPU accounts for.
type Workload struct {
	GPU           int    `json:"gpu"` // index of the device
	GPUUUID       string `json:"gpu_uuid"`
	PID           int    `json:"pid,omitempty"`          // on the host
	ContainerID   string `json:"container_id,omitempty"` // full; empty: outside any container
	ContainerName string `json:"container_name,omitempty"`
	Image         string `json:"image,omitempty"`
	ProcessName   string `json:"process_name,omitempty"`
	Command       string `json:"command,omitempty"`

	Memory          Bytes  `json:"memory_used_bytes,omitzero"`
	Peak            Bytes  `json:"memory_peak_bytes,omitzero"`               // highest of the window; known by the kernel tracer only, as are the next three
	Allocated       Bytes  `json:"memory_allocated_bytes,omitzero"`          // held through CUDA allocation calls
	PCIeRX          Bytes  `json:"pcie_host_to_device_bytes_total,omitzero"` // copied
	PCIeTX          Bytes  `json:"pcie_device_to_host_bytes_total,omitzero"`
	Energy          Number `json:"energy_joules_total,omitzero"`     // its part of the GPU's
	Utilization     Number `json:"utilization_percent,omitzero"`     // SM time
	MaxUtilization  Number `json:"utilization_max_percent,omitzero"` // highest sample of the window
	MemoryBandwidth Number `json:"memory_bandwidth_percent,omitzero"`
	Encoder         Number `json:"encoder_percent,omitzero"`
	Decoder         Number `json:"decoder_percent,omitzero"`
	Busy            Number `json:"busy_seconds_total,omitzero"` // SM time since first seen
	CPU             Number `json:"cpu_seconds_total,omitzero"`
}

// Container is a running container that asked for a GPU or has a process on one.
type Container struct {
	ID        string         `json:"id"` // full
	Name      string         `json:"name,omitempty"`
	Image     string         `json:"image,omitempty"`
	Runtime   string         `json:"runtime,omitempty"`
	Project   string         `json:"compose_project,omitempty"`
	Service   string         `json:"compose_service,omitempty"`
	Pod       string         `json:"pod,omitempty"`
	Namespace string         `json:"namespace,omitempty"`
	PID       int            `json:"pid,omitempty"` // of its first process, on the host
	Started   time.Time      `json:"started,omitzero"`
	Request   string         `json:"gpu_request,omitempty"` // what it asked for
	Assigned  []Assignment   `json:"assigned,omitempty"`    // what it may use
	Processes map[string]int `json:"processes,omitempty"`   // processes by UUID of the GPU
	// RefusedOpens counts its opens of the driver's device nodes that were not permitted, since the exporter started.
	RefusedOpens uint64 `json:"refused_opens_total,omitempty"`
	// AccessLost is when it was last not permitted to open the driver's control node; absent: never since it started, or it has opened it since.
	AccessLost time.Time `json:"access_lost,omitzero"`
	// FailedRequests counts its requests of memory that the driver refused, by UUID of the GPU, since the exporter started.
	FailedRequests map[string]uint64 `json:"memory_requests_failed_total,omitempty"`

	// Sums over its processes. Two GPUs fully used are 200 percent.
	Utilization Number `json:"utilization_percent,omitzero"`
	Memory      Bytes  `json:"memory_used_bytes,omitzero"`
	Launches    Bytes  `json:"kernel_launches_total,omitzero"` // since the exporter started; absent: not counted
}

// Assignment is a GPU that a container may use.
type Assignment struct {
	GPUUUID string `json:"gpu_uuid"`
	MIG     string `json:"mig_uuid,omitempty"` // empty: the whole GPU
	Source  string `json:"source"`             // device_requests, cdi, env or device_node
}

// New returns the view of a snapshot. Processes that are gone and linger for their counters are not in it.
func New(s *snapshot.Snapshot) *Snapshot {
	v := &Snapshot{Time: s.Time, Recorded: s.Recorded, Host: Host{Name: s.Host.Name, IP: s.Host.IP, Kernel: s.Host.KernelVersion, BootID: s.Host.BootID, Capabilities: s.Host.Capabilities},
		Driver:  Driver{Version: s.Library.DriverVersion, NVMLVersion: s.Library.NVMLVersion, CUDAVersion: s.Library.CUDAVersion},
		Sources: []Source{}, Devices: []Device{}, Workloads: []Workload{}, Containers: []Container{}}
	for _, name := range slices.Sorted(maps.Keys(s.Sources)) {
		src := s.Sources[name]
		v.Sources = append(v.Sources, Source{Name: name, Up: src.Up, Reason: src.Reason})
	}
	if r := s.Tracer; r != nil {
		v.Tracer = &Tracer{Mode: r.Mode, Up: s.TracerUp, Reason: cmp.Or(r.Reason, r.LedgerReason)}
	}
	for i := range s.Devices {
		v.Devices = append(v.Devices, device(&s.Devices[i]))
	}
	for i := range s.Workloads {
		if w := &s.Workloads[i]; w.Alive {
			v.Workloads = append(v.Workloads, workload(w, &s.Devices[w.Device]))
		}
	}
	for i := range s.Containers {
		v.Containers = append(v.Containers, container(&s.Containers[i], s, v.Workloads))
	}
	return v
}

// Others returns the running containers that neither asked for a GPU nor have a process on one: they are not in the view.
func Others(s *snapshot.Snapshot) []Container {
	var out []Container
	for _, c := range s.Running {
		if !slices.ContainsFunc(s.Containers, func(have snapshot.Container) bool { return have.ID == c.ID }) {
			out = append(out, container(&snapshot.Container{Container: c}, s, nil))
		}
	}
	return out
}

func device(d *snapshot.Device) Device {
	v := Device{Index: d.Index, UUID: d.UUID, Name: d.Info.Name, PCIBusID: d.Info.PCIBusID, State: string(d.State), Reason: d.Reason,
		MaxUtilization: d.MaxUtilization, Energy: d.Energy, ThrottleSeconds: d.Throttled, PCIeRX: number(d.PCIeRX), PCIeTX: number(d.PCIeTX),
		MaxClocks: d.Info.ClockMax}
	if gen, width := d.Info.PCIeGenMax, d.Info.PCIeWidthMax; gen.OK && width.OK && gen.V > 0 && gen.V < 16 {
		// A lane moves about 2^generation times 125 MB/s. An idle link is of a lower generation, to save power: the highest counts.
		v.PCIeLink = frame.Some(float64(width.V) * float64(int(1)<<gen.V) * 125e6)
	}
	for _, x := range slices.Sorted(maps.Keys(d.Xids)) {
		n := d.Xids[x]
		v.Xids = append(v.Xids, Xid{Xid: x, Count: n.Count, Last: n.Last, PID: n.Process.PID, ProcessName: n.Process.Comm, ContainerID: n.Container.ID,
			ContainerName: n.Container.Name})
	}
	if l := d.Load; l != nil {
		v.Utilization, v.MemoryBandwidth = l.Utilization, l.MemoryBandwidth
		v.MemoryUsed, v.MemoryFree, v.MemoryReserved, v.MemoryTotal = l.MemoryUsed, l.MemoryFree, l.MemoryReserved, l.MemoryTotal
		v.Temperature, v.MemoryTemperature, v.Power, v.PowerLimit, v.Clocks = l.Temperature, l.MemoryTemp, l.Power, l.PowerLimit, l.Clocks
		for reason, on := range snapshot.ThrottleReasons(l.Throttle.V) {
			if on {
				v.Throttle = append(v.Throttle, reason)
			}
		}
		slices.Sort(v.Throttle)
	}
	if d.GPM != nil {
		v.Ratios = d.GPM.Ratio
	}
	if d.Health != nil {
		v.ECC, v.RemapPending, v.RemapFailed = d.Health.ECC, d.Health.RemapPending.V, d.Health.RemapFailure.V
	}
	return v
}

func number[T uint64 | float64](o frame.Opt[T]) Number { return Number{V: float64(o.V), OK: o.OK} }

func workload(w *snapshot.Workload, d *snapshot.Device) Workload {
	return Workload{GPU: d.Index, GPUUUID: d.UUID, PID: w.PID, ContainerID: w.Container.ID, ContainerName: w.Container.Name, Image: w.Container.Image,
		ProcessName: w.Comm, Command: w.Command, Memory: w.Memory, Peak: w.Peak, Allocated: w.Allocated,
		PCIeRX: w.HtoD, PCIeTX: w.DtoH, Energy: w.Energy, Utilization: w.Utilization, MaxUtilization: w.MaxUtilization,
		MemoryBandwidth: w.MemoryBW, Encoder: w.Encoder, Decoder: w.Decoder, Busy: w.Busy, CPU: w.CPU}
}

func container(c *snapshot.Container, s *snapshot.Snapshot, ws []Workload) Container {
	v := Container{ID: c.ID, Name: c.Name, Image: c.Image, Runtime: c.Runtime, Project: c.Project, Service: c.Service, Pod: c.Pod,
		Namespace: c.Namespace, PID: c.PID, Started: c.Started, Request: c.RequestText(), Processes: c.Processes}
	for _, a := range c.Assigned {
		v.Assigned = append(v.Assigned, Assignment{GPUUUID: a.UUID, MIG: a.MIG, Source: string(a.Source)})
	}
	for i := range ws {
		if ws[i].ContainerID == c.ID {
			v.Utilization, v.Memory = frame.Sum(v.Utilization, ws[i].Utilization), frame.Sum(v.Memory, ws[i].Memory)
		}
	}
	for k := range s.Activity {
		if a := &s.Activity[k]; a.Container.ID == c.ID {
			v.RefusedOpens = a.Counts.RefusedOpens()
			if a.Counts.Refused.After(c.Started) {
				v.AccessLost = a.Counts.Refused
			}
			v.FailedRequests = a.Counts.Failures
			if a.Counts.Launches > 0 {
				v.Launches = frame.Some(a.Counts.Launches)
			}
		}
	}
	return v
}
