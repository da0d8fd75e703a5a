package docker

import (
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/processes"
)

// proc looks at containers from outside, through a /proc of the host's PID namespace.
type proc struct {
	root  string
	stuck atomic.Int32 // looks that do not come back
}

// maxStuck is the number of looks that may hang, on a dead network or FUSE file system inside a container, before no more are made.
const maxStuck = 8

// look returns the start time of a container's first process and the minors of the GPU nodes inside the container; zero and nil
// where that process is not to be seen, or is not the container's.
func (p *proc) look(ctx context.Context, pid int, id string) (start uint64, nodes []int) {
	if p.stuck.Load() >= maxStuck {
		return 0, nil
	}
	type answer struct {
		start uint64
		nodes []int
	}
	answers := make(chan answer, 1)
	p.stuck.Add(1)
	go func() {
		defer p.stuck.Add(-1)
		reader := processes.Reader{Root: p.root}
		process, err := reader.Read(pid)
		if err != nil || !slices.Contains(containers.IDs(process.Cgroup), id) {
			answers <- answer{}
			return
		}
		found := p.nodes(pid)
		if p.startTime(pid) != process.StartTime { // it ended meanwhile: the nodes may be of another process
			answers <- answer{}
			return
		}
		answers <- answer{process.StartTime, found}
	}()
	select {
	case a := <-answers:
		return a.start, a.nodes
	case <-ctx.Done():
		return 0, nil
	}
}

// startTime returns the start time of a process, or zero where there is none.
func (p *proc) startTime(pid int) uint64 {
	start, err := processes.StartTime(p.root, pid)
	if err != nil {
		return 0
	}
	return start
}

const (
	nvidiaMajor = 195   // of /dev/nvidiaN, nvidiactl and nvidia-modeset
	firstOther  = 248   // minors from here on are no GPUs: 254 is nvidia-modeset, 255 nvidiactl
	maxNames    = 16384 // in a /dev: a container may fill its own without end
)

// nodes returns the minors of the GPU nodes in the /dev of a process, sorted; empty where there is none, nil where /dev cannot be
// read. A node is known by its device number, whatever its name.
func (p *proc) nodes(pid int) []int {
	root, err := unix.Open(p.root+"/"+strconv.Itoa(pid)+"/root", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	defer unix.Close(root)
	// A link named /dev could lead out of the container.
	fd, err := unix.Openat(root, "dev", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	dev := os.NewFile(uintptr(fd), "dev")
	defer dev.Close()
	names, err := dev.Readdirnames(maxNames + 1)
	if err != nil && !errors.Is(err, io.EOF) || len(names) > maxNames {
		return nil
	}
	minors := []int{}
	for _, name := range names {
		if !strings.HasPrefix(name, "nvidia") {
			continue
		}
		var st unix.Stat_t
		if err := unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil || st.Mode&unix.S_IFMT != unix.S_IFCHR {
			continue
		}
		if minor := int(unix.Minor(st.Rdev)); unix.Major(st.Rdev) == nvidiaMajor && minor < firstOther {
			minors = append(minors, minor)
		}
	}
	slices.Sort(minors)
	return slices.Compact(minors)
}
