package tracer

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"gpu-exporter/tracer/tracefs"
)

// Limits bound the kernel side. Zero fields have the defaults.
type Limits struct {
	Ring      int // bytes of the ring buffer, a power of two; default 4 MiB
	Processes int // default 16384
	Threads   int // that called a device and live; default 16384
	Calls     int // pairs of control group and call number; default 8192, and as many of failed calls by status
	Opens     int // triples of control group, node and result; default 4096
	Groups    int // default 4096
	OpenRate  int // records of opens of one process in a second; default 512
	CallRate  int // records of calls of one process in a second; default 20000

	// What one control group may have: of processes and threads 2048 each, 256 call numbers, 128 kinds of failed calls, 64 of failed opens, and
	// 40000 records in a second, or of two processes where that is more.
	shares    map[bpfTable]int
	groupRate int
}

// groupRate is the kernel side's default.
const groupRate = 40_000

// kernel holds the programs and maps that are loaded, and what attaches them.
type kernel struct {
	collection *ebpf.Collection
	links      []link.Link      // a link that is collected detaches its program
	xid        *ebpf.Collection // nil: not attached to the driver's tracepoint
	xidLink    link.Link
}

// programs lists, by mode, what is attached; on_… are common.
var (
	common     = []string{bpfProgOnExit, bpfProgOnExec, bpfProgOnFork}
	tracepoint = []string{bpfProgTpIoctlEnter, bpfProgTpIoctlExit, bpfProgTpOpenEnter, bpfProgTpOpenatEnter, bpfProgTpOpenExit, bpfProgTpClose}
	fentry     = []string{bpfProgFeIoctlExit, bpfProgFeCompatExit, bpfProgFeIoctlEnter, bpfProgFeCompatEnter, bpfProgFeOpen, bpfProgFeClose}
)

// open goes down the ladder: the cheapest way to attach that the kernel has. mode is "off" with a reason when there is none; with another
// mode the reason says why it is not the first.
func open(config *Config) (k *kernel, mode, reason string) {
	if config.Mode == ModeOff {
		return nil, ModeOff, "switched off"
	}
	if err := possible(config); err != nil {
		return nil, ModeOff, err.Error()
	}
	var first error
	if config.Mode != ModeTracepoint {
		k, err := load(config, ModeFentry)
		if err == nil {
			return k, ModeFentry, ""
		}
		first = err
		if config.Mode == ModeFentry {
			return nil, ModeOff, line(err)
		}
	}
	k, err := load(config, ModeTracepoint)
	if err != nil {
		return nil, ModeOff, line(err)
	}
	if first != nil {
		reason = "fentry: " + line(first)
	}
	return k, ModeTracepoint, reason
}

// possible tells what the kernel or this process plainly lacks, in words that help more than the error of an attempt.
func possible(config *Config) error {
	if _, err := os.Stat(config.sysRoot + "/kernel/btf/vmlinux"); err != nil {
		return fmt.Errorf("the kernel has no BTF (CONFIG_DEBUG_INFO_BTF): %w", err)
	}
	if text, err := readFile(config.sysRoot + "/kernel/security/lockdown"); err == nil && strings.Contains(text, "[confidentiality]") {
		return errors.New("the kernel is locked down (confidentiality): BPF may not read its memory")
	}
	status, err := readFile(config.ProcRoot + "/self/status")
	if err != nil {
		return nil // the attempt will tell
	}
	for l := range strings.Lines(status) {
		value, ok := strings.CutPrefix(l, "CapEff:")
		if !ok {
			continue
		}
		caps, err := strconv.ParseUint(strings.TrimSpace(value), 16, 64)
		has := func(c int) bool { return caps>>c&1 != 0 }
		if err == nil && !has(unix.CAP_SYS_ADMIN) && !(has(unix.CAP_BPF) && has(unix.CAP_PERFMON)) {
			return errors.New("needs CAP_BPF and CAP_PERFMON, or root")
		}
	}
	return nil
}

// line makes one line of an error; the verifier's log has many.
func line(err error) string {
	var verifier *ebpf.VerifierError
	if errors.As(err, &verifier) {
		err = fmt.Errorf("the kernel refuses the program: %w", verifier.Cause)
	}
	text, _, _ := strings.Cut(err.Error(), "\n")
	text, _, _ = strings.Cut(text, " (MEMLOCK may be too low") // it was raised: load
	return text
}

