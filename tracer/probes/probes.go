// Package probes counts, with uprobes on libcuda, the bytes that each process copies between host and GPU, the bytes that it holds through
// CUDA's allocation calls and, if asked for, its kernel launches. A library file is probed once for all processes that map it,
// containers' own copies included. Totals are summed in the kernel and read from there; no event is sent per call.
//
// A copy is counted when it is called, not when it returns: a second trap at the return would double the price of every copy to leave
// out the rare copy that fails. Allocations, which are rare, are counted by their result. Calls that libcuda makes to its own exports are
// left out by their return address (kernels from 5.15).
package probes

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"

	"gpu-exporter/tracer/activity"
	"gpu-exporter/tracer/entries"
)

// Config says what to probe.
type Config struct {
	Launches bool          // count kernel launches too: up to 100 000 calls a second
	Linger   time.Duration // keep the probes of a library that nobody maps for this long; default two minutes
	Logger   *slog.Logger
	Proc     string // the proc file system; default /proc
}

// Totals is what one process did since it was first seen.
type Totals struct {
	HtoD, DtoH uint64 // bytes copied
	Undecided  uint64 // bytes of unified copies whose direction could not be told
	Launches   uint64 // kernel launches and graph launches
	Allocated  uint64 // bytes held now through CUDA's allocation calls
}

// Probes holds the loaded programs and every library that is probed. Its methods may be called from several goroutines.
type Probes struct {
	config    Config
	objects   probesObjects
	cookies   bool
	attaching sync.Mutex // held while probes are put on, which may take seconds; taken before mu
	mu        sync.Mutex
	libraries map[fileID]*library
	processes entries.Reader[uint32, probesTotals]
	pointers  entries.Reader[probesPointerKey, uint64]
}

// fileID tells library files apart, as /proc/<pid>/maps prints them.
type fileID struct {
	device string
	inode  uint64
}

type library struct {
	path   string // as the first process sees it
	err    error
	links  []io.Closer
	pids   map[int]bool
	unused time.Time // since when nobody maps it; zero: somebody does
}

// New loads the programs. Nothing is probed until Scan finds a library. The error says what the kernel lacks.
func New(config Config) (*Probes, error) {
	return load(config, features.HaveProgramHelper(ebpf.Kprobe, asm.FnGetAttachCookie) == nil)
}

// load loads the programs for a kernel with attach cookies (5.15) or without.
func load(config Config, cookies bool) (*Probes, error) {
	if config.Linger <= 0 {
		config.Linger = 2 * time.Minute
	}
	if config.Logger == nil {
		config.Logger = slog.New(slog.DiscardHandler)
	}
	if config.Proc == "" {
		config.Proc = "/proc"
	}
	spec, err := loadProbes()
	if err != nil {
		return nil, fmt.Errorf("reading the probe programs: %w", err)
	}
	p := &Probes{config: config, cookies: cookies, libraries: map[fileID]*library{}}
	if err := spec.Variables["have_cookies"].Set(cookies); err != nil {
		return nil, fmt.Errorf("setting up the probe programs: %w", err)
	}
	if err := rlimit.RemoveMemlock(); err != nil { // kernels before 5.11 count maps against it
		return nil, fmt.Errorf("raising RLIMIT_MEMLOCK: %w", err)
	}
	if err := spec.LoadAndAssign(&p.objects, nil); err != nil {
		return nil, fmt.Errorf("loading the probe programs: %w", err)
	}
	p.processes.Map, p.pointers.Map = p.objects.Processes, p.objects.Pointers
	return p, nil
}

// Scan looks at the libraries that a process maps and probes every libcuda that is new, which may take a second or two. A process that is gone, or whose maps may not be
// read, is no error to the caller: it has no libraries.
func (p *Probes) Scan(pid int) {
	maps, err := readLimited(fmt.Sprintf("%s/%d/maps", p.config.Proc, pid))
	if err != nil {
		return
	}
	p.attaching.Lock()
	defer p.attaching.Unlock()
	for _, m := range libraries(maps) {
		if p.seen(pid, m.id) {
			continue
		}
		lib := p.attach(pid, m)
		lib.pids[pid] = true
		p.mu.Lock()
		p.libraries[m.id] = lib
		p.mu.Unlock()
	}
}

// seen notes that a process maps a library, and tells whether that one was looked at before.
func (p *Probes) seen(pid int, id fileID) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	lib := p.libraries[id]
	if lib == nil {
		return false
	}
	lib.pids[pid] = true
	lib.unused = time.Time{}
	return true
}

// maxMaps bounds what is read of one process's maps.
const maxMaps = 16 << 20

