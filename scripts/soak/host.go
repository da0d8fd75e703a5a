package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"gpu-exporter/exporter/docker/dockertest"
	"gpu-exporter/nvml/fake"
)

// What comes and goes each minute on a usual host.
const (
	perContainer = 30 // processes that a container has in its life
	onHost       = 10 // processes outside containers
)

// host is a GPU host without GPUs on which containers and processes come and go.
type host struct {
	keeper
	dir    string
	flags  []string // for the exporter
	rate   float64
	engine *dockertest.Daemon

	containers, processes atomic.Int64 // that were started

	mu   sync.Mutex
	jobs []int // PIDs of what runs: containers and the host's own
}

// The stand-in for a GPU's node is /dev/full, whose minor is that of the fake GPU.
const (
	device     = "/dev/full"
	deviceFlag = "--tracer.devices=1:7=gpu"
)

// newHost makes one. The caller closes it.
func newHost(rate float64) (h *host, err error) {
	h = &host{rate: rate}
	defer func() {
		if err != nil {
			h.close()
		}
	}()
	h.Cleanup(func() { os.RemoveAll(h.dir) })
	if h.dir, err = os.MkdirTemp("", "soak"); err != nil {
		return h, err
	}
	library, err := fake.BuildTo(h.dir)
	if err != nil {
		return h, err
	}
	for _, args := range [][]string{
		{"gcc", "-O1", "-o", h.file("churn"), "scripts/churn.c", "-ldl", "-lpthread"},
		{"gcc", "-O1", "-fno-omit-frame-pointer", "-shared", "-fPIC", "-DLIBCUDA", "-Wl,-soname,libcuda.so.1", "-o", h.file("libcuda.so.1"), "scripts/churn.c"},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			return h, fmt.Errorf("%s: %w\n%s", args[0], err, out)
		}
	}
	if err := os.Mkdir(h.file("libraries"), 0o755); err != nil {
		return h, err
	}
	if err := h.play(); err != nil {
		return h, err
	}
	if err := h.start(); err != nil {
		return h, err
	}
	h.flags = []string{"--nvml.library=" + library, "--docker.host=" + h.engine.Host, deviceFlag, "--log.level=warn"}
	return h, nil
}

func (h *host) file(name string) string { return filepath.Join(h.dir, name) }

// churn starts containers and processes at the host's rate until the context ends.
func (h *host) churn(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	running.Go(func() { h.outside(ctx) })
	running.Go(func() {
		for every := time.NewTicker(time.Second); ; {
			select {
			case <-ctx.Done():
				every.Stop()
				return
			case <-every.C:
				if err := h.play(); err != nil {
					h.Log(err)
				}
			}
		}
	})
	pause := time.NewTicker(time.Duration(float64(time.Minute) / h.rate))
	defer pause.Stop()
	for n := 1; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-pause.C:
			running.Go(func() {
				if err := h.container(ctx, n); err != nil && ctx.Err() == nil {
					h.Log(err)
				}
			})
		}
	}
}

// container runs one from its start to its end. Each has a libcuda of its own, as an image has.
func (h *host) container(ctx context.Context, n int) error {
	name, image, seconds := fmt.Sprintf("job-%d", n), fmt.Sprintf("team/image-%d", n%50), 10+rand.IntN(20)
	library := h.file(fmt.Sprintf("libraries/%d.so", n))
	defer os.Remove(library)
	b, err := os.ReadFile(h.file("libcuda.so.1"))
	if err != nil {
		return err
	}
	if err := os.WriteFile(library, b, 0o755); err != nil {
		return err
	}
	if _, err := h.engine.Command("tag", "empty", image); err != nil {
		return fmt.Errorf("tagging an image: %w", err)
	}
	args := []string{"run", "-d", "--rm", "--name", name, "--network=none", "--stop-signal=SIGKILL", "-v", h.file("churn") + ":/churn:ro",
		"-v", library + ":/cuda/libcuda.so.1:ro", "--label", fmt.Sprintf("com.docker.compose.project=project-%d", n)}
	for _, dir := range []string{"/usr", "/lib", "/lib64"} {
		if _, err := os.Stat(dir); err == nil {
			args = append(args, "-v", dir+":"+dir+":ro")
		}
	}
	if n%2 == 0 {
		args = append(args, "--gpus=device=0")
	}
	args = append(args, image, "/churn", device, "/cuda/libcuda.so.1", strconv.Itoa(perContainer), strconv.Itoa(seconds))
	if _, err := h.engine.Command(args...); err != nil {
		return fmt.Errorf("starting a container: %w", err)
	}
	h.containers.Add(1)
	h.processes.Add(perContainer)
	text, err := h.engine.Command("inspect", "-f", "{{.State.Pid}}", name)
	if pid, e := strconv.Atoi(text); err == nil && e == nil && pid > 0 {
		defer h.job(pid)()
	}
	end := time.Duration(seconds) * time.Second
	if n%3 == 0 {
		select {
		case <-ctx.Done():
		case <-time.After(end / 2):
		}
		what := []string{"kill", name}
		if n%2 == 0 {
			what = []string{"rename", name, name + "-renamed"}
		}
		if _, err := h.engine.Command(what...); err != nil {
			return fmt.Errorf("docker %s: %w", what[0], err)
		}
		end /= 2
	}
	select {
	case <-ctx.Done():
	case <-time.After(end):
	}
	return nil
}

