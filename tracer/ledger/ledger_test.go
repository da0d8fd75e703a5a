package ledger

import (
	"runtime"
	"testing"
	"time"
)

const (
	gib = uint64(1) << 30
	mib = uint64(1) << 20
)

var gpuA, gpuB = UUID{0xa}, UUID{0xb}

// start returns the events of a process that made a client with one device and one subdevice.
func start(pid int32, client uint32, instance uint32) []Event {
	return []Event{
		{Kind: Client, PID: pid, Client: client, Handle: client},
		{Kind: Device, PID: pid, Client: client, Parent: client, Handle: 2, Instance: instance},
		{Kind: Object, PID: pid, Client: client, Parent: 2, Handle: 3},
	}
}

func alloc(pid int32, client, parent, handle uint32, size uint64) Event {
	return Event{Kind: Memory, PID: pid, Client: client, Parent: parent, Handle: handle, Size: size}
}

func free(pid int32, client, handle uint32) Event {
	return Event{Kind: Free, PID: pid, Client: client, Handle: handle}
}

func dup(pid int32, client, handle, fromClient, from uint32) Event {
	return Event{Kind: Dup, PID: pid, Client: client, Parent: 2, Handle: handle, SrcClient: fromClient, SrcHandle: from}
}

func apply(l *Ledger, events ...Event) (failures []Failure) {
	for _, e := range events {
		if f, ok := l.Apply(e); ok {
			failures = append(failures, f)
		}
	}
	return failures
}