func readLimited(path string) (string, error) {
	file, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, maxMaps))
	return string(data), err
}

// mapping is one executable mapping of a libcuda.
type mapping struct {
	id          fileID
	path        string
	addresses   string // "start-end" as in the file's name under map_files
	wasUnlinked bool
}

// libraries finds the executable mappings of files called libcuda.so, libcuda.so.1, libcuda.so.580.159.04 in the text of a maps file.
func libraries(maps string) []mapping {
	var found []mapping
	for line := range strings.Lines(maps) {
		line = strings.TrimSuffix(line, "\n")
		fields := strings.SplitN(line, " ", 6)
		if len(fields) < 6 || len(fields[1]) < 4 || fields[1][2] != 'x' {
			continue
		}
		path, unlinked := strings.CutSuffix(strings.TrimLeft(fields[5], " "), " (deleted)")
		name := path[strings.LastIndexByte(path, '/')+1:]
		if rest, ok := strings.CutPrefix(name, "libcuda.so"); !ok || rest != "" && rest[0] != '.' {
			continue
		}
		inode, err := strconv.ParseUint(fields[4], 10, 64)
		if err != nil || inode == 0 {
			continue
		}
		m := mapping{id: fileID{fields[3], inode}, path: path, addresses: fields[0], wasUnlinked: unlinked}
		if !slices.ContainsFunc(found, func(o mapping) bool { return o.id == m.id }) {
			found = append(found, m)
		}
	}
	return found
}

// attach probes one library file through a process that maps it.
func (p *Probes) attach(pid int, m mapping) *library {
	lib := &library{path: safe(m.path), pids: map[int]bool{}}
	file := fmt.Sprintf("%s/%d/map_files/%s", p.config.Proc, pid, m.addresses)
	if _, err := os.Stat(file); err != nil && !m.wasUnlinked {
		file = fmt.Sprintf("%s/%d/root%s", p.config.Proc, pid, m.path)
	}
	count, err := p.attachTo(lib, file)
	if err != nil {
		lib.err = err
		lib.close()
		p.config.Logger.LogAttrs(context.Background(), slog.LevelWarn, "libcuda not probed", slog.String("library", lib.path), slog.Any("error", err))
		return lib
	}
	p.config.Logger.LogAttrs(context.Background(), slog.LevelInfo, "libcuda probed", slog.String("library", lib.path), slog.Int("functions", count))
	return lib
}

func (p *Probes) attachTo(lib *library, file string) (count int, err error) {
	offsets, size, err := exports(file)
	if err != nil {
		return 0, err
	}
	executable, err := link.OpenExecutable(file)
	if err != nil {
		return 0, fmt.Errorf("opening the library: %w", err)
	}
	list := hooks
	if p.config.Launches {
		list = append(slices.Clip(list), launchHook)
	}
	programs := p.programs()
	for _, h := range list {
		for _, symbol := range h.symbols {
			at, ok := offsets[symbol]
			if !ok {
				continue // a library older or newer than the function
			}
			options := &link.UprobeOptions{}
			if p.cookies {
				options.Cookie = at<<32 | size
			}
			l, err := executable.Uprobe(symbol, programs[h.program], options)
			if err != nil {
				return count, fmt.Errorf("probing %s: %w", symbol, err)
			}
			lib.links = append(lib.links, l)
			if h.result {
				l, err := executable.Uretprobe(symbol, programs["alloc_done"], nil)
				if err != nil {
					return count, fmt.Errorf("probing the return of %s: %w", symbol, err)
				}
				lib.links = append(lib.links, l)
			}
			count++
		}
	}
	if count == 0 {
		return 0, errors.New("it exports none of the functions that are probed")
	}
	return count, nil
}

func (p *Probes) programs() map[string]*ebpf.Program {
	o := &p.objects
	return map[string]*ebpf.Program{
		"copy_htod": o.CopyHtod, "copy_dtoh": o.CopyDtoh, "copy_unified": o.CopyUnified, "copy_2d": o.Copy2d, "copy_3d": o.Copy3d,
		"alloc": o.Alloc, "alloc_managed": o.AllocManaged, "alloc_pitch": o.AllocPitch, "alloc_create": o.AllocCreate,
		"alloc_done": o.AllocDone, "free_pointer": o.FreePointer, "free_handle": o.FreeHandle, "launch": o.Launch,
	}
}

