package tracer

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"gpu-exporter/tracer/abi"
	"gpu-exporter/tracer/activity"
	"gpu-exporter/tracer/entries"
)

// group is one control group as the kernel side tells them apart, by id.
type group struct {
	path string
	gone time.Time // since when it does not exist; zero: it does
}

// counts is what the processes of the groups of one path did.
type counts struct {
	started  uint64
	exited   map[string]uint64
	opens    map[openKey]uint64
	calls    map[string]*callSum
	failures map[string]uint64
	launches uint64
}

// loss is what the kernel side could not tell of a group's processes, there being more than the group's share.
type loss struct {
	records uint64
	dropped uint64 // of which it is known whose they were
	seen    int64  // CLOCK_MONOTONIC: when it was found that there were more
}

type openKey struct{ node, result string }

type callSum struct {
	count, ns uint64
	errors    map[string]uint64
	buckets   [32]uint64
}

// add adds n to what is counted under a key. The maps of counts are made when there is something to count: many groups have nothing in most.
func add[K comparable](m *map[K]uint64, key K, n uint64) {
	if *m == nil {
		*m = map[K]uint64{}
	}
	(*m)[key] += n
}

func (c *counts) call(name string) *callSum {
	s := c.calls[name]
	if s == nil {
		s = &callSum{}
		if c.calls == nil {
			c.calls = map[string]*callSum{}
		}
		c.calls[name] = s
	}
	return s
}

// add adds other to c.
func (c *counts) add(other *counts) {
	c.started += other.started
	c.launches += other.launches
	for reason, n := range other.exited {
		add(&c.exited, reason, n)
	}
	for key, n := range other.opens {
		add(&c.opens, key, n)
	}
	for gpu, n := range other.failures {
		add(&c.failures, gpu, n)
	}
	for name, from := range other.calls {
		to := c.call(name)
		to.count += from.count
		to.ns += from.ns
		for status, n := range from.errors {
			add(&to.errors, status, n)
		}
		for i, n := range from.buckets {
			to.buckets[i] += n
		}
	}
}

// any tells whether anything was counted: a group may be known for what it asked for in vain.
func (c *counts) any() bool {
	return c.started > 0 || c.launches > 0 || len(c.exited) > 0 || len(c.opens) > 0 || len(c.calls) > 0 || len(c.failures) > 0
}

// report makes the group of a report.
func (c *counts) report(path string) activity.Group {
	g := activity.Group{Cgroup: path, Started: c.started, Launches: c.launches, Exited: c.exited, Failures: c.failures}
	for key, n := range c.opens {
		g.Opens = append(g.Opens, activity.Open{Node: key.node, Result: key.result, Count: n})
	}
	slices.SortFunc(g.Opens, func(a, b activity.Open) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Result, b.Result))
	})
	for name, s := range c.calls {
		call := activity.Call{Name: name, Count: s.count, Seconds: float64(s.ns) / 1e9, Errors: s.errors}
		last := len(s.buckets)
		for last > 0 && s.buckets[last-1] == 0 {
			last--
		}
		call.Buckets = slices.Clone(s.buckets[:last])
		g.Calls = append(g.Calls, call)
	}
	slices.SortFunc(g.Calls, func(a, b activity.Call) int { return cmp.Compare(a.Name, b.Name) })
	return g
}

// groups keeps the counters by control group. Those of the kernel side are read at every tick; what only user space knows is added.
type groups struct {
	config *Config
	byID   map[uint64]*group
	extra  map[string]*counts // by path: failures, launches, and what groups of an id that is gone had counted
	lost   map[uint64]loss    // by id
	v2     int                // descriptor of the unified hierarchy; -1: none
	walked map[uint64]string  // directories of the hierarchy by inode, as of walkAt
	walkAt time.Time

	started entries.Reader[uint64, bpfGroupCount]
	opens   entries.Reader[bpfOpenKey, bpfOpenCount]
	calls   entries.Reader[bpfCallKey, bpfCallCount]
	errors  entries.Reader[bpfErrorKey, uint64]
}

