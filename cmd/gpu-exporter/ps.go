package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"unicode"

	"github.com/alecthomas/kingpin/v2"

	"gpu-exporter/exporter"
	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/table"
	"gpu-exporter/exporter/view"
)

// The exit codes of ps when no process is on a GPU, and when that cannot be known.
const (
	nothingRuns exitCode = 1
	unseen      exitCode = 2
)

func psCommand(app *kingpin.Application) command {
	c := app.Command("ps", "Show once which containers and processes are on which GPU. Exit code 1: none is; 2: the GPUs cannot be seen.")
	from := addSourceFlags(c, sampled)
	asJSON := c.Flag("json", "The snapshot as JSON, as /api/v1/snapshot has it.").Bool()
	sort, filter := addOrderFlags(c)
	return command{"ps", func(cfg exporter.Config) error {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
		defer stop()
		s, err := once(ctx, from, cfg)
		if err != nil {
			return err
		}
		s.Workloads = slices.DeleteFunc(s.Workloads, func(w view.Workload) bool { return !table.Match(&w, *filter) })
		out := bufio.NewWriter(os.Stdout)
		if *asJSON {
			err = printJSON(out, s)
		} else {
			printText(out, s, *sort, *filter)
			complain(os.Stderr, s)
		}
		if err := out.Flush(); err != nil {
			return err
		}
		if err != nil || slices.ContainsFunc(s.Workloads, func(w view.Workload) bool { return w.PID != 0 }) {
			return err
		}
		if !slices.ContainsFunc(s.Sources, func(src view.Source) bool { return src.Name == input.SourceNVML && src.Up }) {
			return unseen
		}
		return nothingRuns
	}}
}

func addOrderFlags(c *kingpin.CmdClause) (sort, filter *string) {
	sort = c.Flag("sort", "Order: "+strings.Join(table.Keys, ", ")+".").Default(table.Keys[0]).Enum(table.Keys...)
	filter = c.Flag("filter", "Only what has this text in its container, image, command, PID or GPU.").PlaceHolder("TEXT").String()
	return sort, filter
}

// once returns one snapshot. Of a recording it is the moment with the most processes.
func once(ctx context.Context, from *sourceFlags, cfg exporter.Config) (*view.Snapshot, error) {
	if cfg.Replay != nil && !from.named {
		s, _ := busiest(cfg)
		return view.New(s), nil
	}
	src, err := from.open(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if err := src.settled(ctx); err != nil {
		return nil, err
	}
	s, err := src.snapshot(ctx)
	if err != nil {
		return nil, unseenError{err}
	}
	return s, nil
}

// printText writes the table of the GPUs and that of what is on them.
func printText(w io.Writer, s *view.Snapshot, sort, filter string) {
	for _, line := range table.Devices(s, nil).Lines(0) {
		fmt.Fprintln(w, line)
	}
	fmt.Fprintln(w)
	for _, line := range table.Processes(table.Rows(s, sort, filter), s.Time, nil).Lines(0) {
		fmt.Fprintln(w, line)
	}
}

// complain says which sources are down, which is why names or figures are missing, and that an exporter serves a recording.
func complain(w io.Writer, s *view.Snapshot) {
	if s.Recorded {
		fmt.Fprintln(w, "gpu-exporter: this is a recording, not a host")
	}
	if !slices.ContainsFunc(s.Sources, func(src view.Source) bool { return src.Name == input.SourceNVML }) {
		fmt.Fprintln(w, "gpu-exporter: nvml is down: it has not answered yet")
	}
	for _, src := range s.Sources {
		if !src.Up {
			fmt.Fprintf(w, "gpu-exporter: %s is down: %s\n", table.Safe(src.Name, 40), containers.Cut(src.Reason, maxReason))
		}
	}
}

// printJSON writes indented JSON in which no character can act on a terminal: those that are not graphic are escaped.
func printJSON(w io.Writer, v any) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	var safe strings.Builder
	for _, r := range string(b) {
		switch {
		case r == '\n' || unicode.IsGraphic(r):
			safe.WriteRune(r)
		case r > 0xffff:
			r -= 0x10000
			fmt.Fprintf(&safe, `\u%04x\u%04x`, 0xd800+r>>10, 0xdc00+r&0x3ff)
		default:
			fmt.Fprintf(&safe, `\u%04x`, r)
		}
	}
	_, err = fmt.Fprintln(w, safe.String())
	return err
}