// load loads and attaches the programs of one mode.
func load(config *Config, mode string) (*kernel, error) {
	spec, err := loadBpf()
	if err != nil {
		return nil, fmt.Errorf("reading the programs: %w", err)
	}
	keep := append([]string(nil), common...)
	if mode == ModeFentry {
		keep = append(keep, fentry...)
	} else {
		keep = append(keep, tracepoint...)
	}
	only(spec, keep)
	if mode == ModeFentry {
		if err := fentryTargets(spec); err != nil {
			return nil, err
		}
	}
	if err := configure(spec, config); err != nil {
		return nil, err
	}
	if err := rlimit.RemoveMemlock(); err != nil { // kernels before 5.11 count maps against it
		return nil, fmt.Errorf("raising RLIMIT_MEMLOCK: %w", err)
	}
	k := &kernel{}
	if k.collection, err = ebpf.NewCollection(spec); err != nil {
		if mode == ModeFentry { // a hook on close is good to have: without it the slow reconciliation finds what was closed
			delete(spec.Programs, bpfProgFeClose)
			k.collection, err = ebpf.NewCollection(spec)
		}
		if err != nil {
			return nil, fmt.Errorf("loading: %w", err)
		}
	}
	if mode == ModeFentry {
		err = k.attachFentry()
	} else {
		err = tracefs.Do(k.attachTracepoints)
	}
	if err == nil {
		err = k.attachCommon()
	}
	if err != nil {
		k.close()
		return nil, err
	}
	return k, nil
}

func only(spec *ebpf.CollectionSpec, keep []string) {
	for name := range spec.Programs {
		kept := false
		for _, k := range keep {
			kept = kept || k == name
		}
		if !kept {
			delete(spec.Programs, name)
		}
	}
}

// configure sets sizes and constants.
func configure(spec *ebpf.CollectionSpec, config *Config) error {
	l := config.Limits
	for name, size := range map[string]int{
		bpfMapEvents: l.Ring, bpfMapHolders: l.Processes, bpfMapThreads: l.Threads, bpfMapCalls: l.Calls, bpfMapErrors: l.Calls,
		bpfMapOpens: l.Opens, bpfMapGroups: l.Groups,
	} {
		if size > 0 {
			spec.Maps[name].MaxEntries = uint32(size)
		}
	}
	at, err := controllerNumber(config.controller)
	if err != nil {
		return err
	}
	values := map[string]any{
		bpfVarCgroupV1:    config.cgroupV1,
		bpfVarCgroupAt:    at,
		bpfVarHaveTaskBtf: !config.noTaskBTF && features.HaveProgramHelper(ebpf.TracePoint, asm.FnGetCurrentTaskBtf) == nil,
	}
	if l.OpenRate > 0 {
		values[bpfVarOpenRate] = uint32(l.OpenRate)
	}
	if l.CallRate > 0 {
		values[bpfVarCallRate] = uint32(l.CallRate)
		values[bpfVarGroupRate] = uint32(max(groupRate, 2*l.CallRate))
	}
	if l.groupRate > 0 {
		values[bpfVarGroupRate] = uint32(l.groupRate)
	}
	if l.shares != nil {
		var shares [bpfTableTABLES]uint32
		if err := spec.Variables[bpfVarShares].Get(&shares); err != nil {
			return fmt.Errorf("setting up the programs: %w", err)
		}
		for table, n := range l.shares {
			shares[table] = uint32(n)
		}
		values[bpfVarShares] = shares
	}
	if config.Prefix != "" {
		var prefix [64]byte
		if len(config.Prefix) >= len(prefix) {
			return fmt.Errorf("setting up the programs: prefix %.80q is too long", config.Prefix)
		}
		copy(prefix[:], config.Prefix)
		values[bpfVarPrefix], values[bpfVarPrefixLen] = prefix, uint32(len(config.Prefix))
	}
	for name, value := range values {
		if err := spec.Variables[name].Set(value); err != nil {
			return fmt.Errorf("setting up the programs: %w", err)
		}
	}
	return nil
}

