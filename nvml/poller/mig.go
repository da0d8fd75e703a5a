package poller

import (
	"fmt"

	"gpu-exporter/nvml"
	"gpu-exporter/nvml/frame"
)

// migDevice is one MIG device and what does not change of it.
type migDevice struct {
	dev  *nvml.Device
	what frame.MIG
}

// findMIG lists the MIG devices anew: instances come and go while the driver stays loaded.
func (d *device) findMIG() {
	if !d.migOn || d.failed != nil {
		d.mig = nil
		return
	}
	n := read(d, "mig_count", d.dev.GetMaxMigDeviceCount).V
	d.mig = d.mig[:0]
	for i := range n {
		dev, err := d.dev.GetMigDeviceHandleByIndex(i)
		if err != nil {
			continue // an empty place
		}
		uuid, err := dev.GetUUID()
		if err != nil {
			continue
		}
		m := migDevice{dev: dev, what: frame.MIG{UUID: uuid, GPUInst: -1, CIInst: -1}}
		if v, err := dev.GetGpuInstanceID(); err == nil {
			m.what.GPUInst = v
		}
		if v, err := dev.GetComputeInstanceID(); err == nil {
			m.what.CIInst = v
		}
		if a, err := dev.GetAttributes(); err == nil {
			m.what.SMCount = frame.Some(a.Multiprocessors)
			m.what.Profile = fmt.Sprintf("%dg.%dgb", a.GPUInstanceSlices, (a.MemoryMiB+512)/1024)
		}
		d.mig = append(d.mig, m)
	}
}

// migReadings reads memory and processes of each MIG device. One that has gone is left out until the list is made anew.
func (d *device) migReadings() []frame.MIG {
	var out []frame.MIG
	for _, m := range d.mig {
		r := m.what
		mem, err := m.dev.GetMemoryInfo()
		if err != nil {
			continue
		}
		r.MemoryUsed, r.MemoryTotal = frame.Some(mem.Used), frame.Some(mem.Total)
		if list, err := m.dev.GetComputeRunningProcesses(d.procs[:0]); err == nil {
			d.procs = list
			r.Processes = merge(nil, list, false)
		}
		out = append(out, r)
	}
	return out
}
