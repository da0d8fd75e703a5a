package assets_test

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"gpu-exporter/exporter/assets"
)

// rule is an alert or a recording rule.
type rule struct {
	Record, Alert, Expr, For string
	Labels, Annotations      map[string]string
}

// rules reads all rules.
func rules(t *testing.T) []rule {
	t.Helper()
	var list []rule
	for _, path := range assets.List() {
		if !strings.HasPrefix(path, "rules/") {
			continue
		}
		b, err := fs.ReadFile(assets.Files, path)
		if err != nil {
			t.Fatal(err)
		}
		var file struct {
			Groups []struct{ Rules []rule }
		}
		if err := yaml.Unmarshal(b, &file); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		for _, g := range file.Groups {
			list = append(list, g.Rules...)
		}
	}
	if len(list) < 30 {
		t.Fatalf("%d rules", len(list))
	}
	return list
}

// TestRules has Prometheus itself parse the rules and run their unit tests: each alert fires on a sick host and none on a healthy one.
func TestRules(t *testing.T) {
	for _, args := range [][]string{
		{"check", "rules", "rules/gpu-exporter.alerts.yaml", "rules/gpu-exporter.rules.yaml"},
		{"test", "rules", "testdata/alerts_test.yaml", "testdata/rules_test.yaml"},
	} {
		out, err := exec.Command("promtool", args...).CombinedOutput()
		if err != nil {
			t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
}

// TestEveryRuleIsTested fails when a rule is added without a case: an alert must fire on the sick host, and the healthy one must have the series it
// looks at, so that it is silent because all is well and not because there is nothing.
func TestEveryRuleIsTested(t *testing.T) {
	var alerts struct {
		Tests []struct {
			Series []struct{ Series string } `json:"input_series"`
			Exprs  []struct {
				Samples []struct{ Labels string } `json:"exp_samples"`
			} `json:"promql_expr_test"`
		}
	}
	b, err := os.ReadFile("testdata/alerts_test.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(b, &alerts); err != nil || len(alerts.Tests) < 2 {
		t.Fatalf("%d tests: %v", len(alerts.Tests), err)
	}
	recorded, err := os.ReadFile("testdata/rules_test.yaml")
	if err != nil {
		t.Fatal(err)
	}
	healthy, fired := map[string]bool{}, map[string]bool{}
	for _, s := range alerts.Tests[0].Series {
		name, _, _ := strings.Cut(s.Series, "{")
		healthy[name] = true
	}
	for _, s := range alerts.Tests[1].Exprs[0].Samples {
		fired[s.Labels] = true
	}
	for _, r := range rules(t) {
		if r.Record != "" {
			if !strings.Contains(string(recorded), r.Record+"{") && !strings.Contains(string(recorded), "("+r.Record+",") {
				t.Errorf("%s has no test", r.Record)
			}
			continue
		}
		if !fired[`{alertname="`+r.Alert+`"}`] {
			t.Errorf("%s has no case in which it fires", r.Alert)
		}
		for _, name := range family.FindAllString(grouping.ReplaceAllString(quoted.ReplaceAllString(selector.ReplaceAllString(r.Expr, "$1"), ""), ""), -1) {
			if !healthy[name] {
				t.Errorf("%s: the healthy host has no %s", r.Alert, name)
			}
		}
	}
}

// TestRulesContract: the rules ask only for what the exporter has, and alerts name whom they are about and what to do.
func TestRulesContract(t *testing.T) {
	c := contract(t)
	for _, r := range rules(t) {
		for _, complaint := range complaints(r.Expr, c) {
			t.Errorf("%s%s: %s", r.Alert, r.Record, complaint)
		}
		if r.Alert == "" {
			continue
		}
		text := r.Annotations["description"]
		switch {
		case strings.HasPrefix(r.Alert, "GPUExporter"):
			if !strings.Contains(text, "$labels.instance") {
				t.Errorf("%s: the description names no instance", r.Alert)
			}
		case strings.Contains(text, "$labels.container_name"):
			if !strings.Contains(text, "$labels.image_name") || !strings.Contains(text, "$labels.host_ip") {
				t.Errorf("%s: the description names no image or host", r.Alert)
			}
		default:
			if !strings.Contains(text, "$labels.gpu_device_uuid") || !strings.Contains(text, "$labels.host_ip") || r.Annotations["containers"] == "" {
				t.Errorf("%s: it names no GPU, host or containers", r.Alert)
			}
		}
		if !slices.Contains([]string{"info", "warning", "critical"}, r.Labels["severity"]) {
			t.Errorf("%s: severity %q", r.Alert, r.Labels["severity"])
		}
	}
}

func TestExport(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	for range 2 { // what is there already and the same is no obstacle
		if err := assets.Export(dir, false); err != nil {
			t.Fatal(err)
		}
	}
	n := 0
	for _, path := range assets.List() {
		n++
		got, err := os.ReadFile(filepath.Join(dir, path))
		want, _ := assets.Files.ReadFile(path)
		if err != nil || len(want) == 0 || string(got) != string(want) {
			t.Errorf("%s: %d bytes, want %d: %v", path, len(got), len(want), err)
		}
	}
	if n < 2 {
		t.Errorf("%d assets", n)
	}
	mine := filepath.Join(dir, "rules/gpu-exporter.rules.yaml")
	if err := os.WriteFile(mine, []byte("mine"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := assets.Export(dir, false); err == nil || !strings.Contains(err.Error(), mine) {
		t.Errorf("a changed file is replaced without --force: %v", err)
	}
	if b, _ := os.ReadFile(mine); string(b) != "mine" {
		t.Errorf("it holds %q", b)
	}
	if err := assets.Export(dir, true); err != nil {
		t.Error(err)
	}
	if b, _ := os.ReadFile(mine); string(b) == "mine" {
		t.Error("--force does not replace it")
	}
}
