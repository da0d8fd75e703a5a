package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/alecthomas/kingpin/v2"

	"gpu-exporter/exporter"
	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/docker"
	"gpu-exporter/exporter/input"
	"gpu-exporter/tracer"
	"gpu-exporter/tracer/activity"
)

func traceCommand(app *kingpin.Application) command {
	c := app.Command("trace", "Show what processes do to the GPUs as the kernel sees it: opens, contexts, memory, failures, exits.")
	asJSON := c.Flag("json", "One JSON object per event.").Bool()
	only := c.Flag("filter", "Only events with this text in their container, image, command, PID, GPU or kind.").PlaceHolder("TEXT").String()
	return command{"trace", func(cfg exporter.Config) error {
		if cfg.Replay != nil {
			return usageError{errors.New("trace follows this host: --replay has no events")}
		}
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
		defer stop()
		return trace(ctx, cfg, os.Stdout, *asJSON, *only)
	}}
}

// tracedEvent is an event with the container that it came from.
type tracedEvent struct {
	tracer.Event
	ContainerID   string `json:"container_id,omitempty"`
	ContainerName string `json:"container_name,omitempty"`
	Image         string `json:"image_name,omitempty"`
}

// trace prints events until ctx ends or nobody reads them any more.
func trace(ctx context.Context, cfg exporter.Config, out io.Writer, asJSON bool, only string) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var names names
	silent := slog.New(slog.DiscardHandler)
	cfg.Docker.Logger, cfg.Tracer.Logger = silent, silent
	cfg.Tracer.Probe = false // copies are no events
	cfg.Tracer.Events = func(e tracer.Event) {
		t := names.event(e)
		line := t.text()
		if asJSON {
			b, err := json.Marshal(t)
			if err != nil {
				stop(fmt.Errorf("printing an event: %w", err))
				return
			}
			line = string(b)
		}
		if !strings.Contains(line, only) {
			return
		}
		if _, err := fmt.Fprintln(out, line); err != nil {
			stop(err)
		}
	}
	t, err := tracer.New(cfg.Tracer)
	if err != nil {
		return usageError{err}
	}
	var engine sync.WaitGroup
	defer engine.Wait()
	defer stop(nil)
	engine.Go(func() { docker.New(cfg.Docker).Run(ctx, names.take) })
	var lost uint64
	mode := ""
	err = t.Run(ctx, func(r *activity.Report) {
		switch {
		case r.Mode == tracer.ModeOff:
			stop(unseenError{fmt.Errorf("the kernel cannot be traced: %s", r.Reason)})
		case mode == "":
			mode = r.Mode
			fmt.Fprintf(os.Stderr, "tracing with %s; end with Ctrl-C\n", mode)
		}
		n := uint64(0)
		for _, l := range r.Lost {
			n += l
		}
		if n > lost {
			fmt.Fprintf(os.Stderr, "%d events lost\n", n-lost)
			lost = n
		}
	})
	if cause := context.Cause(ctx); err == nil && cause != nil && !errors.Is(cause, context.Canceled) {
		err = cause
	}
	return err
}

// names knows the containers.
type names struct {
	mu   sync.Mutex
	byID map[string]containers.Container
}

func (n *names) take(in input.Input) {
	if in.Containers == nil {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.byID == nil {
		n.byID = map[string]containers.Container{}
	}
	const most = 100_000 // names of ended containers stay, for their last events come late
	if len(n.byID) > most {
		clear(n.byID)
	}
	for _, c := range in.Containers.List {
		n.byID[c.ID] = c
	}
}

func (n *names) event(e tracer.Event) tracedEvent {
	n.mu.Lock()
	defer n.mu.Unlock()
	id := containers.Owner(e.Cgroup, func(id string) bool { _, ok := n.byID[id]; return ok })
	c := n.byID[id]
	e.Comm = containers.Clean(e.Comm, 16)
	return tracedEvent{e, containers.ShortID(id), containers.Clean(c.Name, 64), containers.Clean(c.Image, 128)}
}

// text is the event as one line of a table.
func (e *tracedEvent) text() string {
	who := e.ContainerName
	if who == "" {
		who = e.ContainerID
	}
	if who == "" {
		who = "-"
	}
	size := ""
	if e.Size > 0 {
		size = fmt.Sprintf("%.1f MiB", float64(e.Size)/(1<<20))
	}
	line := fmt.Sprintf("%s  %-8s %-20s %8d %-16s %12s", time.Unix(0, e.Time).Format("15:04:05.000"), e.Kind, who, e.PID, e.Comm, size)
	for _, more := range []string{e.UUID, containers.Clean(e.Detail, 200)} {
		if more != "" {
			line += "  " + more
		}
	}
	return strings.TrimRight(line, " ")
}

// tracedDevices reads MAJOR:MINOR=NODE; a minor of * means every one.
func tracedDevices(list []string) ([]tracer.Device, error) {
	var out []tracer.Device
	for _, text := range list {
		number, node, ok := strings.Cut(text, "=")
		major, minor, ok2 := strings.Cut(number, ":")
		d := tracer.Device{Minor: -1, Node: node}
		m, err := strconv.ParseUint(major, 10, 12)
		d.Major = uint32(m)
		if err == nil && minor != "*" {
			var n uint64
			n, err = strconv.ParseUint(minor, 10, 20)
			d.Minor = int(n)
		}
		if !ok || !ok2 || err != nil {
			return nil, fmt.Errorf("%q is not of the form MAJOR:MINOR=NODE", text)
		}
		out = append(out, d)
	}
	return out, nil
}
