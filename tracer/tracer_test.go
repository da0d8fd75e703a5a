package tracer

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-exporter/tracer/activity"
)

// The traced devices of the tests are memory devices: /dev/full stands for the control device, /dev/zero for a GPU, /dev/random for UVM.
var devices = []Device{{1, 7, "ctl"}, {1, 5, "gpu"}, {1, 8, "uvm"}}

// testMode is how the tests attach. A kernel that has it takes them in fentry mode too: scripts/test-vm.
var testMode = cmp.Or(os.Getenv("GPU_EXPORTER_TEST_TRACER"), ModeTracepoint)

func init() {
	if len(os.Args) > 2 && os.Args[2] == "threads" {
		runtime.LockOSThread() // the first goroutine stays on the first thread
	}
}

// TestMain lets the tests start this program as the process that is traced.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "child" {
		child(os.Args[2:])
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// watcher runs a tracer and keeps what it reports.
type watcher struct {
	t      *testing.T
	tracer *Tracer
	mu     sync.Mutex
	last   *activity.Report
	events []Event
	each   func(*activity.Report) // called for every report, when set
}

// start runs a tracer on the test devices until the test ends, and waits until it has looked at every process.
func start(t *testing.T, change func(*Config)) *watcher {
	t.Helper()
	if os.Getuid() != 0 && os.Getenv(asNobody) == "" {
		t.Skip("needs root")
	}
	w := &watcher{t: t}
	config := Config{
		Mode: testMode, Devices: devices, Logger: slog.New(slog.NewTextHandler(t.Output(), nil)), reconcile: time.Hour,
		Events: func(e Event) {
			w.mu.Lock()
			w.events = append(w.events, e)
			w.mu.Unlock()
		},
	}
	if change != nil {
		change(&config)
	}
	tracer, err := New(config)
	if err != nil {
		t.Fatal(err)
	}
	w.tracer = tracer
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- tracer.Run(ctx, func(r *activity.Report) {
			w.mu.Lock()
			w.last = r
			if w.each != nil {
				w.each(r)
			}
			w.mu.Unlock()
		})
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	w.until("a first report", func(r *activity.Report) bool { return true })
	return w
}

// until waits for a report that satisfies ok.
func (w *watcher) until(what string, ok func(*activity.Report) bool) *activity.Report {
	w.t.Helper()
	for deadline := time.Now().Add(15 * time.Second); ; time.Sleep(200 * time.Microsecond) {
		w.mu.Lock()
		r := w.last
		w.mu.Unlock()
		if r != nil && ok(r) {
			return r
		}
		if time.Now().After(deadline) {
			w.t.Fatalf("no report with %s; the last: %+v", what, r)
		}
	}
}

func process1(r *activity.Report, pid int) *activity.Process {
	i := slices.IndexFunc(r.Processes, func(p activity.Process) bool { return p.PID == pid })
	if i < 0 {
		return nil
	}
	return &r.Processes[i]
}

func (w *watcher) held(pid int) {
	w.t.Helper()
	w.until("the process", func(r *activity.Report) bool { return process1(r, pid) != nil })
}

func (w *watcher) notHeld(pid int) {
	w.t.Helper()
	w.until("the process gone", func(r *activity.Report) bool { return process1(r, pid) == nil })
}

// total adds up a figure over all groups.
func total(r *activity.Report, of func(activity.Group) uint64) (n uint64) {
	for _, g := range r.Groups {
		n += of(g)
	}
	return n
}

func opens(node, result string) func(activity.Group) uint64 {
	return func(g activity.Group) (n uint64) {
		for _, o := range g.Opens {
			if o.Node == node && o.Result == result {
				n += o.Count
			}
		}
		return n
	}
}

func calls(name string) func(activity.Group) uint64 {
	return func(g activity.Group) (n uint64) {
		for _, c := range g.Calls {
			if c.Name == name {
				n += c.Count
			}
		}
		return n
	}
}

