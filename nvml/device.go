package nvml

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"unsafe"
)

// Device is one GPU, or one MIG device. Its methods must not be called from two goroutines at once.
type Device struct {
	l      *Library
	handle uintptr
	buf    *scratch
}

// scratch is the memory that NVML writes into. It is allocated once per device, so that polling allocates nothing.
type scratch struct {
	handle  uintptr
	u32     [4]uint32
	u64     uint64
	util    utilization
	mem1    memoryV1
	mem2    memoryV2
	bar1    bar1Memory
	pci     pciInfo
	attr    deviceAttributes
	vtime   violationTime
	fields  [16]fieldValue
	procs   []uint64 // room for entries of any layout; words, so that entries are aligned
	samples []sample
	putil   []processUtilization
	gpm     *gpmMetricsGet
	support gpmSupport
}

// newDevice is not inlined, so that the scratch is on the heap whatever the caller does with the device: see Library.call.
//
//go:noinline
func newDevice(l *Library) *Device {
	return &Device{l: l, buf: &scratch{}}
}

// The structs below mirror nvml.h; a test compares sizes and offsets with the header.

type utilization struct{ gpu, memory uint32 }

type memoryV1 struct{ total, free, used uint64 }

type memoryV2 struct {
	version                     uint32
	_                           uint32
	total, reserved, free, used uint64
}

type bar1Memory struct{ total, free, used uint64 }

type pciInfo struct {
	busIDLegacy                                [16]byte
	domain, bus, device, deviceID, subSystemID uint32
	busID                                      [32]byte
}

type deviceAttributes struct {
	multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount, sharedJpegCount, sharedOfaCount,
	gpuInstanceSliceCount, computeInstanceSliceCount uint32
	memorySizeMB uint64
}

type violationTime struct{ reference, violation uint64 }

type fieldValue struct {
	fieldID, scopeID      uint32
	timestamp, latency    int64
	valueType, nvmlReturn uint32
	value                 [8]byte
}

type processInfoV1 struct {
	pid  uint32
	_    uint32
	used uint64
}

type processInfoV2 struct {
	pid                              uint32
	_                                uint32
	used                             uint64
	gpuInstanceID, computeInstanceID uint32
}

type sample struct {
	timestamp uint64
	value     [8]byte
}

type processUtilization struct {
	pid               uint32
	_                 uint32
	timestamp         uint64
	sm, mem, enc, dec uint32
}

type eventData struct {
	device                           uintptr
	eventType, eventData             uint64
	gpuInstanceID, computeInstanceID uint32
}

// structVersion is the header's NVML_STRUCT_VERSION.
func structVersion(size uintptr, v uint32) uint32 { return uint32(size) | v<<24 }

// u32Call calls a function whose only result is an unsigned int.
func (d *Device) u32Call(f function) (uint32, error) {
	// The sentinel goes in first: a driver that succeeds without writing must not hand out the previous call's answer.
	d.buf.u32[0] = math.MaxUint32
	if r := d.l.call(f, d.handle, uintptr(unsafe.Pointer(&d.buf.u32[0]))); r != Success {
		return 0, r
	}
	return valid32(d.buf.u32[0])
}

// u32Arg calls a function with one argument between handle and result.
func (d *Device) u32Arg(f function, arg uint32) (uint32, error) {
	d.buf.u32[0] = math.MaxUint32
	if r := d.l.call(f, d.handle, uintptr(arg), uintptr(unsafe.Pointer(&d.buf.u32[0]))); r != Success {
		return 0, r
	}
	return valid32(d.buf.u32[0])
}

// unset fills the small results with the sentinel before a call that writes several of them.
func (b *scratch) unset() *[4]uint32 {
	b.u32 = [4]uint32{math.MaxUint32, math.MaxUint32, math.MaxUint32, math.MaxUint32}
	return &b.u32
}

// enabled reads an nvmlEnableState_t.
func enabled(v uint32, err error) (bool, error) {
	if err == nil && v > 1 {
		return false, ErrNoValue
	}
	return v == 1, err
}

