package watch

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-exporter/exporter/input"
)

// sink collects what a watcher emits.
type sink struct {
	mu      sync.Mutex
	last    *input.Processes
	batches int
	sources []input.Source
	log     bytes.Buffer
	changed chan struct{}
}

func (s *sink) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.log.Write(p)
}

func (s *sink) emit(in input.Input) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if in.Processes != nil {
		s.last = in.Processes
		s.batches++
	}
	if in.Source != nil {
		s.sources = append(s.sources, *in.Source)
	}
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *sink) wait(t *testing.T, limit time.Duration, what string, ok func(p *input.Processes) bool) {
	t.Helper()
	timeout := time.After(limit)
	for {
		s.mu.Lock()
		last, changed := s.last, s.changed
		s.mu.Unlock()
		if last != nil && ok(last) {
			return
		}
		select {
		case <-changed:
		case <-timeout:
			t.Fatalf("not within %v: %s; last %+v", limit, what, last)
		}
	}
}

func run(t *testing.T, c Config) (*Watcher, *sink) {
	t.Helper()
	s := &sink{changed: make(chan struct{})}
	c.Logger = slog.New(slog.NewTextHandler(s, nil))
	w := New(c)
	before, files := runtime.NumGoroutine(), openFiles(t)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); w.Run(ctx, s.emit) }()
	t.Cleanup(func() {
		cancel()
		<-done
		for end := time.Now().Add(2 * time.Second); runtime.NumGoroutine() > before || openFiles(t) > files; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Errorf("goroutines %d before, %d after; open files %d, %d", before, runtime.NumGoroutine(), files, openFiles(t))
				break
			}
		}
	})
	return w, s
}

func openFiles(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

func sleeper(t *testing.T) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return cmd
}

func has(pid int) func(*input.Processes) bool {
	return func(p *input.Processes) bool {
		for _, x := range p.List {
			if x.PID == pid {
				return true
			}
		}
		return false
	}
}

// TestExit sees that a wanted process that ends is gone within milliseconds, long before the next tick.
func TestExit(t *testing.T) {
	a, b := sleeper(t), sleeper(t)
	w, s := run(t, Config{Interval: time.Hour})
	w.Want([]int{a.Process.Pid, b.Process.Pid, b.Process.Pid, 0, -4})
	s.wait(t, time.Second, "both", func(p *input.Processes) bool {
		return has(a.Process.Pid)(p) && has(b.Process.Pid)(p) && len(p.Asked) == 2
	})
	began := time.Now()
	if err := a.Process.Kill(); err != nil { // nobody waits for it yet: a zombie is gone too
		t.Fatal(err)
	}
	s.wait(t, time.Second, "one gone, still asked for", func(p *input.Processes) bool {
		return !has(a.Process.Pid)(p) && has(b.Process.Pid)(p) && len(p.Asked) == 2
	})
	t.Logf("gone after %v", time.Since(began))
	w.Want([]int{b.Process.Pid, 1})
	s.wait(t, time.Second, "another one", has(1))
	_ = a.Wait()
}

// TestTick sees that each tick reads anew, and that nothing is emitted while nothing is wanted.
func TestTick(t *testing.T) {
	w, s := run(t, Config{Interval: 10 * time.Millisecond})
	time.Sleep(100 * time.Millisecond)
	s.mu.Lock()
	if s.batches > 1 {
		t.Errorf("%d batches without a process of interest", s.batches)
	}
	s.mu.Unlock()
	w.Want([]int{os.Getpid()})
	var first float64
	s.wait(t, time.Second, "this process", func(p *input.Processes) bool {
		if len(p.List) == 1 {
			first = p.List[0].CPUSeconds
			return true
		}
		return false
	})
	for end := time.Now().Add(50 * time.Millisecond); time.Now().Before(end); { // burn CPU time
	}
	s.wait(t, 2*time.Second, "more CPU time", func(p *input.Processes) bool { return len(p.List) == 1 && p.List[0].CPUSeconds > first })
	w.Want(nil)
	s.wait(t, time.Second, "nothing", func(p *input.Processes) bool { return len(p.Asked) == 0 && len(p.List) == 0 })
}

// TestReuse sees that a PID that another process got is told apart by its start time.
func TestReuse(t *testing.T) {
	root := t.TempDir()
	put := func(start string) {
		t.Helper()
		dir := filepath.Join(root, "7")
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		stat := "7 (x) S 1 7 7 0 -1 4194560 1066 0 0 0 0 0 0 0 20 0 1 0 " + start + " 9850880\n"
		for name, text := range map[string]string{"stat": stat, "cgroup": "0::/" + start + "\n", "cmdline": "x\x00"} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	put("100")
	w, s := run(t, Config{Root: root, Interval: 10 * time.Millisecond, PIDsForeign: true})
	w.Want([]int{7})
	s.wait(t, time.Second, "the first", func(p *input.Processes) bool { return len(p.List) == 1 && p.List[0].StartTime == 100 })
	put("200")
	s.wait(t, time.Second, "the second", func(p *input.Processes) bool {
		return len(p.List) == 1 && p.List[0].StartTime == 200 && p.List[0].Cgroup == "/200"
	})
}

// TestChurn watches many processes that end, and sees that no pidfd is left behind.
func TestChurn(t *testing.T) {
	w, s := run(t, Config{Interval: 5 * time.Millisecond})
	s.wait(t, time.Second, "the start", func(*input.Processes) bool { return true })
	files := openFiles(t)
	var pids []int
	for range 50 {
		cmd := exec.Command("sleep", "0.05")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		pids = append(pids, cmd.Process.Pid)
		w.Want(pids)
		go func() { _ = cmd.Wait() }()
	}
	s.wait(t, 5*time.Second, "all gone", func(p *input.Processes) bool { return len(p.Asked) == 50 && len(p.List) == 0 })
	for end := time.Now().Add(2 * time.Second); openFiles(t) > files; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d files open before, %d after", files, openFiles(t))
		}
	}
}

