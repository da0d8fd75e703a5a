package assets_test

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// contract is every family that the exporter exposes, with its labels: the golden file of package metrics. Recording rules add theirs.
func contract(t *testing.T) map[string][]string {
	t.Helper()
	b, err := os.ReadFile("../metrics/testdata/families.txt")
	if err != nil {
		t.Fatal(err)
	}
	// up is Prometheus' own; instance and job it adds to every series.
	c := map[string][]string{"up": target}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		labels := slices.Clone(target)
		if len(f) == 3 {
			labels = append(labels, strings.Split(f[2], ",")...)
		}
		c[f[0]] = labels
		if f[1] == "histogram" || f[1] == "summary" {
			c[f[0]+"_bucket"], c[f[0]+"_sum"], c[f[0]+"_count"] = append(slices.Clone(labels), "le"), labels, labels
		}
	}
	if len(c) < 90 {
		t.Fatalf("the contract has %d families", len(c))
	}
	for _, r := range rules(t) {
		if r.Record == "" {
			continue
		}
		by := grouping.FindStringSubmatch(r.Expr)
		if by == nil {
			t.Fatalf("%s: labels are not said by a grouping", r.Record)
		}
		c[r.Record] = append(slices.Clone(target), identifier.FindAllString(by[1], -1)...)
	}
	return c
}

var (
	target     = []string{"instance", "job"}
	identifier = regexp.MustCompile(`[a-zA-Z_:][a-zA-Z0-9_:]*`)
	quoted     = regexp.MustCompile(`"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'`)
	selector   = regexp.MustCompile(`([a-zA-Z_:][a-zA-Z0-9_:]*)\s*\{([^}]*)\}`)
	matcher    = regexp.MustCompile(`([a-zA-Z_][a-zA-Z0-9_]*)\s*(?:=~|!~|!=|=)`)
	grouping   = regexp.MustCompile(`\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)`)
	relabel    = regexp.MustCompile(`\blabel_(?:replace|join)\(`)
	variable   = regexp.MustCompile(`\$(\w+)`)                           // of Grafana
	values     = regexp.MustCompile(`^label_values\((.*), ([a-z_]+)\)$`) // Grafana's function for variables
	family     = regexp.MustCompile(`\b(?:gpu|container|host|project)_?[a-z0-9_]*:[a-z0-9_:]+|\bgpu_[a-z0-9_]+|\bup\b`)
)

// complaints says which metrics and labels of an expression the exporter does not have. Whether it parses is for Prometheus to say.
func complaints(expr string, contract map[string][]string) []string {
	var list, labels []string
	made := map[string]bool{} // by label_replace
	if relabel.MatchString(expr) {
		for _, q := range quoted.FindAllString(expr, -1) {
			made[strings.Trim(q, `"'`)] = true
		}
	}
	expr = quoted.ReplaceAllString(expr, `""`)
	for _, m := range selector.FindAllStringSubmatch(expr, -1) {
		for _, l := range matcher.FindAllStringSubmatch(m[2], -1) {
			if known, ok := contract[m[1]]; ok && !slices.Contains(known, l[1]) {
				list = append(list, m[1]+" has no label "+l[1])
			}
		}
	}
	expr = selector.ReplaceAllString(expr, "$1")
	for _, m := range grouping.FindAllStringSubmatch(expr, -1) {
		labels = append(labels, identifier.FindAllString(m[1], -1)...)
	}
	expr = grouping.ReplaceAllString(expr, "")
	known := map[string]bool{}
	names := family.FindAllString(expr, -1)
	for _, n := range names {
		if _, ok := contract[n]; !ok {
			list = append(list, "no metric "+n)
		}
		for _, l := range contract[n] {
			known[l] = true
		}
	}
	if len(names) == 0 {
		list = append(list, "no metric at all")
	}
	for _, l := range labels {
		if !known[l] && !made[l] {
			list = append(list, "no metric in it has the label "+l)
		}
	}
	return list
}

// The check itself finds what it is for.
func TestComplaints(t *testing.T) {
	c := map[string][]string{"up": target, "gpu_up": {"host_ip", "gpu_device_uuid"}, "gpu:busy:avg": {"host_ip"}, "gpu_x": {"xid"}}
	for expr, want := range map[string]string{
		`sum by (host_ip) (gpu_up{host_ip=~"a{1}"})`:                 "",
		`gpu_up * on (host_ip) group_left (xid) gpu_x`:               "",
		`label_replace(gpu_up, "name", "$1", "host_ip", "(.*)")`:     "",
		`sum by (name) (label_replace(gpu_up, "name", "x", "", ""))`: "",
		`gpu_down`:                              "no metric gpu_down",
		`gpu_up{xid="1"} + gpu_x`:               "gpu_up has no label xid",
		`sum by (node) (gpu_up)`:                "no metric in it has the label node",
		`rate(gpu_up[5m]) / gpu:busy:avg5m`:     "no metric gpu:busy:avg5m",
		`vector(1)`:                             "no metric at all",
		`max(gpu:busy:avg{gpu_device_uuid=""})`: "gpu:busy:avg has no label gpu_device_uuid",
	} {
		if got := strings.Join(complaints(expr, c), ", "); got != want {
			t.Errorf("%s: %q, want %q", expr, got, want)
		}
	}
}