// GetUUID returns the device's UUID, "GPU-…" or "MIG-…" (nvmlDeviceGetUUID).
func (d *Device) GetUUID() (string, error) { return d.named(fnDeviceGetUUID) }

// GetName returns the product name (nvmlDeviceGetName).
func (d *Device) GetName() (string, error) { return d.named(fnDeviceGetName) }

// GetSerial returns the board's serial number (nvmlDeviceGetSerial).
func (d *Device) GetSerial() (string, error) { return d.named(fnDeviceGetSerial) }

// GetVbiosVersion returns the version of the video BIOS (nvmlDeviceGetVbiosVersion).
func (d *Device) GetVbiosVersion() (string, error) { return d.named(fnDeviceGetVbiosVersion) }

func (d *Device) named(f function) (string, error) {
	return d.l.text(f, d.handle)
}

// GetPciBusID returns the PCI address in the kernel's form, such as "0000:0a:00.0" (nvmlDeviceGetPciInfo_v3).
func (d *Device) GetPciBusID() (string, error) {
	p := &d.buf.pci
	*p = pciInfo{}
	if r := d.l.call(fnDeviceGetPciInfo, d.handle, uintptr(unsafe.Pointer(p))); r != Success {
		return "", r
	}
	s := cString(p.busID[:])
	if d.l.version[fnDeviceGetPciInfo] < 3 {
		s = cString(p.busIDLegacy[:])
	}
	return NormalizePCIBusID(s)
}

// NormalizePCIBusID brings a PCI address into the kernel's form: lower case, a domain of four digits unless it needs more.
func NormalizePCIBusID(s string) (string, error) {
	var domain, bus, dev, fn uint32
	if n, err := fmt.Sscanf(strings.ToLower(s), "%x:%x:%x.%x", &domain, &bus, &dev, &fn); n != 4 || err != nil {
		return "", ErrNoValue
	}
	if bus > 0xff || dev > 0x1f || fn > 7 {
		return "", ErrNoValue
	}
	return fmt.Sprintf("%04x:%02x:%02x.%x", domain, bus, dev, fn), nil
}

// GetMinorNumber returns N of /dev/nvidiaN, which is neither NVML's index nor CUDA's ordinal (nvmlDeviceGetMinorNumber).
func (d *Device) GetMinorNumber() (int, error) {
	v, err := d.u32Call(fnDeviceGetMinorNumber)
	if err == nil && v > 1<<20 {
		return 0, ErrNoValue
	}
	return int(v), err
}

// architectures are the NVML_DEVICE_ARCH_ values.
var architectures = map[uint32]string{2: "kepler", 3: "maxwell", 4: "pascal", 5: "volta", 6: "turing", 7: "ampere", 8: "ada", 9: "hopper",
	10: "blackwell", 11: "dla", 13: "rubin"}

// GetArchitecture returns the GPU's architecture in lower case, such as "hopper" (nvmlDeviceGetArchitecture).
func (d *Device) GetArchitecture() (string, error) {
	v, err := d.u32Call(fnDeviceGetArchitecture)
	if err != nil {
		return "", err
	}
	if n, ok := architectures[v]; ok {
		return n, nil
	}
	return "", ErrNoValue
}

// GetCudaComputeCapability returns the compute capability, such as 9 and 0 (nvmlDeviceGetCudaComputeCapability).
func (d *Device) GetCudaComputeCapability() (major, minor int, err error) {
	b := d.buf.unset()
	if r := d.l.call(fnDeviceGetCudaComputeCapability, d.handle, uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&b[1]))); r != Success {
		return 0, 0, r
	}
	if b[0] > 1000 || b[1] > 1000 {
		return 0, 0, ErrNoValue
	}
	return int(b[0]), int(b[1]), nil
}

// GetPersistenceMode tells whether persistence mode is on (nvmlDeviceGetPersistenceMode).
func (d *Device) GetPersistenceMode() (bool, error) {
	return enabled(d.u32Call(fnDeviceGetPersistenceMode))
}

