package assets_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/grafana/grafana-foundation-sdk/go/cog/plugins"
	schema "github.com/grafana/grafana-foundation-sdk/go/dashboard"

	"gpu-exporter/exporter/assets"
)

// dashboard is what the tests look at in Grafana's JSON.
type dashboard struct {
	UID, Title, Description string
	Tags                    []string
	Panels                  []struct {
		ID                       int
		Type, Title, Description string
		GridPos                  struct{ X, Y, W, H int }
		Datasource               struct{ Type, UID string }
		FieldConfig              struct {
			Defaults  struct{ Unit string }
			Overrides []struct {
				Properties []struct{ ID string }
			}
		}
		Targets []struct {
			Expr, LegendFormat, RefID string
			Range, Instant            bool
			Datasource                struct{ UID string }
		}
	}
	Templating struct {
		List []struct {
			Name, Type string
			Query      any
		}
	}
	Links []struct {
		Type string
		Tags []string
	}
}

// boards reads the files of all dashboards by path.
func boards(t *testing.T) map[string][]byte {
	t.Helper()
	m := map[string][]byte{}
	for _, path := range assets.List() {
		if !strings.HasPrefix(path, "dashboards/") {
			continue
		}
		b, err := assets.Files.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		m[path] = b
	}
	return m
}

// dashboards reads all dashboards by path.
func dashboards(t *testing.T) map[string]dashboard {
	t.Helper()
	m := map[string]dashboard{}
	for path, b := range boards(t) {
		var d dashboard
		if err := json.Unmarshal(b, &d); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		m[path] = d
	}
	if len(m) != 5 {
		t.Fatalf("%d dashboards", len(m))
	}
	return m
}

// TestDashboards: every panel says what it shows, in which unit and from which data source, and none lies on another.
func TestDashboards(t *testing.T) {
	uids := map[string]bool{}
	for path, d := range dashboards(t) {
		if uids[d.UID] || d.UID == "" || d.Title == "" || d.Description == "" || len(d.Panels) < 4 {
			t.Errorf("%s: UID %q, title %q, description %q, %d panels", path, d.UID, d.Title, d.Description, len(d.Panels))
		}
		uids[d.UID] = true
		if len(d.Links) != 1 || d.Links[0].Type != "dashboards" || len(d.Tags) != 1 || d.Links[0].Tags[0] != d.Tags[0] {
			t.Errorf("%s: no links to the others", path)
		}
		vars := map[string]string{}
		for _, v := range d.Templating.List {
			vars[v.Name] = v.Type
		}
		if vars["datasource"] != "datasource" || vars["host"] != "query" {
			t.Errorf("%s: variables %v", path, vars)
		}
		taken, ids := map[[2]int]string{}, map[int]bool{}
		for _, p := range d.Panels {
			for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
				for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
					if other, ok := taken[[2]int{x, y}]; ok || x >= 24 {
						t.Fatalf("%s: %s lies on %s or outside", path, p.Title, other)
					}
					taken[[2]int{x, y}] = p.Title
				}
			}
			if p.Type == "row" {
				continue
			}
			if ids[p.ID] || p.ID == 0 {
				t.Errorf("%s: %s has the number %d", path, p.Title, p.ID)
			}
			ids[p.ID] = true
			if p.Title == "" || p.Description == "" || p.FieldConfig.Defaults.Unit == "" || p.Datasource.UID != "${datasource}" || p.Datasource.Type != "prometheus" {
				t.Errorf("%s: %s: description %q, unit %q, data source %v", path, p.Title, p.Description, p.FieldConfig.Defaults.Unit, p.Datasource)
			}
			if len(p.Targets) == 0 || p.GridPos.W == 0 || p.GridPos.H == 0 {
				t.Errorf("%s: %s: %d queries, at %v", path, p.Title, len(p.Targets), p.GridPos)
			}
			refs := map[string]bool{}
			for _, q := range p.Targets {
				if q.LegendFormat == "" || q.Datasource.UID != "${datasource}" || q.Range == q.Instant || refs[q.RefID] || q.RefID == "" {
					t.Errorf("%s: %s: %+v", path, p.Title, q)
				}
				refs[q.RefID] = true
				for _, m := range variable.FindAllStringSubmatch(q.Expr, -1) {
					if vars[m[1]] == "" && !strings.HasPrefix(m[1], "__") {
						t.Errorf("%s: %s: no variable %s", path, p.Title, m[1])
					}
				}
			}
			if p.Type == "table" { // a unit for every column of values
				units := 0
				for _, o := range p.FieldConfig.Overrides {
					for _, x := range o.Properties {
						if x.ID == "unit" {
							units++
						}
					}
				}
				if units != len(p.Targets) {
					t.Errorf("%s: %s: %d units for %d columns", path, p.Title, units, len(p.Targets))
				}
			}
		}
	}
}

// TestDashboardsSchema: every field, query and option is one that Grafana's schema has, with a value that it allows. Grafana itself runs in no test.
func TestDashboardsSchema(t *testing.T) {
	plugins.RegisterDefaultPlugins()
	complaint := func(b string) string {
		//lint:ignore SA1019 files of this form are what every Grafana imports
		var d schema.Dashboard
		text := ""
		for _, err := range []error{d.UnmarshalJSONStrict([]byte(b)), d.Validate()} {
			if err != nil {
				text += err.Error() // empty where the list of errors is
			}
		}
		return text
	}
	for path, b := range boards(t) {
		if c := complaint(string(b)); c != "" {
			t.Errorf("%s: %s", path, c)
		}
		if complaint(strings.Replace(string(b), `"gridPos": {`, `"gridPos": {"z": 1, `, 1)) == "" {
			t.Errorf("%s: a field that Grafana does not have is not seen", path)
		}
	}
}

// TestDashboardsContract: the panels and variables ask only for what the exporter or the recording rules have.
func TestDashboardsContract(t *testing.T) {
	c := contract(t)
	n := 0
	for path, d := range dashboards(t) {
		for _, v := range d.Templating.List {
			if q, ok := v.Query.(string); ok && v.Type == "query" {
				m := values.FindStringSubmatch(q)
				if m == nil {
					t.Fatalf("%s: variable %s: %s", path, v.Name, q)
				}
				for _, complaint := range complaints("sum by ("+m[2]+") ("+m[1]+")", c) {
					t.Errorf("%s: variable %s: %s", path, v.Name, complaint)
				}
			}
		}
		for _, p := range d.Panels {
			for _, q := range p.Targets {
				n++
				for _, complaint := range complaints(q.Expr, c) {
					t.Errorf("%s: %s: %s", path, p.Title, complaint)
				}
			}
		}
	}
	t.Logf("%d queries", n)
}
