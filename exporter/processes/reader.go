package processes

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"gpu-exporter/exporter/containers"
)

// ErrGone is returned for a process that does not exist, or no longer does (a zombie included).
var ErrGone = errors.New("no such process")

// ErrHidden is returned for a process that exists but that /proc does not show (mount option hidepid).
var ErrHidden = errors.New("process hidden by /proc")

// ErrLeftOut is returned for a process of which Reader.Enter left out a file that is needed.
var ErrLeftOut = errors.New("file left out")

const (
	maxCommand = 80 // characters of Command
	maxComm    = 64 // characters of Comm; the kernel has 15 bytes, kernel threads more

	// ticksPerSecond is the unit of the times in /proc/<pid>/stat: USER_HZ, 100 on every architecture that has NVIDIA drivers.
	ticksPerSecond = 100

	// refreshEvery is the number of reads after which a cached command line and control group are read again, for the rare
	// process that executes another program of the same name, or is moved to another group.
	refreshEvery = 30
)

// Reader reads processes below a /proc directory. What does not change in the life of a process is read once per {pid, start
// time}. A Reader is for one goroutine at a time.
type Reader struct {
	Root string // default "/proc"
	// Enter, when set, is told of every file before it is opened, and returns false to leave it out.
	Enter func(pid int, name string) bool

	cache map[int]*cached
	buf   []byte
	path  []byte
}

type cached struct {
	p     Process
	raw   string // comm as in stat, before cleaning: another one means exec
	reads int
}

// Read returns what /proc says about a process: ErrGone, ErrHidden, or the error of the file system.
func (r *Reader) Read(pid int) (Process, error) {
	if pid <= 0 {
		return Process{}, ErrGone
	}
	data, err := r.file(pid, "stat")
	if err != nil {
		delete(r.cache, pid)
		return Process{}, r.readError(pid, err)
	}
	s, err := parseStat(data)
	if err != nil {
		delete(r.cache, pid)
		return Process{}, fmt.Errorf("reading stat of process %d: %w", pid, err)
	}
	if s.gone() {
		delete(r.cache, pid)
		return Process{}, ErrGone
	}
	c := r.cache[pid]
	// An empty command line is that of a process in the middle of exec, as a rule: it is asked for again.
	if c == nil || c.p.StartTime != s.start || c.raw != string(s.comm) || c.reads >= refreshEvery || c.p.Command == "" {
		if c, err = r.fill(pid, s); err != nil {
			delete(r.cache, pid)
			return Process{}, r.readError(pid, err)
		}
		if r.cache == nil {
			r.cache = map[int]*cached{}
		}
		r.cache[pid] = c
	}
	c.reads++
	c.p.CPUSeconds = float64(s.utime+s.stime) / ticksPerSecond
	return c.p, nil
}

// StartTime returns the start time of a process in clock ticks after boot, or ErrGone, ErrHidden, or the error of the file system.
func StartTime(root string, pid int) (uint64, error) {
	r := Reader{Root: root, buf: make([]byte, 1024)}
	data, err := r.file(pid, "stat")
	if err != nil {
		return 0, r.readError(pid, err)
	}
	s, err := parseStat(data)
	if err != nil {
		return 0, fmt.Errorf("reading stat of process %d: %w", pid, err)
	}
	if s.gone() {
		return 0, ErrGone
	}
	return s.start, nil
}

