package hosttest

import (
	"fmt"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/processes"
	"gpu-exporter/nvml/frame"
	"gpu-exporter/tracer/activity"
)

// LargeProcesses is how many processes each container of Large has.
const LargeProcesses = 4

// Large returns two seconds of a host of that many GPUs: containers whose processes are on them by turns, and idle containers that are on none.
func Large(gpus, busy, idle int) (list []input.Input) {
	devices := make([]*frame.Device, gpus)
	for i := range devices {
		devices[i] = &frame.Device{Index: i, UUID: fmt.Sprintf("GPU-%08x-0000-4000-8000-%012x", i, i), State: frame.StateOK, Energy: frame.Some(1000.0),
			Info:      &frame.Info{Name: "NVIDIA H200", PCIBusID: fmt.Sprintf("0000:%02x:00.0", i), Minor: frame.Some(i)},
			Load:      &frame.Load{MemoryUsed: frame.Some(uint64(100 << 30)), MemoryTotal: frame.Some(uint64(140 << 30)), Power: frame.Some(430.0)},
			Processes: &frame.Processes{}}
	}
	known, procs, report := &input.Containers{}, &input.Processes{}, &activity.Report{Mode: "fentry", Ledger: true}
	for i := range busy + idle {
		id := fmt.Sprintf("%012x%052x", 0xabc000+i, i)
		c := containers.Container{ID: id, Name: fmt.Sprintf("job-%d", i), Image: "registry.example/team/train:2.3", ImageID: "sha256:1234", Runtime: "runc"}
		if i < busy {
			cgroup, d := "/docker/"+id, devices[i%gpus]
			c.Requests = []containers.Request{{Source: containers.SourceDeviceRequests, IDs: []string{fmt.Sprint(i % gpus)}}}
			group := activity.Group{Cgroup: cgroup, Started: LargeProcesses, Opens: []activity.Open{{Node: "ctl", Result: "ok", Count: 4}}}
			for _, name := range []string{"rm_alloc", "rm_control", "rm_free", "rm_map_memory", "uvm_initialize", "uvm_map_external_allocation"} {
				group.Calls = append(group.Calls, activity.Call{Name: name, Count: 9, Seconds: 0.01, Buckets: []uint64{12: 9}})
			}
			report.Groups = append(report.Groups, group)
			for k := range LargeProcesses {
				pid := 1000 + i*LargeProcesses + k
				d.Processes.List = append(d.Processes.List, frame.Process{PID: pid, Compute: true, MemoryUsed: frame.Some(uint64(64 << 20))})
				procs.Asked = append(procs.Asked, pid)
				procs.List = append(procs.List, processes.Process{PID: pid, StartTime: uint64(pid), Comm: "python3", Command: "python3 train.py --steps=100000",
					Cgroup: cgroup, Container: id, CPUSeconds: 12})
				report.Processes = append(report.Processes, activity.Process{PID: pid, StartTime: uint64(pid), Comm: "python3", Cgroup: cgroup, Compute: true,
					FromBirth: true, Devices: []activity.Device{{UUID: d.UUID, Used: frame.Some(uint64(64 << 20)), Peak: frame.Some(uint64(65 << 20))}}})
			}
		}
		known.List = append(known.List, c)
	}
	add := func(second int64, in input.Input) {
		in.Time = start.UnixNano() + second*1e9
		list = append(list, in)
	}
	add(0, input.Input{Host: &input.Host{IP: "10.0.0.7", Name: "large"}})
	for _, name := range []string{input.SourceNVML, input.SourceDocker, input.SourceTracer} {
		add(0, input.Input{Source: &input.Source{Name: name, Up: true}})
	}
	add(0, input.Input{Containers: known})
	add(0, input.Input{Processes: procs})
	for second := range int64(2) {
		for _, d := range devices {
			until := start.UnixMicro() + second*1e6
			d := *d
			d.Samples = &frame.Samples{ProcessSince: until - 1e6, ProcessUntil: until}
			for _, p := range d.Processes.List {
				d.Samples.Process = append(d.Samples.Process, frame.ProcessSample{PID: p.PID, Time: until - 1000, SM: 1})
			}
			add(second, input.Input{Frame: &frame.Frame{Device: &d}})
		}
		add(second, input.Input{Tracer: report})
	}
	return list
}
