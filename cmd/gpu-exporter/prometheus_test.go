package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"gpu-exporter/nvml/fake"
)

// promServer is a real Prometheus.
type promServer struct{ url string }

// scrapedBy starts a Prometheus that scrapes the exporter every 4 seconds.
func scrapedBy(t *testing.T, p *process) *promServer {
	t.Helper()
	return runPrometheus(t, fmt.Sprintf("global:\n  scrape_interval: 4s\nscrape_configs:\n- job_name: gpu\n  static_configs:\n  - targets: [%q]\n", p.address))
}

// runPrometheus starts a real Prometheus with a configuration.
func runPrometheus(t *testing.T, text string, flags ...string) *promServer {
	t.Helper()
	dir := t.TempDir()
	config := filepath.Join(dir, "prometheus.yml")
	if err := os.WriteFile(config, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	var log lockedBuffer
	cmd := exec.Command("prometheus", append(flags, "--config.file="+config, "--storage.tsdb.path="+dir+"/data", "--web.listen-address=127.0.0.1:0")...)
	cmd.Stderr = &log
	if err := cmd.Start(); err != nil {
		t.Fatalf("%v: apt-get install prometheus", err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	address := regexp.MustCompile(`msg="Listening on" address=(\S+)`)
	for range 200 {
		if m := address.FindStringSubmatch(log.String()); m != nil && strings.Contains(log.String(), "Server is ready") {
			return &promServer{"http://" + m[1]}
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Fatalf("prometheus does not serve:\n%s", log.String())
	return nil
}

// query evaluates an expression now.
func (p *promServer) query(t *testing.T, expr string) []series {
	t.Helper()
	return p.ask(t, "/api/v1/query?query="+url.QueryEscape(expr))
}

// ask returns the series of an answer, of a range the last value of each.
func (p *promServer) ask(t *testing.T, path string) []series {
	t.Helper()
	r, err := http.Get(p.url + path)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	var answer struct {
		Status, Error string
		Data          struct {
			Result []struct {
				Metric map[string]string
				Value  [2]any
				Values [][2]any
			}
		}
	}
	if err := json.Unmarshal(b, &answer); err != nil || answer.Status != "success" {
		t.Fatalf("%s: %v\n%s", path, err, b)
	}
	var list []series
	for _, x := range answer.Data.Result {
		if n := len(x.Values); n > 0 {
			x.Value = x.Values[n-1]
		}
		text, _ := x.Value[1].(string)
		v, err := strconv.ParseFloat(text, 64)
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		list = append(list, series{x.Metric, v})
	}
	return list
}

// until evaluates an expression until ok, or fails the test.
func (p *promServer) until(t *testing.T, within time.Duration, expr string, ok func([]series) bool) []series {
	t.Helper()
	for deadline := time.Now().Add(within); ; time.Sleep(100 * time.Millisecond) {
		list := p.query(t, expr)
		if ok(list) {
			return list
		}
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s is %v", within, expr, list)
		}
	}
}

// TestPrometheus: a real Prometheus takes what the exporter serves, the rules of the metrics contract say what they mean, and a job that came and
// went between two scrapes has its GPU time counted.
func TestPrometheus(t *testing.T) {
	gpu := fake.H200(0)
	job := sleeper(t)
	hold(&gpu, 0, fake.Process{PID: job, Memory: 145_000_000_000})
	gpu.Set("temperature", 97)
	gpu.Set("ecc", 0, 3, 0, 3)
	gpu.Busy = []fake.Busy{{PID: job, SM: 50}}
	h := fake.Install(t, fake.Scenario{GPUs: []fake.GPU{gpu}})
	p := start(t, "--nvml.library="+h.Library, "--docker.host=unix://"+engine(t, nil, nil), "--nvml.interval=100ms")
	prom := scrapedBy(t, p)
	one := func(list []series) bool { return len(list) == 1 }
	prom.until(t, 10*time.Second, `up`, func(list []series) bool { return one(list) && list[0].value == 1 })

	full := prom.until(t, 10*time.Second, `gpu_memory_used_bytes / gpu_memory_total_bytes * 100 > 90`, one)
	if got := full[0]; got.labels["process_pid"] != strconv.Itoa(job) || got.value < 96 || got.value > 97 {
		t.Errorf("memory: %v", got)
	}
	if hot := prom.until(t, 5*time.Second, `gpu_temperature_celsius > 95`, one); hot[0].value != 97 || hot[0].labels["gpu_device_uuid"] != uuid(gpu) {
		t.Errorf("temperature: %v", hot)
	}
	if ecc := prom.until(t, 5*time.Second, `gpu_ecc_errors{type="volatile"} > 0`, one); ecc[0].value != 3 || ecc[0].labels["severity"] != "uncorrected" {
		t.Errorf("ECC: %v", ecc)
	}
	prom.until(t, 5*time.Second, `avg_over_time(gpu_temperature_celsius[5m]) > 85 and max_over_time(gpu_temperature_celsius[30s]) > 90`, one)
	prom.query(t, `sum by (container_name, gpu_device_name) (rate(gpu_pci_bandwidth_bytes_total[5m]))`)
	rate := prom.until(t, 20*time.Second, fmt.Sprintf(`rate(gpu_busy_seconds_total{process_pid="%d"}[20s])`, job), func(list []series) bool {
		return one(list) && list[0].value > 0.25 && list[0].value < 0.6
	})
	t.Logf("rate of a job that uses half of the GPU: %v", rate[0].value)

	t.Run("job between two scrapes", func(t *testing.T) {
		// It lives from just after one scrape to just before the next.
		scraped := func() float64 { return prom.query(t, `timestamp(up)`)[0].value }
		for before := scraped(); scraped() == before; {
			time.Sleep(5 * time.Millisecond)
		}
		short := exec.Command("sleep", "600")
		if err := short.Start(); err != nil {
			t.Fatal(err)
		}
		with := gpu
		hold(&with, 0, append(gpu.Processes, fake.Process{PID: short.Process.Pid, Memory: gib})...)
		with.Busy = append(with.Busy, fake.Busy{PID: short.Process.Pid, SM: 100})
		h.Set(t, fake.Scenario{GPUs: []fake.GPU{with}})
		time.Sleep(3200 * time.Millisecond) // the driver is asked for samples every 3 s
		short.Process.Kill()
		short.Wait()
		hold(&gpu, 0, gpu.Processes...)
		h.Set(t, fake.Scenario{GPUs: []fake.GPU{gpu}})
		expr := fmt.Sprintf(`increase(gpu_busy_seconds_total{process_pid="%d"}[1m])`, short.Process.Pid)
		list := prom.until(t, 10*time.Second, expr, func(list []series) bool { return one(list) && list[0].value > 0 })
		t.Logf("%v s of SM time", list[0].value)
	})

	check := exec.Command("promtool", "check", "metrics")
	check.Stdin = strings.NewReader(p.get(t, "/metrics"))
	if out, err := check.CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("promtool check metrics: %v\n%s", err, out)
	}
	p.stop(t)
}

// contractRules are the rules of the metrics contract, to the letter.
var contractRules = []string{
	`gpu_memory_used_bytes / gpu_memory_total_bytes * 100 > 90`,
	`gpu_temperature_celsius > 95`,
	`gpu_ecc_errors{type="volatile"} > 0`,
	`sum by (container_name, gpu_device_name) (rate(gpu_pci_bandwidth_bytes_total[5m]))`,
	`avg_over_time(gpu_temperature_celsius[5m]) > 85 and max_over_time(gpu_temperature_celsius[30s]) > 90`,
}

// TestRecordedHosts: a real Prometheus scrapes six recorded hosts, each from an exporter that replays it. As alerts the contract's rules fire for the hot
// GPU, the one with ECC errors and the process that nearly fills its own, for whatever copies, and for nothing else. The usual relabelling works.
func TestRecordedHosts(t *testing.T) {
	hosts := map[string]string{"traced": "../../exporter/recording/testdata/h200-traced.ndjson.gz"}
	for _, name := range []string{"none", "old", "a10", "shared", "mig"} {
		hosts[name] = "../../exporter/metrics/testdata/hosts/" + name + ".ndjson.gz"
	}
	rules := "groups:\n- name: contract\n  rules:\n"
	for i, expr := range contractRules {
		rules += fmt.Sprintf("  - alert: rule%d\n    expr: |\n      %s\n", i+1, expr)
	}
	config := "global:\n  scrape_interval: 500ms\n  evaluation_interval: 500ms\nrule_files: [" + file(t, rules) + "]\nscrape_configs:\n- job_name: gpu\n  static_configs:\n"
	for name, recording := range hosts {
		config += fmt.Sprintf("  - targets: [%q]\n    labels: {host: %s}\n", start(t, "--replay="+recording).address, name)
	}
	prom := runPrometheus(t, config+`  metric_relabel_configs:
  - {source_labels: [container_id], regex: "(.{12}).*", target_label: short_id}
  - {source_labels: [gpu_device_uuid], regex: "GPU-(.{8})-.*", target_label: short_uuid}
`, "--enable-feature=native-histograms") // it asks for protobuf then, and takes the native form
	fired := func() map[string]bool {
		m := map[string]bool{}
		for _, x := range prom.query(t, `ALERTS{alertstate="firing"}`) {
			l := x.labels
			m[strings.Join([]string{l["alertname"], l["host"], l["gpu_device_uuid"], l["container_name"], l["process_pid"], l["severity"], l["gpu_device_name"]}, " ")] = true
		}
		return m
	}
	a10 := func(i int) string { return uuid(fake.A10(i)) }
	want := map[string]bool{
		"rule1 a10 " + a10(2) + " job-8 3008  NVIDIA A10":   true,
		"rule2 a10 " + a10(0) + "    NVIDIA A10":            true,
		"rule3 a10 " + a10(1) + "   corrected NVIDIA A10":   true,
		"rule3 a10 " + a10(1) + "   uncorrected NVIDIA A10": true,
		"rule5 a10 " + a10(0) + "    NVIDIA A10":            true,
		"rule4      NVIDIA A10":                             true,
		"rule4      NVIDIA H200":                            true,
	}
	for _, name := range []string{"busy", "hold", "feed"} { // of the traced host
		want["rule4   "+name+"   NVIDIA H200"] = true
	}
	var got map[string]bool
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(200 * time.Millisecond) {
		if got = fired(); maps.Equal(got, want) {
			break
		}
	}
	for range 4 { // and so it stays
		if got = fired(); !maps.Equal(got, want) {
			t.Fatalf("firing: %q\nwant: %q", slices.Sorted(maps.Keys(got)), slices.Sorted(maps.Keys(want)))
		}
		time.Sleep(500 * time.Millisecond)
	}
	if list := prom.query(t, `up == 1`); len(list) != len(hosts) {
		t.Errorf("%d of %d hosts are scraped", len(list), len(hosts))
	}
	for _, x := range prom.query(t, contractRules[3]) {
		t.Logf("%v: %.0f bytes/s", x.labels, x.value)
	}
	if list := prom.query(t, `histogram_count(gpu_power_sample_watts{host="traced"})`); len(list) != 1 || list[0].value < 100 {
		t.Errorf("native histogram: %v", list)
	}
	short := prom.query(t, `gpu_memory_used_bytes{host="traced",container_name="hold"}`)
	if len(short) != 1 || short[0].labels["short_id"] != "288e32119a34" || short[0].labels["short_uuid"] != "b8c24ac0" {
		t.Errorf("relabelled: %v", short)
	}
}
