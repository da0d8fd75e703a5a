package fake

import (
	"debug/elf"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

func TestScenarioText(t *testing.T) {
	var g GPU
	g.Set("name", "NVIDIA  H200")
	g.Set("memory", uint64(1<<40), 2, 3)
	g.Set("gone", 1)
	g.Unset("gone")
	g.Processes = []Process{{PID: 1, Memory: 2}, {PID: 3, Memory: 4, Graphics: true, MIG: &Instance{5, 6}}}
	g.Busy = []Busy{{PID: 1, SM: 50, PeriodMillis: 1000, OnMillis: 100}}
	g.ProcessSamples = []ProcessSample{{PID: 1, Time: 99, SM: 7, Memory: 8, Encoder: 9, Decoder: 10}}
	g.Samples = []Sample{{Ring: 1, Time: 98, Value: "nan"}}
	g.Fields = []Field{{ID: 197, Scope: 1, Type: 1, Value: "5", Rate: 6}}
	g.GPM = map[int]float64{2: 87.5, 1: 3}
	g.NVLinks = []NVLink{{Link: 0, Active: true, Replay: 1, Recovery: 2, CRCFlit: 3, CRCData: 4}}
	g.Events = []Event{{Type: 8, Data: 79}, {Type: 8, Data: 31, MIG: &Instance{1, 2}}}
	g.MIG = []MIG{{UUID: "MIG-1", Name: "x 1g.18gb", Instance: Instance{7, 0}, SMs: 16, GPUSlices: 1, Slices: 1, MemoryMiB: 2, Used: 3}}
	s := Scenario{Driver: "550.1", NVML: "12.550.1", CUDA: 12040, Log: "/x/y z", ProcessStride: 32, GPUs: []GPU{g, {}}, Faults: []Fault{
		{Function: "nvmlInit_v2", GPU: AnyGPU, Kind: Return, Arg: 18, Times: 2}, {GPU: 0, Kind: Hang}}}
	want := `driver 550.1
nvml 12.550.1
cuda 12040
log /x/y z
process_stride 32
fault nvmlInit_v2 * return 0x12 2
fault * 0 hang 0x0
gpu
memory 1099511627776 2 3
name NVIDIA  H200
process compute 1 2
process graphics 3 4 5 6
busy 1 50 0 0 0 1000 100
psample 1 99 7 8 9 10
sample 1 98 nan
field 197 1 1 5 6
gpm 1 3
gpm 2 87.5
nvlink 0 1 1 2 3 4
event 8 79
event 8 31 1 2
mig
uuid MIG-1
name x 1g.18gb
gpu_instance 7
compute_instance 0
attributes 16 1 1 2
memory 2097152 0 3
gpu
`
	if got := s.String(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// TestPresets: devices of a host differ in what identifies them, and a copy of one may be changed alone.
func TestPresets(t *testing.T) {
	for _, preset := range []func(int) GPU{H200, A10, Old} {
		seen := map[string]bool{}
		for i := range 16 {
			g := preset(i)
			for _, k := range []string{"uuid", "pci", "minor"} {
				v := k + " " + g.Values[k]
				if g.Values[k] == "" || seen[v] {
					t.Errorf("device %d: %s is not its own", i, v)
				}
				seen[v] = true
			}
			if g.Values["minor"] == fmt.Sprint(i) {
				t.Errorf("device %d has minor %s: the difference is the point", i, g.Values["minor"])
			}
			g.Set("uuid", "changed")
			if preset(i).Values["uuid"] == "changed" {
				t.Error("presets share their values")
			}
		}
	}
}

func exports(t *testing.T, path string) []string {
	t.Helper()
	f, err := elf.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	symbols, err := f.DynamicSymbols()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, s := range symbols {
		if s.Section != elf.SHN_UNDEF {
			names = append(names, s.Name)
		}
	}
	return names
}

func TestBuildTo(t *testing.T) {
	path, err := BuildTo(t.TempDir(), "nvmlDeviceGetName")
	if err != nil {
		t.Fatal(err)
	}
	if filepath.Base(path) != "libnvidia-ml.so.1" {
		t.Errorf("built %s", path)
	}
	names := exports(t, path)
	if !slices.Contains(names, "nvmlInit_v2") || slices.Contains(names, "nvmlDeviceGetName") {
		t.Errorf("exports %v", names)
	}
	left, _ := os.ReadDir(filepath.Dir(path))
	if len(left) != 1 {
		t.Errorf("left behind: %v", left)
	}
	if _, err := BuildTo(filepath.Join(t.TempDir(), "none")); err == nil {
		t.Error("built into a directory that does not exist")
	}
}

// TestOldDriverSets: the names of the sets exist, so that taking them away means something.
func TestOldDriverSets(t *testing.T) {
	all := exports(t, Build(t))
	for _, set := range [][]string{Driver470, Driver390} {
		for _, n := range set {
			if !slices.Contains(all, n) {
				t.Errorf("%s is not in the library", n)
			}
		}
		left := exports(t, BuildWithout(t, set...))
		for _, n := range left {
			if slices.Contains(set, n) {
				t.Errorf("%s was not taken away", n)
			}
		}
	}
}

// TestBuildAtTheSameTime: as test programs of several packages do on a machine that has no build yet.
func TestBuildAtTheSameTime(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			path, err := cached(nil)
			if err != nil {
				t.Error(err)
				return
			}
			if f, err := elf.Open(path); err != nil {
				t.Error(err)
			} else {
				f.Close()
			}
		})
	}
	wg.Wait()
}

func TestBuildWithoutCompiler(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	_, err := BuildTo(t.TempDir())
	if err == nil || !strings.Contains(err.Error(), "gcc") {
		t.Errorf("without gcc: %v", err)
	}
}

func TestCalls(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	if got, err := Calls(path); err != nil || got != nil {
		t.Errorf("no log yet: %v, %v", got, err)
	}
	if err := os.WriteFile(path, []byte("5 6 nvmlInit_v2 -1\nrubbish\n7 8 nvmlEventSetWait (waiting) -1\n9 8 nvmlDeviceGetName 3\n10 8"), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := Calls(path)
	want := []Call{{5, 6, "nvmlInit_v2", -1}, {7, 8, "nvmlEventSetWait (waiting)", -1}, {9, 8, "nvmlDeviceGetName", 3}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("got %+v, %v, want %+v", got, err, want)
	}
}
