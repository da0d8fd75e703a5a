package tracer

import (
	"bufio"
	"compress/gzip"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"gpu-exporter/exporter/processes"
	"gpu-exporter/tracer/abi"
	"gpu-exporter/tracer/activity"
	"gpu-exporter/tracer/ledger"
)

// bytesOf is a record as the kernel side sends it.
func bytesOf[T any](e *T) []byte {
	return slices.Clone(unsafe.Slice((*byte)(unsafe.Pointer(e)), unsafe.Sizeof(*e)))
}

// TestRecordedCalls sends a recording through the path that the kernel's records take: bytes, decoder, process table, ledger, report. At the
// end of each step the report's figure is NVML's.
func TestRecordedCalls(t *testing.T) {
	const pid, start = 432, 7
	uuid := ledger.UUID{}
	var events []Event
	config := Config{ProcRoot: t.TempDir(), Events: func(e Event) { events = append(events, e) }}
	r := &run{
		config: &config, log: slog.New(slog.DiscardHandler), groups: newGroups(&config, nil), processes: map[int]*process{},
		proc: &processes.Reader{Root: config.ProcRoot}, ledger: ledger.New(ledger.Config{}), lost: map[string]uint64{},
		version: abi.Version{Major: 580, Minor: 159, Patch: 4},
	}
	defer r.groups.close()
	opened := &bpfOpenEvent{First: 1}
	opened.H.Tgid, opened.H.Tid, opened.H.Kind, opened.H.Node, opened.H.Start, opened.H.Time = pid, pid, 1, 1, start*userTicks+1, 1
	take := func(raw []byte) {
		t.Helper()
		record, err := decode(raw)
		if err != nil {
			t.Fatal(err)
		}
		r.take(record)
	}
	take(bytesOf(opened))

	data, err := os.ReadFile("testdata/alloc-steps.nvml.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	type point struct {
		T0    int64             `json:"t0"`
		Step  string            `json:"step"`
		Procs map[string]uint64 `json:"procs"`
	}
	var points []point
	for l := range strings.Lines(string(data)) {
		var p point
		if err := json.Unmarshal([]byte(l), &p); err != nil {
			t.Fatal(err)
		}
		points = append(points, p)
	}
	compared := 0
	check := func(before int64) {
		for len(points) > 0 && points[0].T0 < before {
			if want := points[0].Procs[strconv.Itoa(pid)]; want > 0 {
				var got uint64
				if p := r.processes[pid]; p != nil {
					for _, d := range r.process(p, points[0].T0).Devices {
						got += d.Used.V
					}
				}
				if got != want {
					t.Errorf("%s: %d bytes, NVML %d", points[0].Step, got, want)
				}
				compared++
			}
			points = points[1:]
		}
	}
	file, err := os.Open("testdata/alloc-steps.ioctl.jsonl.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	unzipped, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(unzipped)
	lines.Buffer(nil, 1<<20)
	for seq := uint64(1); lines.Scan(); seq++ {
		var c struct {
			TS, Dur       uint64
			TGID, TID     uint32
			Rdev, Cmd     string
			Ret           int64
			In, Out, Deep string
		}
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			t.Fatal(err)
		}
		if c.TGID != pid {
			continue
		}
		check(int64(c.TS))
		e := &bpfCallEvent{Entry: c.TS, Seq: seq, Ret: c.Ret}
		cmd, _ := strconv.ParseUint(c.Cmd, 0, 32)
		e.Cmd = uint32(cmd)
		e.H.Time, e.H.Start, e.H.Tgid, e.H.Tid, e.H.Kind, e.H.Node = c.TS+c.Dur, start*userTicks+1, pid, c.TID, 4, 2
		if !strings.HasPrefix(c.Rdev, "195:") {
			e.H.Node = 3
		}
		in, _ := hex.DecodeString(c.In)
		out, _ := hex.DecodeString(c.Out)
		deep, _ := hex.DecodeString(c.Deep)
		if e.H.Node == 2 { // of these the kernel side keeps another part
			in = in[min(8, len(in)):]
		}
		copy(e.In[:], in)
		e.OutLen, e.DeepLen = uint32(copy(e.Out[:], out)), uint32(copy(e.Deep[:], deep))
		if uuid == (ledger.UUID{}) && e.H.Node == 3 && e.Cmd == 37 { // the GPU that the process registers
			uuid = ledger.UUID(in[:16])
			r.gpus = []ledger.GPU{{ID: 1, Minor: 0, UUID: uuid}}
			r.ledger.SetGPUs(r.gpus)
		}
		take(bytesOf(e))
	}
	check(1 << 62)
	if compared < 15 {
		t.Errorf("%d readings compared", compared)
	}
	if p := r.processes[pid]; !p.Compute || !p.FromBirth {
		t.Errorf("%+v", p.Process)
	}
	kinds := map[string]int{}
	var oom uint64
	for _, e := range events {
		kinds[e.Kind]++
		if e.Kind == "oom" {
			oom = e.Size
			if e.UUID != uuidText(uuid) {
				t.Errorf("out of memory on %q", e.UUID)
			}
		}
	}
	if kinds["context"] != 1 || kinds["oom"] != 1 || oom != 200<<30 || kinds["alloc"] < 15 || kinds["free"] == 0 {
		t.Errorf("told %v, out of memory at %d", kinds, oom)
	}
	gone := &bpfEndEvent{Code: 9}
	gone.H.Tgid, gone.H.Kind, gone.H.Start = pid, 7, start*userTicks+1
	take(bytesOf(gone))
	if s := r.ledger.Stats(); len(r.processes) != 0 || s.Objects != 0 {
		t.Errorf("after the exit: %d processes, %+v", len(r.processes), s)
	}
}

