package tracer

import (
	"encoding/binary"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/processes"
	"gpu-exporter/exporter/snapshot"
	"gpu-exporter/nvml/frame"
	"gpu-exporter/tracer/abi"
	"gpu-exporter/tracer/activity"
	"gpu-exporter/tracer/ledger"
)

var (
	lossSeed = flag.Uint64("loss.seed", 0, "TestLoss: the seed of the first host; 0: of the time")
	lossFor  = flag.Duration("loss.for", time.Second, "TestLoss: how long it runs")
)

// lossHost is a host whose processes use the driver at random, and the kernel side that tells of it and loses some of what it should tell.
type lossHost struct {
	t    *testing.T
	r    *rand.Rand
	run  *run
	maps map[string]*ebpf.Map
	last *activity.Report

	procs    map[uint32]*lossProc
	holders  map[uint32]bool
	next     uint64 // start of the next process, clock ticks
	handle   uint32
	ring     []record
	size     int               // of the ring, in records
	ways     [loseWays]bool    // that happen on this host
	done     []func(m *oracle) // what happened since the oracle was told, oldest first
	told     int               // how much of it, of all
	oracle   oracle
	injected map[string]uint64 // losses by cause, other than records cut
	cut      uint64
	builder  *snapshot.Builder
	up       bool // the worker
	compared [2]int
}

// lossProc is a process as it is.
type lossProc struct {
	pid     uint32
	start   uint64 // ticks
	group   uint64
	gpu     int
	client  uint32 // 0: it only holds what it inherited
	seq     uint64
	handles []*memory
}

// memory is video memory under the handles that are left, oldest first: it counts with the first.
type memory struct {
	size  uint64
	owner []mapping
}

type mapping struct {
	p      *lossProc
	handle uint32
}

// oracle knows what every process holds, as of some moment.
type oracle map[uint32]map[uint64]uint64 // by PID and start

func (o oracle) add(p *lossProc, bytes uint64) {
	if o[p.pid] == nil {
		o[p.pid] = map[uint64]uint64{}
	}
	o[p.pid][p.start] += bytes
}

// record is one of the ring buffer: its bytes and how much had happened when it was made.
type record struct {
	raw []byte
	at  int
}

const lossGPUs = 3

func lossUUID(gpu int) ledger.UUID { return ledger.UUID{0: byte(gpu + 1), 15: 9} }

func newLossHost(t *testing.T, seed uint64) *lossHost {
	h := &lossHost{t: t, r: rand.New(rand.NewPCG(seed, 6)), maps: map[string]*ebpf.Map{}, procs: map[uint32]*lossProc{}, holders: map[uint32]bool{}, handle: 100,
		oracle: oracle{}, injected: map[string]uint64{}, builder: snapshot.NewBuilder(snapshot.Config{}), up: true}
	h.size = 1 + h.r.IntN(200)
	for i := range h.ways {
		h.ways[i] = h.r.IntN(2) == 0
	}
	if h.r.IntN(2) == 0 { // losses of a process or a group alone
		h.size, h.ways = 1<<20, [loseWays]bool{loseShare: h.r.IntN(2) == 0, loseRate: true}
	}
	spec, err := loadBpf()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{bpfMapHolders, bpfMapLost, bpfMapGroups, bpfMapOpens, bpfMapCalls, bpfMapErrors} {
		spec.Maps[name].MaxEntries = min(spec.Maps[name].MaxEntries, 256)
		if h.maps[name], err = ebpf.NewMap(spec.Maps[name]); err != nil {
			t.Skip(err)
		}
	}
	config := &Config{ProcRoot: t.TempDir(), CgroupRoot: t.TempDir(), Linger: time.Minute}
	h.run = &run{
		config: config, log: slog.New(slog.DiscardHandler), groups: newGroups(config, h.maps), processes: map[int]*process{}, mode: ModeTracepoint,
		proc: &processes.Reader{Root: config.ProcRoot}, ledger: ledger.New(ledger.Config{}), lost: map[string]uint64{}, droppedAt: map[int]int64{}, version: abi.Version{Major: 580, Minor: 159},
		kernel: &kernel{collection: &ebpf.Collection{Maps: h.maps}}, attached: 10 * userTicks, scans: make(chan fullScan, 1),
		emit: func(r *activity.Report) { h.last = r },
	}
	h.run.holders.Map, h.run.losses.Map = h.maps[bpfMapHolders], h.maps[bpfMapLost]
	for gpu := range lossGPUs {
		h.run.gpus = append(h.run.gpus, ledger.GPU{ID: uint32(gpu + 1), Minor: int32(gpu), UUID: lossUUID(gpu)})
	}
	h.run.ledger.SetGPUs(h.run.gpus)
	for range h.r.IntN(5) { // there before the tracer
		h.next = 1 + h.next%8
		h.start()
	}
	h.next = 100
	h.tell(len(h.done))
	h.ring = nil
	h.cut = 0
	clear(h.injected)
	for _, name := range []string{bpfMapHolders, bpfMapGroups, bpfMapLost} {
		h.zero(name)
	}
	h.look()
	return h
}

