package tracer

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"gpu-exporter/tracer/activity"
)

// rmClient calls the driver the way libcuda does.
type rmClient struct {
	ctl, gpu, uvm  int
	block          []byte // a page: parameters at 0, parameters of the parameters at 512
	client, device uint32
	memory         []uint32
}

func newRMClient() (*rmClient, error) {
	r := &rmClient{}
	var err error
	for path, fd := range map[string]*int{"/dev/nvidiactl": &r.ctl, "/dev/nvidia0": &r.gpu, "/dev/nvidia-uvm": &r.uvm} {
		if *fd, err = unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
			return nil, fmt.Errorf("opening %s: %w", path, err)
		}
	}
	if r.block, err = unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE); err != nil {
		return nil, err
	}
	return r, r.begin()
}

// begin makes a client, a device, a subdevice and an address space, and registers them with UVM.
func (r *rmClient) begin() error {
	var err error
	if r.client, err = r.alloc(0, 0, classRoot, 0); err != nil {
		return err
	}
	if r.device, err = r.alloc(r.client, 0, classDevice, 56); err != nil {
		return err
	}
	vas, err := r.alloc(r.device, 0, 0x90f1, 0)
	if err != nil {
		return err
	}
	uuid, _ := parseUUID(drivenUUID)
	clear(r.block)
	copy(r.block, uuid[:])
	put(r.block, 28, r.client)
	if err := r.ioctl(r.uvm, 37); err != nil {
		return err
	}
	clear(r.block)
	copy(r.block, uuid[:])
	put(r.block, 20, r.client)
	put(r.block, 24, vas)
	return r.ioctl(r.uvm, 25)
}

func (r *rmClient) close() {
	for _, fd := range []int{r.ctl, r.gpu, r.uvm} {
		unix.Close(fd)
	}
}

func (r *rmClient) ioctl(fd int, cmd uint32) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(cmd), uintptr(unsafe.Pointer(&r.block[0]))); errno != 0 {
		return fmt.Errorf("call %#x: %w", cmd, errno)
	}
	return nil
}

// alloc makes an object whose parameters have n bytes; those at 512 are the caller's.
func (r *rmClient) alloc(parent, handle, class, n uint32) (uint32, error) {
	clear(r.block[:512])
	put(r.block, 0, r.client)
	put(r.block, 4, parent)
	put(r.block, 8, handle)
	put(r.block, 12, class)
	if n > 0 {
		put64(r.block, 16, uint64(uintptr(unsafe.Pointer(&r.block[512]))))
		put(r.block, 32, n)
	}
	if err := r.ioctl(r.ctl, cmdAlloc); err != nil {
		return 0, err
	}
	if status := get(r.block, 40); status != 0 {
		return 0, fmt.Errorf("class %#x: status %#x", class, status)
	}
	return get(r.block, 8), nil
}

// memory1 makes memory by RM_ALLOC.
func (r *rmClient) memory1(size uint64) (uint32, error) {
	clear(r.block[512:])
	put64(r.block, 512+64, size)
	return r.alloc(r.device, 0, classMemory, 128)
}

// heap makes memory by VID_HEAP_CONTROL.
func (r *rmClient) heap(size uint64) (uint32, error) {
	clear(r.block)
	put(r.block, 0, r.client)
	put(r.block, 4, r.device)
	put(r.block, 8, 2)
	put64(r.block, 88, size)
	if err := r.ioctl(r.ctl, 0xc0b8464a); err != nil {
		return 0, err
	}
	if status := get(r.block, 20); status != 0 {
		return 0, fmt.Errorf("heap: status %#x", status)
	}
	return get(r.block, 44), nil
}

func (r *rmClient) free(handle uint32) error {
	clear(r.block)
	put(r.block, 0, r.client)
	put(r.block, 8, handle)
	return r.ioctl(r.ctl, cmdFree)
}

func (r *rmClient) heapFree(handle uint32) error {
	clear(r.block)
	put(r.block, 0, r.client)
	put(r.block, 4, r.device)
	put(r.block, 8, 3)
	put(r.block, 44, handle)
	return r.ioctl(r.ctl, 0xc0b8464a)
}

