package metrics_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/metrics"
	"gpu-exporter/exporter/processes"
	"gpu-exporter/exporter/recording"
	"gpu-exporter/exporter/snapshot"
	"gpu-exporter/nvml"
	"gpu-exporter/nvml/fake"
	"gpu-exporter/nvml/frame"
	"gpu-exporter/nvml/poller"
)

// host is a host made of the fake NVML library. Its containers and processes are given as Docker and /proc would.
type host struct {
	scenario   *fake.Scenario // nil: there is no library
	without    []string       // functions that the library lacks
	containers []containers.Container
	processes  []processes.Process
	dead       []int // PIDs that /proc does not have
}

const gib = 1 << 30

// run adds a process to a GPU, in the container of that name if it is not empty.
func (h *host) run(gpu, pid int, memory uint64, container string, load fake.Busy, mig *fake.Instance) {
	g := &h.scenario.GPUs[gpu]
	g.Processes = append(g.Processes, fake.Process{PID: pid, Memory: memory, MIG: mig})
	if load.SM > 0 {
		load.PID = pid
		g.Busy = append(g.Busy, load)
	}
	p := processes.Process{PID: pid, StartTime: uint64(pid), Comm: "python3", Command: "python3 train.py", Cgroup: "/user.slice", CPUSeconds: float64(pid) / 4}
	for _, c := range h.containers {
		if c.Name == container {
			p.Cgroup, p.Container = "/docker/"+c.ID, c.ID
		}
	}
	h.processes = append(h.processes, p)
}

// contain adds a container with what it asked for and the minors of the nodes that it has.
func (h *host) contain(t *testing.T, name string, hostConfig string, nodes ...int) {
	t.Helper()
	id := fmt.Sprintf("%012x%052d", 0xc0de00000000+len(h.containers), 0)
	raw := fmt.Sprintf(`{"Id":%q,"Name":"/%s","Image":"sha256:0123","Config":{"Image":"pytorch:2","Labels":{"com.docker.compose.project":"lab","com.docker.compose.service":%q},`+
		`"Env":["NVIDIA_VISIBLE_DEVICES=all"]},"State":{"Running":true,"Pid":1,"StartedAt":"2026-01-01T00:00:00Z"},"HostConfig":%s}`, id, name, name, hostConfig)
	c, _, err := containers.FromInspect([]byte(raw))
	if err != nil {
		t.Fatal(err)
	}
	c.Nodes = nodes
	h.containers = append(h.containers, c)
}

// set gives the memory of a GPU such that its processes hold what they say, and rest is held by none.
func (h *host) set(gpu int, total, reserved, rest uint64) {
	g := &h.scenario.GPUs[gpu]
	for _, p := range g.Processes {
		rest += p.Memory
	}
	g.Set("memory", total, reserved, rest)
}

const gpus = `{"Runtime":"runc","DeviceRequests":[{"Count":%d,"DeviceIDs":%s,"Capabilities":[["gpu"]]}]}`

