package table

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/charmbracelet/x/ansi"

	"gpu-exporter/exporter/view"
	"gpu-exporter/nvml/frame"
)

const gib = 1 << 30

var now = time.Unix(1_800_000_000, 0)

// hostile is a container name that would clear the screen, set the title, and go backwards; in two of the ways to write an escape sequence.
var hostile = "\x1b[2J\x1b]0;owned\x07\u009b31m\u202eevil\r\n" + strings.Repeat("x", 300)

func sample() *view.Snapshot {
	id := func(c string) string { return strings.Repeat(c, 64) }
	w := func(gpu, pid int, container string, util float64, mem uint64) view.Workload {
		x := view.Workload{GPU: gpu, GPUUUID: fmt.Sprint("GPU-", gpu), PID: pid, Memory: frame.Some(mem)}
		if pid != 0 {
			x.ProcessName, x.Command, x.Utilization, x.MaxUtilization = "python3", fmt.Sprintf("python3 /w/%d.py", pid), frame.Some(util), frame.Some(util+1)
		}
		if container != "" {
			x.ContainerID, x.ContainerName, x.Image = id(container[:1]), container, "repo/"+container+":v1"
		}
		return x
	}
	s := &view.Snapshot{Time: now, Devices: []view.Device{
		{Index: 0, UUID: "GPU-0", Name: "NVIDIA H200", State: "ok", Utilization: frame.Some(97.4), MaxUtilization: frame.Some(100.0), MemoryUsed: frame.Some[uint64](21 * gib),
			MemoryTotal: frame.Some[uint64](140 * gib), Power: frame.Some(524.3), PowerLimit: frame.Some(700.0), Temperature: frame.Some(53.0), Throttle: []string{"gpu_idle", "sw_power_cap"}},
		{Index: 1, UUID: "GPU-1", Name: "NVIDIA H200", State: "lost", Reason: "fallen off the bus", MemoryTotal: frame.Some[uint64](140 * gib)}},
		Workloads: []view.Workload{w(0, 100, "train", 60, 4*gib), w(0, 300, "serve", 5, 16*gib), w(0, 42, "", 30, gib/2), w(0, 0, "", 0, gib/2),
			w(1, 101, "train", 20, 3*gib), w(1, 7, "", 0, 1000)},
		Containers: []view.Container{{ID: id("t"), Started: now.Add(-90 * time.Minute)}, {ID: id("s"), Started: now.Add(-75 * time.Hour)}}}
	s.Workloads[5].Utilization = view.Number{} // not supported
	return s
}

