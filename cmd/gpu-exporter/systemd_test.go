package main

import (
	"bytes"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"gpu-exporter/nvml/fake"
)

// systemdHost is a host whose first process is a real systemd: namespaces with a root of their own, in which this machine's programs are.
type systemdHost struct {
	*testing.T
	root string
	pid  int // of systemd, here
}

// bootSystemd starts systemd. Directories are seen in the host under their own names.
func bootSystemd(t *testing.T, dirs ...string) *systemdHost {
	t.Helper()
	h := &systemdHost{T: t, root: t.TempDir()}
	group := "/sys/fs/cgroup/unified"
	if _, err := os.Stat(group); err != nil {
		group = "/sys/fs/cgroup"
	}
	group, err := os.MkdirTemp(group, "systemd-test-")
	if err != nil {
		t.Fatal(err)
	}
	var log lockedBuffer
	cmd := exec.Command("testdata/systemd", append([]string{h.root, group}, dirs...)...)
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill() // unshare, which takes systemd along, and with it every process of the host
		cmd.Wait()
		for range 100 {
			if removeGroups(group) == nil {
				return
			}
			time.Sleep(20 * time.Millisecond)
		}
		t.Errorf("%s is still in use", group)
	})
	for range 200 {
		if h.pid == 0 {
			if kin := descendants(cmd.Process.Pid); len(kin) == 1 {
				h.pid = kin[0]
			}
		} else if out, err := h.try("systemctl", "is-active", "basic.target"); err == nil && out == "active\n" {
			return h
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Fatalf("systemd does not start:\n%s", log.String())
	return nil
}

// removeGroups removes a control group with those in it.
func removeGroups(group string) error {
	var dirs []string
	filepath.WalkDir(group, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			dirs = append(dirs, path)
		}
		return nil
	})
	for _, d := range slices.Backward(dirs) {
		if err := os.Remove(d); err != nil {
			return err
		}
	}
	return nil
}

