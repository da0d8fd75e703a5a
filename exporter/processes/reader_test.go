package processes

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/prometheus/procfs"
)

const containerID = "3b9d2f3c0a6e5c1d4f7b8a9e0d1c2b3a4f5e6d7c8b9a0f1e2d3c4b5a69788776"

// tree makes a /proc of files.
func tree(t testing.TB, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// statLine makes a line of /proc/<pid>/stat as kernel 6.18 prints it.
func statLine(pid int, comm, state string, utime, stime, threads, start uint64) string {
	return fmt.Sprintf("%d (%s) %s 1 %d %d 0 -1 4194560 1066 0 0 0 %d %d 0 0 20 0 %d 0 %d 9850880 1023 18446744073709551615 1 1 0 0 0 0 0 "+
		"4096 0 0 0 0 17 0 0 0 0 0 0 0 0 0 0 0 0 0 0\n", pid, comm, state, pid, pid, utime, stime, threads, start)
}

// rootV1 is what a kernel with version 1 shows of who is at the root, or exits.
const rootV1 = "2:cpu:/\n1:name=systemd:/\n0::/\n"

// exitingLine is statLine of a process or thread that frees what it holds, as kernel 6.18 prints it.
func exitingLine(pid int) string {
	return strings.Replace(statLine(pid, "x", "D", 0, 0, 3, 5), " 4194560 ", " 4228364 ", 1)
}

func TestRead(t *testing.T) {
	for _, tt := range []struct {
		name  string
		files map[string]string
		want  Process
		err   error
	}{
		{"in a container", map[string]string{
			"7/stat":    statLine(7, "python3", "S", 250, 150, 12, 4711),
			"7/cgroup":  "0::/docker/" + containerID + "\n",
			"7/cmdline": "python3\x00train.py\x00--lr\x000.1\x00",
		}, Process{PID: 7, StartTime: 4711, Comm: "python3", Command: "python3 train.py --lr 0.1", Cgroup: "/docker/" + containerID,
			Container: containerID, CPUSeconds: 4}, nil},
		{"on the host", map[string]string{
			"7/stat": statLine(7, "Xorg", "R", 1, 0, 1, 99), "7/cgroup": "0::/system.slice/gdm.service\n", "7/cmdline": "/usr/bin/Xorg\x00",
		}, Process{PID: 7, StartTime: 99, Comm: "Xorg", Command: "/usr/bin/Xorg", Cgroup: "/system.slice/gdm.service", CPUSeconds: 0.01}, nil},
		{"comm of any bytes", map[string]string{
			"7/stat": statLine(7, "a) R (b\n\x1b\xff", "S", 0, 0, 1, 5), "7/cgroup": "0::/\n", "7/cmdline": "",
		}, Process{PID: 7, StartTime: 5, Comm: "a) R (b\ufffd\ufffd\ufffd", Cgroup: "/"}, nil},
		{"command of any bytes", map[string]string{
			"7/stat": statLine(7, "x", "S", 0, 0, 1, 5), "7/cgroup": "0::/\n",
			"7/cmdline": "\x1b]0;t\x07\x00\xff\x00" + strings.Repeat("ä", 500),
		}, Process{PID: 7, StartTime: 5, Comm: "x", Cgroup: "/", Command: "\ufffd]0;t\ufffd \ufffd " + strings.Repeat("ä", 71)}, nil},
		{"no control groups in the kernel", map[string]string{"7/stat": statLine(7, "x", "S", 0, 0, 1, 5), "7/cmdline": "x\x00"},
			Process{PID: 7, StartTime: 5, Comm: "x", Command: "x"}, nil},
		{"leader dead, threads alive", map[string]string{"7/stat": statLine(7, "x", "Z", 0, 0, 3, 5), "7/cgroup": "0::/\n", "7/cmdline": ""},
			Process{PID: 7, StartTime: 5, Comm: "x", Cgroup: "/"}, nil},
		{"exits, version 1", map[string]string{"7/stat": exitingLine(7), "7/cgroup": rootV1, "7/task/7/stat": exitingLine(7), "7/task/7/cgroup": rootV1,
			"7/cmdline": "x\x00"}, Process{PID: 7, StartTime: 5, Comm: "x", Command: "x"}, nil},
		{"exits, version 2", map[string]string{"7/stat": exitingLine(7), "7/cgroup": "0::/docker/" + containerID + "\n", "7/cmdline": ""},
			Process{PID: 7, StartTime: 5, Comm: "x", Cgroup: "/docker/" + containerID, Container: containerID}, nil},
		{"leader exited, a thread tells, version 1", map[string]string{"7/stat": exitingLine(7), "7/cgroup": rootV1, "7/cmdline": "",
			"7/task/7/stat": exitingLine(7), "7/task/7/cgroup": rootV1, "7/task/8/stat": exitingLine(8), "7/task/8/cgroup": rootV1,
			"7/task/9/stat": statLine(9, "x", "S", 0, 0, 3, 6), "7/task/9/cgroup": "2:cpu:/docker/" + containerID + "\n0::/\n"},
			Process{PID: 7, StartTime: 5, Comm: "x", Cgroup: "/docker/" + containerID, Container: containerID}, nil},
		{"at the root, version 1", map[string]string{"7/stat": statLine(7, "x", "S", 0, 0, 1, 5), "7/cgroup": rootV1, "7/cmdline": ""},
			Process{PID: 7, StartTime: 5, Comm: "x", Cgroup: "/"}, nil},
		{"flags are no number", map[string]string{"7/stat": strings.Replace(statLine(7, "x", "S", 0, 0, 1, 5), "4194560", "-", 1)}, Process{}, errStat},
		{"zombie", map[string]string{"7/stat": statLine(7, "x", "Z", 0, 0, 1, 5)}, Process{}, ErrGone},
		{"dead", map[string]string{"7/stat": statLine(7, "x", "X", 0, 0, 0, 5)}, Process{}, ErrGone},
		{"gone", nil, Process{}, ErrGone},
		{"empty stat", map[string]string{"7/stat": ""}, Process{}, errStat},
		{"half a stat", map[string]string{"7/stat": "7 (x) S 1 2 3"}, Process{}, errStat},
		{"no command", map[string]string{"7/stat": "7 x S 1"}, Process{}, errStat},
		{"parentheses the wrong way", map[string]string{"7/stat": "7 )x( S 1"}, Process{}, errStat},
		{"start is no number", map[string]string{"7/stat": strings.Replace(statLine(7, "x", "S", 0, 0, 1, 4711), "4711", "-1", 1)}, Process{}, errStat},
		{"start is too large", map[string]string{"7/stat": strings.Replace(statLine(7, "x", "S", 0, 0, 1, 4711), "4711", strings.Repeat("9", 30), 1)}, Process{}, errStat},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := Reader{Root: tree(t, tt.files)}
			got, err := r.Read(7)
			if !errors.Is(err, tt.err) || tt.err == nil && got != tt.want {
				t.Errorf("got %+v, %v\nwant %+v, %v", got, err, tt.want, tt.err)
			}
		})
	}
	for _, pid := range []int{0, -1, 1 << 40} {
		if _, err := (&Reader{}).Read(pid); !errors.Is(err, ErrGone) {
			t.Errorf("pid %d: %v", pid, err)
		}
	}
}

