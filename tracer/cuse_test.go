package tracer

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// A driver in user space that answers at the driver's own device numbers: character devices of CUSE, whose ioctls come to this process with
// the caller's parameters. It keeps a tree of objects as the real one does, and knows what every process holds, as NVML would.

// fakeDriver is the state behind the nodes.
type fakeDriver struct {
	mu      sync.Mutex
	clients map[uint32]*fakeClient
	handles uint32
	used    uint64
	calls   map[string]int // seen and answered, by name
}

type fakeClient struct {
	pid     int
	file    uint64
	objects map[uint32]fakeObject
}

type fakeObject struct {
	parent uint32
	made   uint32      // a later one has a higher number
	memory *fakeMemory // nil: it is none
}

// fakeMemory is memory under one or more handles. It is counted with the oldest that is left.
type fakeMemory struct {
	size    uint64
	handles int
}

const (
	fakeCapacity = 80 << 30
	fakePage     = 64 << 10 // sizes are rounded up to it
	noMemory     = 0x51
)

// fakeCall is one ioctl: params is the caller's block, deep what the block's own pointer leads to. Both are given back.
type fakeCall struct {
	tid    uint32
	file   uint64
	nr     uint32
	params []byte
	deep   []byte
}

func get(b []byte, at int) uint32        { return binary.LittleEndian.Uint32(b[at:]) }
func put(b []byte, at int, v uint32)     { binary.LittleEndian.PutUint32(b[at:], v) }
func get64(b []byte, at int) uint64      { return binary.LittleEndian.Uint64(b[at:]) }
func put64(b []byte, at int, v uint64)   { binary.LittleEndian.PutUint64(b[at:], v) }
func round(size uint64) (rounded uint64) { return (size + fakePage - 1) / fakePage * fakePage }

// held is what a process holds.
func (d *fakeDriver) held(pid int) (n uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	type holder struct {
		pid  int
		made uint32
	}
	holders := map[*fakeMemory]holder{}
	for _, c := range d.clients {
		for _, o := range c.objects {
			if h, ok := holders[o.memory]; o.memory != nil && (!ok || o.made < h.made) {
				holders[o.memory] = holder{c.pid, o.made}
			}
		}
	}
	for m, h := range holders {
		if h.pid == pid {
			n += m.size
		}
	}
	return n
}

// add makes an object; memory is nil for what is none.
func (d *fakeDriver) add(client, parent, handle uint32, memory *fakeMemory) (made uint32, ok bool) {
	c := d.clients[client]
	if c == nil || memory != nil && memory.handles == 0 && d.used+memory.size > fakeCapacity {
		return handle, false
	}
	d.handles++
	if handle == 0 {
		handle = 0xcaf00000 + d.handles
	}
	c.objects[handle] = fakeObject{parent, d.handles, memory}
	if memory != nil {
		if memory.handles++; memory.handles == 1 {
			d.used += memory.size
		}
	}
	return handle, true
}

// free drops an object and all below it. The driver succeeds with a handle that it does not know.
func (d *fakeDriver) free(client, handle uint32) {
	c := d.clients[client]
	if c == nil {
		return
	}
	for child, o := range c.objects {
		if o.parent == handle && child != handle {
			d.free(client, child)
		}
	}
	if m := c.objects[handle].memory; m != nil {
		if m.handles--; m.handles == 0 {
			d.used -= m.size
		}
	}
	delete(c.objects, handle)
	if client == handle {
		delete(d.clients, client)
	}
}

// processOf returns the process of a thread: FUSE tells who called as a thread.
func processOf(tid uint32) (pid int) {
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", tid)) // the caller waits for the answer
	for line := range strings.Lines(string(status)) {
		if value, ok := strings.CutPrefix(line, "Tgid:"); ok {
			pid, _ = strconv.Atoi(strings.TrimSpace(value))
		}
	}
	return pid
}

func (d *fakeDriver) rm(c *fakeCall) {
	p := c.params
	switch c.nr {
	case 0x2b:
		d.calls["rm_alloc"]++
		class := get(p, 12)
		status, ok := uint32(0), true
		switch class {
		case 0, 1, classRoot:
			d.handles++
			put(p, 8, 0xc1d00000+d.handles)
			d.clients[get(p, 8)] = &fakeClient{pid: processOf(c.tid), file: c.file, objects: map[uint32]fakeObject{}}
		case classMemory:
			size := round(get64(c.deep, 64))
			var handle uint32
			if handle, ok = d.add(get(p, 0), get(p, 4), get(p, 8), &fakeMemory{size: size}); ok {
				put(p, 8, handle)
				put64(c.deep, 64, size) // a refused request's parameters are left as they are
			}
		default:
			var handle uint32
			handle, ok = d.add(get(p, 0), get(p, 4), get(p, 8), nil)
			put(p, 8, handle)
		}
		if !ok {
			status = noMemory
		}
		put(p, 40, status)
	case 0x29:
		d.calls["rm_free"]++
		d.free(get(p, 0), get(p, 8))
		put(p, 12, 0)
	case 0x34:
		d.calls["rm_dup_object"]++
		var memory *fakeMemory
		if c := d.clients[get(p, 12)]; c != nil {
			memory = c.objects[get(p, 16)].memory
		}
		handle, _ := d.add(get(p, 0), get(p, 4), get(p, 8), memory)
		put(p, 8, handle)
		put(p, 24, 0)
	case 0x4a:
		d.calls["rm_vid_heap_control"]++
		switch get(p, 8) {
		case 2:
			size := round(get64(p, 88))
			handle, ok := d.add(get(p, 0), get(p, 4), get(p, 44), &fakeMemory{size: size})
			put(p, 20, noMemory)
			if ok {
				put(p, 44, handle)
				put64(p, 88, size)
				put(p, 20, 0)
			}
		case 3:
			d.free(get(p, 0), get(p, 44))
			put(p, 20, 0)
		}
	}
}

