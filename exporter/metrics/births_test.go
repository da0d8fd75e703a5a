package metrics_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"gpu-exporter/exporter/metrics"
)

// formed is a gatherer that shows workloads in one form or another.
type formed struct {
	prometheus.TransactionalGatherer
	form int
}

func (f *formed) Detail() int { return f.form }

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