// TestReusedPID has the same number for two processes.
func TestReusedPID(t *testing.T) {
	config := Config{ProcRoot: t.TempDir()}
	r := &run{
		config: &config, log: slog.New(slog.DiscardHandler), groups: newGroups(&config, nil), processes: map[int]*process{},
		proc: &processes.Reader{Root: config.ProcRoot}, ledger: ledger.New(ledger.Config{}), lost: map[string]uint64{},
	}
	defer r.groups.close()
	open := func(start uint64, minor uint32) {
		e := &bpfOpenEvent{Minor: minor, First: 1}
		e.H.Tgid, e.H.Kind, e.H.Node, e.H.Start = 50, 1, 1, start*userTicks
		r.take(e)
	}
	open(100, 0)
	open(100, 1)
	if p := r.processes[50]; len(p.minors) != 2 {
		t.Fatalf("%+v", p)
	}
	open(200, 2) // the end of the first was not seen
	if p := r.processes[50]; p.StartTime != 200 || len(p.minors) != 1 || !p.minors[2] {
		t.Errorf("%+v", p)
	}
	stale := &bpfEndEvent{Code: 0}
	stale.H.Tgid, stale.H.Kind, stale.H.Start = 50, 7, 200*userTicks
	r.take(stale)
	if len(r.processes) != 0 {
		t.Error("it ended")
	}
}

// TestYoungAfterLoss: a process that begins after a loss is exact from its first open on, before its first call too.
func TestYoungAfterLoss(t *testing.T) {
	config := Config{ProcRoot: t.TempDir()}
	r := &run{
		config: &config, log: slog.New(slog.DiscardHandler), groups: newGroups(&config, nil), processes: map[int]*process{},
		proc: &processes.Reader{Root: config.ProcRoot}, ledger: ledger.New(ledger.Config{}), lost: map[string]uint64{}, version: abi.Version{Major: 580},
	}
	defer r.groups.close()
	for pid, want := range map[uint32]bool{50: false, 51: true} {
		e := &bpfOpenEvent{First: 1}
		e.H.Tgid, e.H.Kind, e.H.Node, e.H.Start, e.H.Time = pid, 1, 2, 100*userTicks, 10
		if want {
			r.lostAll(9)
		}
		r.take(e)
		if !want {
			r.lostAll(11)
		}
		if got := r.process(r.processes[int(pid)], 1).FromBirth; got != want {
			t.Errorf("process %d: from birth %v, want %v", pid, got, want)
		}
	}
}

