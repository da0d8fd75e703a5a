package why

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/history"
	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/view"
	"gpu-exporter/nvml/frame"
)

// What makes a finding.
const (
	least     = 3   // steps in which a condition must hold
	leastPart = 0.1 // of the steps looked at, unless it holds now
	partial   = 5   // s: a step of which less is over is not looked at
	idleSteps = 6   // for which it must have done nothing

	heldDown  = 0.3  // of a step, in which clocks are held down
	fullClock = 0.95 // of the highest clock: above it nothing is lost
	lowClock  = 0.7  // of the highest clock

	works       = 50.0    // percent: utilisation of a GPU that works, SM time of one that has no room
	busyGPU     = 85.0    // percent of SM time, all users together
	neighbourSM = 25.0    // percent
	enoughSM    = 80.0    // percent, from which on nothing is missing
	waitingSM   = 30.0    // percent, below which its own CPU may be the cause
	idleSM      = 1.0     // percent
	idleBytes   = 1 << 20 // copied in a step
	busyCPU     = 0.8     // CPUs
	busyMemory  = 80.0    // percent of time in which the memory is read or written
	full        = 0.9     // of the memory
	busyLink    = 0.3     // of what the link moves

	mostNamed    = 3  // holders of memory
	mostEvidence = 20 // GPUs and assignments
)

// Scene is a host at one moment with its last ten minutes.
type Scene struct {
	view    *view.Snapshot
	past    *history.Past
	targets []target
	crowds  map[string]*crowd // by UUID of the GPU
}

// crowd is who is on a GPU now.
type crowd struct {
	parties []*party               // those with most memory first
	total   [history.Steps]float64 // percent: SM time of all together
}

// party is a user of a GPU.
type party struct {
	user   history.User
	party  Party
	memory uint64
	uses   []history.Use
}

// New returns a host. The others are its containers that are not in the view.
func New(v *view.Snapshot, others []view.Container, p *history.Past) *Scene {
	h := &Scene{view: v, past: p, targets: targets(v, others), crowds: map[string]*crowd{}}
	parties := map[history.User]*party{}
	for i := range v.Workloads {
		w := &v.Workloads[i]
		if w.PID == 0 {
			continue
		}
		c := h.crowd(w.GPUUUID)
		u := history.UserOf(w)
		x := parties[u]
		if x == nil {
			x = &party{user: u, party: Party{Container: w.ContainerName, ID: w.ContainerID, Image: w.Image}, uses: p.Uses[u]}
			if w.ContainerID == "" {
				x.party.PID, x.party.Process = w.PID, w.ProcessName
			}
			parties[u] = x
			c.parties = append(c.parties, x)
			for i := range x.uses {
				c.total[i] += known(x.figure(i, sm))
			}
		}
		x.memory += w.Memory.V
	}
	for _, c := range h.crowds {
		slices.SortStableFunc(c.parties, func(a, b *party) int { return cmp.Compare(b.memory, a.memory) })
	}
	return h
}

func (h *Scene) crowd(gpu string) *crowd {
	c := h.crowds[gpu]
	if c == nil {
		c = &crowd{}
		h.crowds[gpu] = c
	}
	return c
}

// look is one explanation in the making.
type look struct {
	*Scene
	target *target
	report *Report
}

// gpus looks at each GPU that it was on or may use, and at what concerns none in particular.
func (l *look) gpus() {
	c := l.target.container
	// The GPUs that it is on.
	on, before := map[string]*party{}, false
	for uuid, c := range l.crowds {
		for _, p := range c.parties {
			if p.user == l.user(uuid) {
				on[uuid] = p
			}
		}
	}
	mine := map[string]bool{}
	if c != nil && len(on) == 0 {
		for _, a := range c.Assigned {
			mine[a.GPUUUID] = true
		}
	}
	l.blind()
	l.access()
	for i := range l.view.Devices {
		d := &l.view.Devices[i]
		if on[d.UUID] != nil || mine[d.UUID] {
			l.health(d)
			l.refusals(d.UUID)
		}
		if on[d.UUID] != nil {
			l.load(d, on[d.UUID])
		}
		before = before || slices.ContainsFunc(l.past.Uses[l.user(d.UUID)], func(u history.Use) bool { return u.Seen > 0 })
	}
	l.refusals("")
	if c != nil && len(on) == 0 {
		l.absent(before)
	}
}

