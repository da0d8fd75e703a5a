package metrics_test

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"

	"gpu-exporter/exporter/metrics"
	"gpu-exporter/exporter/snapshot"
	"gpu-exporter/exporter/snapshot/hosttest"
)

// accounts are the families that close: of the workloads, of the device, and the label beside the device's.
var accounts = []struct{ work, device, label string }{
	{"gpu_memory_used_bytes", "gpu_device_memory_used_bytes", ""},
	{"gpu_energy_joules_total", "gpu_device_energy_joules_total", ""},
	{"gpu_pci_bandwidth_bytes_total", "gpu_device_pcie_bytes_total", "direction"},
}

// exposed is a scrape: the value of each series by family and the text of its labels.
type exposed struct {
	values  map[string]map[string]float64
	labels  map[string]map[string]string // by the text of the labels
	counter map[string]bool
	series  int
}

func expose(t *testing.T, g *metrics.Gatherer) *exposed {
	t.Helper()
	list, done, err := g.Gather()
	if err != nil {
		t.Fatal(err)
	}
	defer done()
	x := &exposed{values: map[string]map[string]float64{}, labels: map[string]map[string]string{}, counter: map[string]bool{}}
	for _, f := range list {
		m := map[string]float64{}
		for _, s := range f.Metric {
			var text strings.Builder
			l := map[string]string{}
			for _, p := range s.Label {
				fmt.Fprintf(&text, "%s=%q ", p.GetName(), p.GetValue())
				l[p.GetName()] = p.GetValue()
			}
			x.labels[text.String()] = l
			m[text.String()] = s.GetGauge().GetValue() + s.GetCounter().GetValue()
			x.series++
			if h := s.Histogram; h != nil {
				x.series += len(h.Bucket) + 2
			}
			if s.Summary != nil {
				x.series++
			}
		}
		x.values[f.GetName()], x.counter[f.GetName()] = m, f.GetType() == dto.MetricType_COUNTER
	}
	return x
}

// sums adds up a family by device, and by a further label if one is named.
func (x *exposed) sums(family, label string) map[string]float64 {
	m := map[string]float64{}
	for text, v := range x.values[family] {
		m[x.labels[text]["gpu_device_uuid"]+" "+x.labels[text][label]] += v
	}
	return m
}

// TestSumsClose: what is exposed of generated hosts adds up on every device at every scrape, in whatever form and selection it is exposed: by process,
// by container, under a bound that is reached at once, under one that some hosts reach later, and without some families. And no counter falls: where the
// bound bites for the first time there are other series, and the unattributed one only grows.
func TestSumsClose(t *testing.T) {
	counted := regexp.MustCompile("gpu_(device_)?(memory_used_bytes|energy_joules_total)|gpu_(pci_bandwidth|device_pcie)_bytes_total|gpu_(busy|process_cpu)_seconds_total")
	forms := []struct {
		name    string
		options metrics.Options
		without string // one of accounts, or all but energy
	}{
		{name: "by process", options: metrics.Options{Include: counted}},
		{name: "by container", options: metrics.Options{Include: counted, Fold: true}},
		{name: "within 700 series", options: metrics.Options{Include: counted, MaxSeries: 700}},
		{name: "by container within 250 series", options: metrics.Options{Include: counted, MaxSeries: 250, Fold: true}},
		{name: "everything within 3000 series", options: metrics.Options{MaxSeries: 3000}},
		{name: "without memory", options: metrics.Options{Include: counted, Exclude: regexp.MustCompile("gpu_memory_.*")}, without: "gpu_memory_used_bytes"},
		{name: "energy alone", options: metrics.Options{Include: regexp.MustCompile("gpu_(device_)?energy_joules_total")}, without: "*"},
	}
	closed, details := map[string]int{}, map[int]int{}
	for _, seed := range []uint64{0, 1, 2, 4, 9, 44} {
		h := hosttest.New(seed)
		b := snapshot.NewBuilder(snapshot.Config{Linger: time.Duration(seed%4) * 3 * time.Second})
		var s *snapshot.Snapshot
		var gatherers []*metrics.Gatherer
		var last []*exposed
		var was []int
		for _, f := range forms {
			gatherers = append(gatherers, metrics.New(func() *snapshot.Snapshot { return s }, func(*snapshot.Snapshot) float64 { return 0 }, f.options))
			last, was = append(last, nil), append(was, 0)
		}
		for step := range 20 {
			for _, in := range h.Step() {
				b.Apply(in)
			}
			s = b.Snapshot(h.Now)
			for i, f := range forms {
				if f.options.Include == nil && step > 4 {
					continue // it takes long
				}
				g := gatherers[i]
				x := expose(t, g)
				what := fmt.Sprintf("seed %d, %s", seed, f.name)
				for _, a := range accounts {
					work, device := x.sums(a.work, a.label), x.sums(a.device, a.label)
					if f.without == a.work || f.without == "*" && a.work != "gpu_energy_joules_total" {
						if len(work) > 0 {
							t.Fatalf("%s: there is %s", what, a.work)
						}
						continue
					}
					for k, v := range device {
						closed[f.name+a.work]++
						if work[k] != v {
							t.Fatalf("%s: %s of %s is %v in all, the device's is %v", what, a.work, k, work[k], v)
						}
					}
				}
				if most := f.options.MaxSeries; most > 0 && x.series > most+1 { // the limit's own
					t.Fatalf("%s: %d series", what, x.series)
				}
				for family := range x.values {
					for text, v := range x.values[family] {
						if v < 0 || v >= 1<<63 || v != v {
							t.Fatalf("%s: %s{%s} is %v", what, family, text, v)
						}
						l := x.labels[text]
						if pid, ok := l["process_pid"]; g.Detail() > 0 && pid != "" || ok && g.Detail() > 1 && l["container_id"] != "" {
							t.Fatalf("%s: %s{%s} in a coarser form", what, family, text)
						}
						// A PID that is used again is another process, and its counters begin anew.
						if x.counter[family] && l["process_pid"] == "" && last[i] != nil && v < last[i].values[family][text] {
							t.Fatalf("%s: %s{%s} fell from %v to %v", what, family, text, last[i].values[family][text], v)
						}
					}
				}
				if g.Detail() < was[i] {
					t.Fatalf("%s: the form became finer", what)
				}
				last[i], was[i] = x, g.Detail()
				details[g.Detail()]++
			}
		}
	}
	for _, f := range forms {
		for _, a := range accounts {
			if f.without == "" && closed[f.name+a.work] == 0 {
				t.Errorf("%s: no device has %s", f.name, a.device)
			}
		}
	}
	if len(details) != 3 {
		t.Errorf("the bounds bit too seldom: scrapes by form %v", details)
	}
}
