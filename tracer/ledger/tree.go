package ledger

import "slices"

// client is a root client of the driver.
type client struct {
	handle  uint32
	owner   *process
	file    uint64
	objects map[uint32]*object
	root    object // stands for the client itself, and for the device of memory whose device is not known
	uuids   []UUID // GPUs that UVM was told of with this client
}

// object is a node of a client's tree. Siblings form a doubly linked list.
type object struct {
	handle        uint32
	kind          Kind // None: only known as the parent of another
	strength      strength
	late          bool // took the place of a living object: a free that began before made is that one's
	parent, child *object
	next, prev    *object
	device        *object // the device (or the client's root) that the bytes are booked under
	size          uint64  // bytes of memory, counted; on a device: the sum below it
	made          int64   // when the call that made it was complete
	gpu           UUID    // of a device
	instance      uint32  // of a device
	shared        *shared // memory that has dups, and its dups; nil: none
}

// shared is memory under several handles. The driver counts it with whoever made it and, when that handle is gone, with a dup that is left: on an
// H200, memory that was mapped over CUDA IPC moved to the process that had mapped it when its maker was killed, and was gone with the mapping.
type shared struct {
	first *object   // the one that counts
	dups  []*object // oldest first; one whose shared is another is gone
	live  int
}

// join makes dup another handle of memory.
func (s *shared) join(dup *object) {
	if len(s.dups) > 2*s.live+16 { // a mapping made and closed for ever leaves nothing behind
		s.dups = slices.DeleteFunc(s.dups, func(o *object) bool { return o.shared != s })
	}
	s.dups = append(s.dups, dup)
	s.live++
	dup.shared = s
}

// heir returns the oldest dup that is left, which is one no more; nil if none is.
func (s *shared) heir() *object {
	for len(s.dups) > 0 {
		o := s.dups[0]
		s.dups = s.dups[1:]
		if o.shared == s {
			s.live--
			return o
		}
	}
	return nil
}

// strength says how sure it is which GPU a device object is.
type strength uint8

const (
	unknown  strength = iota
	minor             // the only /dev/nvidiaN that the process opened
	onlyGPU           // the only GPU that the process registered with UVM
	instance          // device instance, translated by a call that the process made
	ofClient          // the only GPU registered with UVM through this client
	vaspace           // an address space below the device was registered with UVM
)

// addClient books a new root client. A living client of the same handle must have gone unseen.
func (l *Ledger) addClient(p *process, e *Event) {
	if old := l.clients[e.Handle]; old != nil {
		if old.owner != p {
			l.doubt(old.owner) // or p's word is not true
		}
		l.removeClient(old)
	}
	if !l.room(p) {
		return
	}
	l.newClient(p, e.Handle, e.File)
}

func (l *Ledger) newClient(p *process, handle uint32, file uint64) *client {
	c := &client{handle: handle, owner: p, file: file, objects: map[uint32]*object{}}
	c.root = object{handle: handle, kind: Client}
	c.root.device = &c.root
	l.clients[handle] = c
	p.clients[handle] = c
	l.objects++
	return c
}

// room tells whether one more object may be kept; if not, the process is no longer exact.
func (l *Ledger) room(p *process) bool {
	if l.objects < l.config.MaxObjects {
		return true
	}
	l.dropped++
	l.doubt(p)
	return false
}

// client returns the client of an event. One that was never seen to be made belongs to the caller, who is then not exact.
func (l *Ledger) client(p *process, e *Event) *client {
	if c := l.clients[e.Client]; c != nil {
		if l.foreign(p, c, e) {
			return nil
		}
		return c
	}
	l.doubt(p)
	if !l.room(p) {
		return nil
	}
	return l.newClient(p, e.Client, 0)
}

// foreign tells whether a process says that it did something with a client of another one: the driver lets nobody use a client but through the
// file that it was made with. What the caller's memory says is then not what the driver did, and it is the caller who is not exact.
func (l *Ledger) foreign(p *process, c *client, e *Event) bool {
	if c.owner == p || c.file == 0 || e.File == 0 || c.file == e.File {
		return false
	}
	l.doubt(p)
	return true
}

func (l *Ledger) removeClient(c *client) {
	for c.root.child != nil {
		l.removeTree(c, c.root.child)
	}
	if c.root.size > 0 { // nothing is left below, so this cannot be; never leave bytes behind
		l.sub(c.owner, c.root.gpu, c.root.size)
	}
	delete(l.clients, c.handle)
	delete(c.owner.clients, c.handle)
	l.objects--
}

// removeTree forgets an object and all below it. Without recursion: a hostile tree may be as deep as it is large.
func (l *Ledger) removeTree(c *client, top *object) {
	for o := top; ; {
		for o.child != nil {
			o = o.child
		}
		parent := o.parent
		l.removeLeaf(c, o)
		if o == top {
			return
		}
		o = parent
	}
}