// exports returns the offset of every exported function in the loaded library, and the loaded library's size.
func exports(path string) (offsets map[string]uint64, size uint64, err error) {
	defer func() {
		if r := recover(); r != nil { // debug/elf on a hostile file
			err = fmt.Errorf("reading the library's symbols: %v", r)
		}
	}()
	file, err := elf.Open(path)
	if err != nil {
		return nil, 0, fmt.Errorf("opening the library: %w", err)
	}
	defer file.Close()
	for _, segment := range file.Progs {
		if segment.Type == elf.PT_LOAD {
			size = max(size, segment.Vaddr+segment.Memsz)
		}
	}
	symbols, err := file.DynamicSymbols()
	if err != nil {
		return nil, 0, fmt.Errorf("reading the library's symbols: %w", err)
	}
	offsets = map[string]uint64{}
	for _, s := range symbols {
		if s.Section != elf.SHN_UNDEF && elf.ST_TYPE(s.Info) == elf.STT_FUNC && s.Value < 1<<31 && size < 1<<31 {
			offsets[s.Name] = s.Value
		}
	}
	return offsets, size, nil
}

// Totals adds the totals of every process that called a probed function to all and returns it, made if it is nil. Processes that are gone
// are returned a last time and then forgotten, here and in the kernel. Call it about once a second.
func (p *Probes) Totals(all map[int]Totals) map[int]Totals {
	if all == nil {
		all = map[int]Totals{}
	}
	p.mu.Lock()
	unused := p.prune(time.Now())
	defer func() {
		p.mu.Unlock()
		for _, lib := range unused {
			lib.close() // slow
		}
	}()
	var gone []uint32
	if err := p.processes.Each(func(pid uint32, t *probesTotals) {
		all[int(pid)] = Totals{HtoD: t.Htod, DtoH: t.Dtoh, Undecided: t.Undecided, Launches: t.Launches, Allocated: t.Allocated}
		if !p.alive(int(pid)) {
			gone = append(gone, pid)
		}
	}); err != nil {
		p.config.Logger.Warn("reading what probes counted", slog.Any("error", err))
	}
	p.forget(gone)
	return all
}

func (p *Probes) alive(pid int) bool {
	_, err := os.Stat(fmt.Sprintf("%s/%d", p.config.Proc, pid))
	return !errors.Is(err, os.ErrNotExist)
}

// forget drops what the kernel side keeps of processes that are gone.
func (p *Probes) forget(gone []uint32) {
	if len(gone) == 0 {
		return
	}
	for _, pid := range gone {
		_ = p.objects.Processes.Delete(pid) // gone already is as good
	}
	p.pointers.Drop(func(k probesPointerKey) bool { return slices.Contains(gone, k.Pid) })
}

// prune takes out the libraries that no living process has mapped for long.
func (p *Probes) prune(now time.Time) (unused []*library) {
	for id, lib := range p.libraries {
		for pid := range lib.pids {
			if !p.alive(pid) {
				delete(lib.pids, pid)
			}
		}
		switch {
		case len(lib.pids) > 0:
			lib.unused = time.Time{}
		case lib.unused.IsZero():
			lib.unused = now
		case now.Sub(lib.unused) >= p.config.Linger:
			unused = append(unused, lib)
			delete(p.libraries, id)
		}
	}
	return unused
}

// Libraries returns every library that is probed or could not be.
func (p *Probes) Libraries() []activity.Probe {
	p.mu.Lock()
	defer p.mu.Unlock()
	var list []activity.Probe
	for _, lib := range p.libraries {
		one := activity.Probe{Library: lib.path, Up: lib.err == nil}
		if lib.err != nil {
			one.Reason = safe(lib.err.Error())
		}
		list = append(list, one)
	}
	slices.SortFunc(list, func(a, b activity.Probe) int { return strings.Compare(a.Library, b.Library) })
	return list
}

// Lost returns how many processes and allocations did not fit the kernel side's tables.
func (p *Probes) Lost() uint64 {
	var n uint64
	if err := p.objects.Lost.Lookup(uint32(0), &n); err != nil {
		return 0
	}
	return n
}

// Close takes all probes off.
func (p *Probes) Close() error {
	p.attaching.Lock()
	defer p.attaching.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, lib := range p.libraries {
		lib.close()
	}
	clear(p.libraries)
	return p.objects.Close()
}

func (l *library) close() {
	for _, one := range l.links {
		_ = one.Close() // the kernel drops the probe with its last descriptor
	}
	l.links = nil
}

// safe makes a path that a container chose fit for a label: printable, at most 200 bytes.
func safe(path string) string {
	path = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == '\uFFFD' {
			return '?'
		}
		return r
	}, path)
	if len(path) > 200 {
		path = strings.ToValidUTF8(path[:200], "")
	}
	return path
}
