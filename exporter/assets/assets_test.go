package assets_test

import (
	"io/fs"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"gpu-exporter/exporter/assets"
)

// TestRules has Prometheus itself parse the rules and run their unit tests: each alert fires on a sick host and none on a healthy one.
func TestRules(t *testing.T) {
	for _, args := range [][]string{
		{"check", "rules", "rules/gpu-exporter.alerts.yaml"},
		{"test", "rules", "testdata/alerts_test.yaml"},
	} {
		out, err := exec.Command("promtool", args...).CombinedOutput()
		if err != nil {
			t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
}

// TestEveryAlertIsTested fails when an alert is added without a firing and a silent case.
func TestEveryAlertIsTested(t *testing.T) {
	rules, err := fs.ReadFile(assets.Files, "rules/gpu-exporter.alerts.yaml")
	if err != nil {
		t.Fatal(err)
	}
	cases, err := os.ReadFile("testdata/alerts_test.yaml")
	if err != nil {
		t.Fatal(err)
	}
	names := regexp.MustCompile(`- alert: (\w+)`).FindAllStringSubmatch(string(rules), -1)
	if len(names) == 0 {
		t.Fatal("no alerts found")
	}
	for _, n := range names {
		if !strings.Contains(string(cases), "alertname: "+n[1]+"}") {
			t.Errorf("%s has no case in which it is silent", n[1])
		}
		if !strings.Contains(string(cases), `{alertname="`+n[1]+`"}`) {
			t.Errorf("%s has no case in which it fires", n[1])
		}
	}
}
