package metrics

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"gpu-exporter/exporter/recording"
	"gpu-exporter/exporter/snapshot"
)

func demo(b testing.TB) *snapshot.Snapshot {
	list, err := recording.Read(bytes.NewReader(recording.Demo))
	if err != nil {
		b.Fatal(err)
	}
	s := snapshot.NewBuilder(snapshot.Config{})
	for _, in := range list {
		s.Apply(in)
	}
	return s.Snapshot(time.Unix(0, list[len(list)-1].Time))
}

// asked is a scrape as Prometheus makes it.
func asked() *http.Request {
	r := httptest.NewRequest("GET", "/metrics", nil)
	r.Header.Set("X-Prometheus-Scrape-Timeout-Seconds", "10")
	r.Header.Set("Accept", "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2")
	return r
}

// nowhere is a http.ResponseWriter that keeps the number of bytes.
type nowhere struct {
	header http.Header
	n      int
}

func (w *nowhere) Header() http.Header         { return w.header }
func (w *nowhere) WriteHeader(int)             {}
func (w *nowhere) Write(p []byte) (int, error) { w.n += len(p); return len(p), nil }

// scraping returns a function that scrapes once.
func scraping(snap *snapshot.Snapshot) func() int {
	h := Handler(New(func() *snapshot.Snapshot { return snap }, func(*snapshot.Snapshot) float64 { return 0 }, Options{}),
		promhttp.HandlerOpts{EnableOpenMetrics: true, DisableCompression: true})
	r := asked()
	return func() int {
		w := &nowhere{header: http.Header{}}
		h.ServeHTTP(w, r)
		return w.n
	}
}

// BenchmarkScrape is one scrape of the built-in recording's host.
func BenchmarkScrape(b *testing.B) {
	scrape := scraping(demo(b))
	b.ReportAllocs()
	for b.Loop() {
		b.ReportMetric(float64(scrape()), "bytes")
	}
}

// TestScrapeAllocates next to nothing: it was 10252 times and 0.9 MB, and the collector of garbage half of what the exporter cost.
func TestScrapeAllocates(t *testing.T) {
	scrape := scraping(demo(t))
	scrape()
	if n := testing.AllocsPerRun(50, func() { scrape() }); n > 150 { // 85, with the race detector a few more
		t.Errorf("a scrape allocates %v times", n)
	}
}

// TestScrapesShareNothing: what one scrape left for the next is never another's, nor are the series of a host that had more.
func TestScrapesShareNothing(t *testing.T) {
	hosts := []*snapshot.Snapshot{demo(t), full(), {Sources: full().Sources}}
	var n atomic.Int64
	h := Handler(New(func() *snapshot.Snapshot { return hosts[n.Add(1)%3] }, func(*snapshot.Snapshot) float64 { return 0 }, Options{}),
		promhttp.HandlerOpts{EnableOpenMetrics: true, DisableCompression: true})
	get := func() string {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
		return strings.Join(lines(w.Body.String()), "")
	}
	want := map[string]bool{}
	for _, s := range hosts {
		w := httptest.NewRecorder()
		Handler(New(func() *snapshot.Snapshot { return s }, func(*snapshot.Snapshot) float64 { return 0 }, Options{}), promhttp.HandlerOpts{}).
			ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
		want[strings.Join(lines(w.Body.String()), "")] = true
	}
	if len(want) != len(hosts) {
		t.Fatalf("%d hosts have %d expositions", len(hosts), len(want))
	}
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			for range 60 {
				if got := get(); !want[got] {
					t.Errorf("a scrape is no host's:\n%.300s", got)
					return
				}
			}
		})
	}
	group.Wait()
}