// GetComputeMode returns "default", "prohibited" or "exclusive_process" (nvmlDeviceGetComputeMode).
func (d *Device) GetComputeMode() (string, error) {
	v, err := d.u32Call(fnDeviceGetComputeMode)
	if err != nil {
		return "", err
	}
	switch v {
	case 0:
		return "default", nil
	case 1:
		return "exclusive_thread", nil
	case 2:
		return "prohibited", nil
	case 3:
		return "exclusive_process", nil
	}
	return "", ErrNoValue
}

// Memory is a device's memory in bytes.
type Memory struct {
	Total, Used, Free uint64
	// Reserved is the driver's own part, which version 2 counts apart and version 1 counts as used.
	Reserved    uint64
	HasReserved bool
}

// GetMemoryInfo returns the device's memory by nvmlDeviceGetMemoryInfo_v2, or by version 1 where the driver lacks it.
func (d *Device) GetMemoryInfo() (Memory, error) {
	m2 := &d.buf.mem2
	*m2 = memoryV2{version: structVersion(unsafe.Sizeof(*m2), 2)}
	r := d.l.call(fnDeviceGetMemoryInfoV2, d.handle, uintptr(unsafe.Pointer(m2)))
	if r == Success {
		m := Memory{Total: m2.total, Used: m2.used, Free: m2.free, Reserved: m2.reserved, HasReserved: true}
		return m, m.check()
	}
	if r != ErrFunctionNotFound && r != ErrArgumentVersion {
		return Memory{}, r
	}
	m1 := &d.buf.mem1
	*m1 = memoryV1{}
	if r := d.l.call(fnDeviceGetMemoryInfo, d.handle, uintptr(unsafe.Pointer(m1))); r != Success {
		return Memory{}, r
	}
	m := Memory{Total: m1.total, Used: m1.used, Free: m1.free}
	return m, m.check()
}

func (m Memory) check() error {
	for _, v := range [...]uint64{m.Total, m.Used, m.Free, m.Reserved} {
		if _, err := validBytes(v); err != nil {
			return err
		}
	}
	if m.Total == 0 || m.Used > m.Total || m.Free > m.Total || m.Reserved > m.Total {
		return ErrNoValue
	}
	return nil
}

// GetBAR1MemoryInfo returns the bytes of BAR1 (memory mapped for the CPU and peers) in use and in all (nvmlDeviceGetBAR1MemoryInfo).
func (d *Device) GetBAR1MemoryInfo() (used, total uint64, err error) {
	b := &d.buf.bar1
	*b = bar1Memory{total: math.MaxUint64}
	if r := d.l.call(fnDeviceGetBAR1MemoryInfo, d.handle, uintptr(unsafe.Pointer(b))); r != Success {
		return 0, 0, r
	}
	if b.total == 0 || b.total >= 1<<50 || b.used > b.total {
		return 0, 0, ErrNoValue
	}
	return b.used, b.total, nil
}

// GetUtilizationRates returns the percentage of the driver's last period in which a kernel ran, and in which memory was accessed
// (nvmlDeviceGetUtilizationRates).
func (d *Device) GetUtilizationRates() (gpu, memory float64, err error) {
	u := &d.buf.util
	*u = utilization{math.MaxUint32, math.MaxUint32}
	if r := d.l.call(fnDeviceGetUtilizationRates, d.handle, uintptr(unsafe.Pointer(u))); r != Success {
		return 0, 0, r
	}
	if u.gpu > 100 || u.memory > 100 {
		return 0, 0, ErrNoValue
	}
	return float64(u.gpu), float64(u.memory), nil
}

func (d *Device) engine(f function) (float64, error) {
	b := d.buf.unset()
	if r := d.l.call(f, d.handle, uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&b[1]))); r != Success {
		return 0, r
	}
	return percent(b[0], nil)
}

// GetEncoderUtilization returns the video encoder's utilisation in percent (nvmlDeviceGetEncoderUtilization).
func (d *Device) GetEncoderUtilization() (float64, error) {
	return d.engine(fnDeviceGetEncoderUtilization)
}