func (h *lossHost) zero(name string) {
	if name == bpfMapLost {
		for cause := range bpfCause(h.maps[name].MaxEntries()) {
			check(h.maps[name].Put(uint32(cause), uint64(0)))
		}
		return
	}
	var key [8]byte
	for k := key[:h.maps[name].KeySize()]; h.maps[name].NextKey(nil, k) == nil; {
		check(h.maps[name].Delete(k))
	}
}

func (h *lossHost) close() {
	h.run.groups.close()
	for _, m := range h.maps {
		m.Close()
	}
}

// tell tells the oracle what happened, up to a moment.
func (h *lossHost) tell(upTo int) {
	for h.told < upTo {
		h.done[0](&h.oracle)
		h.done = h.done[1:]
		h.told++
	}
}

// happened notes what a step did.
func (h *lossHost) happened(f func(o *oracle)) { h.done = append(h.done, f) }

// count adds one to a cause of loss, as the kernel side does.
func (h *lossHost) count(cause bpfCause) {
	var n uint64
	check(h.maps[bpfMapLost].Lookup(uint32(cause), &n))
	check(h.maps[bpfMapLost].Put(uint32(cause), n+1))
	h.injected[causes[cause]]++
}

// The ways to lose a record beside an overrun.
const (
	loseShare = iota
	loseRate
	loseThreads
	loseCut
	loseWays
)

// send puts a record of a process into the ring, or loses it.
func (h *lossHost) send(p *lossProc, raw []byte, call bool) {
	way := h.r.IntN(loseWays)
	if !h.ways[way] || h.r.IntN(100) > 0 || !call && way != loseShare && way != loseCut {
		way = loseWays
	}
	switch way {
	case loseShare:
		h.share(p)
		return
	case loseRate:
		var held bpfHolder
		if h.maps[bpfMapHolders].Lookup(p.pid, &held) == nil {
			held.Dropped++
			check(h.maps[bpfMapHolders].Put(p.pid, &held))
			h.group(p, func(g *bpfGroupCount) { g.Dropped++ })
			h.count(bpfCauseLOST_RATE)
			return
		}
	case loseThreads:
		h.count(bpfCauseLOST_THREADS)
		return
	}
	if len(h.ring) >= h.size {
		h.count(bpfCauseLOST_RING)
		return
	}
	if way == loseCut {
		raw = raw[:h.r.IntN(len(raw))]
		h.cut++
	}
	h.ring = append(h.ring, record{raw, h.told + len(h.done)})
}

func (h *lossHost) share(p *lossProc) {
	h.group(p, func(g *bpfGroupCount) { g.Lost++ })
	h.count(bpfCauseLOST_SHARE)
}

func (h *lossHost) group(p *lossProc, change func(*bpfGroupCount)) {
	var g bpfGroupCount
	_ = h.maps[bpfMapGroups].Lookup(p.group, &g) // none yet is one of nothing
	change(&g)
	check(h.maps[bpfMapGroups].Put(p.group, &g))
}

func (h *lossHost) open(p *lossProc, node bpfNode, minor int) {
	e := &bpfOpenEvent{Minor: uint32(minor)}
	if !h.holders[p.pid] {
		h.holders[p.pid], e.First = true, 1
		check(h.maps[bpfMapHolders].Put(p.pid, &bpfHolder{Group: p.group}))
	}
	e.H.Time, e.H.Start, e.H.Group, e.H.Tgid, e.H.Tid, e.H.Kind, e.H.Node = h.now(), p.start*userTicks, p.group, p.pid, p.pid, uint32(bpfKindKIND_OPEN), uint32(node)
	h.send(p, bytesOf(e), false)
}

func (h *lossHost) now() uint64 { return uint64(monotonic(unix.CLOCK_MONOTONIC)) }

