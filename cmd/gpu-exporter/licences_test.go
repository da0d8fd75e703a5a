package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// licences tells them apart by words that each has and those before it in the list have not.
var licences = []struct{ name, words string }{
	{"Apache-2.0", "Apache License"},
	{"MIT", "Permission is hereby granted, free of charge"},
	{"BSD-3-Clause", "nor the names of"},
	{"BSD-2-Clause", "Redistributions of source code must retain"},
}

// licencesPage lists the modules that are in the program and in its worker, each with its licence. One that is none of the above fails the test: it
// is to be looked at before it is shipped.
func licencesPage(t *testing.T) string {
	t.Helper()
	cmd := exec.Command("go", "list", "-deps", "-tags", "tcell_minimal", "-f", "{{with .Module}}{{if not .Main}}{{.Path}} {{.Dir}}{{end}}{{end}}", ".", "../nvml-worker")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64")
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	modules := slices.Compact(slices.Sorted(slices.Values(strings.Split(strings.TrimSpace(string(out)), "\n"))))
	var b strings.Builder
	fmt.Fprintf(&b, "%s# Licences\n\nThe modules that are in the program and the worker inside it. Go's own library is BSD-3-Clause.\n\n| module | licence |\n|---|---|\n", generated)
	for _, m := range modules {
		path, dir, ok := strings.Cut(m, " ")
		if !ok {
			continue // of a package of Go's or ours
		}
		var text string
		for _, pattern := range []string{"LICEN[CS]E*", "COPYING*"} {
			files, _ := filepath.Glob(filepath.Join(dir, pattern))
			for _, f := range files {
				if s, err := os.ReadFile(f); err == nil {
					text += string(s)
				}
			}
		}
		text = strings.Join(strings.Fields(text), " ")
		i := slices.IndexFunc(licences, func(l struct{ name, words string }) bool { return strings.Contains(text, l.words) })
		if i < 0 {
			t.Errorf("%s has a licence that is not known: look at it", path)
			continue
		}
		fmt.Fprintf(&b, "| %s | %s |\n", path, licences[i].name)
	}
	return b.String()
}
