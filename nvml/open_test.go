package nvml

import (
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"gpu-exporter/nvml/fake"
)

// child runs this test binary as another program.
func child(t *testing.T, what string, env ...string) (string, error) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append([]string{childEnv + "=" + what, "PATH=" + os.Getenv("PATH")}, env...)
	out, err := cmd.Output()
	return strings.TrimSpace(string(out)), err
}

// foreignELF is the header of a shared library for another processor.
func foreignELF(t *testing.T) []byte {
	t.Helper()
	machine := elf.EM_AARCH64
	if runtime.GOARCH == "arm64" {
		machine = elf.EM_X86_64
	}
	h := elf.Header64{Type: uint16(elf.ET_DYN), Machine: uint16(machine), Version: 1, Ehsize: 64, Phentsize: 56, Shentsize: 64}
	copy(h.Ident[:], "\x7fELF\x02\x01\x01")
	var b [64]byte
	if _, err := binary.Encode(b[:], binary.LittleEndian, &h); err != nil {
		t.Fatal(err)
	}
	return b[:]
}

// TestOpenBadFiles: each kind of wrong file has its own reason, in a typed error that names the path.
func TestOpenBadFiles(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, b []byte) string {
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, b, 0o755); err != nil {
			t.Fatal(err)
		}
		return p
	}
	good, err := os.ReadFile(fake.Build(t))
	if err != nil {
		t.Fatal(err)
	}
	pipe := filepath.Join(dir, "pipe")
	if err := syscall.Mkfifo(pipe, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, path string
		is         error
		says       string
	}{
		{"absent", filepath.Join(dir, "none"), fs.ErrNotExist, "no such file"},
		{"directory", dir, ErrNotFile, "not a file"},
		{"pipe", pipe, ErrNotFile, "not a file"},
		{"empty", write("empty", nil), ErrNotELF, "not an ELF file"},
		{"text", write("text", []byte("GROUP ( libnvidia-ml.so )\n")), ErrNotELF, "not an ELF file"},
		{"other processor", write("foreign", foreignELF(t)), ErrWrongArch, "built for another processor"},
		{"cut off", write("cut", good[:4096]), nil, ""},
		{"another library", fake.BuildWithout(t, "nvmlInit", "nvmlInit_v2"), ErrFunctionNotFound, "not the NVML library"},
		{"below a file", filepath.Join(write("plain", nil), "x"), syscall.ENOTDIR, "not a directory"},
	} {
		_, err := Open(Config{Path: c.path})
		var nf *NotFoundError
		switch {
		case err == nil:
			t.Errorf("%s: opened", c.name)
		case !errors.As(err, &nf) || len(nf.Tried) != 1 || nf.Tried[0].Path != c.path:
			t.Errorf("%s: %#v does not name the path", c.name, err)
		case !errors.Is(err, ErrLibraryNotFound):
			t.Errorf("%s: %v is not ErrLibraryNotFound", c.name, err)
		case c.is != nil && !errors.Is(err, c.is):
			t.Errorf("%s: %v is not %v", c.name, err, c.is)
		case !strings.Contains(err.Error(), c.path) || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "\n"):
			t.Errorf("%s: %q does not say %q in one line", c.name, err, c.says)
		}
	}
}

// TestSearch: with no library anywhere, the loader's search and every known directory were tried, and the message is short. What is there and is not
// the library is named.
func TestSearch(t *testing.T) {
	l, err := Open(Config{})
	if err == nil {
		t.Logf("this machine has %s; its search cannot fail", l.Path())
		return
	}
	var nf *NotFoundError
	if !errors.As(err, &nf) {
		t.Fatal(err)
	}
	var paths []string
	for _, tried := range nf.Tried {
		if tried.Err == nil {
			t.Errorf("%s: no reason", tried.Path)
		}
		paths = append(paths, tried.Path)
	}
	if paths[0] != soname {
		t.Errorf("%s was tried before the loader's own search", paths[0])
	}
	for _, want := range []string{"/usr/lib64", "/run/opengl-driver/lib", "/usr/lib/wsl/lib", "/run/nvidia/driver/usr/lib64", "/usr/local/nvidia/lib64", "/usr/local/nvidia/lib",
		"-linux-gnu/" + soname} {
		if !strings.Contains(strings.Join(paths, " "), want) {
			t.Errorf("%s was not tried: %v", want, paths)
		}
	}
	if want := fmt.Sprintf("no usable libnvidia-ml.so.1: it is in none of %d places where drivers have it", len(paths)); err.Error() != want {
		t.Errorf("%q, want %q", err, want)
	}
	nf.Tried[3].Err = ErrWrongArch
	if want := "no usable libnvidia-ml.so.1: tried " + paths[3] + " (built for another processor)"; err.Error() != want {
		t.Errorf("%q, want %q", err, want)
	}
}

// TestLoaderSearch: a library on the loader's own path is found without being named, and the scenario comes from the environment.
func TestLoaderSearch(t *testing.T) {
	scenario := filepath.Join(t.TempDir(), "scenario")
	fake.Scenario{GPUs: []fake.GPU{busyH200()}}.Write(t, scenario)
	got, err := child(t, "temperature", "LD_LIBRARY_PATH="+filepath.Dir(fake.Build(t)), "FAKE_NVML_SCENARIO="+scenario)
	if err != nil || got != "64 <nil>" {
		t.Errorf("got %q, %v", got, err)
	}
}

