// Package top is the live table in the terminal.
package top

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"time"
	"unicode"

	"github.com/charmbracelet/x/ansi"
	"github.com/gdamore/tcell/v2"
	_ "github.com/gdamore/tcell/v2/terminfo/l/linux" // the console, which differs from xterm

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/history"
	"gpu-exporter/exporter/table"
	"gpu-exporter/exporter/view"
)

// Frame is what is shown at one moment.
type Frame struct {
	Snapshot *view.Snapshot
	History  *history.View
}

// Config says what to show and how.
type Config struct {
	Read     func(context.Context) (Frame, error) // called every Interval, and never again before it returned
	Interval time.Duration
	Sort     string // one of table.Keys
	Filter   string
	Flat     bool // processes without their containers above them
}

// Run shows the table until the user quits or ctx ends.
func Run(ctx context.Context, c Config) error {
	screen, err := tcell.NewScreen()
	if err != nil {
		// The program knows few terminals by name, and nearly all others take what xterm takes.
		os.Setenv("TERM", "xterm-256color")
		screen, err = tcell.NewScreen()
	}
	if err != nil {
		return fmt.Errorf("opening the terminal: %w", err)
	}
	if err := screen.Init(); err != nil {
		return fmt.Errorf("opening the terminal: %w", err)
	}
	defer screen.Fini()
	run(ctx, c, screen)
	return nil
}

func run(ctx context.Context, c Config, screen tcell.Screen) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	events := make(chan tcell.Event, 16)
	go screen.ChannelEvents(events, ctx.Done())
	readings := make(chan reading)
	go func() {
		for ctx.Err() == nil {
			f, err := c.Read(ctx)
			select {
			case readings <- reading{f, err}:
			case <-ctx.Done():
			}
			select {
			case <-time.After(c.Interval):
			case <-ctx.Done():
			}
		}
	}()
	m := &model{Config: c, utf8: screen.CharacterSet() == "UTF-8"}
	for {
		m.width, m.height = screen.Size()
		screen.Clear()
		for y, l := range m.lines() {
			screen.PutStrStyled(0, y, l.text, l.style)
		}
		screen.Show()
		select {
		case <-ctx.Done():
			return
		case r := <-readings:
			m.take(r)
		case event, ok := <-events:
			switch event := event.(type) {
			case *tcell.EventKey:
				if m.key(event) {
					return
				}
			case *tcell.EventResize:
				screen.Sync()
			}
			if !ok {
				return // the terminal is gone
			}
		}
	}
}

// reading is what Config.Read returned.
type reading struct {
	frame Frame
	err   error
}

type model struct {
	Config
	utf8          bool // the terminal has more than ASCII
	width, height int
	frame         Frame
	err           error // of the last reading; the frame is older then
	typing        bool  // the filter is being typed
	scroll        int   // first row of processes that is shown
}

func (m *model) take(r reading) {
	if m.err = r.err; m.err == nil {
		m.frame = r.frame
	}
}

// key takes a key, and tells whether the user quits.
func (m *model) key(k *tcell.EventKey) bool {
	if k.Key() == tcell.KeyCtrlC {
		return true
	}
	if m.typing {
		m.typed(k)
		return false
	}
	switch k.Key() {
	case tcell.KeyEscape:
		m.Filter = ""
	case tcell.KeyUp:
		m.scroll--
	case tcell.KeyDown:
		m.scroll++
	case tcell.KeyPgUp:
		m.scroll -= m.height / 2
	case tcell.KeyPgDn:
		m.scroll += m.height / 2
	case tcell.KeyHome:
		m.scroll = 0
	case tcell.KeyRune:
		switch k.Rune() {
		case 'q':
			return true
		case 's':
			m.order(1)
		case 'S':
			m.order(len(table.Keys) - 1)
		case 't':
			m.Flat = !m.Flat
		case '/':
			m.typing = true
		}
	}
	m.scroll = max(m.scroll, 0)
	return false
}

// order goes steps further in the list of orders.
func (m *model) order(steps int) {
	m.Sort = table.Keys[(slices.Index(table.Keys, m.Sort)+steps)%len(table.Keys)]
}

