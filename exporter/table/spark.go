package table

import (
	"math"
	"strings"

	"gpu-exporter/exporter/history"
)

// The levels of a sparkline, lowest first, with and without UTF-8.
var (
	blocks = []rune("▁▂▃▄▅▆▇█")
	ascii  = []rune("_.-=+*%#")
)

// Sparkline draws the last points in width columns, each the highest of its points, on a scale from 0 to top. Absent points are spaces, and
// a line without any point is empty.
func Sparkline(v history.Values, width int, top float64, utf8 bool) string {
	levels := ascii
	if utf8 {
		levels = blocks
	}
	var b strings.Builder
	known := false
	for i := range width {
		highest := math.NaN()
		for _, x := range v[len(v)*i/width : len(v)*(i+1)/width] {
			if x := float64(x); !math.IsNaN(x) && !(x <= highest) {
				highest = x
			}
		}
		if math.IsNaN(highest) {
			b.WriteByte(' ')
			continue
		}
		known = true
		level := int(highest / top * float64(len(levels)))
		b.WriteRune(levels[min(max(level, 0), len(levels)-1)])
	}
	if !known {
		return ""
	}
	return b.String()
}