func TestTree(t *testing.T) {
	for _, test := range []struct {
		name   string
		events []Event
		want   uint64
		exact  bool
	}{
		{"alloc", []Event{alloc(1, 100, 2, 10, gib)}, gib, true},
		{"alloc below the subdevice", []Event{alloc(1, 100, 3, 10, gib)}, gib, true},
		{"free", []Event{alloc(1, 100, 2, 10, gib), alloc(1, 100, 2, 11, mib), free(1, 100, 10)}, mib, true},
		{"free of the subdevice", []Event{alloc(1, 100, 3, 10, gib), alloc(1, 100, 2, 11, mib), free(1, 100, 3)}, mib, true},
		{"free of the device", []Event{alloc(1, 100, 3, 10, gib), alloc(1, 100, 2, 11, mib), free(1, 100, 2)}, 0, true},
		{"free of the client", []Event{alloc(1, 100, 3, 10, gib), free(1, 100, 100)}, 0, true},
		{"free of an unknown handle", []Event{alloc(1, 100, 2, 10, gib), free(1, 100, 99)}, gib, true},
		{"free by an unknown client", []Event{alloc(1, 100, 2, 10, gib), free(1, 101, 10)}, gib, true},
		{"free that failed", []Event{alloc(1, 100, 2, 10, gib), {Kind: Free, PID: 1, Client: 100, Handle: 10, Status: 0x33}}, gib, true},
		{"free twice", []Event{alloc(1, 100, 2, 10, gib), alloc(1, 100, 2, 11, mib), free(1, 100, 10), free(1, 100, 10)}, mib, true},
		{"free of an untracked parent", []Event{alloc(1, 100, 77, 10, gib), free(1, 100, 77)}, 0, true},
		{"handle reused after a free", []Event{alloc(1, 100, 2, 10, gib), free(1, 100, 10), alloc(1, 100, 2, 10, mib)}, mib, true},
		{"handle reused, its free unseen", []Event{alloc(1, 100, 2, 10, gib), alloc(1, 100, 2, 10, mib)}, mib, true},
		{"client reused, its end unseen", []Event{alloc(1, 100, 2, 10, gib), {Kind: Client, PID: 1, Handle: 100}}, 0, true},
		{"dup", []Event{alloc(1, 100, 2, 10, gib), {Kind: Dup, PID: 1, Client: 100, Parent: 2, Handle: 20, SrcClient: 100, SrcHandle: 10}}, gib, true},
		{"dup freed", []Event{alloc(1, 100, 2, 10, gib), {Kind: Dup, PID: 1, Client: 100, Parent: 2, Handle: 20, SrcClient: 100, SrcHandle: 10}, free(1, 100, 20)}, gib, true},
		{"dup left", []Event{alloc(1, 100, 2, 10, gib), dup(1, 100, 20, 100, 10), free(1, 100, 10)}, gib, true},
		{"dup left and freed", []Event{alloc(1, 100, 2, 10, gib), dup(1, 100, 20, 100, 10), free(1, 100, 10), free(1, 100, 20)}, 0, true},
		{"dup of a dup left", []Event{alloc(1, 100, 2, 10, gib), dup(1, 100, 20, 100, 10), dup(1, 100, 21, 100, 20), free(1, 100, 20), free(1, 100, 10)}, gib, true},
		{"dup of what is no memory", []Event{dup(1, 100, 20, 100, 3), free(1, 100, 3)}, 0, true},
		{"dup of itself", []Event{alloc(1, 100, 2, 10, gib), dup(1, 100, 10, 100, 10), free(1, 100, 10)}, 0, true},
		{"failed", []Event{{Kind: Memory, PID: 1, Client: 100, Parent: 2, Handle: 10, Size: gib, Status: StatusNoMemory}}, 0, true},
		{"warning", []Event{{Kind: Memory, PID: 1, Client: 100, Parent: 2, Handle: 10, Size: gib, Status: 0x10005}}, gib, true},
		{"absurd size", []Event{alloc(1, 100, 2, 10, 1<<60)}, 0, false},
		{"partial", []Event{{Kind: Memory, Partial: true, PID: 1, Client: 100, Parent: 2, Handle: 10}}, 0, false},
		{"lost", []Event{alloc(1, 100, 2, 10, gib), {Kind: Lost, PID: 1}}, gib, false},
		{"all lost", []Event{alloc(1, 100, 2, 10, gib), {Kind: Lost}}, gib, false},
		{"client never seen", []Event{alloc(1, 555, 2, 10, gib)}, gib, false},
		{"own parent", []Event{alloc(1, 100, 10, 10, gib)}, gib, true},
		{"two clients", []Event{{Kind: Client, PID: 1, Handle: 200}, alloc(1, 200, 2, 10, mib), alloc(1, 100, 2, 10, gib)}, gib + mib, true},
		{"another process uses the client", []Event{alloc(2, 100, 2, 10, gib)}, gib, true},
		{"exec", []Event{alloc(1, 100, 2, 10, gib), {Kind: Exec, PID: 1}}, 0, true},
		{"exit", []Event{alloc(1, 100, 2, 10, gib), {Kind: Exit, PID: 1}}, 0, true},
		{"exit of a child", []Event{alloc(1, 100, 2, 10, gib), {Kind: Fork, PID: 2}, {Kind: Exit, PID: 2}}, gib, true},
		{"process number reused", []Event{alloc(1, 100, 2, 10, gib), {Kind: Client, PID: 1, Start: 5, Handle: 300}, {Kind: Client, PID: 1, Start: 9, Handle: 400}}, 0, true},
		{"a late exit of the one before", []Event{{Kind: Client, PID: 1, Start: 9, Handle: 300}, alloc(1, 300, 2, 10, gib), {Kind: Exit, PID: 1, Start: 5}}, gib, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			l := New(Config{})
			apply(l, start(1, 100, 0)...)
			apply(l, test.events...)
			if got, exact := l.Used(1); got != test.want || exact != test.exact {
				t.Errorf("holds %d (exact %v), want %d (%v)", got, exact, test.want, test.exact)
			}
			empty(t, l)
		})
	}
}

// empty ends every process and checks that nothing is left.
func empty(t *testing.T, l *Ledger) {
	t.Helper()
	for _, pid := range l.Processes(nil) {
		apply(l, Event{Kind: Exit, PID: pid})
		if used, _ := l.Used(pid); used != 0 {
			t.Errorf("process %d holds %d bytes after its exit", pid, used)
		}
	}
	if s := l.Stats(); s.Objects != 0 || s.Clients != 0 || s.Processes != 0 {
		t.Errorf("left after every exit: %+v", s)
	}
}

