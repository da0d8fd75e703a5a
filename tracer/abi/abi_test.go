package abi

import (
	"encoding/binary"
	"testing"

	"gpu-exporter/tracer/ledger"
)

func words(size int, at map[int]uint64) []byte {
	b := make([]byte, size)
	for offset, v := range at {
		if v>>32 != 0 || offset%8 == 0 && offset+8 <= size && at[offset+4] == 0 {
			binary.LittleEndian.PutUint64(b[offset:], v)
		} else {
			binary.LittleEndian.PutUint32(b[offset:], uint32(v))
		}
	}
	return b
}

func TestVersions(t *testing.T) {
	for text, want := range map[string]Version{
		"580.159.04": {580, 159, 4}, "470.256.02\n": {470, 256, 2}, "515.43": {515, 43, 0}, "595.45.04\x00": {595, 45, 4},
	} {
		if got, err := ParseVersion(text); err != nil || got != want || got.Supported() != nil {
			t.Errorf("%q: %v, %v, %v", text, got, err, got.Supported())
		}
	}
	for _, text := range []string{"", "0.0", "580", "580.x.1", "a.b.c", "1.2.3.4", "-1.2.3", "99999999999.1.1", "580..1"} {
		if v, err := ParseVersion(text); err == nil {
			t.Errorf("%q: %v", text, v)
		}
	}
	for _, v := range []Version{{}, {460, 1, 1}, {596, 1, 1}, {610, 1, 1}} {
		if v.Supported() == nil {
			t.Errorf("%v is supported", v)
		}
	}
}

func TestAllocStatusOffsets(t *testing.T) {
	for _, test := range []struct{ major, size, want int }{
		{470, 32, 24}, {530, 32, 24}, {535, 32, 28}, {580, 32, 28}, {470, 40, 32}, {520, 40, 32}, {525, 40, 36}, {530, 40, 36}, {535, 48, 40}, {595, 48, 40}, {0, 48, 40},
	} {
		if got, ok := (Version{Major: test.major}).AllocStatus(test.size); got != test.want || !ok {
			t.Errorf("%d, %d bytes: %d, want %d", test.major, test.size, got, test.want)
		}
	}
	for _, test := range []struct{ major, size int }{{580, 44}, {580, 0}, {0, 40}, {0, 32}} {
		if got, ok := (Version{Major: test.major}).AllocStatus(test.size); ok {
			t.Errorf("%d, %d bytes: %d", test.major, test.size, got)
		}
	}
}

