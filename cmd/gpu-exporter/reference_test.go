package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/alecthomas/kingpin/v2"
	"sigs.k8s.io/yaml"

	"gpu-exporter/exporter/assets"
	"gpu-exporter/exporter/metrics"
	"gpu-exporter/exporter/why"
)

//go:generate env CGO_ENABLED=0 go test -count=1 -run ^TestReference$ . -write

var write = flag.Bool("write", false, "write the pages of docs that come from the code instead of comparing them")

const generated = "<!-- Written by make generate: change the code that it is made of. -->\n"

// TestReference: the pages of reference say what the code says.
func TestReference(t *testing.T) {
	for name, page := range map[string]string{"flags.md": flagsPage(t), "metrics.md": metricsPage(t), "alerts.md": alertsPage(t), "why.md": whyPage(), "licences.md": licencesPage(t)} {
		path := root + "docs/" + name
		if *write {
			if err := os.WriteFile(path, []byte(page), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		have, want := strings.Split(string(b), "\n"), strings.Split(page, "\n")
		for i := range max(len(have), len(want)) {
			if i >= len(have) || i >= len(want) || have[i] != want[i] {
				t.Errorf("docs/%s differs from the code at line %d: make generate", name, i+1)
				break
			}
		}
	}
}

// TestExitCodes: the README has the exit code of every class of why.
func TestExitCodes(t *testing.T) {
	b, err := os.ReadFile(root + "README.md")
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Join(strings.Fields(string(b)), " ")
	for _, c := range why.Causes {
		if code := fmt.Sprintf(" %d %s,", c.Class.Exit, c.Class.Name); !strings.Contains(text, code) {
			t.Errorf("the README has no %q", code)
		}
	}
}

// commandLine is the command line, as kingpin knows it.
func commandLine(t *testing.T) *kingpin.ApplicationModel {
	t.Helper()
	var m *kingpin.ApplicationModel
	err := run(nil, func(app *kingpin.Application, _ []string) (string, error) {
		m = app.Model()
		return "", errors.New("seen enough")
	})
	if m == nil {
		t.Fatal(err)
	}
	return m
}

// cell is a text as a cell of a table.
func cell(s string) string {
	return strings.NewReplacer("|", `\|`, "<", "&lt;", "\n", " ").Replace(strings.TrimSpace(s))
}

func flagsPage(t *testing.T) string {
	m := commandLine(t)
	var b strings.Builder
	fmt.Fprintf(&b, "%s# Commands and flags\n\n%s Without a command it serves. A flag that is on or off\n"+
		"is cleared with `no-` before its name and takes no value. Every command takes the flags of all commands and its own.\n\n"+
		"What is wrong is one line on stderr that names the flag. Exit code 2: a flag, its value or a file of configuration is wrong. Exit code 1: what was asked for\n"+
		"could not be done, as listening where another program does. Other codes are answers of the command.\n\n", generated, m.Help)
	n := 0
	table := func(flags []*kingpin.FlagModel) {
		first := true
		for _, f := range flags {
			if f.Hidden || strings.HasPrefix(f.Name, "help-") || strings.HasPrefix(f.Name, "completion-") {
				continue
			}
			if first {
				b.WriteString("| flag | default | meaning |\n|---|---|---|\n")
				first = false
			}
			n++
			name, value := "`--"+f.Name+"`", strings.Join(f.Default, ", ")
			if f.Short != 0 {
				name += fmt.Sprintf(", `-%c`", f.Short)
			}
			if f.IsBoolFlag() && value == "" {
				value = "off"
			}
			if value != "" {
				value = "`" + value + "`"
			}
			if f.Help == "" {
				t.Errorf("--%s has no help", f.Name)
			}
			fmt.Fprintf(&b, "| %s | %s | %s |\n", name, cell(value), cell(f.HelpWithEnvar()))
		}
		b.WriteString("\n")
	}
	b.WriteString("## Flags of all commands\n\n")
	table(m.Flags)
	for _, c := range m.FlattenedCommands() {
		if c.Hidden {
			continue
		}
		if c.Help == "" {
			t.Errorf("the command %s has no help", c.FullCommand)
		}
		fmt.Fprintf(&b, "## gpu-exporter %s\n\n%s\n\n", c.FullCommand, c.Help)
		for _, a := range c.Args {
			if a.Help == "" {
				t.Errorf("%s: the argument %s has no help", c.FullCommand, a.Name)
			}
			fmt.Fprintf(&b, "`%s`: %s\n\n", strings.ToUpper(a.Name), a.HelpWithEnvar())
		}
		table(c.Flags)
	}
	if n < 30 {
		t.Errorf("%d flags", n)
	}
	return strings.TrimRight(b.String(), "\n") + "\n"
}

func whyPage() string {
	return generated + "# What gpu-exporter why finds\n\nWhat is broken or refused is said first, then what costs most time. A condition on load must hold for half a minute of the last ten, and\n" +
		"now or for a tenth of the time. The exit code is that of the first finding; 0: nothing is found, 1: the command failed, 2: it cannot be told.\n\n" + why.Table()
}

// sections are the parts of the page of metrics. A family is in the first one whose labels it has.
var sections = []struct {
	title, text string
	labels      []string
}{
	{"Processes", "One series per process and GPU, outside containers with the three container labels empty. The series with an empty `process_pid` has what no " +
		"process accounts for, so that memory, energy and PCIe bytes add up to the device's.", []string{"process_pid"}},
	{"Containers", "One series per container; the container labels are empty for the host's own processes.", []string{"container_id"}},
	{"Devices", "One series per GPU.", []string{"gpu_device_uuid"}},
	{"The exporter", "Besides these there are `gpu_exporter_build_info`, `go_…` and `process_…` of the Prometheus client library, read every 10 s.", nil},
}

// labelHelp says what each label is.
var labelHelp = map[string]string{
	"gpu_device_uuid": "NVML's UUID, `GPU-…`", "gpu_device_name": "product name", "gpu_pci_bus_id": "such as `0000:0a:00.0`",
	"host_ip":      "`--host-ip`, else the address of the default route",
	"container_id": "first 12 digits", "container_name": "without the leading slash", "image_name": "as the container was started with",
	"process_pid":  "PID on the host",
	"process_name": "comm of the process", "command": "first 80 characters of the command line", "direction": "`host_to_device` or `device_to_host`; of an NVLink `tx` or `rx`",
	"container_full_id": "64 digits", "image_id": "the engine's digest of the image", "gpu_request": "how GPUs were asked for, with `;` between: `all`, `count=2`, `device=0,1`, `cdi:…`, `env:…`, `node:…`, `privileged`",
	"runtime": "OCI runtime", "compose_project": "label of docker compose", "compose_service": "label of docker compose", "pod": "label of the kubelet", "namespace": "label of the kubelet",
	"source": "of an assignment `device_requests`, `cdi`, `env` or `device_node`; of PCIe traffic `gpm`, `fields` or `throughput`",
	"reason": "of an end `exit`, `error` or `signal`; of throttling NVML's reason, such as `sw_power_cap`; of a restart `exit`, `crash`, `hang`, `stuck`, `garbage`, `memory` " +
		"or `library`; of visibility `ok`, `hidepid`, `proc_unreadable`, `hangs` or `pid_namespace`",
	"node": "`gpu`, `ctl`, `uvm` or `caps`", "result": "`ok`, or the errno in lower case, such as `eperm`", "call": "name of the driver's or NVML's call", "status": "the driver's status, such as `no_memory`",
	"driver_version": "such as `580.159.04`", "vbios": "version", "serial": "of the board", "index": "NVML's", "minor": "N of /dev/nvidiaN", "architecture": "such as `hopper`",
	"cuda_capability": "such as `9.0`", "mig_mode": "whether MIG is on", "domain": "`graphics`, `sm`, `memory` or `video`",
	"type": "of ECC errors `volatile` or `aggregate`; of NVLink errors `replay`, `recovery`, `crc_flit` or `crc_data`", "severity": "`corrected` or `uncorrected`",
	"cause": "of pages `single_bit` or `double_bit`; of rows `corrected` or `uncorrected`", "xid": "number", "fan": "number", "link": "number",
	"gpu_mig_uuid": "`MIG-…`", "profile": "such as `1g.18gb`", "gpu_instance": "id", "compute_instance": "id",
	"mode": "`fentry`, `tracepoint` or `off`", "library": "path of the libcuda",
}

// units are the suffixes of names that say their unit.
var units = []struct{ suffix, unit string }{
	{"_bytes", "bytes"}, {"_seconds", "seconds"}, {"_percent", "0 to 100"}, {"_ratio", "0 to 1"}, {"_celsius", "°C"}, {"_watts", "W"}, {"_joules", "J"},
	{"_hertz", "Hz"}, {"_info", "always 1"}, {"_up", "0 or 1"}, {"_reason", "0 or 1"}, {"_pending", "0 or 1"}, {"_failure", "0 or 1"},
	{"_visibility", "0 or 1"}, {"_assigned", "always 1"}, {"_state", "0 to 15"}, {"_generation", "number"}, {"_generation_max", "number"},
}

func unit(name string) string {
	name = strings.TrimSuffix(name, "_total")
	for _, u := range units {
		if strings.HasSuffix(name, u.suffix) {
			return u.unit
		}
	}
	return "count"
}

func metricsPage(t *testing.T) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s# Metrics\n\nUnits are base units. What a device, driver or kernel does not tell has no series: absent is never zero. A series that is gone is not in the next\n"+
		"scrape, but the counters of a gone process stay for `--linger`. A reading older than three of its periods is dropped.\n\n"+
		"Source: NVML is the driver's library, GPM its profiling counters (Hopper and later), tracer the kernel's events (`--tracer`), libcuda probes those of\n"+
		"`--probe`. How they are put together: [attribution](attribution.md).\n", generated)
	all, used := metrics.Families(), map[string]bool{}
	slices.SortFunc(all, func(x, y metrics.Family) int { return strings.Compare(x.Name, y.Name) })
	for _, s := range sections {
		var mine []metrics.Family
		all = slices.DeleteFunc(all, func(f metrics.Family) bool {
			if s.labels != nil && !slices.Contains(f.Labels, s.labels[0]) {
				return false
			}
			mine = append(mine, f)
			return true
		})
		base := slices.Clone(mine[0].Labels)
		for _, f := range mine {
			base = slices.DeleteFunc(base, func(l string) bool { return !slices.Contains(f.Labels, l) })
		}
		fmt.Fprintf(&b, "\n## %s\n\n%s", s.title, s.text)
		if len(base) > 0 {
			fmt.Fprintf(&b, " Every series has the labels `%s`.", strings.Join(base, "`, `"))
		}
		b.WriteString("\n\n| name | type | unit | further labels | source | meaning |\n|---|---|---|---|---|---|\n")
		for _, f := range mine {
			more := ""
			for _, l := range f.Labels {
				used[l] = true
				if !slices.Contains(base, l) {
					more += ", `" + l + "`"
				}
			}
			if f.Help == "" || f.Source == "" {
				t.Errorf("%s has no help or no source", f.Name)
			}
			fmt.Fprintf(&b, "| `%s` | %s | %s | %s | %s | %s |\n", f.Name, f.Type, unit(f.Name), strings.TrimPrefix(more, ", "), f.Source, cell(f.Help))
		}
	}
	b.WriteString("\n## Labels\n\n| label | value |\n|---|---|\n")
	names := make([]string, 0, len(labelHelp))
	for l := range labelHelp {
		names = append(names, l)
		if !used[l] {
			t.Errorf("no family has the label %s", l)
		}
	}
	for l := range used {
		if labelHelp[l] == "" {
			t.Errorf("the label %s is not explained", l)
		}
	}
	slices.Sort(names)
	for _, l := range names {
		fmt.Fprintf(&b, "| `%s` | %s |\n", l, cell(labelHelp[l]))
	}
	return b.String()
}