// hosts are the hosts of testdata/hosts.
func hosts(t *testing.T) map[string]*host {
	none := &host{}
	none.contain(t, "web", `{"Runtime":"runc"}`)

	// A desktop of 2012 with a driver of 2021: what it cannot say has no series.
	old := &host{scenario: &fake.Scenario{Driver: "470.256.02", NVML: "11.470.256.02", CUDA: 11040, GPUs: []fake.GPU{fake.Old(0)}}, without: fake.Driver470}
	old.contain(t, "jupyter", `{"Runtime":"nvidia"}`, 7)
	old.run(0, 2001, 300<<20, "jupyter", fake.Busy{}, nil)
	old.run(0, 2002, 100<<20, "", fake.Busy{}, nil)
	old.set(0, 2*gib, 0, 40<<20)

	// Sixteen containers on four A10, four on each. The first GPU is too hot, the second has ECC errors, the third is nearly full.
	a10 := &host{scenario: &fake.Scenario{GPUs: []fake.GPU{fake.A10(0), fake.A10(1), fake.A10(2), fake.A10(3)}}}
	for i := range 16 {
		gpu, name := i/4, fmt.Sprint("job-", i)
		a10.contain(t, name, fmt.Sprintf(gpus, 0, fmt.Sprintf(`["%d"]`, gpu)), 7-gpu)
		memory := uint64(2 * gib)
		if i == 8 {
			memory = 21 * gib
		} else if gpu == 2 {
			memory = 100 << 20
		}
		a10.run(gpu, 3000+i, memory, name, fake.Busy{SM: 5 * (i%4 + 1), Memory: 3}, nil)
	}
	for gpu := range 4 {
		a10.set(gpu, 24146608128, 340983808, 300<<20)
	}
	a10.scenario.GPUs[0].Set("temperature", 97)
	a10.scenario.GPUs[1].Set("ecc", 2, 1, 9, 4)
	a10.scenario.GPUs[3].Fields = []fake.Field{{ID: 197, Type: 1, Value: "0", Rate: 1_000_000}, {ID: 198, Type: 1, Value: "0", Rate: 25_000_000}}

	// One GPU that three containers and a process outside them share by time slices.
	shared := &host{scenario: &fake.Scenario{GPUs: []fake.GPU{fake.H200(0)}}}
	for i, name := range []string{"train", "serve", "notebook"} {
		shared.contain(t, name, fmt.Sprintf(gpus, -1, "null"), 7)
		shared.run(0, 4000+i, uint64(i+1)*8*gib, name, fake.Busy{SM: 40 - 15*i, Memory: 10 - i, Encoder: i}, nil)
	}
	shared.run(0, 4010, 2*gib, "serve", fake.Busy{SM: 5}, nil)
	shared.run(0, 4011, gib, "", fake.Busy{}, nil)
	shared.set(0, 150754820096, 644939776, 500<<20)

	// An H200 in three MIG instances, each of one container.
	mig := &host{scenario: &fake.Scenario{GPUs: []fake.GPU{fake.H200(0)}}}
	g := &mig.scenario.GPUs[0]
	g.Set("mig_mode", 1)
	g.Set("no_process_samples")
	for i, slices := range []int{3, 2, 1} {
		m := fake.MIG{UUID: fmt.Sprintf("MIG-0000000%d-0000-5000-8000-000000000000", i), Name: "MIG", Instance: fake.Instance{GPU: i + 1}, SMs: 16 * slices, GPUSlices: slices,
			Slices: slices, MemoryMiB: uint64(18000 * slices), Used: uint64(i+1)*gib + 50<<20}
		g.MIG = append(g.MIG, m)
		name := fmt.Sprint("slice-", i)
		mig.contain(t, name, fmt.Sprintf(gpus, 0, fmt.Sprintf("[%q]", m.UUID)), 7)
		mig.run(0, 5000+i, uint64(i+1)*gib, name, fake.Busy{}, &m.Instance)
	}
	mig.set(0, 150754820096, 644939776, 150<<20)
	return map[string]*host{"none": none, "old": old, "a10": a10, "shared": shared, "mig": mig}
}

// inputs runs the host for two seconds and returns what the sources say meanwhile, on a clock that starts at a given time.
func (h *host) inputs(t *testing.T) []input.Input {
	t.Helper()
	began := time.Now()
	const often = 400 * time.Millisecond
	list := h.during(t, 2*time.Second, poller.Config{Interval: 200 * time.Millisecond, Samples: often, Power: often, Util: often, Energy: often, Health: often,
		GPM: often, PCIeBudget: 1})
	for i := range list {
		list[i] = recording.Shift(list[i], time.Unix(1_800_000_000, 0).Sub(began).Nanoseconds())
	}
	return list
}

// during returns what the sources say for some time.
func (h *host) during(t *testing.T, length time.Duration, c poller.Config) []input.Input {
	t.Helper()
	var list []input.Input
	add := func(in input.Input) {
		in.Time = time.Now().UnixNano()
		list = append(list, in)
	}
	add(input.Input{Host: &input.Host{IP: "192.0.2.1", Name: "host"}})
	add(input.Input{Source: &input.Source{Name: input.SourceDocker, Up: true}})
	add(input.Input{Source: &input.Source{Name: input.SourceProcesses, Up: true}})
	add(input.Input{Containers: &input.Containers{List: h.containers}})
	facts := &input.Processes{List: h.processes, Asked: h.dead}
	for _, p := range h.processes {
		facts.Asked = append(facts.Asked, p.PID)
	}
	add(input.Input{Processes: facts})
	if h.scenario == nil {
		_, err := nvml.Open(nvml.Config{Path: "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.0"})
		f := poller.Unusable(err)
		add(input.Input{Frame: f})
		add(input.Input{Source: &input.Source{Name: input.SourceNVML, Reason: f.Library.Reason}})
		return list
	}
	lib, err := nvml.Open(nvml.Config{Path: fake.Install(t, *h.scenario, h.without...).Library})
	if err != nil {
		t.Fatal(err)
	}
	add(input.Input{Source: &input.Source{Name: input.SourceNVML, Up: true}})
	var mu sync.Mutex
	ctx, cancel := context.WithTimeout(t.Context(), length)
	defer cancel()
	c.SysFS = t.TempDir()
	err = poller.Run(ctx, lib, c, func(f *frame.Frame) {
		mu.Lock()
		defer mu.Unlock()
		b, err := json.Marshal(f)
		if err != nil {
			t.Error(err)
		}
		kept := &frame.Frame{}
		if err := json.Unmarshal(b, kept); err != nil {
			t.Error(err)
		}
		if kept.Library != nil {
			kept.Library.Path = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"
		}
		kept.Time = time.Now().UnixNano()
		add(input.Input{Frame: kept})
	})
	if err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	defer mu.Unlock()
	return list
}