// try runs a command on the host.
func (h *systemdHost) try(args ...string) (string, error) {
	cmd := exec.Command("nsenter", append([]string{"-t", strconv.Itoa(h.pid), "-m", "-p", "-u", "-i", "-C", "-r", "-w"}, args...)...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func (h *systemdHost) run(args ...string) string {
	h.Helper()
	out, err := h.try(args...)
	if err != nil {
		h.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

// TestInstallSystemd: on a host that systemd runs, `install systemd` as it is makes a service that reads NVML, Docker and the kernel, and starts
// with the host; a second time it changes nothing; `uninstall systemd` leaves nothing behind.
func TestInstallSystemd(t *testing.T) {
	nvml := fake.Install(t, fake.Scenario{GPUs: []fake.GPU{fake.H200(0)}})
	docker := engine(t, nil, nil)
	dir := t.TempDir()
	binary := filepath.Join(dir, "gpu-exporter")
	if out, err := exec.Command("cp", program(t), binary).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	h := bootSystemd(t, dir, filepath.Dir(nvml.Library), filepath.Dir(docker))
	address := freeAddress(t)
	flags := fmt.Sprintf("GPU_EXPORTER_FLAGS=--web.listen-address=%s --nvml.library=%s --docker.host=unix://%s\n", address, nvml.Library, docker)
	if err := os.WriteFile(filepath.Join(dir, "flags"), []byte(flags), 0o644); err != nil {
		t.Fatal(err)
	}
	h.run("cp", filepath.Join(dir, "flags"), "/etc/default/gpu-exporter")

	out := h.run(binary, "install", "systemd")
	if !strings.Contains(out, "\nsystemctl restart gpu-exporter.service\n") {
		t.Errorf("install said:\n%s", out)
	}
	p := &process{address: address}
	defer func() {
		if t.Failed() {
			out, _ := h.try("systemctl", "status", "--no-pager", "gpu-exporter")
			t.Log(out)
		}
	}()
	h.serves(p)
	for _, name := range []string{"gpu_exporter_nvml_up", "gpu_exporter_docker_up", "gpu_exporter_tracer_up"} {
		p.until(t, 20*time.Second, name, func(s scrape) bool { return s.sum(name) == 1 })
	}
	if out := h.run("systemctl", "is-enabled", "gpu-exporter"); out != "enabled\n" {
		t.Errorf("is-enabled: %s", out)
	}
	main := h.run("systemctl", "show", "-P", "MainPID", "gpu-exporter")
	if out := h.run(binary, "install", "systemd"); strings.Contains(out, "written") || strings.Contains(out, "replaced") {
		t.Errorf("the second install said:\n%s", out)
	}
	if again := h.run("systemctl", "show", "-P", "MainPID", "gpu-exporter"); again != main || main == "0\n" {
		t.Errorf("the second install restarted it: PID %s, then %s", main, again)
	}
	// It is restarted when it is killed.
	h.run("systemctl", "kill", "-s", "KILL", "gpu-exporter")
	for i := 0; h.run("systemctl", "show", "-P", "NRestarts", "gpu-exporter") != "1\n"; i++ {
		if i == 100 {
			t.Fatal("it is not started again")
		}
		time.Sleep(100 * time.Millisecond)
	}
	h.serves(p)

	out = h.run(binary, "uninstall", "systemd")
	if !strings.HasSuffix(out, "/etc/default/gpu-exporter: kept\n") {
		t.Errorf("uninstall said:\n%s", out)
	}
	if c, err := net.Dial("tcp", address); err == nil {
		c.Close()
		t.Error("it still serves")
	}
	if out, _ := h.try("systemctl", "is-active", "gpu-exporter"); out != "inactive\n" {
		t.Errorf("is-active: %s", out)
	}
	if out := h.run("find", "/etc", "/usr/local", "-name", "*gpu-exporter*"); out != "/etc/default/gpu-exporter\n" {
		t.Errorf("left over:\n%s", out)
	}
}

// freeAddress returns an address on which nobody listens.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// serves waits until the service answers.
func (h *systemdHost) serves(p *process) {
	h.Helper()
	var last error
	for range 200 {
		c, err := net.Dial("tcp", p.address)
		if last = err; err == nil {
			c.Close()
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	h.Fatal(last)
}

// TestInstallWithoutRoot: without root, or without systemd, it says so in one line and does nothing; the unit is printed to anyone.
func TestInstallWithoutRoot(t *testing.T) {
	run := func(uid uint32, args ...string) (stdout, stderr string, code int) {
		cmd := exec.Command(program(t), args...)
		var out, err bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &err
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		cmd.Run()
		return out.String(), err.String(), cmd.ProcessState.ExitCode()
	}
	for _, verb := range []string{"install", "uninstall"} {
		out, err, code := run(65534, verb, "systemd")
		if code != 1 || out != "" || strings.Count(err, "\n") != 1 || !strings.Contains(err, "this takes root") {
			t.Errorf("%s: exit code %d, %q, %q", verb, code, out, err)
		}
	}
	if out, err, code := run(65534, "install", "systemd", "--print"); code != 0 || !strings.Contains(out, "\nExecStart=/usr/local/bin/gpu-exporter ") || err != "" {
		t.Errorf("--print: exit code %d, %q, %q", code, out, err)
	}
	if _, err := os.Stat("/run/systemd/system"); err == nil {
		return // systemd runs this machine: that it should not cannot be shown
	}
	if out, err, code := run(0, "install", "systemd"); code != 1 || out != "" || !strings.Contains(err, "systemd does not run this host") {
		t.Errorf("without systemd: exit code %d, %q, %q", code, out, err)
	}
}

// TestDeb: the Debian package on a host that systemd runs: it serves once it is installed, an update leaves alone what the administrator changed, a
// removal stops it and keeps the flags, and a purge leaves nothing.
func TestDeb(t *testing.T) {
	dir := t.TempDir()
	if out, err := exec.Command("cp", program(t), filepath.Join(dir, "gpu-exporter")).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	pack := func(want string, version ...string) string {
		cmd := exec.Command("scripts/deb", append([]string{runtime.GOARCH, dir}, version...)...)
		cmd.Dir = root
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return filepath.Join(dir, "gpu-exporter_"+want+"_"+runtime.GOARCH+".deb")
	}
	first, second := pack("0~1700000000.9f0de05+dirty", "9f0de05-dirty", "1700000000"), pack("1.2.3+4+g9f0de05", "v1.2.3-4-g9f0de05", "1700000001")
	pack("0~9f0de05", "9f0de05") // where git is not known
	h := bootSystemd(t, dir)
	// All that this host has of packages is the one that ours needs.
	h.run("mkdir", "-p", "/var/lib/dpkg/info", "/var/lib/dpkg/updates", "/var/log")
	h.run("sh", "-c", `printf 'Package: libc6\nStatus: install ok installed\nArchitecture: `+runtime.GOARCH+
		`\nVersion: 2.31\nMaintainer: test\nDescription: test\n' >/var/lib/dpkg/status; touch /var/lib/dpkg/info/libc6.list`)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &process{address: l.Addr().String()}
	l.Close()

	// An own installation goes before the package's unit, so it must go first.
	h.run("touch", "/etc/systemd/system/gpu-exporter.service")
	if out, err := h.try("dpkg", "-i", first); err == nil || !strings.Contains(out, "gpu-exporter uninstall systemd") {
		t.Errorf("beside an own installation: %v\n%s", err, out)
	}
	h.run("rm", "/etc/systemd/system/gpu-exporter.service")

	h.run("sh", "-c", "echo GPU_EXPORTER_FLAGS=--web.listen-address="+p.address+" >/etc/default/gpu-exporter")
	h.run("dpkg", "--force-confold", "-i", first)
	h.serves(p)
	if out := h.run("dpkg", "-L", "gpu-exporter"); !strings.Contains(out, "/usr/bin/gpu-exporter\n") || !strings.Contains(out, "/usr/share/doc/gpu-exporter/copyright\n") {
		t.Errorf("contents:\n%s", out)
	}
	if out := h.run("dpkg", "--verify", "gpu-exporter"); out != "??5?????? c /etc/default/gpu-exporter\n" { // which is ours
		t.Errorf("verify:\n%s", out)
	}
	active := func(want string) {
		t.Helper()
		if out, _ := h.try("systemctl", "is-active", "gpu-exporter"); out != want+"\n" {
			t.Errorf("is-active: %s, want %s", out, want)
		}
	}
	enabled := func(want string) {
		t.Helper()
		if out, _ := h.try("systemctl", "is-enabled", "gpu-exporter"); !strings.HasPrefix(out, want) {
			t.Errorf("is-enabled: %s, want %s", out, want)
		}
	}
	active("active")
	enabled("enabled")

	h.run("systemctl", "disable", "gpu-exporter")
	main := h.run("systemctl", "show", "-P", "MainPID", "gpu-exporter")
	h.run("dpkg", "-i", second)
	enabled("disabled")
	active("active")
	h.serves(p) // with the flags as they were
	if again := h.run("systemctl", "show", "-P", "MainPID", "gpu-exporter"); again == main {
		t.Error("after the update the old program runs")
	}

	h.run("dpkg", "-r", "gpu-exporter")
	active("inactive")
	if c, err := net.Dial("tcp", p.address); err == nil {
		c.Close()
		t.Error("it still serves")
	}
	if out := h.run("find", "/etc", "/usr", "-name", "gpu-exporter", "-o", "-name", "gpu-exporter.service"); out != "/etc/default/gpu-exporter\n" {
		t.Errorf("left after removal:\n%s", out)
	}
	h.run("dpkg", "-P", "gpu-exporter")
	if out, err := h.try("test", "-e", "/etc/default/gpu-exporter"); err == nil {
		t.Errorf("flags are left after a purge %s", out)
	}
}