func newGroups(config *Config, maps map[string]*ebpf.Map) *groups {
	g := &groups{config: config, byID: map[uint64]*group{}, extra: map[string]*counts{}, lost: map[uint64]loss{}, v2: -1}
	g.started.Map, g.opens.Map, g.calls.Map, g.errors.Map = maps[bpfMapGroups], maps[bpfMapOpens], maps[bpfMapCalls], maps[bpfMapErrors]
	if !config.cgroupV1 {
		if fd, err := unix.Open(config.CgroupRoot, unix.O_PATH|unix.O_CLOEXEC|unix.O_DIRECTORY, 0); err == nil {
			g.v2 = fd
		}
	}
	return g
}

func (g *groups) close() {
	if g.v2 >= 0 {
		_ = unix.Close(g.v2) // opened for a path only: nothing to lose
	}
}

// see notes a control group with the best name that is known for it: the path that /proc has, else the path that the id leads to, else the
// last component, which the kernel side sent. /proc is not believed where it is of another group: the process was moved since, or it exits.
func (g *groups) see(id uint64, proc, last string) string {
	if known := g.byID[id]; known != nil && known.path != "" {
		known.gone = time.Time{}
		return known.path
	}
	p := proc
	if p == "" || !g.leads(p, id, last) {
		p = g.byHandle(id)
	}
	if p == "" {
		p = g.find(id)
	}
	if p == "" {
		p = last
	}
	if id == 0 {
		return p
	}
	if len(g.byID) < maxGroups || g.byID[id] != nil {
		g.byID[id] = &group{path: p}
	}
	return p
}

// leads tells whether a path from /proc is that of the group of an id. Where the path is not to be seen here, as in a container, its last component
// decides, of which the kernel side sent so much as it has room for.
func (g *groups) leads(p string, id uint64, last string) bool {
	if inode := g.inode(p); inode != 0 {
		return inode == id
	}
	base := path.Base(p)
	return last == "" || base == last || len(last) == nameRoom && strings.HasPrefix(base, last)
}

// nameRoom is how many bytes of a group's name the kernel side sends.
const nameRoom = len(bpfOpenEvent{}.Cgroup) - 1

// maxGroups bounds the table; the kernel side has as many by default.
const maxGroups = 16384

// fileIDKernfs is the type of a handle that is the id of a kernfs node.
const fileIDKernfs = 0xfe

// byHandle asks the kernel for the control group of an id: its path as in /proc/<pid>/cgroup, or "".
func (g *groups) byHandle(id uint64) string {
	if g.v2 < 0 || id == 0 {
		return ""
	}
	fd, err := unix.OpenByHandleAt(g.v2, unix.NewFileHandle(fileIDKernfs, binary.NativeEndian.AppendUint64(nil, id)), unix.O_PATH|unix.O_CLOEXEC)
	if err != nil {
		return ""
	}
	defer unix.Close(fd)
	target, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	rest, ok := strings.CutPrefix(target, g.config.CgroupRoot)
	if err != nil || !ok || strings.HasSuffix(rest, " (deleted)") {
		return ""
	}
	return path.Clean("/" + rest)
}

// maxWalk bounds how many directories one walk looks at.
const maxWalk = 50_000

// find looks for the directory of an id where the kernel cannot be asked: version 1, or a process without CAP_DAC_READ_SEARCH. The hierarchy
// is walked once a second at most.
func (g *groups) find(id uint64) string {
	if now := time.Now(); now.Sub(g.walkAt) >= time.Second {
		g.walkAt, g.walked = now, map[uint64]string{}
		root := g.root()
		_ = filepath.WalkDir(root+"/", func(path string, entry fs.DirEntry, err error) error {
			if err != nil || !entry.IsDir() {
				return nil // a group that went meanwhile
			}
			if info, err := entry.Info(); err == nil && len(g.walked) < maxWalk {
				g.walked[info.Sys().(*syscall.Stat_t).Ino] = cmp.Or(strings.TrimPrefix(path, root), "/")
			}
			return nil
		})
	}
	return g.walked[id]
}