func FuzzDecode(f *testing.F) {
	for kind := range uint32(10) {
		e := &bpfCallEvent{OutLen: 48, DeepLen: 72, Cmd: 0xc030462b}
		e.H.Tgid, e.H.Kind, e.H.Node = 1, kind, 2
		f.Add(bytesOf(e))
	}
	f.Add([]byte{})
	root := f.TempDir()
	f.Fuzz(func(t *testing.T, raw []byte) {
		record, err := decode(raw)
		if (record == nil) == (err == nil) {
			t.Fatalf("%v, %v", record, err)
		}
		if err != nil {
			return
		}
		config := Config{ProcRoot: root, Events: func(Event) {}}
		r := &run{
			config: &config, log: slog.New(slog.DiscardHandler), groups: newGroups(&config, nil), processes: map[int]*process{},
			proc: &processes.Reader{Root: root}, ledger: ledger.New(ledger.Config{}), lost: map[string]uint64{}, version: abi.Version{Major: 580},
		}
		defer r.groups.close()
		r.take(record)
		r.take(record)
		r.emit = func(*activity.Report) {}
		r.give()
	})
}

// TestOff are the reasons why a tracer is off: states, not errors.
func TestOff(t *testing.T) {
	w := start(t, func(c *Config) { c.Mode = ModeOff })
	if r := w.until("off", func(r *activity.Report) bool { return r.Mode == ModeOff }); r.Reason != "switched off" {
		t.Error(r.Reason)
	}
	if _, err := New(Config{Mode: "kprobe"}); err == nil {
		t.Error("a mode that does not exist is taken")
	}
	if _, err := New(Config{Devices: []Device{{1, 3, "tape"}}}); err == nil {
		t.Error("a kind of device that does not exist is taken")
	}
}

