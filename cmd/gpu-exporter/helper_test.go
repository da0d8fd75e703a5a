package main

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

var buildDir string // holds the program under test

func TestMain(m *testing.M) {
	if what := os.Getenv("GPU_EXPORTER_HOSTILE"); what != "" {
		hostile(what)
	}
	dir, err := os.MkdirTemp("", "gpu-exporter-test-*")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	// Other users run the program too.
	if err := os.Chmod(dir, 0o755); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	buildDir = dir
	status := m.Run()
	os.RemoveAll(dir)
	os.Exit(status)
}

// program returns the path of the real binary, built once as `make build` does it: static, stripped, with the worker inside.
func program(t *testing.T) string {
	t.Helper()
	path, err := built()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

var built = sync.OnceValues(func() (string, error) { return buildFor(runtime.GOARCH) })

// buildFor builds the program for an architecture, worker inside.
func buildFor(arch string) (string, error) {
	dir := filepath.Join(buildDir, arch)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	flags, err := exec.Command("make", "-s", "-C", "../..", "print-gcflags").Output()
	if err != nil {
		return "", fmt.Errorf("asking make for the flags: %w", err)
	}
	always := append([]string{"build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w"}, strings.Fields(string(flags))...)
	build := func(args ...string) error {
		cmd := exec.Command("go", slices.Concat(always, args)...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOARCH="+arch)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("building: %w\n%s", err, out)
		}
		return nil
	}
	worker, path := filepath.Join(dir, "nvml-worker"), filepath.Join(dir, "gpu-exporter")
	if err := build("-o", worker, "../nvml-worker"); err != nil {
		return "", err
	}
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	b, err := os.ReadFile(worker)
	if err != nil {
		return "", err
	}
	z.Write(b)
	z.Close()
	if err := os.WriteFile(worker+".gz", packed.Bytes(), 0o644); err != nil {
		return "", err
	}
	// An overlay puts the worker where the embedding looks for it, and leaves the source tree as it is.
	place, err := filepath.Abs("../../exporter/worker/embedded/nvml-worker.gz")
	if err != nil {
		return "", err
	}
	overlay, err := json.Marshal(map[string]any{"Replace": map[string]string{place: worker + ".gz"}})
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(worker+".json", overlay, 0o644); err != nil {
		return "", err
	}
	return path, build("-overlay", worker+".json", "-tags", "embedworker,tcell_minimal", "-o", path, ".")
}

// process is a running gpu-exporter.
type process struct {
	cmd     *exec.Cmd
	address string
	log     lockedBuffer
	exited  chan struct{}
	err     error // how it ended, once exited is closed
}

// lockedBuffer is a buffer that may be read while it is written.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// launch starts the program on a port of its own; change may alter the command before that.
func launch(t *testing.T, change func(*exec.Cmd), args ...string) *process {
	t.Helper()
	p := &process{cmd: exec.Command(program(t), append(args, "--web.listen-address=127.0.0.1:0")...), exited: make(chan struct{})}
	p.cmd.Stderr = &p.log
	if change != nil {
		change(p.cmd)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.exited)
	}()
	t.Cleanup(func() { p.cmd.Process.Kill(); <-p.exited })
	return p
}

// start starts the program and waits until it serves.
func start(t *testing.T, args ...string) *process {
	t.Helper()
	p := launch(t, nil, args...)
	p.serving(t)
	return p
}

var listening = regexp.MustCompile(`msg="Listening on" address=(\S+)`)

// serving waits until the program serves, and learns its address.
func (p *process) serving(t *testing.T) {
	t.Helper()
	for range 200 {
		if m := listening.FindStringSubmatch(p.log.String()); m != nil {
			p.address = m[1]
			return
		}
		select {
		case <-p.exited:
			t.Fatalf("it ended: %v\n%s", p.err, p.log.String())
		case <-time.After(50 * time.Millisecond):
		}
	}
	t.Fatalf("it does not serve:\n%s", p.log.String())
}

// alive tells whether the program still runs.
func (p *process) alive() bool {
	select {
	case <-p.exited:
		return false
	default:
		return true
	}
}

// stop ends the program as systemd and Docker do, and sees that it ends well and takes its worker along.
func (p *process) stop(t *testing.T) {
	t.Helper()
	kin := descendants(p.cmd.Process.Pid)
	p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.exited:
	case <-time.After(8 * time.Second):
		t.Errorf("it does not end by SIGTERM:\n%s", p.log.String())
		return
	}
	if p.err != nil {
		t.Errorf("SIGTERM: %v\n%s", p.err, p.log.String())
	}
	for _, pid := range kin {
		for i := 0; running(pid); i++ {
			if i == 20 {
				t.Errorf("process %d, a child of the exporter, outlives it", pid)
				syscall.Kill(pid, syscall.SIGKILL)
				break
			}
			time.Sleep(50 * time.Millisecond)
		}
	}
}

