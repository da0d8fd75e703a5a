package poller

import (
	"context"
	"runtime"
	"sync"
	"time"

	"gpu-exporter/nvml"
	"gpu-exporter/nvml/frame"
)

// gpmReader keeps the previous GPM sample, so that each reading is the mean since the one before, and no time is left out.
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
		return d.may("gpm")
	}
	if !d.may("gpm") {
		return false
	}
	ok, err := d.dev.GPMSupported()
	if err == nil && !ok {
		err = nvml.ErrNotSupported
	}
	if err == nil && g.first == nil {
		g.first, err = d.lib.GPMSampleAlloc()
	}
	if err == nil && g.second == nil {
		g.second, err = d.lib.GPMSampleAlloc()
	}
	if !d.ok("gpm", err) {
		return false
	}
	g.values = g.values[:0]
	for _, r := range gpmRatios {
		g.values = append(g.values, nvml.GPMValue{ID: r.id})
	}
	for _, id := range []uint32{nvml.GPMPCIeRx, nvml.GPMPCIeTx, nvml.GPMNVLinkRx, nvml.GPMNVLinkTx} {
		g.values = append(g.values, nvml.GPMValue{ID: id})
	}
	g.ready = true
	return true
}

// forget drops the previous sample: the device was closed.
func (g *gpmReader) forget() { g.ready, g.at = false, time.Time{} }

func (g *gpmReader) read(d *device) *frame.GPM {
	if !g.prepare(d) {
		return nil
	}
	if err := d.dev.GPMSampleGet(g.second); !d.ok("gpm", err) {
		g.at = time.Time{}
		return nil
	}
	// The sample is taken inside the call, so the clock is read after it.
	taken := d.p.cfg.now()
	since := g.at
	g.first, g.second, g.at = g.second, g.first, taken
	if since.IsZero() || !taken.After(since) {
		return nil
	}
	if err := d.dev.GPMMetricsGet(g.second, g.first, g.values); !d.ok("gpm", err) {
		return nil
	}
	out := &frame.GPM{Window: taken.Sub(since).Nanoseconds(), Ratio: make(map[string]float64, len(gpmRatios))}
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
	out.SMActive = d.fast.drain()
	return out
}

// fastGPM reads SM activity over short windows, on a thread and a handle of its own.
type fastGPM struct {
	mu      sync.Mutex
	samples []frame.Sample
}

// maxFast bounds what is kept while the device's own goroutine does not fetch it.
const maxFast = 1000

// drain returns the samples since the last time. A nil fastGPM has none.
func (g *fastGPM) drain() []frame.Sample {
	if g == nil {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.samples
	g.samples = nil
	return s
}

func (g *fastGPM) add(t time.Time, v float64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.samples) < maxFast {
		g.samples = append(g.samples, frame.Sample{Time: t.UnixMicro(), Value: v})
	}
}

// run samples until ctx is done. After an error it starts over with a new handle.
func (g *fastGPM) run(ctx context.Context, d *device) {
	p := d.p
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	first, err := p.lib.GPMSampleAlloc()
	if err != nil {
		return
	}
	defer first.Free()
	second, err := p.lib.GPMSampleAlloc()
	if err != nil {
		return
	}
	defer second.Free()
	for ctx.Err() == nil {
		if !d.asleep.Load() {
			if dev, err := p.lib.DeviceGetHandleByIndex(d.index); err == nil {
				g.sample(ctx, d, dev, first, second)
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(closedAge):
		}
	}
}

// sample reads at every period until an error, until the device falls asleep, or until ctx is done.
func (g *fastGPM) sample(ctx context.Context, d *device, dev *nvml.Device, first, second *nvml.GPMSample) {
	tick := time.NewTicker(d.p.cfg.FastGPM)
	defer tick.Stop()
	values := []nvml.GPMValue{{ID: nvml.GPMSM}}
	if dev.GPMSampleGet(first) != nil {
		return
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if d.asleep.Load() || dev.GPMSampleGet(second) != nil {
			return
		}
		t := time.Now()
		if dev.GPMMetricsGet(first, second, values) == nil && values[0].Err == nil {
			g.add(t, values[0].Value)
		}
		first, second = second, first
	}
}
