package poller

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"gpu-exporter/nvml"
	"gpu-exporter/nvml/beat"
	"gpu-exporter/nvml/frame"
)

// device reads one GPU. What is not under mu belongs to its goroutine.
type device struct {
	p     *poller
	index int
	lib   *nvml.Library // with hooks of this device's own
	dev   *nvml.Device  // nil: not open
	uuid  string
	busID string // as in sysfs; "" until known

	nextOpen time.Time
	down     frame.State // why dev is nil
	why      string

	processAt, utilAt, powerAt, energyAt, healthAt, gpmAt, infoAt, callsAt time.Time

	refused map[string]time.Time // calls to leave alone, and until when
	failed  error                // this tick: an error that concerns the whole device
	first   error                // this tick: the first error of any call
	good    int                  // this tick: calls that worked

	calls   callStats
	rings   rings
	gpm     gpmReader
	fast    *fastGPM
	pcie    pcieReader
	mig     []migDevice
	migOn   bool
	procs   []nvml.ProcessInfo
	out     frames
	watched bool        // the event goroutine runs
	answers atomic.Bool // the last tick had readings
	asleep  atomic.Bool // what runs beside the ticks must not touch the device

	mu      sync.Mutex
	call    string // the NVML call under way
	entered time.Time
	known   string // uuid, for others
}

// frames is the memory of a device's frame, used again at every tick.
type frames struct {
	frame     frame.Frame
	device    frame.Device
	load      frame.Load
	processes frame.Processes
	samples   frame.Samples
}

func newDevice(p *poller, index int) *device {
	d := &device{p: p, index: index, refused: map[string]time.Time{}}
	// Counted from the beat before, at which the ticks are but the first one: else that would be a part of a tick from the second time of a group.
	before := p.cfg.now().Truncate(p.cfg.Interval)
	d.processAt, d.utilAt, d.powerAt, d.energyAt, d.gpmAt, d.callsAt = before, before, before, before, before, before
	d.answers.Store(true) // until it was asked
	d.lib = p.lib.With(nvml.Config{
		OnEnter: func(name string) {
			d.mu.Lock()
			d.call, d.entered = name, time.Now()
			d.mu.Unlock()
		},
		OnCall: func(name string, took time.Duration, r nvml.Return) {
			d.mu.Lock()
			d.call = ""
			d.mu.Unlock()
			d.calls.add(name, took, r)
		},
	})
	return d
}

// inCall returns the NVML call under way and since when; an empty name when there is none.
func (d *device) inCall() (string, time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.call, d.entered
}

func (d *device) knownUUID() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.known
}

func (d *device) run(ctx context.Context) {
	// NVML blocks the thread it is called on; let it be one of the device's own.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	tick := beat.New(d.p.cfg.Interval)
	defer tick.Stop()
	for {
		f := d.tick(d.p.cfg.now())
		d.answers.Store(f.Device.State == frame.StateOK)
		if err := d.failed; gone(err) && !d.p.answers(time.Now()) {
			d.p.giveUp(err)
			return
		}
		d.p.deliver(f)
		if d.p.cfg.Once {
			return
		}
		d.follow(ctx)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			tick.Again()
		}
	}
}

// follow starts what runs beside the ticks of an open device.
func (d *device) follow(ctx context.Context) {
	if d.dev == nil {
		return
	}
	if !d.watched {
		d.watched = true
		go d.p.events(ctx, d.index, d.uuid, d.busID)
	}
	if d.fast == nil && d.p.cfg.FastGPM > 0 && d.gpm.ready {
		d.fast = &fastGPM{}
		go d.fast.run(ctx, d)
	}
	d.pcie.follow(ctx, d)
}

// callsPeriod is how often the statistics of the NVML calls are delivered.
const callsPeriod = 10 * time.Second

