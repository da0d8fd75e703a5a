package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/alecthomas/kingpin/v2"
	"golang.org/x/term"

	"gpu-exporter/exporter"
	"gpu-exporter/exporter/history"
	"gpu-exporter/exporter/top"
)

// sparkPoints is how many points of ten minutes top asks for.
const sparkPoints = 30

func topCommand(app *kingpin.Application) command {
	c := app.Command("top", "Show live which containers and processes are on which GPU. Plain text, again and again, when the output is no terminal.")
	from := addSourceFlags(c, sampled)
	sort, filter := addOrderFlags(c)
	interval := c.Flag("interval", "Time between two readings.").Default("1s").Duration()
	flat := c.Flag("flat", "Processes without their containers above them.").Bool()
	count := c.Flag("count", "In plain text: how many times; 0 is without end.").PlaceHolder("N").Uint32()
	return command{"top", func(cfg exporter.Config) error {
		if err := within("interval", *interval, 100*time.Millisecond, time.Hour); err != nil {
			return usageError{err}
		}
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
		defer stop()
		src, err := from.open(ctx, cfg)
		if err != nil {
			return err
		}
		if cfg.Replay == nil {
			if err := src.settled(ctx); err != nil {
				return err
			}
		}
		if term.IsTerminal(int(os.Stdout.Fd())) && os.Getenv("TERM") != "dumb" {
			return top.Run(ctx, top.Config{Read: reader(src), Interval: *interval, Sort: *sort, Filter: *filter, Flat: *flat})
		}
		return plain(ctx, src, *interval, *count, *sort, *filter)
	}}
}

// reader returns what top calls for each frame: of a running exporter its history, of a local source one of its own.
func reader(src *source) func(context.Context) (top.Frame, error) {
	own := history.New()
	return func(ctx context.Context) (top.Frame, error) {
		s, err := src.snapshot(ctx)
		if err != nil {
			return top.Frame{}, err
		}
		if src.remote == nil {
			own.Add(s)
			return top.Frame{Snapshot: s, History: own.View(sparkPoints)}, nil
		}
		h := &history.View{}
		if err := src.remote.get(ctx, fmt.Sprint("api/v1/history?points=", sparkPoints), h); err != nil {
			return top.Frame{}, err
		}
		return top.Frame{Snapshot: s, History: h}, nil
	}
}

// plain writes what ps writes, again and again. An exporter that is gone is one line on stderr, and its end.
func plain(ctx context.Context, src *source, interval time.Duration, count uint32, sort, filter string) error {
	for i := uint32(1); ; i++ {
		s, err := src.snapshot(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return unseenError{err}
		}
		out := bufio.NewWriter(os.Stdout)
		fmt.Fprintln(out, s.Time.Format(time.RFC3339))
		printText(out, s, sort, filter)
		fmt.Fprintln(out)
		if err := out.Flush(); err != nil {
			return err
		}
		complain(os.Stderr, s)
		if i == count {
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(interval):
		}
	}
}
