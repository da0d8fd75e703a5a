package poller

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"gpu-exporter/nvml"
	"gpu-exporter/nvml/fake"
	"gpu-exporter/nvml/frame"
)

// host is a fake host: a copy of the fake library with a scenario of its own, so that tests can run side by side.
type host struct {
	t    *testing.T
	dir  string
	path string // of the library
	lib  *nvml.Library
}

// newHost opens the fake library with a scenario of "system" lines and one block of lines per GPU.
func newHost(t *testing.T, gpus ...string) *host {
	t.Helper()
	h := &host{t: t, dir: t.TempDir()}
	b, err := os.ReadFile(fake.Build(t))
	if err != nil {
		t.Fatal(err)
	}
	h.path = filepath.Join(h.dir, "libnvidia-ml.so.1")
	if err := os.WriteFile(h.path, b, 0o755); err != nil {
		t.Fatal(err)
	}
	h.set(gpus...)
	if h.lib, err = nvml.Open(nvml.Config{Path: h.path}); err != nil {
		t.Fatal(err)
	}
	return h
}

// set replaces the scenario. A block that starts with "fault" is a line of the system.
func (h *host) set(gpus ...string) {
	h.t.Helper()
	var b strings.Builder
	fmt.Fprintf(&b, "driver 580.159.04\nnvml 13.580.159.04\ncuda 13000\nlog %s\n", filepath.Join(h.dir, "calls"))
	for _, g := range gpus {
		if !strings.HasPrefix(g, "fault") {
			b.WriteString("gpu\n")
		}
		b.WriteString(strings.TrimSpace(g) + "\n")
	}
	tmp := filepath.Join(h.dir, "new")
	if err := os.WriteFile(tmp, []byte(b.String()), 0o644); err != nil {
		h.t.Fatal(err)
	}
	if err := os.Rename(tmp, h.path+".scenario"); err != nil {
		h.t.Fatal(err)
	}
}

// calls returns how often each function was called on a device so far; index -1 is the system.
func (h *host) calls(index int) map[string]int {
	h.t.Helper()
	b, err := os.ReadFile(filepath.Join(h.dir, "calls"))
	if err != nil && !os.IsNotExist(err) {
		h.t.Fatal(err)
	}
	n := map[string]int{}
	for _, line := range strings.Split(string(b), "\n") {
		// time thread FUNCTION index
		f := strings.Fields(line)
		if len(f) >= 4 && f[len(f)-1] == strconv.Itoa(index) {
			n[f[2]]++
		}
	}
	return n
}

func (h *host) forgetCalls() {
	h.t.Helper()
	if err := os.Truncate(filepath.Join(h.dir, "calls"), 0); err != nil {
		h.t.Fatal(err)
	}
}

// h200 is a device with everything that the measured one has.
func h200(index int, more ...string) string {
	return fmt.Sprintf(`
uuid GPU-%d
name NVIDIA H200
pci 0000:%02x:00
minor %d
serial 165%d
vbios 96.00.AF.00.01
architecture 9
cuda_capability 9 0
persistence 1
compute_mode 0
mig_mode 0
memory 150754820096 644939776 2147483648
bar1 274877906944 1048576
utilization 42 7
temperature 38
temperature_threshold 92 89
field 82 0 1 45
power 120500
power_limit 700000
power_limits 200000 700000
energy 5000000
clock 1980 1980 3201 1605
clock_max 1980 1980 3201 1605
pstate 0
throttle 4
encoder 0
decoder 1
jpeg 2
ofa 3
ecc 1 2 3 4
remapped_rows 5 6 1 0
pcie_generation 5
pcie_width 16
pcie_generation_max 5
pcie_width_max 16
pcie_replays 8
pcie_throughput 1000 2000
encoder_sessions 0
field 74 0 2 1500000000
event_types 0x9
gpm 1 50
gpm 2 40
gpm 3 30
gpm 5 20
gpm 10 10
gpm 20 100
gpm 21 200
%s`, index, 0x0a+index, 7-index, index, strings.Join(more, "\n"))
}

// plain is a device of before Hopper that supports little.
func plain(index int, more ...string) string {
	return fmt.Sprintf("uuid GPU-%d\nname Old\npci 0000:%02x:00\nmemory 1000000 0 1000\nutilization 1 1\nno_process_samples 1\nno_samples 1\n%s\n",
		index, 0x0a+index, strings.Join(more, "\n"))
}

// stepper ticks the devices of a host by a clock of its own.
type stepper struct {
	*poller
	now time.Time
}

func newStepper(t *testing.T, h *host, c Config) *stepper {
	t.Helper()
	s := &stepper{now: time.Now().Truncate(time.Second)}
	c.now = func() time.Time { return s.now }
	if c.SysFS == "" {
		c.SysFS = t.TempDir()
	}
	s.poller = newPoller(h.lib, c, func(*frame.Frame) {})
	if err := s.init(); err != nil {
		t.Fatal(err)
	}
	return s
}

// steps ticks every device n times, a second apart.
func (s *stepper) steps(n int, seen func(i int, f *frame.Frame)) {
	for range n {
		for i, d := range s.devices {
			f := d.tick(s.now)
			if seen != nil {
				seen(i, f)
			}
		}
		s.now = s.now.Add(time.Second)
	}
}

// sink keeps deep copies of frames that Run delivers.
type sink struct {
	mu     sync.Mutex
	frames []*frame.Frame
}

func (s *sink) emit(f *frame.Frame) {
	c := copyOf(f)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.frames = append(s.frames, c)
}

func (s *sink) all() []*frame.Frame {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.frames[:len(s.frames):len(s.frames)]
}

// start runs the poller in the background until the test ends.
func start(t *testing.T, h *host, c Config) (*sink, <-chan error) {
	t.Helper()
	if c.SysFS == "" {
		c.SysFS = t.TempDir()
	}
	out := &sink{}
	ctx, cancel := context.WithCancel(context.Background())
	ended, result := make(chan struct{}), make(chan error, 1)
	go func() {
		defer close(ended)
		result <- Run(ctx, h.lib, c, out.emit)
	}()
	t.Cleanup(func() {
		cancel()
		select {
		case <-ended:
		case <-time.After(10 * time.Second):
			t.Error("Run does not end with its context")
		}
	})
	return out, result
}

// wait returns once ok is true of the frames so far.
func (s *sink) wait(t *testing.T, what string, ok func([]*frame.Frame) bool) []*frame.Frame {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if got := s.all(); ok(got) {
			return got
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s did not come", what)
		}
	}
}