// dup makes a second handle of memory, which holds no bytes of its own until the first is gone.
func (r *rmClient) dup(handle uint32) (uint32, error) {
	clear(r.block)
	put(r.block, 0, r.client)
	put(r.block, 4, r.device)
	put(r.block, 12, r.client)
	put(r.block, 16, handle)
	err := r.ioctl(r.ctl, 0xc01c4634)
	return get(r.block, 8), err
}

// do is one step of a traced child.
func (r *rmClient) do(step byte, random *rand.Rand) error {
	switch step {
	case 'c': // allocates and frees at random, by every kind of call
		for range 1 + random.IntN(8) {
			size := []uint64{1, 4096, 65536, 777_777, 2 << 20, 100 << 20, 1 << 30}[random.IntN(7)]
			i := 0
			if n := len(r.memory); n > 0 {
				i = random.IntN(n)
			}
			var handle uint32
			var err error
			switch what := random.IntN(8); {
			case what < 3 || len(r.memory) == 0:
				handle, err = r.memory1(size)
				r.memory = append(r.memory, handle)
			case what < 5:
				handle, err = r.heap(size)
				r.memory = append(r.memory, handle)
			case what == 5:
				handle, err = r.dup(r.memory[i])
				r.memory = append(r.memory, handle)
			default:
				free := r.free
				if what == 7 {
					free = r.heapFree
				}
				err = free(r.memory[i])
				r.memory[i] = r.memory[len(r.memory)-1]
				r.memory = r.memory[:len(r.memory)-1]
			}
			if err != nil {
				return err
			}
		}
	case 'u': // frees what is not there
		return r.free(0xcafebabe)
	case 'o': // asks for more than there is, as often as the driver's own library does
		for range 4 {
			if _, err := r.memory1(fakeCapacity + 1); err == nil {
				return fmt.Errorf("the driver gave more than it has")
			}
		}
	case 'd': // frees the client with all that is below it, and begins again
		if err := r.free(r.client); err != nil {
			return err
		}
		r.client, r.memory = 0, nil
		return r.begin()
	case 'f': // is refused by the kernel: the parameters cannot be read
		clear(r.block)
		put(r.block, 0, r.client)
		put(r.block, 12, classMemory)
		put64(r.block, 16, 1)
		put(r.block, 32, 128)
		if err := r.ioctl(r.ctl, cmdAlloc); err == nil {
			return fmt.Errorf("the driver read parameters at address 1")
		}
	}
	return nil
}

// rmChild does the steps that it is told, one for each byte, and says when each is done.
func rmChild(seed string) {
	runtime.LockOSThread() // the driver's retries come from one thread
	n, _ := strconv.ParseUint(seed, 10, 64)
	random := rand.New(rand.NewPCG(n, 0))
	r, err := newRMClient()
	for step := make([]byte, 1); ; {
		if err != nil {
			os.Stdout.WriteString(err.Error() + "\n")
			os.Exit(1)
		}
		os.Stdout.WriteString("ready\n")
		if n, _ := os.Stdin.Read(step); n == 0 {
			return
		}
		err = r.do(step[0], random)
	}
}