// root is the hierarchy that tells groups apart.
func (g *groups) root() string {
	if g.config.cgroupV1 {
		return g.config.CgroupRoot + "/" + g.config.controller
	}
	return g.config.CgroupRoot
}

// alive tells whether a group still exists.
func (g *groups) alive(id uint64, path string) bool {
	if strings.HasPrefix(path, "/") && g.inode(path) == id {
		return true
	}
	return g.byHandle(id) != "" || g.find(id) != ""
}

// id finds the id of the group that a process is in, for a process that was there before the tracer: the inode of its directory.
func (g *groups) id(pid int) uint64 {
	text, err := readFile(fmt.Sprintf("%s/%d/cgroup", g.config.ProcRoot, pid))
	if err != nil {
		return 0
	}
	for l := range strings.Lines(text) {
		parts := strings.SplitN(strings.TrimSpace(l), ":", 3)
		if len(parts) == 3 && (g.config.cgroupV1 && slices.Contains(strings.Split(parts[1], ","), g.config.controller) || !g.config.cgroupV1 && parts[0] == "0") {
			return g.inode(parts[2])
		}
	}
	return 0
}

func (g *groups) inode(path string) uint64 {
	var st unix.Stat_t
	if unix.Stat(g.root()+path, &st) != nil {
		return 0
	}
	return st.Ino
}

// read adds up the kernel side's counters by path, with what user space knows, and drops the groups that have been gone for long. used
// tells whether a process of a group still holds a device.
func (g *groups) read(now time.Time, used func(id uint64) bool) ([]activity.Group, error) {
	byID, err := g.kernelCounts()
	if err != nil {
		return nil, err
	}
	gone := map[uint64]bool{}
	for id, c := range byID {
		known := g.byID[id]
		if known == nil {
			g.see(id, "", "") // its first event was lost
			if known = g.byID[id]; known == nil {
				known = &group{}
			}
		}
		if g.age(id, known, c, now, used) {
			gone[id] = true
		}
	}
	if len(gone) > 0 {
		g.forget(gone)
	}
	all := map[string]*counts{} // by path
	for id, c := range byID {
		known := g.byID[id]
		if known == nil {
			continue
		}
		if sum := all[known.path]; sum != nil {
			sum.add(c)
		} else {
			all[known.path] = c
		}
	}
	for path, c := range g.extra {
		if sum := all[path]; sum != nil {
			sum.add(c)
		} else {
			delete(g.extra, path)
		}
	}
	report := make([]activity.Group, 0, len(all))
	for path, c := range all {
		if c.any() {
			report = append(report, c.report(path))
		}
	}
	slices.SortFunc(report, func(a, b activity.Group) int { return cmp.Compare(a.Cgroup, b.Cgroup) })
	return report, nil
}

// age looks whether a group is gone, and drops it after the linger time: then it tells so, and the group's counters are to be forgotten. Where a
// younger group has the same path, they live on in that one: a counter must not fall.
func (g *groups) age(id uint64, known *group, c *counts, now time.Time, used func(id uint64) bool) bool {
	switch {
	case used(id) || g.alive(id, known.path):
		known.gone = time.Time{}
		return false
	case known.gone.IsZero():
		known.gone = now
	}
	if now.Sub(known.gone) < g.config.Linger {
		return false
	}
	for other, o := range g.byID {
		if other != id && o.path == known.path {
			g.more(known.path).add(c)
			break
		}
	}
	delete(g.byID, id)
	return true
}

// more returns the counters of a path that only user space has.
func (g *groups) more(path string) *counts {
	if g.extra[path] == nil {
		if len(g.extra) >= maxGroups {
			return &counts{}
		}
		g.extra[path] = &counts{}
	}
	return g.extra[path]
}

