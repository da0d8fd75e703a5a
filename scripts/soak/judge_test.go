package main

import (
	"strings"
	"testing"
	"time"
)

// looks makes n looks, five seconds apart, at one thing.
func looks(n int, name string, held func(i int) float64) (list []sample) {
	for i := range n {
		list = append(list, sample{time.Duration(i) * 5 * time.Second, map[string]float64{name: held(i)}})
	}
	return list
}

// TestJudge: what grows with time is found, what settles before the second quarter or goes up and down is not, and nothing is said of what was not seen.
func TestJudge(t *testing.T) {
	for _, x := range []struct {
		what, name string
		held       func(i int) float64
		flat       bool
	}{
		{"a descriptor every ten looks", "fds: main", func(i int) float64 { return float64(40 + i/10) }, false},
		{"50 kB a look", "RssAnon, MB: main", func(i int) float64 { return 12 + 0.05*float64(i) }, false},
		{"an entry a look", "BPF map calls", func(i int) float64 { return float64(i) }, false},
		{"a file that is left late", "files left", func(i int) float64 { return float64(i / 90) }, false},
		{"grows until it is warm", "RssAnon, MB: main", func(i int) float64 { return float64(min(i, 30)) }, true},
		{"goes up and down", "series", func(i int) float64 { return 500 + float64(i%7)*30 }, true},
		{"falls", "goroutines: main", func(i int) float64 { return float64(200 - i) }, true},
	} {
		lines, err := judge(looks(120, x.name, x.held))
		if err != nil || len(lines) != 1 || lines[0].flat != x.flat {
			t.Errorf("%s: %+v, %v; want flat %v", x.what, lines, err, x.flat)
		}
		var b strings.Builder
		if got := write(&b, lines); got != x.flat || strings.Contains(b.String(), "PASS") != x.flat || strings.Contains(b.String(), "FAIL") == x.flat {
			t.Errorf("%s: %v\n%s", x.what, got, b.String())
		}
	}
	lines, err := judge(looks(120, "RSS, MB: main", func(i int) float64 { return float64(i) }))
	if err != nil || lines[0].hourly < 719 || lines[0].hourly > 721 { // one every five seconds
		t.Errorf("growth an hour: %+v, %v", lines, err)
	}
	gone := looks(120, "fds: worker", func(int) float64 { return 10 })
	for i := 90; i < 110; i++ {
		delete(gone[i].holds, "fds: worker")
	}
	for what, list := range map[string][]sample{
		"gone": gone, "too short": looks(12, "series", func(int) float64 { return 1 }), "unknown": looks(120, "doves", func(int) float64 { return 1 }),
	} {
		if lines, err := judge(list); err == nil {
			t.Errorf("%s: %+v", what, lines)
		}
	}
}
