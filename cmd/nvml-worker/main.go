// Nvml-worker reads NVML and prints one JSON object per line: the library's state once, then one object per device and tick.
//
// It is the only part of gpu-exporter that loads NVIDIA's library, and so the only part that the library can hang or crash. It ends when its
// standard input does, so that it never outlives the process that started it; run by hand, `nvml-worker </dev/zero | jq` shows a host.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"gpu-exporter/nvml"
	"gpu-exporter/nvml/frame"
	"gpu-exporter/nvml/poller"
)

func main() { os.Exit(run()) }

func run() int {
	var cfg poller.Config
	flags := flag.NewFlagSet("nvml-worker", flag.ContinueOnError)
	library := flags.String("library", "", "the NVML library; searched in the usual places when empty")
	flags.DurationVar(&cfg.Interval, "interval", 0, "period of load and process list (default 1s)")
	flags.DurationVar(&cfg.Samples, "samples", 0, "period of the sample rings (default 2s; the power ring holds 2.4s)")
	flags.DurationVar(&cfg.Energy, "energy", 0, "period of the energy counter (default 10s)")
	flags.DurationVar(&cfg.Health, "health", 0, "period of the health figures (default 10s)")
	flags.DurationVar(&cfg.GPM, "gpm", 0, "period of the GPM metrics (default 2s)")
	flags.DurationVar(&cfg.Info, "info", 0, "period of the unchanging facts (default 5m)")
	flags.DurationVar(&cfg.Deadline, "deadline", 0, "a device silent for longer is reported as hung (default 5s)")
	if err := flags.Parse(os.Args[1:]); err != nil {
		return 2
	}
	if flags.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "nvml-worker: unexpected argument %q\n", flags.Arg(0))
		return 2
	}

	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	go func() {
		io.Copy(io.Discard, os.Stdin)
		stop()
	}()

	out := bufio.NewWriterSize(os.Stdout, 64<<10)
	enc := json.NewEncoder(out)
	emit := func(f *frame.Frame) {
		if enc.Encode(f) != nil || out.Flush() != nil {
			stop() // nobody reads any more
		}
	}
	lib, err := nvml.Open(nvml.Config{Path: *library})
	if err != nil {
		emit(poller.Unusable(err, ""))
		return 1
	}
	if err := poller.Run(ctx, lib, cfg, emit); err != nil {
		fmt.Fprintf(os.Stderr, "nvml-worker: %v\n", err)
		return 1
	}
	return 0
}
