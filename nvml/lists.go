package nvml

import (
	"encoding/binary"
	"math"
	"unsafe"
)

// maxEntries bounds every growth loop: no GPU runs as many processes, and no ring holds as many samples.
const maxEntries = 1 << 16

// grow returns the size of the next buffer, after one of room entries was too small and the driver asked for n; 0 to give up. The list may
// have grown again by the next call, so it is more than asked for, and doubling soon ends a driver that never has enough.
func grow(n, room int) int {
	if n = max(n+16, 2*room); n > maxEntries {
		return 0
	}
	return n
}

// ProcessInfo is one entry of a device's running-process list.
type ProcessInfo struct {
	PID             int
	UsedMemory      uint64 // bytes; meaningful only with HasMemory
	HasMemory       bool
	GPUInstance     int // -1 outside MIG
	ComputeInstance int // -1 outside MIG
}

// GetComputeRunningProcesses appends the processes with a compute context to buf (nvmlDeviceGetComputeRunningProcesses, any version).
func (d *Device) GetComputeRunningProcesses(buf []ProcessInfo) ([]ProcessInfo, error) {
	return d.processes(fnDeviceGetComputeRunningProcesses, buf)
}

// GetGraphicsRunningProcesses appends the processes with a graphics context to buf.
func (d *Device) GetGraphicsRunningProcesses(buf []ProcessInfo) ([]ProcessInfo, error) {
	return d.processes(fnDeviceGetGraphicsRunningProcesses, buf)
}

// The layouts of a process list, in bytes per entry. Versions 2 and 3 are 24 bytes long by the header, but drivers 535.43 to 535.86
// wrote 32 in version 3, and 16 has been reported too.
const (
	strideV1    = int(unsafe.Sizeof(processInfoV1{}))
	strideV2    = int(unsafe.Sizeof(processInfoV2{}))
	strideWide  = strideV2 + 8
	strideWords = strideWide / 8
	// untouched fills the buffer before a call: which words the driver wrote tells the layout that it used.
	untouched = 0xa5a5a5a5a5a5a5a5
)

func (d *Device) processes(f function, buf []ProcessInfo) ([]ProcessInfo, error) {
	b := d.buf
	if b.procs == nil {
		b.procs = make([]uint64, 32*strideWords)
	}
	for {
		// Every entry gets the widest layout's room, so that no driver writes past the end.
		room := len(b.procs) / strideWords
		for i := range b.procs {
			b.procs[i] = untouched
		}
		b.u32[0] = uint32(room)
		r := d.l.call(f, d.handle, uintptr(unsafe.Pointer(&b.u32[0])), uintptr(unsafe.Pointer(&b.procs[0])))
		n := int(b.u32[0])
		switch {
		case r == Success && n <= room:
			stride := layout(b.procs, n, d.l.version[f])
			for i := range n {
				if p, ok := decodeProcess(b.procs[i*stride/8 : (i+1)*stride/8]); ok {
					buf = append(buf, p)
				}
			}
			return buf, nil
		case r == ErrInsufficientSize:
			if n = grow(n, room); n == 0 {
				b.procs = nil
				return buf, ErrNoValue
			}
			b.procs = make([]uint64, n*strideWords)
		case r == Success:
			return buf, ErrNoValue
		default:
			return buf, r
		}
	}
}

// layout returns the bytes per entry that the driver used for n entries: by how much it wrote, else by the symbol's version.
func layout(words []uint64, n, version int) int {
	last := len(words)
	for last > 0 && words[last-1] == untouched {
		last--
	}
	for _, s := range [...]int{strideV1, strideV2, strideWide} {
		if n > 0 && last*8 == n*s && (version > 1 || s == strideV1) {
			return s
		}
	}
	if version == 1 {
		return strideV1
	}
	return strideV2
}

