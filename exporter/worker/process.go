package worker

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// process is one running worker.
type process struct {
	proc   *os.Process
	pid    int
	stdin  *os.File // closed to ask the worker to end
	stdout *os.File
	stderr *os.File

	done  chan struct{} // closed when the process is gone
	state *os.ProcessState
}

// gone waits until the process has ended, and tells whether it did in time.
func (p *process) gone(within time.Duration) bool {
	t := time.NewTimer(within)
	defer t.Stop()
	select {
	case <-p.done:
		return true
	case <-t.C:
		return false
	}
}

// starter is a thread from which workers are started. The kernel sends the parent-death signal when the THREAD that started the child ends, and the
// thread may have left the process's common working directory. It is one for all of them: a thread for each could not be had, and the Go runtime
// would end the program, where the limit of processes is reached.
type starter chan func()

func newStarter() starter {
	s := make(starter)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with this goroutine
		for f := range s {
			f()
		}
	}()
	return s
}

// start runs the program with the worker's flags. It lives as long as the starter at most.
func (s starter) start(c Config, prog program) (*process, error) {
	if st, err := os.Stat(c.DriverRoot); err != nil {
		return nil, fmt.Errorf("driver root: %w", err)
	} else if !st.IsDir() {
		return nil, fmt.Errorf("driver root %s is not a directory", c.DriverRoot)
	}
	p := &process{done: make(chan struct{})}
	var ours, theirs [3]*os.File // what we keep and what the worker gets of the three pipes
	closeAll := func(files [3]*os.File) {
		for _, f := range files {
			if f != nil {
				f.Close()
			}
		}
	}
	for i := range 3 {
		r, w, err := os.Pipe()
		if err != nil {
			closeAll(ours)
			closeAll(theirs)
			return nil, fmt.Errorf("making the worker's pipes: %w", err)
		}
		if ours[i], theirs[i] = r, w; i == 0 {
			ours[i], theirs[i] = w, r
		}
	}
	p.stdin, p.stdout, p.stderr = ours[0], ours[1], ours[2]

	started := make(chan error)
	s <- func() { started <- p.launch(c, prog, theirs) }
	err := <-started
	closeAll(theirs)
	if err != nil {
		closeAll(ours)
		return nil, err
	}
	go func() {
		p.state, _ = p.proc.Wait()
		close(p.done)
	}()
	return p, nil
}

// programFD is where the worker finds itself: the first descriptor after the standard ones.
const programFD = 3

// launch tries the program's carriers until one may be executed.
func (p *process) launch(c Config, prog program, stdio [3]*os.File) error {
	attr := &os.ProcAttr{Env: environment(c), Dir: "/", Sys: &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}}
	path := fmt.Sprintf("/proc/self/fd/%d", programFD)
	if filepath.Clean(c.DriverRoot) != "/" {
		attr.Sys.Chroot = c.DriverRoot
		if _, err := os.Stat(filepath.Join(c.DriverRoot, "proc/self/fd")); err != nil {
			// A driver root without /proc: a working directory outside survives chroot, so the path is taken from there.
			if err := outside("/proc"); err != nil {
				return fmt.Errorf("there is no /proc under %s: %w", c.DriverRoot, err)
			}
			attr.Dir, path = "", path[len("/proc/"):]
		}
	} else if prog.path != "" {
		// By its name where that can be done: it shows in ps.
		path = prog.path
	}

	var failed error
	for _, carrier := range prog.carriers(c) {
		f, err := carrier.open()
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("%s: %w", carrier.name, err))
			continue
		}
		attr.Files = []*os.File{stdio[0], stdio[1], stdio[2], f}
		proc, err := os.StartProcess(path, arguments(c), attr)
		if err == nil {
			f.Close()
			p.proc, p.pid = proc, proc.Pid
			if c.onStarted != nil {
				c.onStarted(carrier.name)
			}
			return nil
		}
		reason := explain(c, err, interpreter(f))
		f.Close()
		if prog.path == "" && (errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM)) {
			failed = errors.Join(failed, fmt.Errorf("%s: %w", carrier.name, reason))
			continue
		}
		return reason
	}
	return oneLine{failed}
}

// outside gives this thread a working directory of its own.
func outside(dir string) error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	return unix.Chdir(dir)
}

// explain turns the error of an exec into what to do about it.
func explain(c Config, err error, interpreter string) error {
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		return fmt.Errorf("starting %s: %w", name, err)
	}
	switch {
	case errno == unix.ENOENT && interpreter != "":
		// The kernel says so about the interpreter that the program names, not about the program.
		return fmt.Errorf("no glibc under %s: %s, which %s needs, is not there (--driver-root names the directory where the host's root is mounted): %w",
			c.DriverRoot, interpreter, name, errno)
	case errno == unix.ENOEXEC, errno == unix.ELIBBAD:
		return fmt.Errorf("%s, or the loader under %s, is not a program for this processor (%s): %w", name, c.DriverRoot, runtime.GOARCH, errno)
	case errno == unix.EPERM && filepath.Clean(c.DriverRoot) != "/":
		return fmt.Errorf("starting %s under %s needs CAP_SYS_CHROOT: %w", name, c.DriverRoot, errno)
	}
	return fmt.Errorf("starting %s under %s: %w", name, c.DriverRoot, errno)
}

// oneLine shows joined errors on one line.
type oneLine struct{ error }

// Error implements error.
func (e oneLine) Error() string {
	b := []byte(e.error.Error())
	out := make([]byte, 0, len(b))
	for _, c := range b {
		if c == '\n' {
			out = append(out, "; "...)
			continue
		}
		out = append(out, c)
	}
	return string(out)
}

// Unwrap returns the joined error.
func (e oneLine) Unwrap() error { return e.error }

func arguments(c Config) []string {
	args := []string{name}
	if c.Library != "" {
		args = append(args, "--library="+c.Library)
	}
	if c.Interval > 0 {
		args = append(args, "--interval="+c.Interval.String())
	}
	return append(args, c.Args...)
}

// environment is next to nothing: what the exporter was started with is no business of NVIDIA's library.
func environment(c Config) []string {
	env := []string{}
	if v := os.Getenv("LD_LIBRARY_PATH"); v != "" {
		env = append(env, "LD_LIBRARY_PATH="+v)
	}
	return append(env, c.Env...)
}
