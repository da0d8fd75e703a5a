// Nvml-worker reads NVML and prints one JSON object per line: the library's state, then one object per device and tick, and events as they come.
// The package nvml/frame describes the lines.
//
// It is the only part of gpu-exporter that loads NVIDIA's library, and so the only part that the library can hang or crash. It ends when its
// standard input does, so that it never outlives the process that started it. Run by hand, `nvml-worker | jq` shows what a host's NVML says, and
// `nvml-worker --once | jq` says it once.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"syscall"
	"time"

	"gpu-exporter/nvml"
	"gpu-exporter/nvml/frame"
	"gpu-exporter/nvml/poller"
)

func main() { os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr)) }

// run returns the exit status: 0 at the end of its input or by a signal, 1 when NVML is unusable, 2 for wrong flags.
func run(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	var cfg poller.Config
	flags := flag.NewFlagSet("nvml-worker", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	library := flags.String("library", "", "the NVML library `file`; searched in the usual places when empty")
	flags.DurationVar(&cfg.Interval, "interval", time.Second, "`period` of load and process list")
	flags.DurationVar(&cfg.Samples, "samples", 3*time.Second, "`period` of the process samples")
	flags.DurationVar(&cfg.Power, "power", 2*time.Second, "`period` of the power samples; the driver's ring holds 2.4s")
	flags.DurationVar(&cfg.Util, "utilization", 10*time.Second, "`period` of the device's utilisation samples; the driver's ring holds 14s")
	flags.DurationVar(&cfg.Energy, "energy", 10*time.Second, "`period` of the energy counter, a dear call")
	flags.DurationVar(&cfg.Health, "health", 10*time.Second, "`period` of ECC errors, fans, links and the like")
	flags.DurationVar(&cfg.GPM, "gpm", 5*time.Second, "`period` of the GPM metrics (Hopper and later)")
	flags.DurationVar(&cfg.FastGPM, "gpm-fast", 0, "`period` of additional short GPM readings of SM activity, such as 100ms; 0: none")
	flags.DurationVar(&cfg.Info, "info", 5*time.Minute, "`period` of the unchanging facts")
	flags.DurationVar(&cfg.Deadline, "deadline", 5*time.Second, "a device whose call takes longer than this `time` is reported as hung")
	flags.Float64Var(&cfg.PCIeBudget, "pcie-budget", 0.005, "`part` of a core that the PCIe byte counters of a device without GPM may cost")
	flags.BoolVar(&cfg.Once, "once", false, "read every device once and end")
	if err := flags.Parse(args); errors.Is(err, flag.ErrHelp) {
		flags.SetOutput(stderr)
		fmt.Fprintln(stderr, "usage: nvml-worker [flags]")
		flags.PrintDefaults()
		return 0
	} else if err != nil {
		fmt.Fprintf(stderr, "nvml-worker: %v\n", err)
		return 2
	}
	if flags.NArg() > 0 {
		fmt.Fprintf(stderr, "nvml-worker: unexpected argument %q\n", flags.Arg(0))
		return 2
	}
	var wrong error
	flags.VisitAll(func(f *flag.Flag) {
		if d, ok := f.Value.(flag.Getter).Get().(time.Duration); ok && (d < 0 || d > 0 && d < 10*time.Millisecond || d == 0 && f.Name != "gpm-fast") {
			wrong = fmt.Errorf("--%s must be at least 10ms, not %v", f.Name, d)
		}
	})
	if wrong != nil {
		fmt.Fprintf(stderr, "nvml-worker: %v\n", wrong)
		return 2
	}
	frugal()

	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if !cfg.Once {
		go func() {
			_, _ = io.Copy(io.Discard, stdin)
			// At once: a device's goroutine may hang in the driver, and its reader is gone anyway.
			os.Exit(0)
		}()
	}

	out := bufio.NewWriterSize(stdout, 16<<10)
	enc := json.NewEncoder(out)
	emit := func(f *frame.Frame) {
		if err := enc.Encode(f); err != nil {
			fmt.Fprintf(stderr, "nvml-worker: writing a frame: %v\n", err)
		}
		if out.Flush() != nil {
			stop() // nobody reads any more
		}
	}
	lib, err := nvml.Open(nvml.Config{Path: *library})
	if err != nil {
		emit(poller.Unusable(err))
		return 1
	}
	if err := poller.Run(ctx, lib, cfg, emit); err != nil {
		return 1 // its last frame says why
	}
	return 0
}

// frugal keeps the program small: its own heap is a few hundred kilobytes beside NVML's 15 MB, and its threads sleep or wait for the driver, for
// which a goroutine leaves its processor of Go's scheduler to the others. So one is enough; a second one would take 0.6 MB.
func frugal() {
	// The program was executed by descriptor and is called "3" in ps, unless it says its name.
	_ = os.WriteFile("/proc/self/comm", []byte("nvml-worker"), 0)
	runtime.GOMAXPROCS(1)
	debug.SetGCPercent(25)
}
