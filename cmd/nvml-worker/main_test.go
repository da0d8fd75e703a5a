package main

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"gpu-exporter/nvml/frame"
)

// The program must run on any distribution: it is built without cgo, for both processors, and asks for no version of a glibc symbol.
func TestBuilds(t *testing.T) {
	for arch, machine := range map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64} {
		f, err := elf.Open(build(t, arch))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if f.Machine != machine {
			t.Errorf("%s: machine %v", arch, f.Machine)
		}
		libs, err := f.ImportedLibraries()
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range libs {
			if l != "libc.so.6" && l != "libdl.so.2" && l != "libpthread.so.0" {
				t.Errorf("%s needs %s", arch, l)
			}
		}
		symbols, err := f.ImportedSymbols()
		if err != nil {
			t.Fatal(err)
		}
		if len(symbols) == 0 {
			t.Errorf("%s imports nothing: how does it call dlopen?", arch)
		}
		for _, s := range symbols {
			if s.Version != "" {
				t.Errorf("%s: %s wants %s", arch, s.Name, s.Version)
			}
		}
	}
}

func build(t *testing.T, arch string) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "nvml-worker")
	cmd := exec.Command("go", "build", "-o", out, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOARCH="+arch)
	if msg, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, msg)
	}
	return out
}

// Wrong flags are one line and status 2.
func TestWrongFlags(t *testing.T) {
	for _, args := range [][]string{{"--nonsense"}, {"--interval=soon"}, {"--interval=0s"}, {"--interval=-1s"}, {"--samples=1ns"}, {"more"}} {
		var stdout, stderr bytes.Buffer
		if rc := run(args, strings.NewReader(""), &stdout, &stderr); rc != 2 {
			t.Errorf("%v: status %d", args, rc)
		}
		if n := strings.Count(stderr.String(), "\n"); n != 1 || !strings.HasPrefix(stderr.String(), "nvml-worker: ") {
			t.Errorf("%v: %q is not one line", args, stderr.String())
		}
		if stdout.Len() > 0 {
			t.Errorf("%v: printed %q", args, stdout.String())
		}
	}
}

// A library that cannot be used is one frame that says why, and status 1.
func TestLibraryUnusable(t *testing.T) {
	dir := t.TempDir()
	file := func(name string, b []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, b, 0o644); err != nil {
			t.Fatal(err)
		}
		return path
	}
	other := elf.EM_AARCH64
	if runtime.GOARCH == "arm64" {
		other = elf.EM_X86_64
	}
	header := make([]byte, 64)
	copy(header, "\x7fELF\x02\x01\x01")
	binary.LittleEndian.PutUint16(header[16:], uint16(elf.ET_DYN))
	binary.LittleEndian.PutUint16(header[18:], uint16(other))
	binary.LittleEndian.PutUint32(header[20:], 1)
	binary.LittleEndian.PutUint16(header[52:], 64)
	empty := filepath.Join(dir, "empty.so")
	if msg, err := exec.Command("gcc", "-shared", "-nostdlib", "-o", empty, "-x", "c", "/dev/null").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, msg)
	}
	for _, c := range []struct{ name, library, want string }{
		{"no such file", filepath.Join(dir, "missing.so"), "no such file"},
		{"not an ELF", file("text.so", []byte("#!/bin/sh\n")), "not an ELF file"},
		{"cut short", file("short.so", []byte("\x7fEL")), "not an ELF file"},
		{"wrong processor", file("other.so", header), "built for another processor"},
		{"another library", empty, "nvmlInit"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			pending, _ := io.Pipe() // an input that does not end
			if rc := run([]string{"--library=" + c.library}, pending, &stdout, &stderr); rc != 1 {
				t.Errorf("status %d", rc)
			}
			var f frame.Frame
			if err := json.Unmarshal(stdout.Bytes(), &f); err != nil {
				t.Fatalf("%v in %q", err, stdout.String())
			}
			if f.Library == nil || f.Library.OK || !strings.Contains(f.Library.Reason, c.want) || !strings.Contains(f.Library.Reason, c.library) {
				t.Errorf("frame %s", stdout.String())
			}
			if stderr.Len() > 0 {
				t.Errorf("and also said %q", stderr.String())
			}
		})
	}
}

// Help is help, not an error.
func TestHelp(t *testing.T) {
	var stdout, stderr bytes.Buffer
	if rc := run([]string{"--help"}, strings.NewReader(""), &stdout, &stderr); rc != 0 || !strings.Contains(stderr.String(), "-interval") {
		t.Errorf("status %d, said %q", rc, stderr.String())
	}
}
