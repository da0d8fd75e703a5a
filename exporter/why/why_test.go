package why_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/history"
	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/processes"
	"gpu-exporter/exporter/recording"
	"gpu-exporter/exporter/snapshot"
	"gpu-exporter/exporter/snapshot/hosttest"
	"gpu-exporter/exporter/view"
	"gpu-exporter/exporter/why"
	"gpu-exporter/nvml/frame"
	"gpu-exporter/tracer/activity"
)

const (
	gib    = 1 << 30
	train  = 100 // process of the container that is asked about
	other  = 200 // of its neighbour
	uuid   = "GPU-0"
	minute = 60
)

var (
	t0 = time.Unix(1_800_000_000, 0)
	id = map[int]string{train: strings.Repeat("a", 64), other: strings.Repeat("b", 64)}
)

// host is a simulated host of one H200 with two containers, as it is in one second.
type host struct {
	state         frame.State
	load          frame.Load
	health        frame.Health
	to, from      uint64 // bytes over PCIe in the second
	procs         map[int]*proc
	xid           uint64 // reported in this second
	xidOf         int    // process that the tracer names
	failed        uint64 // so far
	refused       uint64
	untraced      bool
	unsampled     bool
	dockerDown    bool
	trainRequests []containers.Request
	trainNodes    []int
	name          string // of the container that is asked about
}

type proc struct {
	sm, bandwidth float64 // percent
	cpu           float64 // CPUs
	memory        uint64
	to, from      uint64 // bytes copied in the second
}

// healthy is a GPU at work for one container, with a small neighbour.
func healthy() *host {
	return &host{state: frame.StateOK, name: "train",
		load: frame.Load{Utilization: frame.Some(97.0), MemoryBandwidth: frame.Some(55.0), MemoryUsed: frame.Some[uint64](81 * gib), MemoryTotal: frame.Some[uint64](140 * gib),
			Temperature: frame.Some(62.0), Power: frame.Some(610.0), PowerLimit: frame.Some(700.0), Throttle: frame.Some[uint64](0), Clocks: map[string]int{"sm": 1_980_000_000}},
		health: frame.Health{ECC: map[string]uint64{"volatile/uncorrected": 0, "volatile/corrected": 2}, RemapPending: frame.Some(false), RemapFailure: frame.Some(false)},
		to:     2e9, from: 1e9,
		procs:         map[int]*proc{train: {sm: 92, bandwidth: 50, cpu: 1, memory: 80 * gib, to: 19e8, from: 9e8}, other: {sm: 3, cpu: 0.1, memory: 1 * gib}},
		trainRequests: []containers.Request{{Source: containers.SourceDeviceRequests, Text: "all", All: true}}, trainNodes: []int{0}}
}

// simulate lets the host run through the real snapshot and history, and returns them.
func simulate(seconds int, at func(second int) *host) (*snapshot.Snapshot, *history.History) {
	b, h := snapshot.NewBuilder(snapshot.Config{}), history.New()
	var s *snapshot.Snapshot
	inputs(seconds, at, b.Apply, func(now time.Time) {
		s = b.Snapshot(now)
		h.Add(view.New(s))
	})
	return s, h
}

