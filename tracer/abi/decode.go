package abi

import (
	"bytes"
	"encoding/binary"

	"gpu-exporter/tracer/ledger"
)

// Node is the kind of device that a call was made on.
type Node uint8

// The kinds of device nodes whose calls are decoded.
const (
	NodeRM  Node = iota // /dev/nvidiactl and /dev/nvidiaN, major 195
	NodeUVM             // /dev/nvidia-uvm
)

// Ioctl is one finished call. In and Out are the first bytes of the parameter block at entry and at exit, as many as could be read;
// Deep is what RM_ALLOC's or RM_CONTROL's own parameter pointer led to at exit.
type Ioctl struct {
	Entry, Time   int64 // CLOCK_MONOTONIC ns, at entry and at exit
	PID, TID      int32
	Node          Node
	Cmd           uint32
	Ret           int64 // of the system call
	In, Out, Deep []byte
}

// Call numbers of RM: the low byte of the ioctl command. The driver ignores the rest but the size.
const (
	nrFree       = 0x29
	nrControl    = 0x2a
	nrAlloc      = 0x2b
	nrDup        = 0x34
	nrVidHeap    = 0x4a
	nrVersion    = 0xd2
	nrXfer       = 0xd3
	sizeVidHeap  = 184
	vidHeapAlloc = 2
	vidHeapFree  = 3
	vidHeapTiled = 6
	vidHeapRange = 14
)

// UVM's commands are plain numbers.
const (
	uvmRegisterVAS = 25
	uvmRegisterGPU = 37
)

// Classes of RM objects.
const (
	classRoot1     = 0x01
	classRoot      = 0x41
	classMemory    = 0x40
	classDevice    = 0x80
	classSubdevice = 0x2080
	classVASpace   = 0x90f1
)

// Bits of the allocation parameters.
const (
	attrLocationShift = 25 // two bits: 0 video memory, 1 system memory, 3 any
	flagVirtual       = 0x80000
	attr2EGM          = 1 << 24
	flagSerialised    = 1
)

// block reads little-endian words; a read past the end gives zero and is remembered.
type block struct {
	b     []byte
	short bool
}

func (b *block) u32(at int) uint32 {
	if at+4 > len(b.b) {
		b.short = true
		return 0
	}
	return binary.LittleEndian.Uint32(b.b[at:])
}

func (b *block) u64(at int) uint64 {
	if at+8 > len(b.b) {
		b.short = true
		return 0
	}
	return binary.LittleEndian.Uint64(b.b[at:])
}

// Decode turns one call into a ledger event. It is false for a call that means nothing to the ledger.
func Decode(version Version, c Ioctl) (ledger.Event, bool) {
	if c.Ret < 0 {
		return ledger.Event{}, false
	}
	e := ledger.Event{Time: c.Time, Entry: c.Entry, PID: c.PID, TID: c.TID}
	if c.Node == NodeUVM {
		return uvm(e, c)
	}
	out := &block{b: c.Out}
	switch size := int(c.Cmd>>16) & 0x3fff; c.Cmd & 0xff {
	case nrAlloc:
		return alloc(version, e, c, size)
	case nrVidHeap:
		if size != sizeVidHeap {
			return lost(e), true
		}
		return vidHeap(e, out)
	case nrFree:
		if size != 16 {
			return lost(e), true
		}
		e.Kind, e.Client, e.Parent, e.Handle, e.Status = ledger.Free, out.u32(0), out.u32(4), out.u32(8), out.u32(12)
	case nrDup:
		if size != 28 {
			return lost(e), true
		}
		e.Kind, e.Client, e.Parent, e.Handle = ledger.Dup, out.u32(0), out.u32(4), out.u32(8)
		e.SrcClient, e.SrcHandle, e.Status = out.u32(12), out.u32(16), out.u32(24)
	case nrControl:
		// GPU_GET_ID_INFO and its second version: which device instance a gpuId has. Other controls do not matter.
		params := &block{b: c.Deep}
		if cmd := out.u32(8); size != 32 || cmd != 0x202 && cmd != 0x205 || out.u32(28) != 0 || params.u32(0) == 0 {
			return e, false
		}
		e.Kind, e.GPUID, e.Instance = ledger.Instance, params.u32(0), params.u32(8)
		return e, !params.short
	case nrXfer:
		// The real call is behind a pointer. CUDA does not use it; whoever does and changes objects is no longer followed.
		switch out.u32(0) {
		case nrAlloc, nrVidHeap, nrFree, nrDup:
			return lost(e), true
		}
		return e, false
	default:
		return e, false
	}
	if out.short {
		return lost(e), true
	}
	return e, true
}