// GetDecoderUtilization returns the video decoder's utilisation in percent (nvmlDeviceGetDecoderUtilization).
func (d *Device) GetDecoderUtilization() (float64, error) {
	return d.engine(fnDeviceGetDecoderUtilization)
}

// GetJpgUtilization returns the JPEG engine's utilisation in percent (nvmlDeviceGetJpgUtilization).
func (d *Device) GetJpgUtilization() (float64, error) { return d.engine(fnDeviceGetJpgUtilization) }

// GetOfaUtilization returns the optical-flow engine's utilisation in percent (nvmlDeviceGetOfaUtilization).
func (d *Device) GetOfaUtilization() (float64, error) { return d.engine(fnDeviceGetOfaUtilization) }

// celsius refuses what no silicon survives.
func celsius(v uint32, err error) (float64, error) {
	if err == nil && v > 250 {
		return 0, ErrNoValue
	}
	return float64(v), err
}

// GetTemperature returns the GPU sensor's temperature in °C (nvmlDeviceGetTemperature, NVML_TEMPERATURE_GPU).
func (d *Device) GetTemperature() (float64, error) {
	return celsius(d.u32Arg(fnDeviceGetTemperature, 0))
}

// The thresholds of GetTemperatureThreshold.
const (
	ThresholdShutdown = 0
	ThresholdSlowdown = 1
)

// GetTemperatureThreshold returns a threshold in °C (nvmlDeviceGetTemperatureThreshold).
func (d *Device) GetTemperatureThreshold(which uint32) (float64, error) {
	return celsius(d.u32Arg(fnDeviceGetTemperatureThreshold, which))
}

// watts turns NVML's milliwatts into watts and refuses the impossible (above 100 kW).
func watts(v uint32, err error) (float64, error) {
	if err == nil && v > 100_000_000 {
		return 0, ErrNoValue
	}
	return float64(v) / 1000, err
}

// GetPowerUsage returns the power drawn, in watts (nvmlDeviceGetPowerUsage).
func (d *Device) GetPowerUsage() (float64, error) { return watts(d.u32Call(fnDeviceGetPowerUsage)) }

// GetEnforcedPowerLimit returns the limit in force, in watts (nvmlDeviceGetEnforcedPowerLimit).
func (d *Device) GetEnforcedPowerLimit() (float64, error) {
	return watts(d.u32Call(fnDeviceGetEnforcedPowerLimit))
}

// GetPowerManagementLimitConstraints returns the range of limits that may be set, in watts.
func (d *Device) GetPowerManagementLimitConstraints() (low, high float64, err error) {
	b := d.buf.unset()
	if r := d.l.call(fnDeviceGetPowerManagementLimitConstraints, d.handle, uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&b[1]))); r != Success {
		return 0, 0, r
	}
	if low, err = watts(b[0], nil); err == nil {
		high, err = watts(b[1], nil)
	}
	return low, high, err
}

// GetTotalEnergyConsumption returns the energy used since the driver was loaded, in joules. It is a dear call: about 4 ms of CPU on
// an H200 (nvmlDeviceGetTotalEnergyConsumption).
func (d *Device) GetTotalEnergyConsumption() (float64, error) {
	d.buf.u64 = math.MaxUint64
	if r := d.l.call(fnDeviceGetTotalEnergyConsumption, d.handle, uintptr(unsafe.Pointer(&d.buf.u64))); r != Success {
		return 0, r
	}
	// A kilowatt makes 3e13 mJ in a year.
	if d.buf.u64 > 1e17 {
		return 0, ErrNoValue
	}
	return float64(d.buf.u64) / 1000, nil
}

// The clock domains.
const (
	ClockGraphics = 0
	ClockSM       = 1
	ClockMemory   = 2
	ClockVideo    = 3
)

// hertz turns NVML's megahertz into hertz and refuses the impossible (above 100 GHz).
func hertz(v uint32, err error) (int, error) {
	if err == nil && v > 100_000 {
		return 0, ErrNoValue
	}
	return int(v) * 1_000_000, err
}

