package metrics

import (
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"
)

// fromZero are the counters that count from the moment at which the exporter first saw the thing. Prometheus takes the first value that it sees of
// a counter for its starting point, so of a job that came and went between two scrapes increase() would be 0. To a scraper that has been there
// before, a new series of these therefore begins with 0, and has its value from the next scrape on.
var fromZero = map[string]bool{
	"gpu_busy_seconds_total": true, "gpu_energy_joules_total": true, "gpu_pci_bandwidth_bytes_total": true, "gpu_processes_started_total": true,
	"gpu_processes_exited_total": true, "gpu_device_opens_total": true, "gpu_driver_calls_total": true, "gpu_driver_call_errors_total": true,
	"gpu_allocation_failures_total": true, "gpu_kernel_launches_total": true, "gpu_xid_errors_total": true, "gpu_throttle_seconds_total": true,
	"gpu_exporter_nvml_restarts_total": true,
}

// maxScrapers bounds the scrapers that are remembered.
const maxScrapers = 16

// scrapers serves g, and remembers what each scraper has seen.
type scrapers struct {
	g       prometheus.Gatherer
	options promhttp.HandlerOpts
	plain   http.Handler

	mu    sync.Mutex
	known map[string]*scraper
}

// scraper is one Prometheus, or what scrapes like one.
type scraper struct {
	g       prometheus.Gatherer
	handler http.Handler
	used    time.Time // guarded by scrapers.mu

	mu   sync.Mutex
	seen map[string]bool // the series of fromZero in its latest scrape; nil before its first
}

// Handler serves what g gathers. Who scrapes it as Prometheus does gets a new counter from 0 on; others get the values as they are.
func Handler(g prometheus.Gatherer, o promhttp.HandlerOpts) http.Handler {
	return &scrapers{g: g, options: o, plain: promhttp.HandlerFor(g, o), known: map[string]*scraper{}}
}

// ServeHTTP implements http.Handler.
func (s *scrapers) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	// Prometheus sends this header, and so do the agents that scrape in its place. People's programs do not.
	if r.Header.Get("X-Prometheus-Scrape-Timeout-Seconds") == "" {
		s.plain.ServeHTTP(w, r)
		return
	}
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		host = r.RemoteAddr
	}
	s.scraper(host+" "+r.UserAgent()).handler.ServeHTTP(w, r)
}

// scraper returns the scraper of a name, and forgets the one that has not come for longest if there are too many.
func (s *scrapers) scraper(name string) *scraper {
	s.mu.Lock()
	defer s.mu.Unlock()
	x := s.known[name]
	if x == nil {
		if len(s.known) >= maxScrapers {
			oldest := ""
			for n, k := range s.known {
				if oldest == "" || k.used.Before(s.known[oldest].used) {
					oldest = n
				}
			}
			delete(s.known, oldest)
		}
		x = &scraper{g: s.g}
		x.handler = promhttp.HandlerFor(x, s.options)
		s.known[name] = x
	}
	x.used = time.Now()
	return x
}

// Gather implements prometheus.Gatherer.
func (x *scraper) Gather() ([]*dto.MetricFamily, error) {
	families, err := x.g.Gather()
	x.mu.Lock()
	defer x.mu.Unlock()
	seen := make(map[string]bool, len(x.seen))
	zero := 0.0
	var key strings.Builder
	for _, f := range families {
		if !fromZero[f.GetName()] {
			continue
		}
		for _, m := range f.Metric {
			key.Reset()
			key.WriteString(f.GetName())
			for _, l := range m.Label {
				key.WriteByte(0)
				key.WriteString(l.GetValue())
			}
			k := key.String()
			seen[k] = true
			if x.seen != nil && !x.seen[k] && m.Counter != nil {
				m.Counter.Value = &zero
			}
		}
	}
	x.seen = seen
	return families, err
}
