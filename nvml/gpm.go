package nvml

import (
	"math"
	"unsafe"
)

type gpmMetric struct {
	metricID   uint32
	nvmlReturn uint32
	value      float64
	_          [3]uintptr // names and unit, owned by NVML
}

// gpmMetricMax is the length of the header's array (NVML_GPM_METRIC_MAX). A call asks for the first few entries only, but the struct is
// as long as NVML may expect it to be.
const gpmMetricMax = 477

type gpmMetricsGet struct {
	version, numMetrics uint32
	sample1, sample2    uintptr
	metrics             [gpmMetricMax]gpmMetric
}

type gpmSupport struct{ version, supported uint32 }

// The GPM metrics that this project reads (nvmlGpmMetricId_t). Percentages, except those per second, which are MiB/s.
const (
	GPMGraphics  = 1
	GPMSM        = 2
	GPMOccupancy = 3
	GPMTensor    = 5
	GPMDRAM      = 10
	GPMFP64      = 11
	GPMFP32      = 12
	GPMFP16      = 13
	GPMPCIeTx    = 20
	GPMPCIeRx    = 21
	GPMNVLinkRx  = 60
	GPMNVLinkTx  = 61
)

// GPMSample is a buffer into which the device's counters are read. It belongs to NVML: free it.
type GPMSample struct {
	l      *Library
	handle uintptr
}

// GPMSupported tells whether the device has GPM counters: Hopper and later (nvmlGpmQueryDeviceSupport).
func (d *Device) GPMSupported() (bool, error) {
	s := &d.buf.support
	*s = gpmSupport{version: 1, supported: math.MaxUint32}
	if r := d.l.call(fnGpmQueryDeviceSupport, d.handle, uintptr(unsafe.Pointer(s))); r != Success {
		return false, r
	}
	return enabled(s.supported, nil)
}

// GPMSampleAlloc allocates a sample buffer (nvmlGpmSampleAlloc).
func (l *Library) GPMSampleAlloc() (*GPMSample, error) {
	h := new(uintptr)
	if r := l.callOnce(fnGpmSampleAlloc, uintptr(unsafe.Pointer(h))); r != Success {
		return nil, r
	}
	return &GPMSample{l, *h}, nil
}

// Free releases the buffer (nvmlGpmSampleFree).
func (s *GPMSample) Free() error { return s.l.call(fnGpmSampleFree, s.handle).err() }

// GPMSampleGet reads the device's counters into s: 0.3 ms of CPU on an H200 (nvmlGpmSampleGet).
func (d *Device) GPMSampleGet(s *GPMSample) error {
	return d.l.call(fnGpmSampleGet, d.handle, s.handle).err()
}

// GPMValue asks for one metric, and holds its mean between two samples.
type GPMValue struct {
	ID    uint32
	Value float64 // ratio 0 to 1, or bytes per second; meaningful only with a nil Err
	Err   error
}

// GPMMetricsGet computes the means between two samples of this device (nvmlGpmMetricsGet).
func (d *Device) GPMMetricsGet(first, second *GPMSample, values []GPMValue) error {
	if len(values) == 0 || len(values) > gpmMetricMax {
		return ErrInvalidArgument
	}
	if d.buf.gpm == nil {
		d.buf.gpm = new(gpmMetricsGet)
	}
	g := d.buf.gpm
	g.version, g.numMetrics, g.sample1, g.sample2 = 1, uint32(len(values)), first.handle, second.handle
	for i, v := range values {
		g.metrics[i] = gpmMetric{metricID: v.ID, nvmlReturn: uint32(ErrUnknown)}
	}
	if r := d.l.call(fnGpmMetricsGet, uintptr(unsafe.Pointer(g))); r != Success {
		return r
	}
	for i := range values {
		v, m := &values[i], &g.metrics[i]
		v.Value, v.Err = 0, nil
		if m.nvmlReturn != 0 {
			v.Err = Return(m.nvmlReturn)
			continue
		}
		x := m.value
		perSecond := v.ID == GPMPCIeTx || v.ID == GPMPCIeRx || v.ID >= GPMNVLinkRx
		switch {
		case math.IsNaN(x) || math.IsInf(x, 0) || x < 0 || (!perSecond && x > 100.5) || x > 1<<30:
			v.Err = ErrNoValue
		case perSecond:
			v.Value = x * (1 << 20)
		default:
			v.Value = min(x/100, 1)
		}
	}
	return nil
}
