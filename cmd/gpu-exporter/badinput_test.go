package main

import (
	"fmt"
	"math"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"gpu-exporter/nvml/fake"
)

// file writes a file that anyone may read and execute, and returns its path.
func file(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// badInput is one thing that may be wrong with a host. What it leaves alone is in order.
type badInput struct {
	name   string
	flag   string          // the flag that leads to it
	path   string          // and its value
	change func(*exec.Cmd) // of the program's start
	nvml   float64         // gpu_exporter_nvml_up
	docker float64         // gpu_exporter_docker_up
	says   []string        // what is complained of, in regular expressions: once each, and nothing else
	check  func(t *testing.T, p *process, s scrape)
}

// TestBadInput runs the real binary on each bad input: it says what is wrong once, serves what it has, and ends in order.
func TestBadInput(t *testing.T) {
	tests := append(append(badLibraries(t), badWorkers(t)...), badEngines(t)...)
	library := fake.Install(t, fake.Scenario{GPUs: []fake.GPU{fake.H200(0)}}).Library
	if err := os.Chmod(filepath.Dir(filepath.Dir(library)), 0o755); err != nil { // one of them runs as another user
		t.Fatal(err)
	}
	socket := engine(t, nil, nil)
	var all []*process
	for _, tt := range tests {
		flags := map[string]string{"--tracer": "off", "--nvml.library": library, "--docker.host": "unix://" + socket, tt.flag: tt.path}
		var args []string
		for name, value := range flags {
			args = append(args, name+"="+value)
		}
		all = append(all, launch(t, tt.change, args...))
	}
	for _, p := range all {
		p.serving(t)
	}
	time.Sleep(7 * time.Second) // several ticks and attempts, and longer than an answer of Docker's may take
	for i, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := all[i]
			if !p.alive() {
				t.Fatalf("it ended: %v\n%s", p.err, p.log.String())
			}
			s := p.scrape(t)
			s.want(t, tt.nvml, "gpu_exporter_nvml_up")
			s.want(t, tt.docker, "gpu_exporter_docker_up")
			if up := len(s["gpu_up"]); tt.nvml == 0 && s.sum("gpu_up") > 0 || tt.nvml == 1 && tt.check == nil && up != 1 {
				t.Errorf("%d GPUs, of which %v are up", up, s.sum("gpu_up"))
			}
			said := p.complaints()
			for _, want := range tt.says {
				n := 0
				for _, line := range said {
					if regexp.MustCompile(want).MatchString(line) {
						n++
					}
				}
				if n != 1 {
					t.Errorf("it says %q %d times, want once", want, n)
				}
			}
			if len(said) != len(tt.says) {
				t.Errorf("%d complaints, want %d:\n%s", len(said), len(tt.says), strings.Join(said, "\n"))
			}
			if memory := s.sum("process_resident_memory_bytes"); memory > 160*mib {
				t.Errorf("it takes %.0f MiB", memory/mib)
			}
			if tt.check != nil {
				tt.check(t, p, s)
			}
			p.stop(t)
		})
	}
}