func (h *lossHost) end(p *lossProc, kind bpfKind, child *lossProc) {
	e := &bpfEndEvent{}
	e.H.Time, e.H.Start, e.H.Group, e.H.Tgid, e.H.Tid, e.H.Kind = h.now(), p.start*userTicks, p.group, p.pid, p.pid, uint32(kind)
	if child != nil {
		e.Child, e.ChildStart = child.pid, child.start*userTicks
	}
	h.send(p, bytesOf(e), false)
}

// call sends a call: the words of its block, and those of its parameters by place.
func (h *lossHost) call(p *lossProc, node bpfNode, cmd uint32, block []uint32, params map[int]uint64) {
	p.seq++
	e := &bpfCallEvent{Cmd: cmd, Seq: p.seq, File: uint64(p.pid)<<32 | p.start}
	e.H.Time = h.now()
	e.Entry, e.H.Start, e.H.Group, e.H.Tgid, e.H.Tid, e.H.Kind, e.H.Node = e.H.Time-1, p.start*userTicks, p.group, p.pid, p.pid, uint32(bpfKindKIND_CALL), uint32(node)
	for i, w := range block {
		binary.LittleEndian.PutUint32(e.Out[4*i:], w)
	}
	e.OutLen = uint32(len(e.Out))
	if cmd == cmdAlloc {
		copy(e.In[:], e.Out[8:])
		e.DeepLen = uint32(len(e.Deep))
		for at, v := range params {
			binary.LittleEndian.PutUint64(e.Deep[at:], v)
		}
	} else if node == bpfNodeNODE_UVM {
		copy(e.In[:], e.Out[:])
	}
	h.send(p, bytesOf(e), true)
}

func (h *lossHost) alloc(p *lossProc, root, parent, handle, class uint32, size uint64) {
	h.call(p, bpfNodeNODE_CTL, cmdAlloc, []uint32{root, parent, handle, class, 4096, 0, 0, 0, 0, 0, 0, 0}, map[int]uint64{64: size})
}

func (h *lossHost) fresh() uint32 { h.handle++; return h.handle }

// start begins a process that computes.
func (h *lossHost) start() {
	p := h.spawn(uint64(1 + h.r.IntN(4)))
	h.begin(p)
}

func (h *lossHost) spawn(group uint64) *lossProc {
	p := &lossProc{pid: uint32(1000 + h.r.IntN(40)), start: h.next, group: group, gpu: h.r.IntN(lossGPUs)}
	h.next++
	if old := h.procs[p.pid]; old != nil {
		h.exit(old)
	}
	h.procs[p.pid] = p
	dir := filepath.Join(h.run.config.ProcRoot, fmt.Sprint(p.pid))
	check(os.MkdirAll(dir, 0o755))
	check(os.WriteFile(dir+"/stat", fmt.Appendf(nil, "%d (c) S 1 1 1 0 -1 4194560 1 0 0 0 1 1 0 0 20 0 1 0 %d 1 1 18446744073709551615 0 0 0 0 0 0 0 0 0 0 0 0 17 0 0 0 0 0 0\n", p.pid, p.start), 0o644))
	return p
}

func (h *lossHost) begin(p *lossProc) {
	h.open(p, bpfNodeNODE_CTL, 255)
	h.open(p, bpfNodeNODE_UVM, 0)
	h.open(p, bpfNodeNODE_GPU, p.gpu)
	p.client = h.fresh()
	uuid := lossUUID(p.gpu)
	words := make([]uint32, 10)
	for i := range 4 {
		words[i] = binary.LittleEndian.Uint32(uuid[4*i:])
	}
	h.call(p, bpfNodeNODE_UVM, 37, words, nil)
	h.alloc(p, 0, p.client, p.client, classRoot, 0)
	h.alloc(p, p.client, p.client, device1, classDevice, 0)
	h.call(p, bpfNodeNODE_UVM, 25, append(words[:4:4], 0, p.client, 9, 0), nil)
}

func (h *lossHost) allocate(p *lossProc) {
	m := &memory{size: uint64(1+h.r.IntN(1<<20)) << 12}
	m.owner = []mapping{{p, h.fresh()}}
	p.handles = append(p.handles, m)
	h.happened(func(o *oracle) { o.add(p, m.size) })
	h.alloc(p, p.client, device1, m.owner[0].handle, classMemory, m.size)
}

