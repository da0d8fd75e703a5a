package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/alecthomas/kingpin/v2"

	"gpu-exporter/exporter"
	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/docker"
	"gpu-exporter/exporter/doctor"
	"gpu-exporter/exporter/input"
)

// Bounds of a reason on a line for people, and of what doctor saw; the JSON has all of it.
const (
	maxReason   = 300
	maxEvidence = 600
)

func doctorCommand(app *kingpin.Application) command {
	c := app.Command("doctor", "Look for what keeps GPUs, containers or the exporter from working, and say what to do. "+
		"Exit code 0: nothing; 1: warnings; 2: something is broken.")
	from := addSourceFlags(c, sampled)
	asJSON := c.Flag("json", "The findings as JSON.").Bool()
	return command{"doctor", func(cfg exporter.Config) error {
		if cfg.Replay != nil {
			return usageError{errors.New("doctor looks at this host, not at a recording")}
		}
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
		defer stop()
		host := &doctor.Host{Proc: cfg.ProcRoot, Sys: "/sys", DriverRoot: "/"}
		if cfg.Worker.DriverRoot != "" {
			host.DriverRoot = cfg.Worker.DriverRoot
		}
		engine := make(chan docker.Info, 1) // an engine that hangs takes its time, and so does sampling
		go func() { engine <- docker.Look(ctx, cfg.Docker) }()
		if err := ask(ctx, host, from, cfg); err != nil {
			var usage usageError
			if errors.As(err, &usage) {
				return err
			}
			var stranger strangerError
			host.Reason, host.Stranger = err.Error(), errors.As(err, &stranger)
		}
		host.Engine, host.Now = <-engine, time.Now()
		if ctx.Err() != nil {
			return unseenError{errors.New("interrupted before all was seen")}
		}
		report := doctor.Examine(host)
		out := bufio.NewWriter(os.Stdout)
		if *asJSON {
			if err := printJSON(out, report); err != nil {
				return err
			}
		} else {
			for _, f := range report.Findings {
				fmt.Fprintf(out, "%-8s %-13s %s\n", f.State, f.Check, containers.Cut(f.Evidence, maxEvidence))
				if f.Advice != "" {
					fmt.Fprintf(out, "%22s do: %s\n", "", f.Advice)
				}
			}
		}
		if err := out.Flush(); err != nil {
			return err
		}
		if code := report.State.ExitCode(); code != 0 {
			return exitCode(code)
		}
		return nil
	}}
}

// ask gives the host what the running exporter sees, or one of this process.
func ask(ctx context.Context, host *doctor.Host, from *sourceFlags, cfg exporter.Config) error {
	src, err := from.open(ctx, cfg)
	if err != nil {
		return err
	}
	if src.local == nil {
		host.From = "it answers at " + src.remote.address()
	} else {
		host.From, host.Sampled = "none runs here: this host was sampled", true
		for start := time.Now(); time.Since(start) < settleTime && ctx.Err() == nil; time.Sleep(50 * time.Millisecond) {
			s := src.local.Latest()
			told := s.Tracer != nil && s.Sources[input.SourceNVML].Reason != "starting"
			for _, name := range []string{input.SourceNVML, input.SourceDocker, input.SourceProcesses} {
				_, ok := s.Sources[name]
				told = told && ok
			}
			if told && time.Since(start) > quietTime {
				break
			}
		}
	}
	s, err := src.snapshot(ctx)
	if err == nil {
		host.Snapshot = s
	}
	return err
}
