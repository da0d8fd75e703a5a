package worker

import (
	"os/exec"
	"strings"
	"testing"
)

// The supervisor is part of the static main program: purego would make that a dynamic one.
func TestImports(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, dep := range strings.Fields(string(out)) {
		if strings.Contains(dep, "purego") || dep == "gpu-exporter/nvml" {
			t.Errorf("imports %s", dep)
		}
	}
	if !strings.Contains(string(out), "gpu-exporter/nvml/frame") {
		t.Errorf("no list of imports: %q", out)
	}
}
