package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode"

	"gpu-exporter/exporter/view"
	"gpu-exporter/exporter/why"
	"gpu-exporter/nvml/fake"
)

const tracedReplay = "--replay=../../exporter/recording/testdata/h200-traced.ndjson.gz"

// TestWhyReplay: on the recordings of a real H200 nothing is found of containers that are not held back; of one that shares its GPU, the container
// that takes the time; of one that holds memory, that it does nothing with it.
func TestWhyReplay(t *testing.T) {
	for _, args := range [][]string{{"trainer", "--replay=demo"}, {"busy", tracedReplay}, {"hold", tracedReplay}, {"feed", tracedReplay}} {
		if r := ran(t, append([]string{"why"}, args...)...); r.code != 0 || !strings.Contains(r.stdout, "\nNothing holds it back, as far as is known.\n") || r.stderr != "" {
			t.Errorf("%v: %+v", args, r)
		}
	}
	const want = `container llm-server; image team/llm-server:2.3; GPU 0: SM time 6 %, 0.2 CPUs, 12.7GiB; looked at for 80 s
1. Container trainer has 90 % of the SM time of GPU 0, this one 6 %: for 50 s of the last 1 min 20 s, and now since 05:47:10 UTC.
   neighbour_sm: GPU 0 was busy 98 % of that time; it is one of 4 on it
   do: Move one of them to another GPU, or give each its part with MIG.
`
	if r := ran(t, "why", "--replay=demo", "llm-server"); r.code != why.Neighbour.Exit || r.stdout != want || r.stderr != "" {
		t.Errorf("%+v", r)
	}
	if r := ran(t, "why", "--replay=demo", "668"); r.code != why.Idle.Exit || !strings.Contains(r.stdout, "idle: it holds 12.5 GiB") {
		t.Errorf("%+v", r)
	}
	var report why.Report
	j := ran(t, "why", "--replay=demo", "llm-server", "--json")
	if err := json.Unmarshal([]byte(j.stdout), &report); err != nil || j.code != why.Neighbour.Exit || len(report.Findings) != 1 || report.Findings[0].Neighbour.Container != "trainer" {
		t.Errorf("%v: %+v", err, j)
	}
	proc := t.TempDir()
	if err := os.MkdirAll(proc+"/77", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(proc+"/77/cgroup", []byte("0::/docker/a8067bc45d21582aa74c7fd68023764b833ac10b49ce91cce02893825e299118/child\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if r := ran(t, "why", "--replay=demo", "77", "--proc="+proc); r.code != why.Idle.Exit || !strings.HasPrefix(r.stdout, "container notebook; ") {
		t.Errorf("%+v", r)
	}
	ran(t, "why", "--replay=demo", "78", "--proc="+proc).oneLine(t, 2, "78: no running container")
	ran(t, "why", "--replay=demo", "nobody\x1b[2J").oneLine(t, 2, "nobody\ufffd[2J: no running container has this name or id")
}

// TestWhyURL: a running exporter answers, also of a process that it found a moment ago.
func TestWhyURL(t *testing.T) {
	gpu, pid := fake.H200(0), sleeper(t)
	hold(&gpu, 500*mib, fake.Process{PID: pid, Memory: 135 * gib})
	p := start(t, "--nvml.library="+fake.Install(t, fake.Scenario{GPUs: []fake.GPU{gpu}}).Library, "--docker.host=unix://"+filepath.Join(t.TempDir(), "none"), "--nvml.interval=200ms")
	p.until(t, 20*time.Second, "the process", func(s scrape) bool {
		return len(s.find("gpu_memory_used_bytes", "process_pid", strconv.Itoa(pid))) == 1
	})
	url := "--url=http://" + p.address
	r := ran(t, "why", url, strconv.Itoa(pid))
	if r.code != why.Memory.Exit || !strings.Contains(r.stdout, "\n1. The memory of GPU 0 is 97 % full: the next large request fails.\n   memory_full: 135 GiB of 140 GiB are in use; process "+strconv.Itoa(pid)+" sleep holds 135 GiB\n") {
		t.Errorf("%+v", r)
	}
	ran(t, "why", url, "nobody").oneLine(t, 2, "on a GPU this PID; gpu-exporter ps shows who is on a GPU")
	p.stop(t)
	ran(t, "why", url, strconv.Itoa(pid)).oneLine(t, 2, "; why needs one that has run for some minutes")
	ran(t, "why", url, "--replay=demo", "x").oneLine(t, 2, "exclude each other")
	ran(t, "why").oneLine(t, 2, "required argument 'container' not provided; see gpu-exporter why --help")
}

// TestWhyWatches: where no exporter runs this host is watched, and that is said; what is not on a GPU is answered at once.
func TestWhyWatches(t *testing.T) {
	gpu, pid := fake.H200(0), sleeper(t)
	hold(&gpu, 500*mib, fake.Process{PID: pid, Memory: 135 * gib})
	host := append(psHost(t, fake.Scenario{GPUs: []fake.GPU{gpu}})[1:], "--tracer=off")
	r := ran(t, append([]string{"why", strconv.Itoa(pid), "--for=2s"}, host...)...)
	const said = "gpu-exporter: no exporter answers at http://127.0.0.1:9400, so this host is watched for 2s; one that runs knows the last ten minutes\n"
	if r.code != why.Memory.Exit || !strings.Contains(r.stdout, "\n1. The memory of GPU 0 is 97 % full") || r.stderr != said ||
		!strings.Contains(r.stdout, "not known: it has been seen on GPU 0 for less than half a minute") {
		t.Errorf("%+v", r)
	}
	ran(t, append([]string{"why", "nobody", "--for=10m"}, host...)...).oneLine(t, 2, "nobody: no running container has this name or id")
	ran(t, "why", "nobody", "--nvml.library=/none", "--docker.host=unix:///none", "--tracer=off").oneLine(t, 2, "and this host cannot be sampled: no usable libnvidia-ml.so.1: tried /none")
}

// TestWhyHostile: an exporter that lies cannot act on the terminal.
func TestWhyHostile(t *testing.T) {
	const bad = "\x1b[2J\x1b]0;owned\x07\u009b31m\u202e\U000E0001\r\n"
	party := why.Party{Container: bad, ID: bad, Image: bad, Process: bad}
	text, err := json.Marshal(why.Report{Party: party, Uses: []why.Use{{UUID: bad, Memory: view.Bytes{}}}, Blind: []string{bad},
		Findings: []*why.Finding{{Cause: bad, Class: bad, GPU: bad, Text: bad, Evidence: []string{bad}, Advice: bad, Neighbour: &party}}})
	if err != nil {
		t.Fatal(err)
	}
	code := http.StatusOK
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(code)
		w.Write(text)
	}))
	defer server.Close()
	for _, args := range [][]string{{"why", bad}, {"why", bad, "--json"}} {
		for _, code = range []int{200, 400, 404, 500} {
			r := ran(t, append(args, "--url="+server.URL)...)
			if r.stdout+r.stderr == "" || (r.code == 1) != (code == 200) || (r.code == 2) != (code != 200) {
				t.Fatalf("%+v", r)
			}
			for _, c := range r.stdout + r.stderr {
				if c != '\n' && !unicode.IsGraphic(c) {
					t.Fatalf("%v: %U in %q", args, c, r.stdout+r.stderr)
				}
			}
		}
	}
}
