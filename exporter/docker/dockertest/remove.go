package dockertest

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// remove ends the daemon and everything that came of it. A daemon that was killed is started once more, because only it can end its
// containers properly.
func (d *Daemon) remove(t TB) {
	if d.log == nil {
		_ = os.RemoveAll(d.Dir)
		return
	}
	d.Resume()
	if d.PID() == 0 || !d.ready() {
		d.Kill()
		if d.leftovers() {
			if err := d.start(); err != nil {
				t.Log("dockertest: starting the daemon to clean up: ", err)
			}
		}
	}
	if ids, err := d.Command("ps", "-aq"); err == nil && ids != "" {
		if _, err := d.Command(append([]string{"rm", "-f"}, strings.Fields(ids)...)...); err != nil {
			t.Log("dockertest: removing containers: ", err)
		}
	}
	d.Stop()
	for end := time.Now().Add(5 * time.Second); d.leftovers() && time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		d.killProcesses()
	}
	_ = d.log.Close()
	d.unmount()
	if err := os.RemoveAll(d.Dir); err != nil {
		t.Error("dockertest: cleaning up: ", err)
	}
}

// leftovers tells whether processes or mounts of the daemon are still there.
func (d *Daemon) leftovers() bool { return len(d.processes("")) > 0 || len(d.mounts()) > 0 }

// processes returns the ids of the processes whose command line names the daemon's directory: the daemon, containerd, the shims. With
// a program, only those of that name.
func (d *Daemon) processes(program string) []int {
	var pids []int
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err != nil || !bytes.Contains(data, []byte(d.Dir+"/")) {
			continue
		}
		argv0, _, _ := bytes.Cut(data, []byte{0})
		if program != "" && filepath.Base(string(argv0)) != program {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(f))); err == nil && pid != os.Getpid() {
			pids = append(pids, pid)
		}
	}
	return pids
}

func (d *Daemon) killProcesses() {
	for _, pid := range d.processes("") {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	d.unmount()
}

// mounts returns the mount points below the daemon's directory.
func (d *Daemon) mounts() []string {
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil
	}
	var points []string
	for line := range strings.Lines(string(data)) {
		if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[4], d.Dir+"/") {
			points = append(points, f[4])
		}
	}
	return points
}

// unmount unmounts what is mounted below the daemon's directory, the innermost first.
func (d *Daemon) unmount() {
	points := d.mounts()
	slices.SortFunc(points, func(a, b string) int { return len(b) - len(a) })
	for _, p := range points {
		_ = syscall.Unmount(p, syscall.MNT_DETACH)
	}
}
