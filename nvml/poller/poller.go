// Package poller reads NVML at the rates that its calls are worth, and delivers frames.
//
// Calls differ by a factor of a thousand in what they cost, so each group of figures has its own period: the load and the process list at
// every tick, the driver's sample rings often enough that none overruns, energy and health rarely. Each device is read by a goroutine on a
// thread of its own, so that one device whose calls hang leaves the others alone; the hung one is reported, with the name of the call.
//
// A GPU that the kernel has suspended (runtime power management, laptops mostly) is left asleep: its state is read from sysfs, and no
// NVML call names it until it is awake again. nvmlInit itself would wake every GPU, so it is not called while all of them sleep; if some
// are awake it wakes the others, once.
package poller

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"gpu-exporter/nvml"
	"gpu-exporter/nvml/beat"
	"gpu-exporter/nvml/frame"
)

// Config says how often to read what. Zero values take the defaults named.
type Config struct {
	Interval time.Duration // load and process list; 1 s
	Samples  time.Duration // process samples; 3 s. The driver keeps many seconds of them.
	Power    time.Duration // power samples; 2 s. The ring holds 2.4 s.
	Util     time.Duration // the device's utilisation samples; 10 s. The ring holds 14 s.
	Energy   time.Duration // 10 s
	Health   time.Duration // health, NVLink and the list of MIG devices; 10 s
	GPM      time.Duration // 5 s
	FastGPM  time.Duration // period of short GPM readings of SM activity, such as 100 ms; none
	Info     time.Duration // 5 min
	Deadline time.Duration // a device that has not come back after this is reported as hung; 5 s

	// PCIeBudget is the part of a core that a device without GPM may cost for its PCIe byte counters, which must be read before
	// they wrap. Where the driver needs more, the figures are sampled instead. 0.005
	PCIeBudget float64
	// Once reads every device once and ends.
	Once bool

	SysFS string // root of sysfs; "/sys"
	Proc  string // root of procfs; "/proc"

	now func() time.Time // for tests
}

func (c Config) withDefaults() Config {
	for _, d := range []struct {
		v *time.Duration
		d time.Duration
	}{{&c.Interval, time.Second}, {&c.Samples, 3 * time.Second}, {&c.Power, 2 * time.Second}, {&c.Util, 10 * time.Second},
		{&c.Energy, 10 * time.Second}, {&c.Health, 10 * time.Second},
		{&c.GPM, 5 * time.Second}, {&c.Info, 5 * time.Minute}, {&c.Deadline, 5 * time.Second}} {
		if *d.v <= 0 {
			*d.v = d.d
		}
	}
	if c.PCIeBudget <= 0 {
		c.PCIeBudget = 0.005
	}
	if c.SysFS == "" {
		c.SysFS = "/sys"
	}
	if c.Proc == "" {
		c.Proc = "/proc"
	}
	if c.now == nil {
		c.now = time.Now
	}
	return c
}

// ErrUnusable says that this process can read no more and a fresh one should try: NVML could not be initialised, the driver went
// away, or its version changed. The reason has been delivered as a library frame.
var ErrUnusable = errors.New("NVML is unusable")

// Run initialises the library and delivers frames to emit until ctx ends. emit is called from one goroutine at a time and must not keep
// the frame. Run returns an error that matches ErrUnusable when this process's library is of no more use.
func Run(ctx context.Context, lib *nvml.Library, c Config, emit func(*frame.Frame)) error {
	p := newPoller(lib, c, emit)
	if !p.waitAwake(ctx) {
		return nil
	}
	if err := p.init(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan struct{}, len(p.devices))
	for _, d := range p.devices {
		go func() {
			d.run(ctx)
			ended <- struct{}{}
		}()
	}
	watch := beat.New(min(time.Second, p.cfg.Deadline))
	defer watch.Stop()
	for left := len(p.devices); !p.cfg.Once || left > 0; {
		select {
		case <-ctx.Done():
			return nil
		case <-ended:
			left--
		case err := <-p.fatal:
			p.library(err)
			return fmt.Errorf("%w: %w", ErrUnusable, err)
		case <-watch.C:
			watch.Again()
			if p.watch(time.Now()) && p.cfg.Once {
				return nil // who has not come back by now will not
			}
		}
	}
	return nil
}

// heartbeat is how often the library's state is told again when no device has anything to say.
const heartbeat = 4 * time.Second

type poller struct {
	cfg     Config
	lib     *nvml.Library
	devices []*device
	fatal   chan error

	mu        sync.Mutex // guards what follows
	emit      func(*frame.Frame)
	delivered time.Time
	state     frame.Library
}

