package watch

import (
	"errors"
	"fmt"
	"sync"

	"gpu-exporter/exporter/processes"
)

// file is one file of a process below /proc; the zero PID stands for the look at /proc as a whole.
type file struct {
	pid  int
	name string
}

func (f file) String() string {
	if f.pid == 0 {
		return "1/" + f.name
	}
	return fmt.Sprintf("%d/%s", f.pid, f.name)
}

// pass reads the wanted processes once, in a goroutine of its own: a file of a process that is stuck in the kernel, as in a driver that hangs,
// may never answer, its command line above all. Such a pass is left behind, and later ones avoid that file until it has returned.
type pass struct {
	reader *processes.Reader
	exits  *exits
	root   string
	want   []int
	look   bool // look at /proc as a whole, too
	avoid  map[file]bool

	// The results, to be read once done is closed.
	done   chan struct{}
	asked  []int // read, or no longer there
	list   []processes.Process
	hidden bool // some process is
	seen   processes.Visibility

	mu sync.Mutex
	at file // being read
}

func (p *pass) run() {
	defer close(p.done)
	p.reader.Enter = p.enter
	for _, pid := range p.want {
		// The exit watch comes first: what /proc then says is about the watched process, or a later one of the same PID.
		p.exits.watch(pid)
		read, err := p.reader.Read(pid)
		switch {
		case err == nil:
			p.list = append(p.list, read)
			p.asked = append(p.asked, pid)
		case errors.Is(err, processes.ErrGone):
			p.exits.drop(pid)
			p.asked = append(p.asked, pid)
		case errors.Is(err, processes.ErrHidden):
			p.hidden = true
		}
	}
	if p.look && p.enter(0, "stat") {
		p.seen = processes.Look(p.root)
	}
}

// enter notes which file is about to be opened, and says whether it may be.
func (p *pass) enter(pid int, name string) bool {
	f := file{pid, name}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.at = f
	return !p.avoid[f]
}

// stuck returns the file that the pass does not come back from.
func (p *pass) stuck() file {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.at
}