// TestCache sees what is read once and what is read again: after exec, for a reused PID, and after a while.
func TestCache(t *testing.T) {
	root := tree(t, map[string]string{"7/stat": statLine(7, "sh", "S", 100, 0, 1, 5), "7/cgroup": "0::/a\n", "7/cmdline": "sh\x00"})
	r := Reader{Root: root}
	change := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(root, "7", name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	read := func() Process {
		t.Helper()
		p, err := r.Read(7)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	read()
	change("cmdline", "other\x00")
	change("stat", statLine(7, "sh", "S", 300, 0, 1, 5))
	if p := read(); p.Command != "sh" || p.CPUSeconds != 3 {
		t.Errorf("same process: %+v", p)
	}
	change("stat", statLine(7, "python3", "S", 300, 0, 1, 5))
	if p := read(); p.Command != "other" || p.Comm != "python3" {
		t.Errorf("after exec: %+v", p)
	}
	change("cgroup", "0::/docker/"+containerID+"\n")
	change("stat", statLine(7, "python3", "S", 0, 0, 1, 6))
	if p := read(); p.Container != containerID || p.StartTime != 6 || p.CPUSeconds != 0 {
		t.Errorf("another process of the same PID: %+v", p)
	}
	change("cgroup", "0::/moved\n")
	for range refreshEvery {
		read()
	}
	if p := read(); p.Cgroup != "/moved" || p.Container != "" {
		t.Errorf("after a while: %+v", p)
	}
	change("stat", statLine(7, "sleep", "S", 0, 0, 1, 6))
	change("cmdline", "")
	if p := read(); p.Command != "" {
		t.Errorf("in the middle of exec: %+v", p)
	}
	change("cmdline", "sleep\x0060\x00")
	if p := read(); p.Command != "sleep 60" {
		t.Errorf("after exec, with the name that was there before the command line: %+v", p)
	}
	r.Forget(func(int) bool { return false })
	if len(r.cache) != 0 {
		t.Errorf("%d processes cached after Forget", len(r.cache))
	}
	read()
	if err := os.RemoveAll(filepath.Join(root, "7")); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Read(7); !errors.Is(err, ErrGone) || len(r.cache) != 0 {
		t.Errorf("error %v, %d cached, for a process that is gone", err, len(r.cache))
	}
}

// TestReadReal compares with what the library procfs reads of a real process.
// TestExitKeepsGroup: a process keeps its container while it exits, which takes the driver seconds where much memory is to be freed.
func TestExitKeepsGroup(t *testing.T) {
	root := tree(t, map[string]string{"7/stat": statLine(7, "x", "S", 0, 0, 1, 5), "7/cgroup": "2:cpu:/docker/" + containerID + "\n0::/\n", "7/cmdline": "x\x00"})
	r := Reader{Root: root}
	for read := range 3 * refreshEvery {
		if read == refreshEvery/2 {
			for name, text := range map[string]string{"stat": exitingLine(7), "cgroup": rootV1} {
				if err := os.WriteFile(filepath.Join(root, "7", name), []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
		}
		if p, err := r.Read(7); err != nil || p.Container != containerID || p.Cgroup != "/docker/"+containerID {
			t.Fatalf("read %d: %+v, %v", read, p, err)
		}
	}
}

func TestReadReal(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	pid := cmd.Process.Pid
	var r Reader
	var p Process
	for end := time.Now().Add(2 * time.Second); ; time.Sleep(time.Millisecond) { // until it has executed sleep
		var err error
		if p, err = r.Read(pid); err != nil {
			t.Fatal(err)
		}
		// The kernel sets the name before the command line can be read.
		if p.Comm == "sleep" && p.Command != "" || time.Now().After(end) {
			break
		}
	}
	proc, err := procfs.NewProc(pid)
	if err != nil {
		t.Fatal(err)
	}
	st, err := proc.Stat()
	if err != nil {
		t.Fatal(err)
	}
	if p.Comm != st.Comm || p.StartTime != st.Starttime || p.Command != "sleep 60" || p.Cgroup == "" {
		t.Errorf("got %+v, procfs says %+v", p, st)
	}
	if start, err := StartTime("/proc", pid); err != nil || start != st.Starttime {
		t.Errorf("StartTime %d, %v", start, err)
	}
	self, err := r.Read(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	me, err := procfs.Self()
	if err != nil {
		t.Fatal(err)
	}
	if st, err = me.Stat(); err != nil {
		t.Fatal(err)
	}
	if d := st.CPUTime() - self.CPUSeconds; d < 0 || d > 1 {
		t.Errorf("CPU %v s, procfs says %v s", self.CPUSeconds, st.CPUTime())
	}
	_ = cmd.Process.Kill() // it stays as a zombie until Wait
	for end := time.Now().Add(2 * time.Second); ; time.Sleep(time.Millisecond) {
		if _, err = r.Read(pid); err != nil || time.Now().After(end) {
			break
		}
	}
	if !errors.Is(err, ErrGone) {
		t.Errorf("zombie: %v", err)
	}
	if _, err := StartTime("/proc", pid); !errors.Is(err, ErrGone) {
		t.Errorf("StartTime of a zombie: %v", err)
	}
}

// TestVanish reads processes that end all the time: each is read in full or is gone, or it exits and version 1 does not tell its group any more.
func TestVanish(t *testing.T) {
	var r Reader
	for range 150 {
		cmd := exec.Command("true")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() { _ = cmd.Wait(); close(done) }()
		for running := true; running; {
			select {
			case <-done:
				running = false
			default:
			}
			p, err := r.Read(cmd.Process.Pid)
			if err != nil && !errors.Is(err, ErrGone) {
				t.Fatalf("error %v", err)
			}
			told := p.Cgroup != "" || r.exiting(p.PID, "stat", p.StartTime)
			if err == nil && (p.StartTime == 0 || !told || p.Comm == "") {
				t.Fatalf("half a process: %+v", p)
			}
		}
	}
}

// TestHidden reads, as another user, a /proc that was mounted with hidepid.
func TestHidden(t *testing.T) {
	if root := os.Getenv("GPU_EXPORTER_TEST_HIDDEN"); root != "" {
		if v := Look(root); v != Hidden {
			t.Errorf("Look says %q", v)
		}
		r := Reader{Root: root}
		if _, err := r.Read(1); !errors.Is(err, ErrHidden) && !errors.Is(err, ErrGone) {
			t.Errorf("process 1: %v", err)
		}
		if _, err := r.Read(os.Getpid()); err != nil {
			t.Errorf("own process: %v", err)
		}
		return
	}
	if os.Geteuid() != 0 {
		t.Fatal("root is needed to mount a /proc")
	}
	for _, mode := range []string{"1", "2"} {
		t.Run("hidepid="+mode, func(t *testing.T) {
			dir, err := os.MkdirTemp("/tmp", "proc")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { os.Remove(dir) })
			if err := os.Chmod(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := syscall.Mount("proc", dir, "proc", 0, "hidepid="+mode); err != nil {
				t.Fatal("mounting a /proc: ", err)
			}
			t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
			cmd := exec.Command("/proc/self/exe", "-test.run=^TestHidden$", "-test.v")
			cmd.Dir = "/"
			cmd.Env = []string{"GPU_EXPORTER_TEST_HIDDEN=" + dir}
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
			if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS") {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

func TestLook(t *testing.T) {
	if v := Look(t.TempDir()); v != Unreadable {
		t.Errorf("an empty directory: %q", v)
	}
	if v := Look(tree(t, map[string]string{"self/stat": "x"})); v != Hidden {
		t.Errorf("no process 1: %q", v)
	}
	for link, want := range map[string]Visibility{initialPIDNamespace: Visible, "pid:[4026532226]": PIDNamespace} {
		root := tree(t, map[string]string{"1/stat": "x", "1/ns/x": ""})
		if err := os.Symlink(link, root+"/1/ns/pid"); err != nil {
			t.Fatal(err)
		}
		if v := Look(root); v != want {
			t.Errorf("%s: %q, want %q", link, v, want)
		}
	}
	for _, v := range []Visibility{Hidden, Unreadable, PIDNamespace} {
		if !strings.HasPrefix(v.Reason(), string(v)+": ") || len(v.Explain()) == 0 {
			t.Errorf("reason %q", v.Reason())
		}
	}
	if Visible.Reason() != "" {
		t.Errorf("reason %q", Visible.Reason())
	}
}

func FuzzStat(f *testing.F) {
	f.Add([]byte(statLine(7, "a) (b", "S", 1, 2, 3, 4)))
	f.Add([]byte("1 () R"))
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := parseStat(data)
		if err != nil {
			return
		}
		if !bytes.Contains(data, s.comm) || s.state == 0 || s.threads < 0 {
			t.Errorf("%+v of %q", s, data)
		}
		if !bytes.Contains(data, []byte(strconv.FormatUint(s.start, 10))) {
			t.Errorf("start %d is not in %q", s.start, data)
		}
	})
}

func FuzzCommand(f *testing.F) {
	f.Add([]byte("python3\x00-c\x00\x1b"))
	f.Fuzz(func(t *testing.T, data []byte) {
		s := parseCommand(data)
		if !utf8.ValidString(s) || utf8.RuneCountInString(s) > maxCommand || strings.ContainsAny(s, "\x00\n\r\x1b") {
			t.Errorf("command %q", s)
		}
	})
}

func BenchmarkRead(b *testing.B) {
	var r Reader
	pid := os.Getpid()
	b.ReportAllocs()
	for b.Loop() {
		if _, err := r.Read(pid); err != nil {
			b.Fatal(err)
		}
	}
}

// TestReadsOnce: a process that is known costs one read a second. The kernel counts them by thread.
func TestReadsOnce(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	reads := func() int {
		data, err := os.ReadFile("/proc/thread-self/io")
		if err != nil {
			t.Skip("this kernel does not count reads: ", err)
		}
		_, rest, _ := strings.Cut(string(data), "syscr: ")
		text, _, _ := strings.Cut(rest, "\n")
		n, err := strconv.Atoi(text)
		if err != nil {
			t.Fatalf("%s: %v", data, err)
		}
		return n
	}
	var r Reader
	read := func(times int) int {
		before := reads()
		for range times {
			if _, err := r.Read(os.Getpid()); err != nil {
				t.Fatal(err)
			}
		}
		return reads() - before
	}
	read(1)
	if n := read(21) - read(1); n != 20 { // the rest is of counting
		t.Errorf("20 looks at a known process read %d times", n)
	}
}
