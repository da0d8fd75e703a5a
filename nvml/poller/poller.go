// Package poller reads NVML at the rates that its calls are worth, and delivers frames.
//
// Calls differ by a factor of a thousand in what they cost, so each group of figures has its own period: the load and the process list at
// every tick, the driver's sample rings often enough that none overruns, energy and health rarely. Each device is read by a goroutine of
// its own, so that one device whose calls hang leaves the others alone.
package poller

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"gpu-exporter/nvml"
	"gpu-exporter/nvml/frame"
)

// Config says how often to read what. Zero values take the defaults named.
type Config struct {
	Interval time.Duration // load and process list; 1 s
	Samples  time.Duration // sample rings and process samples; 2 s. The power ring holds 2.4 s.
	Energy   time.Duration // 10 s
	Health   time.Duration // 10 s
	GPM      time.Duration // 2 s
	Info     time.Duration // 5 min
	Deadline time.Duration // a device that has not come back after this is reported as hung; 5 s
	FastGPM  bool          // also a GPM reading every 100 ms

	SysFS string // root of sysfs; "/sys"
	Proc  string // root of procfs; "/proc"
}

func (c Config) withDefaults() Config {
	for _, d := range []struct {
		v *time.Duration
		d time.Duration
	}{{&c.Interval, time.Second}, {&c.Samples, 2 * time.Second}, {&c.Energy, 10 * time.Second}, {&c.Health, 10 * time.Second},
		{&c.GPM, 2 * time.Second}, {&c.Info, 5 * time.Minute}, {&c.Deadline, 5 * time.Second}} {
		if *d.v <= 0 {
			*d.v = d.d
		}
	}
	if c.SysFS == "" {
		c.SysFS = "/sys"
	}
	if c.Proc == "" {
		c.Proc = "/proc"
	}
	return c
}

// ErrRestart says that this process can read no more and a fresh one should try: the driver went away, or its version changed.
var ErrRestart = errors.New("a fresh worker is needed")

// Run initialises the library and delivers frames to emit until ctx ends. emit is called from one goroutine at a time and must not keep
// the frame. Run returns an error that matches ErrRestart when NVML says that this process's library is of no more use.
func Run(ctx context.Context, lib *nvml.Library, c Config, emit func(*frame.Frame)) error {
	c = c.withDefaults()
	p := &poller{cfg: c, lib: lib, emit: emit, fatal: make(chan error, 1)}
	if err := lib.Init(); err != nil {
		p.library(err)
		return fmt.Errorf("initialising NVML: %w", err)
	}
	n, err := lib.DeviceGetCount()
	if err != nil {
		p.library(err)
		return fmt.Errorf("counting devices: %w", err)
	}
	p.count = n
	p.library(nil)

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for i := range n {
		d := newDevice(p, i)
		p.devices = append(p.devices, d)
		go d.run(ctx)
	}
	go p.events(ctx)

	watch := time.NewTicker(time.Second)
	defer watch.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-p.fatal:
			p.library(err)
			return fmt.Errorf("%w: %w", ErrRestart, err)
		case now := <-watch.C:
			for _, d := range p.devices {
				if name, since := d.inCall(); name != "" && now.Sub(since) > c.Deadline {
					p.deliver(&frame.Frame{Device: &frame.Device{Index: d.index, UUID: d.knownUUID(), State: frame.StateHung,
						Reason: fmt.Sprintf("%s has not returned for %d s", name, int(now.Sub(since).Seconds()))}})
				}
			}
		}
	}
}

type poller struct {
	cfg     Config
	lib     *nvml.Library
	count   int
	devices []*device
	fatal   chan error

	mu   sync.Mutex // guards emit
	emit func(*frame.Frame)
}

