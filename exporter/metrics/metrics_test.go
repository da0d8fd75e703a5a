package metrics_test

import (
	"bytes"
	"io"
	"net/http/httptest"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"

	"gpu-exporter/exporter/metrics"
	"gpu-exporter/exporter/recording"
	"gpu-exporter/exporter/snapshot"
)

// demo returns the snapshot at the end of the built-in recording's first 40 s.
func demo(t *testing.T) *snapshot.Snapshot {
	t.Helper()
	list, err := recording.Read(bytes.NewReader(recording.Demo))
	if err != nil {
		t.Fatal(err)
	}
	b := snapshot.NewBuilder(snapshot.Config{})
	var s *snapshot.Snapshot
	for _, in := range list {
		if in.Time-list[0].Time > int64(40*time.Second) {
			break
		}
		b.Apply(in)
		s = b.Snapshot(time.Unix(0, in.Time))
	}
	return s
}

// checked gathers from g, and fails where a family or a series is not as client_golang wants it.
func checked(g prometheus.TransactionalGatherer) prometheus.Gatherer {
	return prometheus.Gatherers{prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) {
		list, _, err := g.Gather() // not given back, so it is not changed either
		return list, err
	})}
}

func scrape(t *testing.T, s *snapshot.Snapshot) string {
	t.Helper()
	w := httptest.NewRecorder()
	promhttp.HandlerFor(checked(metrics.New(func() *snapshot.Snapshot { return s }, func(*snapshot.Snapshot) float64 { return 0 }, metrics.Options{})), promhttp.HandlerOpts{}).ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	body, err := io.ReadAll(w.Body)
	if err != nil || w.Code != 200 {
		t.Fatalf("scrape: %d %v\n%s", w.Code, err, body)
	}
	return string(body)
}

// TestDemoExposition: client_golang accepts the real host, and each container has its own figures.
func TestDemoExposition(t *testing.T) {
	body := scrape(t, demo(t))
	for _, want := range []string{
		`gpu_memory_used_bytes{container_id="a8067bc45d21",container_name="notebook"`,
		`gpu_utilization_percent{container_id="ee1420ca9d9b",container_name="trainer"`,
		`image_name="",process_pid=""} `, // the unattributed series
		`gpu_container_assigned{`, `gpu_device_info{`, `gpu_sm_active_ratio{`, `gpu_exporter_nvml_up 1`, `gpu_exporter_docker_up 1`,
	} {
		if !strings.Contains(body, want) {
			t.Errorf("no %s", want)
		}
	}
	cmd := exec.Command("promtool", "check", "metrics")
	cmd.Stdin = strings.NewReader(body)
	out, _ := cmd.CombinedOutput()
	// The names of the metrics contract win over the linter, which objects to percent in names and to counts that are gauges.
	if bytes.Contains(out, []byte("error while linting")) || bytes.Contains(out, []byte("text format parsing error")) {
		t.Errorf("promtool: %s", out)
	}
}

// TestHostileNames: a container may be named anything; the exposition stays well-formed.
func TestHostileNames(t *testing.T) {
	s := demo(t)
	for i := range s.Workloads {
		if s.Workloads[i].PID != 0 {
			s.Workloads[i].Container.Name = "a\"b\\c\nd\xff\x00" + strings.Repeat("é", 300)
			s.Workloads[i].Command = "\x1b[31m\xfe"
		}
	}
	if body := scrape(t, s); strings.Contains(body, "\xff") {
		t.Error("invalid UTF-8 in the exposition")
	}
}