func newPoller(lib *nvml.Library, c Config, emit func(*frame.Frame)) *poller {
	return &poller{cfg: c.withDefaults(), lib: lib, emit: emit, fatal: make(chan error, 1)}
}

// init initialises NVML and finds the devices.
func (p *poller) init() error {
	err := p.lib.Init()
	n := 0
	if err == nil {
		n, err = p.lib.DeviceGetCount()
	}
	if err != nil {
		p.library(err)
		return fmt.Errorf("%w: %w", ErrUnusable, err)
	}
	// NVML numbers the GPUs by their bus ids, so as long as the counts agree the bus id is known before the device is touched.
	gpus := sysfsGPUs(p.cfg.SysFS)
	for i := range n {
		d := newDevice(p, i)
		if len(gpus) == n {
			d.busID = gpus[i]
		}
		p.devices = append(p.devices, d)
	}
	p.library(nil)
	return nil
}

// watch reports the devices whose call has not returned in time, and keeps the reader from taking silence for a hang. It tells whether it
// reported any.
func (p *poller) watch(now time.Time) (hung bool) {
	for _, d := range p.devices {
		if name, since := d.inCall(); name != "" && now.Sub(since) > p.cfg.Deadline {
			hung = true
			p.deliver(&frame.Frame{Device: &frame.Device{Index: d.index, UUID: d.knownUUID(), State: frame.StateHung,
				Reason: name + " does not return"}})
		}
	}
	p.mu.Lock()
	quiet := now.Sub(p.delivered) >= heartbeat
	state := p.state
	p.mu.Unlock()
	if quiet {
		p.deliver(&frame.Frame{Library: &state})
	}
	return hung
}

func (p *poller) deliver(f *frame.Frame) {
	now := p.cfg.now()
	f.Version, f.Time = frame.Version, now.UnixNano()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delivered = now
	p.emit(f)
}

// answers tells whether the library works for any device, those left out whose call does not return.
func (p *poller) answers(now time.Time) bool {
	return slices.ContainsFunc(p.devices, func(d *device) bool {
		name, since := d.inCall()
		return d.answers.Load() && (name == "" || now.Sub(since) <= p.cfg.Deadline)
	})
}

// giveUp ends Run with err, once.
func (p *poller) giveUp(err error) {
	select {
	case p.fatal <- err:
	default:
	}
}

// library delivers the state of the library.
func (p *poller) library(err error) {
	l := frame.Library{OK: err == nil, Path: p.lib.Path(), Devices: len(p.devices), PIDNamespace: inPIDNamespace(p.cfg.Proc)}
	if err != nil {
		l.Reason, l.Error = reason(err), errorName(err)
	} else {
		l.DriverVersion, _ = p.lib.SystemGetDriverVersion()
		l.NVMLVersion, _ = p.lib.SystemGetNVMLVersion()
		l.CUDAVersion, _ = p.lib.SystemGetCudaDriverVersion()
	}
	p.tell(l)
}

func (p *poller) tell(l frame.Library) {
	p.mu.Lock()
	p.state = l
	p.mu.Unlock()
	p.deliver(&frame.Frame{Library: &l})
}

// Unusable returns the frame that says why the library could not be opened at all.
func Unusable(err error) *frame.Frame {
	return &frame.Frame{Version: frame.Version, Time: time.Now().UnixNano(),
		Library: &frame.Library{Reason: reason(err), Error: errorName(err), PIDNamespace: inPIDNamespace("/proc")}}
}

// errorName returns NVML's name of the error, "" if it did not come from NVML.
func errorName(err error) string {
	var r nvml.Return
	if errors.As(err, &r) {
		return r.Name()
	}
	return ""
}

// reason explains an error to people.
func reason(err error) string {
	switch {
	case errors.Is(err, nvml.ErrDriverNotLoaded):
		return "the NVIDIA driver is not loaded"
	case errors.Is(err, nvml.ErrLibRMVersionMismatch):
		return "the NVIDIA library and the loaded kernel module are of different versions: reload the driver or reboot"
	case errors.Is(err, nvml.ErrNoPermission), errors.Is(err, nvml.ErrOperatingSystem):
		return "no permission to open the NVIDIA devices (" + errorName(err) + ")"
	}
	return err.Error()
}

// initialPIDNamespace is the inode number that the kernel gives the first PID namespace (PROC_PID_INIT_INO, 0xEFFFFFFC).
const initialPIDNamespace = "pid:[4026531836]"

// inPIDNamespace tells whether this process is in a PID namespace of its own, in which NVML shows no processes.
func inPIDNamespace(proc string) bool {
	ns, err := os.Readlink(proc + "/self/ns/pid")
	return err == nil && ns != initialPIDNamespace
}