// GetClockInfo returns a domain's clock in hertz (nvmlDeviceGetClockInfo).
func (d *Device) GetClockInfo(domain uint32) (int, error) {
	return hertz(d.u32Arg(fnDeviceGetClockInfo, domain))
}

// GetMaxClockInfo returns a domain's highest clock in hertz (nvmlDeviceGetMaxClockInfo).
func (d *Device) GetMaxClockInfo(domain uint32) (int, error) {
	return hertz(d.u32Arg(fnDeviceGetMaxClockInfo, domain))
}

// GetPerformanceState returns the P-state, 0 (fastest) to 15 (nvmlDeviceGetPerformanceState).
func (d *Device) GetPerformanceState() (int, error) {
	v, err := d.u32Call(fnDeviceGetPerformanceState)
	if err == nil && v > 15 {
		return 0, ErrNoValue
	}
	return int(v), err
}

// GetCurrentClocksEventReasons returns the bit mask of reasons that hold the clocks down now.
func (d *Device) GetCurrentClocksEventReasons() (uint64, error) {
	d.buf.u64 = math.MaxUint64
	if r := d.l.call(fnDeviceGetCurrentClocksEventReasons, d.handle, uintptr(unsafe.Pointer(&d.buf.u64))); r != Success {
		return 0, r
	}
	if d.buf.u64 >= 1<<31 {
		return 0, ErrNoValue
	}
	return d.buf.u64, nil
}

// GetViolationStatus returns the seconds for which a policy (nvmlPerfPolicyType_enum) held the clocks down.
func (d *Device) GetViolationStatus(policy uint32) (float64, error) {
	v := &d.buf.vtime
	*v = violationTime{math.MaxUint64, math.MaxUint64}
	if r := d.l.call(fnDeviceGetViolationStatus, d.handle, uintptr(policy), uintptr(unsafe.Pointer(v))); r != Success {
		return 0, r
	}
	n, err := validCount(v.violation)
	return float64(n) / 1e9, err
}

// GetTotalEccErrors returns a count of ECC errors; aggregate counts the life of the board, otherwise since the driver was loaded
// (nvmlDeviceGetTotalEccErrors).
func (d *Device) GetTotalEccErrors(uncorrected, aggregate bool) (uint64, error) {
	d.buf.u64 = math.MaxUint64
	if r := d.l.call(fnDeviceGetTotalEccErrors, d.handle, flag(uncorrected), flag(aggregate), uintptr(unsafe.Pointer(&d.buf.u64))); r != Success {
		return 0, r
	}
	return validCount(d.buf.u64)
}

func flag(b bool) uintptr {
	if b {
		return 1
	}
	return 0
}

// GetRetiredPages returns the number of pages retired for double-bit errors, or for several single-bit errors.
func (d *Device) GetRetiredPages(doubleBit bool) (uint64, error) {
	d.buf.u32[0] = 0
	r := d.l.call(fnDeviceGetRetiredPages, d.handle, flag(doubleBit), uintptr(unsafe.Pointer(&d.buf.u32[0])), 0)
	if r != Success && r != ErrInsufficientSize {
		return 0, r
	}
	if d.buf.u32[0] > maxRows {
		return 0, ErrNoValue
	}
	return uint64(d.buf.u32[0]), nil
}

// GetRetiredPagesPendingStatus tells whether pages wait for a reboot to be retired.
func (d *Device) GetRetiredPagesPendingStatus() (bool, error) {
	return enabled(d.u32Call(fnDeviceGetRetiredPagesPendingStatus))
}

// RemappedRows are rows of memory replaced by spare ones (nvmlDeviceGetRemappedRows).
type RemappedRows struct {
	Corrected, Uncorrected uint64
	Pending, Failure       bool
}

// maxRows is more rows than any device has to spare, and than pages can be retired.
const maxRows = 1 << 20