// decodeProcess reads one entry: pid and padding, bytes, and in the longer layouts the MIG instances.
func decodeProcess(w []uint64) (ProcessInfo, bool) {
	e := (*processInfoV1)(unsafe.Pointer(&w[0]))
	if !validPID(e.pid) {
		return ProcessInfo{}, false
	}
	p := ProcessInfo{PID: int(e.pid), GPUInstance: -1, ComputeInstance: -1}
	if v, err := validBytes(e.used); err == nil {
		p.UsedMemory, p.HasMemory = v, true
	}
	if len(w)*8 >= strideV2 {
		e := (*processInfoV2)(unsafe.Pointer(&w[0]))
		p.GPUInstance, p.ComputeInstance = instance(e.gpuInstanceID), instance(e.computeInstanceID)
	}
	return p, true
}

// maxInstance bounds the ids of MIG instances.
const maxInstance = 1 << 16

// instance turns a MIG instance id into an int, -1 when the driver says there is none.
func instance(v uint32) int {
	if v > maxInstance {
		return -1
	}
	return int(v)
}

// ProcessUtilization is one 200 ms sample of one process (nvmlProcessUtilizationSample_t), in percent.
type ProcessUtilization struct {
	PID              int
	Time             int64 // Unix microseconds
	SM, Memory       float64
	Encoder, Decoder float64
}

// GetProcessUtilization appends the samples newer than since (Unix microseconds) to buf. No sample at all means that every process was
// idle; NVML's NOT_FOUND says the same and is no error here. A dear call: 2 to 3 ms of CPU on an H200.
func (d *Device) GetProcessUtilization(buf []ProcessUtilization, since int64) ([]ProcessUtilization, error) {
	b := d.buf
	if b.putil == nil {
		b.putil = make([]processUtilization, 128)
	}
	for {
		b.u32[0] = uint32(len(b.putil))
		r := d.l.call(fnDeviceGetProcessUtilization, d.handle, uintptr(unsafe.Pointer(&b.putil[0])), uintptr(unsafe.Pointer(&b.u32[0])), uintptr(since))
		n := int(b.u32[0])
		switch {
		case r == Success && n <= len(b.putil):
			for _, s := range b.putil[:n] {
				if !validPID(s.pid) || !validTime(s.timestamp, since) || max(s.sm, s.mem, s.enc, s.dec) > 100 {
					continue
				}
				buf = append(buf, ProcessUtilization{int(s.pid), int64(s.timestamp), float64(s.sm), float64(s.mem), float64(s.enc), float64(s.dec)})
			}
			return buf, nil
		case r == ErrNotFound:
			return buf, nil
		case r == ErrInsufficientSize:
			if n = grow(n, len(b.putil)); n == 0 {
				b.putil = nil
				return buf, ErrNoValue
			}
			b.putil = make([]processUtilization, n)
		case r == Success:
			return buf, ErrNoValue
		default:
			return buf, r
		}
	}
}

// The sample rings of GetSamples (nvmlSamplingType_enum).
const (
	SamplesPower       = 0 // milliwatts, every 20 ms
	SamplesUtilization = 1 // percent, every 200 ms
)

// RingSample is one entry of a device's sample ring.
type RingSample struct {
	Time  int64 // Unix microseconds
	Value float64
}

// GetSamples appends the samples newer than since (Unix microseconds) of one ring to buf, in percent or watts.
func (d *Device) GetSamples(buf []RingSample, ring uint32, since int64) ([]RingSample, error) {
	b := d.buf
	if b.samples == nil {
		b.samples = make([]sample, 256)
	}
	for {
		b.u32[0], b.u32[1] = 0, uint32(len(b.samples))
		r := d.l.call(fnDeviceGetSamples, d.handle, uintptr(ring), uintptr(since), uintptr(unsafe.Pointer(&b.u32[0])),
			uintptr(unsafe.Pointer(&b.u32[1])), uintptr(unsafe.Pointer(&b.samples[0])))
		n := int(b.u32[1])
		switch {
		case r == Success && n <= len(b.samples):
			for _, s := range b.samples[:n] {
				v, ok := number(b.u32[0], s.value)
				if !ok || !validTime(s.timestamp, since) {
					continue
				}
				switch ring {
				case SamplesPower:
					v /= 1000
					if v > 100_000 {
						continue
					}
				case SamplesUtilization:
					if v > 100 {
						continue
					}
				}
				buf = append(buf, RingSample{int64(s.timestamp), v})
			}
			return buf, nil
		case r == ErrNotFound || r == ErrNoData:
			return buf, nil
		case r == ErrInsufficientSize:
			if n = grow(n, len(b.samples)); n == 0 {
				b.samples = nil
				return buf, ErrNoValue
			}
			b.samples = make([]sample, n)
		case r == Success:
			return buf, ErrNoValue
		default:
			return buf, r
		}
	}
}