// fill reads what is kept of a process. s is only valid until the next file is read.
func (r *Reader) fill(pid int, s stat) (*cached, error) {
	c := &cached{raw: string(s.comm), p: Process{PID: pid, StartTime: s.start}}
	c.p.Comm = containers.Clean(c.raw, maxComm)
	c.p.CPUSeconds = float64(s.utime+s.stime) / ticksPerSecond
	cgroup, err := r.file(pid, "cgroup")
	switch {
	case err == nil:
		text, known := r.living(pid, s.start, string(cgroup))
		if !known { // what was known of it before it began to exit is still true
			if old := r.cache[pid]; old != nil && old.p.StartTime == s.start {
				c.p.Cgroup, c.p.Container = old.p.Cgroup, old.p.Container
			}
			break
		}
		c.p.Cgroup = containers.CgroupPath(text)
		c.p.Container = containers.FromCgroup(text)
	case errors.Is(err, fs.ErrNotExist) && r.exists(pid): // a kernel without control groups
	default:
		return nil, err
	}
	// The command line of another user's process is readable to all; where it is not, the rest still counts.
	if command, err := r.file(pid, "cmdline"); err == nil {
		c.p.Command = parseCommand(command)
	} else if gone(err) {
		return nil, err
	}
	return c, nil
}

// maxThreads bounds how many threads are asked for the control group of a process whose leader has ended.
const maxThreads = 16

// living returns the control groups of a process, given what /proc says of its leader. In the hierarchies of version 1 the kernel shows one that
// has begun to exit at the root, and that lasts: as long as the driver frees what the process holds, or as long as its other threads run. Then a
// living thread tells, else it is not known.
func (r *Reader) living(pid int, start uint64, text string) (string, bool) {
	// Version 2 alone is told to the end, and a container is not the root. Whether the process exits is asked after its groups were read.
	if strings.HasPrefix(text, "0::") || containers.FromCgroup(text) != "" || !r.exiting(pid, "stat", start) {
		return text, true
	}
	dir, err := os.Open(r.root() + "/" + strconv.Itoa(pid) + "/task")
	if err != nil {
		return "", false
	}
	defer dir.Close()
	threads, _ := dir.Readdirnames(maxThreads) // what was read before an error counts
	for _, thread := range threads {
		cgroup, err := r.file(pid, "task/"+thread+"/cgroup")
		if err != nil {
			continue
		}
		if text := string(cgroup); thread != strconv.Itoa(pid) && !r.exiting(pid, "task/"+thread+"/stat", 0) {
			return text, true
		}
	}
	return "", false
}

// exiting tells whether a process or thread has begun to exit, or is gone. start, when not 0, is its start time: another one under its number is
// another process.
func (r *Reader) exiting(pid int, name string, start uint64) bool {
	data, err := r.file(pid, name)
	if errors.Is(err, ErrLeftOut) {
		return false
	}
	s, parseErr := parseStat(data)
	return err != nil || parseErr != nil || s.flags&exitingFlag != 0 || start != 0 && s.start != start
}

// Forget drops what is cached of every process that keep does not name.
func (r *Reader) Forget(keep func(pid int) bool) {
	for pid := range r.cache {
		if !keep(pid) {
			delete(r.cache, pid)
		}
	}
}

func (r *Reader) root() string {
	if r.Root == "" {
		return "/proc"
	}
	return r.Root
}

func (r *Reader) exists(pid int) bool {
	_, err := os.Lstat(r.root() + "/" + strconv.Itoa(pid))
	return err == nil
}

// readError tells a process that is gone from one that is hidden.
func (r *Reader) readError(pid int, err error) error {
	switch {
	case errors.Is(err, unix.ESRCH):
		return ErrGone
	case errors.Is(err, fs.ErrNotExist):
		// With hidepid=2 a foreign process looks as if it did not exist. Signal 0 tells, in the host's own /proc only.
		if r.root() == "/proc" && errors.Is(unix.Kill(pid, 0), unix.EPERM) {
			return ErrHidden
		}
		return ErrGone
	case errors.Is(err, fs.ErrPermission):
		return ErrHidden
	}
	return err
}

func gone(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) }

// maxFile bounds what is read of one file: the longest that matters is a v1 cgroup file with deep paths.
const maxFile = 64 << 10

