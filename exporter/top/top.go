// Package top is the live table in the terminal.
package top

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"

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
	UTF8     bool // the terminal has more than ASCII
}

// Run shows the table until the user quits or ctx ends.
func Run(ctx context.Context, c Config) error {
	_, err := tea.NewProgram(newModel(ctx, c), tea.WithContext(ctx)).Run()
	if errors.Is(err, tea.ErrInterrupted) || ctx.Err() != nil {
		return nil
	}
	return err
}

type model struct {
	Config
	ctx           context.Context
	width, height int
	frame         Frame
	err           error // of the last reading; the frame is older then
	typing        bool  // the filter is being typed
	scroll        int   // first row of processes that is shown
}

func newModel(ctx context.Context, c Config) *model {
	return &model{Config: c, ctx: ctx, width: 80, height: 24}
}

// read is the answer of Config.Read.
type read struct {
	frame Frame
	err   error
}

// due says that it is time to read again.
type due struct{}

func (m *model) fetch() tea.Msg {
	f, err := m.Read(m.ctx)
	return read{f, err}
}

// Init implements tea.Model.
func (m *model) Init() tea.Cmd { return m.fetch }

// Update implements tea.Model.
func (m *model) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		m.width, m.height = msg.Width, msg.Height
	case read:
		if m.err = msg.err; m.err == nil {
			m.frame = msg.frame
		}
		return m, tea.Tick(m.Interval, func(time.Time) tea.Msg { return due{} })
	case due:
		return m, m.fetch
	case tea.KeyPressMsg:
		if m.typing {
			m.typed(msg)
			return m, nil
		}
		return m, m.key(msg.String())
	}
	return m, nil
}

// typed takes a key of the filter.
func (m *model) typed(k tea.KeyPressMsg) {
	switch k.String() {
	case "enter":
		m.typing = false
	case "esc", "ctrl+c":
		m.typing, m.Filter = false, ""
	case "backspace":
		if r := []rune(m.Filter); len(r) > 0 {
			m.Filter = string(r[:len(r)-1])
		}
	default:
		if !strings.ContainsFunc(k.Text, func(r rune) bool { return !unicode.IsGraphic(r) }) && len(m.Filter) < 100 {
			m.Filter += k.Text
		}
	}
	m.scroll = 0
}

func (m *model) key(k string) tea.Cmd {
	switch k {
	case "q", "ctrl+c":
		return tea.Quit
	case "s", "S":
		step := 1
		if k == "S" {
			step = len(table.Keys) - 1
		}
		m.Sort = table.Keys[(slices.Index(table.Keys, m.Sort)+step)%len(table.Keys)]
	case "t":
		m.Flat = !m.Flat
	case "/":
		m.typing = true
	case "esc":
		m.Filter = ""
	case "up", "k":
		m.scroll--
	case "down", "j":
		m.scroll++
	case "pgup":
		m.scroll -= m.height / 2
	case "pgdown", "space":
		m.scroll += m.height / 2
	case "home", "g":
		m.scroll = 0
	}
	m.scroll = max(m.scroll, 0)
	return nil
}

var (
	bold    = ansi.NewStyle().Bold()
	reverse = ansi.NewStyle().Reverse(true)
	red     = ansi.NewStyle().ForegroundColor(ansi.Red)
)

// View implements tea.Model.
func (m *model) View() tea.View {
	v := tea.NewView(strings.Join(m.lines(), "\n"))
	v.AltScreen = true
	return v
}

// lines returns the screen: never more lines than it has, and none wider.
func (m *model) lines() []string {
	out := []string{m.title()}
	if m.err != nil {
		out = append(out, red.Styled(m.cut(containers.Clean(m.err.Error(), 300))))
	}
	if s := m.frame.Snapshot; s != nil {
		for _, src := range s.Sources {
			if !src.Up {
				out = append(out, red.Styled(m.cut(table.Safe(src.Name, 40)+" is down: "+containers.Clean(src.Reason, 300))))
			}
		}
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
		spark := func(id string) string { return table.Sparkline(loads[id], width, 100, m.UTF8) }
		devices := table.Devices(s, spark).Lines(m.width)
		devices[0] = bold.Styled(devices[0])
		out = append(append(out, devices[:min(len(devices), 1+m.height/2)]...), "")

		rows := table.Rows(s, m.Sort, m.Filter)
		if !m.Flat {
			rows = table.Tree(rows, m.Sort)
		}
		lines := table.Processes(rows, s.Time, spark).Lines(m.width)
		room := max(m.height-len(out)-2, 1) // below their header and above the foot
		m.scroll = min(m.scroll, max(len(lines)-1-room, 0))
		out = append(append(out, bold.Styled(lines[0])), lines[1+m.scroll:min(1+m.scroll+room, len(lines))]...)
	}
	foot := "q quit  s sort  t tree  / filter  arrows scroll"
	if m.typing {
		foot = "filter: " + m.Filter + "_  (enter: done, esc: none)"
	}
	out = out[:min(len(out), m.height-1)]
	for len(out) < m.height-1 {
		out = append(out, "")
	}
	return append(out, reverse.Styled(m.cut(foot)))
}

func (m *model) cut(s string) string { return ansi.Truncate(s, m.width, "") }

func (m *model) title() string {
	s := m.frame.Snapshot
	if s == nil {
		return m.cut("gpu-exporter: reading")
	}
	text := fmt.Sprintf("%s  %s  by %s", table.Safe(cmp.Or(s.Host.Name, s.Host.IP, "host"), 30), s.Time.Local().Format(time.TimeOnly), m.Sort)
	if m.Filter != "" {
		text += "  filter " + table.Safe(m.Filter, 30)
	}
	if s.Driver.Version != "" {
		text += "  driver " + table.Safe(s.Driver.Version, 20)
	}
	return m.cut(text)
}
