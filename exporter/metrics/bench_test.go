package metrics

import (
	"bytes"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
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

// BenchmarkScrape is one scrape of the built-in recording's host, as Prometheus makes it.
func BenchmarkScrape(b *testing.B) {
	snap := demo(b)
	registry := prometheus.NewRegistry()
	registry.MustRegister(New(func() *snapshot.Snapshot { return snap }, func(*snapshot.Snapshot) float64 { return 0 }, Options{}))
	for _, encoding := range []string{"identity", "gzip"} {
		b.Run(encoding, func(b *testing.B) {
			h := promhttp.HandlerFor(registry, promhttp.HandlerOpts{EnableOpenMetrics: true})
			r := httptest.NewRequest("GET", "/metrics", nil)
			r.Header.Set("Accept-Encoding", encoding)
			b.ReportAllocs()
			for b.Loop() {
				w := httptest.NewRecorder()
				h.ServeHTTP(w, r)
				b.ReportMetric(float64(w.Body.Len()), "bytes")
			}
		})
	}
}
