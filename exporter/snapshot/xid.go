package snapshot

import (
	"slices"
	"time"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/processes"
)

// XidReport is an error report of the driver as it is told to Config.OnXid.
type XidReport struct {
	Time      time.Time
	UUID      string // of the device
	PCIBusID  string
	Code      uint64
	Message   string               // the driver's; empty when only NVML told of it
	Process   processes.Process    // PID is 0 where the driver named none
	Container containers.Container // zero: outside any, or no process was named
}

// xidSource is who told of an Xid. NVML and the tracer tell of the same ones.
type xidSource int

const (
	fromNVML xidSource = iota
	fromTracer
)

// xidReport is an Xid that one source told of and the other may still.
type xidReport struct {
	source xidSource
	code   uint64
	at     time.Time
}

const (
	// xidApart is how far apart the two may be in telling of one Xid: NVML's event comes when the worker gets to it.
	xidApart   = 10 * time.Second
	maxReports = 256
)

// tellXid keeps the process of an error report where the driver named one, and tells of it.
func (b *Builder) tellXid(d *device, r XidReport, pid int) {
	r.UUID, r.PCIBusID = d.UUID, d.Info.PCIBusID
	if pid != 0 {
		p, _ := b.facts(pid)
		p.PID = pid
		r.Process = p
		r.Container = b.container(b.containerOf(p))
		if x := d.Xids[r.Code]; x.Last.Sub(r.Time).Abs() <= xidApart {
			x.Process, x.Container = p, r.Container
			d.Xids[r.Code] = x
		}
	}
	if b.cfg.OnXid != nil {
		b.cfg.OnXid(r)
	}
}

// xid counts an error report of the driver, unless it is the one that the other source told of; it returns whether it was counted.
func (d *device) xid(source xidSource, code uint64, at time.Time) bool {
	told := slices.IndexFunc(d.reports, func(r xidReport) bool {
		return r.source != source && r.code == code && r.at.Sub(at).Abs() <= xidApart
	})
	if told >= 0 {
		d.reports = slices.Delete(d.reports, told, told+1)
		return false
	}
	if len(d.reports) == maxReports {
		d.reports = slices.Delete(d.reports, 0, 1)
	}
	d.reports = append(d.reports, xidReport{source, code, at})
	if d.Xids == nil {
		d.Xids = map[uint64]Xid{}
	}
	x := d.Xids[code]
	x.Count++
	if at.After(x.Last) {
		x = Xid{Count: x.Count, Last: at}
	}
	d.Xids[code] = x
	return true
}
