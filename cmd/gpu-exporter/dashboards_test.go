package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"net/url"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"gpu-exporter/exporter/assets"
	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/recording"
	"gpu-exporter/nvml/frame"
	"gpu-exporter/tracer/activity"
)

// panelQuery is one query of a dashboard.
type panelQuery struct {
	where, expr, legend string
	instant             bool
}

// panelQueries returns every query of every panel, with the variables of Grafana as when all is chosen.
func panelQueries(t *testing.T) []panelQuery {
	t.Helper()
	// The recording lasts 70 s, so a step of a minute is made one of a second.
	fill := strings.NewReplacer("$__rate_interval", "15s", "$__range:1m", "10m:1s", "$__range", "10m", "$host", ".*", "$gpu", ".*", "$container", ".*", "$instance", ".*")
	var list []panelQuery
	for _, path := range assets.List() {
		if !strings.HasPrefix(path, "dashboards/") {
			continue
		}
		b, err := assets.Files.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var d struct {
			Panels []struct {
				Title   string
				Targets []struct {
					Expr, LegendFormat string
					Instant            bool
				}
			}
		}
		if err := json.Unmarshal(b, &d); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		for _, p := range d.Panels {
			for _, q := range p.Targets {
				expr := fill.Replace(q.Expr)
				if strings.Contains(expr, "$") {
					t.Errorf("%s: %s: a variable is left: %s", path, p.Title, expr)
				}
				list = append(list, panelQuery{path + ": " + p.Title, expr, q.LegendFormat, q.Instant})
			}
		}
	}
	if len(list) < 80 {
		t.Fatalf("%d queries", len(list))
	}
	return list
}

// tracedDemo is the built-in recording, which was made before there was a tracer, with reports of one: the processes open devices, call the
// driver, copy, fail to get memory and have processes that end, and the GPU reports an Xid.
func tracedDemo(t *testing.T) string {
	t.Helper()
	list, err := recording.Read(bytes.NewReader(recording.Demo))
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "traced.ndjson.gz")
	w, err := recording.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	n := uint64(0)
	for _, in := range list {
		if err := w.Write(in); err != nil {
			t.Fatal(err)
		}
		if in.Processes == nil {
			continue
		}
		n++
		r := activity.Report{Time: in.Time, Mode: "fentry", Ledger: true, Events: n}
		for _, p := range in.Processes.List {
			d := activity.Device{Used: frame.Some(uint64(700 << 20)), Peak: frame.Some(uint64(5 << 30))}
			r.Processes = append(r.Processes, activity.Process{PID: p.PID, StartTime: p.StartTime, Comm: p.Comm, Cgroup: p.Cgroup, Compute: true, FromBirth: true,
				HtoD: n << 20, DtoH: n << 18, Devices: []activity.Device{d}})
			r.Groups = append(r.Groups, activity.Group{Cgroup: p.Cgroup, Started: n, Exited: map[string]uint64{"exit": n},
				Opens:    []activity.Open{{Node: "gpu", Result: "ok", Count: n}, {Node: "gpu", Result: "eperm", Count: n}},
				Calls:    []activity.Call{{Name: "rm_alloc", Count: n, Seconds: float64(n), Buckets: []uint64{0, n}}},
				Failures: map[string]uint64{"GPU-eb896ada-3489-2700-9f63-edaa9adbb28a": n}})
		}
		if n > 20 {
			r.Xids = []activity.Xid{{Time: list[0].Time, PCIBusID: "0000:00:06.0", Code: 31}}
		}
		if err := w.Write(input.Input{Time: in.Time, Tracer: &r}); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return path
}

var placeholder = regexp.MustCompile(`\{\{(\w+)\}\}`)

// TestDashboardsHaveData: a real Prometheus, with the rules, scrapes a replayed host, and every query of every panel and every recording rule gives
// data. The alerts that the recording calls for fire and no others.
func TestDashboardsHaveData(t *testing.T) {
	dir := t.TempDir()
	if err := assets.Export(dir, false); err != nil {
		t.Fatal(err)
	}
	p := start(t, "--replay="+tracedDemo(t))
	prom := runPrometheus(t, fmt.Sprintf("global:\n  scrape_interval: 1s\n  evaluation_interval: 1s\nrule_files: [%q]\nscrape_configs:\n- job_name: gpu-exporter\n"+
		"  static_configs:\n  - targets: [%q]\n", dir+"/rules/*.yaml", p.address))

	waiting := panelQueries(t)
	for _, m := range regexp.MustCompile(`- record: (\S+)`).FindAllStringSubmatch(rulesText(t), -1) {
		waiting = append(waiting, panelQuery{where: "recording rule", expr: m[1], instant: true})
	}
	total := len(waiting)
	for deadline := time.Now().Add(80 * time.Second); len(waiting) > 0 && time.Now().Before(deadline); time.Sleep(2 * time.Second) {
		var left []panelQuery
		for _, q := range waiting {
			if !answered(t, prom, q) {
				left = append(left, q)
			}
		}
		waiting = left
	}
	for _, q := range waiting {
		t.Errorf("%s: no data, or not the labels of its legend %q: %s", q.where, q.legend, q.expr)
	}
	t.Logf("%d of %d queries have data", total-len(waiting), total)
	var firing []string
	for _, a := range prom.query(t, `count by (alertname) (ALERTS{alertstate="firing"})`) {
		firing = append(firing, a.labels["alertname"])
	}
	slices.Sort(firing)
	if want := []string{"GPUAllocationFailures", "GPUXidApplication"}; !slices.Equal(firing, want) {
		t.Errorf("alerts fire: %q, want %q", firing, want)
	}
	for _, r := range prom.query(t, `prometheus_rule_evaluation_failures_total > 0`) {
		t.Errorf("a rule fails: %v", r)
	}
}

func rulesText(t *testing.T) string {
	t.Helper()
	b, err := assets.Files.ReadFile("rules/gpu-exporter.rules.yaml")
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// answered tells whether a query has data, numbers, and series with all labels that its legend names.
func answered(t *testing.T, prom *promServer, q panelQuery) bool {
	t.Helper()
	var list []series
	if q.instant {
		list = prom.query(t, q.expr)
	} else {
		now := time.Now()
		list = prom.ask(t, fmt.Sprintf("/api/v1/query_range?query=%s&start=%d&end=%d&step=5", url.QueryEscape(q.expr), now.Add(-2*time.Minute).Unix(), now.Unix()))
	}
	for _, s := range list {
		ok := !math.IsNaN(s.value)
		for _, m := range placeholder.FindAllStringSubmatch(q.legend, -1) {
			ok = ok && (s.labels[m[1]] != "")
		}
		if ok {
			return true
		}
	}
	return false
}