// lost is the event of a call that matters and could not be read.
func lost(e ledger.Event) ledger.Event {
	return ledger.Event{Kind: ledger.Lost, Time: e.Time, Entry: e.Entry, PID: e.PID, TID: e.TID}
}

func alloc(version Version, e ledger.Event, c Ioctl, size int) (ledger.Event, bool) {
	out, params := &block{b: c.Out}, &block{b: c.Deep}
	statusAt, ok := version.AllocStatus(size)
	if !ok {
		return lost(e), true
	}
	e.Client, e.Parent, e.Handle, e.Status = out.u32(0), out.u32(4), out.u32(8), out.u32(statusAt)
	class := out.u32(12)
	serialised := false
	if at, ok := version.AllocFlags(size); ok {
		serialised = out.u32(at)&flagSerialised != 0
	}
	if out.short {
		return lost(e), true
	}
	// The driver leaves the class and the address of the parameters as they were; of a root client's class it makes its newest. Another thread
	// that exchanged them hides what was asked for.
	if len(c.In) >= 24 {
		in := &block{b: c.In}
		if asked := in.u32(12); asked != class && !(asked <= classRoot1 && class == classRoot) || in.u64(16) != out.u64(16) {
			return lost(e), true
		}
	}
	failed := !ledger.Succeeded(e.Status)
	switch class {
	case 0, classRoot1, classRoot:
		e.Kind, e.Client = ledger.Client, e.Handle
	case classDevice:
		e.Kind = ledger.Device
		if out.u64(16) != 0 && !serialised {
			e.Instance = params.u32(0)
		}
		if serialised || params.short {
			e.Instance = ^uint32(0)
		}
	case classSubdevice:
		e.Kind = ledger.Object
	case classVASpace:
		e.Kind = ledger.VASpace
	case classMemory:
		e.Kind = ledger.Memory
		if serialised {
			return lost(e), !failed
		}
		flags, attr := params.u32(8), params.u32(24)
		e.Size = params.u64(64)
		if params.short {
			return lost(e), !failed
		}
		if flags&flagVirtual != 0 || attr>>attrLocationShift&3 == 1 {
			return e, false
		}
		return e, true
	default:
		return e, false
	}
	return e, !failed
}

func vidHeap(e ledger.Event, out *block) (ledger.Event, bool) {
	e.Client, e.Parent, e.Status, e.Handle = out.u32(0), out.u32(4), out.u32(20), out.u32(44)
	flags, attr, attr2 := out.u32(52), uint32(0), uint32(0)
	switch out.u32(8) {
	case vidHeapAlloc:
		attr, e.Size, attr2 = out.u32(56), out.u64(88), out.u32(144)
	case vidHeapTiled:
		attr, e.Size, attr2 = out.u32(64), out.u64(88), out.u32(144)
	case vidHeapRange:
		attr, e.Size, attr2 = out.u32(56), out.u64(80), out.u32(136)
	case vidHeapFree:
		e.Kind = ledger.Free
		if out.short {
			return lost(e), true
		}
		return e, true
	default:
		return e, false
	}
	if out.short {
		return lost(e), true
	}
	location := attr >> attrLocationShift & 3
	if flags&flagVirtual != 0 || attr2&attr2EGM != 0 || location != 0 && (ledger.Succeeded(e.Status) || location != 3) {
		return e, false
	}
	e.Kind = ledger.Memory
	return e, true
}

func uvm(e ledger.Event, c Ioctl) (ledger.Event, bool) {
	in, out := &block{b: c.In}, &block{b: c.Out}
	switch c.Cmd {
	case uvmRegisterGPU:
		// With MIG the driver writes the instance's UUID back; the GPU's own is what went in.
		e.Kind, e.Client, e.Status = ledger.RegisterGPU, out.u32(28), out.u32(36)
	case uvmRegisterVAS:
		e.Kind, e.Client, e.Handle, e.Status = ledger.RegisterVAS, out.u32(20), out.u32(24), out.u32(28)
	default:
		return e, false
	}
	uuid := in.b
	if len(uuid) < 16 {
		uuid = out.b
	}
	if out.short || len(uuid) < 16 {
		return e, false
	}
	copy(e.UUID[:], uuid)
	return e, e.UUID != ledger.UUID{}
}

// UserVersion returns the driver version that a process states in the version handshake (or the driver answers), if c is one.
func UserVersion(c Ioctl) (Version, bool) {
	if c.Node != NodeRM || c.Cmd&0xff != nrVersion || len(c.Out) < 72 {
		return Version{}, false
	}
	text, _, _ := bytes.Cut(c.Out[8:72], []byte{0})
	version, err := ParseVersion(string(text))
	return version, err == nil
}
