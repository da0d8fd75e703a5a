package install_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"gpu-exporter/exporter/install"
)

// host is a directory that is taken for a host.
type host struct {
	*testing.T
	root, program string
	force         bool
}

func newHost(t *testing.T) *host {
	h := &host{T: t, root: t.TempDir(), program: filepath.Join(t.TempDir(), "program")}
	h.write(h.program, "one")
	return h
}

func (h *host) write(path, text string) {
	h.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		h.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		h.Fatal(err)
	}
}

// does runs one of the two, and returns what it said and its error.
func (h *host) does(what func(*install.Systemd) error) (string, error) {
	var out bytes.Buffer
	err := what(&install.Systemd{Root: h.root, Program: h.program, Force: h.force, Out: &out})
	return strings.ReplaceAll(out.String(), h.root, "ROOT"), err
}

func (h *host) want(what func(*install.Systemd) error, lines ...string) {
	h.Helper()
	if out, err := h.does(what); err != nil || out != strings.Join(lines, "\n")+"\n" {
		h.Errorf("said %q, want %q (%v)", out, lines, err)
	}
}

// refuses wants an error with a text, and that nothing was said, for nothing is to have been done.
func (h *host) refuses(what func(*install.Systemd) error, text string) {
	h.Helper()
	if out, err := h.does(what); err == nil || !strings.Contains(err.Error(), text) || out != "" {
		h.Errorf("error %v, want %q; said %q", err, text, out)
	}
}

const (
	unit = install.Unit
	link = "/etc/systemd/system/multi-user.target.wants/gpu-exporter.service"
)

// TestInstall: what is written, that it is written once, and that all of it goes again but what is the administrator's.
func TestInstall(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0o077))
	h := newHost(t)
	in, out := (*install.Systemd).Install, (*install.Systemd).Uninstall
	end := "not started: ROOT is not this host's root"
	h.want(out, "nothing is installed")
	h.want(in, "ROOT"+install.Program+": written", "ROOT"+unit+": written", "ROOT"+link+": written", end)
	for path, mode := range map[string]os.FileMode{install.Program: 0o755, unit: 0o644} {
		if s, err := os.Stat(h.root + path); err != nil || s.Mode() != mode {
			t.Errorf("%s: %v, %v", path, s.Mode(), err)
		}
	}
	// On the host itself it leads to the unit.
	if to, err := os.Readlink(h.root + link); err != nil || to != unit {
		t.Errorf("the link is to %q: %v", to, err)
	}
	h.want(in, "ROOT"+install.Program+": is there", "ROOT"+unit+": is there", "ROOT"+link+": is there", end)
	h.write(h.program, "two")
	h.want(in, "ROOT"+install.Program+": replaced", "ROOT"+unit+": is there", "ROOT"+link+": is there", end)
	h.write(h.root+install.Flags, "GPU_EXPORTER_FLAGS=--linger=1m\n")
	h.write(h.root+unit+".d/own.conf", "[Service]\n")
	h.want(out, "ROOT"+link+": removed", "ROOT"+unit+": removed", "ROOT"+install.Program+": removed", "ROOT"+install.Flags+": kept", "ROOT"+unit+".d: kept")
	var left []string
	filepath.Walk(h.root, func(path string, info os.FileInfo, err error) error {
		if err == nil && !info.IsDir() {
			left = append(left, strings.TrimPrefix(path, h.root))
		}
		return err
	})
	if strings.Join(left, " ") != install.Flags+" "+unit+".d/own.conf" {
		t.Errorf("left over: %v", left)
	}
}

// TestInstallRefuses: a unit that somebody changed, one of a package, and a root that is not there. Nothing is written then.
func TestInstallRefuses(t *testing.T) {
	h := newHost(t)
	in := (*install.Systemd).Install
	h.write(h.root+unit, "[Service]\nExecStart=/bin/true\n")
	h.refuses(in, "is there and differs: --force replaces it")
	if _, err := os.Stat(h.root + install.Program); err == nil {
		t.Error("the program was written")
	}
	h.force = true
	h.want(in, "ROOT"+install.Program+": written", "ROOT"+unit+": replaced", "ROOT"+link+": written", "not started: ROOT is not this host's root")
	h.write(h.root+"/usr/lib/systemd/system/gpu-exporter.service", "")
	h.refuses(in, "remove the package first")
	h.root += "/gone"
	h.refuses(in, "is no directory")
	h.refuses((*install.Systemd).Uninstall, "is no directory")
}
