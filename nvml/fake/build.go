package fake

import (
	"bufio"
	"crypto/sha256"
	"embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
)

//go:embed src
var source embed.FS

var sources = []string{"nvml.c", "abi.h"}

var flags = []string{"-std=gnu11", "-O1", "-g", "-Wall", "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-soname," + soname}

// soname is the file name of the real library.
const soname = "libnvidia-ml.so.1"

// Driver470 lists what the library of the 470 branch lacks of the functions that this project calls.
var Driver470 = []string{
	"nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3",
	"nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetJpgUtilization", "nvmlDeviceGetOfaUtilization", "nvmlGpmSampleAlloc",
	"nvmlGpmSampleFree", "nvmlGpmSampleGet", "nvmlGpmMetricsGet", "nvmlGpmQueryDeviceSupport", "nvmlDeviceGetNumFans",
}

// Driver390 lists what the library of the 390 branch lacks, the last for Fermi: no MIG, no row remapping, and version 1 of most.
var Driver390 = append([]string{
	"nvmlDeviceGetComputeRunningProcesses_v2", "nvmlDeviceGetGraphicsRunningProcesses_v2", "nvmlDeviceGetArchitecture",
	"nvmlDeviceGetFanSpeed_v2", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetMigMode",
	"nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetGpuInstanceId",
	"nvmlDeviceGetComputeInstanceId", "nvmlDeviceGetAttributes_v2", "nvmlEventSetWait_v2", "nvmlSystemGetCudaDriverVersion_v2",
}, Driver470...)

// BuildTo compiles the library, without the functions named, to dir and returns its path.
func BuildTo(dir string, without ...string) (string, error) {
	src, err := os.MkdirTemp(dir, ".build-*")
	if err != nil {
		return "", fmt.Errorf("building the fake NVML: %w", err)
	}
	defer os.RemoveAll(src)
	if err := extract(src); err != nil {
		return "", fmt.Errorf("building the fake NVML: %w", err)
	}
	out := filepath.Join(src, soname)
	args := append(slices.Clone(flags), "-o", out)
	for _, w := range without {
		// Under another name nobody finds it.
		args = append(args, "-D"+w+"=absent_"+w)
	}
	args = append(args, filepath.Join(src, "nvml.c"), "-ldl", "-lpthread")
	if b, err := exec.Command("gcc", args...).CombinedOutput(); err != nil {
		return "", fmt.Errorf("building the fake NVML: gcc: %w\n%s", err, b)
	}
	path := filepath.Join(dir, soname)
	if err := os.Rename(out, path); err != nil {
		return "", fmt.Errorf("building the fake NVML: %w", err)
	}
	return path, nil
}

func extract(dir string) error {
	for _, name := range sources {
		b, err := source.ReadFile("src/" + name)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			return err
		}
	}
	return nil
}

// Extract writes the library's C source, nvml.c and abi.h, to dir.
func Extract(dir string) error { return extract(dir) }

// Build returns the path of the compiled library, and compiles it if no one has. It plays the scenario of FAKE_NVML_SCENARIO.
func Build(t TB) string {
	t.Helper()
	return BuildWithout(t)
}

// BuildWithout is Build for a library that lacks the functions named, as older ones do: see Driver470.
func BuildWithout(t TB, functions ...string) string {
	t.Helper()
	path, err := cached(functions)
	if err != nil {
		t.Fatalf("%v", err)
	}
	return path
}

// cached builds once per content. Test programs run at the same time: each builds apart, and the first to finish names the result.
func cached(without []string) (string, error) {
	without = slices.Sorted(slices.Values(without))
	h := sha256.New()
	fmt.Fprintln(h, runtime.GOARCH, without)
	fmt.Fprintln(h, flags)
	for _, name := range sources {
		b, err := source.ReadFile("src/" + name)
		if err != nil {
			return "", err
		}
		h.Write(b)
	}
	dir := filepath.Join(os.TempDir(), fmt.Sprintf("fake-nvml-%d", os.Getuid()), fmt.Sprintf("%x", h.Sum(nil)[:8]))
	path := filepath.Join(dir, soname)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("building the fake NVML: %w", err)
	}
	return BuildTo(dir, without...)
}

// Host is a copy of the library with a scenario of its own, so that tests which share a process do not share a host.
type Host struct {
	Library  string // path of the library
	Scenario string // path of the scenario
}

// Install makes a host in a directory of the test's own, from a library that lacks the functions named.
func Install(t TB, s Scenario, without ...string) *Host {
	t.Helper()
	b, err := os.ReadFile(BuildWithout(t, without...))
	if err != nil {
		t.Fatalf("installing the fake NVML: %v", err)
	}
	h := &Host{Library: filepath.Join(t.TempDir(), soname)}
	h.Scenario = h.Library + ".scenario"
	s.Write(t, h.Scenario)
	if err := os.WriteFile(h.Library, b, 0o755); err != nil {
		t.Fatalf("installing the fake NVML: %v", err)
	}
	return h
}

// Set changes the host.
func (h *Host) Set(t TB, s Scenario) {
	t.Helper()
	s.Write(t, h.Scenario)
}

// Call is one line of the log.
type Call struct {
	Time     int64 // Unix nanoseconds
	Thread   int
	Function string
	GPU      int // -1 for calls without a device
}

// Calls reads the log that Scenario.Log names. A log that does not exist yet has no calls.
func Calls(path string) ([]Call, error) {
	f, err := os.Open(path)
	if err != nil {
		if os.IsNotExist(err) {
			return nil, nil
		}
		return nil, fmt.Errorf("reading call log: %w", err)
	}
	defer f.Close()
	var out []Call
	for sc := bufio.NewScanner(f); sc.Scan(); {
		w := strings.Fields(sc.Text())
		if len(w) < 4 {
			continue
		}
		ns, err1 := strconv.ParseInt(w[0], 10, 64)
		thread, err2 := strconv.Atoi(w[1])
		gpu, err3 := strconv.Atoi(w[len(w)-1])
		if err1 != nil || err2 != nil || err3 != nil {
			continue
		}
		out = append(out, Call{ns, thread, strings.Join(w[2:len(w)-1], " "), gpu})
	}
	return out, nil
}
