package tracer

import (
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// holds is what a process has open.
type holds struct {
	minors         map[uint32]bool // GPUs
	ctl, uvm, caps bool
}

func (h *holds) add(node, minor uint32) {
	switch bpfNode(node) {
	case bpfNodeNODE_GPU:
		if h.minors == nil {
			h.minors = map[uint32]bool{}
		}
		if len(h.minors) < maxMinors {
			h.minors[minor] = true
		}
	case bpfNodeNODE_CTL:
		h.ctl = true
	case bpfNodeNODE_UVM:
		h.uvm = true
	case bpfNodeNODE_CAPS:
		h.caps = true
	}
}

// maxMinors bounds what one process can make the tracer remember: the driver has no more.
const maxMinors = 256

func (h *holds) any() bool { return len(h.minors) > 0 || h.ctl || h.uvm || h.caps }

// maxDescriptors bounds how many descriptors of one process are looked at.
const maxDescriptors = 1 << 16

// scan looks at the open files of a process. A device is known by its number: neither names nor mounts matter. The error is that of
// reading /proc/<pid>/fd.
func scan(root string, r *rules, pid int) (holds, error) {
	var found holds
	dir, err := os.Open(root + "/" + strconv.Itoa(pid) + "/fd")
	if err != nil {
		return found, err
	}
	defer dir.Close()
	for seen := 0; seen < maxDescriptors; {
		names, err := dir.Readdirnames(256)
		for _, name := range names {
			var st unix.Statx_t
			// Not synchronised: the file may lie on a network that does not answer.
			if unix.Statx(int(dir.Fd()), name, unix.AT_STATX_DONT_SYNC|unix.AT_NO_AUTOMOUNT, unix.STATX_TYPE, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFCHR {
				continue
			}
			d := device{st.Rdev_major, st.Rdev_minor}
			if node := r.node(d); node != 0 {
				found.add(node, d.minor)
			}
		}
		if seen += len(names); err != nil || len(names) == 0 {
			break
		}
	}
	return found, nil
}

// scanned is what a look at one process found.
type scanned struct {
	pid   int
	holds holds
}

// scanAll looks at every process, and returns those that hold a device, and how many could not be read though they exist.
func scanAll(root string, r *rules) (found []scanned, hidden int) {
	for _, pid := range pids(root) {
		h, err := scan(root, r, pid)
		switch {
		case err == nil && h.any():
			found = append(found, scanned{pid, h})
		case os.IsPermission(err):
			hidden++
		}
	}
	return found, hidden
}

func pids(root string) []int {
	dir, err := os.Open(root)
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1) // what could be read
	var list []int
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil && pid > 0 {
			list = append(list, pid)
		}
	}
	return list
}
