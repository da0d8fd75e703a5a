package worker

import (
	"bytes"
	"compress/gzip"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// name is the worker's file name, its argv[0], and the name of its memfd.
const name = "nvml-worker"

// program is the worker's executable: a file, or bytes in this one.
type program struct {
	path  string
	bytes []byte // gzip or plain
}

// locate finds the program. It looks afresh at every start, so that an installed worker is found without a restart.
func locate(c Config) (program, error) {
	if c.Path != "" {
		if _, err := os.Stat(c.Path); err != nil {
			return program{}, fmt.Errorf("worker program: %w", err)
		}
		return program{path: c.Path}, nil
	}
	if len(c.embedded) > 0 {
		return program{bytes: c.embedded}, nil
	}
	if self, err := os.Executable(); err == nil {
		beside := filepath.Join(filepath.Dir(self), name)
		if st, err := os.Stat(beside); err == nil && st.Mode().IsRegular() {
			return program{path: beside}, nil
		}
	}
	if path, err := exec.LookPath(name); err == nil {
		if path, err = filepath.Abs(path); err == nil {
			return program{path: path}, nil
		}
	}
	return program{}, errors.New("no " + name + " program: it is not built into this binary (make build does that), nor beside it, nor on PATH")
}

// carriers lists the ways to turn the program into an open executable file, best first.
func (p program) carriers(c Config) []carrier {
	if p.path != "" {
		return []carrier{{"file", func() (*os.File, error) { return os.Open(p.path) }}}
	}
	var out []carrier
	if !c.noMemfd {
		out = append(out, carrier{"memfd", p.memfd})
	}
	dirs := c.TempDirs
	if dirs == nil {
		dirs = []string{os.TempDir(), "/tmp", "/dev/shm", "/run", "/var/tmp"}
	}
	seen := map[string]bool{}
	for _, dir := range dirs {
		if !seen[dir] {
			seen[dir] = true
			out = append(out, carrier{"temporary file in " + dir, func() (*os.File, error) { return p.temporary(dir) }})
		}
	}
	return out
}

type carrier struct {
	name string
	open func() (*os.File, error)
}

// memfd writes the program to an anonymous file in memory, and seals it.
func (p program) memfd() (*os.File, error) {
	// Kernels before 6.3 do not know MFD_EXEC and make every memfd executable; later ones may demand that it be asked for.
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_EXEC)
	if errors.Is(err, unix.EINVAL) {
		fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if err != nil {
		return nil, fmt.Errorf("creating a memfd: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	if err := p.write(f); err != nil {
		f.Close()
		return nil, err
	}
	// Not essential: a kernel that refuses the seals still runs the program.
	_, _ = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_SEAL|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE)
	return f, nil
}

// temporary writes the program to a file without a name: it is removed before it is executed, so nothing is ever left behind.
func (p program) temporary(dir string) (*os.File, error) {
	w, err := os.CreateTemp(dir, name+"-*")
	var pe *fs.PathError
	if errors.As(err, &pe) {
		return nil, pe.Err // without the random name: the reason must not change with every attempt
	}
	if err != nil {
		return nil, err
	}
	defer os.Remove(w.Name())
	if err = p.write(w); err == nil {
		err = w.Chmod(0o700)
	}
	if err == nil {
		// A file that is open for writing cannot be executed.
		var r *os.File
		if r, err = os.Open(w.Name()); err == nil {
			if err = w.Close(); err == nil {
				return r, nil
			}
			r.Close()
		}
	}
	w.Close()
	return nil, err
}

func (p program) write(w io.Writer) error {
	var r io.Reader = bytes.NewReader(p.bytes)
	if bytes.HasPrefix(p.bytes, []byte{0x1f, 0x8b}) {
		z, err := gzip.NewReader(r)
		if err != nil {
			return fmt.Errorf("unpacking the embedded %s: %w", name, err)
		}
		r = z
	}
	if _, err := io.Copy(w, r); err != nil {
		return fmt.Errorf("writing the embedded %s: %w", name, err)
	}
	return nil
}

// interpreter returns the ELF interpreter that the program asks for, "" if none or unreadable.
func interpreter(f io.ReaderAt) string {
	e, err := elf.NewFile(f)
	if err != nil {
		return ""
	}
	for _, p := range e.Progs {
		if p.Type == elf.PT_INTERP && p.Filesz < 4096 {
			b := make([]byte, p.Filesz)
			if _, err := p.ReadAt(b, 0); err == nil {
				return string(bytes.TrimRight(b, "\x00"))
			}
		}
	}
	return ""
}
