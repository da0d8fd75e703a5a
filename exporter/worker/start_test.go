package worker

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	"gpu-exporter/exporter/input"
	"gpu-exporter/nvml/libdir"
)

// static is this package's test binary built without cgo, which makes it a static worker that runs in any root.
func static(t *testing.T) []byte {
	t.Helper()
	return built(t, staticTest)
}

// dynamic is the real worker program.
func dynamic(t *testing.T) []byte {
	t.Helper()
	return built(t, realWorker)
}

var (
	staticTest = sync.OnceValues(func() ([]byte, error) { return build(".", "test", "-c") })
	realWorker = sync.OnceValues(func() ([]byte, error) { return build("../../cmd/nvml-worker", "build") })
)

func built(t *testing.T, once func() ([]byte, error)) []byte {
	t.Helper()
	b, err := once()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func build(dir string, args ...string) ([]byte, error) {
	tmp, err := os.MkdirTemp("", "worker-test-*")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(tmp)
	out := filepath.Join(tmp, "program")
	cmd := exec.Command("go", append(args, "-ldflags=-s -w", "-o", out, ".")...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	cmd.Dir = dir
	if msg, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%v: %w\n%s", cmd.Args, err, msg)
	}
	return os.ReadFile(out)
}

func compress(t *testing.T, b []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	z, _ := gzip.NewWriterLevel(&out, gzip.BestSpeed)
	if _, err := z.Write(b); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// The embedded program runs from a memfd, or from a temporary file that is gone at once where a memfd may not be executed.
func TestCarriers(t *testing.T) {
	prog := compress(t, static(t))
	tmp := t.TempDir()
	for _, c := range []struct {
		name, want string
		change     func(*Config)
	}{
		{"memfd", "memfd", func(*Config) {}},
		{"temporary file", "temporary file in " + tmp, func(c *Config) { c.noMemfd = true }},
	} {
		t.Run(c.name, func(t *testing.T) {
			var got []string
			_, r, _ := run(t, "good", func(cfg *Config) {
				cfg.Path, cfg.embedded, cfg.TempDirs = "", prog, []string{filepath.Join(tmp, "missing"), tmp}
				cfg.onStarted = func(carrier string) { got = append(got, carrier) }
				c.change(cfg)
			})
			r.wait(t, "frames", func(in []input.Input) bool { return frames(in) > 0 })
			if len(got) != 1 || got[0] != c.want {
				t.Errorf("ran from %q, want %q", got, c.want)
			}
			if left, _ := os.ReadDir(tmp); len(left) != 0 {
				t.Errorf("left in the directory: %v", left)
			}
		})
	}
}

// noexec is what TestMemfdForbidden runs, in a PID namespace of its own: the sysctl belongs to that.
func noexec() {
	for _, err := range []error{
		unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
		unix.Mount("proc", "/proc", "proc", 0, ""),
		os.WriteFile("/proc/sys/vm/memfd_noexec", []byte("2"), 0),
	} {
		if err != nil {
			fmt.Println(err)
			return
		}
	}
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		fmt.Println(err)
		return
	}
	New(Config{embedded: self, Env: []string{"WORKER_HELPER=good"}, Logger: slog.New(slog.DiscardHandler),
		onStarted: func(carrier string) { fmt.Println("ran from a " + carrier) },
	}).Run(context.Background(), func(i input.Input) {
		if i.Frame != nil {
			os.Exit(0)
		}
		if i.Source.Reason != "starting" && !i.Source.Up {
			fmt.Println(i.Source.Reason)
			os.Exit(1)
		}
	})
}

// Where the kernel forbids to execute a memfd (vm.memfd_noexec=2), a temporary file serves.
func TestMemfdForbidden(t *testing.T) {
	needRoot(t)
	if _, err := os.Stat("/proc/sys/vm/memfd_noexec"); err != nil {
		t.Skip("this kernel is older than 6.3 and cannot forbid it")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), "WORKER_NOEXEC=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS}
	out, err := cmd.CombinedOutput()
	if want := "ran from a temporary file in " + os.TempDir() + "\n"; err != nil || string(out) != want {
		t.Errorf("%v, printed %q, want %q", err, out, want)
	}
}

// A directory from which nothing may be executed is passed over for the next one.
func TestNoexecDirectory(t *testing.T) {
	needRoot(t)
	noexec, tmp := t.TempDir(), t.TempDir()
	if err := unix.Mount("tmpfs", noexec, "tmpfs", unix.MS_NOEXEC, ""); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(noexec, unix.MNT_DETACH)
	var got string
	_, r, _ := run(t, "good", func(c *Config) {
		c.Path, c.embedded, c.noMemfd, c.TempDirs = "", static(t), true, []string{noexec, tmp}
		c.onStarted = func(carrier string) { got = carrier }
	})
	r.wait(t, "frames", func(in []input.Input) bool { return frames(in) > 0 })
	if got != "temporary file in "+tmp {
		t.Errorf("ran from %q", got)
	}
}

// The worker runs inside the driver root, whether that has a /proc or not, and from a file as well as from a memfd.
func TestDriverRoot(t *testing.T) {
	needRoot(t)
	prog := static(t)
	file := filepath.Join(t.TempDir(), "worker")
	if err := os.WriteFile(file, prog, 0o755); err != nil {
		t.Fatal(err)
	}
	bare, full := t.TempDir(), t.TempDir()
	if err := os.Mkdir(filepath.Join(full, "proc"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("proc", filepath.Join(full, "proc"), "proc", 0, ""); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(filepath.Join(full, "proc"), unix.MNT_DETACH)
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	relative := func(path string) string {
		r, err := filepath.Rel(here, path)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	for _, c := range []struct{ name, given, path, root string }{
		{"no proc", bare, "", bare}, {"proc", full, "", full}, {"file, no proc", bare, file, bare}, {"file, proc", full, file, full},
		{"relative paths", relative(bare), relative(file), bare},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, r, _ := run(t, "good", func(cfg *Config) { cfg.Path, cfg.embedded, cfg.DriverRoot = c.path, prog, c.given })
			r.wait(t, "frames", func(in []input.Input) bool { return frames(in) > 0 })
			root, err := os.Readlink("/proc/" + itoa(s.PIDs()[0]) + "/root")
			if err != nil || root != c.root {
				t.Errorf("the worker's root is %q (%v), want %q", root, err, c.root)
			}
			// The next one is started by the same thread, which may have left the working directory for the first one.
			if err := unix.Kill(s.PIDs()[0], unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
			r.wait(t, "the next one", func(in []input.Input) bool { return len(last(in).Restarts) > 0 && last(in).Up })
		})
	}
	if now, err := os.Getwd(); err != nil || now != here {
		t.Errorf("the exporter's working directory moved to %q (%v)", now, err)
	}
}

func itoa(n int) string {
	b := []byte{}
	for ; n > 0; n /= 10 {
		b = append([]byte{byte('0' + n%10)}, b...)
	}
	return string(b)
}

// A driver root without glibc is called that, and not a missing file.
func TestNoGlibc(t *testing.T) {
	needRoot(t)
	root := t.TempDir()
	_, r, _ := run(t, "good", func(c *Config) { c.Path, c.embedded, c.DriverRoot = "", dynamic(t), root })
	in := r.wait(t, "a source", func(in []input.Input) bool { return len(in) > 0 })
	if got := last(in).Reason; !strings.HasPrefix(got, "no glibc under "+root+": /lib") {
		t.Errorf("reason %q", got)
	}
}

// The real worker, chrooted to a root that holds glibc and nothing else, says that there is no library, and in how many places it looked: the
// loader's search and every known directory.
func TestRealWorker(t *testing.T) {
	needRoot(t)
	prog := dynamic(t)
	root := t.TempDir()
	glibc(t, prog, root)
	_, r, _ := run(t, "", func(c *Config) { c.Path, c.embedded, c.DriverRoot, c.Env = "", prog, root, nil })
	in := r.wait(t, "a restart", restarted(ReasonLibrary, 1))
	known := libdir.Directories()
	want := fmt.Sprintf("no usable libnvidia-ml.so.1: it is in none of %d places where drivers have it", 1+len(known))
	if got := last(in).Reason; !strings.Contains(got, want) || !slices.ContainsFunc(known, func(d string) bool { return strings.HasPrefix(d, "/run/nvidia/driver/") }) {
		t.Errorf("reason %q, want %q; directories %v", got, want, known)
	}
}

// glibc copies the interpreter of prog and the libraries that it needs to root.
func glibc(t *testing.T, prog []byte, root string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(file, prog, 0o755); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("ldd", file).Output()
	if err != nil {
		t.Fatalf("ldd: %v", err)
	}
	for _, field := range strings.Fields(string(out)) {
		if !strings.HasPrefix(field, "/") {
			continue
		}
		b, err := os.ReadFile(field)
		if err != nil {
			t.Fatal(err)
		}
		to := filepath.Join(root, field)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(to, b, 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

// needRoot fails where the suite is not run as root: chroot and mount need it, and so does the exporter.
func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test must run as root")
	}
}
