package worker

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gpu-exporter/exporter/input"
	"gpu-exporter/nvml/fake"
	"gpu-exporter/nvml/frame"
)

// runReal runs the real worker program on a fake host.
func runReal(t *testing.T, h *fake.Host, change func(*Config)) (*Supervisor, *recorder, *logs) {
	t.Helper()
	prog := dynamic(t)
	return run(t, "", func(c *Config) {
		c.Path, c.embedded, c.Env, c.Library = "", prog, nil, h.Library
		c.Interval = 50 * time.Millisecond
		c.HangAfter, c.AllHungAfter = 10*time.Second, 10*time.Second
		c.BackoffMax = 200 * time.Millisecond
		if change != nil {
			change(c)
		}
	})
}

func device(in []input.Input, index int) *frame.Device {
	for i := len(in) - 1; i >= 0; i-- {
		if f := in[i].Frame; f != nil && f.Device != nil && f.Device.Index == index {
			return f.Device
		}
	}
	return &frame.Device{}
}

// The whole way, from dlopen in the worker to the frames: the library crashes, hangs, and loses its driver, and each time the readings come back.
func TestFakeHost(t *testing.T) {
	gpus := []fake.GPU{fake.H200(0), fake.H200(1)}
	good := fake.Scenario{GPUs: gpus}
	with := func(f fake.Fault) fake.Scenario { return fake.Scenario{GPUs: gpus, Faults: []fake.Fault{f}} }

	t.Run("crash", func(t *testing.T) {
		t.Parallel()
		h := fake.Install(t, good)
		s, r, _ := runReal(t, h, nil)
		r.wait(t, "both devices", func(in []input.Input) bool {
			return device(in, 1).Load != nil && device(in, 0).Load != nil && last(in).Up
		})
		if comm, _ := os.ReadFile("/proc/" + itoa(s.PIDs()[0]) + "/comm"); string(comm) != "nvml-worker\n" {
			t.Errorf("the worker calls itself %q", comm)
		}
		h.Set(t, with(fake.Fault{Function: "nvmlDeviceGetTemperature", GPU: 1, Kind: fake.Crash}))
		in := r.wait(t, "the crash", restarted(ReasonCrash, 1))
		if got := last(in).Reason; !strings.HasPrefix(got, "nvml-worker crashed: ") {
			t.Errorf("reason %q", got)
		}
		h.Set(t, good)
		n := len(in)
		r.wait(t, "both devices again", func(in []input.Input) bool {
			return last(in).Up && device(in[n:], 0).State == frame.StateOK && device(in[n:], 1).State == frame.StateOK
		})
	})

	t.Run("init hangs", func(t *testing.T) {
		t.Parallel()
		h := fake.Install(t, with(fake.Fault{GPU: fake.AnyGPU, Kind: fake.Hang}))
		_, r, _ := runReal(t, h, func(c *Config) { c.StartTimeout = 500 * time.Millisecond })
		in := r.wait(t, "the hang", restarted(ReasonHang, 1))
		if last(in).Up {
			t.Error("up while nvmlInit hangs")
		}
		h.Set(t, good)
		r.wait(t, "a device", func(in []input.Input) bool { return last(in).Up && device(in, 0).State == frame.StateOK })
	})

	t.Run("driver unloaded and loaded", func(t *testing.T) {
		t.Parallel()
		h := fake.Install(t, good)
		_, r, l := runReal(t, h, nil)
		r.wait(t, "a device", func(in []input.Input) bool { return last(in).Up && device(in, 0).State == frame.StateOK })
		h.Set(t, with(fake.Fault{GPU: fake.AnyGPU, Kind: fake.Return, Arg: 9}))
		r.wait(t, "several attempts", restarted(ReasonLibrary, 3))
		if n := l.count("NVML is down"); n != 1 || l.count("the NVIDIA driver is not loaded") != 1 {
			t.Errorf("log of a driver that stays away:\n%s", l)
		}
		h.Set(t, good)
		r.wait(t, "up again", func(in []input.Input) bool { return last(in).Up && last(in).Restarts[ReasonLibrary] >= 3 })
	})

	t.Run("all devices hang", func(t *testing.T) {
		t.Parallel()
		h := fake.Install(t, good)
		_, r, _ := runReal(t, h, func(c *Config) {
			c.AllHungAfter, c.Args = time.Second, []string{"--deadline=100ms"}
		})
		r.wait(t, "a device", func(in []input.Input) bool { return device(in, 0).State == frame.StateOK })
		h.Set(t, with(fake.Fault{Function: "nvmlDeviceGetMemoryInfo_v2", GPU: fake.AnyGPU, Kind: fake.Hang}))
		in := r.wait(t, "the restart", restarted(ReasonHang, 1))
		if d := device(in, 0); d.State != frame.StateHung || !strings.Contains(d.Reason, "nvmlDeviceGetMemoryInfo_v2") {
			t.Errorf("device %+v", d)
		}
		h.Set(t, good)
		n := len(in)
		r.wait(t, "a device again", func(in []input.Input) bool { return device(in[n:], 0).State == frame.StateOK })
	})
}

// Chrooted to a driver root that holds glibc and the library, the worker finds the library there by itself.
func TestFakeHostInDriverRoot(t *testing.T) {
	needRoot(t)
	prog := dynamic(t)
	root := t.TempDir()
	glibc(t, prog, root)
	b, err := os.ReadFile(fake.Build(t))
	if err != nil {
		t.Fatal(err)
	}
	// Where driver containers put it: none of the loader's own directories.
	dir := filepath.Join(root, "run/nvidia/driver/usr/lib64")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "libnvidia-ml.so.1"), b, 0o755); err != nil {
		t.Fatal(err)
	}
	fake.Scenario{GPUs: []fake.GPU{fake.A10(0)}}.Write(t, filepath.Join(dir, "libnvidia-ml.so.1.scenario"))
	_, r, _ := run(t, "", func(c *Config) {
		c.Path, c.embedded, c.DriverRoot, c.Env = "", prog, root, nil
		c.HangAfter = 10 * time.Second
	})
	in := r.wait(t, "a device", func(in []input.Input) bool { return last(in).Up && device(in, 0).State == frame.StateOK })
	for _, i := range in {
		if i.Frame != nil && i.Frame.Library != nil {
			if got, want := i.Frame.Library.Path, "/run/nvidia/driver/usr/lib64/libnvidia-ml.so.1"; got != want {
				t.Errorf("library %q, want %q", got, want)
			}
		}
	}
}