func TestHandleReusedByAnotherThreadBeforeTheFreeIsSeen(t *testing.T) {
	l := New(Config{})
	apply(l, start(1, 100, 0)...)
	first, second, late := alloc(1, 100, 2, 10, gib), alloc(1, 100, 2, 10, mib), free(1, 100, 10)
	first.Time, second.Entry, second.Time, late.Entry, late.Time = 10, 22, 30, 20, 40
	apply(l, first, second, late)
	if got, _ := l.Used(1); got != mib {
		t.Errorf("holds %d, want %d", got, mib)
	}
}

// TestLies has a process whose memory says that it did things to another's objects, through a file of its own: the driver does not let it. A
// file that both have is another matter.
func TestLies(t *testing.T) {
	for _, test := range []struct {
		name            string
		lie             Event
		file            uint64
		want            uint64
		victim, suspect bool // exact
	}{
		{"free", free(2, 100, 10), 8, gib, true, false},
		{"free of the client", free(2, 100, 100), 8, gib, true, false},
		{"free of a client without naming it", Event{Kind: Free, PID: 2, Handle: 100}, 8, gib, true, false},
		{"memory", alloc(2, 100, 2, 11, gib), 8, gib, true, false},
		{"the handle of memory", alloc(2, 100, 2, 10, mib), 8, gib, true, false},
		{"device", Event{Kind: Device, PID: 2, Client: 100, Parent: 100, Handle: 2, Instance: 7}, 8, gib, true, false},
		{"client", Event{Kind: Client, PID: 2, Client: 100, Handle: 100}, 8, 0, false, true}, // a handle is used again, perhaps
		{"shared file, free", free(2, 100, 10), 7, 0, true, true},
		{"shared file, memory", alloc(2, 100, 2, 11, gib), 7, 2 * gib, true, true},
		{"file not known", free(2, 100, 10), 0, 0, true, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			l := New(Config{})
			for _, e := range append(start(1, 100, 0), alloc(1, 100, 2, 10, gib)) {
				e.File = 7
				apply(l, e)
			}
			test.lie.File = test.file
			apply(l, test.lie)
			got, exact := l.Used(1)
			if _, suspect := l.Used(2); got != test.want || exact != test.victim || suspect != test.suspect {
				t.Errorf("it holds %d (exact %v), the other is exact: %v", got, exact, suspect)
			}
			empty(t, l)
		})
	}
}

func TestClientsOfAClosedFile(t *testing.T) {
	l := New(Config{})
	apply(l, Event{Kind: Client, PID: 1, Handle: 100, File: 7}, Event{Kind: Client, PID: 1, Handle: 200, File: 8},
		alloc(1, 100, 2, 10, gib), alloc(1, 200, 2, 10, mib), Event{Kind: Close, PID: 1, File: 7}, Event{Kind: Close, PID: 1})
	if got, _ := l.Used(1); got != mib {
		t.Errorf("holds %d, want %d", got, mib)
	}
}

func uses(l *Ledger, pid int32) map[UUID]uint64 {
	list, _ := l.Uses(pid, 0, nil)
	all := map[UUID]uint64{}
	for _, u := range list {
		all[u.GPU] = u.Used
	}
	return all
}

