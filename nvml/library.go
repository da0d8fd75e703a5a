// Package nvml is a cgo-free binding to NVIDIA's management library, libnvidia-ml.so.1.
//
// The library is opened at run time with dlopen through purego, so the package builds with CGO_ENABLED=0 and runs against any driver:
// each function is looked up by name, and one that the driver's library lacks answers ErrFunctionNotFound. Names follow NVML's own
// without the prefix; every method returns an error that errors.Is compares with this package's Return values.
//
// Values that NVML uses to say "not available" (all bits set, negative, impossible percentages) never leave this package: the method
// returns ErrNoValue instead.
//
// A Library may be used by several goroutines. A Device may not: its methods share buffers, so that polling does not allocate.
package nvml

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"github.com/ebitengine/purego"

	"gpu-exporter/nvml/libdir"
)

// Config says where the library is and who watches its calls. The zero Config searches the usual places.
type Config struct {
	// Path, when set, is the only file tried.
	Path string
	// OnCall, when set, is called after every NVML call with the symbol's name. It must not block.
	OnCall func(name string, took time.Duration, result Return)
	// OnEnter, when set, is called before every call, so that a call which never returns can be named.
	OnEnter func(name string)
}

// Library is an open libnvidia-ml.
type Library struct {
	path    string
	onCall  func(string, time.Duration, Return)
	onEnter func(string)
	addr    [numFunctions]uintptr
	name    [numFunctions]string
	version [numFunctions]int
}

// soname is what the loader's own search is asked for.
const soname = "libnvidia-ml.so.1"

// Tried is one path at which the library was looked for, and why it could not be used.
type Tried struct {
	Path string
	Err  error
}

// NotFoundError says that no usable library was found. It matches ErrLibraryNotFound.
type NotFoundError struct {
	Tried []Tried
}

// Error names each path at which there is something, with what is wrong with it. Where there is nothing is only counted, but for a path that is the one.
func (e *NotFoundError) Error() string {
	var found []string
	for _, t := range e.Tried {
		if len(e.Tried) == 1 || !t.missing() {
			found = append(found, fmt.Sprintf("%s (%v)", t.Path, t.Err))
		}
	}
	text := "no usable " + soname + ": "
	if len(found) == 0 {
		return text + fmt.Sprintf("it is in none of %d places where drivers have it", len(e.Tried))
	}
	return text + "tried " + strings.Join(found, "; ")
}

// missing tells whether nothing is there. Of its own search the loader says so in words.
func (t *Tried) missing() bool {
	return errors.Is(t.Err, fs.ErrNotExist) || errors.Is(t.Err, syscall.ENOTDIR) || strings.Contains(t.Err.Error(), "cannot open shared object file: No such file")
}

// Is matches ErrLibraryNotFound.
func (e *NotFoundError) Is(target error) bool { return target == error(ErrLibraryNotFound) }

// Unwrap returns the reason of every path.
func (e *NotFoundError) Unwrap() []error {
	errs := make([]error, len(e.Tried))
	for i, t := range e.Tried {
		errs[i] = t.Err
	}
	return errs
}

// Errors that say why a file cannot be the library.
var (
	ErrNotFile   = errors.New("not a file")
	ErrNotELF    = errors.New("not an ELF file")
	ErrWrongArch = errors.New("built for another processor")
)

// Open finds the library, opens it and looks up its functions. It does not initialise NVML: see Library.Init. Its error is a
// *NotFoundError that names every path tried.
func Open(c Config) (*Library, error) {
	// dlopen and dlerror must run on one thread: glibc keeps the message per thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	candidates := []string{c.Path}
	if c.Path == "" {
		candidates = append(candidates[:0], soname)
		for _, d := range libdir.Directories() {
			candidates = append(candidates, filepath.Join(d, soname))
		}
	}
	var e NotFoundError
	for _, path := range candidates {
		l, err := open(path, c.Path != "")
		if err == nil {
			l.onCall, l.onEnter = c.OnCall, c.OnEnter
			return l, nil
		}
		e.Tried = append(e.Tried, Tried{path, err})
	}
	return nil, &e
}

// open tries one path. A path without a slash is the loader's to find, unless the user gave it.
func open(path string, given bool) (*Library, error) {
	if given || filepath.IsAbs(path) {
		if err := check(path); err != nil {
			return nil, err
		}
	}
	if given {
		// dlopen would search for a bare name instead of taking the file that was just looked at.
		if abs, err := filepath.Abs(path); err == nil {
			path = abs
		}
	}
	handle, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		return nil, errors.New(strings.TrimPrefix(err.Error(), path+": "))
	}
	l := &Library{path: path}
	for f, names := range symbols {
		l.name[f] = names[0]
		for i, n := range names {
			if a, err := purego.Dlsym(handle, n); err == nil {
				l.addr[f], l.name[f], l.version[f] = a, n, len(names)-i
				break
			}
		}
	}
	if l.addr[fnInit] == 0 {
		return nil, fmt.Errorf("not the NVML library, it has no nvmlInit: %w", ErrFunctionNotFound)
	}
	return l, nil
}

// check reads the file's ELF header, for a clearer reason than dlopen's.
func check(path string) error {
	// Opening a pipe would wait for its other end.
	st, err := os.Stat(path)
	if err != nil {
		return reason(err)
	}
	if !st.Mode().IsRegular() {
		return ErrNotFile
	}
	f, err := os.Open(path)
	if err != nil {
		return reason(err)
	}
	defer f.Close()
	ef, err := elf.NewFile(f)
	if err != nil {
		return ErrNotELF
	}
	want := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}[runtime.GOARCH]
	if ef.Machine != want {
		return fmt.Errorf("%w (%v, want %v)", ErrWrongArch, ef.Machine, want)
	}
	return nil
}

