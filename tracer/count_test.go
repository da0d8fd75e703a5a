package tracer

import (
	"errors"
	"fmt"
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
	"unsafe"

	"golang.org/x/sys/unix"

	"gpu-exporter/tracer/activity"
)

// TestMillionCalls makes a million calls on two threads: each is counted, and each is in a latency bucket. It logs what a traced call costs.
func TestMillionCalls(t *testing.T) {
	const threads, each = 2, 500_000
	fd, err := unix.Open("/dev/full", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	other, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(other)
	loop := func(fd, n int) time.Duration {
		began := time.Now()
		for range n {
			_, _, _ = unix.RawSyscall(unix.SYS_IOCTL, uintptr(fd), 0x4611, 0) // ENOTTY
		}
		return time.Since(began) / time.Duration(n)
	}
	call, elsewhere := func() time.Duration { return loop(fd, 20_000) }, func() time.Duration { return loop(other, 20_000) }
	bare, getppid := fastest(call), fastest(nothing)
	w := start(t, nil)
	traced, unrelated := fastest(call), fastest(nothing)
	t.Logf("untraced %v, traced %v, of another device %v; getppid %v, then %v: call x%.2f, getppid x%.2f", bare, traced, fastest(elsewhere), getppid,
		unrelated, float64(traced)/float64(bare), float64(unrelated)/float64(getppid))
	w.until("the calls so far", func(r *activity.Report) bool { return total(r, calls("ctl_0x11")) == 200_000 })
	var group sync.WaitGroup
	began := time.Now()
	for range threads {
		group.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			loop(fd, each)
		})
	}
	group.Wait()
	t.Logf("%.0f traced calls a second", threads*each/time.Since(began).Seconds())
	const want = 200_000 + threads*each
	r := w.until("every call", func(r *activity.Report) bool { return total(r, calls("ctl_0x11")) == want })
	for _, g := range r.Groups {
		for _, c := range g.Calls {
			var in uint64
			for _, n := range c.Buckets {
				in += n
			}
			if c.Name == "ctl_0x11" && (in != c.Count || c.Errors["enotty"] != c.Count || c.Seconds <= 0) {
				t.Errorf("%d calls, %d in buckets, errors %v, %v s", c.Count, in, c.Errors, c.Seconds)
			}
		}
	}
	if len(r.Lost) > 0 {
		t.Errorf("lost %v", r.Lost)
	}
	time.Sleep(1100 * time.Millisecond) // and none is counted again
	w.mu.Lock()
	defer w.mu.Unlock()
	if n := total(w.last, calls("ctl_0x11")); n != want {
		t.Errorf("%d calls a second later", n)
	}
}

// nothing measures a system call that has nothing to do with devices.
func nothing() time.Duration {
	began := time.Now()
	for range 20_000 {
		_, _, _ = unix.RawSyscall(unix.SYS_GETPPID, 0, 0, 0)
	}
	return time.Since(began) / 20_000
}

// fastest measures ten times: what else the machine does only ever adds.
func fastest(measure func() time.Duration) time.Duration {
	best := measure()
	for range 9 {
		best = min(best, measure())
	}
	return best
}

