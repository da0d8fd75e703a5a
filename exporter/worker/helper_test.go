package worker

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"gpu-exporter/exporter/input"
	"gpu-exporter/nvml/frame"
)

// The test binary is its own worker: with WORKER_HELPER set it behaves as that says instead of running tests.
func TestMain(m *testing.M) {
	if mode := os.Getenv("WORKER_HELPER"); mode != "" {
		os.Exit(helper(mode))
	}
	if os.Getenv("WORKER_PARENT") != "" {
		parent()
		return
	}
	if os.Getenv("WORKER_NOEXEC") != "" {
		noexec()
		return
	}
	os.Exit(m.Run())
}

func deviceLine(state frame.State) []byte {
	f := frame.Frame{Version: frame.Version, Time: time.Now().UnixNano(), Device: &frame.Device{Index: 0, UUID: "GPU-1", State: state}}
	b, _ := json.Marshal(&f)
	return append(b, '\n')
}

func libraryLine(ok bool, reason string) []byte {
	f := frame.Frame{Version: frame.Version, Time: time.Now().UnixNano(), Library: &frame.Library{OK: ok, Reason: reason, Devices: 1}}
	b, _ := json.Marshal(&f)
	return append(b, '\n')
}

// helper is a worker that misbehaves. Each mode first does everything right.
func helper(mode string) int {
	signal.Ignore(syscall.SIGTERM)
	go func() {
		if mode == "deaf" {
			return
		}
		io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	if mode == "library" {
		os.Stdout.Write(libraryLine(false, "the NVIDIA driver is not loaded"+strings.Repeat(" or not found", 100)))
		return 1
	}
	if mode == "silent" {
		time.Sleep(time.Hour)
	}
	os.Stdout.Write(libraryLine(true, ""))
	for range 3 {
		os.Stdout.Write(deviceLine(frame.StateOK))
	}
	switch mode {
	case "hang", "deaf":
		time.Sleep(time.Hour)
	case "killed":
		syscall.Kill(os.Getpid(), syscall.SIGKILL)
		time.Sleep(time.Hour)
	case "exit":
		fmt.Fprintln(os.Stderr, "giving up")
		return 3
	case "segv":
		signal.Reset()
		syscall.Kill(os.Getpid(), syscall.SIGSEGV)
		select {}
	case "garbage":
		for {
			fmt.Println("Segmentation fault? {no json}")
		}
	case "binary":
		for {
			os.Stdout.Write([]byte{0, 0xff, '\n', '{', '\n', '\n'})
		}
	case "version":
		fmt.Println(`{"v":99,"time":1,"device":"now a string"}`)
		select {}
	case "half":
		os.Stdout.Write(deviceLine(frame.StateOK)[:40])
		return 0
	case "drip":
		for {
			os.Stdout.Write([]byte{'{'})
			time.Sleep(10 * time.Millisecond)
		}
	case "huge":
		os.Stdout.Write(bytes.Repeat([]byte{'x'}, 1<<20))
		os.Stdout.Write([]byte{'\n'})
		os.Stdout.Write(deviceLine(frame.StateLost))
		select {}
	case "allhung":
		for {
			os.Stdout.Write(deviceLine(frame.StateHung))
			time.Sleep(10 * time.Millisecond)
		}
	case "fat":
		b := make([]byte, 96<<20)
		for i := 0; i < len(b); i += 4096 {
			b[i] = 1
		}
		for {
			os.Stdout.Write(deviceLine(frame.StateOK))
			time.Sleep(10 * time.Millisecond)
			b[0]++
		}
	case "babble":
		for range 100 {
			fmt.Fprintln(os.Stderr, "the same thing again \x1b[31m")
		}
		fallthrough
	case "good":
		for {
			os.Stdout.Write(deviceLine(frame.StateOK))
			time.Sleep(10 * time.Millisecond)
		}
	}
	return 99
}

// recorder keeps what a supervisor emits.
type recorder struct {
	mu      sync.Mutex
	inputs  []input.Input
	changed chan struct{}
}

func (r *recorder) emit(i input.Input) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.inputs = append(r.inputs, i)
	select {
	case r.changed <- struct{}{}:
	default:
	}
}

// wait returns once ok is true of what was emitted so far.
func (r *recorder) wait(t *testing.T, what string, ok func([]input.Input) bool) []input.Input {
	t.Helper()
	late := time.After(20 * time.Second)
	for {
		r.mu.Lock()
		got := r.inputs[:len(r.inputs):len(r.inputs)]
		r.mu.Unlock()
		if ok(got) {
			return got
		}
		select {
		case <-r.changed:
		case <-time.After(20 * time.Millisecond): // what is waited for need not be an input
		case <-late:
			t.Fatalf("%s did not come; last: %s", what, show(got))
		}
	}
}

func show(in []input.Input) string {
	b, _ := json.Marshal(in[max(0, len(in)-5):])
	return string(b)
}

// last returns the latest source among inputs.
func last(in []input.Input) *input.Source {
	for i := len(in) - 1; i >= 0; i-- {
		if in[i].Source != nil {
			return in[i].Source
		}
	}
	return &input.Source{}
}

// restarted says that a restart for a reason was counted, and the next worker's frames came.
func restarted(reason string, n uint64) func([]input.Input) bool {
	return func(in []input.Input) bool { return last(in).Restarts[reason] >= n }
}

func frames(in []input.Input) (n int) {
	for _, i := range in {
		if i.Frame != nil && i.Frame.Device != nil {
			n++
		}
	}
	return n
}

// logs is a handler that keeps lines.
type logs struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logs) count(s string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.b.String(), s)
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// run starts a supervisor of the test binary in a mode; everything is fast.
func run(t *testing.T, mode string, change func(*Config)) (*Supervisor, *recorder, *logs) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	l := &logs{}
	c := Config{
		Path: self, Env: []string{"WORKER_HELPER=" + mode, "GORACE=atexit_sleep_ms=0"},
		StartTimeout: 10 * time.Second, HangAfter: 300 * time.Millisecond, AllHungAfter: 300 * time.Millisecond, KillGrace: 5 * time.Second, StopGrace: 5 * time.Second,
		BackoffMin: 10 * time.Millisecond, BackoffMax: 40 * time.Millisecond,
		Logger: slog.New(slog.NewTextHandler(l, nil)),
	}
	if change != nil {
		change(&c)
	}
	s := New(c)
	r := &recorder{changed: make(chan struct{}, 1)}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.Run(ctx, r.emit)
	}()
	t.Cleanup(func() {
		cancel()
		select {
		case <-ended:
		case <-time.After(20 * time.Second):
			t.Error("Run does not end with its context")
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.running != nil {
			t.Error("a worker is still running")
		}
		for _, p := range s.stuck {
			syscall.Kill(p.pid, syscall.SIGKILL)
		}
	})
	return s, r, l
}
