// Package dockertest runs a private Docker daemon for a test: a real one, with a directory and a socket of its own, without network
// bridges or firewall rules, so that any number of them run beside each other and beside the host's.
package dockertest

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// TB is what this package needs of testing.TB, so that programs which are no tests can use it too.
type TB interface {
	Helper()
	Log(args ...any)
	Error(args ...any)
	Fatal(args ...any)
	Fatalf(format string, args ...any)
	Cleanup(f func())
}

// Daemon is one private Docker daemon. Its images are "empty" (nothing inside) and "busybox" (a static busybox, with links for the
// usual commands, and /bin/sleep infinity as its command).
type Daemon struct {
	Host   string // "unix://…", for DOCKER_HOST
	Socket string // path of the socket
	Dir    string // holds everything of the daemon

	programs map[string]string
	log      *os.File

	mu      sync.Mutex
	command *exec.Cmd
	exited  chan struct{}
}

// packages says which Debian package has a program that is needed.
var packages = map[string]string{
	"dockerd": "docker.io", "docker": "docker.io", "containerd": "containerd", "runc": "runc", "busybox": "busybox-static",
}

// Start starts a daemon and imports the images. It fails the test, in one line, where something needed is missing. The daemon, its
// containers and everything they left are removed when the test ends.
func Start(t TB) *Daemon {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("dockertest: root is needed to run a Docker daemon")
	}
	d := &Daemon{programs: map[string]string{}}
	for name, pkg := range packages {
		path, err := find(name)
		if err != nil {
			t.Fatalf("dockertest: %s is missing: apt-get install %s", name, pkg)
		}
		d.programs[name] = path
	}
	// A short path: that of containerd's socket below it must not exceed 107 bytes, which t.TempDir's would.
	dir, err := os.MkdirTemp("/tmp", "dk")
	if err != nil {
		t.Fatal("dockertest: ", err)
	}
	d.Dir, d.Socket = dir, filepath.Join(dir, "s")
	d.Host = "unix://" + d.Socket
	t.Cleanup(func() { d.remove(t) })
	// The daemon offers --gpus where it finds this hook, and runs it before the container's process.
	hook := filepath.Join(dir, "bin", "nvidia-container-runtime-hook")
	if err := os.MkdirAll(filepath.Dir(hook), 0o755); err != nil {
		t.Fatal("dockertest: ", err)
	}
	if err := os.WriteFile(hook, []byte("#!/bin/sh\nexit 0\n"), 0o755); err != nil {
		t.Fatal("dockertest: ", err)
	}
	// The host's own /etc/docker/daemon.json is none of the test's business.
	if err := os.WriteFile(filepath.Join(dir, "daemon.json"), []byte("{}"), 0o644); err != nil {
		t.Fatal("dockertest: ", err)
	}
	if d.log, err = os.Create(filepath.Join(dir, "dockerd.log")); err != nil {
		t.Fatal("dockertest: ", err)
	}
	d.Restart(t)
	d.load(t, "empty", emptyImage())
	image, err := busyboxImage(d.programs["busybox"])
	if err != nil {
		t.Fatal("dockertest: ", err)
	}
	d.load(t, "busybox", image, "--change", `CMD ["/bin/sleep","infinity"]`, "--change", "ENV PATH=/bin")
	return d
}

// find looks for a program on PATH and where Debian has it: a test's PATH may lack the sbin directories.
func find(name string) (string, error) {
	if path, err := exec.LookPath(name); err == nil {
		return path, nil
	}
	for _, dir := range []string{"/usr/sbin", "/sbin", "/usr/bin", "/bin", "/usr/local/bin"} {
		if path, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return path, nil
		}
	}
	return "", exec.ErrNotFound
}

// Restart stops the daemon, if it runs, and starts it again on the same data and socket. Containers do not survive that, those
// with a restart policy come back.
func (d *Daemon) Restart(t TB) {
	t.Helper()
	d.Stop()
	if err := d.start(); err != nil {
		t.Fatal("dockertest: ", err)
	}
}

func (d *Daemon) start() error {
	dir := d.Dir
	// A daemon that was killed takes its containerd along. Until init reaps that, its pid file would make the new daemon wait for it.
	for _, pid := range d.processes("containerd") {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	_ = os.Remove(dir + "/exec/containerd/containerd.pid")
	runtime, err := d.runtime()
	if err != nil {
		return fmt.Errorf("making the runtime: %w", err)
	}
	cmd := exec.Command(d.programs["dockerd"], "--data-root", dir+"/data", "--exec-root", dir+"/exec", "--pidfile", dir+"/pid",
		"--host", d.Host, "--bridge=none", "--iptables=false", "--ip6tables=false", "--config-file", dir+"/daemon.json",
		"--shutdown-timeout=1", "--add-runtime", "nvidia="+runtime)
	path := []string{dir + "/bin"}
	for _, p := range d.programs {
		path = append(path, filepath.Dir(p))
	}
	cmd.Env = append(os.Environ(), "PATH="+strings.Join(append(path, os.Getenv("PATH")), ":"))
	cmd.Stdout, cmd.Stderr = d.log, d.log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting dockerd: %w", err)
	}
	exited := make(chan struct{})
	go func() {
		_ = cmd.Wait() // how it ended shows in its log
		close(exited)
	}()
	d.mu.Lock()
	d.command, d.exited = cmd, exited
	d.mu.Unlock()
	for deadline := time.Now().Add(60 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if d.ready() {
			return nil
		}
		select {
		case <-exited:
			return fmt.Errorf("dockerd ended at once:\n%s", d.Log())
		default:
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("dockerd is not ready after a minute:\n%s", d.Log())
		}
	}
}

