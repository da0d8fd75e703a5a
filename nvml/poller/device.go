package poller

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"time"

	"gpu-exporter/nvml"
	"gpu-exporter/nvml/frame"
)

// device reads one GPU. All but the fields under mu belong to its goroutine.
type device struct {
	p     *poller
	index int
	lib   *nvml.Library
	dev   *nvml.Device
	uuid  string
	busID string

	nextOpen                                     time.Time
	samplesAt, energyAt, healthAt, gpmAt, infoAt time.Time
	refused                                      map[string]time.Time // calls that the device does not support, and when to ask again
	failed                                       error                // the first error of this tick that concerns the whole device
	calls                                        callStats

	procs      []nvml.ProcessInfo
	lastSample int64 // newest process sample seen, Unix µs
	covered    int64 // up to where process samples were delivered, Unix µs
	lastUtil   int64
	lastPower  int64
	putil      []nvml.ProcessUtilization
	ring       []nvml.RingSample
	gpm        gpmReader
	pcie       pcieReader
	mig        []*nvml.Device

	mu      sync.Mutex
	call    string // the NVML call under way
	entered time.Time
	known   string // uuid, for others
}

func newDevice(p *poller, index int) *device {
	d := &device{p: p, index: index, refused: map[string]time.Time{}}
	d.lib = p.lib.With(nvml.Config{
		OnEnter: func(name string) {
			d.mu.Lock()
			d.call, d.entered = name, time.Now()
			d.mu.Unlock()
		},
		OnCall: func(name string, took time.Duration, r nvml.Return) {
			d.mu.Lock()
			d.call = ""
			d.mu.Unlock()
			d.calls.add(name, took, r)
		},
	})
	return d
}

// inCall returns the NVML call under way and since when; an empty name when there is none.
func (d *device) inCall() (string, time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.call, d.entered
}

func (d *device) knownUUID() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.known
}