// TestOpens counts opens by result through every system call that opens, failed ones by name.
func TestOpens(t *testing.T) {
	dir := t.TempDir()
	node := filepath.Join(dir, "nv")
	w := start(t, func(c *Config) { c.Prefix = node })
	for suffix, minor := range map[string]uint32{"ctl": 7, "0": 5, "-uvm": 8} {
		if err := unix.Mknod(node+suffix, unix.S_IFCHR|0o600, int(unix.Mkdev(1, minor))); err != nil {
			t.Skip(err)
		}
	}
	// A node of a major without a driver stands for a broken device.
	if err := unix.Mknod(node+"1", unix.S_IFCHR|0o600, int(unix.Mkdev(240, 77))); err != nil {
		t.Skip(err)
	}
	open := func(f func(path string) (int, error), path string, want error) {
		t.Helper()
		fd, err := f(path)
		if !errors.Is(err, want) {
			t.Fatalf("%s: %v", path, err)
		}
		if err == nil {
			unix.Close(fd)
		}
	}
	ways := []func(path string) (int, error){
		func(p string) (int, error) { return unix.Openat(unix.AT_FDCWD, p, unix.O_RDWR, 0) },
		func(p string) (int, error) { return unix.Openat2(unix.AT_FDCWD, p, &unix.OpenHow{Flags: unix.O_RDWR}) },
	}
	if runtime.GOARCH == "amd64" {
		const sysOpen, sysCreat = 2, 85
		old := func(number, flags uintptr) func(p string) (int, error) {
			return func(p string) (int, error) {
				path, err := unix.BytePtrFromString(p)
				if err != nil {
					return 0, err
				}
				fd, _, errno := unix.Syscall(number, uintptr(unsafe.Pointer(path)), flags, 0)
				if errno != 0 {
					return 0, errno
				}
				return int(fd), nil
			}
		}
		ways = append(ways, old(sysOpen, unix.O_RDWR), old(sysCreat, 0o600))
	}
	const rounds = 50
	for range rounds {
		for _, f := range ways {
			open(f, node+"ctl", nil)
			open(f, node+"0", nil)
			open(f, node+"-uvm", nil)
			open(f, node+"1", syscall.ENXIO)
		}
		open(ways[0], node+"7", syscall.ENOENT)
		open(ways[0], filepath.Join(dir, "other"), syscall.ENOENT) // no device's name
	}
	n := uint64(rounds * len(ways))
	r := w.until("every open", func(r *activity.Report) bool {
		return total(r, opens("gpu", "ok")) >= n && total(r, opens("gpu", "enxio")) >= n && total(r, opens("gpu", "enoent")) >= rounds
	})
	for _, test := range []struct {
		node, result string
		want         uint64
	}{{"ctl", "ok", n}, {"gpu", "ok", n}, {"gpu", "enxio", n}, {"gpu", "enoent", rounds}} {
		if got := total(r, opens(test.node, test.result)); got != test.want {
			t.Errorf("%s %s: %d opens, want %d", test.node, test.result, got, test.want)
		}
	}
	// /dev/random is opened by others too.
	if got := total(r, opens("uvm", "ok")); got < n {
		t.Errorf("uvm: %d opens, want at least %d", got, n)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	told := map[string]int{}
	for _, e := range w.events {
		if e.PID == os.Getpid() {
			told[e.Detail]++
		}
	}
	if told["gpu5 ok"] == 0 || told["gpu1 enxio"] == 0 || told["gpu1 enxio"] > int(n) {
		t.Errorf("told %v", told)
	}
}

// cgroup makes a control group for a test, in the hierarchy that tells groups apart on this host.
func cgroup(t *testing.T, name string) (dir, path string) {
	t.Helper()
	root := "/sys/fs/cgroup"
	if v1, controller := hierarchy("/proc"); v1 {
		root += "/" + controller
	}
	dir = root + "/" + name
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Skip(err)
	}
	for _, file := range []string{"cpuset.cpus", "cpuset.mems"} { // a v1 cpuset takes no process before these are set
		if value, err := os.ReadFile(filepath.Join(root, file)); err == nil {
			_ = os.WriteFile(filepath.Join(dir, file), value, 0o644)
		}
	}
	t.Cleanup(func() {
		for range 100 {
			if os.Remove(dir) == nil {
				return
			}
			time.Sleep(20 * time.Millisecond)
		}
		t.Errorf("%s is left", dir)
	})
	return dir, "/" + name
}