// TestKernelLacks is about kernels without type information, and locked-down ones.
func TestKernelLacks(t *testing.T) {
	root := t.TempDir()
	reason := func() string {
		w := start(t, func(c *Config) { c.sysRoot = root })
		return w.until("off", func(r *activity.Report) bool { return r.Mode == ModeOff }).Reason
	}
	if got := reason(); !strings.HasPrefix(got, "the kernel has no BTF") {
		t.Errorf("%q", got)
	}
	for name, content := range map[string]string{"btf/vmlinux": "", "security/lockdown": "none integrity [confidentiality]\n"} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(root, "kernel", name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, "kernel", name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if got := reason(); !strings.HasPrefix(got, "the kernel is locked down") {
		t.Errorf("%q", got)
	}
}

// TestLockdown locks the kernel of the virtual machine down, first to integrity, in which it is traced, and then to confidentiality, which does not
// let BPF read the kernel's memory. There is no way back, so scripts/test-vm runs this test last.
func TestLockdown(t *testing.T) {
	if os.Getenv("GPU_EXPORTER_TEST_VM") == "" {
		t.Skip("locks the kernel: scripts/test-vm")
	}
	lock := func(level string) {
		t.Helper()
		if err := os.WriteFile("/sys/kernel/security/lockdown", []byte(level), 0); err != nil {
			t.Fatal(err)
		}
	}
	lock("integrity")
	t.Run("integrity", func(t *testing.T) {
		w := start(t, nil)
		cmd, _, _ := startChild(t, nil, "open", "/dev/zero")
		w.held(cmd.Process.Pid)
	})
	lock("confidentiality")
	w := start(t, nil)
	r := w.until("off", func(r *activity.Report) bool { return r.Mode == ModeOff })
	if !strings.HasPrefix(r.Reason, "the kernel is locked down (confidentiality)") {
		t.Errorf("%q", r.Reason)
	}
	// The kernel does refuse: so says the attempt too, where nothing is known of the lock.
	config := Config{Mode: testMode, Devices: devices, sysRoot: t.TempDir()}
	if err := os.MkdirAll(config.sysRoot+"/kernel/btf", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(config.sysRoot+"/kernel/btf/vmlinux", nil, 0o644); err != nil {
		t.Fatal(err)
	}
	tracer, err := New(config)
	if err != nil {
		t.Fatal(err)
	}
	k, mode, reason := open(&tracer.config)
	if k != nil || mode != ModeOff || reason == "" || strings.Contains(reason, "\n") {
		t.Errorf("%q, %q", mode, reason)
	}
	t.Logf("%q", reason)
}

// asNobody is the variable by which a test knows that it is run again as another user.
const asNobody = "TRACER_AS_NOBODY"

// nobody prepares to run a test as a user who has only some capabilities.
func nobody(t *testing.T, capabilities ...uintptr) *exec.Cmd {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	path := filepath.Join(t.TempDir(), "test") // where nobody may read it
	data, err := os.ReadFile("/proc/self/exe")
	if err == nil {
		err = os.WriteFile(path, data, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	for dir := filepath.Dir(path); dir != "/" && dir != "/tmp"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command(path, "-test.run", "^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), asNobody+"=1")
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}, AmbientCaps: capabilities}
	return cmd
}

// TestNoCapability runs without CAP_BPF.
func TestNoCapability(t *testing.T) {
	if os.Getenv(asNobody) != "" {
		config := Config{Mode: ModeAuto, Devices: devices}
		tracer, err := New(config)
		if err != nil {
			t.Fatal(err)
		}
		k, mode, reason := open(&tracer.config)
		if k != nil || mode != ModeOff || reason != "needs CAP_BPF and CAP_PERFMON, or root" {
			t.Errorf("%v, %q, %q", k, mode, reason)
		}
		return
	}
	if out, err := nobody(t).CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS") {
		t.Errorf("%v: %s", err, out)
	}
}

// TestProcUnreadable runs with the capabilities for BPF and without the one for other processes' descriptors. Who holds a device comes from events
// then, and a look that fails takes nothing away. Who had one before the tracer is found at its next call.
func TestProcUnreadable(t *testing.T) {
	if os.Getenv(asNobody) != "" {
		w := start(t, nil)
		ask := func(what string) int {
			var pid int
			fmt.Println(what)
			if _, err := fmt.Scan(&pid); err != nil {
				t.Fatal(err)
			}
			return pid
		}
		before := ask("attached")
		w.notHeld(before) // its descriptors are hidden
		held := ask("open and close one of two")
		w.held(held)
		time.Sleep(50 * time.Millisecond) // the close is looked at
		w.held(held)
		if p := process1(w.until("it", func(*activity.Report) bool { return true }), held); !p.FromBirth || p.Comm == "" || p.Cgroup == "" {
			t.Errorf("%+v", p)
		}
		ask("call")
		w.held(before)
		if p := process1(w.until("it", func(*activity.Report) bool { return true }), before); p.FromBirth {
			t.Errorf("%+v", p)
		}
		ask("exit")
		w.notHeld(held)
		return
	}
	capabilities := []uintptr{unix.CAP_BPF, unix.CAP_PERFMON, unix.CAP_DAC_READ_SEARCH, unix.CAP_SYS_ADMIN}
	if has, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, unix.CAP_SYS_RESOURCE, 0, 0, 0); err == nil && has == 1 {
		capabilities = append(capabilities, unix.CAP_SYS_RESOURCE) // kernels before 5.11 count maps against a limit
	}
	cmd := nobody(t, capabilities...)
	before, call, called := startReceiver(t)
	var held *exec.Cmd
	answers, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		answers.Close()
		_, _ = io.Copy(io.Discard, out)
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	}()
	questions := 0
	for lines := bufio.NewScanner(out); lines.Scan(); {
		pid := before.Process.Pid
		switch lines.Text() {
		case "attached":
		case "open and close one of two":
			held, _, _ = startChild(t, nil, "dup", "/dev/zero")
			pid = held.Process.Pid
		case "call":
			call.Close()
			called()
		case "exit":
			_ = held.Process.Kill()
		default:
			t.Log(lines.Text())
			continue
		}
		questions++
		fmt.Fprintln(answers, pid)
	}
	if questions != 4 {
		t.Errorf("it asked %d times", questions)
	}
}