// user is the target on a GPU, as the history has it.
func (l *look) user(gpu string) history.User {
	return history.User{GPU: gpu, Container: l.target.ID, PID: l.target.PID}
}

// find adds a finding. Cost is about which part of its speed the cause takes; it orders those that are not broken.
func (l *look) find(c *Cause, gpu string, cost float64, w when, text string, evidence ...string) *Finding {
	f := &Finding{Cause: c.Name, Class: c.Class.Name, GPU: gpu, Text: text, Evidence: evidence, Advice: c.Advice, Since: w.since, Seconds: w.seconds,
		cause: c, cost: cost}
	l.report.Findings = append(l.report.Findings, f)
	return f
}

func (l *look) unknown(what string) { l.report.Blind = append(l.report.Blind, what) }

// blind says what cannot be seen.
func (l *look) blind() {
	for _, src := range l.view.Sources {
		if !src.Up && src.Name != input.SourceTracer {
			l.unknown(containers.Clean(src.Name, 40) + " is down: " + containers.Cut(src.Reason, 300))
		}
	}
	if t := l.view.Tracer; t == nil || !t.Up {
		reason := "it has not reported"
		if t != nil && t.Reason != "" {
			reason = t.Reason
		}
		l.unknown("without the kernel tracer refused opens, refused memory and who copies are not known: " + containers.Cut(reason, 300))
	}
}

// access looks for device rules that were lost.
func (l *look) access() {
	if c := l.target.container; c != nil && !c.AccessLost.IsZero() {
		l.find(NoAccess, "", 1, when{since: c.AccessLost},
			fmt.Sprintf("It may not open NVIDIA's device nodes any more: it was refused %s ago.", span(l.view.Time.Sub(c.AccessLost))),
			append([]string{fmt.Sprintf("%d opens were refused since the exporter started", c.RefusedOpens)}, l.given()...)...)
	}
}

// events sums what happened, and tells in which step it was last.
func (l *look) events(uses []history.Use, count func(*history.Use) float32) (n float64, last time.Time) {
	for i := range uses {
		if x := float64(count(&uses[i])); x > 0 {
			n, last = n+x, l.past.At(i)
		}
	}
	return n, last
}

// given says which GPUs the container asked for and got.
func (l *look) given() (out []string) {
	c := l.target.container
	if c.Request != "" {
		out = append(out, "it asked for "+containers.Clean(c.Request, 200))
	}
	for _, a := range c.Assigned {
		out = append(out, fmt.Sprintf("it may use %s %s, by %s", l.name(a.GPUUUID), containers.Clean(cmp.Or(a.MIG, a.GPUUUID), 64), a.Source))
	}
	return out[:min(len(out), mostEvidence)]
}

func (l *look) name(uuid string) string {
	for i := range l.view.Devices {
		if d := &l.view.Devices[i]; d.UUID == uuid {
			return fmt.Sprintf("GPU %d", d.Index)
		}
	}
	return "GPU"
}

// absent says what a container that is on no GPU lacks.
func (l *look) absent(before bool) {
	c := l.target.container
	evidence := l.given()
	if !c.Started.IsZero() {
		evidence = append(evidence, "it has run for "+span(l.view.Time.Sub(c.Started)))
	}
	switch {
	case len(c.Assigned) > 0 && before:
		l.find(NotUsed, "", 0, when{}, "It has no process on a GPU any more: the last one ended within the last ten minutes.", evidence...)
	case len(c.Assigned) > 0:
		l.find(NotUsed, "", 0, when{}, "It may use a GPU, but none of its processes has opened one for work.", evidence...)
	case c.Request != "":
		l.find(NotGiven, "", 1, when{}, "It asked for GPUs, but what it asked for is no GPU that this host can use now.",
			append(evidence, l.present())...)
	default:
		l.find(NotGiven, "", 1, when{}, "It was started without a GPU: neither --gpus, CDI, the NVIDIA runtime nor a device node.", evidence...)
	}
}

// present says which GPUs there are.
func (l *look) present() string {
	var list []string
	for i := range l.view.Devices {
		d := &l.view.Devices[i]
		list = append(list, fmt.Sprintf("GPU %d %s (%s)", d.Index, containers.Clean(d.UUID, 64), containers.Clean(d.State, 20)))
	}
	if list == nil {
		return "NVML shows no GPU"
	}
	return "there are " + strings.Join(list[:min(len(list), mostEvidence)], ", ")
}