func TestDecode(t *testing.T) {
	params := words(160, map[int]uint64{8: 0x1c101, 24: 0x11800000, 64: 1 << 30})
	system := words(160, map[int]uint64{24: 1 << 25, 64: 1 << 30})
	head := map[int]uint64{0: 100, 4: 2, 8: 10, 12: 0x40}
	with := func(size int, more map[int]uint64) []byte {
		all := map[int]uint64{}
		for k, v := range head {
			all[k] = v
		}
		for k, v := range more {
			all[k] = v
		}
		b := make([]byte, size)
		for at, v := range all {
			binary.LittleEndian.PutUint32(b[at:], uint32(v))
		}
		return b
	}
	heap := func(function uint32, more map[int]uint64) []byte {
		b := make([]byte, 184)
		binary.LittleEndian.PutUint32(b[0:], 100)
		binary.LittleEndian.PutUint32(b[4:], 2)
		binary.LittleEndian.PutUint32(b[8:], function)
		binary.LittleEndian.PutUint32(b[44:], 10)
		for at, v := range more {
			binary.LittleEndian.PutUint32(b[at:], uint32(v))
		}
		return b
	}
	memory := ledger.Event{Kind: ledger.Memory, Client: 100, Parent: 2, Handle: 10, Size: 1 << 30}
	none, gone := ledger.Event{}, ledger.Event{Kind: ledger.Lost}
	failed := memory
	failed.Status = 0x51
	for _, test := range []struct {
		name  string
		major int
		call  Ioctl
		want  ledger.Event
	}{
		{"48 bytes", 580, Ioctl{Cmd: 0xc030462b, Out: with(48, nil), Deep: params}, memory},
		{"40 bytes, 470", 470, Ioctl{Cmd: 0xc028462b, Out: with(40, nil), Deep: params}, memory},
		{"40 bytes, 525", 525, Ioctl{Cmd: 0xc028462b, Out: with(40, nil), Deep: params}, memory},
		{"32 bytes, 530", 530, Ioctl{Cmd: 0xc020462b, Out: with(32, nil), Deep: params}, memory},
		{"32 bytes, 535", 535, Ioctl{Cmd: 0xc020462b, Out: with(32, nil), Deep: params}, memory},
		{"failed, 48", 580, Ioctl{Cmd: 0xc030462b, Out: with(48, map[int]uint64{40: 0x51}), Deep: params}, failed},
		{"failed, 40, 515", 515, Ioctl{Cmd: 0xc028462b, Out: with(40, map[int]uint64{32: 0x51}), Deep: params}, failed},
		{"failed, 40, 530", 530, Ioctl{Cmd: 0xc028462b, Out: with(40, map[int]uint64{36: 0x51}), Deep: params}, failed},
		{"failed, 32, 515", 515, Ioctl{Cmd: 0xc020462b, Out: with(32, map[int]uint64{24: 0x51}), Deep: params}, failed},
		{"failed, 32, 580", 580, Ioctl{Cmd: 0xc020462b, Out: with(32, map[int]uint64{28: 0x51}), Deep: params}, failed},
		{"odd size", 580, Ioctl{Cmd: 0xc02c462b, Out: with(48, nil), Deep: params}, gone},
		{"serialised, 48", 580, Ioctl{Cmd: 0xc030462b, Out: with(48, map[int]uint64{36: 1}), Deep: params}, gone},
		{"serialised, 40", 525, Ioctl{Cmd: 0xc028462b, Out: with(40, map[int]uint64{32: 1}), Deep: params}, gone},
		{"same at entry", 580, Ioctl{Cmd: 0xc030462b, In: with(24, map[int]uint64{8: 0}), Out: with(48, nil), Deep: params}, memory},
		{"client of the oldest class", 580, Ioctl{Cmd: 0xc030462b, In: make([]byte, 24), Out: with(48, map[int]uint64{0: 0, 4: 0, 12: 0x41})},
			ledger.Event{Kind: ledger.Client, Client: 10, Handle: 10}},
		{"class exchanged", 580, Ioctl{Cmd: 0xc030462b, In: with(24, map[int]uint64{12: 0x3e}), Out: with(48, nil), Deep: params}, gone},
		{"parameters exchanged", 580, Ioctl{Cmd: 0xc030462b, In: with(24, map[int]uint64{20: 1}), Out: with(48, nil), Deep: params}, gone},
		{"no parameters read", 580, Ioctl{Cmd: 0xc030462b, Out: with(48, nil)}, gone},
		{"nothing read", 580, Ioctl{Cmd: 0xc030462b}, gone},
		{"the call failed", 580, Ioctl{Cmd: 0xc030462b, Ret: -14, Out: with(48, nil), Deep: params}, none},
		{"system memory", 580, Ioctl{Cmd: 0xc030462b, Out: with(48, nil), Deep: system}, none},
		{"system memory class", 580, Ioctl{Cmd: 0xc030462b, Out: with(48, map[int]uint64{12: 0x3e}), Deep: params}, none},
		{"memory query on nvidiaN", 580, Ioctl{Cmd: 0xc0384627, Out: with(56, nil), Deep: params}, none},
		{"client", 580, Ioctl{Cmd: 0xc030462b, Out: with(48, map[int]uint64{0: 0, 4: 0, 12: 0x41})}, ledger.Event{Kind: ledger.Client, Client: 10, Handle: 10}},
		{"heap", 535, Ioctl{Cmd: 0xc0b8464a, Out: heap(2, map[int]uint64{88: 1 << 30})}, memory},
		{"heap, failed", 535, Ioctl{Cmd: 0xc0b8464a, Out: heap(2, map[int]uint64{88: 1 << 30, 20: 0x51})}, failed},
		{"heap, tiled", 535, Ioctl{Cmd: 0xc0b8464a, Out: heap(6, map[int]uint64{88: 1 << 30})}, memory},
		{"heap, range", 535, Ioctl{Cmd: 0xc0b8464a, Out: heap(14, map[int]uint64{80: 1 << 30})}, memory},
		{"heap, system memory", 535, Ioctl{Cmd: 0xc0b8464a, Out: heap(2, map[int]uint64{88: 1 << 30, 56: 1 << 25})}, none},
		{"heap, virtual", 535, Ioctl{Cmd: 0xc0b8464a, Out: heap(2, map[int]uint64{88: 1 << 30, 52: 0x80000})}, none},
		{"heap, EGM", 535, Ioctl{Cmd: 0xc0b8464a, Out: heap(2, map[int]uint64{88: 1 << 30, 144: 1 << 24})}, none},
		{"heap, info", 535, Ioctl{Cmd: 0xc0b8464a, Out: heap(5, nil)}, none},
		{"heap, free", 535, Ioctl{Cmd: 0xc0b8464a, Out: heap(3, nil)}, ledger.Event{Kind: ledger.Free, Client: 100, Parent: 2, Handle: 10}},
		{"free", 580, Ioctl{Cmd: 0xc0104629, Out: with(16, map[int]uint64{12: 0})}, ledger.Event{Kind: ledger.Free, Client: 100, Parent: 2, Handle: 10}},
		{"indirect alloc", 580, Ioctl{Cmd: 0xc01046d3, Out: words(16, map[int]uint64{0: 0x2b})}, gone},
		{"indirect control", 580, Ioctl{Cmd: 0xc01046d3, Out: words(16, map[int]uint64{0: 0x2a})}, none},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, ok := Decode(Version{Major: test.major}, test.call)
			if !ok {
				got = none
			}
			if ok != (test.want.Kind != ledger.None) || got != test.want {
				t.Errorf("%+v (%v), want %+v", got, ok, test.want)
			}
		})
	}
}

