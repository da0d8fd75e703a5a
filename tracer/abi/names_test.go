package abi

import "testing"

func TestNames(t *testing.T) {
	for _, test := range []struct {
		node   string
		number uint32
		want   string
	}{
		{"ctl", 0x2b, "rm_alloc"}, {"gpu", 0x27, "rm_alloc_memory"}, {"gpu", 201, "register_fd"}, {"uvm", 33, "uvm_map_external_allocation"},
		{"uvm", NumberInitialize, "uvm_initialize"}, {"ctl", 0x11, "ctl_0x11"}, {"caps", 0x2b, "caps_0x2b"},
	} {
		if got := CallName(test.node, test.number); got != test.want {
			t.Errorf("%s %#x: %s, want %s", test.node, test.number, got, test.want)
		}
	}
	for status, want := range map[int32]string{0x51: "no_memory", 0x7fffffff: "other", -25: "enotty", -1: "eperm", -4000: "other"} {
		if got := StatusName(status); got != want {
			t.Errorf("%#x: %s, want %s", status, got, want)
		}
	}
	if got := ErrnoName(0); got != "ok" {
		t.Error(got)
	}
}

func TestStatusOffsets(t *testing.T) {
	for _, test := range []struct {
		version  Version
		rm, uvm  uint32
		rmAt, at int
	}{
		{Version{470, 256, 2}, 0x58, 33, 32, 1196}, {Version{550, 40, 7}, 0x58, 42, 40, 36}, {Version{550, 40, 53}, 0x57, 33, 48, 9260},
		{Version{580, 65, 6}, 0x57, 34, 56, 16}, {Version{580, 0, 0}, 0x57, 34, 48, 16}, {Version{590, 44, 1}, 0x29, 34, 12, 8}, {Version{590, 44, 1}, 0x29, 28, 12, 0},
	} {
		if got := test.version.RMStatus()[test.rm]; got != test.rmAt {
			t.Errorf("%v, RM %#x: %d, want %d", test.version, test.rm, got, test.rmAt)
		}
		if got := test.version.UVMStatus()[test.uvm]; got != test.at {
			t.Errorf("%v, UVM %d: %d, want %d", test.version, test.uvm, got, test.at)
		}
	}
}
