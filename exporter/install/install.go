// Package install puts gpu-exporter on a host as a systemd service, and takes it away again. It says each thing that it does, and does nothing
// else: it never reloads systemd, because on some hosts that takes the GPUs away from running containers.
package install

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"gpu-exporter/exporter/assets"
)

// Where things are, below Systemd.Root.
const (
	Program = "/usr/local/bin/gpu-exporter"
	Unit    = "/etc/systemd/system/gpu-exporter.service"
	Flags   = "/etc/default/gpu-exporter" // the administrator's own: never written, never removed

	wanted  = "/etc/systemd/system/multi-user.target.wants/gpu-exporter.service" // what starts it when the host does
	dropIns = Unit + ".d"                                                        // the administrator's own too
	service = "gpu-exporter.service"
	booted  = "/run/systemd/system" // is there when systemd runs
)

// packaged are the places where a Debian package has its unit.
var packaged = []string{"/usr/lib/systemd/system/gpu-exporter.service", "/lib/systemd/system/gpu-exporter.service"}

// Systemd is a host, or a directory that will be one.
type Systemd struct {
	Root    string    // "/", or a directory in which nothing is started
	Program string    // the file to install
	Force   bool      // replace a unit of other content
	Out     io.Writer // one line for each thing done
}

// Text returns the unit as Install writes it.
func Text() ([]byte, error) { return assets.Files.ReadFile("install/gpu-exporter.service") }

// Install puts the program and the unit in place, has the service start with the host, and starts it. What is as it should be is left alone.
func (s *Systemd) Install() error {
	text, err := Text()
	if err != nil {
		return fmt.Errorf("installing: %w", err)
	}
	if err := s.check(); err != nil {
		return fmt.Errorf("installing: %w", err)
	}
	for _, unit := range packaged {
		if _, err := os.Stat(s.at(unit)); err == nil {
			return fmt.Errorf("installing: a package has its own unit, %s: remove the package first", s.at(unit))
		}
	}
	old, err := os.ReadFile(s.at(Unit))
	known := err == nil // to systemd, perhaps
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("installing: %w", err)
	}
	if known && !bytes.Equal(old, text) && !s.Force {
		return fmt.Errorf("installing: %s is there and differs: --force replaces it; changes of your own belong in %s/*.conf", s.at(Unit), s.at(dropIns))
	}
	program, err := os.ReadFile(s.Program)
	if err != nil {
		return fmt.Errorf("installing: reading the program: %w", err)
	}
	newProgram, err := s.put(Program, program, 0o755)
	if err != nil {
		return fmt.Errorf("installing: %w", err)
	}
	newUnit, err := s.put(Unit, text, 0o644)
	if err != nil {
		return fmt.Errorf("installing: %w", err)
	}
	if err := s.want(); err != nil {
		return fmt.Errorf("installing: %w", err)
	}
	if s.Root != "/" {
		s.say("not started: %s is not this host's root", s.Root)
		return nil
	}
	if known && newUnit {
		s.say("systemd knows the old unit until the next boot or until `systemctl daemon-reload`, which on some hosts takes the GPUs from running containers")
	}
	verb := "start" // which leaves a running one alone
	if newProgram || newUnit {
		verb = "restart"
	}
	if err := s.systemctl(verb, service); err != nil {
		return fmt.Errorf("installing: %w", err)
	}
	s.say("flags: GPU_EXPORTER_FLAGS=… in %s, then systemctl restart gpu-exporter; log: journalctl -u gpu-exporter", Flags)
	return nil
}

// Uninstall stops the service and removes what Install wrote. What the administrator wrote stays, and is named.
func (s *Systemd) Uninstall() error {
	if err := s.check(); err != nil {
		return fmt.Errorf("uninstalling: %w", err)
	}
	if _, err := os.Stat(s.at(Unit)); err == nil && s.Root == "/" {
		if err := s.systemctl("stop", service); err != nil {
			return fmt.Errorf("uninstalling: %w", err)
		}
	}
	gone := true
	for _, path := range []string{wanted, Unit, Program} {
		switch err := os.Remove(s.at(path)); {
		case err == nil:
			gone = false
			s.say("%s: removed", s.at(path))
		case !errors.Is(err, fs.ErrNotExist):
			return fmt.Errorf("uninstalling: %w", err)
		}
	}
	if gone {
		s.say("nothing is installed")
	}
	for _, path := range []string{Flags, dropIns} {
		if _, err := os.Stat(s.at(path)); err == nil {
			s.say("%s: kept", s.at(path))
		}
	}
	return nil
}

// check tells why the host cannot be changed, before anything is.
func (s *Systemd) check() error {
	s.Root = filepath.Clean(s.Root)
	if s.Root != "/" {
		if d, err := os.Stat(s.Root); err != nil || !d.IsDir() {
			return fmt.Errorf("%s is no directory", s.Root)
		}
		return nil
	}
	if os.Geteuid() != 0 {
		return errors.New("this takes root; --print shows the unit, --root=DIR writes below a directory")
	}
	if _, err := os.Stat(booted); err != nil {
		return errors.New("systemd does not run this host; --root=DIR only writes the files")
	}
	return nil
}

func (s *Systemd) at(path string) string { return filepath.Join(s.Root, path) }

func (s *Systemd) say(format string, args ...any) { fmt.Fprintf(s.Out, format+"\n", args...) }

// put makes a file have content and mode, all at once, and tells whether it had other content or was not there.
func (s *Systemd) put(path string, content []byte, mode fs.FileMode) (changed bool, err error) {
	path = s.at(path)
	old, err := os.ReadFile(path)
	what := "replaced"
	switch info, _ := os.Lstat(path); {
	case errors.Is(err, fs.ErrNotExist):
		what = "written"
	case err != nil:
		return false, err
	case bytes.Equal(old, content) && info.Mode() == mode:
		s.say("%s: is there", path)
		return false, nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return false, err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".gpu-exporter-*")
	if err != nil {
		return false, err
	}
	defer os.Remove(f.Name()) // fails once it has its name
	_, err = f.Write(content)
	if err := errors.Join(err, f.Chmod(mode), f.Sync(), f.Close()); err != nil {
		return false, err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return false, err
	}
	s.say("%s: %s", path, what)
	return true, nil
}

// want is what `systemctl enable` does; that would reload systemd.
func (s *Systemd) want() error {
	link := s.at(wanted)
	if to, err := os.Readlink(link); err == nil && to == Unit {
		s.say("%s: is there", link)
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(link), 0o755); err != nil {
		return err
	}
	if err := os.Remove(link); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Symlink(Unit, link); err != nil {
		return err
	}
	s.say("%s: written", link)
	return nil
}

// systemctl runs systemctl, and says so.
func (s *Systemd) systemctl(args ...string) error {
	cmd := exec.Command("systemctl", args...)
	s.say("systemctl %s", strings.Join(args, " "))
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("systemctl %s: %w: %s", args[0], err, bytes.TrimSpace(out))
	}
	return nil
}