// inputs gives what is read of the host to apply, and calls over at the end of each second.
func inputs(seconds int, at func(second int) *host, give func(input.Input), over func(now time.Time)) {
	cpu, copied := map[int]float64{}, map[int][2]uint64{}
	for second := range seconds {
		x, now := at(second), t0.Add(time.Duration(second)*time.Second)
		apply := func(in input.Input) {
			in.Time = now.UnixNano()
			give(in)
		}
		apply(input.Input{Source: &input.Source{Name: input.SourceDocker, Up: !x.dockerDown, Reason: "no answer\x1b[2J"}})
		apply(input.Input{Containers: &input.Containers{List: []containers.Container{
			{ID: id[train], Name: x.name, Image: "img", PID: train, Started: t0.Add(-time.Hour), Requests: x.trainRequests, Nodes: x.trainNodes},
			{ID: id[other], Name: "other", PID: other, Requests: healthy().trainRequests, Nodes: []int{0}}, {ID: strings.Repeat("c", 64), Name: "plain", PID: 300}}}})
		d := &frame.Device{UUID: uuid, State: x.state, Processes: &frame.Processes{}, Load: &x.load, Health: &x.health,
			Info: &frame.Info{Name: "NVIDIA H200", PCIBusID: "0000:00:06.0", Minor: frame.Some(0), ClockMax: map[string]int{"sm": 1_980_000_000}, PCIeGenMax: frame.Some(5), PCIeWidthMax: frame.Some(16)},
			PCIe: &frame.PCIe{Source: "gpm", RX: frame.Some(x.to), TX: frame.Some(x.from)}}
		samples := &frame.Samples{ProcessSince: now.UnixMicro() - 1e6, ProcessUntil: now.UnixMicro()}
		facts := &input.Processes{}
		report := &activity.Report{Time: now.UnixNano(), Mode: "tracepoint"}
		for pid, p := range x.procs {
			cpu[pid] += p.cpu
			copied[pid] = [2]uint64{copied[pid][0] + p.to, copied[pid][1] + p.from}
			cgroup := "/docker/" + id[pid]
			d.Processes.List = append(d.Processes.List, frame.Process{PID: pid, MemoryUsed: frame.Some(p.memory), Compute: true})
			samples.Process = append(samples.Process, frame.ProcessSample{PID: pid, Time: now.UnixMicro(), SM: p.sm, Memory: p.bandwidth})
			facts.Asked = append(facts.Asked, pid)
			facts.List = append(facts.List, processes.Process{PID: pid, StartTime: 1, Comm: "python3", Cgroup: cgroup, Container: id[pid], CPUSeconds: cpu[pid]})
			report.Processes = append(report.Processes, activity.Process{PID: pid, StartTime: 1, Cgroup: cgroup, Compute: true, Devices: []activity.Device{{UUID: uuid}},
				HtoD: copied[pid][0], DtoH: copied[pid][1]})
		}
		if !x.unsampled {
			d.Samples = samples
		}
		group := activity.Group{Cgroup: "/docker/" + id[train], Started: 1, Opens: []activity.Open{{Node: "ctl", Result: "ok", Count: 3}, {Node: "gpu", Result: "eperm", Count: 5}}}
		if x.refused > 0 {
			group.Opens = append(group.Opens, activity.Open{Node: "ctl", Result: "eperm", Count: x.refused})
		}
		if x.failed > 0 {
			group.Failures = map[string]uint64{uuid: x.failed}
		}
		report.Groups = []activity.Group{group}
		if x.xidOf > 0 {
			report.Xids = []activity.Xid{{Time: now.UnixNano(), PCIBusID: "0000:00:06.0", Code: x.xid, PID: x.xidOf}}
		}
		if x.state != frame.StateOK {
			d = &frame.Device{UUID: uuid, State: x.state, Reason: "GPU is lost"}
		}
		apply(input.Input{Processes: facts})
		apply(input.Input{Frame: &frame.Frame{Device: d}})
		if !x.untraced {
			apply(input.Input{Tracer: report})
		}
		if x.xid > 0 {
			apply(input.Input{Frame: &frame.Frame{Events: []frame.Event{{UUID: uuid, Kind: "xid", Value: x.xid, Time: now.UnixNano()}}}})
		}
		over(now)
	}
}

// TestLoop: a recording that is played again and again is a host on which the same happens again: what its container uses of the CPU counts each time.
func TestLoop(t *testing.T) {
	const length = 2 * minute
	var list []input.Input
	inputs(length, func(int) *host {
		h := healthy()
		h.procs[train].sm, h.procs[train].cpu, h.load.Utilization = 8, 1.0, frame.Some(11.0)
		return h
	}, func(in input.Input) { list = append(list, in) }, func(time.Time) {})
	b, h := snapshot.NewBuilder(snapshot.Config{}), history.New()
	var s *snapshot.Snapshot
	next := t0
	for loop := range 4 {
		for _, in := range list {
			in = recording.Shift(in, int64(loop*length)*int64(time.Second))
			for ; next.UnixNano() < in.Time; next = next.Add(time.Second) {
				s = b.Snapshot(next)
				h.Add(view.New(s))
			}
			b.Apply(in)
		}
	}
	r, err := why.New(view.New(s), view.Others(s), h.Past()).Ask("train")
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Findings) != 1 || r.Findings[0].Cause != why.HostBound.Name || r.Findings[0].Seconds < 400 || r.Uses[0].CPU.V < 0.9 || r.Uses[0].CPU.V > 1.1 {
		t.Errorf("%+v, %v CPUs", r.Findings, r.Uses[0].CPU.V)
	}
}

