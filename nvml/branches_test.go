package nvml

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gpu-exporter/nvml/fake"
)

// branches reads the symbols of NVIDIA's own libraries, by version: testdata/symbols, which scripts/driver-libraries writes.
func branches(t *testing.T) map[string][]string {
	t.Helper()
	files, err := filepath.Glob("testdata/symbols/*.txt")
	if err != nil || len(files) < 3 {
		t.Fatalf("%d lists of symbols, %v", len(files), err)
	}
	all := map[string][]string{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		all[strings.TrimSuffix(filepath.Base(f), ".txt")] = strings.Fields(string(b))
	}
	return all
}

// lacking returns the functions of the binding that a library of these symbols lacks, by their newest name as Missing does, and all names that it lacks.
func lacking(has []string) (functions, names []string) {
	for _, list := range symbols {
		found := false
		for _, n := range list {
			if slices.Contains(has, n) {
				found = true
			} else {
				names = append(names, n)
			}
		}
		if !found {
			functions = append(functions, list[0])
		}
	}
	return functions, names
}

// TestBranches: with the symbols that each branch of the driver really has, the binding finds what is there, under the newest name that is there, and
// reports the rest missing. What the fake libraries of old drivers leave out is what the real ones lack.
func TestBranches(t *testing.T) {
	gpm := []string{"nvmlGpmSampleAlloc", "nvmlGpmSampleFree", "nvmlGpmSampleGet", "nvmlGpmMetricsGet", "nvmlGpmQueryDeviceSupport"}
	missing := map[string][]string{
		"470": append([]string{"nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetJpgUtilization", "nvmlDeviceGetOfaUtilization", "nvmlDeviceGetNumFans"}, gpm...),
		"535": nil,
		"550": nil,
	}
	for version, has := range branches(t) {
		branch, _, _ := strings.Cut(version, ".")
		functions, names := lacking(has)
		if want, ok := missing[branch]; ok && !slices.Equal(functions, want) {
			t.Errorf("%s lacks %q, want %q", version, functions, want)
		}
		if branch == "470" {
			if want := slices.Sorted(slices.Values(fake.Driver470)); !slices.Equal(slices.Sorted(slices.Values(names)), want) {
				t.Errorf("%s lacks %q, the fake %q", version, names, want)
			}
		}
		_, l := host(t, fake.Scenario{GPUs: []fake.GPU{fake.H200(0)}}, names...)
		if got := l.Missing(); !slices.Equal(got, functions) {
			t.Errorf("%s: the binding misses %q, want %q", version, got, functions)
		}
		for f, list := range symbols {
			newest := slices.IndexFunc(list, func(n string) bool { return slices.Contains(has, n) })
			if newest >= 0 && (l.name[f] != list[newest] || l.version[f] != len(list)-newest) {
				t.Errorf("%s: %s is called by version %d, %s", version, list[newest], l.version[f], l.name[f])
			}
		}
		if m, err := device(t, l, 0).GetMemoryInfo(); err != nil || m.Total == 0 {
			t.Errorf("%s: memory %+v, %v", version, m, err)
		}
	}
}

// TestDriverLibraries opens NVIDIA's own libraries on a host without a driver. scripts/driver-libraries fetches them.
func TestDriverLibraries(t *testing.T) {
	paths := strings.Fields(os.Getenv("DRIVER_LIBRARIES"))
	if len(paths) == 0 {
		t.Skip("scripts/driver-libraries runs it")
	}
	all := branches(t)
	for _, path := range paths {
		version := path[strings.LastIndex(path, ".so.")+len(".so."):]
		functions, _ := lacking(all[version])
		l, err := Open(Config{Path: path})
		if err != nil {
			t.Errorf("%s: %v", version, err)
			continue
		}
		if got := l.Missing(); !slices.Equal(got, functions) {
			t.Errorf("%s misses %q, its list of symbols says %q", version, got, functions)
		}
		if err := l.Init(); !errors.Is(err, ErrDriverNotLoaded) {
			t.Errorf("%s: nvmlInit: %v", version, err)
		}
		t.Logf("%s: no driver is loaded, it says; it misses %q", version, functions)
	}
}
