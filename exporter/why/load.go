package why

import (
	"fmt"
	"strings"
	"time"

	"gpu-exporter/exporter/history"
	"gpu-exporter/exporter/view"
	"gpu-exporter/nvml/frame"
)

// gpu is the target on one GPU.
type gpu struct {
	*look
	*crowd
	device *view.Device
	name   string
	loads  []history.Load
	own    *party // the target
	uses   []history.Use
	steps  []int // in which it was there
}

// load looks for what costs time on a GPU that the target is on.
func (l *look) load(d *view.Device, own *party) {
	g := &gpu{look: l, crowd: l.crowds[d.UUID], device: d, name: fmt.Sprintf("GPU %d", d.Index), loads: l.past.Loads[d.UUID], own: own, uses: own.uses}
	if len(g.loads) == len(g.uses) {
		for i := range g.uses {
			if g.uses[i].Seen > 0 && g.loads[i].Seen > 0 && g.seconds(i) >= partial {
				g.steps = append(g.steps, i)
			}
		}
	}
	all := func(int) bool { return true }
	use := Use{GPU: d.Index, UUID: d.UUID, SM: g.mean(all, g.sm), CPU: g.mean(all, g.cpus), Memory: frame.Some(g.own.memory)}
	l.report.Uses = append(l.report.Uses, use)
	l.report.Seconds = max(l.report.Seconds, float64(len(g.steps))*history.StepLength.Seconds())
	if len(g.steps) < least {
		l.unknown(fmt.Sprintf("it has been seen on %s for less than half a minute: too short to tell what its time goes to", g.name))
	}
	if len(g.steps) > 0 && !use.SM.OK {
		l.unknown("the driver does not tell the SM time of processes on " + g.name + ": neighbours, waiting and idleness are not looked at")
	}
	g.throttled()
	g.neighbours()
	g.link()
	g.host()
	g.memory()
}

// seconds is how much of a step is over.
func (g *gpu) seconds(step int) float64 {
	return min(g.view.Time.Sub(g.past.At(step)), history.StepLength).Seconds()
}

// The figures of a step. NaN, for which no comparison holds, is absent.
func (g *gpu) sm(i int) float64    { return float64(g.uses[i].SM) }
func (g *gpu) cpus(i int) float64  { return float64(g.uses[i].CPU) / g.seconds(i) }
func (g *gpu) clock(i int) float64 { return float64(g.loads[i].Clock) }

// figure is one of a step; 0 where the party was not there.
func (p *party) figure(i int, of func(*history.Use) float32) float64 {
	if i < len(p.uses) && p.uses[i].Seen > 0 {
		return float64(of(&p.uses[i]))
	}
	return 0
}

func sm(u *history.Use) float32        { return u.SM }
func bandwidth(u *history.Use) float32 { return u.MemoryBandwidth }

func known(x float64) float64 {
	if x != x {
		return 0
	}
	return x
}

// mean is that of a figure over the steps in which a condition holds; absent when the figure is.
func (g *gpu) mean(is func(int) bool, figure func(int) float64) view.Number {
	sum, n := 0.0, 0
	for _, i := range g.steps {
		if x := figure(i); is(i) && x == x {
			sum, n = sum+x, n+1
		}
	}
	return view.Number{V: sum / float64(max(n, 1)), OK: n > 0}
}

// when is the time in which a condition holds.
type when struct {
	part    float64 // of the steps looked at
	seconds float64
	since   time.Time // when it began the last time
	now     bool
	text    string
}

