// Package ledger adds up, from driver events alone, the VRAM that each process holds on each GPU. It is pure: events in, bytes out, no
// clock, no file, no lock. It keeps the part of the driver's object tree that matters (clients, devices, memory and what lies between),
// because freeing an object frees everything below it. The sum follows the accounting behind NVML's usedGpuMemory.
//
// A Ledger is not safe for concurrent use.
package ledger

// Kind says what happened.
type Kind uint8

// The kinds of event. The fields named are those that a kind needs beside Time and PID.
const (
	None        Kind = iota
	Client           // a root client was made: Handle (the new client), File where known
	Device           // a device object (class 0x80): Client, Parent, Handle, Instance
	Object           // any other object that may lie between a device and memory, such as a subdevice: Client, Parent, Handle
	VASpace          // an address space (class 0x90f1): Client, Parent (its device), Handle
	Memory           // a VRAM request: Client, Parent, Handle, Size, Status, Entry; a failed one has Status set and the size asked for
	Free             // Client, Handle, Entry: frees the object and all below it; Handle == Client frees the client
	Dup              // Client, Parent, Handle refer from now on also to SrcClient, SrcHandle
	RegisterGPU      // UVM_REGISTER_GPU: UUID, Client (0 or all ones: not given)
	RegisterVAS      // UVM_REGISTER_GPU_VASPACE: UUID, Client, Handle (the address space)
	Instance         // the driver told this process that GPUID has device instance Instance
	OpenGPU          // the process opened /dev/nvidia<Minor>, or another device (-1)
	Close            // the control file File was closed for the last time: its clients are gone
	Fork             // PID is a new process; its parent's objects stay the parent's
	Exec             // the process runs a new program: the driver's files are close-on-exec, so its objects are gone
	Exit             // the last thread of the process ended
	Lost             // events of PID (0: of every process) were lost, or PID was there before the tracer: not exact from here on
)

// Event is one thing that happened to a process. Times are CLOCK_MONOTONIC ns. Handles are RM handles, as the driver left them at exit.
type Event struct {
	Time  int64 // when it was complete; events must come in this order, small disorder is tolerated
	Entry int64 // when the call began; 0 if unknown
	Start uint64
	Size  uint64 // bytes: as rounded by the driver on success, as asked for on failure
	File  uint64 // identity of the open control file, 0 unknown
	// Seq numbers the driver calls of one thread; it tells the driver's own retries, which follow one another without any call between,
	// from a second request of the program. 0 unknown.
	Seq uint64

	PID  int32 // process (thread group), in the host's PID namespace
	TID  int32 // thread; 0 unknown
	Kind Kind
	// Partial is set when a parameter could not be read (unmapped pointer, serialised parameters, a size that matches no form): the
	// process is no longer exact, and only the fields that were read count.
	Partial bool

	Client, Parent, Handle uint32
	SrcClient, SrcHandle   uint32
	Status                 uint32 // NV_STATUS; 0 success
	Instance               uint32 // device instance
	GPUID                  uint32 // RM gpuId: domain<<16 | bus<<8 | device
	Minor                  int32  // N of /dev/nvidia<N>
	UUID                   [16]byte
}

// Status words that the ledger tells apart.
const (
	StatusOK       = 0
	StatusNoMemory = 0x51
)

// Succeeded tells whether an NV_STATUS means success: zero, or one of the driver's warnings (0x1xxxx).
func Succeeded(status uint32) bool { return status>>16 == 1 || status == StatusOK }