func badLibraries(t *testing.T) []badInput {
	good, err := os.ReadFile(fake.Build(t))
	if err != nil {
		t.Fatal(err)
	}
	other := append([]byte(nil), good...)
	other[18], other[19] = 8, 0 // e_machine: MIPS
	scenario := func(change func(s *fake.Scenario)) string {
		s := fake.Scenario{GPUs: []fake.GPU{fake.H200(0)}}
		hold(&s.GPUs[0], 100*mib)
		change(&s)
		return fake.Install(t, s).Library
	}
	fault := func(function, kind string, arg uint64) string {
		return scenario(func(s *fake.Scenario) {
			s.Faults = []fake.Fault{{Function: function, GPU: fake.AnyGPU, Kind: kind, Arg: arg}}
		})
	}
	down := func(reason string) []string { return []string{`msg="NVML is down" reason=.*` + reason} }
	// Whatever the library says, no sentinel and no impossible figure is exposed.
	sane := func(t *testing.T, p *process, s scrape) {
		for name, list := range s {
			for _, x := range list {
				v := x.value
				if !strings.HasPrefix(name, "gpu_") || strings.Contains(name, "timestamp") {
					continue
				}
				if math.IsNaN(v) || v < 0 || v >= 1<<62 || v == math.MaxUint32 ||
					strings.HasSuffix(name, "_percent") && v > 100 || strings.HasSuffix(name, "_ratio") && v > 1 || strings.Contains(name, "celsius") && v > 250 {
					t.Errorf("%s%v is %v", name, x.labels, v)
				}
			}
		}
		if s.has(1, "gpu_exporter_nvml_up") && len(s["gpu_memory_used_bytes"]) > 0 {
			if got, want := s.sum("gpu_memory_used_bytes"), s.sum("gpu_device_memory_used_bytes"); got != want {
				t.Errorf("workloads hold %v, the device %v", got, want)
			}
		}
	}
	const flag = "--nvml.library"
	return []badInput{
		{name: "library is text", flag: flag, path: file(t, "hello\n"), docker: 1, says: down("not an ELF file")},
		{name: "library is empty", flag: flag, path: file(t, ""), docker: 1, says: down("not an ELF file")},
		{name: "library is a directory", flag: flag, path: t.TempDir(), docker: 1, says: down("not a file")},
		{name: "library is not there", flag: flag, path: filepath.Join(t.TempDir(), "none"), docker: 1, says: down("no such file")},
		{name: "library is cut off", flag: flag, path: file(t, string(good[:4096])), docker: 1, says: down("file/none: |not an ELF file|file too short")},
		{name: "library is for another processor", flag: flag, path: file(t, string(other)), docker: 1, says: down("built for another processor .EM_MIPS, want EM_")},
		{name: "library is another one", flag: flag, path: cLibrary(t), docker: 1, says: down("nvmlInit")},
		{name: "library without its first symbol", flag: flag, path: fake.Install(t, fake.Scenario{}, "nvmlInit_v2", "nvmlInit").Library, docker: 1, says: down("nvmlInit")},
		{name: "library of an old driver", flag: flag, path: fake.Install(t, fake.Scenario{GPUs: []fake.GPU{fake.H200(0)}}, fake.Driver390...).Library, nvml: 1, docker: 1},
		{name: "library and driver differ", flag: flag, path: fault("nvmlInit_v2", fake.Return, 18), docker: 1, says: down("different versions: reload the driver or reboot")},
		{name: "driver not loaded", flag: flag, path: fault("nvmlInit_v2", fake.Return, 9), docker: 1, says: down("the NVIDIA driver is not loaded")},
		{name: "unknown error", flag: flag, path: fault("nvmlInit_v2", fake.Return, 12345), docker: 1, says: down("12345")},
		{name: "library crashes", flag: flag, path: fault("nvmlInit_v2", fake.Crash, 0), docker: 1, says: append(down("crashed"), "nvml-worker says.*SIGSEGV"),
			check: func(t *testing.T, p *process, s scrape) {
				if n := s.sum("gpu_exporter_nvml_restarts_total", "reason", "crash"); n < 2 {
					t.Errorf("%v restarts for a crash", n)
				}
			}},
		{name: "library ends the process", flag: flag, path: fault("nvmlInit_v2", fake.Exit, 7), docker: 1, says: down("ended with status 7")},
		{name: "no GPU", flag: flag, path: scenario(func(s *fake.Scenario) { s.GPUs = nil }), nvml: 1, docker: 1, check: sane},
		{name: "a million GPUs", flag: flag, path: fault("nvmlDeviceGetCount_v2", fake.Fill, 1_000_000), docker: 1, says: down("")},
		{name: "GPUs that cannot be opened", flag: flag, path: fault("nvmlDeviceGetCount_v2", fake.Fill, 3), nvml: 1, docker: 1,
			says: []string{"GPU cannot be read.* index=1 ", "GPU cannot be read.* index=2 "}, check: func(t *testing.T, p *process, s scrape) {
				if n, up := len(s["gpu_up"]), s.sum("gpu_up"); n != 3 || up != 1 {
					t.Errorf("%v of %d GPUs are up, want 1 of 3", up, n)
				}
			}},
		{name: "two GPUs of one UUID", flag: flag, path: scenario(func(s *fake.Scenario) { s.GPUs = append(s.GPUs, s.GPUs[0]) }), nvml: 1, docker: 1,
			check: sane},
		{name: "lost GPU", flag: flag, path: scenario(func(s *fake.Scenario) { s.GPUs[0].Set("lost") }), nvml: 1, docker: 1, says: []string{"GPU cannot be read.*fallen off the bus"}},
		{name: "sentinels", flag: flag, path: fault("", fake.Fill, math.MaxUint64), docker: 1, says: down(""), check: sane},
		{name: "garbage", flag: flag, path: deviceGarbage(t, 0x4141414141414141), nvml: 1, docker: 1, check: sane},
		{name: "sentinels of devices", flag: flag, path: deviceGarbage(t, math.MaxUint64), nvml: 1, docker: 1, check: sane},
		{name: "zeros of devices", flag: flag, path: deviceGarbage(t, 0), nvml: 1, docker: 1, check: sane},
		{name: "claims of a million processes", flag: flag, path: fault("nvmlDeviceGetComputeRunningProcesses_v3", fake.Count, 1_000_000), nvml: 1, docker: 1, check: sane},
		{name: "processes that are not there", flag: flag, path: scenario(func(s *fake.Scenario) {
			hold(&s.GPUs[0], 100*mib, fake.Process{PID: 4194303, Memory: gib}, fake.Process{PID: 0, Memory: gib}, fake.Process{PID: math.MaxUint32, Memory: gib},
				fake.Process{PID: os.Getpid(), Memory: gib})
		}), nvml: 1, docker: 1, check: func(t *testing.T, p *process, s scrape) {
			s.want(t, gib, "gpu_memory_used_bytes", "process_pid", strconv.Itoa(os.Getpid()))
			s.want(t, 3*gib+100*mib, "gpu_memory_used_bytes", "process_pid", "", "container_id", "")
			if n := len(s["gpu_memory_used_bytes"]); n != 2 {
				t.Errorf("%d series: %v", n, s["gpu_memory_used_bytes"])
			}
			sane(t, p, s)
		}},
	}
}

