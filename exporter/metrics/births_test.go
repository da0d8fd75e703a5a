package metrics_test

import (
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/metrics"
	"gpu-exporter/exporter/snapshot"
	"gpu-exporter/nvml/frame"
)

// formed is a gatherer that shows workloads in one form or another.
type formed struct {
	prometheus.TransactionalGatherer
	form int
}

func (f *formed) Detail() int { return f.form }
func (f *formed) Cut() bool   { return false }

// TestNewCountersBeginAtZero: for each scraper by itself, and for a scraper only; what was there at its first scrape is given as it is.
func TestNewCountersBeginAtZero(t *testing.T) {
	r := prometheus.NewRegistry()
	busy := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "gpu_busy_seconds_total"}, []string{"pid"})
	cpu := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "gpu_process_cpu_seconds_total"}, []string{"pid"})
	r.MustRegister(busy, cpu)
	g := &formed{TransactionalGatherer: prometheus.ToTransactionalGatherer(r)}
	h := metrics.Handler(g, promhttp.HandlerOpts{})
	get := func(from, agent string) string {
		req := httptest.NewRequest(http.MethodGet, "/metrics", nil)
		req.RemoteAddr = from
		req.Header.Set("User-Agent", agent)
		if strings.HasPrefix(agent, "Prometheus") {
			req.Header.Set("X-Prometheus-Scrape-Timeout-Seconds", "10")
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, req)
		return w.Body.String()
	}
	want := func(body, pid string, value float64) {
		t.Helper()
		if line := fmt.Sprintf("gpu_busy_seconds_total{pid=%q} %v\n", pid, value); !strings.Contains(body, line) {
			t.Errorf("no %s in\n%s", line, body)
		}
	}
	busy.WithLabelValues("1").Add(5)
	want(get("192.0.2.1:1000", "Prometheus/3"), "1", 5)
	busy.WithLabelValues("2").Add(7)
	cpu.WithLabelValues("2").Add(9)
	want(get("192.0.2.9:1000", "curl/8"), "2", 7)
	body := get("192.0.2.1:1001", "Prometheus/3")
	want(body, "1", 5)
	want(body, "2", 0)
	if !strings.Contains(body, `gpu_process_cpu_seconds_total{pid="2"} 9`) {
		t.Error("a counter that began before the exporter saw it was set to 0")
	}
	want(get("192.0.2.2:1000", "Prometheus/3"), "2", 7) // its first scrape
	want(get("192.0.2.1:1002", "Prometheus/3"), "2", 7)
	g.form = 1 // processes are summed into containers from now on
	busy.WithLabelValues("container").Add(12)
	want(get("192.0.2.1:1002", "Prometheus/3"), "container", 12)
	busy.WithLabelValues("new").Add(3)
	want(get("192.0.2.1:1002", "Prometheus/3"), "new", 0)
	for i := range 100 { // so many scrapers that the first ones are forgotten
		get(fmt.Sprintf("192.0.2.3:%d", i), fmt.Sprintf("Prometheus/%d", i))
	}
	busy.WithLabelValues("3").Add(1)
	want(get("192.0.2.1:1003", "Prometheus/3"), "3", 1)
}

// seenBy returns what a Prometheus gets of g at each scrape: the value of each series.
func seenBy(t *testing.T, g *metrics.Gatherer) func() map[string]float64 {
	h := metrics.Handler(g, promhttp.HandlerOpts{})
	return func() map[string]float64 {
		r := httptest.NewRequest(http.MethodGet, "/metrics", nil)
		r.Header.Set("X-Prometheus-Scrape-Timeout-Seconds", "10")
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		values, _ := samples(t, w.Body.String())
		return values
	}
}

// counted returns the value of the only series of a family that has each of the texts among its labels.
func counted(t *testing.T, values map[string]float64, family string, labels ...string) float64 {
	t.Helper()
	var found []float64
series:
	for name, v := range values {
		if !strings.HasPrefix(name, family+"{") {
			continue
		}
		for _, l := range labels {
			if !strings.Contains(name, l) {
				continue series
			}
		}
		found = append(found, v)
	}
	if len(found) != 1 {
		t.Fatalf("%d series of %s with %q", len(found), family, labels)
	}
	return found[0]
}

func constant(*snapshot.Snapshot) float64 { return 0 }

// TestRenamedIsNotNew: a container that is renamed, or whose name Docker tells only after an hour, has counted already. Were its counters to begin at
// 0 again, increase() would count that hour twice.
func TestRenamedIsNotNew(t *testing.T) {
	s := &snapshot.Snapshot{Devices: []snapshot.Device{{UUID: "GPU-1"}}, Workloads: []snapshot.Workload{{PID: 7, Busy: frame.Some(3600.0),
		Container: containers.Container{ID: strings.Repeat("c", 64)}}}}
	scrape := seenBy(t, metrics.New(func() *snapshot.Snapshot { return s }, constant, metrics.Options{}))
	for i, name := range []string{"", "old", "new"} {
		next := *s
		next.Workloads = slices.Clone(s.Workloads)
		next.Workloads[0].Container.Name = name
		next.Workloads[0].Busy.V++
		s = &next
		if got := counted(t, scrape(), "gpu_busy_seconds_total", fmt.Sprintf("container_name=%q", name)); got != s.Workloads[0].Busy.V {
			t.Errorf("scrape %d, container %q: %v, want %v", i, name, got, s.Workloads[0].Busy.V)
		}
	}
}

