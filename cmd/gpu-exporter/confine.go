package main

import (
	"fmt"
	"net"
	"strconv"
	"syscall"
	"unsafe"

	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"gpu-exporter/exporter"
	"gpu-exporter/exporter/docker"
	"gpu-exporter/tracer"
)

// needed lists the capabilities that serving makes use of, for this process or the worker. docs/threats.md says what is missing without each.
func needed(cfg exporter.Config, addresses []string) []int {
	list := []int{
		unix.CAP_SYS_PTRACE, unix.CAP_DAC_READ_SEARCH, // which processes hold a GPU
		unix.CAP_SYS_ADMIN, // NVML's profiling figures, and a private tracefs
		unix.CAP_SYSLOG,    // the kernel's log
	}
	if cfg.Tracer.Mode != tracer.ModeOff {
		list = append(list, unix.CAP_BPF, unix.CAP_PERFMON)
	}
	if cfg.Worker.DriverRoot != "" {
		list = append(list, unix.CAP_SYS_CHROOT)
	}
	if cfg.Docker.Host != docker.DefaultHost {
		list = append(list, unix.CAP_DAC_OVERRIDE) // the socket of an engine without root is its user's
	}
	for _, a := range addresses {
		_, port, _ := net.SplitHostPort(a)
		if n, err := strconv.Atoi(port); err == nil && 0 < n && n < 1024 {
			list = append(list, unix.CAP_NET_BIND_SERVICE)
			break
		}
	}
	return list
}

// confine gives up all capabilities but those named, for good and for all that is executed from here on: also a program that is set-uid gains none. It
// is for a program that does not use cgo, whose threads it all changes.
func confine(keep []int) error {
	_ = rlimit.RemoveMemlock() // kernels before 5.11 need CAP_SYS_RESOURCE for that; where it cannot be done the tracer says so
	var mask uint64
	for _, c := range keep {
		mask |= 1 << c
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var has [2]unix.CapUserData
	if err := unix.Capget(&header, &has[0]); err != nil {
		return fmt.Errorf("reading the capabilities: %w", err)
	}
	if has[0].Effective&(1<<unix.CAP_SETPCAP) != 0 { // else the bounding set stays as it is, and no_new_privs is what holds
		for c := range 64 {
			if mask>>c&1 != 0 {
				continue
			}
			_, _, errno := syscall.AllThreadsSyscall(unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, uintptr(c), 0)
			if errno == unix.EINVAL {
				break // the kernel has no more
			}
			if errno != 0 {
				return fmt.Errorf("giving up capability %d: %w", c, errno)
			}
		}
	}
	if _, _, errno := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0); errno != 0 {
		return fmt.Errorf("setting no_new_privs: %w", errno)
	}
	for i := range has {
		has[i].Permitted &= uint32(mask >> (32 * i))
		has[i].Effective, has[i].Inheritable = has[i].Permitted, 0
	}
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&has[0])), 0); errno != 0 {
		return fmt.Errorf("giving up capabilities: %w", errno)
	}
	return nil
}