// tick reads what is due. The frame is valid until the next tick.
func (d *device) tick(now time.Time) *frame.Frame {
	d.failed, d.first, d.good = nil, nil, 0
	f, out := &d.out.frame, &d.out.device
	*f = frame.Frame{Device: out}
	*out = frame.Device{Index: d.index, UUID: d.uuid, State: frame.StateOK}
	d.asleep.Store(suspended(d.p.cfg.SysFS, d.busID))
	if d.asleep.Load() {
		out.State, out.Reason = frame.StateAsleep, "suspended: left asleep"
		return f
	}
	if d.dev == nil && !d.open(now) {
		out.UUID, out.State, out.Reason = d.uuid, d.down, d.why
		return f
	}
	out.UUID = d.uuid
	out.Load = d.load()
	if d.failed == nil {
		out.Processes = d.processes()
	}
	if d.good == 0 && d.first != nil && d.failed == nil {
		d.failed = d.first // not one call works
	}
	d.rest(now, out)
	if d.failed != nil {
		d.close(now, d.failed)
		*out = frame.Device{Index: d.index, UUID: d.uuid, State: d.down, Reason: d.why}
	}
	if due(now, &d.callsAt, callsPeriod) {
		f.Calls = d.calls.drain()
	}
	return f
}

// rest reads the groups that have periods of their own.
func (d *device) rest(now time.Time, out *frame.Device) {
	cfg := &d.p.cfg
	if d.failed == nil && due(now, &d.infoAt, cfg.Info) {
		out.Info = d.info()
		d.migOn = out.Info.MIGMode.V
	}
	if d.failed == nil {
		out.Samples = d.samples(now)
	}
	if d.failed == nil && due(now, &d.energyAt, cfg.Energy) {
		out.Energy = read(d, "energy", d.dev.GetTotalEnergyConsumption)
	}
	if d.failed == nil && due(now, &d.gpmAt, cfg.GPM) {
		out.GPM = d.gpm.read(d)
	}
	if d.failed == nil {
		out.PCIe = d.pcie.read(d, now, out.GPM)
	}
	if d.failed == nil && due(now, &d.healthAt, cfg.Health) {
		out.Health = d.health()
		out.NVLink = d.nvlink()
		d.findMIG()
	}
	if d.failed == nil && len(d.mig) > 0 {
		out.MIG = d.migReadings()
	}
}

// due tells whether a group's time has come, and sets its next one without drift.
func due(now time.Time, next *time.Time, period time.Duration) bool {
	// A tick may come a little early; some tolerance keeps a 2 s group from becoming a 3 s one.
	if now.Before(next.Add(-period / 20)) {
		return false
	}
	if *next = next.Add(period); next.Before(now) {
		*next = now.Add(period)
	}
	return true
}

// How long to leave alone what does not work.
const (
	refusalAge = 10 * time.Minute // a call that the device does not support: MIG or a driver's setting may change that
	errorAge   = 10 * time.Second // a call that fails otherwise
	lostAge    = 30 * time.Second // a GPU that is lost: its handle never works again, and a new one hardly
	closedAge  = 10 * time.Second // a GPU that cannot be opened for another reason
)

// open gets the device's handle, unless it failed too recently.
func (d *device) open(now time.Time) bool {
	if now.Before(d.nextOpen) {
		return false
	}
	dev, err := d.lib.DeviceGetHandleByIndex(d.index)
	uuid := ""
	if err == nil {
		uuid, err = dev.GetUUID()
	}
	if err != nil {
		d.failed = err
		d.close(now, err)
		return false
	}
	if uuid != d.uuid {
		d.rings = rings{}
	}
	d.dev, d.uuid = dev, uuid
	if id, err := dev.GetPciBusID(); err == nil {
		d.busID = id
	}
	d.infoAt, d.healthAt = time.Time{}, time.Time{}
	d.mu.Lock()
	d.known = d.uuid
	d.mu.Unlock()
	return true
}