// reason takes the path out of an error: it is told beside it.
func reason(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	return err
}

// Path returns the path under which the library was opened: the bare soname when the loader's own search found it.
func (l *Library) Path() string { return l.path }

// With returns a view of the same library whose calls are reported to other hooks: c.OnCall and c.OnEnter. Devices opened through it
// inherit them.
func (l *Library) With(c Config) *Library {
	v := *l
	v.onCall, v.onEnter = c.OnCall, c.OnEnter
	return &v
}

// Missing returns the functions that the library lacks, by their newest name.
func (l *Library) Missing() []string {
	var m []string
	for f := range symbols {
		if l.addr[f] == 0 {
			m = append(m, symbols[f][0])
		}
	}
	return m
}

// Symbols returns every name that this package can bind, newest version first within a function.
func Symbols() []string {
	var s []string
	for _, names := range symbols {
		s = append(s, names...)
	}
	return s
}

// arguments are lent out to calls: purego's variadic parameter escapes, so a slice of the caller's would be allocated each time.
var arguments = sync.Pool{New: func() any { return new([maxArguments]uintptr) }}

const maxArguments = 6

// call is the one gateway into the library. Pointers among the arguments must be into memory that is on the heap and stays reachable
// through the call, as a Device's scratch is: the compiler does not see to it here. See callOnce for others.
func (l *Library) call(f function, args ...uintptr) Return {
	addr := l.addr[f]
	if addr == 0 {
		return ErrFunctionNotFound
	}
	a := arguments.Get().(*[maxArguments]uintptr)
	defer arguments.Put(a)
	n := copy(a[:], args)
	if l.onEnter != nil {
		l.onEnter(l.name[f])
	}
	if l.onCall == nil {
		r, _, _ := purego.SyscallN(addr, a[:n]...)
		return Return(uint32(r))
	}
	start := time.Now()
	r, _, _ := purego.SyscallN(addr, a[:n]...)
	l.onCall(l.name[f], time.Since(start), Return(uint32(r)))
	return Return(uint32(r))
}

// callOnce is call for memory of the caller's own, which it moves to the heap and keeps. It allocates.
//
//go:uintptrescapes
func (l *Library) callOnce(f function, args ...uintptr) Return { return l.call(f, args...) }

// Init calls nvmlInit_v2. It opens the driver's devices; nothing but Path and Missing may be used before.
func (l *Library) Init() error { return l.call(fnInit).err() }

// Shutdown calls nvmlShutdown and closes the driver's devices.
func (l *Library) Shutdown() error { return l.call(fnShutdown).err() }

// text calls a function that fills a buffer with a C string.
func (l *Library) text(f function, before ...uintptr) (string, error) {
	buf := make([]byte, 128)
	var r Return
	if len(before) == 0 {
		r = l.callOnce(f, uintptr(unsafe.Pointer(&buf[0])), uintptr(len(buf)))
	} else {
		r = l.callOnce(f, before[0], uintptr(unsafe.Pointer(&buf[0])), uintptr(len(buf)))
	}
	if r != Success {
		return "", r
	}
	s := cString(buf)
	if s == "" {
		return "", ErrNoValue
	}
	return s, nil
}

// cString returns the text up to the first NUL, without bytes that are not printable ASCII: the driver's names are, garbage is not. Text
// that does not end is none.
func cString(b []byte) string {
	b, _, ended := bytes.Cut(b, []byte{0})
	if !ended {
		return ""
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return -1
		}
		return r
	}, string(b))
}

// SystemGetDriverVersion returns the driver's version, such as "580.159.04".
func (l *Library) SystemGetDriverVersion() (string, error) { return l.text(fnSystemGetDriverVersion) }

// SystemGetNVMLVersion returns the library's own version, such as "13.580.159.04".
func (l *Library) SystemGetNVMLVersion() (string, error) { return l.text(fnSystemGetNVMLVersion) }

// SystemGetCudaDriverVersion returns the newest CUDA version that the driver supports, such as "13.0".
func (l *Library) SystemGetCudaDriverVersion() (string, error) {
	v := new(int32)
	if r := l.callOnce(fnSystemGetCudaDriverVersion, uintptr(unsafe.Pointer(v))); r != Success {
		return "", r
	}
	if *v <= 0 {
		return "", ErrNoValue
	}
	return fmt.Sprintf("%d.%d", *v/1000, *v%1000/10), nil
}

// DeviceGetCount returns the number of GPUs that NVML sees, those it cannot open included.
func (l *Library) DeviceGetCount() (int, error) {
	n := new(uint32)
	if r := l.callOnce(fnDeviceGetCount, uintptr(unsafe.Pointer(n))); r != Success {
		return 0, r
	}
	if *n > 1024 {
		return 0, ErrNoValue
	}
	return int(*n), nil
}

// DeviceGetHandleByIndex opens the GPU with NVML's index, 0 to DeviceGetCount-1.
func (l *Library) DeviceGetHandleByIndex(index int) (*Device, error) {
	d := newDevice(l)
	if r := l.call(fnDeviceGetHandleByIndex, uintptr(index), uintptr(unsafe.Pointer(&d.buf.handle))); r != Success {
		return nil, r
	}
	d.handle = d.buf.handle
	return d, nil
}
