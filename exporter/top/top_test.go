package top

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/charmbracelet/x/ansi"
	"github.com/gdamore/tcell/v2"

	"gpu-exporter/exporter/history"
	"gpu-exporter/exporter/view"
	"gpu-exporter/nvml/frame"
)

const hostile = "\x1b[2J\x1b]0;owned\x07\u009b31m\u202eevil\r\n"

func sample(processes int) Frame {
	s := &view.Snapshot{Time: time.Unix(1_800_000_000, 0), Host: view.Host{Name: "host" + hostile}, Driver: view.Driver{Version: hostile},
		Sources: []view.Source{{Name: "docker", Reason: hostile}},
		Devices: []view.Device{{UUID: "GPU-0", Name: hostile, State: "ok", Utilization: frame.Some(97.0)}}}
	for i := range processes {
		s.Workloads = append(s.Workloads, view.Workload{GPUUUID: "GPU-0", PID: 1000 + i, ContainerID: fmt.Sprintf("%064d", i), ContainerName: fmt.Sprintf("c%03d%s", i, hostile),
			Command: hostile, Utilization: frame.Some(float64(i)), Memory: frame.Some(uint64(i) << 20)})
	}
	h := history.New()
	h.Add(s)
	return Frame{s, h.View(30)}
}

func shown(m *model) string {
	var b strings.Builder
	for _, l := range m.lines() {
		b.WriteString(l.text + "\n")
	}
	return b.String()
}

// press types keys, each a rune or a name, and tells whether the last one quits.
func press(m *model, keys ...string) (quit bool) {
	special := map[string]tcell.Key{"enter": tcell.KeyEnter, "esc": tcell.KeyEscape, "backspace": tcell.KeyBackspace2, "pgdown": tcell.KeyPgDn}
	for _, k := range keys {
		if code, ok := special[k]; ok {
			quit = m.key(tcell.NewEventKey(code, 0, 0))
		} else {
			quit = m.key(tcell.NewEventKey(tcell.KeyRune, []rune(k)[0], 0))
		}
	}
	return quit
}

// TestSizes: any size is filled exactly, and nothing of a container's name acts on the terminal.
func TestSizes(t *testing.T) {
	for _, size := range [][2]int{{80, 24}, {40, 10}, {200, 60}, {10, 3}, {1, 1}} {
		m := &model{Config: Config{Sort: "gpu"}, utf8: true, width: size[0], height: size[1]}
		for _, r := range []reading{{}, {frame: sample(0)}, {frame: sample(100)}, {err: errors.New("gone" + hostile)}} {
			m.take(r)
			lines := m.lines()
			if len(lines) != size[1] {
				t.Errorf("%v: %d lines", size, len(lines))
			}
			for _, l := range lines {
				if n := ansi.StringWidth(l.text); n > size[0] {
					t.Errorf("%v: %d columns: %q", size, n, l.text)
				}
				if strings.ContainsFunc(l.text, func(r rune) bool { return !unicode.IsGraphic(r) }) {
					t.Errorf("%v: %q", size, l.text)
				}
			}
		}
	}
}

// TestKeys: order, tree, filter, scrolling and the end.
func TestKeys(t *testing.T) {
	m := &model{Config: Config{Sort: "gpu"}, width: 80, height: 24}
	m.take(reading{frame: sample(50)})
	first := func(text, a, b string) {
		t.Helper()
		s := shown(m)
		if i, j := strings.Index(s, a), strings.Index(s, b); i < 0 || (j >= 0 && j < i) {
			t.Errorf("%s: %s is not before %s:\n%s", text, a, b, s)
		}
	}
	first("by gpu, a tree", "c049", "1049")
	press(m, "s", "s", "s", "s") // util max mem name
	first("by name", "c000", "c001")
	press(m, "pgdown")
	if s := shown(m); strings.Contains(s, "c000") || !strings.Contains(s, "c006") {
		t.Errorf("scrolled:\n%s", s)
	}
	press(m, "t", "/", "C", "0", "4", "8", "x", "backspace")
	if s := shown(m); !strings.Contains(s, "filter: C048_") || !strings.Contains(s, "c048") || strings.Contains(s, "c047") {
		t.Errorf("filtered:\n%s", s)
	}
	if press(m, "q") {
		t.Error("q quits while the filter is typed")
	}
	press(m, "backspace", "enter")
	if s := shown(m); strings.Contains(s, "filter: ") || !strings.Contains(s, "filter C048") {
		t.Errorf("filter typed:\n%s", s)
	}
	press(m, "esc")
	first("no filter", "c000", "c001")
	if !press(m, "q") {
		t.Error("q does not quit")
	}
}

// TestGone: an exporter that is gone is a line, above what was last seen; when it is back the line is gone.
func TestGone(t *testing.T) {
	m := &model{Config: Config{Sort: "gpu"}, width: 80, height: 24}
	m.take(reading{frame: sample(1)})
	m.take(reading{err: errors.New("no exporter answers")})
	if s := shown(m); !strings.Contains(s, "no exporter answers") || !strings.Contains(s, "c000") {
		t.Error(s)
	}
	m.take(reading{frame: sample(1)})
	if s := shown(m); strings.Contains(s, "no exporter") {
		t.Error(s)
	}
}

// TestScreen: what is drawn, on a terminal with and without UTF-8, and that it ends by a key and by its context.
func TestScreen(t *testing.T) {
	for charset, want := range map[string]string{"UTF-8": "█", "US-ASCII": "#"} {
		screen := tcell.NewSimulationScreen(charset)
		if err := screen.Init(); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		n := 0
		read := func(context.Context) (Frame, error) {
			switch n++; { // at the third reading, the first is drawn
			case n == 3 && charset == "UTF-8":
				cancel()
			case n == 3:
				screen.InjectKey(tcell.KeyRune, 'q', 0)
			}
			return sample(3), nil
		}
		run(ctx, Config{Read: read, Interval: time.Millisecond, Sort: "gpu"}, screen)
		cancel()
		var drawn strings.Builder
		cells, _, _ := screen.GetContents()
		for _, c := range cells {
			drawn.WriteString(string(c.Runes))
		}
		if s := drawn.String(); !strings.Contains(s, "c002") || !strings.Contains(s, want) {
			t.Errorf("%s: %q", charset, s)
		}
		screen.Fini()
	}
}