// TestAuto goes down the ladder as far as this kernel demands, and says why.
func TestAuto(t *testing.T) {
	w := start(t, func(c *Config) { c.Mode = ModeAuto })
	r := w.until("a mode", func(r *activity.Report) bool { return r.Mode != "" })
	if r.Mode == ModeTracepoint && !strings.HasPrefix(r.Reason, "fentry: ") || r.Mode == ModeOff || strings.Contains(r.Reason, "\n") {
		t.Errorf("%q, %q", r.Mode, r.Reason)
	}
	if testMode == ModeFentry && r.Mode != ModeFentry {
		t.Error("a kernel that has fentry is not traced by it")
	}
	t.Logf("%s; %s", r.Mode, r.Reason)
	cmd, _, _ := startChild(t, nil, "open", "/dev/zero")
	w.held(cmd.Process.Pid)
}

// TestOldKernel reads descriptors and groups the way that kernels before 5.11 need.
func TestOldKernel(t *testing.T) {
	w := start(t, func(c *Config) { c.noTaskBTF = true })
	fd, err := unix.Open("/dev/full", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	_ = unix.IoctlSetInt(fd, 0x4611, 0) // ENOTTY
	r := w.until("the call", func(r *activity.Report) bool {
		return total(r, calls("ctl_0x11")) == 1 && process1(r, os.Getpid()) != nil
	})
	if n := total(r, opens("ctl", "ok")); n != 1 {
		t.Errorf("%d opens", n)
	}
}

// TestBadForm makes driver calls of a form that no driver version has, on a terminal, whose calls have the same low bytes: TIOCGSID is 0x29,
// TCSETS2 is 0x2b with 44 bytes. They succeed, so the ledger must know that it missed something.
func TestBadForm(t *testing.T) {
	master, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skip(err)
	}
	defer unix.Close(master)
	root := t.TempDir()
	writeDriver(t, root)
	w := start(t, func(c *Config) { c.driverRoot, c.Devices = root, append(slices.Clone(devices), Device{5, 2, "ctl"}) })
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	r := w.until("the terminal", func(r *activity.Report) bool { return process1(r, os.Getpid()) != nil })
	if !r.Ledger || r.LedgerReason != "" {
		t.Fatalf("ledger %v, %q", r.Ledger, r.LedgerReason)
	}
	var termios [64]byte
	const tcgets2, tcsets2 = 0x802c542a, 0x402c542b
	for _, cmd := range []uintptr{tcgets2, tcsets2} {
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), cmd, uintptr(unsafe.Pointer(&termios))); errno != 0 {
			t.Skip(errno)
		}
	}
	w.until("it no longer exact", func(r *activity.Report) bool { p := process1(r, os.Getpid()); return p != nil && !p.FromBirth })
	r = w.until("the calls", func(r *activity.Report) bool { return total(r, calls("rm_alloc")) == 1 })
	if total(r, calls("rm_control")) != 1 {
		t.Errorf("%+v", r.Groups)
	}
}

