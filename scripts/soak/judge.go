package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"
)

// sample is one look: what was held, by name. What could not be had is not there.
type sample struct {
	at    time.Duration // since the start
	holds map[string]float64
}

// kind is a kind of thing looked at, and by how much the median of the last quarter of a run may exceed that of its second quarter: the larger of a part
// of it and an amount. That is what comes and goes by chance; a leak leaves something of thousands of containers and processes.
type kind struct {
	prefix       string // of names
	part, amount float64
}

var kinds = []kind{
	{"RSS, MB", 0.05, 2}, {"RssAnon, MB", 0.05, 2}, {"heap in use, MB", 0.1, 1.5}, {"goroutines", 0, 3}, {"threads", 0, 3}, {"fds", 0.05, 4},
	{"processes", 0, 0}, {"files left", 0, 0}, {"series", 0.15, 50}, {"BPF ", 0.25, 20},
}

// kindOf returns the place of a name's kind, -1 if it has none.
func kindOf(name string) int {
	return slices.IndexFunc(kinds, func(k kind) bool { return strings.HasPrefix(name, k.prefix) })
}

// line is one line of the table.
type line struct {
	name                string
	first, warmed, last float64 // the first look, and the medians of the second and the last quarter
	hourly              float64 // growth, by the two medians
	allowed             float64 // between them
	flat                bool
}

// judge compares the quarters of a run. What was not there most of the time makes it an error: then nothing can be said.
func judge(samples []sample) ([]line, error) {
	quarter := len(samples) / 4
	if quarter < 5 {
		return nil, fmt.Errorf("%d looks are too few to tell", len(samples))
	}
	second, last := samples[quarter:2*quarter], samples[len(samples)-quarter:]
	apart := (last[0].at + last[quarter-1].at - second[0].at - second[quarter-1].at) / 2
	names := map[string]bool{}
	for _, s := range samples {
		for name := range s.holds {
			names[name] = true
		}
	}
	var lines []line
	for name := range names {
		k := kindOf(name)
		if k < 0 {
			return nil, fmt.Errorf("nothing says how much %q may grow", name)
		}
		all, middle, end := values(samples, name), values(second, name), values(last, name)
		if len(middle) <= quarter/2 || len(end) <= quarter/2 {
			return nil, fmt.Errorf("%s: seen %d and %d times of %d in the second and the last quarter", name, len(middle), len(end), quarter)
		}
		l := line{name: name, first: all[0], warmed: median(middle), last: median(end)}
		l.allowed = max(kinds[k].part*l.warmed, kinds[k].amount)
		l.hourly = (l.last - l.warmed) / apart.Hours()
		l.flat = l.last-l.warmed <= l.allowed
		lines = append(lines, l)
	}
	slices.SortFunc(lines, func(a, b line) int {
		if d := kindOf(a.name) - kindOf(b.name); d != 0 {
			return d
		}
		return strings.Compare(a.name, b.name)
	})
	return lines, nil
}

// values returns what the samples say of a name, in their order.
func values(samples []sample, name string) (list []float64) {
	for _, s := range samples {
		if v, ok := s.holds[name]; ok {
			list = append(list, v)
		}
	}
	return list
}

func median(list []float64) float64 {
	sorted := slices.Sorted(slices.Values(list))
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
}

// write writes the table and the verdict, and returns that.
func write(w io.Writer, lines []line) bool {
	fmt.Fprintln(w, "| held | start | 2nd quarter | last quarter | more an hour | allowed | |\n|---|---|---|---|---|---|---|")
	flat := true
	for _, l := range lines {
		verdict := "flat"
		if !l.flat {
			verdict, flat = "GROWS", false
		}
		fmt.Fprintf(w, "| %s | %s | %s | %s | %+.1f | +%s | %s |\n", l.name, number(l.first), number(l.warmed), number(l.last), l.hourly, number(l.allowed), verdict)
	}
	if flat {
		fmt.Fprintln(w, "\nPASS nothing grows")
	} else {
		fmt.Fprintln(w, "\nFAIL something grows")
	}
	return flat
}

// number writes a figure with one decimal where it has any.
func number(v float64) string { return strings.TrimSuffix(fmt.Sprintf("%.1f", v), ".0") }

// keep writes the samples into a file.
func keep(file string, samples []sample) error {
	var b bytes.Buffer
	for _, s := range samples {
		line, err := json.Marshal(map[string]any{"seconds": s.at.Seconds(), "holds": s.holds})
		if err != nil {
			return err
		}
		b.Write(append(line, '\n'))
	}
	return os.WriteFile(file, b.Bytes(), 0o644)
}