func TestWhichGPU(t *testing.T) {
	host := []GPU{{ID: 0x100, Minor: 0, UUID: gpuA}, {ID: 0x200, Minor: 1, UUID: gpuB}}
	for _, test := range []struct {
		name   string
		events []Event
		want   UUID
	}{
		{"nothing known", nil, UUID{}},
		{"only one node opened", []Event{{Kind: OpenGPU, PID: 1, Minor: 1}}, gpuB},
		{"two nodes opened", []Event{{Kind: OpenGPU, PID: 1, Minor: 1}, {Kind: OpenGPU, PID: 1, Minor: 0}}, UUID{}},
		{"UVM knows one GPU", []Event{{Kind: OpenGPU, PID: 1, Minor: 1}, {Kind: OpenGPU, PID: 1, Minor: 0}, {Kind: RegisterGPU, PID: 1, UUID: gpuA}}, gpuA},
		{"UVM knows two", []Event{{Kind: RegisterGPU, PID: 1, UUID: gpuA}, {Kind: RegisterGPU, PID: 1, UUID: gpuB}}, UUID{}},
		{"UVM was told the client", []Event{{Kind: RegisterGPU, PID: 1, UUID: gpuA, Client: 100}, {Kind: RegisterGPU, PID: 1, UUID: gpuB}}, gpuA},
		{"device instance", []Event{{Kind: OpenGPU, PID: 1, Minor: 0}, {Kind: Instance, PID: 1, GPUID: 0x200, Instance: 4}}, gpuB},
		{"address space", []Event{
			{Kind: Instance, PID: 1, GPUID: 0x100, Instance: 4},
			{Kind: VASpace, PID: 1, Client: 100, Parent: 2, Handle: 9},
			{Kind: RegisterVAS, PID: 1, Client: 100, Handle: 9, UUID: gpuB},
		}, gpuB},
	} {
		t.Run(test.name, func(t *testing.T) {
			l := New(Config{})
			l.SetGPUs(host)
			apply(l, start(1, 100, 4)...)
			apply(l, alloc(1, 100, 2, 10, gib)) // before it is known
			apply(l, test.events...)
			apply(l, alloc(1, 100, 3, 11, mib)) // after
			if got := uses(l, 1); len(got) != 1 || got[test.want] != gib+mib {
				t.Errorf("booked %v, want all on %x", got, test.want)
			}
			if total, exact := l.Used(1); total != gib+mib || !exact {
				t.Errorf("total %d, exact %v", total, exact)
			}
			empty(t, l)
		})
	}
}

func TestTwoGPUsInOneProcess(t *testing.T) {
	l := New(Config{})
	apply(l, start(1, 100, 0)...)
	apply(l, Event{Kind: Device, PID: 1, Client: 100, Parent: 100, Handle: 52, Instance: 1},
		alloc(1, 100, 2, 10, gib), alloc(1, 100, 52, 60, mib),
		Event{Kind: VASpace, PID: 1, Client: 100, Parent: 2, Handle: 9}, Event{Kind: VASpace, PID: 1, Client: 100, Parent: 52, Handle: 59},
		Event{Kind: RegisterVAS, PID: 1, Client: 100, Handle: 9, UUID: gpuA}, Event{Kind: RegisterVAS, PID: 1, Client: 100, Handle: 59, UUID: gpuB})
	if got := uses(l, 1); len(got) != 2 || got[gpuA] != gib || got[gpuB] != mib {
		t.Errorf("booked %v", got)
	}
	apply(l, free(1, 100, 52))
	if got := uses(l, 1); got[gpuA] != gib || got[gpuB] != 0 {
		t.Errorf("after a device is freed: %v", got)
	}
	empty(t, l)
}

func TestPeak(t *testing.T) {
	l := New(Config{Window: time.Minute})
	apply(l, start(1, 100, 0)...)
	at := func(second int64, e Event) Event { e.Time = second * 1e9; return e }
	apply(l, at(1, alloc(1, 100, 2, 10, gib)), at(2, alloc(1, 100, 2, 11, 4*gib)), at(3, free(1, 100, 11)), at(50, alloc(1, 100, 2, 12, gib)), at(51, free(1, 100, 12)))
	for _, test := range []struct {
		second int64
		want   uint64
	}{{52, 5 * gib}, {62, 5 * gib}, {64, 2 * gib}, {110, 2 * gib}, {112, gib}, {1000, gib}} {
		list, _ := l.Uses(1, test.second*1e9, nil)
		if len(list) != 1 || list[0].Peak != test.want || list[0].Used != gib {
			t.Errorf("at %d s: %+v, want peak %d", test.second, list, test.want)
		}
	}
	// A hundred thousand steps in one window take bounded room, and the peak is still there.
	apply(l, at(2000, alloc(1, 100, 2, 20, 9*gib)))
	for i := int64(0); i < 100_000; i++ {
		e := alloc(1, 100, 2, 1000, uint64(200_000-i)*4096)
		e.Time = 2001e9 + i*200_000
		apply(l, e)
	}
	apply(l, free(1, 100, 20))
	a := l.processes[1].accounts[UUID{}]
	if len(a.steps) > 2*peakSteps+1 || cap(a.steps) > 1024 {
		t.Errorf("%d steps kept (room for %d)", len(a.steps), cap(a.steps))
	}
	if got := a.peak(l.now, time.Minute); got < 10*gib {
		t.Errorf("peak %d", got)
	}
}

