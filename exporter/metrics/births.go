package metrics

import (
	"bytes"
	"errors"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"

	"gpu-exporter/exporter/untaken"
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

// described are the labels that say what a thing is called, not which it is. They may change: a container is renamed, or was counted before Docker
// told of it. Its counters then go on under other labels, and are no new ones.
var described = map[string]bool{"gpu_device_name": true, "gpu_pci_bus_id": true, "host_ip": true, "container_name": true, "image_name": true}

// maxScrapers bounds the scrapers that are remembered.
const maxScrapers = 16

// scrapers serves g, and remembers what each scraper has seen.
type scrapers struct {
	g       prometheus.TransactionalGatherer
	options promhttp.HandlerOpts
	plain   http.Handler
	idle    atomic.Pointer[body] // of an answer that has been read; nil: none has, or others use theirs
	size    atomic.Int64         // bytes of the latest answer
	waiting chan struct{}        // a place for each scrape that waits for its answer to be made, or whose is being made; nil: any number may wait
	untaken untaken.Bound        // an answer is made at a time: it takes milliseconds of one processor, and what it is made of is there once

	mu    sync.Mutex
	known map[string]*scraper
}

// scraper is one Prometheus, or what scrapes like one.
type scraper struct {
	g       prometheus.TransactionalGatherer
	handler http.Handler
	used    time.Time // guarded by scrapers.mu

	mu      sync.Mutex
	form    int  // of workloads in its latest scrape
	cut     bool // its latest scrape lacked series
	scrapes uint64
	wasCut  bool              // and the one before it
	seen    map[uint64]uint64 // the latest scrape of each series of fromZero, by the hash of what it is
}

// Handler serves what g gathers. Who scrapes it as Prometheus does gets a new counter from 0 on; others get the values as they are. Where
// Gatherer.Detail changes, counters are new that count what was counted before: they have their values at once.
func Handler(g prometheus.TransactionalGatherer, o promhttp.HandlerOpts) http.Handler {
	s := &scrapers{g: g, untaken: untaken.Bound{Most: maxUntaken}, known: map[string]*scraper{}}
	if o.MaxRequestsInFlight > 0 {
		s.waiting = make(chan struct{}, o.MaxRequestsInFlight)
		o.MaxRequestsInFlight = 0
	}
	s.options, s.plain = o, promhttp.HandlerForTransactional(g, o)
	return s
}

// maxUntaken bounds the bytes that wait for readers. An answer for 2000 containers is 10 MB, and who reads slowly may take half a minute.
const maxUntaken = 64 << 20

// maxIdle is how much longer than what is needed the buffer of an answer may stay.
const maxIdle = 1 << 20

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
	b := s.idle.Swap(nil)
	if b == nil {
		b = &body{}
	}
	if size := int(s.size.Load()); b.Cap() < size+size/32 || b.Cap() > 4*size+maxIdle { // made at once, as it is: to grow would copy megabytes, and leave twice as many
		b.Buffer = *bytes.NewBuffer(make([]byte, 0, size+size/16))
	}
	b.ResponseWriter, b.status = w, http.StatusOK
	b.Reset()
	taken, ok := s.answer(b, r)
	defer taken()
	if !ok {
		http.Error(w, "too many scrapes at a time, or too much that others have not read yet: try again later", http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Content-Length", strconv.Itoa(b.Len()))
	w.WriteHeader(b.status)
	_, _ = w.Write(b.Bytes()) // who asked is gone
	b.ResponseWriter = nil
	s.size.Store(int64(b.Len()))
	s.idle.Store(b)
}

// answer makes the answer, unless too many wait for theirs or read theirs slowly. taken is to be called when it was written.
func (s *scrapers) answer(b *body, r *http.Request) (taken func(), ok bool) {
	if s.waiting != nil {
		select {
		case s.waiting <- struct{}{}:
			defer func() { <-s.waiting }()
		default:
			return func() {}, false
		}
	}
	taken, err := s.untaken.Make(func() (int, error) {
		if format, ok := s.textFormat(r); ok {
			s.text(b, s.asking(r), format)
		} else {
			s.handler(r).ServeHTTP(b, r)
		}
		return b.Len(), nil
	})
	return taken, err == nil
}

// textFormat returns the text format that is asked for, false where it is another or a choice of families, which promhttp answers.
func (s *scrapers) textFormat(r *http.Request) (format expfmt.Format, ok bool) {
	if _, ours := s.g.(*Gatherer); !ours || r.URL.Query().Has("name[]") {
		return "", false
	}
	accepted := s.options.AcceptedFormats
	switch {
	case len(accepted) > 0:
	case s.options.EnableOpenMetrics:
		accepted = expfmt.DefaultOpenMetricsAcceptedFormats()
	default:
		accepted = expfmt.DefaultAcceptedFormats()
	}
	format = expfmt.NegotiateAccept(r.Header, accepted...)
	kind := format.FormatType()
	return format, kind == expfmt.TypeTextPlain || kind == expfmt.TypeOpenMetrics
}

// text answers in a text format, for a scraper or, where it is nil, for others.
func (s *scrapers) text(b *body, x *scraper, format expfmt.Format) {
	b.Header().Set("Content-Type", string(format))
	b.Header().Add("Vary", "Accept")
	err := s.g.(*Gatherer).text(&writer{out: &b.Buffer, open: format.FormatType() == expfmt.TypeOpenMetrics}, x)
	if err == nil {
		return
	}
	if s.options.ErrorLog != nil {
		s.options.ErrorLog.Println("error gathering metrics:", err)
	}
	if s.options.ErrorHandling != promhttp.ContinueOnError {
		b.Reset()
		http.Error(b, err.Error(), http.StatusInternalServerError)
	}
}

// asking returns the scraper that asks; nil where it is none.
func (s *scrapers) asking(r *http.Request) *scraper {
	// Prometheus sends this header, and so do the agents that scrape in its place. People's programs do not.
	if r.Header.Get("X-Prometheus-Scrape-Timeout-Seconds") == "" {
		return nil
	}
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		host = r.RemoteAddr
	}
	return s.scraper(host + " " + r.UserAgent())
}

// handler returns promhttp's handler for who asks.
func (s *scrapers) handler(r *http.Request) http.Handler {
	if x := s.asking(r); x != nil {
		return x.handler
	}
	return s.plain
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
		x = &scraper{g: s.g, seen: map[uint64]uint64{}}
		x.handler = promhttp.HandlerForTransactional(x, s.options)
		s.known[name] = x
	}
	x.used = time.Now()
	return x
}