func TestDecodeUVM(t *testing.T) {
	in := make([]byte, 64)
	for i := range 16 {
		in[i] = byte(i + 1)
	}
	out := append([]byte(nil), in...)
	binary.LittleEndian.PutUint32(out[20:], 100)
	binary.LittleEndian.PutUint32(out[24:], 9)
	e, ok := Decode(Version{Major: 580}, Ioctl{Node: NodeUVM, Cmd: 25, In: in, Out: out})
	if !ok || e.Kind != ledger.RegisterVAS || e.Client != 100 || e.Handle != 9 || e.UUID[0] != 1 || e.UUID[15] != 16 {
		t.Errorf("%+v %v", e, ok)
	}
	if e, ok := Decode(Version{Major: 580}, Ioctl{Node: NodeUVM, Cmd: 37, In: in, Out: out}); !ok || e.Kind != ledger.RegisterGPU {
		t.Errorf("%+v %v", e, ok)
	}
	if e, ok := Decode(Version{Major: 580}, Ioctl{Node: NodeUVM, Cmd: 33, In: in, Out: out}); ok {
		t.Errorf("%+v", e)
	}
}

// FuzzDecode: whatever the bytes, no panic, and memory only with a client's handles as they stand in the block.
func FuzzDecode(f *testing.F) {
	f.Add(580, uint32(0xc030462b), false, make([]byte, 48), make([]byte, 160))
	f.Add(535, uint32(0xc0b8464a), false, make([]byte, 184), []byte{})
	f.Add(470, uint32(25), true, make([]byte, 32), []byte{})
	f.Fuzz(func(t *testing.T, major int, cmd uint32, onUVM bool, out, deep []byte) {
		c := Ioctl{Cmd: cmd, In: out, Out: out, Deep: deep}
		if onUVM {
			c.Node = NodeUVM
		}
		UserVersion(c)
		e, ok := Decode(Version{Major: major}, c)
		if ok && e.Kind == ledger.None {
			t.Errorf("an event of no kind: %+v", e)
		}
		if ok && e.Kind == ledger.Memory && (len(out) < 24 || e.Client != binary.LittleEndian.Uint32(out)) {
			t.Errorf("memory from nothing: %+v", e)
		}
	})
}