// TestShortLives runs a thousand processes that each hold a device for 50 ms, in four control groups. Each is counted, with its group and how it
// ended.
func TestShortLives(t *testing.T) {
	const processes, groups = 1000, 4
	w := start(t, nil)
	var names, dirs []string
	for i := range groups {
		id := strings.Repeat(fmt.Sprint(i), 64)
		dir, _ := cgroup(t, "docker-"+id+".scope")
		dirs, names = append(dirs, dir), append(names, "docker-"+id+".scope")
	}
	script := `echo $$ >"$1/cgroup.procs"; i=0
	while [ $i -lt 250 ]; do ( exec 3</dev/zero; exec sleep 0.05 ) & i=$((i+1)); [ $((i % 25)) != 0 ] || wait; done`
	var all sync.WaitGroup
	for _, dir := range dirs {
		all.Go(func() {
			if out, err := exec.Command("/bin/sh", "-c", script, "sh", dir).CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
	all.Wait()
	r := w.until("every process", func(r *activity.Report) bool {
		return total(r, func(g activity.Group) uint64 { return g.Started }) >= processes && total(r, func(g activity.Group) uint64 { return g.Exited["exit"] }) >= processes
	})
	for _, name := range names {
		found := false
		for _, g := range r.Groups {
			if !strings.HasSuffix(g.Cgroup, name) {
				continue
			}
			found = true
			if g.Started != processes/groups || g.Exited["exit"] != processes/groups || opens("gpu", "ok")(g) != processes/groups {
				t.Errorf("%s: started %d, exited %v, opens %v", name, g.Started, g.Exited, g.Opens)
			}
		}
		if !found {
			t.Errorf("no group %s", name)
		}
	}
	if len(r.Lost) > 0 {
		t.Errorf("lost %v", r.Lost)
	}
}

// TestGroupGone is about a group that goes: its counters stay for the linger time, and then go.
func TestGroupGone(t *testing.T) {
	w := start(t, func(c *Config) { c.Linger = 3 * time.Second })
	name := "docker-" + strings.Repeat("a", 64) + ".scope"
	dir, _ := cgroup(t, name)
	if out, err := exec.Command("/bin/sh", "-c", `echo $$ >"$1/cgroup.procs"; exec 3</dev/zero`, "sh", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	has := func(r *activity.Report) bool {
		for _, g := range r.Groups {
			if strings.HasSuffix(g.Cgroup, name) && g.Started == 1 {
				return true
			}
		}
		return false
	}
	w.until("the group", has)
	time.Sleep(3500 * time.Millisecond)
	w.mu.Lock()
	still := has(w.last)
	w.mu.Unlock()
	if !still {
		t.Fatal("the counters of a group that lives are gone")
	}
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(dir, 0o755); err != nil { // for the clean-up; another group of the same name
		t.Fatal(err)
	}
	began := time.Now()
	w.until("the group gone", func(r *activity.Report) bool { return !has(r) })
	if took := time.Since(began); took < 2*time.Second {
		t.Errorf("gone after %v", took)
	}
}

// TestForkedElsewhere: a process is counted where it opens the device, not where it was forked by one that has it.
func TestForkedElsewhere(t *testing.T) {
	w := start(t, nil)
	fd, err := unix.Open("/dev/zero", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	w.held(os.Getpid())
	dir, path := cgroup(t, "docker-"+strings.Repeat("b", 64)+".scope")
	if out, err := exec.Command("/bin/sh", "-c", `echo $$ >"$1/cgroup.procs"; exec 3</dev/zero`, "sh", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	w.until("it in its group", func(r *activity.Report) bool {
		return slices.ContainsFunc(r.Groups, func(g activity.Group) bool { return g.Cgroup == path && g.Started == 1 && g.Exited["exit"] == 1 })
	})
}

// TestEnds tells how processes ended.
func TestEnds(t *testing.T) {
	w := start(t, nil)
	for _, how := range []string{"0", "3", "kill"} {
		_ = exec.Command("/proc/self/exe", "child", "exit", "/dev/zero", how).Run() // the status is the point
	}
	r := w.until("three ends", func(r *activity.Report) bool {
		return total(r, func(g activity.Group) uint64 { return g.Exited["exit"] + g.Exited["error"] + g.Exited["signal"] }) == 3
	})
	for _, reason := range []string{"exit", "error", "signal"} {
		if n := total(r, func(g activity.Group) uint64 { return g.Exited[reason] }); n != 1 {
			t.Errorf("%s: %d", reason, n)
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	var told []string
	for _, e := range w.events {
		if e.Kind == "exit" {
			told = append(told, e.Detail)
		}
	}
	if strings.Join(told, ", ") != "exit 0, exit 3, signal 9" {
		t.Errorf("told %q", told)
	}
}

// TestFullMaps fills each bounded map: what does not fit is counted by cause, and what did fit is still right.
func TestFullMaps(t *testing.T) {
	w := start(t, func(c *Config) {
		c.Limits = Limits{Processes: 8, Threads: 4, Calls: 4, Opens: 2, Groups: 1, Ring: 4096}
	})
	fd, err := unix.Open("/dev/full", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for nr := range 10 {
		for range 100 {
			_ = unix.IoctlSetInt(fd, uint(0x4640+nr), 0) // ENOTTY
		}
	}
	counted := func(r *activity.Report) uint64 {
		return total(r, func(g activity.Group) (n uint64) {
			for _, c := range g.Calls {
				n += c.Count
			}
			return n
		})
	}
	r := w.until("lost calls", func(r *activity.Report) bool { return r.Lost["map_calls"] > 0 && counted(r) > 0 })
	if n, lost := counted(r), r.Lost["map_calls"]; n != 400 || lost != 600 || r.Lost["map_errors"] != 600 {
		t.Errorf("%d calls counted, lost %v", n, r.Lost)
	}
	var callers sync.WaitGroup
	for range 8 {
		called := make(chan struct{})
		callers.Go(func() {
			runtime.LockOSThread() // and never unlocked: the thread ends
			_ = unix.IoctlSetInt(fd, 0x4640, 0)
			close(called)
			<-t.Context().Done()
		})
		<-called
	}
	t.Cleanup(callers.Wait)
	for range 3 {
		for _, path := range []string{"/dev/zero", "/dev/random"} { // one after the other two kinds of open
			other, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			unix.Close(other)
		}
	}
	for i := range 4 { // one after the other a process of another group
		dir, _ := cgroup(t, fmt.Sprintf("full-%d", i))
		if out, err := exec.Command("/bin/sh", "-c", `echo $$ >"$1/cgroup.procs"; exec 3</dev/zero`, "sh", dir).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	for range 12 {
		startChild(t, nil, "open", "/dev/zero")
	}
	for _, cause := range []string{"map_threads", "map_opens", "map_holders", "map_groups"} {
		w.until("lost "+cause, func(r *activity.Report) bool { return r.Lost[cause] > 0 })
	}
}

// TestRingOverrun loses records: they are counted, nobody is exact any more, and who holds a device is found by looking.
func TestRingOverrun(t *testing.T) {
	block := make(chan struct{})
	var once sync.Once
	w := start(t, func(c *Config) {
		c.Limits.Ring, c.Limits.OpenRate = 4096, 1_000_000
		tell := c.Events
		c.Events = func(e Event) {
			once.Do(func() { <-block }) // a reader that is held up
			tell(e)
		}
	})
	first, _, _ := startChild(t, nil, "open", "/dev/zero")
	for range 1500 { // more than the ring buffer and the queue behind it hold
		fd, err := unix.Open("/dev/full", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(fd)
	}
	second, _, _ := startChild(t, nil, "open", "/dev/zero")
	close(block)
	w.until("lost records", func(r *activity.Report) bool { return r.Lost["ringbuf"] > 0 })
	for _, cmd := range []*exec.Cmd{first, second} {
		w.until("a process found by looking", func(r *activity.Report) bool {
			p := process1(r, cmd.Process.Pid)
			return p != nil && !p.FromBirth
		})
	}
	w.until("every open: counts do not depend on records", func(r *activity.Report) bool { return total(r, opens("ctl", "ok")) == 1500 })
}

// TestRate is about a process that opens without end: its records are cut, its counts are not.
func TestRate(t *testing.T) {
	w := start(t, func(c *Config) { c.Limits.OpenRate = 10 })
	for range 200 {
		fd, err := unix.Open("/dev/full", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(fd)
	}
	r := w.until("every open", func(r *activity.Report) bool { return total(r, opens("ctl", "ok")) == 200 })
	if r.Events > 60 {
		t.Errorf("%d records", r.Events)
	}
	w.notHeld(os.Getpid()) // though its last closes had no record
}

// TestStorm is about a process that opens and closes a device 100000 times a second: every open is counted, and what it costs user space does not
// grow with their number: at most 5 % of a core.
func TestStorm(t *testing.T) {
	n := 100_000
	emulated := os.Getenv("GPU_EXPORTER_TEST_TRACER") != "" // scripts/test-vm: a processor in software
	if emulated {
		n = 10_000
	}
	w := start(t, nil)
	time.Sleep(100 * time.Millisecond)
	cmd, in, lines := startChild(t, nil, "storm", "/dev/full", strconv.Itoa(n))
	cpu := func() time.Duration {
		var u unix.Rusage
		if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
			t.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	before, began := cpu(), time.Now()
	in.Close()
	took, err := time.ParseDuration(lines())
	if err != nil {
		t.Fatal(err)
	}
	used, elapsed := cpu()-before, time.Since(began)
	r := w.until("every open", func(r *activity.Report) bool { return total(r, opens("ctl", "ok")) == uint64(n) })
	t.Logf("%.0f opens and closes a second: %d records, %.1f %% of a core in user space", float64(n)/took.Seconds(), r.Events, 100*used.Seconds()/elapsed.Seconds())
	if most := uint64(1200 * (elapsed.Seconds() + 2)); r.Events > most { // 512 opens a second, their closes
		t.Errorf("%d records in %v", r.Events, elapsed)
	}
	if used > elapsed/20+10*time.Millisecond && !emulated {
		t.Errorf("%v of CPU in %v", used, elapsed)
	}
	if n := r.Lost["ringbuf"] + r.Lost["map_opens"] + r.Lost["map_holders"]; n > 0 {
		t.Errorf("lost %v", r.Lost)
	}
	_ = cmd.Process.Kill()
	w.notHeld(cmd.Process.Pid)
}

// TestLatency measures how soon an open is visible and an end is.
func TestLatency(t *testing.T) {
	w := start(t, nil)
	var took []time.Duration
	for range 11 {
		time.Sleep(60 * time.Millisecond)
		began := time.Now()
		fd, err := unix.Open("/dev/zero", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		w.held(os.Getpid())
		took = append(took, time.Since(began))
		unix.Close(fd)
		w.notHeld(os.Getpid())
	}
	slices.Sort(took)
	median := took[len(took)/2] // what else the machine does may hold one of them up
	cmd, _, _ := startChild(t, nil, "open", "/dev/zero")
	w.held(cmd.Process.Pid)
	began := time.Now()
	_ = cmd.Process.Kill()
	w.notHeld(cmd.Process.Pid)
	gone := time.Since(began)
	t.Logf("open to visible in %v, at most %v; end to gone %v", median, took[len(took)-1], gone)
	if gone > time.Second {
		t.Errorf("end to gone: %v", gone)
	}
	if median > 50*time.Millisecond { // 10 ms where the machine is not busy with other tests
		t.Errorf("open to visible: %v", took)
	}
}