// drop takes a process's handle of memory away: the next one has the bytes.
func (h *lossHost) drop(p *lossProc, m *memory) {
	i := slices.IndexFunc(m.owner, func(x mapping) bool { return x.p == p })
	m.owner = slices.Delete(m.owner, i, i+1)
	if i > 0 {
		h.happened(func(*oracle) {})
		return
	}
	var heir *lossProc
	if len(m.owner) > 0 {
		heir = m.owner[0].p
	}
	h.happened(func(o *oracle) {
		o.add(p, -m.size)
		if heir != nil {
			o.add(heir, m.size)
		}
	})
}

func (h *lossHost) free(p *lossProc) {
	if len(p.handles) == 0 {
		return
	}
	i := h.r.IntN(len(p.handles))
	m := p.handles[i]
	p.handles = slices.Delete(p.handles, i, i+1)
	at := slices.IndexFunc(m.owner, func(x mapping) bool { return x.p == p })
	handle := m.owner[at].handle
	h.drop(p, m)
	h.call(p, bpfNodeNODE_CTL, cmdFree, []uint32{p.client, device1, handle, 0}, nil)
}

// share memory of another process, as over CUDA IPC.
func (h *lossHost) dup(p *lossProc, from *lossProc) {
	if from == p || len(from.handles) == 0 {
		return
	}
	m := from.handles[h.r.IntN(len(from.handles))]
	if slices.ContainsFunc(m.owner, func(x mapping) bool { return x.p == p }) {
		return
	}
	source := m.owner[slices.IndexFunc(m.owner, func(x mapping) bool { return x.p == from })]
	made := mapping{p, h.fresh()}
	m.owner = append(m.owner, made)
	p.handles = append(p.handles, m)
	h.call(p, bpfNodeNODE_CTL, 0xc01c4634, []uint32{p.client, device1, made.handle, from.client, source.handle, 0, 0}, nil)
}

// lose takes all handles of a process away.
func (h *lossHost) lose(p *lossProc) {
	for _, m := range p.handles {
		h.drop(p, m)
	}
	p.handles, p.client = nil, 0
}

func (h *lossHost) exit(p *lossProc) {
	h.lose(p)
	delete(h.procs, p.pid)
	delete(h.holders, p.pid)
	_ = h.maps[bpfMapHolders].Delete(p.pid) // none where it was found by looking and gone since
	check(os.RemoveAll(filepath.Join(h.run.config.ProcRoot, fmt.Sprint(p.pid))))
	h.end(p, bpfKindKIND_EXIT, nil)
}

// look looks at every process, as the tracer does once a minute and after losses.
func (h *lossHost) look() {
	all := fullScan{began: monotonic(unix.CLOCK_MONOTONIC)}
	for _, p := range h.procs {
		s := scanned{pid: int(p.pid), holds: holds{ctl: true, uvm: true}}
		s.holds.add(uint32(bpfNodeNODE_GPU), uint32(p.gpu))
		all.found = append(all.found, s)
		h.holders[p.pid] = true
	}
	h.run.fullSoon = false
	h.run.merge(all)
}

// step does one thing.
func (h *lossHost) step() {
	var alive []*lossProc
	for pid := range uint32(2000) {
		if p := h.procs[pid]; p != nil {
			alive = append(alive, p)
		}
	}
	if len(alive) == 0 || h.r.IntN(30) == 0 {
		h.start()
		return
	}
	p := alive[h.r.IntN(len(alive))]
	switch n := h.r.IntN(60); {
	case p.client == 0 && n < 20:
		h.begin(p)
	case p.client == 0:
	case n == 0:
		h.exit(p)
	case n == 1:
		child := h.spawn(p.group)
		if h.procs[p.pid] != p {
			return // the child has its number, and it is gone
		}
		child.gpu = p.gpu
		if h.holders[p.pid] {
			h.holders[child.pid] = true
			check(h.maps[bpfMapHolders].Put(child.pid, &bpfHolder{Group: p.group}))
			h.end(p, bpfKindKIND_FORK, child)
		}
	case n == 2:
		h.lose(p)
		h.end(p, bpfKindKIND_EXEC, nil)
	case n < 30:
		h.allocate(p)
	case n < 50:
		h.free(p)
	default:
		h.dup(p, alive[h.r.IntN(len(alive))])
	}
}

// read takes records off the ring, and tells the oracle what had happened by then.
func (h *lossHost) read(n int) {
	for ; n > 0 && len(h.ring) > 0; n-- {
		next := h.ring[0]
		h.ring = h.ring[1:]
		rec, err := decode(next.raw)
		if err != nil {
			rec = err
		}
		h.run.take(rec)
		h.tell(next.at)
	}
	if len(h.ring) == 0 {
		h.tell(h.told + len(h.done))
	}
}

