package poller

import (
	"context"
	"math"
	"runtime"
	"sync"
	"time"

	"gpu-exporter/nvml"
	"gpu-exporter/nvml/frame"
)

// pcieReader turns what the device tells about its PCIe traffic into bytes.
//
// GPM's means cover all time and never wrap: they are used where they exist. Elsewhere there are two 32-bit byte counters (fields 197 and
// 198), which wrap after 79 ms at 54 GB/s, so they must be read at twice the rate at which the link could wrap them; whether the driver does that
// cheaply enough is measured on the first few reads. If it does not, or has no such counters, the throughput call remains: it watches 20 ms, and
// blocks for as long, so it is made rarely and its rate stands for the time between two calls.
type pcieReader struct {
	link     [2]int // highest generation and lanes
	counters *pcieCounters
	tried    bool      // the counters were tried
	at       time.Time // of the last throughput reading
}

// throughputPeriod is how often the blocking throughput calls are made where nothing better exists.
const throughputPeriod = 5 * time.Second

func (r *pcieReader) read(d *device, now time.Time, g *frame.GPM) *frame.PCIe {
	if g != nil && (g.PCIeRX.OK || g.PCIeTX.OK) {
		out := &frame.PCIe{Source: "gpm", Window: g.Window}
		seconds := float64(g.Window) / 1e9
		if g.PCIeRX.OK {
			out.RX = frame.Some(uint64(math.Round(g.PCIeRX.V * seconds)))
		}
		if g.PCIeTX.OK {
			out.TX = frame.Some(uint64(math.Round(g.PCIeTX.V * seconds)))
		}
		return out
	}
	if d.gpm.ready {
		return nil
	}
	if !r.tried {
		r.tried = true
		r.counters = newPCIeCounters(d)
	}
	if r.counters != nil {
		if r.counters.usable() {
			return r.counters.drain()
		}
		r.counters = nil
	}
	return r.throughput(d, now)
}

func (r *pcieReader) throughput(d *device, now time.Time) *frame.PCIe {
	if now.Sub(r.at) < throughputPeriod || !d.may("pcie_throughput") {
		return nil
	}
	window, first := now.Sub(r.at), r.at.IsZero()
	r.at = now
	rx := read(d, "pcie_throughput", func() (float64, error) { return d.dev.GetPcieThroughput(true) })
	tx := read(d, "pcie_throughput", func() (float64, error) { return d.dev.GetPcieThroughput(false) })
	if first || !rx.OK || !tx.OK {
		return nil
	}
	s := window.Seconds()
	return &frame.PCIe{Source: "throughput", Window: window.Nanoseconds(), RX: frame.Some(uint64(rx.V * s)), TX: frame.Some(uint64(tx.V * s))}
}

// follow starts the goroutine that reads the counters.
func (r *pcieReader) follow(ctx context.Context, d *device) {
	if r.counters != nil && !r.counters.running {
		r.counters.running = true
		go r.counters.run(ctx, d)
	}
}

// forget starts over: the device was closed.
func (r *pcieReader) forget() {
	if r.counters != nil {
		r.counters.stop()
	}
	r.counters, r.tried, r.at = nil, false, time.Time{}
}

// laneRate is the payload rate of one lane in bytes per second, by generation.
var laneRate = []float64{1: 250e6, 2: 500e6, 3: 985e6, 4: 1969e6, 5: 3938e6, 6: 7563e6}

// wrapTime returns how soon a 32-bit counter can wrap on a link. An unknown link is taken for the fastest.
func wrapTime(link [2]int) time.Duration {
	gen, lanes := link[0], link[1]
	if gen <= 0 || gen >= len(laneRate) {
		gen = len(laneRate) - 1
	}
	if lanes <= 0 {
		lanes = 16
	}
	return time.Duration(float64(1<<32) / (laneRate[gen] * float64(lanes)) * 1e9)
}

// pcieCounters reads the byte counters often enough that no wrap is missed, on a thread and a handle of its own.
type pcieCounters struct {
	wrap    time.Duration // the counters may have wrapped after this
	period  time.Duration
	running bool // by the device's goroutine only

	mu      sync.Mutex
	stopped bool
	rx, tx  uint64
	window  time.Duration

	last     [2]uint32
	lastAt   time.Time
	haveLast bool
}

// newPCIeCounters returns nil where the device has no counters, or reading them fast enough costs too much.
func newPCIeCounters(d *device) *pcieCounters {
	c := &pcieCounters{wrap: wrapTime(d.pcie.link)}
	c.period = min(c.wrap/2, time.Second)
	const trials = 5
	best := time.Duration(math.MaxInt64)
	for range trials {
		if !d.may("pcie_counters") {
			return nil
		}
		start := time.Now()
		_, err := pcieFields(d.dev)
		best = min(best, time.Since(start))
		if !d.ok("pcie_counters", err) {
			return nil
		}
	}
	if float64(best)/float64(c.period) > d.p.cfg.PCIeBudget {
		return nil
	}
	return c
}

// pcieFields returns the counters of bytes received and sent by the GPU.
func pcieFields(dev *nvml.Device) (v [2]uint32, err error) {
	fields := [2]nvml.Field{{ID: nvml.FieldPCIeRxBytes}, {ID: nvml.FieldPCIeTxBytes}}
	if err := dev.GetFieldValues(fields[:]); err != nil {
		return v, err
	}
	for i, f := range fields {
		if f.Err != nil {
			return v, f.Err
		}
		v[i] = uint32(uint64(f.Value)) // a driver that counts in 64 bits is as welcome
	}
	return v, nil
}

// run reads until an error, until it is stopped, or until ctx is done.
func (c *pcieCounters) run(ctx context.Context, d *device) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer c.stop()
	dev, err := d.p.lib.DeviceGetHandleByIndex(d.index)
	tick := time.NewTicker(c.period)
	defer tick.Stop()
	for err == nil && c.usable() {
		if !d.asleep.Load() {
			before := time.Now()
			var v [2]uint32
			if v, err = pcieFields(dev); err == nil {
				c.add(v, before, time.Now())
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (c *pcieCounters) stop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stopped = true
}

// add counts one reading, taken between two moments. A gap in which the counters may have wrapped unseen is left out, of the bytes and
// of the window.
func (c *pcieCounters) add(v [2]uint32, before, after time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.haveLast && after.Sub(c.lastAt) < c.wrap {
		c.rx += uint64(v[0] - c.last[0])
		c.tx += uint64(v[1] - c.last[1])
		c.window += before.Sub(c.lastAt)
	}
	c.last, c.lastAt, c.haveLast = v, before, true
}

func (c *pcieCounters) usable() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.stopped
}

// drain returns the bytes since the last time; nil before there are any readings.
func (c *pcieCounters) drain() *frame.PCIe {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.window == 0 {
		return nil
	}
	out := &frame.PCIe{Source: "fields", Window: c.window.Nanoseconds(), RX: frame.Some(c.rx), TX: frame.Some(c.tx)}
	c.rx, c.tx, c.window = 0, 0, 0
	return out
}