// health looks for what is broken.
func (l *look) health(d *view.Device) {
	gpu := fmt.Sprintf("GPU %d", d.Index)
	if d.State != string(frame.StateOK) && d.State != string(frame.StateAsleep) {
		l.find(Lost, d.UUID, 1, when{}, fmt.Sprintf("%s cannot be read: %s.", gpu, containers.Clean(d.State, 20)), containers.Cut(d.Reason, 300))
	}
	for _, x := range d.Xids {
		if l.view.Time.Sub(x.Last) > history.Steps*history.StepLength {
			continue
		}
		c := XidOther
		switch {
		case slices.Contains(FatalXids, x.Xid):
			c = XidFatal
		case slices.Contains(ProgramXids, x.Xid):
			c = XidProgram
		}
		evidence := []string{fmt.Sprintf("%d of this kind since the exporter started", x.Count)}
		if x.PID != 0 {
			p := Party{Process: x.ProcessName, PID: x.PID}
			text := "the driver named " + p.String()
			if x.ContainerID != "" {
				text += " of " + (&Party{Container: x.ContainerName, ID: x.ContainerID}).String()
			}
			if c == XidProgram && (x.ContainerID != l.target.ID || x.ContainerID == "" && x.PID != l.target.PID) {
				continue // another's program ended by its own fault
			}
			evidence = append(evidence, text)
		}
		l.find(c, d.UUID, 1, when{since: x.Last}, fmt.Sprintf("The driver reported Xid %d for %s %s ago.", x.Xid, gpu, span(l.view.Time.Sub(x.Last))), evidence...)
	}
	if n := d.ECC["volatile/uncorrected"]; n > 0 {
		recent, last := 0.0, time.Time{}
		for i, s := range l.past.Loads[d.UUID] {
			if s.Uncorrected > 0 {
				recent, last = recent+float64(s.Uncorrected), l.past.At(i)
			}
		}
		l.find(Uncorrected, d.UUID, 1, when{since: last}, fmt.Sprintf("%s has uncorrected ECC errors: it counted %d since the driver was loaded.", gpu, n),
			fmt.Sprintf("%.0f of them in the last ten minutes", recent))
	}
	if d.RemapFailed {
		l.find(Remap, d.UUID, 1, when{}, "A remap of memory rows of "+gpu+" failed.")
	} else if d.RemapPending {
		l.find(Remap, d.UUID, 1, when{}, "A remap of memory rows of "+gpu+" waits for a reset.")
	}
}

// refusals looks for requests of memory that failed.
func (l *look) refusals(gpu string) {
	n, last := l.events(l.past.Uses[history.User{GPU: gpu, Container: l.target.ID}], func(u *history.Use) float32 { return u.Failed })
	if n == 0 || l.target.ID == "" {
		return
	}
	on := ""
	if gpu != "" {
		on = " on " + l.name(gpu)
	}
	l.find(AllocFailed, gpu, 1, when{since: last}, fmt.Sprintf("%.0f of its requests of memory%s were refused in the last ten minutes.", n, on), l.holders(gpu)...)
}

// holders says how full a GPU's memory is and who holds most of it.
func (l *look) holders(gpu string) (out []string) {
	for i := range l.view.Devices {
		if d := &l.view.Devices[i]; d.UUID == gpu && d.MemoryUsed.OK && d.MemoryTotal.V > 0 {
			out = append(out, fmt.Sprintf("%s of %s are in use", size(d.MemoryUsed.V), size(d.MemoryTotal.V)))
		}
	}
	for i, h := range l.crowd(gpu).parties {
		if i == mostNamed {
			break
		}
		out = append(out, fmt.Sprintf("%s holds %s", h.party.String(), size(h.memory)))
	}
	return out
}

func size(n uint64) string {
	const units = "KMGTP"
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	x, i := float64(n)/1024, 0
	for ; x >= 1024 && i < len(units)-1; i++ {
		x /= 1024
	}
	return fmt.Sprintf("%.3g %ciB", x, units[i])
}

// span is a length of time in words.
func span(d time.Duration) string {
	s := int(max(d, 0) / time.Second)
	switch {
	case s < 60:
		return fmt.Sprintf("%d s", s)
	case s < 3600 && s%60 == 0:
		return fmt.Sprintf("%d min", s/60)
	case s < 3600:
		return fmt.Sprintf("%d min %d s", s/60, s%60)
	case s < 48*3600:
		return fmt.Sprintf("%d h %d min", s/3600, s/60%60)
	}
	return fmt.Sprintf("%d days", s/86400)
}
