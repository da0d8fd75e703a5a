package snapshot

import (
	"slices"
	"time"
)

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

// xid counts an error report of the driver, unless it is the one that the other source told of.
func (d *device) xid(source xidSource, code uint64, at time.Time) {
	told := slices.IndexFunc(d.reports, func(r xidReport) bool {
		return r.source != source && r.code == code && r.at.Sub(at).Abs() <= xidApart
	})
	if told >= 0 {
		d.reports = slices.Delete(d.reports, told, told+1)
		return
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
		x.Last = at
	}
	d.Xids[code] = x
}