// typed takes a key of the filter.
func (m *model) typed(k *tcell.EventKey) {
	switch r := []rune(m.Filter); k.Key() {
	case tcell.KeyEnter:
		m.typing = false
	case tcell.KeyEscape:
		m.typing, m.Filter = false, ""
	case tcell.KeyBackspace, tcell.KeyBackspace2:
		m.Filter = string(r[:max(len(r)-1, 0)])
	case tcell.KeyRune:
		if len(r) < 50 && unicode.IsGraphic(k.Rune()) {
			m.Filter += string(k.Rune())
		}
	}
	m.scroll = 0
}

// line is a line of the screen.
type line struct {
	text  string
	style tcell.Style
}

var (
	normal  = tcell.StyleDefault
	bold    = normal.Bold(true)
	reverse = normal.Reverse(true)
)

// alarm is the style of what is wrong.
func alarm() tcell.Style {
	if os.Getenv("NO_COLOR") != "" {
		return bold
	}
	return normal.Foreground(tcell.ColorRed)
}

// lines returns the screen: as many lines as it has, and none wider.
func (m *model) lines() []line {
	out := []line{{m.title(), normal}}
	if m.err != nil {
		out = append(out, line{m.cut(containers.Clean(m.err.Error(), 300)), alarm()})
	}
	if s := m.frame.Snapshot; s != nil {
		for _, src := range s.Sources {
			if !src.Up {
				out = append(out, line{m.cut(table.Safe(src.Name, 40) + " is down: " + containers.Clean(src.Reason, 300)), alarm()})
			}
		}
		spark := m.spark()
		devices := table.Devices(s, spark).Lines(m.width)
		out = put(out, devices[:min(len(devices), 1+m.height/2)])
		out = append(out, line{})

		rows := table.Rows(s, m.Sort, m.Filter)
		if !m.Flat {
			rows = table.Tree(rows, m.Sort)
		}
		text := table.Processes(rows, s.Time, spark).Lines(m.width)
		head, text := text[:1], text[1:]
		room := max(m.height-len(out)-2, 1) // below their header and above the foot
		m.scroll = min(m.scroll, max(len(text)-room, 0))
		out = put(out, append(head, text[m.scroll:min(m.scroll+room, len(text))]...))
	}
	foot := "q quit  s sort  t tree  / filter  arrows scroll"
	if m.typing {
		foot = "filter: " + m.Filter + "_  (enter: done, esc: none)"
	}
	out = append(out, make([]line, m.height)...)[:max(m.height-1, 0)]
	return append(out, line{m.cut(foot), reverse})
}

// put adds the lines of a table, its header first.
func put(out []line, table []string) []line {
	out = append(out, line{table[0], bold})
	for _, text := range table[1:] {
		out = append(out, line{text, normal})
	}
	return out
}

// spark returns what draws the load of the last ten minutes.
func (m *model) spark() table.Spark {
	width := 10
	if m.width >= 120 {
		width = 30
	}
	loads := map[string]history.Values{}
	if h := m.frame.History; h != nil {
		for _, d := range h.Devices {
			loads[d.UUID] = d.Utilization
		}
		for _, c := range h.Containers {
			loads[c.ID] = c.Utilization
		}
	}
	return func(id string) string { return table.Sparkline(loads[id], width, 100, m.utf8) }
}

func (m *model) cut(s string) string { return ansi.Truncate(s, m.width, "") }

func (m *model) title() string {
	s := m.frame.Snapshot
	if s == nil {
		return m.cut("gpu-exporter: reading")
	}
	text := table.Safe(cmp.Or(s.Host.Name, s.Host.IP, "host"), 30) + "  " + s.Time.Local().Format(time.TimeOnly)
	if s.Recorded {
		text += "  recording"
	}
	text += "  by " + m.Sort
	if m.Filter != "" {
		text += "  filter " + table.Safe(m.Filter, 30)
	}
	if s.Driver.Version != "" {
		text += "  driver " + table.Safe(s.Driver.Version, 20)
	}
	return m.cut(text)
}
