package poller

import (
	"fmt"

	"gpu-exporter/nvml"
	"gpu-exporter/nvml/frame"
)

// pair makes one result of a call that has two.
func pair[T any](a, b T, err error) ([2]T, error) { return [2]T{a, b}, err }

// info reads what does not change while the driver stays loaded.
func (d *device) info() *frame.Info {
	i := &frame.Info{PCIBusID: d.busID, NUMANode: numaNode(d.p.cfg.SysFS, d.busID)}
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
	if r := read(d, "power_range", func() ([2]float64, error) { return pair(d.dev.GetPowerManagementLimitConstraints()) }); r.OK {
		i.PowerLimitMin, i.PowerLimitMax = frame.Some(r.V[0]), frame.Some(r.V[1])
	}
	if r := read(d, "pcie_max", func() ([2]int, error) { return pair(d.dev.GetMaxPcieLink()) }); r.OK {
		i.PCIeGenMax, i.PCIeWidthMax = frame.Some(r.V[0]), frame.Some(r.V[1])
		d.pcie.link = r.V
	}
	for _, c := range clocks {
		if hz := read(d, c.most, func() (int, error) { return d.dev.GetMaxClockInfo(c.domain) }); hz.OK {
			put(&i.ClockMax, c.name, hz.V)
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

// health reads what changes seldom. It is always complete: what is absent is not supported.
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
	if d.may("violations") {
		var fields [8]nvml.Field
		for i, v := range violations {
			fields[i].ID = v.field
		}
		if err := d.dev.GetFieldValues(fields[:len(violations)]); d.ok("violations", err) {
			for i, v := range violations {
				if fields[i].Err == nil {
					put(&h.ThrottleSeconds, v.reason, fields[i].Value/1e9)
				}
			}
		}
	}
	if n := read(d, "fans", d.dev.GetNumFans); n.OK {
		for i := range n.V {
			s := read(d, "fan_speed", func() (float64, error) { return d.dev.GetFanSpeed(i) })
			if !s.OK {
				h.Fans = nil // their place in the list is their number: no gaps
				break
			}
			h.Fans = append(h.Fans, s.V)
		}
	}
	if r := read(d, "pcie_link", func() ([2]int, error) { return pair(d.dev.GetPcieLink()) }); r.OK {
		h.PCIeGen, h.PCIeWidth = frame.Some(r.V[0]), frame.Some(r.V[1])
	}
	h.BAR1Used = read(d, "bar1", func() (uint64, error) { used, _, err := d.dev.GetBAR1MemoryInfo(); return used, err })
	h.PCIeReplays = read(d, "pcie_replays", d.dev.GetPcieReplayCounter)
	h.EncoderSessions = read(d, "encoder_sessions", d.dev.GetEncoderSessions)
	return h
}

// maxNVLinks is NVML_NVLINK_MAX_LINKS of current drivers; asking stops at the first link that does not exist.
const maxNVLinks = 18

// nvlink reads the active links.
func (d *device) nvlink() []frame.NVLink {
	var out []frame.NVLink
	for i := range maxNVLinks {
		if !d.may("nvlink") {
			break
		}
		active, err := d.dev.GetNvLinkState(i)
		if err != nil {
			if i == 0 {
				d.ok("nvlink", err)
			}
			break
		}
		if !active {
			continue
		}
		l := frame.NVLink{Link: i}
		// NVLink 5 counts bytes under other ids than those before it, which count KiB.
		fields := [4]nvml.Field{{ID: nvml.FieldNVLinkDataRx, Scope: uint32(i)}, {ID: nvml.FieldNVLinkDataTx, Scope: uint32(i)},
			{ID: nvml.FieldNVLinkRcvBytes, Scope: uint32(i)}, {ID: nvml.FieldNVLinkXmitBytes, Scope: uint32(i)}}
		if d.may("nvlink_data") {
			if err := d.dev.GetFieldValues(fields[:]); d.ok("nvlink_data", err) {
				l.RX, l.TX = linkBytes(fields[0], fields[2]), linkBytes(fields[1], fields[3])
			}
		}
		for kind, name := range nvlinkErrors {
			if !d.may("nvlink_errors") {
				break
			}
			if n, err := d.dev.GetNvLinkErrorCounter(i, uint32(kind)); d.ok("nvlink_errors", err) {
				put(&l.Errors, name, n)
			}
		}
		out = append(out, l)
	}
	return out
}

// linkBytes returns a link's bytes from the field that the device has.
func linkBytes(kib, bytes nvml.Field) frame.Opt[uint64] {
	switch {
	case kib.Err == nil:
		return frame.Some(uint64(kib.Value) * 1024)
	case bytes.Err == nil:
		return frame.Some(uint64(bytes.Value))
	}
	return frame.Opt[uint64]{}
}

// nvlinkErrors names the kinds of GetNvLinkErrorCounter by their number.
var nvlinkErrors = []string{nvml.NvLinkReplay: "replay", nvml.NvLinkRecovery: "recovery", nvml.NvLinkCRCFlit: "crc_flit", nvml.NvLinkCRCData: "crc_data"}