// PID returns the daemon's process id, or 0 when it does not run.
func (d *Daemon) PID() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.command == nil {
		return 0
	}
	return d.command.Process.Pid
}

// Stop ends the daemon the orderly way, and with it its containers.
func (d *Daemon) Stop() { d.signal(syscall.SIGTERM) }

// Kill ends the daemon with SIGKILL. Its containers go on until it is started again.
func (d *Daemon) Kill() { d.signal(syscall.SIGKILL) }

// Pause freezes the daemon: it accepts connections and answers nothing. Resume lets it go on.
func (d *Daemon) Pause() { _ = syscall.Kill(d.PID(), syscall.SIGSTOP) }

// Resume ends Pause.
func (d *Daemon) Resume() { _ = syscall.Kill(d.PID(), syscall.SIGCONT) }

func (d *Daemon) signal(sig syscall.Signal) {
	d.mu.Lock()
	cmd, exited := d.command, d.exited
	d.command = nil
	d.mu.Unlock()
	if cmd == nil {
		return
	}
	_ = cmd.Process.Signal(sig)
	_ = cmd.Process.Signal(syscall.SIGCONT)
	select {
	case <-exited:
	case <-time.After(20 * time.Second):
		_ = cmd.Process.Kill()
		<-exited
	}
}

// Log returns the end of what the daemon wrote.
func (d *Daemon) Log() string {
	data, err := os.ReadFile(d.log.Name())
	if err != nil {
		return err.Error()
	}
	return string(data[max(0, len(data)-4096):])
}

// Docker runs the docker command and returns what it printed. It fails the test when the command fails.
func (d *Daemon) Docker(t TB, args ...string) string {
	t.Helper()
	out, err := d.Command(args...)
	if err != nil {
		t.Fatalf("docker %s: %v", strings.Join(args, " "), err)
	}
	return out
}

// Command runs the docker command and returns what it printed.
func (d *Daemon) Command(args ...string) (string, error) { return d.execute(nil, args...) }

func (d *Daemon) execute(stdin io.Reader, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, d.programs["docker"], args...)
	cmd.Env = append(os.Environ(), "DOCKER_HOST="+d.Host, "DOCKER_CONFIG="+d.Dir+"/config", "DOCKER_CONTEXT=default")
	cmd.Stdin = stdin
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%w: %s", err, strings.TrimSpace(errs.String()))
	}
	return strings.TrimSpace(out.String()), nil
}

// Run starts a container in the background ("docker run -d") and returns its full id.
func (d *Daemon) Run(t TB, args ...string) string {
	t.Helper()
	// The first process of a container ignores SIGTERM unless it handles it; SIGKILL spares every stop ten seconds.
	return d.Docker(t, append([]string{"run", "-d", "--stop-signal", "SIGKILL"}, args...)...)
}

// load imports an image.
func (d *Daemon) load(t TB, name string, image []byte, args ...string) {
	t.Helper()

	args = append(append([]string{"import"}, args...), "-", name+":latest")
	if _, err := d.execute(bytes.NewReader(image), args...); err != nil {
		t.Fatalf("dockertest: importing image %s: %v", name, err)
	}
}

func emptyImage() []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	_ = w.WriteHeader(&tar.Header{Name: "tmp/", Typeflag: tar.TypeDir, Mode: 0o1777}) // to memory: cannot fail
	_ = w.Close()
	return b.Bytes()
}

func busyboxImage(busybox string) ([]byte, error) {
	program, err := os.ReadFile(busybox)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	headers := []*tar.Header{
		{Name: "tmp/", Typeflag: tar.TypeDir, Mode: 0o1777},
		{Name: "bin/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "bin/busybox", Typeflag: tar.TypeReg, Mode: 0o755, Size: int64(len(program))},
	}
	for _, link := range strings.Fields("cat chmod cp dd echo false head kill ln ls mkdir mknod mv nc ps rm sh sleep tail test touch true wget") {
		headers = append(headers, &tar.Header{Name: "bin/" + link, Typeflag: tar.TypeSymlink, Linkname: "busybox", Mode: 0o777})
	}
	for _, h := range headers {
		if err := w.WriteHeader(h); err != nil {
			return nil, err
		}
		if h.Typeflag == tar.TypeReg {
			if _, err := w.Write(program); err != nil {
				return nil, err
			}
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}
