package processes

import "os"

// Visibility says whether /proc shows the processes of the host: a value of the label reason of
// gpu_exporter_process_visibility.
type Visibility string

// What /proc may show.
const (
	Visible      Visibility = "ok"
	Hidden       Visibility = "hidepid"         // /proc is mounted with hidepid and the exporter may not see foreign processes
	Unreadable   Visibility = "proc_unreadable" // no /proc there
	Hangs        Visibility = "hangs"           // a file of /proc does not open, or does not end
	PIDNamespace Visibility = "pid_namespace"   // the exporter has a PID namespace of its own: NVML's PIDs mean nothing here
)

// Explain returns one line for people.
func (v Visibility) Explain() string {
	switch v {
	case Hidden:
		return "/proc is mounted with hidepid: run as root, or with CAP_SYS_PTRACE and the group that the mount option gid names"
	case Unreadable:
		return "/proc cannot be read: mount it"
	case Hangs:
		return "a file of /proc does not answer, as when its process is stuck in the kernel"
	case PIDNamespace:
		return "this is not the host's PID namespace: run the container with --pid=host"
	}
	return ""
}

// Reason returns the value with its explanation, "hidepid: /proc is…": the value is what stands before the colon. It is empty for
// Visible.
func (v Visibility) Reason() string {
	if v == Visible {
		return ""
	}
	return string(v) + ": " + v.Explain()
}

// initialPIDNamespace is the name of the first PID namespace: the kernel gives it a fixed inode number, PROC_PID_INIT_INO.
const initialPIDNamespace = "pid:[4026531836]"

// Look tells what a /proc directory shows. Process 1 always exists, so not seeing it means that others are hidden too.
func Look(root string) Visibility {
	if f, err := os.Open(root + "/1/stat"); err == nil {
		f.Close()
	} else if _, err := os.Stat(root + "/self/stat"); err == nil {
		return Hidden
	} else {
		return Unreadable
	}
	for _, p := range []string{"/1/ns/pid", "/self/ns/pid"} { // the first is readable for root only
		if name, err := os.Readlink(root + p); err == nil {
			if name != initialPIDNamespace {
				return PIDNamespace
			}
			break
		}
	}
	return Visible
}
