package table

import (
	"math"
	"testing"

	"gpu-exporter/exporter/history"
)

// TestSparkline: absent is a space and no point at all is empty; the highest of the points shows, within the scale.
func TestSparkline(t *testing.T) {
	none := float32(math.NaN())
	for _, x := range []struct {
		v     history.Values
		width int
		utf8  bool
		want  string
	}{
		{history.Values{none, 0, 12.6, 50, 99, 100, 500}, 7, true, " ▁▂▅███"},
		{history.Values{none, 0, 50, 100}, 4, false, " _+#"},
		{history.Values{1, 100, none, none, 1, none}, 3, true, "█ ▁"},
		{history.Values{none, none}, 2, true, ""},
		{nil, 5, true, ""},
	} {
		if got := Sparkline(x.v, x.width, 100, x.utf8); got != x.want {
			t.Errorf("%v: %q, want %q", x.v, got, x.want)
		}
	}
}