// compare publishes, and compares every figure that is given with the oracle's; where none is given, the snapshot's is NVML's.
func (h *lossHost) compare() {
	h.run.publish()
	now := time.Unix(0, h.last.Time)
	listed := map[int]uint64{}
	for gpu := range lossGPUs {
		d := &frame.Device{Index: gpu, UUID: uuidText(lossUUID(gpu)), State: frame.StateOK, Load: &frame.Load{MemoryUsed: frame.Some(uint64(1 << 40))}, Processes: &frame.Processes{}}
		for _, p := range h.procs {
			if p.gpu == gpu && p.client != 0 {
				listed[int(p.pid)] = uint64(p.pid) << 40 // as no ledger has it
				d.Processes.List = append(d.Processes.List, frame.Process{PID: int(p.pid), Compute: true, MemoryUsed: frame.Some(listed[int(p.pid)])})
			}
		}
		if h.up {
			h.builder.Apply(input.Input{Time: h.last.Time, Frame: &frame.Frame{Device: d}})
		}
	}
	h.builder.Apply(input.Input{Time: h.last.Time, Source: &input.Source{Name: input.SourceNVML, Up: h.up}})
	h.builder.Apply(input.Input{Time: h.last.Time, Tracer: h.last})
	exact := map[int]uint64{}
	for _, p := range h.last.Processes {
		for _, d := range p.Devices {
			if !d.Used.OK || !p.FromBirth {
				continue
			}
			exact[p.PID] += d.Used.V
			h.compared[0]++
			if want := h.oracle[uint32(p.PID)][p.StartTime]; d.Used.V != want {
				h.t.Fatalf("process %d is told to hold %d and to be exact; it holds %d. Lost %v", p.PID, d.Used.V, want, h.last.Lost)
			}
		}
	}
	for _, w := range h.builder.Snapshot(now).Workloads {
		if w.PID == 0 || !w.Alive || !w.Memory.OK {
			continue
		}
		if bytes, ok := exact[w.PID]; ok && w.Memory.V == bytes {
			continue
		}
		h.compared[1]++
		if nvml, ok := listed[w.PID]; !h.up || !ok || w.Memory.V != nvml {
			h.t.Fatalf("process %d is shown to hold %d, which neither the ledger (%v) nor NVML (%v) says", w.PID, w.Memory.V, exact, listed)
		}
	}
	for cause, n := range h.injected {
		if got := h.last.Lost[cause]; got != n {
			h.t.Fatalf("lost by %s: %d, told %d", cause, n, got)
		}
	}
}

// TestLoss loses at random what the kernel side tells of generated hosts: the ring buffer overruns, records are cut, a process is over its rate, a
// group over its share, calls have no room; NVML's worker is replaced. At every report a figure that is given is the true one as of the last
// record read, whatever was lost; every other process has NVML's or none; and each loss is counted by its cause.
// go test ./tracer -run TestLoss -loss.for 10m runs longer.
func TestLoss(t *testing.T) {
	seed := *lossSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	exact, rebased, losses, hosts := 0, 0, map[string]uint64{}, 0
	for began := time.Now(); hosts < 20 || time.Since(began) < *lossFor; hosts++ {
		ok := t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			h := newLossHost(t, seed)
			defer h.close()
			pace := 1 + h.r.IntN(30) // of the reader; what is made is 6 records for each time that it reads
			for range 600 {
				h.step()
				if h.r.IntN(4) == 0 {
					h.read(h.r.IntN(pace))
				}
				if h.r.IntN(8) == 0 {
					h.up = h.r.IntN(10) > 0
					h.compare()
				}
				if h.run.fullSoon && h.r.IntN(20) == 0 {
					h.read(len(h.ring)) // a look takes longer; what it finds is not as of the last record
					h.look()
				}
			}
			h.read(len(h.ring))
			h.compare()
			if h.last.Lost["decode"] != h.cut {
				t.Fatalf("%d records were cut, told %d", h.cut, h.last.Lost["decode"])
			}
			exact, rebased = exact+h.compared[0], rebased+h.compared[1]
			for cause, n := range h.last.Lost {
				losses[cause] += n
			}
		})
		if !ok {
			return
		}
		seed++
	}
	t.Logf("%d hosts to seed %d: %d figures of the ledger's, %d of NVML's; lost %v", hosts, seed-1, exact, rebased, losses)
	if exact == 0 || rebased == 0 || len(losses) < 5 {
		t.Error("nothing was tested")
	}
}
