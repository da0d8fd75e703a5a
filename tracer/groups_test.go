package tracer

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"gpu-exporter/tracer/tracefs"
)

// systemCalls counts the bpf system calls that this process makes while f runs.
func systemCalls(t *testing.T, f func()) uint64 {
	t.Helper()
	count, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer count.Close()
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.TracePoint, License: "GPL", Instructions: asm.Instructions{
		asm.FnGetCurrentPidTgid.Call(),
		asm.RSh.Imm(asm.R0, 32),
		asm.JNE.Imm(asm.R0, int32(os.Getpid()), "end"),
		asm.StoreImm(asm.RFP, -4, 0, asm.Word),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -4),
		asm.LoadMapPtr(asm.R1, count.FD()),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "end"),
		asm.Mov.Imm(asm.R1, 1),
		asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
		asm.Mov.Imm(asm.R0, 0).WithSymbol("end"),
		asm.Return(),
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	if err := tracefs.Do(func() error {
		attached, err := link.Tracepoint("syscalls", "sys_enter_bpf", program, nil)
		if err != nil {
			return err
		}
		defer attached.Close()
		f()
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	var n uint64
	if err := count.Lookup(uint32(0), &n); err != nil {
		t.Fatal(err)
	}
	return n
}

// book books what so many groups did, each under the kinds of calls given, as the kernel side would.
func book(t *testing.T, maps map[string]*ebpf.Map, groups, kinds int) {
	t.Helper()
	put := func(name string, k, v any) {
		if err := maps[name].Put(k, v); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	for id := range uint64(groups) {
		put(bpfMapGroups, 1<<40+id, bpfGroupCount{Started: 1})
		put(bpfMapOpens, bpfOpenKey{Group: 1<<40 + id}, bpfOpenCount{Count: 2})
		for nr := range uint32(kinds) {
			put(bpfMapCalls, bpfCallKey{Group: 1<<40 + id, Nr: 0x20 + nr}, bpfCallCount{Count: 7, Ns: 7000, Buckets: [32]uint64{3: 4, 4: 3}})
		}
	}
}

// kernelMaps loads the kernel side, attached to nothing.
func kernelMaps(t *testing.T) map[string]*ebpf.Map {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	spec, err := loadBpf()
	if err != nil {
		t.Fatal(err)
	}
	only(spec, nil)
	c, err := ebpf.NewCollection(spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c.Maps
}

// TestTickCost: what a tick of the tracer costs where a thousand containers have called the driver, in figures that do not depend on the machine. With
// two system calls for each entry it were 20000 of them.
func TestTickCost(t *testing.T) {
	const containers, kinds = 1000, 8
	maps := kernelMaps(t)
	book(t, maps, containers, kinds)
	g := newGroups(&Config{ProcRoot: "/proc", CgroupRoot: t.TempDir(), Linger: time.Hour}, maps)
	defer g.close()
	for id := range uint64(containers) {
		g.byID[1<<40+id] = &group{path: fmt.Sprintf("/system.slice/docker-%064x.scope", id)}
	}
	read := func() {
		list, err := g.read(time.Now(), func(uint64) bool { return true })
		if err != nil {
			t.Fatal(err)
		}
		sums := 0
		for _, group := range list {
			sums += len(group.Calls)
		}
		if len(list) != containers || sums != containers*kinds {
			t.Fatalf("%d groups, %d sums of calls", len(list), sums)
		}
	}
	read()
	if n := systemCalls(t, read); n == 0 || n > 200 {
		t.Errorf("a tick takes %d bpf system calls", n)
	} else {
		t.Logf("%d bpf system calls", n)
	}
	if n := testing.AllocsPerRun(10, read) / (containers * kinds); n > 6 {
		t.Errorf("a tick allocates %.1f times for a sum of calls", n)
	}
	var before, after unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &before)
	for range 20 {
		read()
	}
	_ = unix.Getrusage(unix.RUSAGE_SELF, &after)
	t.Logf("a tick takes %v of CPU", time.Duration(after.Utime.Nano()+after.Stime.Nano()-before.Utime.Nano()-before.Stime.Nano())/20)
}

// TestGroupNames: the path that /proc has is not taken for a group that it does not lead to. The process may have been moved since, and on version 1
// one that exits is shown at the root.
func TestGroupNames(t *testing.T) {
	root := t.TempDir()
	long := strings.Repeat("n", 200)
	for _, dir := range []string{"docker-a.scope", "docker-b.scope", long} {
		if err := os.Mkdir(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	ids := newGroups(&Config{ProcRoot: "/proc", CgroupRoot: root}, nil)
	defer ids.close()
	const elsewhere = 1 << 50 // the id of a group that has no directory here
	for _, tt := range []struct {
		name       string
		id         uint64
		proc, last string
		want       string
	}{
		{"as /proc says", ids.inode("/docker-a.scope"), "/docker-a.scope", "docker-a.scope", "/docker-a.scope"},
		{"at the root", ids.inode("/"), "/", "/", "/"},
		{"exits: /proc says the root", ids.inode("/docker-a.scope"), "/", "docker-a.scope", "/docker-a.scope"},
		{"exits, and the group is gone", elsewhere, "/", "docker-c.scope", "docker-c.scope"},
		{"moved since", ids.inode("/docker-a.scope"), "/docker-b.scope", "docker-a.scope", "/docker-a.scope"},
		{"/proc does not tell", ids.inode("/docker-b.scope"), "", "docker-b.scope", "/docker-b.scope"},
		{"the hierarchy is not to be seen", elsewhere, "/../docker-d.scope", "docker-d.scope", "/../docker-d.scope"},
		{"the hierarchy is not to be seen, and moved", elsewhere, "/../docker-d.scope", "docker-e.scope", "docker-e.scope"},
		{"the hierarchy is not to be seen, a long name", elsewhere, "/../" + long + "e", long[:127], "/../" + long + "e"},
		{"a fork: the kernel side sends no name", elsewhere, "/../docker-d.scope", "", "/../docker-d.scope"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			g := newGroups(&Config{ProcRoot: "/proc", CgroupRoot: root}, nil)
			defer g.close()
			for range 2 { // the second from what was kept
				if got := g.see(tt.id, tt.proc, tt.last); got != tt.want {
					t.Errorf("%q, want %q", got, tt.want)
				}
			}
		})
	}
}
