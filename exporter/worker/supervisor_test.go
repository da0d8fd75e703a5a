package worker

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"gpu-exporter/exporter/input"
	"gpu-exporter/nvml/frame"
)

// Every way in which a worker goes wrong is counted under its reason, and each time a fresh worker's frames follow.
func TestReplaced(t *testing.T) {
	for _, c := range []struct {
		mode, reason, text string
		change             func(*Config)
	}{
		{"hang", ReasonHang, "nvml-worker hangs: no reading came for 300ms", nil},
		{"drip", ReasonHang, "nvml-worker hangs: no reading came for 300ms", nil},
		{"allhung", ReasonHang, "every GPU hangs", nil},
		{"exit", ReasonExit, "nvml-worker ended with status 3: giving up", nil},
		{"half", ReasonExit, "nvml-worker ended with status 0", nil},
		{"segv", ReasonCrash, "nvml-worker crashed: SIGSEGV: segmentation violation", nil},
		{"killed", ReasonCrash, "nvml-worker crashed: killed", nil},
		{"garbage", ReasonGarbage, "nvml-worker does not print frames: not a frame", nil},
		{"binary", ReasonGarbage, "nvml-worker does not print frames: not a frame", nil},
		{"version", ReasonGarbage, "format version 99, this exporter reads 1", nil},
		{"library", ReasonLibrary, "the NVIDIA driver is not loaded", nil},
		{"fat", ReasonMemory, "nvml-worker grew beyond 64 MiB", func(c *Config) { c.MemoryLimit = 64 << 20 }},
	} {
		t.Run(c.mode, func(t *testing.T) {
			t.Parallel()
			_, r, l := run(t, c.mode, c.change)
			in := r.wait(t, "the second restart", restarted(c.reason, 2))
			var text string
			downs := 0
			for _, i := range in {
				if i.Source != nil && i.Source.Restarts[c.reason] == 1 && !i.Source.Up && text == "" {
					text = i.Source.Reason
				}
				if i.Source != nil && !i.Source.Up {
					downs++
				}
			}
			if !strings.Contains(text, c.text) {
				t.Errorf("reason %q, want %q", text, c.text)
			}
			if c.mode == "library" {
				if last(in).Up {
					t.Error("up without a library")
				}
				if n := l.count("NVML is down"); n != 1 {
					t.Errorf("%d log lines for a driver that stays away, want 1:\n%s", n, l)
				}
				return
			}
			if frames(in) < 6 {
				t.Errorf("%d device frames of two workers, want at least 6", frames(in))
			}
			for _, i := range in {
				if i.Frame != nil && i.Frame.Device != nil && i.Frame.Device.UUID != "GPU-1" {
					t.Errorf("a frame out of garbage: %s", show([]input.Input{i}))
				}
			}
		})
	}
}

// A worker that says nothing at all is given the start's patience and no more.
func TestSilentFromTheStart(t *testing.T) {
	t.Parallel()
	_, r, _ := run(t, "silent", func(c *Config) { c.StartTimeout = 100 * time.Millisecond })
	in := r.wait(t, "a restart", restarted(ReasonHang, 2))
	if got := last(in).Reason; !strings.Contains(got, "after its start") {
		t.Errorf("reason %q", got)
	}
}

// A line that is too long costs itself only.
func TestHugeLine(t *testing.T) {
	t.Parallel()
	s, r, _ := run(t, "huge", func(c *Config) { c.MaxLine = 64 << 10; c.HangAfter = 10 * time.Second })
	r.wait(t, "the frame after the huge line", func(in []input.Input) bool {
		return len(in) > 0 && in[len(in)-1].Frame != nil && in[len(in)-1].Frame.Device != nil && in[len(in)-1].Frame.Device.State == frame.StateLost
	})
	if n := s.Garbage(); n != 1 {
		t.Errorf("%d garbage lines, want 1", n)
	}
}

