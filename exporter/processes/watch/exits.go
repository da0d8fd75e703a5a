package watch

import (
	"errors"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// maxWatched bounds the file descriptors that are held to notice exits. Processes beyond it are noticed at the next tick.
const maxWatched = 2048

// exits notices the end of processes: one pidfd each (Linux 5.3), all in one epoll set, which the Go runtime polls. Where the
// kernel has no pidfd, nothing is ever noticed and the ticks must do.
type exits struct {
	ended chan struct{} // gets a value when one or more processes ended

	epoll *os.File
	done  sync.WaitGroup

	mu  sync.Mutex
	fds map[int]int // pidfd by PID
}

func newExits(c Config) *exits {
	e := &exits{ended: make(chan struct{}, 1), fds: map[int]int{}}
	if c.PIDsForeign {
		return e
	}
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return e
	}
	if err := unix.SetNonblock(fd, true); err != nil { // so that os.NewFile gives it to the runtime's poller
		unix.Close(fd)
		return e
	}
	e.epoll = os.NewFile(uintptr(fd), "epoll of pidfds")
	e.done.Add(1)
	go e.wait()
	return e
}

// wait turns the ends of processes into values of ended, until the epoll file is closed.
func (e *exits) wait() {
	defer e.done.Done()
	raw, err := e.epoll.SyscallConn()
	if err != nil {
		return
	}
	events := make([]unix.EpollEvent, 64)
	for {
		n := 0
		err := raw.Read(func(fd uintptr) bool {
			var err error
			n, err = unix.EpollWait(int(fd), events, 0)
			return err == nil && n > 0
		})
		if err != nil {
			return
		}
		e.mu.Lock()
		for _, ev := range events[:n] {
			if pid := int(ev.Pad); e.fds[pid] == int(ev.Fd) {
				e.dropLocked(pid) // a pidfd stays readable: it must leave the set
			}
		}
		e.mu.Unlock()
		select {
		case e.ended <- struct{}{}:
		default:
		}
	}
}

// watch starts to watch a process, if it is not being watched.
func (e *exits) watch(pid int) {
	if e.epoll == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if _, ok := e.fds[pid]; ok || len(e.fds) >= maxWatched {
		return
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return // gone already, or no pidfd here
	}
	raw, err := e.epoll.SyscallConn()
	if err == nil {
		var addErr error
		err = raw.Control(func(epfd uintptr) {
			// Fd and Pad are the two halves of the 64 bits that the kernel hands back.
			addErr = unix.EpollCtl(int(epfd), unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd), Pad: int32(pid)})
		})
		err = errors.Join(err, addErr)
	}
	if err != nil {
		unix.Close(fd)
		return
	}
	e.fds[pid] = fd
}

// drop stops watching a process.
func (e *exits) drop(pid int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.dropLocked(pid)
}

// dropLocked closes a pidfd, by which it leaves the epoll set.
func (e *exits) dropLocked(pid int) {
	if fd, ok := e.fds[pid]; ok {
		unix.Close(fd)
		delete(e.fds, pid)
	}
}

// keep stops watching every process that keep does not name.
func (e *exits) keep(keep func(pid int) bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for pid := range e.fds {
		if !keep(pid) {
			e.dropLocked(pid)
		}
	}
}

func (e *exits) close() {
	if e.epoll != nil {
		e.epoll.Close()
		e.done.Wait()
	}
	e.keep(func(int) bool { return false })
}