// TestDriverCalls traces real calls at the driver's own device numbers, with the configuration of a host: what the ledger says is what the
// driver knows, to the byte, after every step of three processes.
func TestDriverCalls(t *testing.T) {
	driver := startDriver(t)
	w := start(t, func(c *Config) { c.Devices, c.Prefix = nil, "" })
	r := w.until("a ledger", func(r *activity.Report) bool { return r.Ledger })
	if r.Mode != testMode {
		t.Errorf("mode %s, want %s: %s", r.Mode, testMode, r.Reason)
	}
	type process struct {
		pid  int
		step func(byte)
		kill func()
	}
	used := func(r *activity.Report, pid int) (bytes uint64, ok bool) {
		p := process1(r, pid)
		if p == nil || !p.FromBirth || !p.Compute || len(p.Devices) != 1 || p.Devices[0].UUID != drivenUUID || !p.Devices[0].Used.OK {
			return 0, false
		}
		return p.Devices[0].Used.V, true
	}
	exact := func(pid int, after string) {
		t.Helper()
		want := driver.held(pid)
		r := w.until(fmt.Sprintf("%d bytes of %d after %s", want, pid, after), func(r *activity.Report) bool {
			got, ok := used(r, pid)
			return ok && got == want
		})
		if peak := process1(r, pid).Devices[0].Peak.V; peak < want {
			t.Errorf("after %s: peak %d, used %d", after, peak, want)
		}
	}
	var all []process
	for i := range 3 {
		cmd, in, lines := startChild(t, nil, "rm", strconv.Itoa(i))
		all = append(all, process{cmd.Process.Pid, func(step byte) {
			t.Helper()
			if _, err := in.Write([]byte{step}); err != nil {
				t.Fatal(err)
			}
			if got := lines(); got != "ready" {
				t.Fatalf("child said %q", got)
			}
		}, func() { _ = cmd.Process.Kill() }})
		exact(cmd.Process.Pid, "the start")
	}
	most := uint64(0)
	for round := range 15 {
		for _, p := range all {
			p.step('c')
			most = max(most, driver.held(p.pid))
		}
		for _, p := range all {
			exact(p.pid, fmt.Sprint("round ", round))
		}
	}
	if most < 1<<20 {
		t.Errorf("no process ever held more than %d bytes", most)
	}
	for _, step := range []struct {
		do   byte
		what string
	}{{'u', "freeing an unknown handle"}, {'f', "a refused call"}, {'d', "freeing everything"}, {'c', "beginning again"}} {
		all[0].step(step.do)
		exact(all[0].pid, step.what)
	}
	all[1].step('o')
	exact(all[1].pid, "a request that cannot be met")
	failures := func(g activity.Group) uint64 { return g.Failures[drivenUUID] }
	r = w.until("the failure", func(r *activity.Report) bool { return total(r, failures) > 0 })
	if n := total(r, failures); n != 1 {
		t.Errorf("%d failed requests, want 1", n)
	}
	driver.mu.Lock()
	want := maps.Clone(driver.calls)
	driver.mu.Unlock()
	want["rm_alloc"]++ // the one that the kernel refused
	for name, n := range want {
		r = w.until(fmt.Sprint(n, " calls of ", name), func(r *activity.Report) bool { return total(r, calls(name)) >= uint64(n) })
		if got := total(r, calls(name)); got != uint64(n) {
			t.Errorf("%s: %d calls, want %d", name, got, n)
		}
	}
	refused, noMemory := uint64(0), uint64(0)
	for _, g := range r.Groups {
		for _, c := range g.Calls {
			refused, noMemory = refused+c.Errors["efault"], noMemory+c.Errors["no_memory"]
		}
	}
	if refused != 1 || noMemory != 4 {
		t.Errorf("%d calls refused, %d without memory; want 1 and 4", refused, noMemory)
	}
	all[2].kill()
	w.notHeld(all[2].pid)
	for deadline := time.Now().Add(5 * time.Second); driver.held(all[2].pid) > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the driver still has the memory of a process that was killed")
		}
	}
	exact(all[1].pid, "the end of another")
	if len(r.Lost) > 0 {
		t.Errorf("lost %v", r.Lost)
	}
	var oom, alloc, free bool
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, e := range w.events {
		oom = oom || e.Kind == "oom" && e.PID == all[1].pid && e.Size == fakeCapacity+1 && e.UUID == drivenUUID
		alloc = alloc || e.Kind == "alloc" && e.Size > 0
		free = free || e.Kind == "free" && e.Size > 0
	}
	if !oom || !alloc || !free {
		t.Errorf("told of out of memory %v, allocations %v, frees %v", oom, alloc, free)
	}
}

// TestDriverCallTax measures what tracing adds to RM_ALLOC and RM_FREE, each a call that a driver in user space answers.
func TestDriverCallTax(t *testing.T) {
	startDriver(t)
	r, err := newRMClient()
	if err != nil {
		t.Fatal(err)
	}
	defer r.close()
	loop := func() time.Duration {
		began := time.Now()
		for range 20 {
			handle, err := r.memory1(1 << 20)
			if err == nil {
				err = r.free(handle)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		return time.Since(began) / 40
	}
	often := func() time.Duration { return fastest(loop) }
	bare := fastest(often)
	w := start(t, func(c *Config) { c.Devices, c.Prefix = nil, "" })
	traced := fastest(often)
	t.Logf("untraced %v, traced %v: driver call x%.2f", bare, traced, float64(traced)/float64(bare))
	w.until("the calls", func(r *activity.Report) bool { return total(r, calls("rm_free")) == 2000 })
}