// GetRemappedRows returns the row remappings of Ampere and later.
func (d *Device) GetRemappedRows() (RemappedRows, error) {
	b := d.buf.unset()
	if r := d.l.call(fnDeviceGetRemappedRows, d.handle, uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&b[1])),
		uintptr(unsafe.Pointer(&b[2])), uintptr(unsafe.Pointer(&b[3]))); r != Success {
		return RemappedRows{}, r
	}
	if b[0] > maxRows || b[1] > maxRows || b[2] > 1 || b[3] > 1 {
		return RemappedRows{}, ErrNoValue
	}
	return RemappedRows{uint64(b[0]), uint64(b[1]), b[2] == 1, b[3] == 1}, nil
}

const maxFans = 64

// GetNumFans returns the number of fans (nvmlDeviceGetNumFans). The 470 branch does not tell it: there fans are counted by asking for their speeds.
func (d *Device) GetNumFans() (int, error) {
	v, err := d.u32Call(fnDeviceGetNumFans)
	if errors.Is(err, ErrFunctionNotFound) {
		return d.countFans()
	}
	if err == nil && v > maxFans {
		return 0, ErrNoValue
	}
	return int(v), err
}

func (d *Device) countFans() (int, error) {
	for n := range maxFans {
		_, err := d.GetFanSpeed(n)
		switch {
		case n > 0 && (errors.Is(err, ErrInvalidArgument) || errors.Is(err, ErrNotSupported)):
			return n, nil // there is no such fan
		case err != nil:
			return 0, err
		}
	}
	return 0, ErrNoValue
}

// GetFanSpeed returns a fan's intended speed in percent of its maximum; it may exceed 100 (nvmlDeviceGetFanSpeed_v2).
func (d *Device) GetFanSpeed(fan int) (float64, error) {
	v, err := d.u32Arg(fnDeviceGetFanSpeedV2, uint32(fan))
	if err == nil && v > 1000 {
		return 0, ErrNoValue
	}
	return float64(v), err
}

// GetPcieLink returns generation and lanes of the link now.
func (d *Device) GetPcieLink() (generation, width int, err error) {
	return d.link(fnDeviceGetCurrPcieLinkGeneration, fnDeviceGetCurrPcieLinkWidth)
}

// GetMaxPcieLink returns the highest generation and lanes that device and slot can do together.
func (d *Device) GetMaxPcieLink() (generation, width int, err error) {
	return d.link(fnDeviceGetMaxPcieLinkGeneration, fnDeviceGetMaxPcieLinkWidth)
}

func (d *Device) link(gen, width function) (int, int, error) {
	g, err := d.u32Call(gen)
	if err != nil {
		return 0, 0, err
	}
	w, err := d.u32Call(width)
	if err != nil {
		return 0, 0, err
	}
	if g > 16 || w > 64 {
		return 0, 0, ErrNoValue
	}
	return int(g), int(w), nil
}

// GetPcieReplayCounter returns the number of PCIe replays (nvmlDeviceGetPcieReplayCounter).
func (d *Device) GetPcieReplayCounter() (uint64, error) {
	v, err := d.u32Call(fnDeviceGetPcieReplayCounter)
	return uint64(v), err
}

// GetPcieThroughput returns the bytes per second of the last 20 ms, received by the GPU (host to device) or sent. It blocks for as
// long (nvmlDeviceGetPcieThroughput).
func (d *Device) GetPcieThroughput(received bool) (float64, error) {
	v, err := d.u32Arg(fnDeviceGetPcieThroughput, uint32(flag(received)))
	if err == nil && v > 1<<30 {
		return 0, ErrNoValue // above 1 TiB/s
	}
	return float64(v) * 1024, err
}

// GetEncoderSessions returns the number of encoder sessions (nvmlDeviceGetEncoderStats).
func (d *Device) GetEncoderSessions() (int, error) {
	b := d.buf.unset()
	if r := d.l.call(fnDeviceGetEncoderStats, d.handle, uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&b[1])), uintptr(unsafe.Pointer(&b[2]))); r != Success {
		return 0, r
	}
	if b[0] > 1<<16 {
		return 0, ErrNoValue
	}
	return int(b[0]), nil
}