// close gives up the handle and says why. What ran beside the ticks finds out by itself.
func (d *device) close(now time.Time, err error) {
	d.dev, d.mig = nil, nil
	d.gpm.forget()
	d.pcie.forget()
	clear(d.refused)
	d.down, d.why = state(err)
	d.nextOpen = now.Add(closedAge)
	if d.down == frame.StateLost {
		d.nextOpen = now.Add(lostAge)
	}
}

// state turns the error of a whole device into its state.
func state(err error) (frame.State, string) {
	switch {
	case errors.Is(err, nvml.ErrGPUIsLost):
		return frame.StateLost, "the GPU has fallen off the bus (GPU_IS_LOST)"
	case errors.Is(err, nvml.ErrGPUNotFound), errors.Is(err, nvml.ErrNotFound):
		return frame.StateLost, "NVML does not find the GPU (" + errorName(err) + ")"
	case errors.Is(err, nvml.ErrResetRequired):
		return frame.StateError, "the GPU must be reset before it can be used (RESET_REQUIRED)"
	case errors.Is(err, nvml.ErrNoPermission):
		return frame.StateError, "no permission to open the GPU's device file (NO_PERMISSION)"
	case errors.Is(err, nvml.ErrUnknown):
		return frame.StateError, "every NVML call on the GPU fails (UNKNOWN): see the kernel log for its Xid"
	}
	return frame.StateError, err.Error()
}

// gone says whether an error means that the library as a whole is of no more use to this process, unless it works for another device.
func gone(err error) bool {
	return errors.Is(err, nvml.ErrUninitialized) || errors.Is(err, nvml.ErrDriverNotLoaded) || errors.Is(err, nvml.ErrLibRMVersionMismatch)
}

// read makes one optional call. What the device does not support is absent and not asked for again for a while.
func read[T any](d *device, key string, call func() (T, error)) frame.Opt[T] {
	if !d.may(key) {
		return frame.Opt[T]{}
	}
	v, err := call()
	if !d.ok(key, err) {
		return frame.Opt[T]{}
	}
	return frame.Some(v)
}

// may tells whether a call is to be made now.
func (d *device) may(key string) bool {
	if d.failed != nil {
		return false
	}
	until, refused := d.refused[key]
	if refused && !d.p.cfg.now().Before(until) {
		delete(d.refused, key)
		refused = false
	}
	return !refused
}

// ok judges the result of a call: whether there is a value, and if not, whether and when to ask again.
func (d *device) ok(key string, err error) bool {
	if err != nil && d.first == nil && !errors.Is(err, nvml.ErrNoValue) {
		d.first = err
	}
	switch {
	case err == nil:
		d.good++
		return true
	case errors.Is(err, nvml.ErrNoValue):
		d.good++ // the call works; its value may come back
	case errors.Is(err, nvml.ErrNotSupported), errors.Is(err, nvml.ErrFunctionNotFound), errors.Is(err, nvml.ErrInvalidArgument),
		errors.Is(err, nvml.ErrNotFound), errors.Is(err, nvml.ErrArgumentVersion), errors.Is(err, nvml.ErrDeprecated):
		d.refused[key] = d.p.cfg.now().Add(refusalAge)
	case gone(err), errors.Is(err, nvml.ErrGPUIsLost), errors.Is(err, nvml.ErrResetRequired), errors.Is(err, nvml.ErrGPUNotFound):
		d.failed = err
	default:
		// UNKNOWN, TIMEOUT, NO_PERMISSION and the like: the fault of this call, unless no other works either.
		d.refused[key] = d.p.cfg.now().Add(errorAge)
	}
	return false
}

func opt(v int) frame.Opt[int] {
	if v < 0 {
		return frame.Opt[int]{}
	}
	return frame.Some(v)
}

func put[K comparable, V any](m *map[K]V, k K, v V) {
	if *m == nil {
		*m = map[K]V{}
	}
	(*m)[k] = v
}
