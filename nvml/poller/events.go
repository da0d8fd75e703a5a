package poller

import (
	"context"
	"errors"
	"runtime"
	"time"

	"gpu-exporter/nvml"
	"gpu-exporter/nvml/frame"
)

// eventWait is how long one wait for an event lasts. Waiting costs nothing; an event ends it at once.
const eventWait = 5 * time.Second

// eventWanted are the events that are asked for.
const eventWanted = nvml.EventXid | nvml.EventSingleBitECC | nvml.EventDoubleBitECC

// events waits for Xids and ECC errors of one device, on a thread of its own, until ctx is done. Each device has its own set, so that one which hangs
// or is lost takes nothing from the others.
func (p *poller) events(ctx context.Context, index int, uuid, busID string) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	pause := time.Second
	for ctx.Err() == nil {
		if !suspended(p.cfg.SysFS, busID) {
			started := time.Now()
			if err := p.waitEvents(ctx, index, uuid); errors.Is(err, nvml.ErrNotSupported) || errors.Is(err, nvml.ErrFunctionNotFound) {
				return
			}
			if time.Since(started) > time.Minute {
				pause = time.Second
			}
		}
		// A lost GPU makes every call fail at once: do not spin.
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		pause = min(2*pause, time.Minute)
	}
}

// waitEvents makes an event set and delivers what it brings until an error, or until ctx is done.
func (p *poller) waitEvents(ctx context.Context, index int, uuid string) error {
	// A handle of its own: a Device must not be shared between goroutines.
	dev, err := p.lib.DeviceGetHandleByIndex(index)
	if err != nil {
		return err
	}
	set, err := p.lib.EventSetCreate()
	if err != nil {
		return err
	}
	defer set.Free()
	if err := set.Register(dev, eventWanted); err != nil {
		return err
	}
	for ctx.Err() == nil {
		e, err := set.Wait(eventWait)
		if errors.Is(err, nvml.ErrTimeout) {
			continue
		}
		if err != nil {
			return err
		}
		if ev, ok := event(e, uuid); ok {
			ev.Time = p.cfg.now().UnixNano()
			p.deliver(&frame.Frame{Events: []frame.Event{ev}})
		}
	}
	return nil
}

// event turns NVML's event into the frame's; false for kinds that were not asked for.
func event(e nvml.Event, uuid string) (frame.Event, bool) {
	ev := frame.Event{UUID: uuid, GPUInst: opt(e.GPUInstance), CIInst: opt(e.ComputeInstance)}
	switch e.Type {
	case nvml.EventXid:
		ev.Kind, ev.Value = "xid", e.Data
	case nvml.EventSingleBitECC:
		ev.Kind = "ecc_single"
	case nvml.EventDoubleBitECC:
		ev.Kind = "ecc_double"
	default:
		return ev, false
	}
	return ev, true
}