// The state of the source is emitted when it changes, and only then.
func TestSourceOnChangesOnly(t *testing.T) {
	t.Parallel()
	s, r, l := run(t, "good", nil)
	in := r.wait(t, "fifty frames", func(in []input.Input) bool { return frames(in) >= 50 })
	var states []string
	for _, i := range in {
		if i.Source != nil {
			states = append(states, fmt.Sprintf("%v %q", i.Source.Up, i.Source.Reason))
		}
	}
	if got, want := strings.Join(states, ", "), `false "starting", true ""`; got != want {
		t.Errorf("sources %s, want %s", got, want)
	}
	if pids := s.PIDs(); len(pids) != 1 || pids[0] != last(in).PID {
		t.Errorf("PIDs %v, source says %d", pids, last(in).PID)
	}
	if n := l.count("\n"); n != 1 {
		t.Errorf("%d log lines, want 1:\n%s", n, l)
	}
}

// What the worker writes to standard error is logged once, without control characters.
func TestStderrOnce(t *testing.T) {
	t.Parallel()
	_, r, l := run(t, "babble", nil)
	r.wait(t, "frames", func(in []input.Input) bool { return frames(in) >= 10 })
	if n := l.count("the same thing again"); n != 1 {
		t.Errorf("%d log lines, want 1:\n%s", n, l)
	}
	if l.count("\x1b")+l.count(`\x1b`) > 0 {
		t.Errorf("a control character reached the log:\n%s", l)
	}
}

// Release ends the worker and keeps others from starting; Resume starts one.
func TestRelease(t *testing.T) {
	t.Parallel()
	s, r, _ := run(t, "good", nil)
	r.wait(t, "frames", func(in []input.Input) bool { return frames(in) > 0 })
	pid := s.PIDs()[0]
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := s.Release(ctx); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, 0); err != syscall.ESRCH {
		t.Errorf("the worker is still there: %v", err)
	}
	in := r.wait(t, "the source down", func(in []input.Input) bool { return !last(in).Up })
	if !strings.HasPrefix(last(in).Reason, "released") || last(in).PID != 0 || len(last(in).Restarts) != 0 {
		t.Errorf("source %+v", last(in))
	}
	n := len(in)
	time.Sleep(100 * time.Millisecond)
	if pids := s.PIDs(); len(pids) != 0 || !s.Released() {
		t.Errorf("workers %v while released", pids)
	}
	s.Resume()
	r.wait(t, "frames again", func(in []input.Input) bool { return frames(in[n:]) > 0 && last(in).Up })
}

// A worker that SIGKILL does not end is left behind, counted and not waited for; after a few of them no more are started until one ends.
func TestStuck(t *testing.T) {
	t.Parallel()
	s, r, l := run(t, "deaf", func(c *Config) {
		c.MaxStuck, c.KillGrace, c.StopGrace = 2, 50*time.Millisecond, 50*time.Millisecond
		c.kill = func(*process) {} // what a process in uninterruptible sleep looks like from outside
	})
	in := r.wait(t, "two left behind", func(in []input.Input) bool {
		return last(in).Restarts[ReasonStuck] == 2 && strings.Contains(last(in).Reason, "none is started")
	})
	if got := frames(in); got != 6 {
		t.Errorf("%d frames of two workers, want 6", got)
	}
	pids := s.PIDs()
	if len(pids) != 2 {
		t.Fatalf("left behind: %v, want two", pids)
	}
	if n := l.count("left behind"); n != 2 {
		t.Errorf("%d log lines for two workers:\n%s", n, l)
	}
	syscall.Kill(pids[1], syscall.SIGKILL)
	r.wait(t, "a third worker", func(in []input.Input) bool { return frames(in) >= 9 })
}

