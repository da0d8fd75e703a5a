package metrics

import (
	"bytes"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/snapshot"
	"gpu-exporter/exporter/snapshot/hosttest"
	"gpu-exporter/nvml/frame"
)

// applied returns the snapshot of some inputs.
func applied(list []input.Input) *snapshot.Snapshot {
	b := snapshot.NewBuilder(snapshot.Config{Linger: time.Minute})
	for _, in := range list {
		b.Apply(in)
		b.Snapshot(time.Unix(0, in.Time))
	}
	return b.Snapshot(time.Unix(0, list[len(list)-1].Time))
}

// lines are those of a text, in order: the order of series is of no meaning.
func lines(text string) []string { return slices.Sorted(strings.Lines(text)) }

// TestTextIsExpfmts: our own texts are to the byte those of Prometheus's encoder, but for the order of series.
func TestTextIsExpfmts(t *testing.T) {
	odd := &snapshot.Snapshot{Devices: []snapshot.Device{{UUID: "GPU-1", State: frame.StateOK, Load: &frame.Load{Power: frame.Some(1e21), Temperature: frame.Some(-0.5)}}},
		Workloads: []snapshot.Workload{{PID: 7, Alive: true, Comm: "a\"b\\c\nd\xff", Memory: frame.Some(uint64(123456789)),
			Container: containers.Container{ID: strings.Repeat("a", 64), Name: "é\"\\", Image: "\n"}}}}
	hosts := map[string]*snapshot.Snapshot{"demo": demo(t), "full": full(), "none": {}, "odd": odd, "large": applied(hosttest.Large(4, 20, 20))}
	h := hosttest.New(5)
	var list []input.Input
	for range 40 {
		list = append(list, h.Step()...)
	}
	hosts["generated"] = applied(list)
	more := func() []*dto.MetricFamily {
		name, kind, v := "go_threads", dto.MetricType_GAUGE, 8.0
		return []*dto.MetricFamily{{Name: &name, Type: &kind, Metric: []*dto.Metric{{Gauge: &dto.Gauge{Value: &v}}}}}
	}
	for name, snap := range hosts {
		for _, o := range []Options{{More: more}, {MaxSeries: 300}, {Fold: true, ValueLabels: true}} {
			gatherer := func() *Gatherer {
				return New(func() *snapshot.Snapshot { return snap }, func(*snapshot.Snapshot) float64 { return 0.25 }, o)
			}
			for format, accept := range map[expfmt.FormatType]string{
				expfmt.TypeTextPlain: "text/plain;version=0.0.4", expfmt.TypeOpenMetrics: "application/openmetrics-text;version=1.0.0"} {
				r := httptest.NewRequest("GET", "/metrics", nil)
				r.Header.Set("Accept", accept)
				w := httptest.NewRecorder()
				Handler(gatherer(), promhttp.HandlerOpts{EnableOpenMetrics: true}).ServeHTTP(w, r)
				got := w.Body.String()
				list, done, err := gatherer().Gather()
				if err != nil {
					t.Fatal(err)
				}
				var want bytes.Buffer
				content := expfmt.NewFormat(format)
				enc := expfmt.NewEncoder(&want, content)
				for _, f := range list {
					if err := enc.Encode(f); err != nil {
						t.Fatal(err)
					}
				}
				if c, ok := enc.(expfmt.Closer); ok {
					c.Close()
				}
				done()
				if !slices.Equal(lines(got), lines(want.String())) {
					for _, l := range lines(got) {
						if !strings.Contains(want.String(), l) {
							t.Errorf("%s, %v: %s", name, format, l)
							break
						}
					}
					t.Errorf("%s, %v, %+v: %d lines, want %d", name, format, o, len(lines(got)), len(lines(want.String())))
				}
				if format == expfmt.TypeOpenMetrics != strings.HasSuffix(got, "# EOF\n") {
					t.Errorf("%s: the end of %v is %q", name, format, got[max(0, len(got)-40):])
				}
				if kind := w.Header().Get("Content-Type"); kind != string(content)+"; escaping=underscores" {
					t.Errorf("Content-Type %q, asked for %q", kind, accept)
				}
			}
		}
	}
}

// TestLargeScrape: what a scrape of a large host costs, in figures that do not depend on the machine.
func TestLargeScrape(t *testing.T) {
	cost := func(busy, idle int) (allocs, bytes, series float64) {
		snap := applied(hosttest.Large(16, busy, idle))
		scrape := scraping(snap)
		scrape()
		g := New(func() *snapshot.Snapshot { return snap }, func(*snapshot.Snapshot) float64 { return 0 }, Options{})
		list, done, err := g.Gather()
		if err != nil {
			t.Fatal(err)
		}
		defer done()
		for _, f := range list {
			if f.GetName() == "gpu_exporter_series" {
				series = f.Metric[0].GetGauge().GetValue()
			}
		}
		return testing.AllocsPerRun(3, func() { scrape() }), float64(scrape()), series
	}
	const containers = 300
	allocs, bytes, series := cost(0, 0)
	busyAllocs, busyBytes, busySeries := cost(containers, 0)
	idleAllocs, idleBytes, idleSeries := cost(0, containers)
	per := func(all, base float64) float64 { return (all - base) / containers }
	t.Logf("16 GPUs: %v allocations, %v bytes, %v series; a container with 4 processes: %.1f, %.0f, %.1f", allocs, bytes, series, per(busyAllocs, allocs),
		per(busyBytes, bytes), per(busySeries, series))
	for _, x := range []struct {
		what      string
		got, most float64
	}{
		{"allocations", allocs, 200}, {"allocations of a container", per(busyAllocs, allocs), 13}, {"of an idle one", per(idleAllocs, allocs), 0.1},
		{"bytes of a container", per(busyBytes, bytes), 40_000}, {"of an idle one", per(idleBytes, bytes), 0.1},
		{"series of a container", per(busySeries, series), 130}, {"of an idle one", per(idleSeries, series), 0},
	} {
		if x.got > x.most {
			t.Errorf("%s: %.2f, at most %v", x.what, x.got, x.most)
		}
	}
}