// outside runs processes outside containers.
func (h *host) outside(ctx context.Context) {
	for ctx.Err() == nil {
		count := max(1, int(onHost*h.rate/2))
		cmd := exec.CommandContext(ctx, h.file("churn"), device, h.file("libcuda.so.1"), strconv.Itoa(count), "30")
		if err := cmd.Start(); err != nil {
			h.Log(err)
			return
		}
		h.processes.Add(int64(count))
		done := h.job(cmd.Process.Pid)
		_ = cmd.Wait() // it is killed at the end
		done()
	}
}

// job notes that a process runs, until what is returned is called.
func (h *host) job(pid int) (done func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.jobs = append(h.jobs, pid)
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.jobs = slices.DeleteFunc(h.jobs, func(p int) bool { return p == pid })
	}
}

// play makes the fake library list the processes that run now, and those of their children that are there.
func (h *host) play() error {
	gpu := fake.H200(0)
	gpu.Set("energy", 1_000_000, 300_000)
	used := uint64(500 << 20)
	h.mu.Lock()
	jobs := slices.Clone(h.jobs)
	h.mu.Unlock()
	for _, job := range jobs {
		for _, pid := range tree(job) {
			p := fake.Process{PID: pid, Memory: uint64(1+rand.IntN(64)) << 20}
			used += p.Memory
			gpu.Processes = append(gpu.Processes, p)
			gpu.Busy = append(gpu.Busy, fake.Busy{PID: pid, SM: rand.IntN(3)})
		}
	}
	gpu.Set("memory", uint64(150754820096), 644939776, used)
	return fake.Scenario{GPUs: []fake.GPU{gpu}}.WriteFile(h.file("libnvidia-ml.so.1.scenario"))
}

// freeAddress returns one of this host's loopback addresses with a port that nothing listens on.
func freeAddress() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	return l.Addr().String(), nil
}

// keeper stands for the test that dockertest is written for: it keeps what is to be done at the end.
type keeper struct {
	cleanups []func()
}

// fatal is what Fatal panics with.
type fatal string

func (*keeper) Helper() {}

func (*keeper) Log(args ...any) { fmt.Fprintln(os.Stderr, args...) }

func (*keeper) Error(args ...any) { fmt.Fprintln(os.Stderr, args...) }

func (*keeper) Fatal(args ...any) { panic(fatal(fmt.Sprint(args...))) }

func (*keeper) Fatalf(format string, args ...any) { panic(fatal(fmt.Sprintf(format, args...))) }

func (k *keeper) Cleanup(f func()) { k.cleanups = append(k.cleanups, f) }

func (k *keeper) close() {
	for _, f := range slices.Backward(k.cleanups) {
		f()
	}
	k.cleanups = nil
}

// start starts the engine; what it would fail a test for is an error.
func (h *host) start() (err error) {
	defer func() {
		switch p := recover().(type) {
		case nil:
		case fatal:
			err = fmt.Errorf("%s", string(p))
		default:
			panic(p)
		}
	}()
	h.engine = dockertest.Start(h)
	return nil
}