// parent is what TestNoOrphan kills: an exporter with a worker.
func parent() {
	self, _ := os.Executable()
	s := New(Config{Path: self, Env: []string{"WORKER_HELPER=" + os.Getenv("WORKER_PARENT")}})
	once := false
	s.Run(context.Background(), func(i input.Input) {
		if i.Frame != nil && !once {
			once = true
			fmt.Println(s.PIDs()[0])
		}
	})
}

// No worker survives an exporter that was killed, not even one that does not look at its standard input.
func TestNoOrphan(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"good", "deaf"} {
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(self)
		cmd.Env = append(os.Environ(), "WORKER_PARENT="+mode)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var pid int
		if _, err := fmt.Fscan(out, &pid); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(pid, 0); err != nil {
			t.Fatalf("%s: the worker %d does not run: %v", mode, pid, err)
		}
		cmd.Process.Kill()
		cmd.Wait()
		deadline := time.Now().Add(5 * time.Second)
		for !ended(pid) {
			if time.Now().After(deadline) {
				t.Fatalf("%s: the worker %d outlived its parent", mode, pid)
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
}

// ended tells whether a process is gone, or only waits for someone to ask how it ended.
func ended(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return true
	}
	_, after, _ := strings.Cut(string(b), ") ")
	return strings.HasPrefix(after, "Z") || strings.HasPrefix(after, "X")
}

// The pause before a restart doubles up to its limit, and starts over after a healthy time.
func TestBackoff(t *testing.T) {
	t.Parallel()
	_, r, _ := run(t, "library", func(c *Config) { c.BackoffMin, c.BackoffMax = 100*time.Millisecond, 400*time.Millisecond })
	start := time.Now()
	r.wait(t, "the fourth restart", restarted(ReasonLibrary, 4))
	if took := time.Since(start); took < 700*time.Millisecond {
		t.Errorf("four restarts in %v: pauses of 100, 200 and 400 ms were due", took)
	}
}

// A program that is not there, or cannot run, is a state with a reason; nothing is counted as a restart.
func TestCannotStart(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	text := filepath.Join(dir, "text")
	if err := os.WriteFile(text, []byte("no program\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	plain := filepath.Join(dir, "plain")
	if err := os.WriteFile(plain, []byte("\x7fELF"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, want string
		change     func(*Config)
	}{
		{"missing", "no such file", func(c *Config) { c.Path = filepath.Join(dir, "missing") }},
		{"not a program", "not a program for this processor", func(c *Config) { c.Path = text }},
		{"not executable", "permission denied", func(c *Config) { c.Path = plain }},
		{"none at all", "not built into this binary", func(c *Config) { c.Path = ""; c.embedded = []byte{} }},
		{"driver root missing", "driver root", func(c *Config) { c.DriverRoot = filepath.Join(dir, "nowhere") }},
		{"driver root a file", "not a directory", func(c *Config) { c.DriverRoot = text }},
		{"embedded broken", "unpacking the embedded", func(c *Config) { c.Path = ""; c.embedded = []byte{0x1f, 0x8b, 1, 2} }},
		{"nowhere to put it", "no such file", func(c *Config) {
			c.Path, c.embedded, c.noMemfd, c.TempDirs = "", []byte("\x7fELF"), true, []string{filepath.Join(dir, "a"), filepath.Join(dir, "b")}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, r, l := run(t, "good", c.change)
			time.Sleep(200 * time.Millisecond) // several attempts
			in := r.wait(t, "a source", func(in []input.Input) bool { return len(in) > 0 })
			if len(in) != 1 || in[0].Source == nil || in[0].Source.Up || len(in[0].Source.Restarts) != 0 {
				t.Errorf("emitted %s, want one source that is down", show(in))
			}
			if got := last(in).Reason; !strings.Contains(got, c.want) || strings.Contains(got, "\n") {
				t.Errorf("reason %q, want one line with %q", got, c.want)
			}
			if n := l.count("NVML is down"); n != 1 {
				t.Errorf("%d log lines, want 1:\n%s", n, l)
			}
		})
	}
}