// writeDriver makes the files of a loaded driver below a /proc directory.
func writeDriver(t *testing.T, root string) {
	t.Helper()
	for name, content := range map[string]string{
		"version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (builder)  Tue\nGCC version:  gcc version 12.3.0\n",
		"gpus/0000:0a:00.0/information": "Model: \t\t NVIDIA H200\nIRQ:   \t\t 16\nGPU UUID: \t GPU-01020304-0506-0708-090a-0b0c0d0e0f10\nVideo BIOS: \t 96.00\n" +
			"Bus Type: \t PCIe\nBus Location: \t 0000:0a:00.0\nDevice Minor: \t 0\nGPU Excluded:\t No\n",
		"gpus/0001:ff:1f.0/information": "GPU UUID: \t GPU-????????-????-????-????-????????????\nBus Location: \t 0001:ff:1f.0\nDevice Minor: \t 3\n",
	} {
		path := filepath.Join(root, "driver/nvidia", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func TestDriver(t *testing.T) {
	root := t.TempDir()
	if _, err := driverVersion(root); err == nil {
		t.Error("a version without a driver")
	}
	writeDriver(t, root)
	if v, err := driverVersion(root); err != nil || v != (abi.Version{Major: 580, Minor: 159, Patch: 4}) {
		t.Errorf("%v, %v", v, err)
	}
	gpus, complete := hostGPUs(root)
	want := []ledger.GPU{{ID: 0x000a00, Minor: 0, UUID: ledger.UUID{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}}, {ID: 0x1ff1f, Minor: 3}}
	if complete || !slices.Equal(gpus, want) {
		t.Errorf("%v, %v", gpus, complete)
	}
	if got := uuidText(want[0].UUID); got != "GPU-01020304-0506-0708-090a-0b0c0d0e0f10" {
		t.Error(got)
	}
	devices := "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n238 nvidia-uvm\n241 nvidia-caps\n242 nvidia-caps-imex-channels\n243 nvidia-nvswitch\n\nBlock devices:\n  7 loop\n"
	if err := os.WriteFile(root+"/devices", []byte(devices), 0o644); err != nil {
		t.Fatal(err)
	}
	r, err := deviceRules(root, nil)
	if err != nil {
		t.Fatal(err)
	}
	for d, want := range map[device]string{
		{195, 0}: "gpu", {195, 247}: "gpu", {195, 254}: "unknown", {195, 255}: "ctl", {238, 0}: "uvm", {241, 9}: "caps", {243, 0}: "unknown", {1, 3}: "unknown",
	} {
		if got := nodeName(r.node(d)); got != want {
			t.Errorf("%v: %s, want %s", d, got, want)
		}
	}
	if s := statusRules(abi.Version{Major: 580, Minor: 159}); s.RmStatus[0x2b] != 41 || s.RmStatus[0x29] != 13 || s.AllocStatus40 != 37 || s.UvmStatus[33] != 9261 {
		t.Errorf("%+v", s)
	}
	if s := statusRules(abi.Version{Major: 999}); s != (bpfStatusRules{}) {
		t.Error("rules for a driver that is not known")
	}
}

func TestXid(t *testing.T) {
	format := "name: nvidia_dev_xid\nID: 1\nformat:\n\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\n" +
		"\tfield:__data_loc char[] dev;\toffset:8;\tsize:4;\tsigned:0;\n\tfield:u64 error_code;\toffset:16;\tsize:8;\tsigned:0;\n\tfield:__data_loc char[] msg;\toffset:24;\tsize:4;\tsigned:0;\n"
	fields := parseFormat(format)
	if fields["dev"] != (field{8, 4}) || fields["error_code"] != (field{16, 8}) || fields["msg"] != (field{24, 4}) {
		t.Errorf("%v", fields)
	}
	for text, want := range map[string]int{
		"pid=1234, name=python, Graphics SM Warp Exception": 1234, "pid='<unknown>', name=<unknown>": 0, "GPU has fallen off the bus.": 0,
	} {
		if got := xidPID(text); got != want {
			t.Errorf("%q: %d", text, got)
		}
	}
}

// Registering an address space with UVM, or a channel, makes a process one that computes; initialising UVM, which nvmlInit does too, does not.
func TestContext(t *testing.T) {
	v, err := abi.ParseVersion("580.159.04")
	if err != nil {
		t.Fatal(err)
	}
	event := func(node bpfNode, cmd uint32, words map[int]uint32) *bpfCallEvent {
		e := &bpfCallEvent{Cmd: cmd, OutLen: 48}
		e.H.Node = uint32(node)
		for at, w := range words {
			binary.LittleEndian.PutUint32(e.Out[at:], w)
		}
		return e
	}
	const alloc = 0xc030462b
	for name, c := range map[string]struct {
		e    *bpfCallEvent
		want bool
	}{
		"initialise UVM":            {event(bpfNodeNODE_UVM, 0x30000001, nil), false},
		"register an address space": {event(bpfNodeNODE_UVM, 25, nil), true},
		"register one, refused":     {event(bpfNodeNODE_UVM, 25, map[int]uint32{28: 0x1f}), false},
		"a channel":                 {event(bpfNodeNODE_CTL, alloc, map[int]uint32{12: 0xc86f}), true},
		"a channel, refused":        {event(bpfNodeNODE_CTL, alloc, map[int]uint32{12: 0xc86f, 40: 0x51}), false},
		"memory":                    {event(bpfNodeNODE_CTL, alloc, map[int]uint32{12: 0x40}), false},
		"a client":                  {event(bpfNodeNODE_CTL, alloc, map[int]uint32{12: 0x41}), false},
	} {
		if got := c.e.context(v); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}