func (d *device) run(ctx context.Context) {
	// NVML blocks the thread it is called on; let it be one of the device's own.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	tick := time.NewTicker(d.p.cfg.Interval)
	defer tick.Stop()
	for {
		f := d.tick(time.Now())
		if err := d.failed; errors.Is(err, nvml.ErrUninitialized) || errors.Is(err, nvml.ErrDriverNotLoaded) || errors.Is(err, nvml.ErrLibRMVersionMismatch) {
			d.p.giveUp(err)
			return
		}
		f.Calls = d.calls.drain()
		d.p.deliver(f)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// tick reads what is due.
func (d *device) tick(now time.Time) *frame.Frame {
	d.failed = nil
	out := &frame.Device{Index: d.index, UUID: d.uuid, State: frame.StateOK}
	f := &frame.Frame{Device: out}
	if d.asleep() {
		out.State, out.Reason = frame.StateAsleep, "runtime-suspended: left asleep"
		return f
	}
	if d.dev == nil && !d.open(now) {
		out.State, out.Reason = state(d.failed)
		out.UUID = d.uuid
		return f
	}
	out.UUID = d.uuid
	out.Load = d.load()
	if d.failed == nil {
		out.Processes = d.processes()
	}
	if d.failed == nil && due(now, &d.infoAt, d.p.cfg.Info) {
		out.Info = d.info()
		d.mig = d.migDevices(out.Info)
	}
	if d.failed == nil && due(now, &d.samplesAt, d.p.cfg.Samples) {
		out.Samples = d.samples(now)
	}
	if d.failed == nil && due(now, &d.energyAt, d.p.cfg.Energy) {
		out.Energy = read(d, "energy", d.dev.GetTotalEnergyConsumption)
	}
	if d.failed == nil && due(now, &d.gpmAt, d.p.cfg.GPM) {
		out.GPM = d.gpm.read(d, now)
	}
	if d.failed == nil {
		out.PCIe = d.pcie.read(d, now, out.GPM)
	}
	if d.failed == nil && due(now, &d.healthAt, d.p.cfg.Health) {
		out.Health = d.health()
		out.NVLink = d.nvlink()
	}
	if d.failed == nil && len(d.mig) > 0 {
		out.MIG = d.migReadings()
	}
	if d.failed != nil {
		out.State, out.Reason = state(d.failed)
		if out.State == frame.StateLost {
			// The handle of a lost GPU never works again; a new one is asked for now and then.
			d.dev, d.nextOpen = nil, now.Add(30*time.Second)
			*out = frame.Device{Index: d.index, UUID: d.uuid, State: out.State, Reason: out.Reason}
		}
	}
	return f
}

// due tells whether a group's time has come, and sets its next one without drift.
func due(now time.Time, next *time.Time, period time.Duration) bool {
	// A tick may come a little early; half a tick of tolerance keeps a 2 s group from becoming a 3 s one.
	if now.Before(next.Add(-period / 20)) {
		return false
	}
	if *next = next.Add(period); next.Before(now) {
		*next = now.Add(period)
	}
	return true
}

// state turns the error of a whole device into its state.
func state(err error) (frame.State, string) {
	switch {
	case err == nil:
		return frame.StateOK, ""
	case errors.Is(err, nvml.ErrGPUIsLost):
		return frame.StateLost, "the GPU has fallen off the bus (GPU_IS_LOST)"
	case errors.Is(err, nvml.ErrGPUNotFound), errors.Is(err, nvml.ErrNotFound):
		return frame.StateLost, "NVML does not find the GPU"
	case errors.Is(err, nvml.ErrResetRequired):
		return frame.StateError, "the GPU must be reset before it can be used (RESET_REQUIRED)"
	}
	return frame.StateError, err.Error()
}

func (d *device) open(now time.Time) bool {
	if now.Before(d.nextOpen) {
		d.failed = nvml.ErrGPUIsLost
		return false
	}
	dev, err := d.lib.DeviceGetHandleByIndex(d.index)
	if err == nil {
		d.uuid, err = dev.GetUUID()
	}
	if err != nil {
		d.failed = err
		d.nextOpen = now.Add(10 * time.Second)
		return false
	}
	d.dev = dev
	d.busID, _ = dev.GetPciBusID()
	d.infoAt = time.Time{}
	d.mu.Lock()
	d.known = d.uuid
	d.mu.Unlock()
	return true
}

// asleep looks, without touching the GPU, whether the kernel has suspended it.
func (d *device) asleep() bool {
	if d.busID == "" {
		return false
	}
	b, err := os.ReadFile(d.p.cfg.SysFS + "/bus/pci/devices/" + d.busID + "/power/runtime_status")
	return err == nil && strings.TrimSpace(string(b)) == "suspended"
}

// whole says whether an error concerns the device and not just the call.
func whole(err error) bool {
	for _, e := range []error{nvml.ErrGPUIsLost, nvml.ErrResetRequired, nvml.ErrUninitialized, nvml.ErrDriverNotLoaded, nvml.ErrLibRMVersionMismatch,
		nvml.ErrUnknown, nvml.ErrGPUNotFound, nvml.ErrNoPermission, nvml.ErrTimeout} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// refusalAge is how long a call that was not supported is left alone: MIG or a driver's setting may change its mind.
const refusalAge = 10 * time.Minute

// read makes one optional call. What the device does not support is absent and not asked for again for a while.
func read[T any](d *device, key string, call func() (T, error)) frame.Opt[T] {
	if d.failed != nil {
		return frame.Opt[T]{}
	}
	if until, ok := d.refused[key]; ok {
		if time.Now().Before(until) {
			return frame.Opt[T]{}
		}
		delete(d.refused, key)
	}
	v, err := call()
	if err == nil {
		return frame.Some(v)
	}
	d.note(key, err)
	return frame.Opt[T]{}
}

func (d *device) note(key string, err error) {
	switch {
	case errors.Is(err, nvml.ErrNotSupported), errors.Is(err, nvml.ErrFunctionNotFound), errors.Is(err, nvml.ErrInvalidArgument):
		d.refused[key] = time.Now().Add(refusalAge)
	case whole(err):
		d.failed = err
	}
}

func (d *device) refuses(key string) bool {
	until, ok := d.refused[key]
	return ok && time.Now().Before(until)
}

var clocks = []struct {
	name   string
	domain uint32
}{{"graphics", nvml.ClockGraphics}, {"sm", nvml.ClockSM}, {"memory", nvml.ClockMemory}, {"video", nvml.ClockVideo}}

func (d *device) load() *frame.Load {
	l := &frame.Load{}
	if m := read(d, "memory", d.dev.GetMemoryInfo); m.OK {
		l.MemoryUsed, l.MemoryFree, l.MemoryTotal = frame.Some(m.V.Used), frame.Some(m.V.Free), frame.Some(m.V.Total)
		if m.V.HasReserved {
			l.MemoryReserved = frame.Some(m.V.Reserved)
		}
	}
	if d.failed == nil && !d.refuses("utilization") {
		if gpu, mem, err := d.dev.GetUtilizationRates(); err == nil {
			l.Utilization, l.MemoryBandwidth = frame.Some(gpu), frame.Some(mem)
		} else {
			d.note("utilization", err)
		}
	}
	if d.failed == nil && !d.refuses("bar1") {
		if used, _, err := d.dev.GetBAR1MemoryInfo(); err == nil {
			l.BAR1Used = frame.Some(used)
		} else {
			d.note("bar1", err)
		}
	}
	l.Temperature = read(d, "temperature", d.dev.GetTemperature)
	l.MemoryTemp = read(d, "memory_temperature", d.dev.GetMemoryTemperature)
	l.Power = read(d, "power", d.dev.GetPowerUsage)
	l.PowerLimit = read(d, "power_limit", d.dev.GetEnforcedPowerLimit)
	l.PState = read(d, "pstate", d.dev.GetPerformanceState)
	l.Throttle = read(d, "throttle", d.dev.GetCurrentClocksEventReasons)
	l.Encoder = read(d, "encoder", d.dev.GetEncoderUtilization)
	l.Decoder = read(d, "decoder", d.dev.GetDecoderUtilization)
	l.JPEG = read(d, "jpeg", d.dev.GetJpgUtilization)
	l.OFA = read(d, "ofa", d.dev.GetOfaUtilization)
	for _, c := range clocks {
		if hz := read(d, "clock_"+c.name, func() (int, error) { return d.dev.GetClockInfo(c.domain) }); hz.OK {
			if l.Clocks == nil {
				l.Clocks = make(map[string]int, len(clocks))
			}
			l.Clocks[c.name] = hz.V
		}
	}
	return l
}

// processes joins the compute and the graphics list: a process in both counts once.
func (d *device) processes() *frame.Processes {
	out := &frame.Processes{List: []frame.Process{}}
	ok := false
	for _, graphics := range []bool{false, true} {
		key, call := "compute_processes", d.dev.GetComputeRunningProcesses
		if graphics {
			key, call = "graphics_processes", d.dev.GetGraphicsRunningProcesses
		}
		if d.failed != nil || d.refuses(key) {
			continue
		}
		list, err := call(d.procs[:0])
		if err != nil {
			d.note(key, err)
			continue
		}
		d.procs, ok = list, true
		for _, p := range list {
			out.List = merge(out.List, p, graphics)
		}
	}
	if !ok {
		return nil
	}
	return out
}

// merge adds p to list. NVML may name a PID twice: in both lists, or once per MIG instance.
func merge(list []frame.Process, p nvml.ProcessInfo, graphics bool) []frame.Process {
	var e *frame.Process
	for i := range list {
		if l := &list[i]; l.PID == p.PID && opt(p.GPUInstance) == l.GPUInst && opt(p.ComputeInstance) == l.CIInst {
			e = l
		}
	}
	if e == nil {
		list = append(list, frame.Process{PID: p.PID, GPUInst: opt(p.GPUInstance), CIInst: opt(p.ComputeInstance)})
		e = &list[len(list)-1]
	}
	if p.HasMemory && (!e.MemoryUsed.OK || p.UsedMemory > e.MemoryUsed.V) {
		e.MemoryUsed = frame.Some(p.UsedMemory)
	}
	e.Compute = e.Compute || !graphics
	e.Graphics = e.Graphics || graphics
	return list
}

func opt(v int) frame.Opt[int] {
	if v < 0 {
		return frame.Opt[int]{}
	}
	return frame.Some(v)
}

// settle is how far behind the clock the driver's process samples may be: what is older and was not delivered will not come.
const settle = time.Second

// samples empties the driver's rings since the last time, each by its own last timestamp.
func (d *device) samples(now time.Time) *frame.Samples {
	s := &frame.Samples{}
	nowµs, future := now.UnixMicro(), now.Add(time.Second).UnixMicro()
	if d.covered == 0 {
		// Samples from before this process are not its to account for.
		d.covered = nowµs - d.p.cfg.Samples.Microseconds()
		d.lastSample, d.lastUtil, d.lastPower = d.covered, d.covered, d.covered
	}
	if !d.refuses("process_utilization") {
		list, err := d.dev.GetProcessUtilization(d.putil[:0], d.lastSample)
		if err != nil {
			d.note("process_utilization", err)
		} else {
			d.putil = list
			newest := d.lastSample
			for _, p := range list {
				if p.Time <= d.lastSample || p.Time > future {
					continue
				}
				newest = max(newest, p.Time)
				s.Process = append(s.Process, frame.ProcessSample{PID: p.PID, Time: p.Time, SM: p.SM, Memory: p.Memory, Enc: p.Encoder, Dec: p.Decoder})
			}
			d.lastSample = newest
			s.ProcessSince = d.covered
			d.covered = max(d.covered, newest, nowµs-settle.Microseconds())
			s.ProcessUntil = d.covered
		}
	}
	s.Utilization = d.ringSamples("samples_utilization", nvml.SamplesUtilization, &d.lastUtil, future)
	s.Power = d.ringSamples("samples_power", nvml.SamplesPower, &d.lastPower, future)
	return s
}

func (d *device) ringSamples(key string, ring uint32, last *int64, future int64) []frame.Sample {
	if d.failed != nil || d.refuses(key) {
		return nil
	}
	list, err := d.dev.GetSamples(d.ring[:0], ring, *last)
	if err != nil {
		d.note(key, err)
		return nil
	}
	d.ring = list
	var out []frame.Sample
	newest := *last
	for _, r := range list {
		if r.Time <= *last || r.Time > future {
			continue
		}
		newest = max(newest, r.Time)
		out = append(out, frame.Sample{Time: r.Time, Value: r.Value})
	}
	*last = newest
	return out
}

func (d *device) info() *frame.Info {
	i := &frame.Info{PCIBusID: d.busID}
	i.Name = read(d, "name", d.dev.GetName).V
	i.Minor = read(d, "minor", d.dev.GetMinorNumber)
	i.Serial = read(d, "serial", d.dev.GetSerial).V
	i.VBIOS = read(d, "vbios", d.dev.GetVbiosVersion).V
	i.Architecture = read(d, "architecture", d.dev.GetArchitecture).V
	i.CUDACapability = read(d, "capability", func() (string, error) {
		major, minor, err := d.dev.GetCudaComputeCapability()
		return fmt.Sprintf("%d.%d", major, minor), err
	}).V
	i.MIGMode = read(d, "mig_mode", d.dev.MIGModeEnabled)
	if m := read(d, "memory", d.dev.GetMemoryInfo); m.OK {
		i.MemoryTotal = frame.Some(m.V.Total)
	}
	if r := read(d, "power_range", func() ([2]float64, error) {
		low, high, err := d.dev.GetPowerManagementLimitConstraints()
		return [2]float64{low, high}, err
	}); r.OK {
		i.PowerLimitMin, i.PowerLimitMax = frame.Some(r.V[0]), frame.Some(r.V[1])
	}
	if r := read(d, "pcie_max", func() ([2]int, error) {
		g, w, err := d.dev.GetMaxPcieLink()
		return [2]int{g, w}, err
	}); r.OK {
		i.PCIeGenMax, i.PCIeWidthMax = frame.Some(r.V[0]), frame.Some(r.V[1])
	}
	for _, c := range clocks {
		if hz := read(d, "clock_max_"+c.name, func() (int, error) { return d.dev.GetMaxClockInfo(c.domain) }); hz.OK {
			if i.ClockMax == nil {
				i.ClockMax = map[string]int{}
			}
			i.ClockMax[c.name] = hz.V
		}
	}
	i.TempSlowdown = read(d, "temp_slowdown", func() (float64, error) { return d.dev.GetTemperatureThreshold(nvml.ThresholdSlowdown) })
	i.TempShutdown = read(d, "temp_shutdown", func() (float64, error) { return d.dev.GetTemperatureThreshold(nvml.ThresholdShutdown) })
	i.PersistenceMode = read(d, "persistence", d.dev.GetPersistenceMode)
	i.ComputeMode = read(d, "compute_mode", d.dev.GetComputeMode).V
	return i
}

// violations are the driver's own counters of throttled time, by the reason's name in gpu_throttle_seconds_total.
var violations = []struct {
	reason string
	field  uint32
}{
	{"sw_power_cap", nvml.FieldThrottlePower},
	{"sync_boost", nvml.FieldThrottleSyncBoost},
	{"sw_thermal_slowdown", nvml.FieldThrottleSWThermal},
	{"hw_thermal_slowdown", nvml.FieldThrottleHWThermal},
	{"hw_power_brake_slowdown", nvml.FieldThrottlePowerBrake},
}

func (d *device) health() *frame.Health {
	h := &frame.Health{}
	for _, e := range []struct {
		name                   string
		uncorrected, aggregate bool
	}{{"volatile/corrected", false, false}, {"volatile/uncorrected", true, false}, {"aggregate/corrected", false, true}, {"aggregate/uncorrected", true, true}} {
		if n := read(d, "ecc_"+e.name, func() (uint64, error) { return d.dev.GetTotalEccErrors(e.uncorrected, e.aggregate) }); n.OK {
			put(&h.ECC, e.name, n.V)
		}
	}
	for _, c := range []struct {
		name   string
		double bool
	}{{"single_bit", false}, {"double_bit", true}} {
		if n := read(d, "retired_"+c.name, func() (uint64, error) { return d.dev.GetRetiredPages(c.double) }); n.OK {
			put(&h.RetiredPages, c.name, n.V)
		}
	}
	h.RetiredPending = read(d, "retired_pending", d.dev.GetRetiredPagesPendingStatus)
	if r := read(d, "remapped", d.dev.GetRemappedRows); r.OK {
		h.RemappedRows = map[string]uint64{"corrected": r.V.Corrected, "uncorrected": r.V.Uncorrected}
		h.RemapPending, h.RemapFailure = frame.Some(r.V.Pending), frame.Some(r.V.Failure)
	}
	if d.failed == nil && !d.refuses("violations") {
		var fields [8]nvml.Field
		for i, v := range violations {
			fields[i].ID = v.field
		}
		if err := d.dev.GetFieldValues(fields[:len(violations)]); err != nil {
			d.note("violations", err)
		} else {
			for i, v := range violations {
				if fields[i].Err == nil {
					put(&h.ThrottleSeconds, v.reason, fields[i].Value/1e9)
				}
			}
		}
	}
	if n := read(d, "fans", d.dev.GetNumFans); n.OK {
		for i := range n.V {
			if s := read(d, "fan_speed", func() (float64, error) { return d.dev.GetFanSpeed(i) }); s.OK {
				h.Fans = append(h.Fans, s.V)
			}
		}
	}
	if r := read(d, "pcie_link", func() ([2]int, error) {
		g, w, err := d.dev.GetPcieLink()
		return [2]int{g, w}, err
	}); r.OK {
		h.PCIeGen, h.PCIeWidth = frame.Some(r.V[0]), frame.Some(r.V[1])
	}
	h.PCIeReplays = read(d, "pcie_replays", d.dev.GetPcieReplayCounter)
	h.EncoderSessions = read(d, "encoder_sessions", d.dev.GetEncoderSessions)
	return h
}

func put[K comparable, V any](m *map[K]V, k K, v V) {
	if *m == nil {
		*m = map[K]V{}
	}
	(*m)[k] = v
}

// maxNVLinks is NVML_NVLINK_MAX_LINKS of current drivers; asking stops at the first link that does not exist.
const maxNVLinks = 18

func (d *device) nvlink() []frame.NVLink {
	if d.failed != nil || d.refuses("nvlink") {
		return nil
	}
	var out []frame.NVLink
	for i := range maxNVLinks {
		active, err := d.dev.GetNvLinkState(i)
		if err != nil {
			if i == 0 {
				d.note("nvlink", err)
			}
			break
		}
		if !active {
			continue
		}
		l := frame.NVLink{Link: i}
		fields := [2]nvml.Field{{ID: nvml.FieldNVLinkDataRx, Scope: uint32(i)}, {ID: nvml.FieldNVLinkDataTx, Scope: uint32(i)}}
		if err := d.dev.GetFieldValues(fields[:]); err == nil {
			if fields[0].Err == nil {
				l.RX = frame.Some(uint64(fields[0].Value) * 1024)
			}
			if fields[1].Err == nil {
				l.TX = frame.Some(uint64(fields[1].Value) * 1024)
			}
		}
		for kind, name := range []string{"replay", "recovery", "crc_flit", "crc_data"} {
			if n, err := d.dev.GetNvLinkErrorCounter(i, uint32(kind)); err == nil {
				put(&l.Errors, name, n)
			}
		}
		out = append(out, l)
	}
	return out
}

func (d *device) migDevices(info *frame.Info) []*nvml.Device {
	if d.failed != nil || !info.MIGMode.V {
		return nil
	}
	n, err := d.dev.GetMaxMigDeviceCount()
	if err != nil {
		return nil
	}
	var out []*nvml.Device
	for i := range n {
		if m, err := d.dev.GetMigDeviceHandleByIndex(i); err == nil {
			out = append(out, m)
		}
	}
	return out
}

func (d *device) migReadings() []frame.MIG {
	var out []frame.MIG
	for _, m := range d.mig {
		uuid, err := m.GetUUID()
		if err != nil {
			continue
		}
		r := frame.MIG{UUID: uuid, GPUInst: -1, CIInst: -1}
		if v, err := m.GetGpuInstanceID(); err == nil {
			r.GPUInst = v
		}
		if v, err := m.GetComputeInstanceID(); err == nil {
			r.CIInst = v
		}
		if a, err := m.GetAttributes(); err == nil {
			r.SMCount = frame.Some(a.Multiprocessors)
			r.Profile = fmt.Sprintf("%dg.%dgb", a.GPUInstanceSlices, (a.MemoryMiB+512)/1024)
		}
		if mem, err := m.GetMemoryInfo(); err == nil {
			r.MemoryUsed, r.MemoryTotal = frame.Some(mem.Used), frame.Some(mem.Total)
		}
		out = append(out, r)
	}
	return out
}