var zero = 0.0

// begin begins a scrape of what g has just collected.
func (x *scraper) begin(g any) {
	x.wasCut = x.cut
	if g, ok := g.(interface {
		Detail() int
		Cut() bool
	}); ok {
		if form := g.Detail(); form != x.form {
			x.form, x.scrapes, x.seen = form, 0, map[uint64]uint64{}
		}
		x.cut = g.Cut()
	}
	x.scrapes++
}

// isNew tells whether a counter of fromZero begins with this scrape. It is told apart by its name and those of its labels that say which it is.
func (x *scraper) isNew(name string, series uint64, owned bool) bool {
	series = hash(series, name)
	_, seen := x.seen[series]
	x.seen[series] = x.scrapes
	// What there was no room for before is not new. What no process used of a device's energy counts from when the driver was loaded.
	return !seen && x.scrapes > 1 && !x.wasCut && (owned || name != "gpu_energy_joules_total")
}

// end forgets the series that this scrape did not have.
func (x *scraper) end() {
	for k, last := range x.seen {
		if last != x.scrapes {
			delete(x.seen, k)
		}
	}
}

// identity adds a label to the hash of what a series is, and tells whether it says that the series is a container's or a process's.
func identity(h uint64, name, value string) (_ uint64, owned bool) {
	if described[name] {
		return h, false
	}
	return hash(h, value), (name == "container_id" || name == "process_pid") && value != ""
}

// Gather implements prometheus.TransactionalGatherer.
func (x *scraper) Gather() ([]*dto.MetricFamily, func(), error) {
	x.mu.Lock() // before, so that an older scrape is not taken for a later one
	defer x.mu.Unlock()
	families, done, err := x.g.Gather()
	x.begin(x.g)
	defer x.end()
	for _, f := range families {
		if !fromZero[f.GetName()] {
			continue
		}
		for _, m := range f.Metric {
			series, owned := uint64(0), false
			for _, l := range m.Label {
				var own bool
				series, own = identity(series, l.GetName(), l.GetValue())
				owned = owned || own
			}
			if x.isNew(f.GetName(), series, owned) && m.Counter != nil {
				m.Counter.Value = &zero
			}
		}
	}
	return families, done, err
}

// text writes the latest snapshot for a scraper; nil: for others.
func (g *Gatherer) text(w *writer, x *scraper) error {
	e := g.texts.Swap(nil)
	if e == nil {
		e = newExposition(g.o, true)
	}
	defer g.texts.Store(e)
	if x != nil {
		x.mu.Lock()
		defer x.mu.Unlock()
	}
	g.collect(e)
	var more []*dto.MetricFamily
	if g.o.More != nil {
		more = g.o.More()
	}
	w.e = e
	if x != nil {
		x.begin(g)
		defer x.end()
		w.isNew = x.isNew
	}
	w.all(more)
	return errors.Join(e.errs...)
}