// last returns the snapshot at the end of the inputs.
func last(list []input.Input) *snapshot.Snapshot {
	b := snapshot.NewBuilder(snapshot.Config{})
	var s *snapshot.Snapshot
	for _, in := range list {
		b.Apply(in)
		s = b.Snapshot(time.Unix(0, in.Time))
	}
	return s
}

// calls is left out of the golden files: ninety lines that say only how long the fake library took.
var calls = regexp.MustCompile("gpu_exporter_nvml_call_duration_seconds")

// exposition returns what is served of a snapshot in a format.
func exposition(t *testing.T, s *snapshot.Snapshot, accept string) string {
	t.Helper()
	w := httptest.NewRecorder()
	r := httptest.NewRequest("GET", "/metrics", nil)
	r.Header.Set("Accept", accept)
	g := metrics.New(func() *snapshot.Snapshot { return s }, func(*snapshot.Snapshot) float64 { return 0 }, metrics.Options{Exclude: calls})
	promhttp.HandlerFor(checked(g), promhttp.HandlerOpts{EnableOpenMetrics: true}).ServeHTTP(w, r)
	body, err := io.ReadAll(w.Body)
	if err != nil || w.Code != 200 {
		t.Fatalf("%d %v\n%s", w.Code, err, body)
	}
	if kind, _, _ := strings.Cut(accept, ";"); !strings.HasPrefix(w.Header().Get("Content-Type"), kind) {
		t.Fatalf("asked for %s, got %s", accept, w.Header().Get("Content-Type"))
	}
	return string(body)
}

var sample = regexp.MustCompile(`^([a-zA-Z_:][a-zA-Z0-9_:]*(?:\{.*\})?) (\S+)$`)

// samples reads the lines of an exposition: the value of each series, and the type and help of each family as its comments have them.
func samples(t *testing.T, text string) (values map[string]float64, comments map[string]string) {
	t.Helper()
	values, comments = map[string]float64{}, map[string]string{}
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		if kind, rest, ok := strings.Cut(strings.TrimPrefix(line, "# "), " "); ok && strings.HasPrefix(line, "# ") {
			name, text, _ := strings.Cut(rest, " ")
			comments[kind+" "+name] = text
			continue
		}
		m := sample.FindStringSubmatch(line)
		if m == nil {
			t.Fatalf("not a sample: %q", line)
		}
		v, err := strconv.ParseFloat(m[2], 64)
		if _, twice := values[m[1]]; err != nil || twice {
			t.Fatalf("%q: %v, twice: %v", line, err, twice)
		}
		values[m[1]] = v
	}
	return values, comments
}

var bound = regexp.MustCompile(`le="([^"]*)"`)

// openMetrics fails unless an OpenMetrics exposition says what a text exposition says: the same series with the same values; counters by the name of
// their family without _total; floats as bounds; and an end.
func openMetrics(t *testing.T, text, open string) {
	t.Helper()
	open, ended := strings.CutSuffix(open, "# EOF\n")
	if !ended {
		t.Errorf("no # EOF at the end: %q", open[max(0, len(open)-80):])
	}
	want, said := samples(t, text)
	got, says := samples(t, open)
	same := map[string]float64{}
	for k, v := range got {
		same[bound.ReplaceAllStringFunc(k, func(s string) string { return strings.Replace(s, `.0"`, `"`, 1) })] = v
	}
	for k, v := range want {
		if have, ok := same[k]; !ok || have != v {
			t.Errorf("%s is %v, in OpenMetrics %v (%v)", k, v, have, ok)
		}
		delete(same, k)
	}
	for k := range same {
		t.Errorf("only in OpenMetrics: %s", k)
	}
	for k, v := range said {
		if name, counter := strings.CutSuffix(k, "_total"); counter {
			k = name
		}
		if says[k] != v {
			t.Errorf("%s is %q, in OpenMetrics %q", k, v, says[k])
		}
	}
	if len(says) != len(said) {
		t.Errorf("%d comments, in OpenMetrics %d", len(said), len(says))
	}
}

// lint fails on what Prometheus's linter says. It has nothing against the contract's names, so there is no list of what it may say.
func lint(t *testing.T, text string) {
	t.Helper()
	problems, err := promlint.New(strings.NewReader(text)).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("promlint: %s: %s", p.Metric, p.Text)
	}
	cmd := exec.Command("promtool", "check", "metrics")
	cmd.Stdin = strings.NewReader(text)
	if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("promtool check metrics: %v\n%s", err, out)
	}
}