func (g *groups) kernelCounts() (map[uint64]*counts, error) {
	byID := map[uint64]*counts{}
	at := func(id uint64) *counts {
		if byID[id] == nil {
			byID[id] = &counts{}
		}
		return byID[id]
	}
	err := errors.Join(
		g.started.Each(func(id uint64, v *bpfGroupCount) {
			c := at(id)
			c.started = v.Started
			for reason, n := range map[string]uint64{"exit": v.Exited, "error": v.Failed, "signal": v.Killed} {
				if n > 0 {
					add(&c.exited, reason, n)
				}
			}
		}),
		g.opens.Each(func(k bpfOpenKey, v *bpfOpenCount) {
			add(&at(k.Group).opens, openKey{nodeName(k.Node), abi.ErrnoName(k.Result)}, v.Count)
		}),
		g.calls.Each(func(k bpfCallKey, v *bpfCallCount) {
			s := at(k.Group).call(abi.CallName(nodeName(k.Node), k.Nr))
			s.count += v.Count
			s.ns += v.Ns
			for i, n := range v.Buckets {
				s.buckets[i] += n
			}
		}),
		g.errors.Each(func(k bpfErrorKey, v *uint64) {
			add(&at(k.Group).call(abi.CallName(nodeName(k.Node), k.Nr)).errors, abi.StatusName(k.Status), *v)
		}),
	)
	return byID, err
}

// lose returns the groups that lost records since it was called last, beside those that known puts down to a process with drop. Of a process that is
// gone nobody knows any more what it dropped but its group.
func (g *groups) lose(now int64, known func()) map[uint64]bool {
	counts := map[uint64]loss{}
	_ = g.started.Each(func(id uint64, v *bpfGroupCount) { // what could not be read is seen the next time
		if v.Lost > 0 || v.Dropped > 0 {
			counts[id] = loss{v.Lost, v.Dropped, now}
		}
	})
	known() // reads what is no less than the sums of before
	more := map[uint64]bool{}
	for id, l := range counts {
		if was := g.lost[id]; l.records > was.records || l.dropped > was.dropped {
			l.dropped = max(l.dropped, was.dropped)
			g.lost[id] = l
			more[id] = true
		}
	}
	return more
}

// drop notes whose records of a group were dropped.
func (g *groups) drop(id, n uint64) {
	l := g.lost[id]
	l.dropped += n
	g.lost[id] = l
}

// forget deletes the counters of groups. Nobody adds to them any more: the groups have no processes.
func (g *groups) forget(ids map[uint64]bool) {
	g.opens.Drop(func(k bpfOpenKey) bool { return ids[k.Group] })
	g.calls.Drop(func(k bpfCallKey) bool { return ids[k.Group] })
	g.errors.Drop(func(k bpfErrorKey) bool { return ids[k.Group] })
	g.started.Drop(func(id uint64) bool { return ids[id] })
	for id := range ids {
		delete(g.lost, id)
	}
}

// hierarchy tells whether the host's controllers are mounted in version 1, and which one the kernel lists first.
func hierarchy(procRoot string) (v1 bool, controller string) {
	text, _ := readFile(procRoot + "/self/cgroup") // unreadable: version 2
	v1Controllers := map[string]bool{}
	for l := range strings.Lines(text) {
		parts := strings.SplitN(strings.TrimSpace(l), ":", 3)
		if len(parts) != 3 || parts[0] == "0" || strings.HasPrefix(parts[1], "name=") {
			continue
		}
		for name := range strings.SplitSeq(parts[1], ",") {
			v1Controllers[name] = true
		}
	}
	// The kernel's own order of controllers.
	for _, name := range []string{"cpuset", "cpu", "cpuacct", "blkio", "memory", "devices", "freezer"} {
		if v1Controllers[name] {
			return true, name
		}
	}
	return false, ""
}