// What a template of an alert puts in.
var (
	labelTemplate = regexp.MustCompile(`\{\{ *\$labels\.(\w+) *\}\}`)
	valueTemplate = regexp.MustCompile(`\{\{[^}]*\$value[^}]*\}\}`)
)

func alertsPage(t *testing.T) string {
	type rule struct {
		Alert, Record, Expr, For string
		Labels, Annotations      map[string]string
	}
	read := func(path string) (groups []struct {
		Name  string
		Rules []rule
	}) {
		b, err := assets.Files.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var file struct {
			Groups *[]struct {
				Name  string
				Rules []rule
			}
		}
		file.Groups = &groups
		if err := yaml.Unmarshal(b, &file); err != nil || len(groups) == 0 {
			t.Fatalf("%s: %d groups: %v", path, len(groups), err)
		}
		return groups
	}
	// plain puts the names of labels, in capitals, where Prometheus puts their values.
	plain := func(s string) string {
		return cell(valueTemplate.ReplaceAllString(labelTemplate.ReplaceAllStringFunc(s, func(m string) string {
			return strings.ToUpper(labelTemplate.FindStringSubmatch(m)[1])
		}), "N"))
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s# Alerts and recording rules\n\n`gpu-exporter assets export DIR` writes them to `DIR/rules`. Words in capitals are labels of the series, N is the value. An alert about a GPU has the\n"+
		"annotation `containers`, which names who is on it.\n", generated)
	for _, g := range read("rules/gpu-exporter.alerts.yaml") {
		fmt.Fprintf(&b, "\n## %s\n", g.Name)
		for _, r := range g.Rules {
			severity := r.Labels["severity"]
			if p := r.Labels["priority"]; p != "" {
				severity += ", " + p
			}
			if r.For == "" {
				r.For = "at once"
			} else {
				r.For = "for " + r.For
			}
			fmt.Fprintf(&b, "\n### %s\n\n%s, %s: %s.\n\n%s\n\n```\n%s\n```\n", r.Alert, severity, r.For, plain(r.Annotations["summary"]), plain(r.Annotations["description"]),
				strings.TrimSpace(r.Expr))
		}
	}
	for _, g := range read("rules/gpu-exporter.rules.yaml") {
		fmt.Fprintf(&b, "\n## %s\n", g.Name)
		for _, r := range g.Rules {
			fmt.Fprintf(&b, "\n### %s\n\n```\n%s\n```\n", r.Record, strings.TrimSpace(r.Expr))
		}
	}
	if strings.Contains(b.String(), "{{") {
		t.Error("docs/alerts.md would have a template that is not understood")
	}
	return b.String()
}
