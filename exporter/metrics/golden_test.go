package metrics_test

import (
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"gpu-exporter/exporter/metrics"
)

var update = flag.Bool("update", false, "write the golden files anew")

// golden compares text with a file of testdata, line by line.
func golden(t *testing.T, name, text string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	got, want := strings.Split(text, "\n"), strings.Split(string(b), "\n")
	for _, line := range want {
		if !slices.Contains(got, line) {
			t.Errorf("%s: gone: %s", path, line)
		}
	}
	for _, line := range got {
		if !slices.Contains(want, line) {
			t.Errorf("%s: new: %s", path, line)
		}
	}
	if !t.Failed() && text != string(b) {
		t.Errorf("%s: the same lines in another order or number", path)
	}
	if t.Failed() {
		t.Log("names, types and labels are what dashboards are built on; if the change is meant: go test ./exporter/metrics -update")
	}
}

// lines has every family as "name type label,label…".
func lines() []string {
	var list []string
	for _, f := range metrics.Families() {
		list = append(list, strings.TrimSpace(f.Name+" "+f.Type+" "+strings.Join(f.Labels, ",")))
	}
	return list
}

// TestGoldenFamilies: every family that there may be, with its type and labels.
func TestGoldenFamilies(t *testing.T) {
	list := lines()
	slices.Sort(list)
	if n := len(slices.Compact(slices.Clone(list))); n != len(list) {
		t.Errorf("%d families, %d of them distinct", len(list), n)
	}
	golden(t, "families.txt", strings.Join(list, "\n")+"\n")
}

// TestGoldenDemo: the exposition of the real host in the built-in recording, 40 s into it, every value included; and each family of it is one of
// the list above, of the same type and with the same labels.
func TestGoldenDemo(t *testing.T) {
	body := scrape(t, demo(t))
	golden(t, "demo.txt", body)
	known := map[string][]string{}
	for _, line := range lines() {
		words := append(strings.Fields(line), "")
		known[words[0]] = words[1:3]
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for name, f := range families {
		want, ok := known[name]
		if !ok {
			t.Errorf("%s is not in the list", name)
			continue
		}
		if kind := strings.ToLower(f.GetType().String()); kind != want[0] {
			t.Errorf("%s is a %s, want %s", name, kind, want[0])
		}
		labels := slices.DeleteFunc(strings.Split(want[1], ","), func(l string) bool { return l == "" })
		slices.Sort(labels)
		for _, m := range f.GetMetric() {
			var got []string
			for _, l := range m.GetLabel() {
				got = append(got, l.GetName())
			}
			if slices.Sort(got); !slices.Equal(got, labels) {
				t.Errorf("%s has labels %v, want %v", name, got, labels)
			}
		}
	}
}