// stat returns the state and the parent of a process, zero when there is none.
func stat(pid int) (state byte, parent int) {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(fields) < 2 {
		return 0, 0
	}
	parent, _ = strconv.Atoi(fields[1])
	return fields[0][0], parent
}

// running tells whether a process is there and no zombie.
func running(pid int) bool {
	state, _ := stat(pid)
	return state != 0 && state != 'Z'
}

// descendants returns the children of a process, and theirs.
func descendants(pid int) []int {
	var list []int
	files, _ := filepath.Glob("/proc/[0-9]*")
	for _, f := range files {
		child, err := strconv.Atoi(filepath.Base(f))
		if err != nil {
			continue
		}
		if _, parent := stat(child); parent == pid {
			list = append(append(list, child), descendants(child)...)
		}
	}
	return list
}

// complaints returns the warnings and errors that were logged.
func (p *process) complaints() []string {
	var list []string
	for line := range strings.Lines(p.log.String()) {
		if strings.Contains(line, "level=WARN") || strings.Contains(line, "level=ERROR") {
			list = append(list, strings.TrimSpace(line))
		}
	}
	return list
}

// get returns what the program answers.
func (p *process) get(t *testing.T, path string) string {
	t.Helper()
	r, err := http.Get("http://" + p.address + path)
	if err != nil {
		t.Fatalf("%v\n%s", err, p.log.String())
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	if r.StatusCode != http.StatusOK {
		t.Fatalf("%s: %s\n%s", path, r.Status, b)
	}
	return string(b)
}

// scrape is an exposition: the series of each family.
type scrape map[string][]series

type series struct {
	labels map[string]string
	value  float64 // of a histogram its sum
}

// scrape reads /metrics, which must be well-formed.
func (p *process) scrape(t *testing.T) scrape {
	t.Helper()
	return parse(t, p.get(t, "/metrics"))
}

func parse(t *testing.T, text string) scrape {
	t.Helper()
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(text))
	if err != nil {
		t.Fatalf("/metrics: %v\n%s", err, text)
	}
	s := scrape{}
	for name, f := range families {
		for _, m := range f.GetMetric() {
			one := series{map[string]string{}, m.GetGauge().GetValue() + m.GetCounter().GetValue() + m.GetUntyped().GetValue() + m.GetHistogram().GetSampleSum()}
			for _, l := range m.GetLabel() {
				one.labels[l.GetName()] = l.GetValue()
			}
			s[name] = append(s[name], one)
		}
	}
	return s
}

// find returns the series of a family that have the labels given as name and value in turn.
func (s scrape) find(name string, labels ...string) []series {
	var list []series
	for _, x := range s[name] {
		match := true
		for i := 0; i < len(labels); i += 2 {
			match = match && x.labels[labels[i]] == labels[i+1]
		}
		if match {
			list = append(list, x)
		}
	}
	return list
}

// has tells whether exactly one series has the labels, and the value.
func (s scrape) has(value float64, name string, labels ...string) bool {
	list := s.find(name, labels...)
	return len(list) == 1 && list[0].value == value
}

// want fails the test unless exactly one series has the labels, and the value.
func (s scrape) want(t *testing.T, value float64, name string, labels ...string) {
	t.Helper()
	if !s.has(value, name, labels...) {
		t.Errorf("%s%q is %v, want one series of value %v; all: %v", name, labels, s.find(name, labels...), value, s[name])
	}
}

// none fails the test if a series has the labels.
func (s scrape) none(t *testing.T, name string, labels ...string) {
	t.Helper()
	if list := s.find(name, labels...); len(list) > 0 {
		t.Errorf("%s%q is there: %v", name, labels, list)
	}
}

// sum adds up the series that have the labels.
func (s scrape) sum(name string, labels ...string) float64 {
	var sum float64
	for _, x := range s.find(name, labels...) {
		sum += x.value
	}
	return sum
}

// until scrapes until ok, or fails the test.
func (p *process) until(t *testing.T, within time.Duration, what string, ok func(scrape) bool) scrape {
	t.Helper()
	deadline := time.Now().Add(within)
	for {
		s := p.scrape(t)
		if ok(s) {
			return s
		}
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s\nlog:\n%s\n%s", within, what, p.log.String(), p.get(t, "/metrics"))
		}
		time.Sleep(20 * time.Millisecond)
	}
}
