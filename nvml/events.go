package nvml

import (
	"time"
	"unsafe"
)

// The event types (nvmlEventType…).
const (
	EventSingleBitECC = 0x1
	EventDoubleBitECC = 0x2
	EventXid          = 0x8
)

// EventSet is a set of devices whose events are waited for.
type EventSet struct {
	l      *Library
	handle uintptr
	data   *eventData
}

// Event is what happened on a device.
type Event struct {
	Device          uintptr // compare with Device.Handle
	Type            uint64
	Data            uint64 // the Xid number
	GPUInstance     int    // -1 outside MIG
	ComputeInstance int    // -1 outside MIG
}

// Handle identifies the device within this process.
func (d *Device) Handle() uintptr { return d.handle }

// EventSetCreate makes an empty set (nvmlEventSetCreate). It is not inlined, so that the set's memory is on the heap: see Library.call.
//
//go:noinline
func (l *Library) EventSetCreate() (*EventSet, error) {
	s := &EventSet{l: l, data: &eventData{}}
	h := new(uintptr)
	if r := l.callOnce(fnEventSetCreate, uintptr(unsafe.Pointer(h))); r != Success {
		return nil, r
	}
	s.handle = *h
	return s, nil
}

// Register adds those of the event types that the device supports (nvmlDeviceRegisterEvents).
func (s *EventSet) Register(d *Device, types uint64) error {
	if r := s.l.call(fnDeviceGetSupportedEventTypes, d.handle, uintptr(unsafe.Pointer(&d.buf.u64))); r != Success {
		return r
	}
	if types &= d.buf.u64; types == 0 {
		return ErrNotSupported
	}
	return s.l.call(fnDeviceRegisterEvents, d.handle, uintptr(types), s.handle).err()
}

// Wait waits for an event; ErrTimeout says that none came (nvmlEventSetWait_v2). It costs no CPU time.
func (s *EventSet) Wait(timeout time.Duration) (Event, error) {
	*s.data = eventData{}
	if r := s.l.call(fnEventSetWait, s.handle, uintptr(unsafe.Pointer(s.data)), uintptr(timeout.Milliseconds())); r != Success {
		return Event{}, r
	}
	e := Event{Device: s.data.device, Type: s.data.eventType, Data: s.data.eventData, GPUInstance: -1, ComputeInstance: -1}
	if s.l.version[fnEventSetWait] >= 2 {
		e.GPUInstance, e.ComputeInstance = instance(s.data.gpuInstanceID), instance(s.data.computeInstanceID)
	}
	return e, nil
}

// Free releases the set (nvmlEventSetFree).
func (s *EventSet) Free() error { return s.l.call(fnEventSetFree, s.handle).err() }