// child does one thing with a device, says so with a line, and goes on when its standard input ends.
func child(args []string) {
	wait := func() {
		os.Stdout.WriteString("ready\n")
		var b [1]byte
		for {
			if n, _ := os.Stdin.Read(b[:]); n == 0 {
				return
			}
		}
	}
	switch args[0] {
	case "open": // holds a device
		f, err := os.OpenFile(args[1], os.O_RDWR, 0)
		if err != nil {
			panic(err)
		}
		wait()
		f.Close()
	case "storm": // opens and closes a device so many times, at 100000 a second or as fast as it can
		n, err := strconv.Atoi(args[2])
		if err != nil {
			panic(err)
		}
		wait()
		began := time.Now()
		for i := range n {
			fd, err := syscall.Open(args[1], syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
			if err != nil {
				panic(err)
			}
			syscall.Close(fd)
			if i%1000 == 999 {
				time.Sleep(time.Until(began.Add(time.Duration(i) * 10 * time.Microsecond)))
			}
		}
		os.Stdout.WriteString(time.Since(began).String() + "\n")
		wait()
	case "exit": // opens and ends with a status, or a signal
		if _, err := syscall.Open(args[1], syscall.O_RDONLY, 0); err != nil {
			panic(err)
		}
		switch args[2] {
		case "kill":
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			time.Sleep(time.Hour)
		case "0":
			os.Exit(0)
		}
		os.Exit(3)
	case "receive": // takes a descriptor over the socket 3 and calls it once asked to
		buf, oob := make([]byte, 1), make([]byte, 64)
		_, n, _, _, err := unix.Recvmsg(3, buf, oob, unix.MSG_CMSG_CLOEXEC)
		if err != nil {
			panic(err)
		}
		messages, _ := unix.ParseSocketControlMessage(oob[:n])
		fds, err := unix.ParseUnixRights(&messages[0])
		if err != nil {
			panic(err)
		}
		wait()
		_ = unix.IoctlSetInt(fds[0], 0x4600, 0)
		os.Stdout.WriteString("called\n")
		time.Sleep(time.Hour)
	case "drive": // makes calls that no driver answers, see driver
		d := drive(args[1])
		wait()
		if args[1] == "burst" {
			os.Stdout.WriteString(d.burst() + "\n")
			time.Sleep(time.Hour)
		}
	case "hostile", "neighbour":
		d := driverOf()
		if args[0] == "hostile" {
			hostile(args[1], d)
		} else {
			neighbour(args[1], d)
		}
		wait()
	case "rm":
		rmChild(args[1])
	case "hold": // does nothing with what it was given
		wait()
	case "threads": // each of its threads opens a device and calls it; then the first one ends, and the others live on
		closing := make(chan struct{})
		var called sync.WaitGroup
		called.Add(8)
		for range 8 {
			go func() {
				runtime.LockOSThread()
				fd, err := syscall.Open(args[1], syscall.O_RDWR, 0)
				if err != nil {
					panic(err)
				}
				_ = unix.IoctlSetInt(fd, 0x4613, 0)
				called.Done()
				for range closing { // one of them gives it back
					_ = syscall.Close(fd)
				}
			}()
		}
		called.Wait()
		wait()
		go func() {
			for text := []byte(nil); !bytes.Contains(text, []byte(") Z ")); {
				text, _ = os.ReadFile(fmt.Sprintf("/proc/self/task/%d/stat", os.Getpid())) // of this process
			}
			closing <- struct{}{}
			os.Stdout.WriteString("ended\n")
		}()
		_, _, _ = unix.Syscall(unix.SYS_EXIT, 0, 0, 0)
	case "dup": // holds a device twice and gives one back
		fd, _ := syscall.Open(args[1], syscall.O_RDWR, 0)
		other, _ := syscall.Dup(fd)
		syscall.Close(fd)
		wait()
		syscall.Close(other)
		os.Stdout.WriteString("closed\n")
		time.Sleep(time.Hour)
	case "exec": // opens a device with or without close-on-exec and becomes "hold"
		flags := syscall.O_RDWR
		if args[2] == "cloexec" {
			flags |= syscall.O_CLOEXEC
		}
		if _, err := syscall.Open(args[1], flags, 0); err != nil {
			panic(err)
		}
		wait2 := make([]byte, 1)
		os.Stdout.WriteString("ready\n")
		os.Stdin.Read(wait2)
		_ = syscall.Exec("/proc/self/exe", []string{"holder", "child", "hold"}, os.Environ())
	}
}

// startChild runs this program as a child, and waits for its first line.
func startChild(t *testing.T, files []*os.File, args ...string) (cmd *exec.Cmd, in *os.File, lines func() string) {
	t.Helper()
	return startProgram(t, files, "/proc/self/exe", append([]string{"child"}, args...)...)
}

func startProgram(t *testing.T, files []*os.File, path string, args ...string) (cmd *exec.Cmd, in *os.File, lines func() string) {
	t.Helper()
	cmd = exec.Command(path, args...)
	out, stdout, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	stdin, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = stdin, stdout, os.Stderr, files
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stdin.Close()
	stdout.Close()
	t.Cleanup(func() {
		in.Close()
		out.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	lines = func() string {
		var line []byte
		for b := make([]byte, 1); ; {
			if n, err := out.Read(b); n == 0 || err != nil || b[0] == '\n' {
				return string(line)
			}
			line = append(line, b[0])
		}
	}
	if got := lines(); got != "ready" {
		t.Fatalf("child said %q", got)
	}
	return cmd, in, lines
}

// startReceiver starts a child that is passed a descriptor of /dev/zero over a socket, and calls the device when it is told to go on.
func startReceiver(t *testing.T) (cmd *exec.Cmd, in *os.File, lines func() string) {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "socket")
	fd, err := unix.Open("/dev/zero", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Sendmsg(pair[0], []byte("x"), unix.UnixRights(fd), nil, 0); err != nil {
		t.Fatal(err)
	}
	unix.Close(fd)
	cmd, in, lines = startChild(t, []*os.File{theirs}, "receive")
	theirs.Close()
	unix.Close(pair[0])
	return cmd, in, lines
}

// TestPresence follows the ways by which a process gets and loses a device.
func TestPresence(t *testing.T) {
	before, _, _ := startChild(t, nil, "open", "/dev/zero")
	w := start(t, nil)
	t.Run("there before the tracer", func(t *testing.T) {
		r := w.until("it", func(r *activity.Report) bool { return process1(r, before.Process.Pid) != nil })
		if p := process1(r, before.Process.Pid); p.FromBirth || len(p.Devices) != 1 || p.Devices[0].Minor.V != 5 || p.Cgroup == "" || p.StartTime == 0 {
			t.Errorf("%+v", p)
		}
		before.Process.Kill()
		w.notHeld(before.Process.Pid)
	})
	t.Run("open and exit without close", func(t *testing.T) {
		cmd, in, _ := startChild(t, nil, "open", "/dev/zero")
		r := w.until("it", func(r *activity.Report) bool { return process1(r, cmd.Process.Pid) != nil })
		if p := process1(r, cmd.Process.Pid); !p.FromBirth || p.Compute || len(p.Devices) != 1 || !strings.HasPrefix(p.Cgroup, "/") {
			t.Errorf("%+v", p)
		}
		in.Close()
		w.notHeld(cmd.Process.Pid)
	})
	t.Run("by any name", func(t *testing.T) {
		node := filepath.Join(t.TempDir(), "gpu")
		if err := unix.Mknod(node, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 5))); err != nil {
			t.Skip(err)
		}
		cmd, _, _ := startChild(t, nil, "open", node)
		w.held(cmd.Process.Pid)
	})
	t.Run("another device of the major", func(t *testing.T) {
		cmd, _, _ := startChild(t, nil, "open", "/dev/null")
		other, _, _ := startChild(t, nil, "open", "/dev/zero")
		r := w.until("the other", func(r *activity.Report) bool { return process1(r, other.Process.Pid) != nil })
		if process1(r, cmd.Process.Pid) != nil {
			t.Error("a device that is not traced is held")
		}
	})
	t.Run("dup", func(t *testing.T) {
		cmd, in, lines := startChild(t, nil, "dup", "/dev/zero")
		w.held(cmd.Process.Pid)
		time.Sleep(30 * time.Millisecond) // the close of the first is looked at
		w.held(cmd.Process.Pid)
		in.Close()
		if got := lines(); got != "closed" {
			t.Fatal(got)
		}
		w.notHeld(cmd.Process.Pid) // it lives on
	})
	t.Run("exec", func(t *testing.T) {
		for _, how := range []string{"keep", "cloexec"} {
			cmd, in, lines := startChild(t, nil, "exec", "/dev/zero", how)
			w.held(cmd.Process.Pid)
			in.Write([]byte("x"))
			if got := lines(); got != "ready" {
				t.Fatal(got)
			}
			if how == "cloexec" {
				w.notHeld(cmd.Process.Pid)
			} else {
				w.held(cmd.Process.Pid)
			}
		}
	})
	t.Run("inherited", func(t *testing.T) {
		f, err := os.Open("/dev/zero")
		if err != nil {
			t.Fatal(err)
		}
		w.held(os.Getpid())
		cmd, _, _ := startChild(t, []*os.File{f}, "hold")
		w.held(cmd.Process.Pid)
		f.Close()
		w.notHeld(os.Getpid())
		w.held(cmd.Process.Pid)
		cmd.Process.Kill()
		w.notHeld(cmd.Process.Pid)
	})
	t.Run("passed", func(t *testing.T) {
		cmd, in, lines := startReceiver(t)
		in.Close()
		if got := lines(); got != "called" {
			t.Fatal(got)
		}
		w.held(cmd.Process.Pid)
	})
}

// TestThreads: a process of several threads is one, and it holds its devices until the last thread ends, though its first one ended before.
func TestThreads(t *testing.T) {
	w := start(t, nil)
	cmd, in, lines := startChild(t, nil, "threads", "/dev/zero")
	pid := cmd.Process.Pid
	of := func(r *activity.Report) (all int, g activity.Group) {
		for _, p := range r.Processes {
			if p.Comm == process1(r, pid).Comm {
				all++
			}
		}
		i := slices.IndexFunc(r.Groups, func(g activity.Group) bool { return calls("gpu_0x13")(g) > 0 })
		return all, r.Groups[max(0, i)]
	}
	r := w.until("the calls", func(r *activity.Report) bool { return process1(r, pid) != nil && total(r, calls("gpu_0x13")) == 8 })
	if all, g := of(r); all != 1 || g.Started != 1 || opens("gpu", "ok")(g) < 8 {
		t.Errorf("%d processes, started %d, opens %v", all, g.Started, g.Opens)
	}
	in.Close()
	if got := lines(); got != "ended" {
		t.Fatal(got)
	}
	time.Sleep(1500 * time.Millisecond) // what it holds is looked at, more than once
	w.held(pid)
	start(t, nil).held(pid) // found by looking, too
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	w.notHeld(pid)
	w.until("its end", func(r *activity.Report) bool {
		_, g := 0, r.Groups[max(0, slices.IndexFunc(r.Groups, func(g activity.Group) bool { return calls("gpu_0x13")(g) > 0 }))]
		return g.Exited["signal"] == 1
	})
}

// TestCompat is about a 32-bit program on a 64-bit kernel. In fentry mode it is traced as any other. The kernel's tracepoints tell nothing of such
// programs: in tracepoint mode its calls are not counted, it is found by looking, and never given a figure of the ledger's.
func TestCompat(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Skip("the program is for x86")
	}
	path := programs(t) + "/compat"
	before, in, lines := startProgram(t, nil, path, "/dev/full")
	w := start(t, func(c *Config) { c.reconcile = 100 * time.Millisecond })
	w.held(before.Process.Pid)
	if _, err := in.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	lines()
	after, _, _ := startProgram(t, nil, path, "/dev/full")
	want := uint64(0)
	if testMode == ModeFentry {
		w.held(after.Process.Pid)
		want = 1000
	} else {
		time.Sleep(50 * time.Millisecond)
	}
	r := w.until("the calls", func(r *activity.Report) bool { return total(r, calls("ctl_0x11")) == want })
	if p := process1(r, before.Process.Pid); p == nil || p.FromBirth {
		t.Errorf("there before: %+v", p)
	}
	if p := process1(r, after.Process.Pid); (p != nil) != (testMode == ModeFentry) || p != nil && !p.FromBirth {
		t.Errorf("begun later: %+v", p)
	}
	if n := total(r, opens("ctl", "ok")); n != want/1000 {
		t.Errorf("%d opens", n)
	}
	_ = before.Process.Kill()
	w.notHeld(before.Process.Pid)
}