// deviceGarbage is a library whose devices can be opened and then answer every question with the same 8 bytes.
func deviceGarbage(t *testing.T, with uint64) string {
	t.Helper()
	s := fake.Scenario{GPUs: []fake.GPU{fake.H200(0)}}
	for _, f := range []string{"MemoryInfo", "MemoryInfo_v2", "UtilizationRates", "Temperature", "TemperatureThreshold", "PowerUsage", "EnforcedPowerLimit",
		"TotalEnergyConsumption", "ClockInfo", "MaxClockInfo", "PerformanceState", "CurrentClocksEventReasons", "CurrentClocksThrottleReasons", "EncoderUtilization",
		"DecoderUtilization", "JpgUtilization", "OfaUtilization", "BAR1MemoryInfo", "TotalEccErrors", "RetiredPages", "RemappedRows", "FanSpeed_v2", "NumFans",
		"PcieThroughput", "PcieReplayCounter", "CurrPcieLinkGeneration", "CurrPcieLinkWidth", "MaxPcieLinkGeneration", "MaxPcieLinkWidth", "MinorNumber", "Serial",
		"VbiosVersion", "PciInfo_v3", "Architecture", "CudaComputeCapability", "MigMode", "EncoderStats", "Samples", "ProcessUtilization", "FieldValues",
		"ComputeRunningProcesses_v3", "GraphicsRunningProcesses_v3", "ViolationStatus"} {
		s.Faults = append(s.Faults, fake.Fault{Function: "nvmlDeviceGet" + f, GPU: fake.AnyGPU, Kind: fake.Fill, Arg: with})
	}
	return fake.Install(t, s).Library
}

