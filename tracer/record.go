package tracer

import (
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unsafe"

	"gpu-exporter/tracer/abi"
	"gpu-exporter/tracer/ledger"
)

// header is what every record of the ring buffer begins with.
type header struct {
	Time, Start, Group    uint64
	TGID, TID, Kind, Node uint32
	Comm                  [16]int8
}

// The records, as bpf2go made them from the C side, all begin with a header.
var _ = [1]int{}[unsafe.Sizeof(header{})-unsafe.Sizeof(bpfOpenEvent{}.H)]

// decode reads a record: *bpfOpenEvent, *bpfEndEvent, *bpfCallEvent or *bpfXidEvent.
func decode(raw []byte) (any, error) {
	var h header
	if !fill(&h, raw) {
		return nil, fmt.Errorf("record of %d bytes: shorter than its header", len(raw))
	}
	if h.TGID == 0 && bpfKind(h.Kind) != bpfKindKIND_XID || h.TGID > 1<<30 {
		return nil, fmt.Errorf("record of process %d", h.TGID)
	}
	var ok bool
	var record any
	switch bpfKind(h.Kind) {
	case bpfKindKIND_OPEN, bpfKindKIND_USE:
		e := &bpfOpenEvent{}
		record, ok = e, fill(e, raw)
	case bpfKindKIND_CLOSE, bpfKindKIND_FORK, bpfKindKIND_EXEC, bpfKindKIND_EXIT:
		e := &bpfEndEvent{}
		record, ok = e, fill(e, raw)
	case bpfKindKIND_CALL:
		e := &bpfCallEvent{}
		record, ok = e, fill(e, raw) && e.OutLen <= uint32(len(e.Out)) && e.DeepLen <= uint32(len(e.Deep))
	case bpfKindKIND_XID:
		e := &bpfXidEvent{}
		record, ok = e, fill(e, raw)
	default:
		return nil, fmt.Errorf("record of kind %d", h.Kind)
	}
	if !ok {
		return nil, fmt.Errorf("record of kind %d: %d bytes do not fit", h.Kind, len(raw))
	}
	return record, nil
}

// fill copies a record into a structure that the C side shares. The ring buffer rounds lengths up.
func fill[T any](to *T, raw []byte) bool {
	size := int(unsafe.Sizeof(*to))
	if len(raw) < size {
		return false
	}
	copy(unsafe.Slice((*byte)(unsafe.Pointer(to)), size), raw)
	return true
}

// ioctl is a call in the form that the rules of package abi read.
func (e *bpfCallEvent) ioctl() abi.Ioctl {
	c := abi.Ioctl{
		Entry: int64(e.Entry), Time: int64(e.H.Time), PID: int32(e.H.Tgid), TID: int32(e.H.Tid), Cmd: e.Cmd, Ret: e.Ret,
		Out: e.Out[:e.OutLen], Deep: e.Deep[:e.DeepLen],
	}
	switch {
	case bpfNode(e.H.Node) == bpfNodeNODE_UVM:
		c.Node, c.In = abi.NodeUVM, e.In[:]
	case e.Cmd&0xff == rmAlloc: // of its block the kernel side keeps what begins with the handle
		c.In = slices.Concat(e.Out[:8], e.In[:])
	}
	return c
}

// context tells whether the call made the process a compute process: it registered a GPU's address space with UVM, or made a channel.
// Initialising UVM is no sign of it: nvmlInit of driver 580 does that too.
func (e *bpfCallEvent) context(v abi.Version) bool {
	if e.Ret < 0 {
		return false
	}
	c := e.ioctl()
	if c.Node == abi.NodeUVM {
		return c.Cmd == uvmRegisterVASpace && len(c.Out) >= 32 && word(c.Out, 28) == ledger.StatusOK
	}
	if c.Cmd&0xff != rmAlloc || len(c.Out) < 28 || word(c.Out, 12)&0xff != classChannel {
		return false
	}
	at, ok := v.AllocStatus(int(c.Cmd>>16) & 0x3fff)
	return !ok || at+4 > len(c.Out) || ledger.Succeeded(word(c.Out, at))
}

const (
	uvmRegisterVASpace = 25
	rmAlloc            = 0x2b
	rmFree             = 0x29
	classChannel       = 0x6f // low byte of every channel class
)

func word(b []byte, at int) uint32 {
	return uint32(b[at]) | uint32(b[at+1])<<8 | uint32(b[at+2])<<16 | uint32(b[at+3])<<24
}

// text reads a C string that others chose, made safe to print: valid UTF-8 without control characters.
func text(c []int8) string {
	b := make([]byte, 0, len(c))
	for _, x := range c {
		if x == 0 {
			break
		}
		b = append(b, byte(x))
	}
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return '?'
		}
		return r
	}, strings.ToValidUTF8(string(b), "?"))
}

// userTicks is how many ns a clock tick of /proc/<pid>/stat has: USER_HZ is 100 wherever NVIDIA has drivers.
const userTicks = 10_000_000
