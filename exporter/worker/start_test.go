package worker

import (
	"bytes"
	"compress/gzip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"gpu-exporter/exporter/input"
)

// static builds this package's test binary without cgo, which makes it a static worker that runs in any root.
func static(t *testing.T) []byte {
	t.Helper()
	return build(t, "test", "-c")
}

func build(t *testing.T, args ...string) []byte {
	t.Helper()
	out := filepath.Join(t.TempDir(), "program")
	cmd := exec.Command(filepath.Join(runtime.GOROOT(), "bin", "go"), append(args, "-o", out, ".")...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if args[0] == "build" {
		cmd.Dir = "../../cmd/nvml-worker"
	}
	if msg, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd.Args, err, msg)
	}
	b, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return b
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
	for _, c := range []struct{ name, root, path string }{
		{"no proc", bare, ""}, {"proc", full, ""}, {"file, no proc", bare, file}, {"file, proc", full, file},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, r, _ := run(t, "good", func(cfg *Config) { cfg.Path, cfg.embedded, cfg.DriverRoot = c.path, prog, c.root })
			r.wait(t, "frames", func(in []input.Input) bool { return frames(in) > 0 })
			root, err := os.Readlink("/proc/" + itoa(s.PIDs()[0]) + "/root")
			if err != nil || root != c.root {
				t.Errorf("the worker's root is %q (%v), want %q", root, err, c.root)
			}
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
	_, r, _ := run(t, "good", func(c *Config) { c.Path, c.embedded, c.DriverRoot = "", build(t, "build"), root })
	in := r.wait(t, "a source", func(in []input.Input) bool { return len(in) > 0 })
	if got := last(in).Reason; !strings.HasPrefix(got, "no glibc under "+root+": /lib") {
		t.Errorf("reason %q", got)
	}
}

// The real worker, chrooted to a root that holds glibc and nothing else, says that there is no library, and every path it tried.
func TestRealWorker(t *testing.T) {
	needRoot(t)
	prog := build(t, "build")
	root := t.TempDir()
	glibc(t, prog, root)
	_, r, _ := run(t, "", func(c *Config) { c.Path, c.embedded, c.DriverRoot, c.Env = "", prog, root, nil })
	in := r.wait(t, "a restart", restarted(ReasonLibrary, 1))
	if got := last(in).Reason; !strings.Contains(got, "libnvidia-ml.so.1: tried") || !strings.Contains(got, "/run/nvidia/driver") {
		t.Errorf("reason %q", got)
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