// TestVisibility sees one source state and one log line per change of what /proc shows.
func TestVisibility(t *testing.T) {
	root := t.TempDir()
	w, s := run(t, Config{Root: root, Interval: time.Millisecond, PIDsForeign: true})
	w.Want([]int{1})
	state := func(up bool, reason string) {
		t.Helper()
		for end := time.Now().Add(2 * time.Second); ; time.Sleep(time.Millisecond) {
			s.mu.Lock()
			ok := false
			if n := len(s.sources); n > 0 {
				ok = s.sources[n-1].Name == input.SourceProcesses && s.sources[n-1].Up == up && strings.HasPrefix(s.sources[n-1].Reason, reason)
			}
			s.mu.Unlock()
			if ok {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("no state %v %q: %+v", up, reason, s.sources)
			}
		}
	}
	state(false, "proc_unreadable: ")
	for _, name := range []string{"1", "self", "1/ns"} {
		if err := os.MkdirAll(filepath.Join(root, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(root, "self/stat"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	state(false, "hidepid: ")
	if err := os.Symlink("pid:[4026531836]", filepath.Join(root, "1/ns/pid")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "1/stat"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	state(true, "")
	time.Sleep(50 * time.Millisecond)
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.sources) != 3 || strings.Count(s.log.String(), "level=WARN") != 2 {
		t.Errorf("states %+v, log:\n%s", s.sources, s.log.String())
	}
}

// TestHangingFile: a command line that does not answer costs that command line and nothing else, and shows as a state until it answers; a
// process of which not even the state can be read is not taken for one that is gone.
func TestHangingFile(t *testing.T) {
	root := t.TempDir()
	dir := func(pid int) string { return filepath.Join(root, strconv.Itoa(pid)) }
	put := func(pid int, name string) {
		text := map[string]string{"stat": strconv.Itoa(pid) + " (job) S 1 1 1 0 -1 0 0 0 0 0 1 1 0 0 20 0 1 0 5 0 0\n", "cgroup": "0::/\n", "cmdline": "job\x00"}[name]
		if err := errors.Join(os.MkdirAll(dir(pid), 0o755), os.WriteFile(filepath.Join(dir(pid), name), []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	for _, pid := range []int{1, 11, 12, 13} {
		put(pid, "stat")
		put(pid, "cgroup")
		put(pid, "cmdline")
	}
	// A pipe that nobody writes to does not open.
	hang := func(pid int, name string) (answer func()) {
		path := filepath.Join(dir(pid), name)
		if err := errors.Join(os.Remove(path), unix.Mkfifo(path, 0o600)); err != nil {
			t.Fatal(err)
		}
		return func() {
			if err := os.Rename(path, path+".old"); err != nil {
				t.Fatal(err)
			}
			put(pid, name)
			f, err := os.OpenFile(path+".old", os.O_WRONLY, 0)
			if err != nil {
				t.Fatal(err)
			}
			f.Close()
		}
	}
	answer12, answer13 := hang(12, "cmdline"), hang(13, "stat")
	w, s := run(t, Config{Root: root, Interval: 20 * time.Millisecond, Patience: 50 * time.Millisecond})
	w.Want([]int{11, 12, 13, 14})
	s.wait(t, 3*time.Second, "two of the three, and the one that does not exist asked for", func(p *input.Processes) bool {
		return len(p.List) == 2 && has(11)(p) && has(12)(p) && slices.Equal(p.Asked, []int{11, 12, 14})
	})
	source := func(ok func(input.Source) bool) {
		t.Helper()
		s.wait(t, 3*time.Second, "the state of the source", func(*input.Processes) bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			return len(s.sources) > 0 && ok(s.sources[len(s.sources)-1])
		})
	}
	source(func(x input.Source) bool {
		return !x.Up && strings.HasPrefix(x.Reason, "hangs: ") && strings.Contains(x.Reason, root+"/12/cmdline")
	})
	time.Sleep(200 * time.Millisecond) // several ticks
	s.mu.Lock()
	if n := strings.Count(s.log.String(), "level=WARN"); n > 2 { // each file once
		t.Errorf("%d warnings:\n%s", n, s.log.String())
	}
	s.mu.Unlock()
	answer12()
	answer13()
	source(func(x input.Source) bool { return x.Up })
	s.wait(t, 3*time.Second, "everything", func(p *input.Processes) bool {
		return len(p.List) == 3 && has(13)(p) && p.List[1].Command == "job"
	})
}

// TestStop: a watcher that is stopped while it reads begins no other reading beside that one. The race detector sees two that share a reader.
func TestStop(t *testing.T) {
	want := make([]int, 200)
	for i := range want {
		want[i] = os.Getpid()
	}
	for range 200 {
		w := New(Config{Interval: time.Microsecond, Logger: slog.New(slog.DiscardHandler), PIDsForeign: true})
		w.want = want
		ctx, cancel := context.WithCancel(context.Background())
		n := 0
		w.Run(ctx, func(input.Input) {
			if n++; n == 3 {
				go cancel() // the next reading is under way by then
			}
		})
	}
}