// cLibrary returns the path of a good shared library that is not NVML.
func cLibrary(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("gcc", "-print-file-name=libm.so.6").Output()
	if err != nil {
		t.Fatal(err)
	}
	path, err := filepath.EvalSymlinks(strings.TrimSpace(string(out)))
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func badWorkers(t *testing.T) []badInput {
	script := func(text string) string { return file(t, "#!/bin/sh\n"+text+"\n") }
	restarted := func(reason string) func(*testing.T, *process, scrape) {
		return func(t *testing.T, p *process, s scrape) {
			if s.sum("gpu_exporter_nvml_restarts_total", "reason", reason) < 1 {
				t.Errorf("no restart for %s: %v", reason, s["gpu_exporter_nvml_restarts_total"])
			}
		}
	}
	const flag = "--nvml.worker"
	return []badInput{
		{name: "worker is not there", flag: flag, path: filepath.Join(t.TempDir(), "none"), docker: 1, says: []string{"NVML is down.*worker program: .*no such file"}},
		{name: "worker is no program", flag: flag, path: file(t, "hello"), docker: 1, says: []string{"NVML is down.*not a program for this processor"}},
		{name: "worker may not be executed", flag: flag, path: "/etc/passwd", docker: 1, says: []string{"NVML is down.*permission denied"}},
		{name: "worker ends", flag: flag, path: script("echo no luck >&2; exit 3"), docker: 1, check: restarted("exit"),
			says: []string{"NVML is down.*ended with status 3: no luck", "nvml-worker says.*no luck"}},
		{name: "worker ends in the middle of a line", flag: flag, path: script(`printf '{"v":1,"t":17'`), docker: 1, check: restarted("exit"), says: []string{"NVML is down.*ended with status 0"}},
		{name: "worker waits in the middle of a line", flag: flag, path: script(`printf '{"v":1,"t":17'; exec sleep 1000`), docker: 1},
		{name: "worker prints byte by byte", flag: flag, path: script(`exec perl -e '$| = 1; while (1) { print "{"; select undef, undef, undef, 0.01 }'`), docker: 1},
		{name: "worker grows", flag: flag, path: script(`exec perl -e '$x = "x" x 600000000; sleep 1000'`), docker: 1, check: restarted("memory"),
			says: []string{"NVML is down.*grew beyond 512 MiB"}},
		{name: "worker prints text", flag: flag, path: script(`while echo hello; do :; done`), docker: 1, check: restarted("garbage"),
			says: []string{"NVML is down.*does not print frames", "printed a line that is no frame"}},
		{name: "worker prints other JSON", flag: flag, path: script(`while echo '{"a":[1,2]}' && echo '[]' && echo null && echo '{"v":1,"t":1,"device":{"index":-1}}'; do :; done`), docker: 1,
			check: restarted("garbage"), says: []string{"NVML is down.*does not print frames", "printed a line that is no frame"}},
		{name: "worker of another release", flag: flag, path: script(`echo '{"v":999,"t":1}'; sleep 1`), docker: 1, check: restarted("garbage"),
			says: []string{"NVML is down.*different releases", "printed a line that is no frame"}},
		{name: "worker prints a line without end", flag: flag, path: script(`exec cat /dev/zero`), docker: 1, check: restarted("garbage"),
			says: []string{"NVML is down.*line too long", "printed a line that is no frame"}},
		{name: "worker prints long lines", flag: flag, path: script(`exec yes "$(head -c 100000 /dev/zero | tr '\0' x)"`), docker: 1, check: restarted("garbage"),
			says: []string{"NVML is down.*does not print frames", "printed a line that is no frame"}},
		{name: "worker complains without end", flag: flag, path: script(`exec yes complaint >&2`), docker: 1, check: restarted("hang"),
			says: []string{"nvml-worker says.*complaint", "NVML is down.*closed its output and did not end"}},
	}
}

func badEngines(t *testing.T) []badInput {
	const flag = "--docker.host"
	down := func(reason string) []string { return []string{`docker is not available.*reason=.*` + reason} }
	denied := engine(t, nil, nil)
	if err := os.Chmod(denied, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Dir(denied), 0o755); err != nil {
		t.Fatal(err)
	}
	half := func(path string) string {
		return engine(t, nil, func(w http.ResponseWriter, r *http.Request, p string) bool {
			if p != path {
				return false
			}
			w.Header().Set("Content-Length", "1000")
			fmt.Fprint(w, `[{"Id":"`)
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		})
	}
	names := []string{"a\"b\\c\nd\te\x00f", "\xff\xfe{}=,", "\x1b[31mred", "\u202egnp.exe", strings.Repeat("é", 5000), "", "//x/y", "a b"}
	var named []map[string]any
	for i, name := range names {
		named = append(named, inspected(id(i+1), name))
	}
	nobody := func(cmd *exec.Cmd) {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	}
	return []badInput{
		{name: "Docker is not there", flag: flag, path: "unix://" + filepath.Join(t.TempDir(), "none"), nvml: 1, says: down("does not exist")},
		{name: "Docker is a file", flag: flag, path: "unix://" + file(t, ""), nvml: 1, says: down("is not a socket")},
		{name: "Docker is a directory", flag: flag, path: "unix://" + t.TempDir(), nvml: 1, says: down("is not a socket")},
		{name: "Docker may not be asked", flag: flag, path: "unix://" + denied, change: nobody, nvml: 1, says: down("permission denied")},
		{name: "Docker hangs", flag: flag, path: "unix://" + silent(t), nvml: 1, says: down("does not answer in time")},
		{name: "Docker closes", flag: flag, path: "unix://" + listen(t, func(l net.Listener) {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				c.Close()
			}
		}), nvml: 1, says: down("closed the connection")},
		{name: "Docker gives half a list", flag: flag, path: "unix://" + half("/containers/json"), nvml: 1, says: down("broke off in the middle of an answer")},
		{name: "Docker gives no JSON", flag: flag, path: "unix://" + engine(t, nil, func(w http.ResponseWriter, r *http.Request, p string) bool {
			if p == "/containers/json" {
				fmt.Fprint(w, "\x00\x1b[31mhello")
			}
			return p == "/containers/json"
		}), nvml: 1, says: down("is not Docker")},
		{name: "Docker lists without end", flag: flag, path: "unix://" + engine(t, nil, func(w http.ResponseWriter, r *http.Request, p string) bool {
			if p != "/containers/json" {
				return false
			}
			fmt.Fprint(w, `[{"Id":"`)
			for {
				if _, err := fmt.Fprint(w, strings.Repeat("x", 1<<16)); err != nil {
					return true
				}
			}
		}), nvml: 1, says: down("is not Docker: .*too long")},
		{name: "names of any byte", flag: flag, path: "unix://" + engine(t, named, nil), nvml: 1, docker: 1, check: func(t *testing.T, p *process, s scrape) {
			infos := s["gpu_container_info"]
			if len(infos) != len(names) {
				t.Errorf("%d containers, want %d", len(infos), len(names))
			}
			for _, x := range infos {
				if name := x.labels["container_name"]; strings.ContainsAny(name, "\n\t\x00\x1b\u202e") || len(name) > 1024 || strings.HasPrefix(name, "/") {
					t.Errorf("name %.100q, %d bytes", name, len(name))
				}
			}
			s.want(t, 1, "gpu_container_info", "container_name", "a b")
			s.want(t, 1, "gpu_container_info", "container_name", "x/y")
			if text := p.log.String(); strings.ContainsAny(text, "\x1b\x00") {
				t.Errorf("control characters in the log: %q", text)
			}
		}},
	}
}