// uvm answers UVM's calls with success, at the status word's place.
func (d *fakeDriver) uvm(c *fakeCall) {
	put(c.params, map[uint32]int{25: 28, 37: 36}[c.nr], 0)
}

func (d *fakeDriver) release(file uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for handle, c := range d.clients {
		if c.file == file {
			for o := range c.objects {
				d.free(handle, o)
			}
			delete(d.clients, handle)
		}
	}
}

// startDriver serves nvidiactl, nvidia0 and nvidia-uvm, and puts the driver's files into /proc, until the test ends.
func startDriver(t *testing.T) *fakeDriver {
	t.Helper()
	if os.Getenv("GPU_EXPORTER_TEST_VM") == "" {
		t.Skip("takes the driver's device numbers and its place in /proc: runs in a virtual machine (make test-vm)")
	}
	if err := syscall.Mount("none", "/proc/driver", "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Unmount("/proc/driver", syscall.MNT_DETACH) })
	writeDriver(t, "/proc")
	d := &fakeDriver{clients: map[uint32]*fakeClient{}, calls: map[string]int{}}
	d.serve(t, "nvidiactl", 195, 255)
	d.serve(t, "nvidia0", 195, 0)
	d.serve(t, "nvidia-uvm", 0, 0)
	return d
}

// The protocol of /dev/cuse, as linux/fuse.h has it.
const (
	fuseOpen, fuseRelease, fuseInterrupt, fuseIoctl, cuseInit = 14, 18, 36, 39, 4096

	fuseHeader, fuseAnswer    = 40, 16 // bytes of a request's and an answer's header
	cuseUnrestricted          = 1
	fuseIoctlRetry            = 4
	fuseMajor, fuseMinor      = 7, 31
	cuseMaxRead, cuseMaxWrite = 4096, 4096
)

// serve makes a device and answers its calls.
func (d *fakeDriver) serve(t *testing.T, name string, major, minor uint32) {
	t.Helper()
	f, err := os.OpenFile("/dev/cuse", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	made, done := make(chan error, 1), make(chan struct{})
	t.Cleanup(func() {
		f.Close()
		<-done
	})
	answer := func(unique uint64, errno syscall.Errno, body ...any) error {
		var b bytes.Buffer
		for _, part := range append([]any{uint32(0), -int32(errno), unique}, body...) {
			_ = binary.Write(&b, binary.LittleEndian, part) // a buffer takes everything
		}
		put(b.Bytes(), 0, uint32(b.Len()))
		_, err := f.Write(b.Bytes())
		return err
	}
	go func() {
		defer close(done)
		files := uint64(0)
		for buf := make([]byte, 1<<17); ; {
			n, err := f.Read(buf)
			if errors.Is(err, syscall.ENODEV) || errors.Is(err, os.ErrClosed) || errors.Is(err, io.EOF) {
				return
			}
			if errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.EINTR) {
				continue // the request was withdrawn
			}
			if err != nil {
				made <- fmt.Errorf("reading from CUSE: %w", err)
				return
			}
			unique, tid, body := get64(buf, 8), get(buf, 32), buf[fuseHeader:n]
			switch get(buf, 4) {
			case cuseInit:
				made <- answer(unique, 0, uint32(fuseMajor), uint32(fuseMinor), uint32(0), uint32(cuseUnrestricted), uint32(cuseMaxRead),
					uint32(cuseMaxWrite), major, minor, [10]uint32{}, []byte("DEVNAME="+name+"\x00"))
			case fuseOpen:
				files++
				_ = answer(unique, 0, uint64(minor)<<32|files, uint64(0))
			case fuseRelease:
				d.release(get64(body, 0))
				_ = answer(unique, 0)
			case fuseIoctl:
				call := &fakeCall{tid: tid, file: get64(body, 0), nr: get(body, 12) & 0xff}
				d.ioctl(name == "nvidia-uvm", call, get(body, 12), get64(body, 16), body[32:], func(body ...any) { _ = answer(unique, 0, body...) })
			case fuseInterrupt:
			default:
				_ = answer(unique, syscall.ENOSYS)
			}
		}
	}()
	if err := <-made; err != nil {
		t.Fatal(err)
	}
}

// ioctl answers a call. The kernel brings no data at first: it is asked for the caller's block, then, once that is here, for what the block's
// pointer leads to as well. What was asked for is written back with the answer.
func (d *fakeDriver) ioctl(uvm bool, call *fakeCall, cmd uint32, arg uint64, data []byte, answer func(body ...any)) {
	size := uint64(cmd >> 16 & 0x3fff)
	if uvm {
		size = map[uint32]uint64{25: 32, 37: 40}[cmd]
	}
	if size == 0 {
		answer(int32(-int(syscall.EINVAL)), [3]uint32{})
		return
	}
	retry := func(spans ...uint64) { // pairs of address and length, the same in and out
		n := uint32(len(spans) / 2)
		answer(int32(0), uint32(fuseIoctlRetry), n, n, spans, spans)
	}
	if uint64(len(data)) < size {
		retry(arg, size)
		return
	}
	call.params, call.deep = data[:size], data[size:]
	if !uvm && call.nr == 0x2b && len(call.deep) == 0 {
		if params, n := get64(call.params, 16), uint64(get(call.params, 32)); params != 0 && n > 0 {
			retry(arg, size, params, n)
			return
		}
	}
	d.mu.Lock()
	if uvm {
		d.uvm(call)
	} else {
		d.rm(call)
	}
	d.mu.Unlock()
	answer(int32(0), [3]uint32{}, data)
}