// held tells when a condition holds; ok when that is enough for a finding.
func (g *gpu) held(is func(int) bool) (w when, ok bool) {
	n, first, last := 0, -1, -1 // of the last run, in which single steps may be missing
	for k, i := range g.steps {
		if is(i) {
			if n++; last < 0 || k-last > 2 {
				first = k
			}
			last = k
		}
	}
	if n < least {
		return w, false
	}
	w = when{part: float64(n) / float64(len(g.steps)), seconds: float64(n) * history.StepLength.Seconds(), since: g.past.At(g.steps[first])}
	w.now = last >= len(g.steps)-2
	all := span(seconds(float64(len(g.steps)) * history.StepLength.Seconds()))
	switch {
	case n == len(g.steps):
		w.text = "for all of the last " + all
	case w.now:
		w.text = fmt.Sprintf("for %s of the last %s, and now since %s UTC", span(seconds(w.seconds)), all, w.since.UTC().Format(time.TimeOnly))
	default:
		w.text = fmt.Sprintf("for %s of the last %s, until %s UTC", span(seconds(w.seconds)), all, g.past.At(g.steps[last]+1).UTC().Format(time.TimeOnly))
	}
	return w, w.now || w.part >= leastPart
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// throttled looks for clocks that are held down.
func (g *gpu) throttled() {
	highest := float64(g.device.MaxClocks["sm"])
	slow := func(i int) float64 { return max(0, 1-g.clock(i)/highest) }
	temperature := func(i int) float64 { return float64(g.loads[i].Temperature) }
	power := func(i int) float64 { return float64(g.loads[i].Power) }
	// A clock that is not known does not speak against it.
	lowered := func(i int) bool { return !(highest > 0 && g.clock(i) > fullClock*highest) }
	busy := func(i int) bool { return g.loads[i].Utilization >= works }
	free := func(i int) bool {
		l := &g.loads[i]
		return l.Thermal < heldDown && l.PowerLimited < heldDown && l.Hardware < heldDown
	}
	for _, x := range []struct {
		cause *Cause
		what  string
		is    func(int) bool
	}{
		{Hot, "is held back by heat", func(i int) bool { return g.loads[i].Thermal >= heldDown && lowered(i) }},
		{Capped, "is held back by its power limit", func(i int) bool { return g.loads[i].PowerLimited >= heldDown && lowered(i) && busy(i) }},
		{Slowed, "is held back by its hardware", func(i int) bool { return g.loads[i].Hardware >= heldDown }},
		{LowClocks, "runs at low clocks that nothing explains", func(i int) bool {
			return busy(i) && free(i) && highest > 0 && g.clock(i) < lowClock*highest
		}},
	} {
		w, ok := g.held(x.is)
		if !ok {
			continue
		}
		var evidence []string
		clock := g.mean(x.is, g.clock)
		if clock.OK && highest > 0 {
			evidence = append(evidence, fmt.Sprintf("SM clock %.0f of %.0f MHz", clock.V/1e6, highest/1e6))
		}
		if t := g.mean(x.is, temperature); t.OK {
			evidence = append(evidence, fmt.Sprintf("%.0f °C", t.V))
		}
		if p := g.mean(x.is, power); p.OK && g.device.PowerLimit.OK {
			evidence = append(evidence, fmt.Sprintf("%.0f of %.0f W", p.V, g.device.PowerLimit.V))
		}
		lost := 0.3 // where the clock is not known
		if clock.OK && highest > 0 {
			lost = max(g.mean(x.is, slow).V, 0.05)
		}
		g.find(x.cause, g.device.UUID, w.part*lost, w, fmt.Sprintf("%s %s: %s.", g.name, x.what, w.text), evidence...)
	}
}

// neighbours looks for another user that takes SM time or the memory's bandwidth.
func (g *gpu) neighbours() {
	wants := func(i int) bool { return g.sm(i) >= idleSM && g.sm(i) < enoughSM }
	g.worst(TakesSM, 1, "%s has %.0f %% of the SM time of %s, this one %.0f %%: %s.", sm, func(o *party, i int) bool {
		return wants(i) && o.figure(i, sm) >= neighbourSM && g.total[i] >= busyGPU
	})
	g.worst(TakesBandwidth, 0.5, "%s reads and writes memory %.0f %% of the time on %s, this one %.0f %%: %s.", bandwidth, func(o *party, i int) bool {
		return wants(i) && o.figure(i, bandwidth) >= busyMemory/2 && g.loads[i].MemoryBandwidth >= busyMemory
	})
}

// worst finds the one neighbour that takes most of a figure while a condition holds. Weight is what a percent of it costs.
func (g *gpu) worst(c *Cause, weight float64, format string, figure func(*history.Use) float32, is func(*party, int) bool) {
	most, cost := &party{}, 0.0
	for _, o := range g.parties {
		if o == g.own {
			continue
		}
		meets := func(i int) bool { return is(o, i) }
		if w, ok := g.held(meets); ok {
			if x := w.part * weight / 100 * g.mean(meets, func(i int) float64 { return o.figure(i, figure) }).V; x > cost {
				most, cost = o, x
			}
		}
	}
	if cost == 0 {
		return
	}
	meets := func(i int) bool { return is(most, i) }
	w, _ := g.held(meets)
	takes := g.mean(meets, func(i int) float64 { return most.figure(i, figure) }).V
	has := g.mean(meets, func(i int) float64 { return float64(figure(&g.uses[i])) }).V
	f := g.find(c, g.device.UUID, cost, w, upper(fmt.Sprintf(format, most.party.String(), takes, g.name, has, w.text)))
	if u := g.mean(meets, func(i int) float64 { return float64(g.loads[i].Utilization) }); u.OK {
		f.Evidence = append(f.Evidence, fmt.Sprintf("%s was busy %.0f %% of that time", g.name, u.V))
	}
	if n := len(g.parties); n > 2 {
		f.Evidence = append(f.Evidence, fmt.Sprintf("it is one of %d on it", n))
	}
	f.Neighbour = &most.party
}

// upper begins a sentence.
func upper(s string) string { return strings.ToUpper(s[:1]) + s[1:] }

// link looks for copies between the host and the GPU.
func (g *gpu) link() {
	capacity := g.device.PCIeLink.V
	if capacity <= 0 {
		return
	}
	// Each direction is a link of its own.
	for _, way := range []struct {
		name string
		all  func(*history.Load) float32
		of   func(*history.Use) float32
	}{
		{"to", func(l *history.Load) float32 { return l.ToGPU }, func(u *history.Use) float32 { return u.ToGPU }},
		{"from", func(l *history.Load) float32 { return l.FromGPU }, func(u *history.Use) float32 { return u.FromGPU }},
	} {
		moved := func(i int) float64 { return float64(way.all(&g.loads[i])) / g.seconds(i) }
		own := func(i int) float64 { return float64(way.of(&g.uses[i])) / g.seconds(i) }
		// One that neither computes nor copies does not wait for the link.
		is := func(i int) bool {
			return moved(i) >= busyLink*capacity && g.sm(i) < enoughSM && (g.sm(i) >= idleSM || own(i) >= 0.01*capacity)
		}
		w, ok := g.held(is)
		if !ok {
			continue
		}
		rate, mine := g.mean(is, moved).V, g.mean(is, own)
		evidence := []string{fmt.Sprintf("%s/s of about %s/s", size(uint64(rate)), size(uint64(capacity)))}
		var most *party
		highest := mine.V
		for _, o := range g.parties {
			if o == g.own {
				continue
			}
			if x := g.mean(is, func(i int) float64 { return o.figure(i, way.of) / g.seconds(i) }); x.OK && x.V > highest {
				most, highest = o, x.V
			}
		}
		if mine.OK {
			evidence = append(evidence, fmt.Sprintf("this one copies %s/s", size(uint64(mine.V))))
		} else {
			evidence = append(evidence, "who copies is not known without the kernel tracer")
		}
		cost, text := w.part*min(rate/capacity, 1), fmt.Sprintf("Copies %s %s keep its link busy: %s.", way.name, g.name, w.text)
		if most == nil {
			g.find(CopyBound, g.device.UUID, cost, w, text, evidence...)
			continue
		}
		evidence = append(evidence, fmt.Sprintf("%s copies %s/s", most.party.String(), size(uint64(highest))))
		text = fmt.Sprintf("%s keeps the link of %s busy with copies %s it: %s.", upper(most.party.String()), g.name, way.name, w.text)
		g.find(TakesLink, g.device.UUID, cost, w, text, evidence...).Neighbour = &most.party
	}
}

// host looks for a target that waits for its own CPU, or has no work.
func (g *gpu) host() {
	room := func(i int) bool {
		l := &g.loads[i]
		c := g.device.PCIeLink.V * busyLink * g.seconds(i)
		return g.total[i] < works && !(c > 0 && (float64(l.ToGPU) >= c || float64(l.FromGPU) >= c))
	}
	busy := func(i int) bool { return g.cpus(i) >= busyCPU && g.sm(i) < waitingSM && room(i) }
	if w, ok := g.held(busy); ok {
		mean := g.mean(busy, g.sm).V
		evidence := []string{fmt.Sprintf("its processes use %.1f CPUs and %.0f %% of the SM time", g.mean(busy, g.cpus).V, mean)}
		if mean < idleSM {
			evidence = append(evidence, "a program that spins while it waits for work looks the same")
		}
		g.find(HostBound, g.device.UUID, w.part*(1-mean/100), w,
			fmt.Sprintf("Its own CPU is busy while %s waits: %s.", g.name, w.text), evidence...)
	}
	idle := func(i int) bool {
		return g.sm(i) < idleSM && !(g.cpus(i) >= busyCPU) && !(g.uses[i].ToGPU+g.uses[i].FromGPU > idleBytes)
	}
	if w, ok := g.held(idle); ok && w.now && g.view.Time.Sub(w.since) >= idleSteps*history.StepLength {
		evidence := []string{"it holds " + size(g.own.memory)}
		if c := g.mean(idle, g.cpus); c.OK {
			evidence = append(evidence, fmt.Sprintf("its processes use %.2f CPUs", c.V))
		}
		g.find(Idling, g.device.UUID, 0, w, fmt.Sprintf("It gives %s no work: %s.", g.name, w.text), evidence...)
	}
}

// memory looks for a GPU whose memory is nearly full.
func (g *gpu) memory() {
	d := g.device
	if !d.MemoryUsed.OK || d.MemoryTotal.V == 0 || float64(d.MemoryUsed.V) < full*float64(d.MemoryTotal.V) {
		return
	}
	part := 100 * float64(d.MemoryUsed.V) / float64(d.MemoryTotal.V)
	text := fmt.Sprintf("The memory of %s is %.0f %% full: the next large request fails.", g.name, part)
	if most := g.parties[0]; most.memory > g.own.memory {
		text += " " + upper(most.party.String()) + " holds more of it than this one."
		g.find(TakesMemory, d.UUID, 0.02, when{}, text, g.holders(d.UUID)...).Neighbour = &most.party
		return
	}
	g.find(MemoryFull, d.UUID, 0.01, when{}, text, g.holders(d.UUID)...)
}
