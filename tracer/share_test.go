package tracer

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-exporter/tracer/activity"
)

// flood is what a hostile process of TestShares does, at least: more of everything than the tables of the test have room for.
const flood = 64

// hostile is the child that fills every table that it can. prefix is how the names of devices begin.
func hostile(prefix string, programs *driver) {
	for i := range flood { // call numbers, each refused
		_ = unix.IoctlSetInt(programs.ctl, uint(0x4600+i), 0)
	}
	for i := range uint32(flood) { // statuses, in its own memory
		programs.put(0, programs.root, device1, 99, 0x20000+i)
		programs.call(programs.ctl, cmdFree)
	}
	for _, node := range []string{"c", "1", "-u", "-c"} { // results of opens: ENOENT, ENOTDIR, ELOOP, EISDIR, ENAMETOOLONG
		for _, name := range []string{"none", "file/x", "loop", "folder", strings.Repeat("x", 300)} {
			if fd, err := syscall.Open(prefix+node+name, syscall.O_RDWR, 0); err == nil {
				panic(fmt.Sprint("it opens: ", fd))
			}
		}
	}
	var called sync.WaitGroup
	called.Add(flood)
	for range flood { // threads
		go func() {
			runtime.LockOSThread()
			_ = unix.IoctlSetInt(programs.ctl, 0x4640, 0)
			called.Done()
			select {}
		}()
	}
	called.Wait()
	fd, err := syscall.Dup(programs.ctl) // the collector of garbage closes files, and the calls below need theirs
	check(err)
	device := os.NewFile(uintptr(fd), "device")
	for range flood { // processes that have the device
		c := exec.Command("sleep", "3600")
		c.ExtraFiles = []*os.File{device}
		c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		check(c.Start())
	}
	for range 20_000 { // and more records than the ring buffer has room for
		programs.memory(10, 4096)
	}
}

// neighbour is the child of another group: a few of everything.
func neighbour(prefix string, d *driver) {
	for range 3 {
		_ = unix.IoctlSetInt(d.ctl, 0x4611, 0)
	}
	for range 2 {
		d.put(0, d.root, device1, 99, 0x51)
		d.call(d.ctl, cmdFree)
	}
	if _, err := syscall.Open(prefix+"1none", syscall.O_RDWR, 0); err == nil {
		panic("it opens")
	}
	d.memory(0xffff, lastSize)
}

// TestShares: a control group that takes all it can of the kernel side's tables and of the ring buffer takes no more than its share. What another
// group does meanwhile is counted, and its figure is exact; nothing but shares is lost.
func TestShares(t *testing.T) {
	prefix := filepath.Join(t.TempDir(), "nv")
	for _, node := range []string{"c", "1", "-u", "-c"} {
		check(os.WriteFile(prefix+node+"file", nil, 0o600))
		check(os.Symlink(prefix+node+"loop", prefix+node+"loop"))
		check(os.Mkdir(prefix+node+"folder", 0o700))
	}
	var gate sync.Mutex // held: the reader is held up
	w, programs := startDriven(t, func(c *Config) {
		c.reconcile = time.Second                                                                                              // ends of those for whom there was no room are found by looking
		c.Prefix, c.Devices = prefix, slices.DeleteFunc(slices.Clone(devices), func(d Device) bool { return d.Node == "gpu" }) // others may have that one
		c.Limits = Limits{Processes: 48, Threads: 48, Calls: 48, Opens: 16, groupRate: 400}
		c.Limits.shares = map[bpfTable]int{bpfTableTABLE_HOLDERS: 16, bpfTableTABLE_THREADS: 16, bpfTableTABLE_CALLS: 16, bpfTableTABLE_ERRORS: 8, bpfTableTABLE_OPENS: 4}
		if tell := c.Events; tell != nil {
			c.Events = func(e Event) {
				gate.Lock()
				defer gate.Unlock()
				tell(e)
			}
		}
	})
	self, err := os.Executable()
	check(err)
	in := func(dir, what string) *exec.Cmd {
		t.Helper()
		cmd, _, _ := startProgram(t, programs, "/bin/sh", "-c", `echo $$ >"$1/cgroup.procs"; shift; exec "$@"`, "sh", dir, self, "child", what, prefix)
		return cmd
	}
	crowded, crowdedPath := cgroup(t, "docker-"+strings.Repeat("c", 64)+".scope")
	other, otherPath := cgroup(t, "docker-"+strings.Repeat("d", 64)+".scope")
	gate.Lock()
	bad := in(crowded, "hostile")
	gate.Unlock()
	counted := func(path string, processes uint64) *activity.Report {
		t.Helper()
		return w.until("what the neighbour did", func(r *activity.Report) bool {
			i := slices.IndexFunc(r.Groups, func(g activity.Group) bool { return g.Cgroup == path })
			if i < 0 {
				return false
			}
			g := r.Groups[i]
			errors := uint64(0)
			for _, c := range g.Calls {
				if c.Name == "rm_free" {
					errors = c.Errors["no_memory"]
				}
			}
			return g.Started == processes && (path == crowdedPath || calls("ctl_0x11")(g) == 3 && errors == 2 && opens("gpu", "enoent")(g) == 1)
		})
	}
	good := in(other, "neighbour")
	r := counted(otherPath, 1)
	w.driven(good.Process.Pid, 0, true)
	w.driven(bad.Process.Pid, 0, false)
	for cause, n := range r.Lost {
		if cause != "share" && cause != "rate" || r.Lost["share"] == 0 {
			t.Errorf("lost by %s: %d", cause, n)
		}
	}
	for _, g := range r.Groups {
		if g.Cgroup != crowdedPath {
			continue
		}
		called, refused, failed := uint64(0), uint64(0), uint64(0)
		for _, c := range g.Calls {
			called += c.Count
			for _, n := range c.Errors {
				refused += n
			}
		}
		for _, o := range g.Opens {
			if o.Result != "ok" {
				failed += o.Count
			}
		}
		// Of the threads only so many as have room are seen.
		if want := uint64(20_000 + 2*flood); called < want || refused < 2*flood || failed != 20 || len(g.Opens) > 12 {
			t.Errorf("%d calls, %d refused, opens %v", called, refused, g.Opens)
		}
	}

	time.Sleep(1100 * time.Millisecond) // a share of the ring buffer is of a second: its end has room again
	check(bad.Process.Kill())
	w.notHeld(bad.Process.Pid)
	w.until("its children gone", func(r *activity.Report) bool {
		return !slices.ContainsFunc(r.Processes, func(p activity.Process) bool { return p.Cgroup == crowdedPath })
	})
	after := in(crowded, "neighbour") // what was taken is given back
	counted(crowdedPath, 2)
	w.driven(after.Process.Pid, 0, true)
}