// controllerNumber returns the kernel's number of a controller of version 1. Controllers that a kernel lacks, or has in version 2 alone, move or
// remove others. Of none it is 0.
func controllerNumber(name string) (uint32, error) {
	if name == "" {
		return 0, nil
	}
	if name == "blkio" {
		name = "io"
	}
	types, err := btf.LoadKernelSpec()
	if err != nil {
		return 0, fmt.Errorf("reading the kernel's types: %w", err)
	}
	var numbers *btf.Enum
	if err := types.TypeByName("cgroup_subsys_id", &numbers); err != nil {
		return 0, fmt.Errorf("finding the kernel's control groups: %w", err)
	}
	for _, v := range numbers.Values {
		if v.Name == name+"_cgrp_id" {
			return uint32(v.Value), nil
		}
	}
	return 0, fmt.Errorf("finding the kernel's control groups: no controller %q", name)
}

// fentryTargets names the functions that differ by architecture and kernel, and leaves out what the kernel has not.
func fentryTargets(spec *ebpf.CollectionSpec) error {
	native, compat := "__x64_sys_ioctl", "__ia32_compat_sys_ioctl"
	switch runtime.GOARCH {
	case "amd64":
	case "arm64":
		native, compat = "__arm64_sys_ioctl", "__arm64_compat_sys_ioctl"
	default:
		return fmt.Errorf("fentry on %s is not known", runtime.GOARCH)
	}
	spec.Programs[bpfProgFeIoctlExit].AttachTo = native
	spec.Programs[bpfProgFeCompatExit].AttachTo = compat
	has := map[string]bool{}
	if symbols, err := os.Open("/proc/kallsyms"); err == nil {
		defer symbols.Close()
		has = hasSymbols(symbols, "filp_flush", compat, compatHook)
	}
	if has["filp_flush"] { // what every kind of close calls from 6.6 on
		spec.Programs[bpfProgFeClose].AttachTo = "filp_flush"
	}
	if !has[compat] { // no 32-bit programs
		delete(spec.Programs, bpfProgFeCompatExit)
	}
	if !has[compat] || !has[compatHook] {
		delete(spec.Programs, bpfProgFeCompatEnter)
	}
	return nil
}

const compatHook = "security_file_ioctl_compat"

func (k *kernel) keep(l link.Link, err error) error {
	if err == nil {
		k.links = append(k.links, l)
	}
	return err
}

// attachFentry attaches exits before entries: an entry whose exit is not seen would stay under way.
func (k *kernel) attachFentry() error {
	for _, name := range fentry {
		program := k.collection.Programs[name]
		if program == nil {
			continue // see fentryTargets
		}
		err := k.keep(link.AttachTracing(link.TracingOptions{Program: program}))
		if err != nil && name != bpfProgFeClose { // which is good to have, see load
			return fmt.Errorf("attaching %s: %w", name, err)
		}
	}
	return nil
}

func (k *kernel) attachTracepoints() error {
	for _, hook := range []struct {
		event, program string
		optional       bool // arm64 has neither open nor creat; openat2 came with 5.6
	}{
		{"sys_exit_ioctl", bpfProgTpIoctlExit, false},
		{"sys_enter_ioctl", bpfProgTpIoctlEnter, false},
		{"sys_exit_openat", bpfProgTpOpenExit, false},
		{"sys_enter_openat", bpfProgTpOpenatEnter, false},
		{"sys_exit_openat2", bpfProgTpOpenExit, true},
		{"sys_enter_openat2", bpfProgTpOpenatEnter, true},
		{"sys_exit_open", bpfProgTpOpenExit, true},
		{"sys_enter_open", bpfProgTpOpenEnter, true},
		{"sys_exit_creat", bpfProgTpOpenExit, true},
		{"sys_enter_creat", bpfProgTpOpenEnter, true},
		{"sys_enter_close", bpfProgTpClose, true},
	} {
		err := k.keep(link.Tracepoint("syscalls", hook.event, k.collection.Programs[hook.program], nil))
		if err != nil && !(hook.optional && errors.Is(err, os.ErrNotExist)) {
			return fmt.Errorf("attaching %s: %w", hook.event, err)
		}
	}
	return nil
}

func (k *kernel) attachCommon() error {
	for event, program := range map[string]string{
		"sched_process_exit": bpfProgOnExit, "sched_process_exec": bpfProgOnExec, "sched_process_fork": bpfProgOnFork,
	} {
		if err := k.keep(link.AttachRawTracepoint(link.RawTracepointOptions{Name: event, Program: k.collection.Programs[program]})); err != nil {
			return fmt.Errorf("attaching %s: %w", event, err)
		}
	}
	return nil
}

func (k *kernel) close() {
	for _, l := range k.links {
		_ = l.Close() // the kernel detaches with the last descriptor
	}
	k.detachXid()
	k.collection.Close()
}
