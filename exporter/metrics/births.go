package metrics

import (
	"bytes"
	"net"
	"net/http"
	"strconv"
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
	g       prometheus.TransactionalGatherer
	options promhttp.HandlerOpts
	plain   http.Handler
	bodies  sync.Pool // of *body

	mu    sync.Mutex
	known map[string]*scraper
}

// scraper is one Prometheus, or what scrapes like one.
type scraper struct {
	g       prometheus.TransactionalGatherer
	handler http.Handler
	used    time.Time // guarded by scrapers.mu

	mu      sync.Mutex
	form    int // of workloads in its latest scrape
	scrapes uint64
	seen    map[string]*uint64 // the series of fromZero, by their latest scrape
}

// Handler serves what g gathers. Who scrapes it as Prometheus does gets a new counter from 0 on; others get the values as they are. Where
// Gatherer.Detail changes, counters are new that count what was counted before: they have their values at once.
func Handler(g prometheus.TransactionalGatherer, o promhttp.HandlerOpts) http.Handler {
	return &scrapers{g: g, options: o, plain: promhttp.HandlerForTransactional(g, o), known: map[string]*scraper{}}
}

// body is an answer that is written in one piece: a dozen calls of the kernel less, and who reads slowly holds no families.
type body struct {
	http.ResponseWriter
	bytes.Buffer
	status int
}

func (b *body) WriteHeader(status int)      { b.status = status }
func (b *body) Write(p []byte) (int, error) { return b.Buffer.Write(p) }

// ServeHTTP implements http.Handler.
func (s *scrapers) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	b, _ := s.bodies.Get().(*body)
	if b == nil {
		b = &body{}
	}
	b.ResponseWriter, b.status = w, http.StatusOK
	b.Reset()
	s.handler(r).ServeHTTP(b, r)
	w.Header().Set("Content-Length", strconv.Itoa(b.Len()))
	w.WriteHeader(b.status)
	_, _ = w.Write(b.Bytes()) // who asked is gone
	b.ResponseWriter = nil
	s.bodies.Put(b)
}

// handler returns the handler for who asks.
func (s *scrapers) handler(r *http.Request) http.Handler {
	// Prometheus sends this header, and so do the agents that scrape in its place. People's programs do not.
	if r.Header.Get("X-Prometheus-Scrape-Timeout-Seconds") == "" {
		return s.plain
	}
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		host = r.RemoteAddr
	}
	return s.scraper(host + " " + r.UserAgent()).handler
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
		x = &scraper{g: s.g, seen: map[string]*uint64{}}
		x.handler = promhttp.HandlerForTransactional(x, s.options)
		s.known[name] = x
	}
	x.used = time.Now()
	return x
}

var zero = 0.0

// Gather implements prometheus.TransactionalGatherer.
func (x *scraper) Gather() ([]*dto.MetricFamily, func(), error) {
	families, done, err := x.g.Gather()
	x.mu.Lock()
	defer x.mu.Unlock()
	if g, ok := x.g.(interface{ Detail() int }); ok {
		if form := g.Detail(); form != x.form {
			x.form, x.scrapes, x.seen = form, 0, map[string]*uint64{}
		}
	}
	x.scrapes++
	var key []byte
	for _, f := range families {
		if !fromZero[f.GetName()] {
			continue
		}
		for _, m := range f.Metric {
			key = append(key[:0], f.GetName()...)
			for _, l := range m.Label {
				key = append(append(key, 0), l.GetValue()...)
			}
			last := x.seen[string(key)]
			isNew := last == nil
			if isNew {
				last = new(uint64)
				x.seen[string(key)] = last
			}
			*last = x.scrapes
			if isNew && x.scrapes > 1 && m.Counter != nil {
				m.Counter.Value = &zero
			}
		}
	}
	for k, last := range x.seen {
		if *last != x.scrapes {
			delete(x.seen, k)
		}
	}
	return families, done, err
}
