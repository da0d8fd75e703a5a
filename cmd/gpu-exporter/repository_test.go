package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const root = "../../"

// files lists the repository's files: those that git tracks or would, or all of an unpacked archive.
func files(t *testing.T) []string {
	t.Helper()
	cmd := exec.Command("git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard")
	cmd.Dir = root
	if out, err := cmd.Output(); err == nil {
		return strings.Fields(string(out))
	}
	var list []string
	err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			list = append(list, strings.TrimPrefix(path, root))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// Every dependency of our own has its reason in docs/architecture.md.
func TestDependencies(t *testing.T) {
	mod, err := os.ReadFile(root + "go.mod")
	if err != nil {
		t.Fatal(err)
	}
	doc, err := os.ReadFile(root + "docs/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	_, reasons, ok := strings.Cut(string(doc), "## Dependencies")
	if !ok {
		t.Fatal("docs/architecture.md has no section on dependencies")
	}
	n := 0
	for line := range strings.Lines(string(mod)) {
		f := strings.Fields(line)
		if len(f) != 2 || !strings.Contains(f[0], ".") || !strings.HasPrefix(f[1], "v") {
			continue
		}
		n++
		// Its last elements without a major version: client_golang, x/sys, kingpin.
		path := regexp.MustCompile(`/v\d+$`).ReplaceAllString(f[0], "")
		if name := path[strings.LastIndex(path, "/")+1:]; !strings.Contains(reasons, name) {
			t.Errorf("docs/architecture.md gives no reason for %s", f[0])
		}
	}
	if n < 4 {
		t.Errorf("found %d dependencies in go.mod", n)
	}
}

// The tree has the folders it says it has, each package says what it is for, and the BPF programs carry their licence.
func TestTree(t *testing.T) {
	folders := []string{"nvml", "bpf", "tracer", "exporter", "cmd", "scripts", "docs", ".ci"}
	for _, f := range files(t) {
		if dir, _, deep := strings.Cut(f, "/"); deep && !slices.Contains(folders, dir) {
			t.Errorf("%s: a folder of no known purpose", f)
		}
		b, err := os.ReadFile(root + f)
		if err != nil {
			continue // deleted, not yet committed
		}
		if strings.HasPrefix(f, "bpf/") && (strings.HasSuffix(f, ".c") || strings.HasSuffix(f, ".h")) &&
			!bytes.HasPrefix(b, []byte("// SPDX-License-Identifier: GPL-2.0-or-later OR BSD-2-Clause\n")) {
			t.Errorf("%s: no licence in its first line", f)
		}
		if bytes.HasPrefix(b, []byte("\x7fELF")) && !strings.HasSuffix(f, "_bpfel.o") {
			t.Errorf("%s: a binary", f)
		}
		if len(b) > 1<<20 {
			t.Errorf("%s: %d bytes", f, len(b))
		}
	}
	cmd := exec.Command("go", "list", "-f", "{{if not .Doc}}{{.ImportPath}}{{end}}", "./...")
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range strings.Fields(string(out)) {
		t.Errorf("%s: no package comment", p)
	}
}