func TestFailures(t *testing.T) {
	fail := func(tid int32, entry, end int64, size, seq uint64) Event {
		return Event{Kind: Memory, PID: 1, TID: tid, Client: 100, Parent: 2, Handle: 10, Size: size, Status: StatusNoMemory, Entry: entry * 1e3, Time: end * 1e3, Seq: seq}
	}
	ok := alloc(1, 100, 2, 10, mib)
	ok.TID, ok.Time = 1, 200e3
	for _, test := range []struct {
		name   string
		events []Event
		want   int
	}{
		// Times in µs, as recorded on an H200.
		{"four retries", []Event{fail(1, 7377, 15957, 200*gib, 0), fail(1, 16070, 19374, 200*gib, 0), fail(1, 19480, 22904, 200*gib, 0), fail(1, 22961, 26270, 200*gib, 0)}, 1},
		{"two requests back to back", []Event{
			fail(1, 0, 10, gib, 1), fail(1, 11, 20, gib, 2), fail(1, 21, 30, gib, 3), fail(1, 31, 40, gib, 4),
			fail(1, 150, 160, gib, 8), fail(1, 161, 170, gib, 9), fail(1, 171, 180, gib, 10), fail(1, 181, 190, gib, 11),
		}, 2},
		{"two requests, calls not numbered", []Event{
			fail(1, 0, 10, gib, 0), fail(1, 11, 20, gib, 0), fail(1, 21, 30, gib, 0), fail(1, 31, 40, gib, 0), fail(1, 150, 160, gib, 0),
			fail(1, 161, 170, gib, 0), fail(1, 171, 180, gib, 0), fail(1, 181, 190, gib, 0),
		}, 2},
		{"another call between", []Event{fail(1, 0, 10, gib, 5), fail(1, 20, 30, gib, 7)}, 2},
		{"another size", []Event{fail(1, 0, 10, gib, 0), fail(1, 20, 30, 2*gib, 0)}, 2},
		{"another thread", []Event{fail(1, 0, 10, gib, 0), fail(2, 5, 15, gib, 0), fail(1, 11, 20, gib, 0), fail(2, 16, 30, gib, 0)}, 2},
		{"long after", []Event{fail(1, 0, 10, gib, 0), fail(1, 20_000, 20_010, gib, 0)}, 2},
		{"stopped between retries", []Event{fail(1, 0, 10, gib, 5), fail(1, 99_000, 99_010, gib, 6)}, 1},
		{"long after, no call between", []Event{fail(1, 0, 10, gib, 5), fail(1, 600_000, 600_010, gib, 6)}, 2},
		{"a success between", []Event{fail(1, 0, 10, gib, 0), ok, fail(1, 201, 210, gib, 0)}, 2},
	} {
		t.Run(test.name, func(t *testing.T) {
			l := New(Config{})
			apply(l, start(1, 100, 0)...)
			apply(l, Event{Kind: RegisterGPU, PID: 1, UUID: gpuA})
			failures := apply(l, test.events...)
			if len(failures) != test.want {
				t.Fatalf("%d failures: %v, want %d", len(failures), failures, test.want)
			}
			if failures[0].GPU != gpuA || failures[0].PID != 1 {
				t.Errorf("failure %+v", failures[0])
			}
		})
	}
}