// GetNvLinkState tells whether a link is active (nvmlDeviceGetNvLinkState).
func (d *Device) GetNvLinkState(link int) (bool, error) {
	return enabled(d.u32Arg(fnDeviceGetNvLinkState, uint32(link)))
}

// The kinds of NVLink errors.
const (
	NvLinkReplay   = 0
	NvLinkRecovery = 1
	NvLinkCRCFlit  = 2
	NvLinkCRCData  = 3
)

// GetNvLinkErrorCounter returns a link's error count (nvmlDeviceGetNvLinkErrorCounter).
func (d *Device) GetNvLinkErrorCounter(link int, kind uint32) (uint64, error) {
	d.buf.u64 = math.MaxUint64
	if r := d.l.call(fnDeviceGetNvLinkErrorCounter, d.handle, uintptr(link), uintptr(kind), uintptr(unsafe.Pointer(&d.buf.u64))); r != Success {
		return 0, r
	}
	return validCount(d.buf.u64)
}

// MIGModeEnabled tells whether MIG is on now (nvmlDeviceGetMigMode).
func (d *Device) MIGModeEnabled() (bool, error) {
	b := d.buf.unset()
	if r := d.l.call(fnDeviceGetMigMode, d.handle, uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&b[1]))); r != Success {
		return false, r
	}
	if b[0] > 1 {
		return false, ErrNoValue
	}
	return b[0] == 1, nil
}

// GetMaxMigDeviceCount returns the number of places for MIG devices (nvmlDeviceGetMaxMigDeviceCount).
func (d *Device) GetMaxMigDeviceCount() (int, error) {
	v, err := d.u32Call(fnDeviceGetMaxMigDeviceCount)
	if err == nil && v > 64 {
		return 0, ErrNoValue
	}
	return int(v), err
}

// GetMigDeviceHandleByIndex opens a MIG device; ErrNotFound says that the place is empty.
func (d *Device) GetMigDeviceHandleByIndex(index int) (*Device, error) {
	m := newDevice(d.l)
	if r := d.l.call(fnDeviceGetMigDeviceHandleByIndex, d.handle, uintptr(index), uintptr(unsafe.Pointer(&m.buf.handle))); r != Success {
		return nil, r
	}
	m.handle = m.buf.handle
	return m, nil
}

// GetGpuInstanceID returns the GPU instance of a MIG device.
func (d *Device) GetGpuInstanceID() (int, error) {
	return instanceID(d.u32Call(fnDeviceGetGpuInstanceId))
}

// GetComputeInstanceID returns the compute instance of a MIG device.
func (d *Device) GetComputeInstanceID() (int, error) {
	return instanceID(d.u32Call(fnDeviceGetComputeInstanceId))
}

func instanceID(v uint32, err error) (int, error) {
	if err == nil && v > maxInstance {
		return 0, ErrNoValue
	}
	return int(v), err
}

// Attributes are a MIG device's share of the GPU (nvmlDeviceGetAttributes_v2).
type Attributes struct {
	Multiprocessors       int
	GPUInstanceSlices     int
	ComputeInstanceSlices int
	MemoryMiB             uint64
}

// GetAttributes returns a MIG device's attributes.
func (d *Device) GetAttributes() (Attributes, error) {
	a := &d.buf.attr
	*a = deviceAttributes{multiprocessorCount: math.MaxUint32}
	if r := d.l.call(fnDeviceGetAttributes, d.handle, uintptr(unsafe.Pointer(a))); r != Success {
		return Attributes{}, r
	}
	if a.multiprocessorCount > 1<<16 || a.gpuInstanceSliceCount > 64 || a.computeInstanceSliceCount > 64 || a.memorySizeMB > 1<<30 {
		return Attributes{}, ErrNoValue
	}
	return Attributes{int(a.multiprocessorCount), int(a.gpuInstanceSliceCount), int(a.computeInstanceSliceCount), a.memorySizeMB}, nil
}