// read returns the recording of a host.
func read(t *testing.T, name string) []input.Input {
	t.Helper()
	f, err := os.Open(filepath.Join("testdata", "hosts", name+".ndjson.gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	list, err := recording.Read(f)
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// differences are the series that only one of two hosts has.
func differences(recorded, live map[string]float64) (list []string) {
	for k := range recorded {
		if _, ok := live[k]; !ok {
			list = append(list, "recorded only: "+k)
		}
	}
	for k := range live {
		if _, ok := recorded[k]; !ok {
			list = append(list, "now only: "+k)
		}
	}
	return list
}

// TestHosts: what is exposed of five recorded hosts, to the last value, in text and OpenMetrics; the sixth is TestGoldenDemo's. And the same hosts, run
// now through the library and the poller, give the same series. -update records them anew.
func TestHosts(t *testing.T) {
	for name, h := range hosts(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			live := h.inputs(t)
			if *update {
				w, err := recording.Create(filepath.Join("testdata", "hosts", name+".ndjson.gz"))
				if err != nil {
					t.Fatal(err)
				}
				for _, in := range live {
					if err := w.Write(in); err != nil {
						t.Fatal(err)
					}
				}
				if err := w.Close(); err != nil {
					t.Fatal(err)
				}
			}
			s := last(read(t, name))
			text := exposition(t, s, "text/plain")
			golden(t, filepath.Join("hosts", name+".txt"), text)
			openMetrics(t, text, exposition(t, s, "application/openmetrics-text;version=1.0.0"))
			lint(t, text)
			want, _ := samples(t, text)
			var differ []string
			for range 3 { // on a busy machine the poller may not get to everything in two seconds
				got, _ := samples(t, exposition(t, last(live), "text/plain"))
				if differ = differences(want, got); differ == nil {
					break
				}
				live = h.inputs(t)
			}
			if differ != nil {
				t.Errorf("the recorded host and the same host, run now, differ:\n%s", strings.Join(differ, "\n"))
			}
			if name == "none" {
				return
			}
			for _, a := range accounts {
				x := expose(t, metrics.New(func() *snapshot.Snapshot { return s }, func(*snapshot.Snapshot) float64 { return 0 }, metrics.Options{}))
				if work, device := x.sums(a.work, a.label), x.sums(a.device, a.label); len(device) > 0 && !maps.Equal(work, device) {
					t.Errorf("%s: workloads have %v, the devices %v", a.work, work, device)
				}
			}
		})
	}
	s := demo(t)
	text := exposition(t, s, "text/plain")
	openMetrics(t, text, exposition(t, s, "application/openmetrics-text;version=1.0.0"))
	lint(t, text)
}

// TestSpike: a job that is busy for 100 ms of each second shows. The mean of its gauge says 10 %; the samples of 200 ms, of which each counts once, have
// one of 50 % a second, and the mean of the histogram is the mean of the counter.
func TestSpike(t *testing.T) {
	t.Parallel()
	h := &host{scenario: &fake.Scenario{GPUs: []fake.GPU{fake.H200(0)}}}
	h.run(0, 100, gib, "", fake.Busy{SM: 100, PeriodMillis: 1000, OnMillis: 100}, nil)
	h.set(0, 150754820096, 644939776, 0)
	const often = 100 * time.Millisecond
	s := last(h.during(t, 6*time.Second, poller.Config{Interval: often, Samples: often, Power: often, Util: often, Health: often}))
	d, w := s.Devices[0], s.Workloads[0]
	u := d.Utilization
	if u == nil || u.Count < 20 || w.PID != 100 {
		t.Fatalf("histogram %+v, process %+v", u, w)
	}
	seconds := float64(u.Count) * 0.2
	t.Logf("%d samples with a mean of %.1f %%, of which %d are above 40 %%; the counter says %.1f %%, the gauge %v %%", u.Count, u.Sum/float64(u.Count),
		u.Count-sumTo(u, 40), w.Busy.V/seconds*100, w.Utilization.V)
	if spikes := float64(u.Count - sumTo(u, 40)); spikes < seconds-1.2 || spikes > seconds+1.2 {
		t.Errorf("%v spikes in %v s", spikes, seconds)
	}
	if mean, busy := u.Sum/float64(u.Count), w.Busy.V/seconds*100; mean < 7 || mean > 13 || math.Abs(mean-busy) > 100*0.1/seconds*1.2 { // a spike more or less
		t.Errorf("the histogram's mean is %v %%, the counter's %v %%", mean, busy)
	}
	if d.MaxUtilization.V != 50 || w.MaxUtilization.V < 40 {
		t.Errorf("highest of the device %v %%, of the process %v %%", d.MaxUtilization.V, w.MaxUtilization.V)
	}
}

// sumTo counts the values up to a bound.
func sumTo(h *snapshot.Histogram, bound float64) (n uint64) {
	for i, le := range h.Bounds {
		if le <= bound {
			n += h.Buckets[i]
		}
	}
	return n
}