// TestDriversEnergyIsNotNew: where NVML can be read only after the first scrape, what the device used since the driver was loaded is no increase. What
// a process used is.
func TestDriversEnergyIsNotNew(t *testing.T) {
	s := &snapshot.Snapshot{}
	scrape := seenBy(t, metrics.New(func() *snapshot.Snapshot { return s }, constant, metrics.Options{}))
	scrape()
	s = &snapshot.Snapshot{Devices: []snapshot.Device{{UUID: "GPU-1", Energy: frame.Some(1e9 + 5)}}, Workloads: []snapshot.Workload{
		{PID: 7, Busy: frame.Some(1.0), Energy: frame.Some(5.0)}, {Alive: true, Energy: frame.Some(1e9)}}}
	for i, want := range []float64{0, 5} {
		values := scrape()
		if got := counted(t, values, "gpu_energy_joules_total", `process_pid=""`); got != 1e9 {
			t.Errorf("scrape %d: the rest is %v", i, got)
		}
		if got := counted(t, values, "gpu_energy_joules_total", `process_pid="7"`); got != want {
			t.Errorf("scrape %d: the process's energy is %v, want %v", i, got, want)
		}
	}
}

// TestBoundCutsTheSame: whatever the bound on series is, a host that does not change has the same series with the same values at every scrape, and no
// counter falls while calls come and go; what the bound had left out before does not begin at 0.
func TestBoundCutsTheSame(t *testing.T) {
	whole := demo(t)
	for most := 1; most <= 60; most++ {
		s := whole
		scrape := seenBy(t, metrics.New(func() *snapshot.Snapshot { return s }, constant, metrics.Options{MaxSeries: most}))
		first, highest := scrape(), map[string]float64{}
		for range 5 {
			if now := scrape(); !maps.Equal(now, first) {
				t.Fatalf("at most %d series: %d, then others: %d", most, len(first), len(now))
			}
		}
		for i := range 6 { // the first device has errors and has none in turn, which makes room
			next := *s
			next.Devices = slices.Clone(s.Devices)
			next.Devices[0].Xids = nil
			if i%2 == 0 {
				next.Devices[0].Xids = map[uint64]snapshot.Xid{31: {Count: 1}, 43: {Count: 2}, 79: {Count: 3}}
			}
			s = &next
			for name, v := range scrape() {
				if family, _, _ := strings.Cut(name, "{"); !strings.HasSuffix(family, "_total") || strings.HasPrefix(family, "gpu_xid") {
					continue
				}
				if v < highest[name] {
					t.Errorf("at most %d series: %s fell from %v to %v", most, name, highest[name], v)
				}
				highest[name] = max(highest[name], v)
			}
		}
	}
}

// slow is a client that does not read until it may.
type slow struct {
	*httptest.ResponseRecorder
	writing, may chan struct{}
}

func (s slow) Write(p []byte) (int, error) {
	s.writing <- struct{}{}
	<-s.may
	return s.ResponseRecorder.Write(p)
}

// TestSlowReaders: what clients have not read yet is bounded, and is not what keeps others out until then.
func TestSlowReaders(t *testing.T) {
	s := &snapshot.Snapshot{Devices: []snapshot.Device{{UUID: "GPU-1"}}}
	for i := range 2000 {
		s.Workloads = append(s.Workloads, snapshot.Workload{PID: i + 1, Alive: true, Comm: "python3", Command: strings.Repeat("x", 4096)})
	}
	h := metrics.Handler(metrics.New(func() *snapshot.Snapshot { return s }, constant, metrics.Options{}), promhttp.HandlerOpts{MaxRequestsInFlight: 2})
	var clients sync.WaitGroup
	writing, may := make(chan struct{}), make(chan struct{})
	answered, size := 0, 0
	for {
		w := slow{httptest.NewRecorder(), writing, may}
		clients.Go(func() { h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil)) })
		<-writing
		if w.Code != http.StatusOK {
			close(may)
			break
		}
		if size, _ = strconv.Atoi(w.Header().Get("Content-Length")); size < 8<<20 {
			t.Fatalf("an answer of %d bytes: the test shows nothing", size)
		}
		if answered++; answered > 20 {
			t.Fatalf("%d clients hold %d MB", answered, answered*size>>20)
		}
	}
	if answered < 3 {
		t.Errorf("only %d slow readers are answered", answered)
	}
	clients.Wait()
	w := httptest.NewRecorder()
	if h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil)); w.Code != http.StatusOK || w.Body.Len() != size {
		t.Errorf("after all have read: %d, %d bytes", w.Code, w.Body.Len())
	}
}