func TestObjectCap(t *testing.T) {
	l := New(Config{MaxObjects: 100})
	apply(l, start(1, 1, 0)...)
	for i := uint32(10); i < 1010; i++ {
		apply(l, alloc(1, 1, 2, i, mib))
	}
	if s := l.Stats(); s.Objects != 100 || s.Dropped != 903 {
		t.Errorf("%+v", s)
	}
	if got, exact := l.Used(1); got != 97*mib || exact {
		t.Errorf("holds %d, exact %v", got, exact)
	}
	empty(t, l)
}

func TestHundredThousandObjects(t *testing.T) {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	l := New(Config{})
	apply(l, start(1, 1, 0)...)
	for i := uint32(10); i < 100_010; i++ {
		apply(l, alloc(1, 1, 2, i, mib))
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if got, exact := l.Used(1); got != 100_000*mib || !exact {
		t.Errorf("holds %d, exact %v", got, exact)
	}
	each := (after.HeapAlloc - before.HeapAlloc) / 100_000
	t.Logf("%d bytes an object", each)
	if each > 300 {
		t.Errorf("%d bytes an object", each)
	}
	begin := time.Now()
	apply(l, free(1, 1, 2))
	if took := time.Since(begin); took > time.Second {
		t.Errorf("freeing the device took %v", took)
	}
	empty(t, l)
}

func TestDeepTreeIsFreedWithoutRecursion(t *testing.T) {
	l := New(Config{})
	apply(l, start(1, 1, 0)...)
	for i := uint32(10); i < 10_010; i++ {
		apply(l, alloc(1, 1, i-1, i, 1))
	}
	apply(l, free(1, 1, 9))
	if got, _ := l.Used(1); got != 0 {
		t.Errorf("holds %d", got)
	}
	empty(t, l)
}

func BenchmarkAllocFree(b *testing.B) {
	l := New(Config{})
	apply(l, start(1, 1, 0)...)
	for i := uint32(10); i < 100_010; i++ {
		apply(l, alloc(1, 1, 2, i, mib))
	}
	b.ReportAllocs()
	for b.Loop() {
		l.Apply(alloc(1, 1, 2, 5, mib))
		l.Apply(free(1, 1, 5))
	}
}

// TestHeir: memory that other processes have mapped is counted with its maker, then with the one that mapped it first, and is gone with the last.
func TestHeir(t *testing.T) {
	l := New(Config{})
	for pid := int32(1); pid <= 3; pid++ {
		apply(l, start(pid, uint32(pid)*100, 0)...)
	}
	want := func(when string, bytes ...uint64) {
		t.Helper()
		for i, n := range bytes {
			if used, exact := l.Used(int32(i + 1)); used != n || !exact {
				t.Errorf("%s: process %d holds %d, exact %t; want %d", when, i+1, used, exact, n)
			}
		}
		check(t, l, gib)
	}
	apply(l, alloc(1, 100, 2, 10, gib), dup(2, 200, 20, 100, 10), dup(3, 300, 30, 200, 20))
	want("mapped", gib, 0, 0)
	apply(l, Event{Kind: Exit, PID: 1})
	want("the maker is gone", 0, gib, 0)
	apply(l, free(2, 200, 20))
	want("the second closed it", 0, 0, gib)
	apply(l, free(3, 300, 30))
	want("the last closed it", 0, 0, 0)
}

// TestMappedForEver: a mapping that is made and closed again and again leaves nothing behind.
func TestMappedForEver(t *testing.T) {
	l := New(Config{})
	apply(l, append(start(1, 100, 0), append(start(2, 200, 0), alloc(1, 100, 2, 10, gib), dup(2, 200, 20, 100, 10))...)...)
	for range 10_000 {
		apply(l, dup(2, 200, 21, 100, 10), free(2, 200, 21))
	}
	if n := len(l.clients[100].objects[10].shared.dups); n > 40 {
		t.Errorf("%d dups are remembered, one is left", n)
	}
	apply(l, Event{Kind: Exit, PID: 1})
	if used, _ := l.Used(2); used != gib {
		t.Errorf("the one that is left holds %d", used)
	}
}
