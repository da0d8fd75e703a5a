package top

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"

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

func shown(m *model) string { return ansi.Strip(strings.Join(m.lines(), "\n")) }

func press(m *model, keys ...string) tea.Cmd {
	var cmd tea.Cmd
	for _, k := range keys {
		msg := tea.KeyPressMsg{Code: rune(k[0]), Text: k}
		switch k {
		case "enter":
			msg = tea.KeyPressMsg{Code: tea.KeyEnter}
		case "esc":
			msg = tea.KeyPressMsg{Code: tea.KeyEscape}
		case "backspace":
			msg = tea.KeyPressMsg{Code: tea.KeyBackspace}
		case "pgdown":
			msg = tea.KeyPressMsg{Code: tea.KeyPgDown}
		}
		_, cmd = m.Update(msg)
	}
	return cmd
}

// TestSizes: any size is filled exactly, and nothing of a container's name acts on the terminal.
func TestSizes(t *testing.T) {
	for _, size := range [][2]int{{80, 24}, {40, 10}, {200, 60}, {10, 3}, {1, 1}} {
		m := newModel(context.Background(), Config{Interval: time.Second, Sort: "gpu", UTF8: true})
		m.Update(tea.WindowSizeMsg{Width: size[0], Height: size[1]})
		for _, f := range []read{{}, {frame: sample(0)}, {frame: sample(100)}, {err: errors.New("gone" + hostile)}} {
			m.Update(f)
			lines := m.lines()
			if len(lines) != size[1] {
				t.Errorf("%v: %d lines", size, len(lines))
			}
			for _, l := range lines {
				if n := ansi.StringWidth(l); n > size[0] {
					t.Errorf("%v: %d columns: %q", size, n, l)
				}
				if s := ansi.Strip(l); strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsGraphic(r) }) || strings.Contains(l, "\x1b[2J") || strings.Contains(l, "\x1b]") {
					t.Errorf("%v: %q", size, l)
				}
			}
		}
	}
}

// TestKeys: order, tree, filter, scrolling and the end.
func TestKeys(t *testing.T) {
	m := newModel(context.Background(), Config{Interval: time.Second, Sort: "gpu"})
	m.Update(read{frame: sample(50)})
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
	if press(m, "q") != nil {
		t.Error("q quits while the filter is typed")
	}
	press(m, "backspace", "enter")
	if s := shown(m); strings.Contains(s, "filter: ") || !strings.Contains(s, "filter C048") {
		t.Errorf("filter typed:\n%s", s)
	}
	press(m, "esc")
	first("no filter", "c000", "c001")
	cmd := press(m, "q")
	if cmd == nil || cmd() != (tea.QuitMsg{}) {
		t.Error("q does not quit")
	}
}

// TestGone: an exporter that is gone is a line, above what was last seen; when it is back the line is gone.
func TestGone(t *testing.T) {
	m := newModel(context.Background(), Config{Interval: time.Second, Sort: "gpu"})
	m.Update(read{frame: sample(1)})
	m.Update(read{err: errors.New("no exporter answers")})
	if s := shown(m); !strings.Contains(s, "no exporter answers") || !strings.Contains(s, "c000") {
		t.Error(s)
	}
	_, cmd := m.Update(read{frame: sample(1)})
	if s := shown(m); strings.Contains(s, "no exporter") || cmd == nil {
		t.Error(s)
	}
}
