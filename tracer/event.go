package tracer

// Event is one thing that happened, for people who watch.
type Event struct {
	Time   int64  `json:"time"` // Unix ns
	Kind   string `json:"kind"` // "open", "context", "alloc", "free", "oom", "fork", "exec", "exit" or "xid"
	PID    int    `json:"pid,omitempty"`
	Comm   string `json:"comm,omitempty"`
	Cgroup string `json:"cgroup,omitempty"`
	UUID   string `json:"uuid,omitempty"` // the GPU, where it is known
	Size   uint64 `json:"size,omitempty"` // bytes, of an allocation, a free or a failed request
	// Detail is the node and the result of an open ("gpu0 eperm"), the status of an exit ("exit 1", "signal 9") or the text of an Xid.
	Detail string `json:"detail,omitempty"`
}
