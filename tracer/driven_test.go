package tracer

import (
	"cmp"
	"encoding/binary"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/snapshot"
	"gpu-exporter/nvml/frame"
	"gpu-exporter/tracer/activity"
)

// driver makes driver calls that succeed, with real parameters in real memory. No device of this host answers NVIDIA's calls, so the programs
// that are attached to entry and exit are loaded once more as a kind that can be run at will, in the calling thread, upon its descriptors
// and its memory. Their records take the whole way to the report.
type driver struct {
	enter, exit *ebpf.Program
	ctl, uvm    int
	root        uint32 // handle of the client
	page        []byte // memory with nothing mapped behind it
	inside      func() // what happens in the driver, or in another thread meanwhile
}

const (
	device1     = 2    // handle of the driver's device object
	paramsPlace = 1024 // where parameters lie in the page; the block lies at its start
	pageSize    = 4096
	cmdFree     = 0xc0104629
	cmdAlloc    = 0xc030462b
	classRoot   = 0x41
	classDevice = 0x80
	classMemory = 0x40
	lastSize    = 12288 // of what a case has allocated when all its calls are done
	drivenUUID  = "GPU-01020304-0506-0708-090a-0b0c0d0e0f10"
)

// newDriver opens the devices and becomes a process that computes, with a client and a device.
func newDriver(enter, exit *ebpf.Program, root uint32) *driver {
	runtime.LockOSThread() // entry and exit are of one thread
	d := &driver{enter: enter, exit: exit, root: root}
	for path, to := range map[string]*int{"/dev/full": &d.ctl, "/dev/random": &d.uvm} {
		fd, err := syscall.Open(path, syscall.O_RDWR, 0)
		if err != nil {
			panic(err)
		}
		*to = fd
	}
	both, err := unix.Mmap(-1, 0, 2*pageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err == nil {
		err = unix.Mprotect(both[pageSize:], unix.PROT_NONE)
	}
	if err != nil {
		panic(err)
	}
	d.page = both[:pageSize]
	uuid := []uint32{0x04030201, 0x08070605, 0x0c0b0a09, 0x100f0e0d}
	d.put(0, append(uuid, 0, 0, 0, 0, 0, 0)...)
	d.call(d.uvm, 37) // UVM_REGISTER_GPU
	d.alloc(0, root, classRoot, 0)
	d.alloc(root, device1, classDevice, 0)
	d.put(0, append(uuid[:4:4], 0, root, 9, 0)...)
	d.call(d.uvm, 25) // UVM_REGISTER_GPU_VASPACE
	return d
}

// call makes one call with the block at the start of the page, and a result of 0.
func (d *driver) call(fd int, cmd uint32) { d.callAt(fd, cmd, d.at(0)) }

func (d *driver) callAt(fd int, cmd uint32, arg uint64) {
	if _, err := d.enter.Run(&ebpf.RunOptions{Context: [8]uint64{2: uint64(fd), 3: uint64(cmd), 4: arg}}); err != nil {
		panic(err)
	}
	if d.inside != nil {
		d.inside()
	}
	if _, err := d.exit.Run(&ebpf.RunOptions{Context: [3]uint64{}}); err != nil {
		panic(err)
	}
}

// at is the address of a place in the page.
func (d *driver) at(place int) uint64 {
	return uint64(uintptr(unsafe.Pointer(&d.page[0]))) + uint64(place)
}

func (d *driver) put(place int, words ...uint32) {
	for i, w := range words {
		binary.LittleEndian.PutUint32(d.page[place+4*i:], w)
	}
}

// alloc makes an object; size is that of memory.
func (d *driver) alloc(parent, handle, class uint32, size uint64) {
	d.sized(paramsPlace, size)
	d.block(0, parent, handle, class, d.at(paramsPlace))
	d.call(d.ctl, cmdAlloc)
}

// block writes the block of an RM_ALLOC.
func (d *driver) block(place int, parent, handle, class uint32, params uint64) {
	root := d.root
	if class == classRoot {
		root = 0
	}
	d.put(place, root, parent, handle, class, uint32(params), uint32(params>>32), 0, 0, 0, 0, 0, 0)
}

// sized writes the parameters of memory, as far as the page goes.
func (d *driver) sized(place int, size uint64) {
	words := make([]uint32, 40)
	words[64/4], words[68/4] = uint32(size), uint32(size>>32)
	d.put(place, words[:min(len(words), (len(d.page)-place)/4)]...)
}

func (d *driver) memory(handle uint32, size uint64) { d.alloc(device1, handle, classMemory, size) }

func (d *driver) free(handle uint32) {
	d.put(0, d.root, device1, handle, 0)
	d.call(d.ctl, cmdFree)
}

// driverOf makes the driver of a child. Its programs are the descriptors 3 and 4.
func driverOf() *driver {
	var programs [2]*ebpf.Program
	for i := range programs {
		p, err := ebpf.NewProgramFromFD(3 + i)
		if err != nil {
			panic(err)
		}
		programs[i] = p
	}
	return newDriver(programs[0], programs[1], uint32(os.Getpid())<<8|1)
}

// drive is the child that does a case.
func drive(name string) *driver {
	d := driverOf()
	i := slices.IndexFunc(drivenCases(), func(c drivenCase) bool { return c.name == name })
	drivenCases()[i].do(d)
	d.inside = nil
	d.memory(0xffff, lastSize)
	return d
}

// burst allocates and frees at random, and returns how much the process then holds.
func (d *driver) burst() string {
	held, sizes := uint64(burstSize+lastSize), map[uint32]uint64{}
	random := rand.New(rand.NewPCG(1, 2))
	for range 20_000 {
		handle := 0x20000 + random.Uint32N(500)
		if size, ok := sizes[handle]; ok {
			d.free(handle)
			held -= size
			delete(sizes, handle)
			continue
		}
		sizes[handle] = random.Uint64N(1<<20) << 12
		d.memory(handle, sizes[handle])
		held += sizes[handle]
	}
	return strconv.FormatUint(held, 10)
}

const burstSize = 5 << 30

// startDriven starts a tracer where a driver is loaded, and returns the programs for the children.
func startDriven(t *testing.T, change func(*Config)) (w *watcher, programs []*os.File) {
	t.Helper()
	root := t.TempDir()
	writeDriver(t, root)
	var attached *kernel
	w = start(t, func(c *Config) {
		c.driverRoot = root
		c.attached = func(k *kernel) { attached = k }
		if change != nil {
			change(c)
		}
	})
	config := Config{}
	config.cgroupV1, config.controller = hierarchy("/proc")
	if change != nil {
		change(&config)
	}
	spec, err := loadBpf()
	if err != nil {
		t.Fatal(err)
	}
	names := []string{bpfProgTpIoctlEnter, bpfProgTpIoctlExit}
	only(spec, names)
	for _, p := range spec.Programs {
		p.Type = ebpf.RawTracepoint // a kind that the kernel runs at will; its context is words, as is that of a system call's tracepoint
	}
	if err := configure(spec, &config); err != nil {
		t.Fatal(err)
	}
	loaded, err := attached.load(spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(loaded.Close)
	for _, name := range names {
		fd, err := unix.FcntlInt(uintptr(loaded.Programs[name].FD()), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		f := os.NewFile(uintptr(fd), name)
		t.Cleanup(func() { f.Close() })
		programs = append(programs, f)
	}
	return w, programs
}

type drivenCase struct {
	name  string
	want  uint64 // bytes held when all calls are done
	exact bool   // false: no figure is given, so NVML's counts
	do    func(d *driver)
}

func drivenCases() []drivenCase {
	const mib, gib = 1 << 20, 1 << 30
	unmapped := func(d *driver) uint64 { return d.at(pageSize) }
	return []drivenCase{
		{"allocated and freed", 3 * mib, true, func(d *driver) {
			d.memory(10, gib)
			d.memory(11, 3*mib)
			d.free(10)
		}},
		{"burst", burstSize, true, func(d *driver) { d.memory(10, burstSize) }},
		{"params unmapped", 0, false, func(d *driver) {
			d.block(0, device1, 10, classMemory, unmapped(d))
			d.call(d.ctl, cmdAlloc)
		}},
		{"params null", 0, false, func(d *driver) {
			d.block(0, device1, 10, classMemory, 0)
			d.call(d.ctl, cmdAlloc)
		}},
		{"params of the kernel", 0, false, func(d *driver) {
			d.block(0, device1, 10, classMemory, 0xffffffff81000000)
			d.call(d.ctl, cmdAlloc)
		}},
		{"params end with their page", gib, true, func(d *driver) {
			d.sized(pageSize-72, gib)
			d.block(0, device1, 10, classMemory, d.at(pageSize-72))
			d.call(d.ctl, cmdAlloc)
		}},
		{"params go past their page before the size", 0, false, func(d *driver) {
			d.sized(pageSize-64, gib)
			d.block(0, device1, 10, classMemory, d.at(pageSize-64))
			d.call(d.ctl, cmdAlloc)
		}},
		{"block unmapped", 0, false, func(d *driver) { d.callAt(d.ctl, cmdAlloc, unmapped(d)) }},
		{"block ends with its page", gib, true, func(d *driver) {
			d.sized(paramsPlace, gib)
			d.block(pageSize-48, device1, 10, classMemory, d.at(paramsPlace))
			d.callAt(d.ctl, cmdAlloc, d.at(pageSize-48))
		}},
		{"block unmapped at exit", 0, false, func(d *driver) {
			d.sized(paramsPlace, gib)
			d.block(0, device1, 10, classMemory, d.at(paramsPlace))
			d.inside = func() { check(unix.Mprotect(d.page, unix.PROT_NONE)) }
			d.call(d.ctl, cmdAlloc)
			check(unix.Mprotect(d.page, unix.PROT_READ|unix.PROT_WRITE))
		}},
		{"size written by the driver", 2 * mib, true, func(d *driver) { // as it rounds it
			d.inside = func() { d.sized(paramsPlace, 2*mib) }
			d.memory(10, 2*mib-5)
		}},
		{"params pointer swapped", 0, false, func(d *driver) {
			d.sized(2048, 7*gib)
			d.inside = func() { d.put(16, uint32(d.at(2048))) }
			d.memory(10, gib)
		}},
		{"client whose class the driver makes newer", mib, true, func(d *driver) {
			d.inside = func() { d.put(8, d.root+1, classRoot) }
			d.block(0, 0, 0, 0, 0)
			d.put(0, 0)
			d.call(d.ctl, cmdAlloc)
			d.inside = nil
			d.memory(10, mib)
		}},
		{"class swapped for one that does not count", 0, false, func(d *driver) {
			d.inside = func() { d.put(12, 0x3e) }
			d.memory(10, gib)
		}},
		{"class swapped for memory", 0, false, func(d *driver) {
			d.inside = func() { d.put(12, classMemory) }
			d.alloc(device1, 10, 0x3e, gib)
		}},
		{"size of no GPU", 0, false, func(d *driver) { d.memory(10, 1<<60) }},
		{"no form: RM_ALLOC of 44 bytes", 0, false, func(d *driver) {
			d.sized(paramsPlace, gib)
			d.block(0, device1, 10, classMemory, d.at(paramsPlace))
			d.call(d.ctl, 0xc02c462b)
		}},
		{"no form: RM_FREE of 20 bytes", 0, false, func(d *driver) { d.call(d.ctl, 0xc0144629) }},
		{"no form: RM_DUP of no bytes", 0, false, func(d *driver) { d.call(d.ctl, 0x4634) }},
		{"no form: VID_HEAP_CONTROL of 16 bytes", 0, false, func(d *driver) { d.call(d.ctl, 0xc010464a) }},
		{"no form, of a class that does not count", 0, true, func(d *driver) {
			d.block(0, device1, 10, 0x3e, 0)
			d.call(d.ctl, 0xc02c462b)
		}},
		{"indirect allocation", 0, false, func(d *driver) {
			d.put(0, 0x2b)
			d.call(d.ctl, 0xc01046d3)
		}},
		{"handle used again after its free", 2 * mib, true, func(d *driver) {
			d.memory(10, gib)
			d.free(10)
			d.memory(10, 2*mib)
		}},
		{"handle used again, its free unseen", 2 * mib, true, func(d *driver) {
			d.memory(10, gib)
			d.memory(10, 2*mib)
		}},
		{"handle freed twice", mib, true, func(d *driver) {
			d.memory(10, gib)
			d.memory(11, mib)
			d.free(10)
			d.free(10)
		}},
		{"free of an unknown handle", gib, true, func(d *driver) {
			d.memory(10, gib)
			d.free(77)
		}},
		{"100 000 live objects", 100_000 * mib, true, func(d *driver) {
			for i := range uint32(100_000) {
				d.memory(0x10000+i, mib)
			}
		}},
	}
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

// TestDrivenCalls: what bad parameters lead to, case by case. Each is a process of its own, and every figure is compared with what it did.
func TestDrivenCalls(t *testing.T) {
	w, programs := startDriven(t, func(c *Config) { c.Limits.CallRate, c.Limits.Ring = 10_000_000, 64<<20 })
	for _, c := range drivenCases() {
		t.Run(c.name, func(t *testing.T) {
			w.t = t
			cmd, _, _ := startChild(t, programs, "drive", c.name)
			w.driven(cmd.Process.Pid, c.want, c.exact)
		})
	}
	w.t = t
	after := time.Now().Add(tick).UnixNano() // losses are looked for once a second
	if r := w.until("a later report", func(r *activity.Report) bool { return r.Time > after }); len(r.Lost) > 0 {
		t.Errorf("lost %v", r.Lost)
	}
}

// TestOverrunLedger loses calls of one process. Then no process that was there is given a figure of the ledger's any more, so that the snapshot has
// NVML's; one that begins later is exact, and its figure is the ledger's even where NVML's is older.
func TestOverrunLedger(t *testing.T) {
	var gate sync.Mutex // held: the reader is held up
	w, programs := startDriven(t, func(c *Config) {
		c.Limits.CallRate, c.Limits.Ring = 10_000_000, 64<<10
		if tell := c.Events; tell != nil {
			c.Events = func(e Event) {
				gate.Lock()
				defer gate.Unlock()
				tell(e)
			}
		}
	})
	burst, in, lines := startChild(t, programs, "drive", "burst")
	other, _, _ := startChild(t, programs, "drive", "burst")
	w.driven(burst.Process.Pid, burstSize, true)
	w.driven(other.Process.Pid, burstSize, true)
	gate.Lock()
	in.Close()
	held, err := strconv.ParseUint(lines(), 10, 64)
	gate.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	w.until("lost records", func(r *activity.Report) bool { return r.Lost["ringbuf"] > 0 })
	w.driven(burst.Process.Pid, 0, false)
	w.driven(other.Process.Pid, 0, false)
	late, _, _ := startChild(t, programs, "drive", "burst")
	w.driven(late.Process.Pid, burstSize, true)

	now := time.Now()
	r := w.until("a report", func(r *activity.Report) bool { return r.Time <= now.UnixNano() && process1(r, late.Process.Pid) != nil })
	truth := map[int]uint64{burst.Process.Pid: held, other.Process.Pid: burstSize + lastSize, late.Process.Pid: burstSize + lastSize}
	listed := frame.Processes{}
	sum := uint64(0)
	for pid, bytes := range truth {
		sum += bytes
		if pid == late.Process.Pid {
			bytes -= lastSize
		}
		listed.List = append(listed.List, frame.Process{PID: pid, MemoryUsed: frame.Some(bytes)})
	}
	b := snapshot.NewBuilder(snapshot.Config{})
	b.Apply(input.Input{Time: now.UnixNano(), Frame: &frame.Frame{Device: &frame.Device{UUID: drivenUUID, Processes: &listed, Load: &frame.Load{MemoryUsed: frame.Some(sum)}}}})
	b.Apply(input.Input{Time: now.UnixNano(), Tracer: r})
	s := b.Snapshot(now)
	for pid, bytes := range truth {
		i := slices.IndexFunc(s.Workloads, func(l snapshot.Workload) bool { return l.PID == pid })
		if i < 0 || s.Workloads[i].Memory != frame.Some(bytes) {
			t.Errorf("process %d holds %d: %+v", pid, bytes, s.Workloads)
		}
	}
}

// TestCallRate is about a process that calls without end: what it holds is not told any more, another process's figure stays exact.
func TestCallRate(t *testing.T) {
	w, programs := startDriven(t, func(c *Config) { c.Limits.CallRate = 100 })
	busy, in, lines := startChild(t, programs, "drive", "burst")
	other, _, _ := startChild(t, programs, "drive", "burst")
	w.driven(busy.Process.Pid, burstSize, true)
	w.driven(other.Process.Pid, burstSize, true)
	in.Close()
	lines()
	w.until("lost records", func(r *activity.Report) bool { return r.Lost["rate"] > 0 && r.Lost["ringbuf"] == 0 })
	w.driven(busy.Process.Pid, 0, false)
	w.driven(other.Process.Pid, burstSize, true)
}

// TestDriverReplaced: when the driver is replaced, what was known of its objects counts no more; of a driver whose calls are not known no figure is
// given, with the reason.
func TestDriverReplaced(t *testing.T) {
	root := ""
	w, programs := startDriven(t, func(c *Config) { root, c.reconcile = cmp.Or(c.driverRoot, root), 50*time.Millisecond })
	replace := func(with string) {
		t.Helper()
		if err := os.WriteFile(root+"/driver/nvidia/version", []byte("NVRM version: NVIDIA UNIX x86_64 Kernel Module  "+with+"  Release Build\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	before, _, _ := startChild(t, programs, "drive", "burst")
	w.driven(before.Process.Pid, burstSize, true)
	replace("570.86.10")
	w.driven(before.Process.Pid, 0, false)
	after, _, _ := startChild(t, programs, "drive", "burst")
	w.driven(after.Process.Pid, burstSize, true)
	replace("999.1.1")
	r := w.until("no ledger", func(r *activity.Report) bool { return !r.Ledger })
	if !strings.Contains(r.LedgerReason, "driver 999") {
		t.Errorf("the reason: %q", r.LedgerReason)
	}
	unknown, _, _ := startChild(t, programs, "drive", "burst")
	w.held(unknown.Process.Pid)
	time.Sleep(30 * time.Millisecond)
	r = w.until("a report", func(r *activity.Report) bool { return process1(r, unknown.Process.Pid) != nil })
	for _, p := range r.Processes {
		if slices.ContainsFunc(p.Devices, func(d activity.Device) bool { return d.Used.OK }) {
			t.Errorf("it is given a figure: %+v", p)
		}
	}
}

// driven waits until the last call of a driver is in the report, and compares.
func (w *watcher) driven(pid int, want uint64, exact bool) {
	w.t.Helper()
	if !exact {
		w.until("it not exact", func(r *activity.Report) bool { p := process1(r, pid); return p != nil && !p.FromBirth })
		time.Sleep(30 * time.Millisecond) // and so it stays, after its last call
		r := w.until("it", func(r *activity.Report) bool { return process1(r, pid) != nil })
		if p := process1(r, pid); p.FromBirth || slices.ContainsFunc(p.Devices, func(d activity.Device) bool { return d.Used.OK }) {
			w.t.Errorf("it is given a figure: %+v", p)
		}
		return
	}
	var p *activity.Process
	w.until("what it holds", func(r *activity.Report) bool {
		if p = process1(r, pid); p == nil || !p.FromBirth {
			return p != nil && !p.FromBirth
		}
		i := slices.IndexFunc(p.Devices, func(d activity.Device) bool { return d.UUID == drivenUUID })
		return i >= 0 && p.Devices[i].Used.OK && p.Devices[i].Used.V == want+lastSize
	})
	if !p.FromBirth {
		w.t.Errorf("not exact: %+v", p)
	}
}