// golden compares lines with a file of testdata; UPDATE=1 writes it.
func golden(t *testing.T, name string, lines []string) {
	t.Helper()
	got, path := strings.Join(lines, "\n")+"\n", "testdata/"+name+".txt"
	if os.Getenv("UPDATE") != "" {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil || got != string(want) {
		t.Errorf("%v\ngot:\n%s\nwant:\n%s", err, got, want)
	}
}

// TestGolden: the tables as people see them, wide and in 80 and 40 columns.
func TestGolden(t *testing.T) {
	s := sample()
	rows := Rows(s, "gpu", "")
	for _, width := range []int{0, 80, 40} {
		golden(t, fmt.Sprint("devices-", width), Devices(s, nil).Lines(width))
		golden(t, fmt.Sprint("processes-", width), Processes(rows, now, nil).Lines(width))
		golden(t, fmt.Sprint("tree-", width), Processes(Tree(rows, "gpu"), now, nil).Lines(width))
	}
	for _, line := range append(Devices(s, nil).Lines(80), Processes(rows, now, nil).Lines(80)...) {
		if n := ansi.StringWidth(line); n > 80 {
			t.Errorf("%d columns: %s", n, line)
		}
	}
}

// TestHostile: whatever a container calls itself, each line is one line of graphic characters.
func TestHostile(t *testing.T) {
	s := sample()
	for i := range s.Workloads {
		w := &s.Workloads[i]
		w.ContainerName, w.ContainerID, w.Image, w.ProcessName, w.Command, w.GPUUUID = hostile, hostile, hostile, hostile, hostile, hostile
	}
	for i := range s.Devices {
		d := &s.Devices[i]
		d.UUID, d.Name, d.State, d.Reason, d.Throttle = hostile, hostile, hostile, hostile, []string{hostile}
	}
	rows := Rows(s, "name", "evil")
	if len(rows) != len(s.Workloads) {
		t.Fatalf("%d rows", len(rows))
	}
	for _, width := range []int{0, 80} {
		for _, lines := range [][]string{Devices(s, nil).Lines(width), Processes(rows, now, nil).Lines(width), Processes(Tree(rows, "mem"), now, nil).Lines(width)} {
			for _, line := range lines {
				if i := strings.IndexFunc(line, func(r rune) bool { return !unicode.IsGraphic(r) }); i >= 0 {
					t.Errorf("not graphic at %d: %q", i, line)
				}
				if n := ansi.StringWidth(line); n > 400 {
					t.Errorf("%d columns: %q", n, line)
				}
			}
		}
	}
}

// TestWide: characters of two columns and of none keep the columns aligned.
func TestWide(t *testing.T) {
	table := &Table{Columns: []Column{{Title: "A"}, {Title: "B"}}, Rows: [][]string{{"模型", "1"}, {"é\u0301", "2"}, {"abcdef", "3"}}}
	for i, line := range table.Lines(0) {
		if n := ansi.StringWidth(line); n != 9 {
			t.Errorf("line %d has %d columns: %q", i, n, line)
		}
	}
}

// TestOptional: an optional column without a value is not there, and zero is a value.
func TestOptional(t *testing.T) {
	columns := []Column{{Title: "A"}, {Title: "B", Optional: true}}
	if got := (&Table{Columns: columns, Rows: [][]string{{"x", ""}, {"", ""}}}).Lines(0); strings.Join(got, "|") != "A|x|-" {
		t.Errorf("%q", got)
	}
	if got := (&Table{Columns: columns, Rows: [][]string{{"x", "0%"}}}).Lines(0); strings.Join(got, "|") != "A  B|x  0%" {
		t.Errorf("%q", got)
	}
}

func pids(rows []Row) string {
	var list []string
	for _, r := range rows {
		list = append(list, fmt.Sprint(r.PID))
	}
	return strings.Join(list, " ")
}

// TestSort: every key, with what has no value last.
func TestSort(t *testing.T) {
	want := map[string]string{"gpu": "100 42 300 0 101 7", "util": "100 42 101 300 0 7", "max": "100 42 101 300 7 0", "mem": "300 100 101 42 0 7",
		"name": "300 100 101 42 0 7", "pid": "7 42 100 101 300 0", "age": "100 101 300 42 0 7"}
	for _, key := range Keys {
		if got := pids(Rows(sample(), key, "")); got != want[key] {
			t.Errorf("%s: %s, want %s", key, got, want[key])
		}
	}
}

// TestFilter: names, ids, images, commands and PIDs, whatever the case.
func TestFilter(t *testing.T) {
	for text, want := range map[string]string{"": "100 42 300 0 101 7", "TRAIN": "100 101", "ssss": "300", "repo/": "100 300 101", "/w/42": "42", "GPU-1": "101 7", "nobody": ""} {
		if got := pids(Rows(sample(), "gpu", text)); got != want {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
}

// TestTree: a container above its processes, on all its GPUs, with their sums.
func TestTree(t *testing.T) {
	rows := Tree(Rows(sample(), "gpu", ""), "mem")
	var got []string
	for _, r := range rows {
		got = append(got, fmt.Sprintf("%s/%d/%d/%s/%s", r.Label(), r.PID, r.Depth, Size(r.Memory), percent(r.Utilization)))
	}
	want := "serve/0/0/16.0GiB/5% python3/300/1/16.0GiB/5% train/0/0/7.00GiB/80% python3/100/1/4.00GiB/60% python3/101/1/3.00GiB/20% " +
		"(host)/0/0/512MiB/30% python3/42/1/512MiB/30% python3/7/1/1000B/ (unattributed)/0/0/512MiB/"
	if s := strings.Join(got, " "); s != want {
		t.Errorf("got  %s\nwant %s", s, want)
	}
	if total := rows[2].Total.V; total != 280*gib {
		t.Errorf("the container on two GPUs may use %d", total)
	}
}

// TestTraced: what only the tracer knows has columns of its own; a container has the sums of its processes, and what is counted of it as a whole.
func TestTraced(t *testing.T) {
	s := sample()
	for i := range s.Workloads {
		if w := &s.Workloads[i]; w.ContainerName == "train" {
			w.Peak, w.Allocated, w.PCIeRX, w.PCIeTX = frame.Some[uint64](5*gib), frame.Some[uint64](2*gib), frame.Some[uint64](gib), frame.Some[uint64](0)
		}
	}
	for i := range s.Containers {
		if s.Containers[i].ID[0] == 't' {
			s.Containers[i].Launches = frame.Some[uint64](77)
		}
	}
	lines := Processes(Tree(Rows(s, "gpu", "train"), "gpu"), time.Unix(0, 0), nil).Lines(0)
	for i, want := range []string{"PEAK ALLOC TO GPU FROM GPU LAUNCHES", "- 4.00GiB 2.00GiB 0B 77", "5.00GiB 2.00GiB 1.00GiB 0B -", "5.00GiB 2.00GiB 1.00GiB 0B -"} {
		if !strings.Contains(strings.Join(strings.Fields(lines[i]), " "), want) {
			t.Errorf("no %q in\n%s", want, lines[i])
		}
	}
	if got := Processes(Tree(Rows(sample(), "gpu", ""), "gpu"), time.Unix(0, 0), nil).Lines(0)[0]; strings.Contains(got, "PEAK") || strings.Contains(got, "LAUNCHES") {
		t.Errorf("without the tracer: %s", got)
	}
}

// TestSize: three digits and a unit.
func TestSize(t *testing.T) {
	for n, want := range map[uint64]string{0: "0B", 1023: "1023B", 1024: "1.00KiB", 10 << 20: "10.0MiB", 900 << 20: "900MiB", 1023 << 30: "1023GiB", 1 << 63: "8.00EiB"} {
		if got := Size(frame.Some(n)); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
	}
	if got := Size(view.Bytes{}); got != "" {
		t.Errorf("absent: %q", got)
	}
}
