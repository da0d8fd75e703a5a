// Package table shows a view as aligned text: what `gpu-exporter ps` prints and `gpu-exporter top` draws. Every text that comes from a
// container or a process passes through Safe, so no escape sequence reaches the terminal.
package table

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/charmbracelet/x/ansi"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/view"
	"gpu-exporter/nvml/frame"
)

// none is what an absent value shows.
const none = "-"

// Safe makes text fit for a cell: no control character, at most width columns.
func Safe(s string, width int) string {
	return ansi.Truncate(containers.Clean(s, 4*width), width, "...")
}

// Column is a column of a table.
type Column struct {
	Title    string
	Right    bool // aligned to the right
	Max      int  // columns of the terminal that it may take; 0: 80
	Optional bool // left out when it has no value in any row
	Drop     int  // when the table is too wide, columns of the highest Drop go first; 0: never
}

// Table is a header and rows of cells; an empty cell is an absent value.
type Table struct {
	Columns []Column
	Rows    [][]string
}

// Columns of text, those aligned to the left, are cut down to these widths before a column is left out, and after none is left that may be.
const (
	narrow   = 16
	narrower = 8
	gap      = 2
)

// Lines returns the header and one line per row, at most width columns wide; 0: any width.
func (t *Table) Lines(width int) []string {
	var show []int
	natural := make([]int, len(t.Columns))
	for i, c := range t.Columns {
		natural[i] = len(c.Title)
		empty := true
		for _, r := range t.Rows {
			r[i] = Safe(r[i], cmp.Or(c.Max, 80))
			empty = empty && r[i] == ""
			natural[i] = max(natural[i], ansi.StringWidth(r[i]))
		}
		if !empty || !c.Optional {
			show = append(show, i)
		}
	}
	widths := natural
	if width > 0 {
		show, widths = t.fit(show, natural, width)
	}
	line := func(cell func(int) string) string {
		var b strings.Builder
		for k, i := range show {
			s := ansi.Truncate(cmp.Or(cell(i), none), widths[i], "...")
			pad := strings.Repeat(" ", max(0, widths[i]-ansi.StringWidth(s)))
			if t.Columns[i].Right {
				s = pad + s
			} else {
				s += pad
			}
			if k > 0 {
				s = strings.Repeat(" ", gap) + s
			}
			b.WriteString(s)
		}
		s := b.String()
		if width > 0 {
			s = ansi.Truncate(s, width, "")
		}
		return strings.TrimRight(s, " ")
	}
	lines := []string{line(func(i int) string { return t.Columns[i].Title })}
	for _, r := range t.Rows {
		lines = append(lines, line(func(i int) string { return r[i] }))
	}
	return lines
}

// fit cuts columns of text and leaves out what may be left out, until width is enough.
func (t *Table) fit(show, natural []int, width int) ([]int, []int) {
	for {
		if widths, ok := t.cut(show, natural, width, narrow); ok {
			return show, widths
		}
		worst := 0
		for k, i := range show {
			if t.Columns[i].Drop > t.Columns[show[worst]].Drop {
				worst = k
			}
		}
		if t.Columns[show[worst]].Drop == 0 {
			widths, _ := t.cut(show, natural, width, narrower)
			return show, widths
		}
		show = slices.Delete(slices.Clone(show), worst, worst+1)
	}
}

// cut makes the widest column of text narrower, again and again, but none below least. It tells whether width is enough then.
func (t *Table) cut(show, natural []int, width, least int) ([]int, bool) {
	widths := slices.Clone(natural)
	total := -gap
	for _, i := range show {
		total += widths[i] + gap
	}
	for ; total > width; total-- {
		widest := -1
		for _, i := range show {
			if !t.Columns[i].Right && widths[i] > least && (widest < 0 || widths[i] > widths[widest]) {
				widest = i
			}
		}
		if widest < 0 {
			return widths, false
		}
		widths[widest]--
	}
	return widths, true
}

// Spark draws the history of the GPU or container with an id; empty: it has none.
type Spark func(id string) string

// Devices is the table of the GPUs; spark may be nil.
func Devices(s *view.Snapshot, spark Spark) *Table {
	t := &Table{Columns: []Column{{Title: "GPU", Right: true}, {Title: "NAME", Max: 30, Drop: 4}, {Title: "UTIL", Right: true}, {Title: "MAX", Right: true, Drop: 3}, {Title: "10 MIN", Right: true, Optional: true, Drop: 1},
		{Title: "MEMORY", Right: true}, {Title: "MEM%", Right: true}, {Title: "POWER", Right: true, Drop: 2}, {Title: "TEMP", Right: true},
		{Title: "LIMITED BY", Max: 40, Drop: 1}, {Title: "UUID", Max: 48, Drop: 5}}}
	for i := range s.Devices {
		d := &s.Devices[i]
		limit := strings.Join(Limits(d), ",")
		if d.State != string(frame.StateOK) {
			limit = d.State + ": " + d.Reason
		}
		t.Rows = append(t.Rows, []string{fmt.Sprint(d.Index), d.Name, percent(d.Utilization), percent(d.MaxUtilization), spark.of(d.UUID), of(d.MemoryUsed, d.MemoryTotal),
			part(d.MemoryUsed, d.MemoryTotal), watts(d.Power, d.PowerLimit), celsius(d.Temperature), limit, d.UUID})
	}
	return t
}

