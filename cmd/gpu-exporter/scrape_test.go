package main

import (
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"
)

// scrapeJob returns a configuration of Prometheus with one of the jobs that are handed out, each second, with texts replaced by others in pairs.
func scrapeJob(t *testing.T, name string, replace ...string) string {
	t.Helper()
	for _, file := range []string{"prometheus.yaml", "prometheus-kubernetes.yaml"} {
		var c struct {
			Jobs []map[string]any `json:"scrape_configs"`
		}
		if err := yaml.Unmarshal([]byte(strings.NewReplacer(replace...).Replace(installFile(t, file))), &c); err != nil {
			t.Fatal(err)
		}
		for _, job := range c.Jobs {
			if job["job_name"] == name {
				b, err := yaml.Marshal(map[string]any{"global": map[string]any{"scrape_interval": "1s"}, "scrape_configs": []any{job}})
				if err != nil {
					t.Fatal(err)
				}
				return string(b)
			}
		}
	}
	t.Fatalf("no job %s", name)
	return ""
}

// TestScrapeStatic: a real Prometheus with the job for fixed addresses has the series, and a short name of the GPU with them. TestCompose has the job
// for Docker's service discovery.
func TestScrapeStatic(t *testing.T) {
	p := start(t, "--replay=demo")
	prom := runPrometheus(t, scrapeJob(t, "gpu-exporter", "localhost:9400", p.address))
	list := prom.until(t, 20*time.Second, `gpu_device_memory_total_bytes{job="gpu-exporter"}`, func(list []series) bool { return len(list) == 1 })
	if l := list[0].labels; l["gpu"] != strings.TrimPrefix(l["gpu_device_uuid"], "GPU-")[:8] {
		t.Errorf("labels %v", l)
	}
}

// TestScrapeKubernetes: of the pods that Kubernetes would name, the job for them takes the exporter's port, with the labels that are said. Debian's
// Prometheus knows no Kubernetes, so the pods are given as it would give them.
func TestScrapeKubernetes(t *testing.T) {
	const meta = "__meta_kubernetes_pod_"
	pod := func(address string, change map[string]string) map[string]any {
		labels := map[string]string{meta + "label_app_kubernetes_io_name": "gpu-exporter", meta + "container_port_name": "metrics", meta + "node_name": "node-1",
			meta + "name": "gpu-exporter-x", "__meta_kubernetes_namespace": "gpu-exporter"}
		maps.Copy(labels, change)
		return map[string]any{"targets": []string{address}, "labels": labels}
	}
	var c map[string]any
	if err := yaml.Unmarshal([]byte(scrapeJob(t, "gpu-exporter-kubernetes")), &c); err != nil {
		t.Fatal(err)
	}
	job := c["scrape_configs"].([]any)[0].(map[string]any)
	delete(job, "kubernetes_sd_configs")
	job["static_configs"] = []any{pod("192.0.2.1:9400", nil), pod("192.0.2.1:80", map[string]string{meta + "container_port_name": "web"}),
		pod("192.0.2.2:9400", map[string]string{meta + "label_app_kubernetes_io_name": "other"})}
	b, err := yaml.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "prometheus.yaml")
	if err := os.WriteFile(file, b, 0o644); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("promtool", "check", "service-discovery", "--timeout=1s", file, "gpu-exporter-kubernetes").Output()
	if err != nil {
		t.Fatalf("promtool: %v\n%s", err, out)
	}
	var found []struct{ Labels map[string]string }
	if err := json.Unmarshal(out, &found); err != nil || len(found) != 3 {
		t.Fatalf("%d targets: %v\n%s", len(found), err, out)
	}
	var kept []map[string]string
	for _, f := range found {
		if len(f.Labels) > 0 {
			maps.DeleteFunc(f.Labels, func(k, _ string) bool { return strings.HasPrefix(k, "__") && k != "__address__" })
			kept = append(kept, f.Labels)
		}
	}
	want := map[string]string{"__address__": "192.0.2.1:9400", "instance": "192.0.2.1:9400", "job": "gpu-exporter", "node": "node-1"}
	if len(kept) != 1 || !maps.Equal(kept[0], want) {
		t.Errorf("kept %v, want %v", kept, want)
	}
}
