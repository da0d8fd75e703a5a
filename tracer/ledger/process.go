package ledger

import "time"

// process is one process with the driver's clients that it made.
type process struct {
	pid      int32
	start    uint64
	inexact  bool
	clients  map[uint32]*client
	accounts map[UUID]*account
	uuids    map[UUID]bool  // registered with UVM
	minors   map[int32]bool // nvidiaN opened
	failures map[int32]failing
}

// failing is the last failed request of one thread.
type failing struct {
	client, parent, handle uint32
	size                   uint64
	time                   int64
	seq                    uint64
	attempts               int
}

// process returns the process of an event, made if it is new. A later start time under the same pid is a new process.
func (l *Ledger) process(e *Event) *process {
	p := l.processes[e.PID]
	if p != nil && e.Start != 0 {
		if p.start == 0 {
			p.start = e.Start
		} else if e.Start > p.start {
			l.remove(p)
			p = nil
		}
	}
	if p == nil {
		p = &process{
			pid: e.PID, start: e.Start,
			clients: map[uint32]*client{}, accounts: map[UUID]*account{},
			uuids: map[UUID]bool{}, minors: map[int32]bool{},
		}
		l.processes[e.PID] = p
	}
	return p
}

// remove forgets a process and all that it held.
func (l *Ledger) remove(p *process) {
	for _, c := range p.clients {
		l.removeClient(c)
	}
	delete(l.processes, p.pid)
}

// account is what one process holds on one GPU, with the steps that its trailing peak needs.
type account struct {
	used  uint64
	steps []step // values that were left, falling, oldest first
}

// step is a value that was held until a moment.
type step struct {
	until int64
	value uint64
}

// peakSteps is into how many parts the window is cut: a peak may count up to 1/peakSteps of the window too long.
const peakSteps = 64

// set changes the value at time now.
func (a *account) set(value uint64, now int64, window time.Duration) {
	old := a.used
	a.used = value
	if value >= old {
		return // a value left upwards is never a peak
	}
	for n := len(a.steps); n > 0 && a.steps[n-1].value <= old; n = len(a.steps) {
		a.steps = a.steps[:n-1]
	}
	oldest := now - int64(window)
	drop := 0
	for drop < len(a.steps) && a.steps[drop].until < oldest {
		drop++
	}
	if drop > 0 {
		a.steps = append(a.steps[:0], a.steps[drop:]...)
	}
	// A step that ends in the same part of the window as the one before, which is higher, prolongs that one.
	if n := len(a.steps); n > 0 && now-a.steps[n-1].until < int64(window)/peakSteps && n >= peakSteps {
		a.steps[n-1].until = now
		return
	}
	a.steps = append(a.steps, step{until: now, value: old})
}

// peak returns the highest value held in the window that ends now.
func (a *account) peak(now int64, window time.Duration) uint64 {
	oldest := now - int64(window)
	for _, s := range a.steps {
		if s.until >= oldest {
			return max(s.value, a.used)
		}
	}
	return a.used
}

// add books bytes of a process on a GPU.
func (l *Ledger) add(p *process, gpu UUID, bytes uint64) {
	if bytes == 0 {
		return
	}
	a := p.accounts[gpu]
	if a == nil {
		a = &account{}
		p.accounts[gpu] = a
	}
	a.set(a.used+bytes, l.now, l.config.Window)
}

// sub takes bytes back.
func (l *Ledger) sub(p *process, gpu UUID, bytes uint64) {
	if a := p.accounts[gpu]; a != nil && bytes > 0 {
		a.set(a.used-min(bytes, a.used), l.now, l.config.Window)
	}
}

// move books what a device's objects hold from one GPU to another, with the past peak, because it had been there all along.
func (l *Ledger) move(p *process, from, to UUID, bytes uint64) {
	if from == to || bytes == 0 {
		return
	}
	a := p.accounts[from]
	if a == nil {
		return
	}
	if p.accounts[to] == nil && a.used == bytes {
		p.accounts[to] = a
		delete(p.accounts, from)
		return
	}
	a.used -= min(bytes, a.used)
	if a.used == 0 && from == (UUID{}) {
		delete(p.accounts, from)
	}
	l.add(p, to, bytes)
}
