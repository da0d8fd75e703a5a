package probes

import (
	"bufio"
	"debug/elf"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// build compiles the stand-in library and the program that calls it, once for all tests. Where no compiler is they are given: scripts/test-vm.
var build = sync.OnceValues(func() (string, error) {
	if dir := os.Getenv("GPU_EXPORTER_TEST_PROGRAMS"); dir != "" {
		return dir, nil
	}
	dir, err := os.MkdirTemp("", "programs")
	if err != nil {
		return "", err
	}
	out, err := exec.Command("../testdata/programs/build", dir).CombinedOutput()
	if err != nil {
		os.Stderr.Write(out)
	}
	return dir, err
})

func TestMain(m *testing.M) {
	code := m.Run()
	if dir, err := build(); err == nil && dir != os.Getenv("GPU_EXPORTER_TEST_PROGRAMS") {
		os.RemoveAll(dir)
	}
	os.Exit(code)
}

// user is a running program that calls the stand-in.
type user struct {
	t      testing.TB
	cmd    *exec.Cmd
	input  io.WriteCloser
	output *bufio.Reader
}

// copyLibrary puts another copy of the library, which is another inode, into a folder of its own.
func copyLibrary(t testing.TB) (dir string) {
	t.Helper()
	built, err := build()
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(built + "/libcuda.so.1")
	if err != nil {
		t.Fatal(err)
	}
	dir = t.TempDir()
	if err := os.WriteFile(dir+"/libcuda.so.1", data, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func run(t testing.TB, libraries string) *user {
	t.Helper()
	built, err := build()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(built + "/user")
	cmd.Env = []string{"LD_LIBRARY_PATH=" + libraries}
	return begin(t, cmd)
}

func begin(t testing.TB, cmd *exec.Cmd) *user {
	t.Helper()
	u := &user{t: t, cmd: cmd}
	var err error
	if u.input, err = cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	output, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	u.output = bufio.NewReader(output)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(u.end)
	if got := u.line(); got != "ready" {
		t.Fatalf("the program says %q", got)
	}
	return u
}

func (u *user) line() string {
	u.t.Helper()
	line, err := u.output.ReadString('\n')
	if err != nil {
		u.t.Fatal(err)
	}
	return strings.TrimSpace(line)
}

func (u *user) do(what string) string {
	u.t.Helper()
	if _, err := io.WriteString(u.input, what+"\n"); err != nil {
		u.t.Fatal(err)
	}
	return u.line()
}

func (u *user) end() {
	u.input.Close()
	_ = u.cmd.Wait()
}

func (u *user) pid() int { return u.cmd.Process.Pid }

func open(t testing.TB, config Config) *Probes {
	t.Helper()
	p, err := New(config)
	if err != nil {
		t.Fatal(err)
	}
	return closing(t, p)
}

func closing(t testing.TB, p *Probes) *Probes {
	t.Helper()
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// What ../testdata/programs/user.c copies.
const (
	wantHtoD = 1 + 20 + 300 + 5<<32 + 7000 + 100*7 + 11*13*17
	wantDtoH = 2 + 30 + 400 + 6<<32 + 8000 + 10*3 + 5*5*5
)

// copies returns the totals of a process that copied n times. On a kernel before 5.15 calls inside the library are counted too, which the stand-in
// makes three of, with 1, 20 and 2 bytes.
func (p *Probes) copies(n uint64) Totals {
	t := Totals{HtoD: n * wantHtoD, DtoH: n * wantDtoH, Undecided: n * 77}
	if !p.cookies {
		t.HtoD += n * (1 + 20)
		t.DtoH += n * 2
	}
	return t
}

func TestCopiesOfTwoProcesses(t *testing.T) {
	p := open(t, Config{})
	dir := copyLibrary(t)
	a, b := run(t, dir), run(t, dir)
	p.Scan(a.pid())
	p.Scan(b.pid())
	if list := p.Libraries(); len(list) != 1 || !list[0].Up || list[0].Library != dir+"/libcuda.so.1" {
		t.Errorf("libraries %+v", list)
	}
	a.do("copies")
	b.do("copies")
	b.do("copies")
	all := p.Totals(nil)
	if got, want := all[a.pid()], p.copies(1); got != want {
		t.Errorf("first process %+v, want %+v", got, want)
	}
	if got, want := all[b.pid()], p.copies(2); got != want {
		t.Errorf("second process %+v, want %+v", got, want)
	}
}

func TestLaunches(t *testing.T) {
	p := open(t, Config{Launches: true})
	u := run(t, copyLibrary(t))
	p.Scan(u.pid())
	u.do("copies")
	if got := p.Totals(nil)[u.pid()]; got.Launches != 3 || got.HtoD != p.copies(1).HtoD {
		t.Errorf("%+v, want 3 launches", got)
	}
}

func TestAllocations(t *testing.T) {
	p := open(t, Config{})
	u := run(t, copyLibrary(t))
	p.Scan(u.pid())
	u.do("allocate")
	if got, want := p.Totals(nil)[u.pid()].Allocated, uint64(1000+20000+300000+4000000+1024*10+2<<20); got != want {
		t.Errorf("holds %d, want %d", got, want)
	}
	u.do("free")
	if got := p.Totals(nil)[u.pid()].Allocated; got != 0 {
		t.Errorf("holds %d after freeing all", got)
	}
}

func TestExitCleansTheMaps(t *testing.T) {
	p := open(t, Config{Linger: time.Nanosecond})
	u := run(t, copyLibrary(t))
	p.Scan(u.pid())
	u.do("allocate")
	u.do("copies")
	u.end()
	if got := p.Totals(nil)[u.pid()]; got.HtoD != p.copies(1).HtoD {
		t.Errorf("last totals %+v", got)
	}
	if got, ok := p.Totals(nil)[u.pid()]; ok {
		t.Errorf("still there: %+v", got)
	}
	var key probesPointerKey
	var size uint64
	if p.objects.Pointers.Iterate().Next(&key, &size) {
		t.Errorf("pointer left: %+v", key)
	}
	if list := p.Libraries(); len(list) != 0 {
		t.Errorf("libraries left: %+v", list)
	}
}

func TestLibraryUnlinkedWhileMapped(t *testing.T) {
	p := open(t, Config{})
	dir := copyLibrary(t)
	u := run(t, dir)
	if err := os.Remove(dir + "/libcuda.so.1"); err != nil {
		t.Fatal(err)
	}
	p.Scan(u.pid())
	u.do("copies")
	if got := p.Totals(nil)[u.pid()]; got != p.copies(1) {
		t.Errorf("%+v (libraries %+v)", got, p.Libraries())
	}
}

func TestLibraryReplaced(t *testing.T) {
	p := open(t, Config{})
	dir := copyLibrary(t)
	before := run(t, dir)
	p.Scan(before.pid())
	if err := os.Rename(copyLibrary(t)+"/libcuda.so.1", dir+"/libcuda.so.1"); err != nil {
		t.Fatal(err)
	}
	after := run(t, dir)
	p.Scan(after.pid())
	before.do("copies")
	after.do("copies")
	all := p.Totals(nil)
	if all[before.pid()] != p.copies(1) || all[after.pid()] != p.copies(1) {
		t.Errorf("before %+v, after %+v", all[before.pid()], all[after.pid()])
	}
	if list := p.Libraries(); len(list) != 2 || !list[0].Up || !list[1].Up {
		t.Errorf("libraries %+v", list)
	}
}

// TestContainer runs the program in a root directory of its own that has its own library, as an image with a forward-compatible libcuda does.
func TestContainer(t *testing.T) {
	built, err := build()
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	for _, file := range []string{built + "/user", built + "/libcuda.so.1"} {
		place(t, file, root+"/opt/"+filepath.Base(file))
	}
	file, err := elf.Open(built + "/user")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	loader, err := file.Section(".interp").Data()
	if err != nil {
		t.Fatal(err)
	}
	list := exec.Command(strings.TrimRight(string(loader), "\x00"), "--list", built+"/user")
	list.Env = []string{"LD_LIBRARY_PATH=" + built}
	out, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	for field := range strings.FieldsSeq(string(out)) {
		if strings.HasPrefix(field, "/") && !strings.Contains(field, "libcuda") {
			place(t, field, root+field)
		}
	}
	p := open(t, Config{})
	cmd := exec.Command("/opt/user")
	cmd.Env = []string{"LD_LIBRARY_PATH=/opt"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root, Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS}
	cmd.Dir = "/"
	u := begin(t, cmd)
	p.Scan(u.pid())
	u.do("copies")
	if got := p.Totals(nil)[u.pid()]; got != p.copies(1) {
		t.Errorf("%+v (libraries %+v)", got, p.Libraries())
	}
}

func place(t *testing.T, from, to string) {
	t.Helper()
	data, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(to, data, 0o755); err != nil {
		t.Fatal(err)
	}
}

func TestNoLibrary(t *testing.T) {
	p := open(t, Config{})
	p.Scan(os.Getpid())
	p.Scan(1 << 22) // no such process
	if list := p.Libraries(); len(list) != 0 {
		t.Errorf("libraries %+v", list)
	}
	if all := p.Totals(nil); len(all) != 0 {
		t.Errorf("totals %v", all)
	}
}

func TestUnusableLibrary(t *testing.T) {
	for name, content := range map[string]string{"not ELF": "hello", "cut": "\x7fELF\x02\x01\x01", "empty": ""} {
		t.Run(name, func(t *testing.T) {
			path := t.TempDir() + "/libcuda.so.1"
			if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
				t.Fatal(err)
			}
			p := open(t, Config{})
			lib := &library{pids: map[int]bool{}}
			if _, err := p.attachTo(lib, path); err == nil {
				t.Error("no error")
			}
		})
	}
}

func TestLibrariesOfMaps(t *testing.T) {
	text := strings.Join([]string{
		"7f0000000000-7f0000001000 r--p 00000000 08:01 41 /usr/lib/libcuda.so.1",
		"7f0000001000-7f0000002000 r-xp 00001000 08:01 42                        /usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04",
		"7f0000003000-7f0000004000 r-xp 00001000 08:01 42                        /usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04",
		"7f0000005000-7f0000006000 r-xp 00001000 00:2f 43 /a b/libcuda.so.1 (deleted)",
		"7f0000007000-7f0000008000 r-xp 00001000 00:2f 44 /usr/lib/libcudart.so.12",
		"7f0000007000-7f0000008000 r-xp 00001000 00:2f 45 /usr/lib/libcuda.so",
		"7f0000007000-7f0000008000 r-xp 00001000 00:2f 46 /usr/lib/libcuda.sofa",
		"7f0000009000-7f000000a000 r-xp 00000000 00:00 0 ",
		"garbage",
		"7f00 rx",
	}, "\n")
	found := libraries(text)
	if len(found) != 3 || found[0].id.inode != 42 || found[1].path != "/a b/libcuda.so.1" || !found[1].wasUnlinked || found[2].id.inode != 45 {
		t.Errorf("%+v", found)
	}
}

func FuzzLibraries(f *testing.F) {
	f.Add("7f0000001000-7f0000002000 r-xp 00001000 08:01 42   /usr/lib/libcuda.so.1\n")
	f.Add("7f00 r-xp 0 0 1 libcuda.so (deleted)")
	f.Fuzz(func(t *testing.T, text string) {
		for _, m := range libraries(text) {
			if m.id.inode == 0 || strings.ContainsRune(m.addresses, ' ') {
				t.Errorf("%+v", m)
			}
			if s := safe(m.path); strings.ContainsAny(s, "\n\x00") || len(s) > 200 {
				t.Errorf("unsafe %q", s)
			}
		}
	})
}

// TestKernelWithoutCookies loads the programs as a kernel before 5.15 needs them.
func TestKernelWithoutCookies(t *testing.T) {
	p, err := load(Config{}, false)
	if err != nil {
		t.Fatal(err)
	}
	closing(t, p)
	u := run(t, copyLibrary(t))
	p.Scan(u.pid())
	u.do("copies")
	if got := p.Totals(nil)[u.pid()]; got != p.copies(1) || got.HtoD != wantHtoD+1+20 || got.DtoH != wantDtoH+2 {
		t.Errorf("%+v", got)
	}
}

// BenchmarkProbedCall prints what a probe adds to a call that does nothing: all of it, which is mostly the processor's trap and
// depends on the machine (a trap costs much in a virtual machine that intercepts it), and the part that the program itself takes.
func BenchmarkProbedCall(b *testing.B) {
	stats, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
	if err != nil {
		b.Fatal(err)
	}
	defer stats.Close()
	p := open(b, Config{})
	u := run(b, copyLibrary(b))
	for b.Loop() {
		// the program has its own loop
	}
	without, err := strconv.ParseFloat(u.do("time"), 64)
	if err != nil {
		b.Fatal(err)
	}
	p.Scan(u.pid())
	with, err := strconv.ParseFloat(u.do("time"), 64)
	if err != nil {
		b.Fatal(err)
	}
	own, err := p.objects.CopyDtoh.Stats()
	if err != nil || own.RunCount == 0 {
		b.Fatalf("%+v, %v", own, err)
	}
	b.ReportMetric(with-without, "ns/probed-call")
	b.ReportMetric(float64(own.Runtime.Nanoseconds())/float64(own.RunCount), "ns/program")
	b.ReportMetric(0, "ns/op")
}