// TestInitErrors: the driver is not there, or another version of it.
func TestInitErrors(t *testing.T) {
	got, err := child(t, "temperature", "NVML_TEST_LIBRARY="+fake.Build(t))
	if err != nil || got != "0 "+ErrDriverNotLoaded.Error() {
		t.Errorf("without a driver: %q, %v", got, err)
	}
	for _, r := range []Return{ErrLibRMVersionMismatch, ErrDriverNotLoaded, ErrNoPermission, ErrUnknown} {
		s := fake.Scenario{Faults: []fake.Fault{{Function: "nvmlInit_v2", GPU: fake.AnyGPU, Kind: fake.Return, Arg: uint64(r)}}}
		h := fake.Install(t, s)
		l, err := Open(Config{Path: h.Library})
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Init(); !errors.Is(err, r) {
			t.Errorf("init: %v, want %v", err, r)
		}
		if _, err := l.DeviceGetCount(); !errors.Is(err, ErrUninitialized) {
			t.Errorf("count without init: %v", err)
		}
		// The driver comes back.
		h.Set(t, fake.Scenario{GPUs: []fake.GPU{fake.H200(0)}})
		if err := l.Init(); err != nil {
			t.Errorf("init afterwards: %v", err)
		}
		if n, err := l.DeviceGetCount(); err != nil || n != 1 {
			t.Errorf("count afterwards: %d, %v", n, err)
		}
		if err := l.Shutdown(); err != nil {
			t.Error(err)
		}
		if err := l.Shutdown(); !errors.Is(err, ErrUninitialized) {
			t.Errorf("second shutdown: %v", err)
		}
	}
}

// TestCrash: the library takes its process down, and nothing else.
func TestCrash(t *testing.T) {
	for _, c := range []struct {
		kind string
		arg  uint64
	}{{fake.Crash, 0}, {fake.Abort, 0}, {fake.Exit, 41}} {
		h := fake.Install(t, fake.Scenario{GPUs: []fake.GPU{busyH200()}, Faults: []fake.Fault{{Function: "nvmlDeviceGetTemperature", GPU: 0, Kind: c.kind, Arg: c.arg}}})
		out, err := child(t, "temperature", "NVML_TEST_LIBRARY="+h.Library)
		var exit *exec.ExitError
		if !errors.As(err, &exit) || out != "" {
			t.Fatalf("%s: the child printed %q, %v", c.kind, out, err)
		}
		if c.kind == fake.Exit && exit.ExitCode() != int(c.arg) {
			t.Errorf("%s: %v", c.kind, err)
		}
		h.Set(t, fake.Scenario{GPUs: []fake.GPU{busyH200()}})
		if out, err := child(t, "temperature", "NVML_TEST_LIBRARY="+h.Library); err != nil || out != "64 <nil>" {
			t.Errorf("after %s: %q, %v", c.kind, out, err)
		}
	}
}

// TestCountsThatCannotBe: more devices than any machine has.
func TestCountsThatCannotBe(t *testing.T) {
	for _, n := range []uint64{1025, 0xffffffff} {
		_, l := host(t, fake.Scenario{Faults: []fake.Fault{{Function: "nvmlDeviceGetCount_v2", GPU: fake.AnyGPU, Kind: fake.Fill, Arg: n}}})
		if got, err := l.DeviceGetCount(); !errors.Is(err, ErrNoValue) {
			t.Errorf("%d devices: %d, %v", n, got, err)
		}
	}
}

// TestHostileText: names of any bytes come out printable or not at all.
func TestHostileText(t *testing.T) {
	s := fake.Scenario{GPUs: []fake.GPU{fake.H200(0)}}
	s.GPUs[0].Set("name", "A\x1b[31m\xff\"B\x01")
	h, l := host(t, s)
	d := device(t, l, 0)
	if got, err := d.GetName(); err != nil || got != `A[31m"B` {
		t.Errorf("name: %q, %v", got, err)
	}
	for _, pattern := range []uint64{0, 0xffffffffffffffff, 0x4141414141414141, 0x0101010101010101} {
		s.Faults = []fake.Fault{{Function: "nvmlDeviceGetName", GPU: 0, Kind: fake.Fill, Arg: pattern}}
		h.Set(t, s)
		if got, err := d.GetName(); !errors.Is(err, ErrNoValue) {
			t.Errorf("bytes %#x: %q, %v", pattern, got, err)
		}
	}
}

func ExampleNotFoundError() {
	err := error(&NotFoundError{Tried: []Tried{{"libnvidia-ml.so.1", errors.New("cannot open shared object file")}, {"/usr/lib64/libnvidia-ml.so.1", ErrWrongArch}}})
	fmt.Println(err)
	fmt.Println(errors.Is(err, ErrLibraryNotFound), errors.Is(err, ErrWrongArch))
	// Output:
	// no usable libnvidia-ml.so.1: tried libnvidia-ml.so.1 (cannot open shared object file); /usr/lib64/libnvidia-ml.so.1 (built for another processor)
	// true true
}