// TestUnknownGroups: control groups of no known form, and processes of which /proc says nonsense, belong to no container; their memory is shown.
func TestUnknownGroups(t *testing.T) {
	hex := strings.Repeat("0123456789abcdef", 4)
	tree, want := map[int]map[string]string{}, map[int]string{}
	list := []fake.Process{}
	for _, c := range []struct{ file, text, container string }{
		{"cgroup", "", ""}, {"cgroup", "\n\n\n", ""}, {"cgroup", "nonsense", ""}, {"cgroup", "0::", ""}, {"cgroup", "0::/docker/" + hex[1:] + "\n", ""},
		{"cgroup", "0::/docker/" + hex + "0\n", ""}, {"cgroup", "12:cpu\n13\n:::::\n", ""}, {"cgroup", "\x00\xff\xfe", ""},
		{"cgroup", "0::/" + strings.Repeat("a/", 100_000), ""}, {"cgroup", "0::/system.slice/ssh.service\n", ""},
		{"cgroup", "0::/docker/" + hex + "\n", hex[:12]},
		{"cmdline", "\x1b[31m\xff\x00\n", ""}, {"stat", "1 (a) b) S 1 1 1 0 -1 0 0 0 0 0 1 1 0 0 20 0 1 0 5 0 0\n", ""},
		{"stat", "", ""}, {"stat", "nonsense", ""}, {"stat", "1 (x) S 1 2 3", ""}, {"stat", "1 (x) S -1 -1 a b c d e f g h i j k l m n o p q r s t u v", ""},
	} {
		pid := sleeper(t)
		tree[pid], want[pid] = map[string]string{c.file: c.text}, c.container
		list = append(list, fake.Process{PID: pid, Memory: gib})
	}
	gpu := fake.H200(0)
	hold(&gpu, 0, list...)
	library := fake.Install(t, fake.Scenario{GPUs: []fake.GPU{gpu}}).Library
	p := start(t, "--nvml.library="+library, "--docker.host=unix://"+engine(t, nil, nil), "--proc="+procTree(t, tree))
	time.Sleep(4 * time.Second)
	s := p.scrape(t)
	for pid, container := range want {
		s.want(t, gib, "gpu_memory_used_bytes", "process_pid", strconv.Itoa(pid), "container_id", container, "container_name", "", "image_name", "")
	}
	s.want(t, s.sum("gpu_memory_used_bytes"), "gpu_device_memory_used_bytes")
	if list := p.complaints(); len(list) > 0 {
		t.Errorf("complaints:\n%s", strings.Join(list, "\n"))
	}
	p.stop(t)
}