func (l *Ledger) removeLeaf(c *client, o *object) {
	if o.kind == Memory {
		o.device.size -= o.size
		l.sub(c.owner, o.device.gpu, o.size)
	}
	unlink(o)
	delete(c.objects, o.handle)
	l.objects--
	if s := o.shared; s != nil {
		o.shared = nil
		if o.kind == Dup {
			s.live--
		} else if heir := s.heir(); heir != nil {
			s.first = heir
			heir.kind, heir.size = Memory, o.size
			heir.device.size += heir.size
			owner := l.clientOf(heir).owner
			l.add(owner, heir.device.gpu, heir.size)
			if l.doubted {
				l.doubt(owner) // the memory may have an older handle, that was not seen to be made
			}
		}
	}
}

// clientOf returns the client in whose tree an object is. A device lies directly below its client.
func (l *Ledger) clientOf(o *object) *client {
	root := o.device
	if root.parent != nil {
		root = root.parent
	}
	return l.clients[root.handle]
}

func unlink(o *object) {
	if o.prev != nil {
		o.prev.next = o.next
	} else {
		o.parent.child = o.next
	}
	if o.next != nil {
		o.next.prev = o.prev
	}
	o.next, o.prev = nil, nil
}

func link(parent, o *object) {
	o.parent = parent
	o.next = parent.child
	if o.next != nil {
		o.next.prev = o
	}
	parent.child = o
}

// insert adds an object below its parent, which is made if it is not known.
func (l *Ledger) insert(p *process, e *Event) *object {
	if e.Handle == 0 || e.Handle == e.Client {
		l.doubt(p)
		return nil
	}
	c := l.client(p, e)
	if c == nil {
		return nil
	}
	parent := &c.root
	if e.Parent != e.Client && e.Parent != 0 && e.Parent != e.Handle {
		if parent = c.objects[e.Parent]; parent == nil {
			// Its own parent is not known: an object of a class that is not followed. Freeing it must still free what is below.
			if !l.room(c.owner) {
				return nil
			}
			parent = &object{handle: e.Parent, device: &c.root}
			link(&c.root, parent)
			c.objects[e.Parent] = parent
			l.objects++
		}
	}
	late := false
	if old := c.objects[e.Handle]; old != nil {
		if old.kind == None && e.Kind != Memory {
			// The parent of something seen before: two threads, or an event that came late.
			if !below(parent, old) {
				unlink(old)
				link(parent, old)
				l.rebook(c, old, parent.device)
			}
			return old
		}
		if below(parent, old) {
			l.doubt(c.owner)
			return nil
		}
		l.removeTree(c, old)
		late = true
	}
	if !l.room(c.owner) {
		return nil
	}
	o := &object{handle: e.Handle, kind: e.Kind, made: e.Time, late: late, device: parent.device}
	link(parent, o)
	c.objects[e.Handle] = o
	l.objects++
	return o
}

// below tells whether o is top or lies below it.
func below(o, top *object) bool {
	for ; o != nil; o = o.parent {
		if o == top {
			return true
		}
	}
	return false
}

// object books an object that is not memory.
func (l *Ledger) object(p *process, e *Event) {
	if !Succeeded(e.Status) {
		return
	}
	if e.Kind == Device {
		e.Parent = e.Client // the driver allows nothing else; place relies on it
	}
	o := l.insert(p, e)
	if o == nil {
		return
	}
	o.kind = e.Kind
	if e.Kind == Dup {
		l.dup(l.clients[e.Client].owner, o, e)
		return
	}
	if e.Kind == Device {
		o.instance = e.Instance
		l.rebook(l.clients[e.Client], o, o)
		l.placeDevice(l.clients[e.Client], o)
	}
}

// dup makes o, a process's, another handle of memory. It holds no bytes of its own, in the driver's accounting too, while the memory's first handle lives.
func (l *Ledger) dup(p *process, o *object, e *Event) {
	c := l.clients[e.SrcClient]
	if c == nil || c.owner.inexact {
		l.doubt(p) // of a process of which calls were not seen: whether its bytes become p's cannot be told
	}
	if c == nil {
		return
	}
	source := c.objects[e.SrcHandle]
	if source == nil && c.owner != p {
		l.doubt(p) // perhaps memory that was not seen to be made
	}
	if source == nil || source == o || source.kind != Memory && (source.kind != Dup || source.shared == nil) {
		return
	}
	if source.shared == nil {
		source.shared = &shared{first: source}
	}
	s := source.shared
	s.join(o)
	doubtful := func(older *object) bool { return older.shared == s && l.clientOf(older).owner.inexact }
	if doubtful(s.first) || slices.ContainsFunc(s.dups, doubtful) {
		l.doubt(p)
	}
}