// Limits returns the reasons that hold a GPU's clocks down. An idle GPU, and clocks that somebody set, are not held down.
func Limits(d *view.Device) []string {
	var list []string
	for _, r := range d.Throttle {
		switch r {
		case "gpu_idle", "applications_clocks", "display_clocks":
		default:
			list = append(list, r)
		}
	}
	return list
}

func (f Spark) of(id string) string {
	if f == nil || id == "" {
		return ""
	}
	return f(id)
}

// Processes is the table of rows; now tells the age of their containers. The history is drawn on a container's row of a tree; spark may be nil.
func Processes(rows []Row, now time.Time, spark Spark) *Table {
	t := &Table{Columns: []Column{{Title: "GPU", Right: true}, {Title: "CONTAINER", Max: 40}, {Title: "CONTAINER ID", Max: 12, Drop: 9}, {Title: "IMAGE", Max: 50, Drop: 8},
		{Title: "PID", Right: true}, {Title: "UTIL", Right: true}, {Title: "MAX", Right: true, Drop: 2}, {Title: "10 MIN", Right: true, Optional: true, Drop: 1},
		{Title: "MEMORY", Right: true}, {Title: "PEAK", Right: true, Optional: true, Drop: 5}, {Title: "ALLOC", Right: true, Optional: true, Drop: 6},
		{Title: "TO GPU", Right: true, Optional: true, Drop: 7}, {Title: "FROM GPU", Right: true, Optional: true, Drop: 7}, {Title: "LAUNCHES", Right: true, Optional: true, Drop: 7},
		{Title: "MEM%", Right: true, Drop: 4}, {Title: "AGE", Right: true, Drop: 3}, {Title: "COMMAND", Max: 60, Drop: 1}}}
	for _, r := range rows {
		t.Rows = append(t.Rows, r.cells(now, spark))
	}
	return t
}

func (r *Row) cells(now time.Time, spark Spark) []string {
	gpu, pid, name := "", "", strings.Repeat("  ", r.Depth)+r.Label()
	if r.GPU >= 0 {
		gpu = fmt.Sprint(r.GPU)
	}
	if r.PID > 0 {
		pid = fmt.Sprint(r.PID)
	}
	var line, launches string // of a container as a whole
	if r.GPU < 0 {
		line = spark.of(r.ContainerID)
		if r.Launches.OK {
			launches = fmt.Sprint(r.Launches.V)
		}
	}
	var in, out string // what no process copied is no copy of anybody
	if r.PID > 0 || r.GPU < 0 {
		in, out = Size(r.PCIeRX), Size(r.PCIeTX)
	}
	command := r.Command
	if command == "" {
		command = r.ProcessName
	}
	return []string{gpu, name, containers.ShortID(r.ContainerID), r.Image, pid, percent(r.Utilization), percent(r.MaxUtilization), line, Size(r.Memory),
		Size(r.Peak), Size(r.Allocated), in, out, launches, part(r.Memory, r.Total), age(r.Started, now), command}
}

// Size writes bytes as Docker does, such as 4.51GiB; empty when absent.
func Size(b view.Bytes) string {
	if !b.OK {
		return ""
	}
	v, units := float64(b.V), []string{"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"}
	for v >= 1024 && len(units) > 1 {
		v /= 1024
		units = units[1:]
	}
	switch {
	case units[0] == "B" || v >= 99.95:
		return fmt.Sprintf("%.0f%s", v, units[0])
	case v >= 9.995:
		return fmt.Sprintf("%.1f%s", v, units[0])
	}
	return fmt.Sprintf("%.2f%s", v, units[0])
}

// of writes a size and the whole it is of.
func of(used, total view.Bytes) string {
	if !used.OK || !total.OK {
		return Size(used)
	}
	return Size(used) + " / " + Size(total)
}

func part(used, total view.Bytes) string {
	if !used.OK || total.V == 0 {
		return ""
	}
	return fmt.Sprintf("%.1f%%", 100*float64(used.V)/float64(total.V))
}

func percent(n view.Number) string {
	if !n.OK {
		return ""
	}
	return fmt.Sprintf("%.0f%%", n.V)
}

func watts(n, limit view.Number) string {
	switch {
	case !n.OK:
		return ""
	case !limit.OK:
		return fmt.Sprintf("%.0fW", n.V)
	}
	return fmt.Sprintf("%.0f / %.0fW", n.V, limit.V)
}

func celsius(n view.Number) string {
	if !n.OK {
		return ""
	}
	return fmt.Sprintf("%.0fC", n.V)
}

// age writes a duration with its largest unit: 42s, 5m, 3h, 12d.
func age(since, now time.Time) string {
	if since.IsZero() {
		return ""
	}
	d := max(0, now.Sub(since))
	switch {
	case d < 2*time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < 2*time.Hour:
		return fmt.Sprintf("%dm", d/time.Minute)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", d/time.Hour)
	}
	return fmt.Sprintf("%dd", d/(24*time.Hour))
}
