package tracer

import (
	"errors"
	"fmt"
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
	process := root + "/" + strconv.Itoa(pid)
	found, files, err := scanFiles(process+"/fd", r)
	if err != nil || files > 0 {
		return found, err
	}
	// A first thread that ended before the others has no files any more: they have.
	for _, tid := range numbers(process + "/task") {
		if tid == pid {
			continue
		}
		if found, files, err = scanFiles(process+"/task/"+strconv.Itoa(tid)+"/fd", r); files > 0 {
			return found, err
		}
	}
	return holds{}, nil
}

// scanFiles looks at a directory of descriptors, and returns how many it has too.
func scanFiles(path string, r *rules) (found holds, files int, err error) {
	dir, err := os.Open(path)
	if err != nil {
		return found, 0, err
	}
	defer dir.Close()
	var denied error
	read := 0
	for files < maxDescriptors {
		names, err := dir.Readdirnames(256)
		for _, name := range names {
			var st unix.Statx_t
			// Not synchronised: the file may lie on a network that does not answer.
			err := unix.Statx(int(dir.Fd()), name, unix.AT_STATX_DONT_SYNC|unix.AT_NO_AUTOMOUNT, unix.STATX_TYPE, &st)
			if errors.Is(err, os.ErrPermission) {
				denied = err
			}
			if err != nil {
				continue
			}
			read++
			if st.Mode&unix.S_IFMT != unix.S_IFCHR {
				continue
			}
			d := device{st.Rdev_major, st.Rdev_minor}
			if node := r.node(d); node != 0 {
				found.add(node, d.minor)
			}
		}
		if files += len(names); err != nil || len(names) == 0 {
			break
		}
	}
	// The list may be read and nothing that it leads to: that is no process without devices. One file may be closed to us for reasons of its own.
	if denied != nil && read == 0 {
		return holds{}, files, fmt.Errorf("reading the descriptors of %s: %w", path, denied)
	}
	return found, files, nil
}

// scanned is what a look at one process found.
type scanned struct {
	pid   int
	holds holds
}

// scanAll looks at every process, and returns those that hold a device, how many could not be read though they exist, and how many there are.
func scanAll(root string, r *rules) (found []scanned, hidden, all int) {
	list := numbers(root)
	for _, pid := range list {
		h, err := scan(root, r, pid)
		switch {
		case err == nil && h.any():
			found = append(found, scanned{pid, h})
		case errors.Is(err, os.ErrPermission):
			hidden++
		}
	}
	return found, hidden, len(list)
}

// numbers lists the numeric names in a directory of /proc: processes, or threads.
func numbers(path string) []int {
	dir, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1) // what could be read
	var list []int
	for _, name := range names {
		if n, err := strconv.Atoi(name); err == nil && n > 0 {
			list = append(list, n)
		}
	}
	return list
}