func (p *poller) deliver(f *frame.Frame) {
	f.Version = frame.Version
	f.Time = time.Now().UnixNano()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.emit(f)
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
	l := &frame.Library{OK: err == nil, Path: p.lib.Path(), Devices: p.count, PIDNamespace: inPIDNamespace(p.cfg.Proc)}
	if err != nil {
		l.Reason = reason(err)
		var r nvml.Return
		if errors.As(err, &r) {
			l.Error = r.Name()
		}
	} else {
		l.DriverVersion, _ = p.lib.SystemGetDriverVersion()
		l.NVMLVersion, _ = p.lib.SystemGetNVMLVersion()
		l.CUDAVersion, _ = p.lib.SystemGetCudaDriverVersion()
	}
	p.deliver(&frame.Frame{Library: l})
}

// Unusable returns the frame that says why the library could not be opened at all.
func Unusable(err error, procRoot string) *frame.Frame {
	if procRoot == "" {
		procRoot = "/proc"
	}
	l := &frame.Library{Reason: reason(err), PIDNamespace: inPIDNamespace(procRoot)}
	return &frame.Frame{Version: frame.Version, Time: time.Now().UnixNano(), Library: l}
}

// reason explains an error to people.
func reason(err error) string {
	switch {
	case errors.Is(err, nvml.ErrDriverNotLoaded):
		return "the NVIDIA driver is not loaded"
	case errors.Is(err, nvml.ErrLibRMVersionMismatch):
		return "the NVIDIA library and the loaded kernel module are of different versions: reload the driver or reboot"
	case errors.Is(err, nvml.ErrNoPermission), errors.Is(err, nvml.ErrOperatingSystem):
		return "no permission to open the NVIDIA devices (" + err.Error() + ")"
	}
	return err.Error()
}

// initialPIDNamespace is the inode number that the kernel gives the first PID namespace (PROC_PID_INIT_INO).
const initialPIDNamespace = "pid:[4026531836]"

// inPIDNamespace tells whether this process is in a PID namespace of its own, in which NVML shows no processes.
func inPIDNamespace(proc string) bool {
	ns, err := os.Readlink(proc + "/self/ns/pid")
	return err == nil && ns != initialPIDNamespace
}

// events waits for Xids and ECC events of all devices.
func (p *poller) events(ctx context.Context) {
	set, err := p.lib.EventSetCreate()
	if err != nil {
		return
	}
	owner := map[uintptr]string{}
	for i := range p.count {
		// Handles of its own: a Device must not be shared between goroutines.
		d, err := p.lib.DeviceGetHandleByIndex(i)
		if err != nil {
			continue
		}
		if set.Register(d, nvml.EventXid|nvml.EventSingleBitECC|nvml.EventDoubleBitECC) == nil {
			owner[d.Handle()], _ = d.GetUUID()
		}
	}
	if len(owner) == 0 {
		return
	}
	failures := 0
	for ctx.Err() == nil {
		e, err := set.Wait(time.Second)
		if errors.Is(err, nvml.ErrTimeout) {
			failures = 0
			continue
		}
		if err != nil {
			// A lost GPU makes the wait fail at once: do not spin.
			failures++
			select {
			case <-ctx.Done():
			case <-time.After(min(time.Duration(failures)*time.Second, time.Minute)):
			}
			continue
		}
		kind := map[uint64]string{nvml.EventXid: "xid", nvml.EventSingleBitECC: "ecc_single", nvml.EventDoubleBitECC: "ecc_double"}[e.Type]
		uuid := owner[e.Device]
		if kind == "" || uuid == "" {
			continue
		}
		ev := frame.Event{Time: time.Now().UnixNano(), UUID: uuid, Kind: kind, Value: e.Data}
		if e.GPUInstance >= 0 {
			ev.GPUInst = frame.Some(e.GPUInstance)
		}
		if e.ComputeInstance >= 0 {
			ev.CIInst = frame.Some(e.ComputeInstance)
		}
		p.deliver(&frame.Frame{Events: []frame.Event{ev}})
	}
}