// file reads a file of a process into the reader's buffer, which the next call overwrites. It uses plain system calls: an os.File
// would cost an allocation and a finaliser per read.
func (r *Reader) file(pid int, name string) ([]byte, error) {
	if r.Enter != nil && !r.Enter(pid, name) {
		return nil, ErrLeftOut
	}
	r.path = append(r.path[:0], r.root()...)
	r.path = append(r.path, '/')
	r.path = strconv.AppendInt(r.path, int64(pid), 10)
	r.path = append(r.path, '/')
	r.path = append(r.path, name...)
	limit := maxFile
	if name == "cmdline" {
		limit = 4 * maxCommand // in bytes; more cannot make 80 characters
	}
	if len(r.buf) == 0 {
		r.buf = make([]byte, 4096)
	}
	fd, err := openRead(r.path)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	n := 0
	for {
		if n == len(r.buf) {
			r.buf = append(r.buf, make([]byte, len(r.buf))...)
		}
		end := min(len(r.buf), limit)
		m, err := unix.Read(fd, r.buf[n:end])
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, err
		}
		n += m
		// The kernel gives all of a stat that there is room for: to read on, only to see its end, would be a call more for each process.
		whole := name == "stat" && m > 0 && n < end && r.buf[n-1] == '\n'
		if m == 0 || n >= limit || whole {
			return r.buf[:n], nil
		}
	}
}

func openRead(path []byte) (int, error) {
	for {
		fd, err := unix.Open(string(path), unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
		if err != unix.EINTR {
			return fd, err
		}
	}
}

// stat is the part of /proc/<pid>/stat that is used.
type stat struct {
	comm         []byte // raw
	state        byte
	flags        uint64
	utime, stime uint64 // clock ticks
	threads      int64
	start        uint64 // clock ticks after boot
}

// exitingFlag is PF_EXITING of the kernel, in the flags of stat.
const exitingFlag = 0x4

// gone tells whether nothing of the process runs any more. A leader that is a zombie beside living threads is a process that
// called pthread_exit in main.
func (s stat) gone() bool {
	return s.state == 'X' || s.state == 'x' || s.state == 'Z' && s.threads <= 1
}

var errStat = errors.New("unknown form")

// parseStat reads a line of /proc/<pid>/stat without an allocation. The command may hold any byte, blanks and parentheses
// included: it ends at the last closing parenthesis.
func parseStat(data []byte) (stat, error) {
	var s stat
	open, end := -1, -1
	for i, c := range data {
		if c == '(' && open < 0 {
			open = i
		}
		if c == ')' {
			end = i
		}
	}
	if open < 0 || end < open {
		return s, errStat
	}
	s.comm = data[open+1 : end]
	rest := data[end+1:]
	// Field 3 is the first behind the command.
	for field := 3; field <= 22; field++ {
		for len(rest) > 0 && rest[0] == ' ' {
			rest = rest[1:]
		}
		i := 0
		for i < len(rest) && rest[i] != ' ' && rest[i] != '\n' {
			i++
		}
		word := rest[:i]
		rest = rest[i:]
		if len(word) == 0 {
			return s, errStat
		}
		var ok = true
		switch field {
		case 3:
			s.state, ok = word[0], len(word) == 1 && 'A' <= word[0]&^0x20 && word[0]&^0x20 <= 'Z'
		case 9:
			s.flags, ok = parseUint(word)
		case 14:
			s.utime, ok = parseUint(word)
		case 15:
			s.stime, ok = parseUint(word)
		case 20:
			var n uint64
			n, ok = parseUint(word)
			s.threads = int64(min(n, 1<<31))
		case 22:
			s.start, ok = parseUint(word)
		}
		if !ok {
			return s, errStat
		}
	}
	return s, nil
}

func parseUint(word []byte) (uint64, bool) {
	var n uint64
	for _, c := range word {
		if c < '0' || c > '9' || n > (1<<63)/10 {
			return 0, false
		}
		n = n*10 + uint64(c-'0')
	}
	return n, len(word) > 0
}

// parseCommand makes one line of the content of /proc/<pid>/cmdline: the arguments, which end in zero bytes, with blanks between.
func parseCommand(data []byte) string {
	text := strings.TrimRight(string(data), "\x00")
	return containers.Clean(strings.ReplaceAll(text, "\x00", " "), maxCommand)
}
