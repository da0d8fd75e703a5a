// Soak runs an exporter for long while containers and processes come and go, looks at what it holds every few seconds, and says whether any of that
// grew: a table and PASS or FAIL. With --exporter it makes the host itself: the fake NVML library, a real Docker engine, real containers and processes
// that open a stand-in device, traced by the real tracer. With a command after "--" it watches that exporter at --url, and what happens on the host
// is up to the caller. It needs root.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"syscall"
	"time"
)

func main() {
	ok, err := run()
	if err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

func run() (ok bool, err error) {
	exporter := flag.String("exporter", "", "exporter to soak on a host that is made here")
	url := flag.String("url", "", "where the command after -- serves, as http://127.0.0.1:9400")
	length := flag.Duration("for", 10*time.Minute, "how long")
	every := flag.Duration("every", 5*time.Second, "time between two looks")
	rate := flag.Float64("rate", 20, "how many times as much comes and goes as on a host that starts a container and 40 processes on its GPUs each minute")
	looks := flag.String("looks", "", "file for all that was seen, a line of JSON for each look")
	flag.Parse()
	if *length < 40**every || *every < time.Second || *rate <= 0 {
		return false, fmt.Errorf("--for is at least 40 times --every, --every at least 1s, and --rate above 0")
	}
	if (*exporter == "") == (flag.NArg() == 0) || (*url == "") != (flag.NArg() == 0) {
		return false, fmt.Errorf("either --exporter, or --url and a command after --")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	temporary, err := os.MkdirTemp("", "soak")
	if err != nil {
		return false, err
	}
	defer os.RemoveAll(temporary)
	w := watcher{url: *url, temporary: temporary}
	came := func() string { return "what the caller did" }
	if *exporter == "" {
		w.cmd = exec.Command(flag.Arg(0), flag.Args()[1:]...)
	} else {
		h, err := newHost(*rate)
		if err != nil {
			return false, err
		}
		defer h.close()
		address, err := freeAddress()
		if err != nil {
			return false, err
		}
		w.cmd, w.url = exec.Command(*exporter, append(h.flags, "--web.listen-address="+address)...), "http://"+address
		churning, end := context.WithCancel(ctx)
		ended := make(chan struct{})
		go func() {
			h.churn(churning)
			close(ended)
		}()
		defer func() { end(); <-ended }()
		came = func() string {
			return fmt.Sprintf("%d containers, %d processes", h.containers.Load(), h.processes.Load())
		}
	}
	samples, failure := w.watch(ctx, *length, *every) // what was seen until a failure is told all the same
	if *looks != "" {
		if err := keep(*looks, samples); err != nil {
			return false, err
		}
	}
	events, _ := w.value("gpu_exporter_tracer_events_total")
	lost, _ := w.value("gpu_exporter_tracer_lost_events_total")
	fmt.Printf("%s; %v, a look every %v; came and went: %s; the tracer read %.0f events and lost %.0f\n\n", machine(), *length, *every, came(), events, lost)
	if events == 0 {
		return false, errors.Join(failure, errors.New("the tracer saw nothing: this run shows nothing"))
	}
	lines, err := judge(samples)
	if err != nil {
		return false, errors.Join(failure, err)
	}
	flat := write(os.Stdout, lines)
	if failure == nil {
		fmt.Printf("It ended %v after SIGTERM.\n", w.ended.Round(time.Millisecond))
	}
	return flat, failure
}

// machine says where the figures are from.
func machine() string {
	release, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	return fmt.Sprintf("kernel %s, %d processors", bytes.TrimSpace(release), runtime.NumCPU())
}