// number reads an nvmlValue_t of a given nvmlValueType_t; false for sentinels, negatives, NaN and unknown types.
func number(valueType uint32, b [8]byte) (float64, bool) {
	u64 := binary.NativeEndian.Uint64(b[:])
	u32 := binary.NativeEndian.Uint32(b[:])
	switch valueType {
	case 0:
		v := math.Float64frombits(u64)
		return v, !math.IsNaN(v) && !math.IsInf(v, 0) && v >= 0
	case 1:
		_, err := valid32(u32)
		return float64(u32), err == nil
	case 2, 3:
		_, err := validCount(u64)
		return float64(u64), err == nil
	case 4:
		return float64(int64(u64)), int64(u64) >= 0 && u64 < 1<<62
	case 5:
		return float64(int32(u32)), int32(u32) >= 0 && int32(u32) != math.MaxInt32
	case 6:
		v := binary.NativeEndian.Uint16(b[:])
		return float64(v), v != math.MaxUint16
	}
	return 0, false
}

// The fields of GetFieldValues that this project reads (NVML_FI_DEV_…).
const (
	FieldMemoryTemp         = 82  // °C
	FieldPCIeTxBytes        = 197 // 32 bits, wraps
	FieldPCIeRxBytes        = 198 // 32 bits, wraps
	FieldNVLinkDataTx       = 138 // KiB, scope: link
	FieldNVLinkDataRx       = 139 // KiB, scope: link
	FieldNVLinkXmitBytes    = 202 // NVLink 5, scope: link
	FieldNVLinkRcvBytes     = 204 // NVLink 5, scope: link
	FieldThrottlePower      = 74  // ns
	FieldThrottleSyncBoost  = 76  // ns
	FieldThrottleSWThermal  = 269 // ns
	FieldThrottleHWThermal  = 270 // ns
	FieldThrottlePowerBrake = 271 // ns
)

// Field asks for one field, and holds its answer.
type Field struct {
	ID    uint32
	Scope uint32
	Value float64 // meaningful only with a nil Err
	Err   error
}

// GetFieldValues reads up to 16 fields in one call (nvmlDeviceGetFieldValues).
func (d *Device) GetFieldValues(fields []Field) error {
	b := &d.buf.fields
	if len(fields) == 0 || len(fields) > len(b) {
		return ErrInvalidArgument
	}
	for i, f := range fields {
		b[i] = fieldValue{fieldID: f.ID, scopeID: f.Scope, nvmlReturn: uint32(ErrUnknown)}
	}
	if r := d.l.call(fnDeviceGetFieldValues, d.handle, uintptr(len(fields)), uintptr(unsafe.Pointer(&b[0]))); r != Success {
		return r
	}
	for i := range fields {
		f := &fields[i]
		f.Value, f.Err = 0, nil
		if r := Return(b[i].nvmlReturn); r != Success {
			f.Err = r
			continue
		}
		v, ok := number(b[i].valueType, b[i].value)
		if !ok {
			f.Err = ErrNoValue
			continue
		}
		f.Value = v
	}
	return nil
}

// GetMemoryTemperature returns the memory's temperature in °C (field 82).
func (d *Device) GetMemoryTemperature() (float64, error) {
	var f [1]Field
	f[0].ID = FieldMemoryTemp
	if err := d.GetFieldValues(f[:]); err != nil {
		return 0, err
	}
	if f[0].Err != nil {
		return 0, f[0].Err
	}
	// 0 °C is how devices without a sensor answer.
	if f[0].Value == 0 || f[0].Value > 250 {
		return 0, ErrNoValue
	}
	return f[0].Value, nil
}
