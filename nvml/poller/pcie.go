package poller

import (
	"time"

	"gpu-exporter/nvml"
	"gpu-exporter/nvml/frame"
)

// gpmReader keeps the previous GPM sample, so that each reading is the mean since the one before.
type gpmReader struct {
	first, second *nvml.GPMSample
	at            time.Time // of first; zero when there is none
	values        []nvml.GPMValue
	ready         bool
}

var gpmRatios = []struct {
	name string
	id   uint32
}{{"graphics_active", nvml.GPMGraphics}, {"sm_active", nvml.GPMSM}, {"sm_occupancy", nvml.GPMOccupancy}, {"tensor_active", nvml.GPMTensor},
	{"dram_active", nvml.GPMDRAM}, {"fp64_active", nvml.GPMFP64}, {"fp32_active", nvml.GPMFP32}, {"fp16_active", nvml.GPMFP16}}

// prepare allocates the two buffers once. It reports whether the device has GPM.
func (g *gpmReader) prepare(d *device) bool {
	if g.ready {
		return true
	}
	if d.refuses("gpm") {
		return false
	}
	ok, err := d.dev.GPMSupported()
	if err == nil && !ok {
		err = nvml.ErrNotSupported
	}
	if err == nil {
		g.first, err = d.lib.GPMSampleAlloc()
	}
	if err == nil {
		g.second, err = d.lib.GPMSampleAlloc()
	}
	if err != nil {
		d.note("gpm", err)
		return false
	}
	for _, r := range gpmRatios {
		g.values = append(g.values, nvml.GPMValue{ID: r.id})
	}
	for _, id := range []uint32{nvml.GPMPCIeRx, nvml.GPMPCIeTx, nvml.GPMNVLinkRx, nvml.GPMNVLinkTx} {
		g.values = append(g.values, nvml.GPMValue{ID: id})
	}
	g.ready = true
	return true
}

func (g *gpmReader) read(d *device, now time.Time) *frame.GPM {
	if !g.prepare(d) {
		return nil
	}
	if err := d.dev.GPMSampleGet(g.second); err != nil {
		d.note("gpm", err)
		g.at = time.Time{}
		return nil
	}
	// The sample is taken inside the call, so the clock is read after it.
	taken := time.Now()
	defer func() {
		g.first, g.second = g.second, g.first
		g.at = taken
	}()
	if g.at.IsZero() {
		return nil
	}
	if err := d.dev.GPMMetricsGet(g.first, g.second, g.values); err != nil {
		d.note("gpm", err)
		return nil
	}
	out := &frame.GPM{Window: taken.Sub(g.at).Nanoseconds(), Ratio: make(map[string]float64, len(gpmRatios))}
	for i, r := range gpmRatios {
		if g.values[i].Err == nil {
			out.Ratio[r.name] = g.values[i].Value
		}
	}
	for i, o := range []*frame.Opt[float64]{&out.PCIeRX, &out.PCIeTX, &out.NVLRX, &out.NVLTX} {
		if v := g.values[len(gpmRatios)+i]; v.Err == nil {
			*o = frame.Some(v.Value)
		}
	}
	return out
}

// pcieReader turns what the device tells about its PCIe traffic into bytes. GPM's means cover all time and never wrap. Where there is no
// GPM, the throughput call samples 20 ms, and blocks for as long, so it is made rarely and its rate stands for the time between two calls.
// The 32-bit byte fields (197, 198) would have to be read every 79 ms at full speed and are not used.
type pcieReader struct {
	at time.Time
}

// throughputPeriod is how often the blocking throughput calls are made where there is no GPM.
const throughputPeriod = 5 * time.Second

func (r *pcieReader) read(d *device, now time.Time, g *frame.GPM) *frame.PCIe {
	if g != nil {
		out := &frame.PCIe{Source: "gpm", Window: g.Window}
		seconds := float64(g.Window) / 1e9
		if g.PCIeRX.OK {
			out.RX = frame.Some(uint64(g.PCIeRX.V * seconds))
		}
		if g.PCIeTX.OK {
			out.TX = frame.Some(uint64(g.PCIeTX.V * seconds))
		}
		if out.RX.OK || out.TX.OK {
			return out
		}
	}
	if d.gpm.ready || d.refuses("pcie_throughput") || now.Sub(r.at) < throughputPeriod {
		return nil
	}
	window := now.Sub(r.at)
	first := r.at.IsZero()
	r.at = now
	rx := read(d, "pcie_throughput", func() (float64, error) { return d.dev.GetPcieThroughput(true) })
	tx := read(d, "pcie_throughput", func() (float64, error) { return d.dev.GetPcieThroughput(false) })
	if first || !rx.OK || !tx.OK {
		return nil
	}
	s := window.Seconds()
	return &frame.PCIe{Source: "throughput", Window: window.Nanoseconds(), RX: frame.Some(uint64(rx.V * s)), TX: frame.Some(uint64(tx.V * s))}
}
