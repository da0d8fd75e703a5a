package ledger

import "time"

// UUID is a GPU's UUID, raw, in printed order. The zero value is "not known which GPU".
type UUID [16]byte

// GPU ties the three names of one device together, as read from /proc/driver/nvidia/gpus/*/information.
type GPU struct {
	ID    uint32 // RM gpuId, computed from the PCI address: domain<<16 | bus<<8 | device
	Minor int32  // N of /dev/nvidia<N>
	UUID  UUID
}

// Config bounds a Ledger.
type Config struct {
	Window     time.Duration // of the trailing peak; default one minute
	MaxObjects int           // objects alive at once, all processes together; default one million
}

// Ledger is the state. Make it with New.
type Ledger struct {
	config    Config
	processes map[int32]*process
	clients   map[uint32]*client // client handles are unique on the host while alive
	instances map[uint32]uint32  // device instance -> gpuId; the same for the whole host
	byID      map[uint32]UUID
	byMinor   map[int32]UUID
	objects   int
	dropped   uint64
	lost      uint64
	anyLost   bool
	doubted   bool // of some process not every event was seen
	now       int64
}

// Failure is one VRAM request that failed, the driver's retries of it folded.
type Failure struct {
	PID  int32
	GPU  UUID   // zero if unknown
	Size uint64 // bytes asked for
}

// New returns an empty ledger.
func New(config Config) *Ledger {
	if config.Window <= 0 {
		config.Window = time.Minute
	}
	if config.MaxObjects <= 0 {
		config.MaxObjects = 1_000_000
	}
	return &Ledger{
		config:    config,
		processes: map[int32]*process{},
		clients:   map[uint32]*client{},
		instances: map[uint32]uint32{},
		byID:      map[uint32]UUID{},
		byMinor:   map[int32]UUID{},
	}
}

// SetGPUs tells which GPUs the host has. It may be called again when that changes; what could not be placed before is placed then.
func (l *Ledger) SetGPUs(gpus []GPU) {
	clear(l.byID)
	clear(l.byMinor)
	for _, gpu := range gpus {
		l.byID[gpu.ID] = gpu.UUID
		l.byMinor[gpu.Minor] = gpu.UUID
	}
	for _, p := range l.processes {
		l.place(p)
	}
}

// Apply takes one event. It returns a failure and true when the event is a VRAM request that failed and is no retry of the one before.
func (l *Ledger) Apply(e Event) (Failure, bool) {
	if e.Time > l.now {
		l.now = e.Time
	}
	e.Time = l.now
	if e.Kind == Lost && e.PID == 0 {
		l.loseAll()
		return Failure{}, false
	}
	if e.Kind == None || e.PID <= 0 {
		return Failure{}, false
	}
	if e.Kind == Exit || e.Kind == Exec || e.Kind == Fork {
		if p := l.processes[e.PID]; p != nil && (e.Start == 0 || p.start == 0 || e.Start >= p.start) {
			l.remove(p) // for Fork: a process of this number that was not seen to end
		}
		return Failure{}, false
	}
	p := l.process(&e)
	if e.Partial {
		l.doubt(p)
	}
	switch e.Kind {
	case Client:
		l.addClient(p, &e)
	case Memory:
		return l.memory(p, &e)
	case Device, Object, VASpace, Dup:
		l.object(p, &e)
	case Free:
		l.free(p, &e)
	case RegisterGPU:
		l.registerGPU(p, &e)
	case RegisterVAS:
		l.registerVASpace(p, &e)
	case Instance:
		if _, known := l.instances[e.Instance]; known || len(l.instances) < maxInstances {
			l.instances[e.Instance] = e.GPUID
		}
		l.place(p)
	case OpenGPU:
		if e.Minor >= 0 && len(p.minors) < maxGPUs {
			p.minors[e.Minor] = true
			l.place(p)
		}
	case Close:
		l.closeFile(&e)
	case Lost:
		l.lost++
		l.doubt(p)
	}
	return Failure{}, false
}

// Bounds on what one hostile process can make the ledger remember beside objects.
const (
	maxInstances = 1024
	maxGPUs      = 256
)

// Use is what one process holds on one GPU.
type Use struct {
	GPU  UUID   // zero: the events did not tell yet
	Used uint64 // bytes now
	Peak uint64 // highest value of Used in the trailing window
}

// Used returns the bytes that a process holds now on all GPUs together, and whether the figure is exact: the process seen from its
// beginning, none of its events lost. A process without objects holds 0.
func (l *Ledger) Used(pid int32) (bytes uint64, exact bool) {
	p := l.processes[pid]
	if p == nil {
		return 0, !l.anyLost
	}
	for _, a := range p.accounts {
		bytes += a.used
	}
	return bytes, !p.inexact
}

// Uses appends what a process holds, GPU by GPU, to buf and returns it, with whether it is exact. now is CLOCK_MONOTONIC ns and ends the
// window of the peak. A GPU on which the process held nothing within the window is left out.
func (l *Ledger) Uses(pid int32, now int64, buf []Use) (uses []Use, exact bool) {
	p := l.processes[pid]
	if p == nil {
		return buf, !l.anyLost
	}
	for gpu, a := range p.accounts {
		use := Use{GPU: gpu, Used: a.used, Peak: a.peak(now, l.config.Window)}
		if use.Peak > 0 {
			buf = append(buf, use)
		}
	}
	return buf, !p.inexact
}

// Processes appends the ids of all processes that the ledger knows to buf.
func (l *Ledger) Processes(buf []int32) []int32 {
	for pid := range l.processes {
		buf = append(buf, pid)
	}
	return buf
}

// Stats says how large the ledger is and what it could not do.
type Stats struct {
	Processes, Clients, Objects int
	Dropped                     uint64 // objects not taken because of Config.MaxObjects; their processes are inexact
	Lost                        uint64 // Lost events
}

// Stats returns the ledger's own figures.
func (l *Ledger) Stats() Stats {
	return Stats{Processes: len(l.processes), Clients: len(l.clients), Objects: l.objects, Dropped: l.dropped, Lost: l.lost}
}

func (l *Ledger) loseAll() {
	l.lost++
	l.anyLost, l.doubted = true, true
	for _, p := range l.processes {
		p.inexact = true
	}
}

// Held returns the bytes of an object and of all below it: what freeing it would give back.
func (l *Ledger) Held(clientHandle, handle uint32) (bytes uint64) {
	c := l.clients[clientHandle]
	if c == nil {
		return 0
	}
	top := c.objects[handle]
	if handle == clientHandle {
		top = &c.root
	}
	for o := top; o != nil; o = following(o, top) {
		if o.kind == Memory {
			bytes += o.size
		}
	}
	return bytes
}