// doubt makes a process inexact, and all that will have its memory when it is gone: if it gave that back unseen, they have it now.
func (l *Ledger) doubt(p *process) {
	if p.inexact {
		return
	}
	p.inexact, l.doubted = true, true
	for doubtful := []*process{p}; len(doubtful) > 0; {
		p, doubtful = doubtful[0], doubtful[1:]
		for _, c := range p.clients {
			for _, o := range c.objects {
				s := o.shared
				if s == nil {
					continue
				}
				for _, younger := range s.dups[slices.Index(s.dups, o)+1:] { // all, of the first handle
					if younger.shared != s {
						continue // gone
					}
					if q := l.clientOf(younger).owner; !q.inexact {
						q.inexact = true
						doubtful = append(doubtful, q)
					}
				}
			}
		}
	}
}

// rebook makes device the one that everything from o downwards is booked under. There is no other device below o.
func (l *Ledger) rebook(c *client, o, device *object) {
	old := o.device
	if old == device {
		return
	}
	var moved uint64
	for n := o; n != nil; n = following(n, o) {
		if n.kind == Memory {
			moved += n.size
		}
		n.device = device
	}
	old.size -= moved
	device.size += moved
	l.move(c.owner, old.gpu, device.gpu, moved)
}

// following returns the node after n in a walk of the tree below top, parents first.
func following(n, top *object) *object {
	if n.child != nil {
		return n.child
	}
	for n != top {
		if n.next != nil {
			return n.next
		}
		n = n.parent
	}
	return nil
}

// memory books a VRAM request.
func (l *Ledger) memory(p *process, e *Event) (Failure, bool) {
	if !Succeeded(e.Status) {
		if e.Status != StatusNoMemory {
			return Failure{}, false
		}
		return l.failure(p, e)
	}
	if p.failures != nil {
		delete(p.failures, e.TID)
	}
	if e.Size > maxSize {
		l.doubt(p) // no GPU has it: the size was not read right
		return Failure{}, false
	}
	if o := l.insert(p, e); o != nil {
		o.size = e.Size
		o.device.size += e.Size
		l.add(l.clients[e.Client].owner, o.device.gpu, e.Size)
	}
	return Failure{}, false
}

// maxSize is more than any GPU has; sums of MaxObjects sizes must not overflow.
const maxSize = 1 << 44

// free drops an object and all below it. The handle may belong to an object of a class that is not followed.
func (l *Ledger) free(p *process, e *Event) {
	if !Succeeded(e.Status) {
		return
	}
	c := l.clients[e.Client]
	if e.Client == 0 {
		c = l.clients[e.Handle]
	}
	if c == nil || l.foreign(p, c, e) {
		return
	}
	if e.Handle == c.handle {
		l.removeClient(c)
		return
	}
	o := c.objects[e.Handle]
	if o == nil {
		return
	}
	if o.late && e.Entry != 0 && e.Entry < o.made {
		o.late = false // this frees the object that had the handle before
		return
	}
	l.removeTree(c, o)
}

// closeFile drops the clients that were made through a control file.
func (l *Ledger) closeFile(e *Event) {
	if e.File == 0 {
		return
	}
	for _, c := range l.clients {
		if c.file == e.File {
			l.removeClient(c)
		}
	}
}

// The driver tries a VRAM request that does not fit four times: same thread, same handle and size, back to back (0.06 to 0.11 ms apart on
// an H200), with no other call of the thread between. After the last one it asks for the free memory. A program that tries again
// starts with calls of its own (when Seq tells), or after more than retryGap, or makes a fifth attempt. Where Seq tells, the gap may be longer: a
// process that its container's CPU quota stops between two attempts is stopped for up to 100 ms.
const (
	retryAttempts = 4
	retryGap      = 5_000_000   // ns
	retryGapSeq   = 500_000_000 // ns
	maxFailing    = 1024        // threads of one process
)

// failure folds the driver's retries.
func (l *Ledger) failure(p *process, e *Event) (Failure, bool) {
	entry := e.Entry
	if entry == 0 {
		entry = e.Time
	}
	last, known := p.failures[e.TID]
	this := failing{client: e.Client, parent: e.Parent, handle: e.Handle, size: e.Size, time: e.Time, seq: e.Seq, attempts: 1}
	next, gap := last.seq == 0 || this.seq == 0, int64(retryGap)
	if !next {
		next, gap = this.seq == last.seq+1, retryGapSeq
	}
	retry := known && last.attempts < retryAttempts && next && entry-last.time < gap &&
		last.client == this.client && last.parent == this.parent && last.handle == this.handle && last.size == this.size
	if retry {
		this.attempts = last.attempts + 1
	}
	if p.failures == nil || len(p.failures) >= maxFailing {
		p.failures = map[int32]failing{}
	}
	p.failures[e.TID] = this
	if retry {
		return Failure{}, false
	}
	failure := Failure{PID: p.pid, Size: e.Size}
	if c := l.clients[e.Client]; c != nil {
		if o := c.objects[e.Parent]; o != nil {
			failure.GPU = o.device.gpu
		} else {
			failure.GPU = c.root.gpu
		}
	}
	return failure, true
}