// asked simulates ten minutes and asks about a name.
func asked(t *testing.T, name string, at func(second int) *host) *why.Report {
	t.Helper()
	s, h := simulate(10*minute, at)
	r, err := why.New(view.New(s), view.Others(s), h.Past()).Ask(name)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func causes(r *why.Report) string {
	var list []string
	for _, f := range r.Findings {
		list = append(list, f.Cause)
	}
	return strings.Join(list, " ")
}

// sick are hosts on which one thing is wrong.
var sick = []struct {
	cause  *why.Cause
	change func(second int, h *host)
	text   []string // in the sentence and the evidence
}{
	{why.Hot, func(second int, h *host) {
		if second >= 300 {
			h.load.Throttle, h.load.Temperature, h.load.Clocks = frame.Some[uint64](0x20), frame.Some(91.0), map[string]int{"sm": 1_200_000_000}
		}
	}, []string{"GPU 0 is held back by heat: for 5 min of the last 10 min, and now since 08:05:00 UTC.", "SM clock 1200 of 1980 MHz", "91 °C"}},
	{why.Capped, func(_ int, h *host) {
		h.load.Throttle, h.load.Power, h.load.Clocks = frame.Some[uint64](0x4), frame.Some(699.0), map[string]int{"sm": 1_500_000_000}
	}, []string{"GPU 0 is held back by its power limit", "699 of 700 W"}},
	{why.Slowed, func(second int, h *host) {
		if second >= 100 && second < 200 {
			h.load.Throttle, h.load.Clocks = frame.Some[uint64](0x8), map[string]int{"sm": 600_000_000}
		}
	}, []string{"GPU 0 is held back by its hardware: for 1 min 40 s of the last 10 min, until 08:03:20 UTC."}},
	{why.LowClocks, func(_ int, h *host) { h.load.Clocks = map[string]int{"sm": 1_005_000_000} }, []string{"SM clock 1005 of 1980 MHz"}},
	{why.TakesSM, func(_ int, h *host) { h.procs[train].sm, h.procs[other].sm = 40, 58 },
		[]string{"Container other has 58 % of the SM time of GPU 0, this one 40 %", "GPU 0 was busy 97 % of that time"}},
	{why.TakesBandwidth, func(_ int, h *host) {
		h.load.MemoryBandwidth, h.procs[train].sm, h.procs[other].sm, h.procs[other].bandwidth, h.procs[train].bandwidth = frame.Some(95.0), 55, 20, 70, 25
	}, []string{"Container other reads and writes memory 70 % of the time on GPU 0, this one 25 %"}},
	{why.TakesLink, func(_ int, h *host) { h.to, h.procs[other].to, h.procs[train].sm = 50e9, 47e9, 40 },
		[]string{"Container other keeps the link of GPU 0 busy with copies to it", "other copies 43.8 GiB/s"}},
	{why.CopyBound, func(_ int, h *host) { h.from, h.procs[train].from, h.procs[train].sm = 50e9, 48e9, 20 },
		[]string{"Copies from GPU 0 keep its link busy", "46.3 GiB/s of about 59.6 GiB/s", "this one copies 44.7 GiB/s"}},
	{why.HostBound, func(_ int, h *host) {
		h.procs[train].sm, h.procs[train].cpu, h.load.Utilization = 8, 1.0, frame.Some(11.0)
	}, []string{"Its own CPU is busy while GPU 0 waits: for all of the last 10 min.", "use 1.0 CPUs and 8 % of the SM time"}},
	{why.Idling, func(second int, h *host) {
		if second >= 400 {
			*h.procs[train] = proc{memory: 80 * gib, cpu: 0.02}
			h.load.Utilization, h.to, h.from = frame.Some(3.0), 0, 0
		}
	}, []string{"It gives GPU 0 no work: for 3 min 20 s of the last 10 min", "it holds 80 GiB"}},
	{why.MemoryFull, func(_ int, h *host) { h.load.MemoryUsed, h.procs[train].memory = frame.Some[uint64](135*gib), 130*gib },
		[]string{"The memory of GPU 0 is 96 % full", "135 GiB of 140 GiB are in use", "container train holds 130 GiB"}},
	{why.TakesMemory, func(_ int, h *host) {
		h.load.MemoryUsed, h.procs[train].memory, h.procs[other].memory = frame.Some[uint64](135*gib), 30*gib, 100*gib
	}, []string{"Container other holds more of it", "container other holds 100 GiB"}},
	{why.AllocFailed, func(second int, h *host) { h.failed = uint64(max(second, 499) - 499) },
		[]string{"100 of its requests of memory on GPU 0 were refused in the last ten minutes", "81 GiB of 140 GiB are in use"}},
	{why.NoAccess, func(second int, h *host) {
		if second >= 500 {
			h.refused = 7
		}
	}, []string{"It may not open NVIDIA's device nodes any more: it was refused 1 min 39 s ago.", "12 opens were refused", "it asked for all"}},
	{why.XidFatal, func(second int, h *host) {
		if second == 10*minute-31 {
			h.xid = 79
		}
	}, []string{"The driver reported Xid 79 for GPU 0 30 s ago."}},
	{why.XidProgram, func(second int, h *host) {
		if second == 10*minute-121 {
			h.xid, h.xidOf = 31, train
		}
	}, []string{"Xid 31 for GPU 0 2 min ago.", "1 of this kind", "the driver named process 100 python3 of container train"}},
	{why.XidOther, func(second int, h *host) {
		if second == 0 {
			h.xid = 154
		}
	}, []string{"Xid 154 for GPU 0 9 min 59 s ago.", "1 of this kind since the exporter started"}},
	{why.Uncorrected, func(second int, h *host) { h.health.ECC["volatile/uncorrected"] = uint64(2 + second/300) },
		[]string{"GPU 0 has uncorrected ECC errors: it counted 3 since the driver was loaded.", "1 of them in the last ten minutes"}},
	{why.Remap, func(_ int, h *host) { h.health.RemapPending = frame.Some(true) }, []string{"A remap of memory rows of GPU 0 waits for a reset."}},
	{why.Lost, func(second int, h *host) {
		if second >= 590 {
			h.state = frame.StateLost
		}
	}, []string{"GPU 0 cannot be read: lost.", "GPU is lost"}},
	{why.NotUsed, func(_ int, h *host) { delete(h.procs, train) },
		[]string{"It may use a GPU, but none of its processes has opened one for work.", "it may use GPU 0 GPU-0, by device_requests", "it has run for 1 h 9 min"}},
	{why.NotGiven, func(_ int, h *host) {
		delete(h.procs, train)
		h.trainRequests = []containers.Request{{Source: containers.SourceDeviceRequests, Text: "device=7", IDs: []string{"7"}}}
	}, []string{"It asked for GPUs, but what it asked for is no GPU that this host can use now.", "it asked for device=7", "there are GPU 0 GPU-0 (ok)"}},
}

// TestCauses: on a host on which one thing is wrong, that is found, with its evidence, and nothing else.
func TestCauses(t *testing.T) {
	tested := map[*why.Cause]bool{}
	for _, c := range sick {
		tested[c.cause] = true
		t.Run(c.cause.Name, func(t *testing.T) {
			r := asked(t, "train", func(second int) *host {
				h := healthy()
				c.change(second, h)
				return h
			})
			if causes(r) != c.cause.Name || r.ExitCode() != c.cause.Class.Exit {
				t.Fatalf("%s, exit code %d\n%+v", causes(r), r.ExitCode(), texts(r))
			}
			for _, want := range c.text {
				if !strings.Contains(texts(r), want) {
					t.Errorf("no %q in\n%s", want, texts(r))
				}
			}
			f := r.Findings[0]
			if f.Class != c.cause.Class.Name || f.Advice != c.cause.Advice || (c.cause.Class == why.Neighbour) != (f.Neighbour != nil) {
				t.Errorf("%+v", f)
			}
			if f.Neighbour != nil && (f.Neighbour.Container != "other" || f.Neighbour.ID != id[other]) {
				t.Errorf("the neighbour is %+v", f.Neighbour)
			}
		})
	}
	for _, c := range why.Causes {
		if !tested[c] {
			t.Errorf("%s has no case in which it is found", c.Name)
		}
	}
}

func texts(r *why.Report) string {
	var b strings.Builder
	for _, f := range r.Findings {
		fmt.Fprintf(&b, "%s\n%s\n%s\n", f.Text, strings.Join(f.Evidence, "\n"), f.Advice)
	}
	return b.String() + strings.Join(r.Blind, "\n")
}

// TestHealthy: nothing is found on hosts on which all is well, with and without the kernel tracer, a minute after the start and later.
func TestHealthy(t *testing.T) {
	for name, change := range map[string]func(second int, h *host){
		"at work": func(int, *host) {},
		"dips of ten seconds": func(second int, h *host) {
			if second%200 < 10 {
				h.procs[train].sm, h.load.Throttle, h.load.Clocks, h.load.Utilization = 0, frame.Some[uint64](0x24), map[string]int{"sm": 900_000_000}, frame.Some(60.0)
			}
		},
		"started a minute ago": func(second int, h *host) {
			if second < 9*minute {
				delete(h.procs, train)
			}
		},
		"a few requests, no work between them": func(second int, h *host) {
			h.procs[train].sm, h.procs[train].cpu, h.load.Utilization, h.load.Clocks = float64(second%10), 0.3, frame.Some(8.0), map[string]int{"sm": 1_980_000_000}
		},
		"at its power limit and no slower for it": func(_ int, h *host) {
			h.load.Throttle, h.load.Clocks = frame.Some[uint64](4), map[string]int{"sm": 1_920_000_000}
		},
		"copies hidden behind kernels": func(_ int, h *host) { h.to, h.procs[train].to = 40e9, 39e9 },
		"a neighbour that crashed": func(second int, h *host) {
			if second == 300 {
				h.xid, h.xidOf = 31, other
			}
		},
		"without tracer":                func(_ int, h *host) { h.untraced = true },
		"no samples of processes":       func(_ int, h *host) { h.unsampled = true },
		"no clocks, link or load known": func(_ int, h *host) { h.load = frame.Load{MemoryUsed: h.load.MemoryUsed} },
	} {
		r := asked(t, "train", func(second int) *host {
			h := healthy()
			change(second, h)
			return h
		})
		blind := map[string]string{"without tracer": "without the kernel tracer", "no samples of processes": "the driver does not tell the SM time of processes on GPU 0"}[name]
		if text := strings.Join(r.Blind, "\n"); (blind == "") != (text == "") || !strings.HasPrefix(text, blind) {
			t.Errorf("%s: not known is %q", name, text)
		}
		if len(r.Findings) != 0 || r.ExitCode() != 0 || len(r.Uses) != 1 {
			t.Errorf("%s: %s\n%s", name, causes(r), texts(r))
		}
	}
}

// TestOrder: what is broken comes first, then what costs most.
func TestOrder(t *testing.T) {
	r := asked(t, "train", func(second int) *host {
		h := healthy()
		h.procs[train].sm, h.procs[other].sm = 20, 75
		h.load.Throttle, h.load.Clocks = frame.Some[uint64](0x20), map[string]int{"sm": 1_500_000_000}
		h.health.ECC["volatile/uncorrected"], h.load.MemoryUsed = 1, frame.Some[uint64](139*gib)
		h.procs[train].memory = 130 * gib
		return h
	})
	if got, want := causes(r), "ecc neighbour_sm throttled_thermal memory_full"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// TestNames: a name, an id, its beginning, the PID of the container's first process or of one on the GPU, and a process outside containers.
func TestNames(t *testing.T) {
	id[400] = "" // a process outside containers
	defer delete(id, 400)
	s, h := simulate(40, func(int) *host {
		x := healthy()
		x.procs[400] = &proc{sm: 5, memory: gib}
		return x
	})
	v, others := view.New(s), view.Others(s)
	for name, want := range map[string]string{"train": "train", id[train]: "train", "aaaaaaaaaaaa": "train", "100": "train", "bbb": "other", "plain": "plain", "300": "plain", "400": ""} {
		r, err := why.New(v, others, h.Past()).Ask(name)
		if err != nil || r.Party.Container != want || (want == "") != (r.Party.PID == 400) {
			t.Errorf("%s: %+v, %v", name, r, err)
		}
	}
	for _, name := range []string{"", "tra", "zzz", "1", "0", "-1", "99999999999999999999"} {
		if r, err := why.New(v, others, h.Past()).Ask(name); err != why.ErrUnknown {
			t.Errorf("%q: %+v, %v", name, r, err)
		}
	}
	v.Containers = append(v.Containers, view.Container{ID: "aaaab", Name: "train"})
	for _, name := range []string{"train", "aaaa"} {
		if r, err := why.New(v, others, h.Past()).Ask(name); err == nil || !strings.Contains(err.Error(), "2 running containers") {
			t.Errorf("%q: %+v, %v", name, r, err)
		}
	}
	r, err := why.New(v, others, h.Past()).Ask("plain")
	if err != nil || causes(r) != "no_gpu" || !strings.Contains(texts(r), "It was started without a GPU") {
		t.Errorf("%s %v", texts(r), err)
	}
}

// TestHostile: no name reaches a sentence as it is.
func TestHostile(t *testing.T) {
	bad := "\x1b[2J\u202e" + strings.Repeat("x", 300)
	r := asked(t, id[other], func(int) *host {
		h := healthy()
		h.name, h.dockerDown = bad, true
		h.trainRequests[0].Text = bad
		h.load.MemoryUsed, h.procs[train].memory = frame.Some[uint64](139*gib), 130*gib
		h.procs[other].sm, h.procs[train].sm = 20, 75
		return h
	})
	if causes(r) != "neighbour_sm neighbour_memory" || !strings.Contains(texts(r), "docker is down: no answer") {
		t.Fatalf("%s\n%s", causes(r), texts(r))
	}
	for _, c := range texts(r) {
		if c != '\n' && !unicode.IsGraphic(c) {
			t.Errorf("%U in %q", c, texts(r))
		}
	}
	if len(texts(r)) > 2000 {
		t.Errorf("%d bytes", len(texts(r)))
	}
}

// TestGenerated: on hosts of every kind, with all that may go wrong there, each party gets a report of sentences that end, of causes that exist, with no
// figure that is none.
func TestGenerated(t *testing.T) {
	found := 0
	for seed := range uint64(6) {
		g, b, h := hosttest.New(seed), snapshot.NewBuilder(snapshot.Config{}), history.New()
		var s *snapshot.Snapshot
		for range 120 {
			for _, in := range g.Step() {
				b.Apply(in)
			}
			s = b.Snapshot(g.Now)
			h.Add(view.New(s))
		}
		v := view.New(s)
		scene := why.New(v, view.Others(s), h.Past())
		first := scene.First()
		for i := range v.Containers {
			r, err := scene.Ask(v.Containers[i].ID)
			if err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			if f := first[v.Containers[i].ID]; (f == nil) != (len(r.Findings) == 0) || f != nil && f.Text != r.Findings[0].Text {
				t.Errorf("seed %d: the first finding is %v of %s", seed, f, texts(r))
			}
			for _, f := range r.Findings {
				found++
				known := slices.ContainsFunc(why.Causes, func(c *why.Cause) bool { return c.Name == f.Cause && c.Class.Name == f.Class })
				if !known || !strings.HasSuffix(f.Text, ".") || f.Seconds > r.Seconds || strings.Contains(texts(r), "NaN") || strings.Contains(texts(r), "%!") {
					t.Errorf("seed %d: %+v", seed, f)
				}
			}
		}
	}
	if found < 20 {
		t.Errorf("%d findings", found)
	}
}

// TestTable: each cause has its class, its code and what to do, in a line of Markdown.
func TestTable(t *testing.T) {
	lines := strings.Split(strings.TrimSpace(why.Table()), "\n")
	codes := map[int]*why.Class{}
	for i, c := range why.Causes {
		if n := strings.Count(lines[i+2], "|"); n != 5 || !strings.HasSuffix(c.Advice, ".") || c.When == "" || strings.Contains(c.Advice, "\n") {
			t.Errorf("%s", lines[i+2])
		}
		if have := codes[c.Class.Exit]; have != nil && have != c.Class || c.Class.Exit < 10 {
			t.Errorf("exit code %d is used twice", c.Class.Exit)
		}
		codes[c.Class.Exit] = c.Class
		if slices.ContainsFunc(why.Causes[:i], func(x *why.Cause) bool { return x.Name == c.Name }) {
			t.Errorf("%s is there twice", c.Name)
		}
	}
	if len(lines) != len(why.Causes)+2 {
		t.Errorf("%d lines", len(lines))
	}
}
