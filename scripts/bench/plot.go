package main

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// draw returns the figures as an SVG: a row for each thing that costs, a column for each thing that it grows with.
func draw(points []point) string {
	columns := []struct {
		name string
		x    func(*point) float64
		of   func(*point) bool
	}{
		{"GPUs", func(p *point) float64 { return float64(p.gpus) }, func(p *point) bool { return p.containers == 0 && p.idle == 0 }},
		{"containers on 16 GPUs, 4 processes each", func(p *point) float64 { return float64(p.containers) }, func(p *point) bool { return p.gpus == 16 && p.idle == 0 }},
		{"containers on no GPU", func(p *point) float64 { return float64(p.idle) }, func(p *point) bool { return p.gpus == 16 && p.containers == 0 }},
		{"series", func(p *point) float64 { return float64(p.series) }, func(p *point) bool { return true }},
	}
	rows := []struct {
		name string
		y    func(*point) float64
	}{
		{"scrape, median, ms", func(p *point) float64 { return ms(quantile(p.scrapes, 0.5)) }},
		{"CPU, % of a core", func(p *point) float64 { return sum(p.cpu) }},
		{"RssAnon, MB", func(p *point) float64 { return float64(sum(p.anon)) / 1024 }},
	}
	const width, height, left, top, gap = 250, 130, 60, 30, 60
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="11">`+"\n"+`<rect width="100%%" height="100%%" fill="#fff"/>`+"\n",
		left+len(columns)*(width+gap), top+len(rows)*(height+gap))
	for i, row := range rows {
		highest := 0.0
		for k := range points {
			highest = max(highest, row.y(&points[k]))
		}
		highest = round(highest)
		for j, column := range columns {
			x0, y0 := left+j*(width+gap), top+i*(height+gap)
			var list []*point
			farthest := 0.0
			for k := range points {
				if p := &points[k]; column.of(p) {
					list = append(list, p)
					farthest = max(farthest, column.x(p))
				}
			}
			slices.SortFunc(list, func(p, q *point) int { return int(column.x(p) - column.x(q)) })
			farthest = round(farthest)
			fmt.Fprintf(&b, `<text x="%d" y="%d" font-weight="bold">%s</text>`+"\n", x0, y0-8, row.name)
			fmt.Fprintf(&b, `<path d="M%d %dV%dH%d" fill="none" stroke="#555"/>`+"\n", x0, y0, y0+height, x0+width)
			fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="end">%g</text><text x="%d" y="%d" text-anchor="end">0</text>`+"\n", x0-4, y0+10, highest, x0-4, y0+height)
			fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="end">%g</text><text x="%d" y="%d">%s</text>`+"\n", x0+width, y0+height+14, farthest, x0, y0+height+28, column.name)
			line := ""
			for _, p := range list {
				x, y := float64(x0)+column.x(p)/farthest*width, float64(y0)+(1-row.y(p)/highest)*height
				line += fmt.Sprintf(" %.1f,%.1f", x, y)
				fmt.Fprintf(&b, `<circle cx="%.1f" cy="%.1f" r="2.5" fill="#1f6feb"/>`+"\n", x, y)
			}
			if column.name != "series" { // there several hosts have nearly as many
				fmt.Fprintf(&b, `<polyline points="%s" fill="none" stroke="#1f6feb"/>`+"\n", strings.TrimSpace(line))
			}
		}
	}
	b.WriteString("</svg>\n")
	return b.String()
}

// round returns the next of 1, 2, 5, 10, 20 and so on.
func round(v float64) float64 {
	if v <= 0 {
		return 1
	}
	unit := math.Pow(10, math.Floor(math.Log10(v)))
	for _, f := range []float64{1, 2, 5} {
		if v <= f*unit {
			return f * unit
		}
	}
	return 10 * unit
}
