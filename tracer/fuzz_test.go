package tracer

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"gpu-exporter/tracer/abi"
	"gpu-exporter/tracer/ledger"
)

// FuzzDriverFiles gives the files of /proc that are about the driver any text.
func FuzzDriverFiles(f *testing.F) {
	f.Add("Character devices:\n  1 mem\n195 nvidia\n511 nvidia-uvm\n510 nvidia-caps\n", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n",
		"Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-01020304-0506-0708-090a-0b0c0d0e0f10\nBus Location: \t 0000:0a:00.0\nDevice Minor: \t 7\n", "0::/\n")
	f.Add("4096 nvidia-uvm\n-1 nvidia-caps\n", "NVRM version: 99999999999.1\n", "GPU UUID: GPU-????????-????\nBus Location: ffffffff:ff:1f.7\nDevice Minor: -1\n", "4:cpu,cpuacct:/x\n")
	f.Fuzz(func(t *testing.T, devices, version, information, cgroup string) {
		root := t.TempDir()
		for name, text := range map[string]string{"devices": devices, "driver/nvidia/version": version, "driver/nvidia/gpus/0000:0a:00.0/information": information, "self/cgroup": cgroup} {
			path := filepath.Join(root, name)
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		r, err := deviceRules(root, nil)
		if err != nil || r.majors[rmMajor] != uint32(bpfNodeRULE_RM) {
			t.Errorf("rules %+v, %v", r, err)
		}
		for major := range r.majors {
			if major >= 4096 {
				t.Errorf("major %d", major)
			}
		}
		if v, err := driverVersion(root); (err == nil) == (v == abi.Version{}) {
			t.Errorf("version %+v, %v", v, err)
		} else if err == nil {
			statusRules(v) // of any version
		}
		gpus, complete := hostGPUs(root)
		if len(gpus) > 1 || complete && (len(gpus) != 1 || gpus[0].UUID == (ledger.UUID{})) {
			t.Errorf("GPUs %+v, complete %v", gpus, complete)
		}
		for _, g := range gpus {
			if g.Minor < 0 || g.Minor >= 1<<20 {
				t.Errorf("minor %d", g.Minor)
			}
		}
		if v1, controller := hierarchy(root); v1 != (controller != "") {
			t.Errorf("hierarchy %v %q", v1, controller)
		}
	})
}

// FuzzKernelLog gives the reader of the kernel's log any record.
func FuzzKernelLog(f *testing.F) {
	f.Add("4,1234,5678,-;NVRM: Xid (PCI:0000:0a:00): 79, pid=1234, name=python, GPU has fallen off the bus.\n SUBSYSTEM=pci\n")
	f.Add("4,1,1,-;NVRM: Xid (0000:0a:00 GPU-I:05): 13, pid='<unknown>', name=<unknown>")
	f.Add("12,1,1,-;NVRM: Xid (PCI:0000:0a:00): 79")
	f.Add("-1;NVRM: Xid (PCI:ffffffff:ff:ff): 999999999")
	address := regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.0$`)
	f.Fuzz(func(t *testing.T, record string) {
		x, ok := xidOf(record, 0)
		if ok && (!address.MatchString(x.PCIBusID) || x.PID < 0 || !strings.Contains(record, x.Message)) {
			t.Errorf("%+v", x)
		}
		if _, other := xidOf(record, 1); ok && other {
			t.Error("of two facilities")
		}
	})
}

// FuzzFormat gives the reader of a tracepoint's form any text.
func FuzzFormat(f *testing.F) {
	f.Add("name: nvidia_dev_xid\nformat:\n\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\tfield:__data_loc char[] dev;\toffset:8;\tsize:4;\tsigned:0;\n")
	f.Add("field:;offset:;size:\nfield:x;offset:-1;size:99999999999\n")
	f.Fuzz(func(t *testing.T, text string) {
		for name := range parseFormat(text) {
			if name == "" || !strings.Contains(text, name) {
				t.Errorf("field %q", name)
			}
		}
	})
}
