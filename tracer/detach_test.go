package tracer

import (
	"errors"
	"os"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"gpu-exporter/tracer/activity"
)

// bpfCall makes a call of bpf(2) whose attributes begin with one number.
func bpfCall(command uintptr, first uint32) (int, error) {
	attr := [3]uint32{first}
	r, _, e := unix.Syscall(unix.SYS_BPF, command, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	if e != 0 {
		return 0, e
	}
	return int(r), nil
}

// TestNoDetach: another program of root's finds the tracer's links by their ids and asks the kernel to detach them, as a cleaning tool may. The kernel
// refuses for such links, and counting goes on.
func TestNoDetach(t *testing.T) {
	const linkByID, linkDetach = 30, 34 // BPF_LINK_GET_FD_BY_ID and BPF_LINK_DETACH of linux/bpf.h
	w := start(t, nil)
	links := w.tracer.kernel.links
	if len(links) < 8 {
		t.Fatalf("%d links", len(links))
	}
	for _, l := range links {
		info, err := l.Info()
		if errors.Is(err, ebpf.ErrNotSupported) {
			continue // before Linux 5.15 a tracepoint has no link that could be asked for
		} else if err != nil {
			t.Fatal(err)
		}
		fd, err := bpfCall(linkByID, uint32(info.ID))
		if err != nil {
			t.Fatalf("link %d: %v", info.ID, err)
		}
		if _, err := bpfCall(linkDetach, uint32(fd)); !errors.Is(err, unix.EOPNOTSUPP) {
			t.Errorf("detaching link %d, %v: %v", info.ID, info.Type, err)
		}
		unix.Close(fd)
	}
	for range 5 {
		f, err := os.Open("/dev/full")
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	w.until("the opens afterwards", func(r *activity.Report) bool { return total(r, opens("ctl", "ok")) >= 5 })
}
