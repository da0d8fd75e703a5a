package snapshot

import (
	"math"
	"time"

	"gpu-exporter/nvml/frame"
)

// Accounts of a device that close at every moment: what its workloads were given and the rest are together the device's own figure. Nothing
// leaves the rest, and a workload that is dropped leaves it what it had. So every series only grows while it exists.

// energyUnit makes sums of energies exact: whole multiples of it add up in float64 without rounding, in any order, up to 2^43 J.
const energyUnit = 1.0 / 1024

func wholeUnits(joules float64) float64 { return math.Floor(joules/energyUnit) * energyUnit }

// Microseconds returns seconds to the whole microsecond. Sums of such, made so again, are the same in any order: a counter that is a sum would else
// fall by its last bit now and then, and be taken for one that began anew.
func Microseconds(seconds float64) float64 { return math.Round(seconds*1e6) / 1e6 }

// energyAccount shares out the device's energy by SM time between two readings of the driver's counter.
type energyAccount struct {
	raw     frame.Opt[float64] // J: the driver's counter
	total   float64            // J: raw, going on where the driver starts anew
	rest    float64            // J given to no workload
	at      time.Time          // of raw
	covered float64            // s since then for which process samples are known
}

// energy takes a reading of the counter. What was used since the one before goes to the processes in proportion to the SM time they had of the
// time between; the part in which none ran stays in the rest.
func (b *Builder) energy(now time.Time, d *device, joules float64) {
	if !(joules >= 0 && joules < 1<<43) {
		return
	}
	a := &d.energy
	last, lastAt := a.raw, a.at
	a.raw, a.at = frame.Some(wholeUnits(joules)), now
	used := a.raw.V - last.V
	if !last.OK {
		a.total, a.rest = a.raw.V, a.raw.V
		used = 0
	}
	// A counter that fell was started anew by the driver: what was used since then until now is not known.
	used = max(used, 0)
	a.total += used
	keys := d.sortedKeys()
	busy := 0.0
	for _, k := range keys {
		w := d.workloads[k]
		busy += w.busy - w.busyShared
	}
	left, span := used, max(now.Sub(lastAt).Seconds(), a.covered, busy)
	for _, k := range keys {
		w := d.workloads[k]
		if span > 0 && w.chargeable(now) {
			share := min(wholeUnits(used*(w.busy-w.busyShared)/span), left)
			w.energy += share
			left -= share
		}
		w.busyShared = w.busy
	}
	a.rest += left
	a.covered = 0
}

// newcomer is how long a process that /proc does not show waits for its name and container before it is charged without.
const newcomer = 10 * time.Second

// chargeable tells whether energy may be put down to a workload: it is shown, and it will not change its container.
func (w *workload) chargeable(now time.Time) bool {
	return w.shown && (w.facts.PID != 0 || now.Sub(w.since) >= newcomer)
}

// The directions of PCIe traffic.
const (
	toDevice = iota
	fromDevice
)

// pcieAccount sets what processes copied, told by probes, against the device's traffic, in one direction. The two are read at different moments
// and the device's includes the protocol's overhead.
type pcieAccount struct {
	counted frame.Opt[uint64] // bytes that the device told, since the exporter started
	recent  []pcieReading     // newer than what the rest was computed from, oldest first
	settled uint64            // bytes: the reading that the rest is computed from
	rest    uint64            // bytes given to no workload
}

type pcieReading struct {
	at    time.Time
	bytes uint64
}

const (
	// pcieSettle is how old a reading of the device's traffic must be before the rest is computed from it. By then the probes have told of
	// the copies in it. Without it a copy would first be counted in the rest and then again for its process.
	pcieSettle = 5 * time.Second
	maxRecent  = 64
)

func (a *pcieAccount) add(now time.Time, bytes uint64) {
	a.counted = frame.Some(a.counted.V + bytes)
	a.recent = append(a.recent, pcieReading{now, a.counted.V})
	if len(a.recent) > maxRecent {
		a.settled, a.recent = a.recent[0].bytes, a.recent[1:]
	}
}

// close returns the device's figure: what the workloads were given and the rest.
func (a *pcieAccount) close(now time.Time, given uint64, settle time.Duration) frame.Opt[uint64] {
	// A reading from the future is one from before the clock was set back.
	for len(a.recent) > 0 && (now.Sub(a.recent[0].at) >= settle || a.recent[0].at.After(now)) {
		a.settled, a.recent = a.recent[0].bytes, a.recent[1:]
	}
	if a.settled > given {
		a.rest = max(a.rest, a.settled-given)
	}
	if !a.counted.OK {
		return frame.Opt[uint64]{}
	}
	return frame.Some(given + a.rest)
}

// leave moves what a workload was given to the rest: it will be shown no more, or not for now. Where its container runs on, views that fold
// processes into containers still need it, and what the rest has none of stays with what is in no container.
func (d *device) leave(w *workload) {
	if w.shown { // else its part never left the rest
		d.energy.rest += w.energy
		for i := range w.copied {
			d.pcie[i].rest += w.copied[i]
		}
		p := d.pastOf(w.container)
		p.busy = Microseconds(p.busy + Microseconds(w.busy))
		p.cpu = Microseconds(p.cpu + w.cpu.V - w.cpuLeft)
		if w.container != "" {
			p.energy += w.energy
			for i := range w.copied {
				p.copied[i] += w.copied[i]
			}
		}
		w.cpuLeft = w.cpu.V
	}
	w.busy, w.busyShared, w.energy, w.copied, w.shown = 0, 0, 0, [2]uint64{}, false
}

// past is what the dropped processes of one container had counted on one device. What is in no container, or in one that is gone, has its energy
// and copies in the rest alone.
type past struct {
	busy, energy, cpu float64
	copied            [2]uint64
}

func (d *device) pastOf(container string) *past {
	p := d.past[container]
	if p == nil {
		p = &past{}
		d.past[container] = p
	}
	return p
}

// grow adds to sum what a counter counted between two readings. One that fell has started anew.
func grow(sum, last, now uint64) uint64 {
	if now < last {
		return sum + now
	}
	return sum + now - last
}
