package main

import (
	"bytes"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode"

	"gpu-exporter/exporter/history"
	"gpu-exporter/exporter/view"
	"gpu-exporter/nvml/fake"
)

// result is how a command ended.
type result struct {
	code           int
	stdout, stderr string
}

// ran runs the program to its end.
func ran(t *testing.T, args ...string) result {
	t.Helper()
	var out, errs bytes.Buffer
	cmd := exec.Command(program(t), args...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return result{cmd.ProcessState.ExitCode(), out.String(), errs.String()}
}

// oneLine fails unless the command failed with the code and one line that has the text.
func (r result) oneLine(t *testing.T, code int, text string) {
	t.Helper()
	if r.code != code || r.stdout != "" || strings.Count(r.stderr, "\n") != 1 || !strings.Contains(r.stderr, text) {
		t.Errorf("%+v, want code %d and one line with %q", r, code, text)
	}
}

// TestPsReplay: a recording is shown at its busiest moment, the same each time.
func TestPsReplay(t *testing.T) {
	const want = `GPU  NAME         UTIL  MAX            MEMORY   MEM%       POWER  TEMP  LIMITED BY    UUID
  0  NVIDIA H200   98%  99%  29.6GiB / 140GiB  21.1%  663 / 700W   62C  sw_power_cap  GPU-eb896ada-3489-2700-9f63-edaa9adbb28a

GPU  CONTAINER       CONTAINER ID  IMAGE                PID  UTIL  MAX   MEMORY     PEAK    ALLOC   TO GPU  FROM GPU  MEM%  AGE  COMMAND
  0  trainer         ee1420ca9d9b  team/trainer:1.4     912   99%  99%  3.11GiB  3.11GiB  2.51GiB  3.78GiB        0B  2.2%  63s  /opt/torch/.venv/bin/python3 /w/train.py
  0  llm-server      6927e35e1ca1  team/llm-server:2.3  763    0%  20%  12.7GiB  12.7GiB  12.1GiB  5.02GiB   5.01GiB  9.1%  75s  /opt/torch/.venv/bin/python3 /w/serve.py
  0  notebook        a8067bc45d21  team/notebook:7      668    0%   0%  12.5GiB  12.5GiB  12.0GiB       0B        0B  8.9%  75s  /opt/torch/.venv/bin/python3 /w/notebook.py
  0  (host)          -             -                    803    0%   0%  1.19GiB  1.19GiB   700MiB       0B        0B  0.8%    -  python3 /tmp/convert.py
  0  (unattributed)  -             -                      -     -    -  25.6MiB        -        -        -         -  0.0%    -  -
`
	if r := ran(t, "ps", "--replay=demo"); r.code != 0 || r.stdout != want || r.stderr != "" {
		t.Errorf("%+v", r)
	}
	if r := ran(t, "--replay=demo", "ps", "--sort=mem", "--filter=NOTEBOOK"); r.code != 0 || strings.Count(r.stdout, "\n") != 5 || !strings.Contains(r.stdout, "a8067bc45d21") {
		t.Errorf("%+v", r)
	}
	traced := regexp.MustCompile(`(?m)^ +0 +feed +3f9b86d640ec +empty +2154 +0% +0% +1\.11GiB +1\.11GiB +610MiB +[0-9.]+GiB +[0-9]+B +0\.8% .*/w/job\.py$`)
	if r := ran(t, "ps", "--replay=../../exporter/recording/testdata/h200-traced.ndjson.gz"); r.code != 0 || !traced.MatchString(r.stdout) || !strings.Contains(r.stdout, "FROM GPU") {
		t.Errorf("%+v", r)
	}
	if r := ran(t, "ps", "--replay=demo", "--filter=no-such"); r.code != 1 || r.stderr != "" {
		t.Errorf("%+v", r)
	}
}

// TestPsURL: ps shows what a running exporter has; its JSON is the exporter's, and adds up.
func TestPsURL(t *testing.T) {
	p := start(t, "--replay=demo")
	p.until(t, 30*time.Second, "a process", func(s scrape) bool { return len(s.find("gpu_memory_used_bytes", "container_name", "notebook")) == 1 })
	url := "--url=http://" + p.address
	if r := ran(t, "ps", url); r.code != 0 || !regexp.MustCompile(`(?m)^ +0 +notebook +a8067bc45d21 +team/notebook:7 +668 .*/w/notebook\.py$`).MatchString(r.stdout) ||
		r.stderr != "gpu-exporter: this is a recording, not a host\n" {
		t.Errorf("%+v", r)
	}
	r := ran(t, "ps", "--json", url)
	var v view.Snapshot
	if err := json.Unmarshal([]byte(r.stdout), &v); err != nil || r.code != 0 {
		t.Fatalf("%v: %+v", err, r)
	}
	var sum uint64
	for _, w := range v.Workloads {
		sum += w.Memory.V
	}
	if len(v.Devices) != 1 || sum == 0 || sum != v.Devices[0].MemoryUsed.V {
		t.Errorf("the workloads hold %d: %s", sum, r.stdout)
	}
	for until := time.Now().Add(5 * time.Second); ; time.Sleep(100 * time.Millisecond) { // the history looks twice in a second
		var h history.View
		err := json.Unmarshal([]byte(p.get(t, "/api/v1/history?points=60")), &h)
		if err == nil && len(h.Devices) == 1 && len(h.Devices[0].Power) == 60 && len(h.Containers) == 2 && h.Containers[1].Name == "notebook" && h.Containers[1].Memory[59] > 4e9 {
			break
		}
		if time.Now().After(until) {
			t.Fatalf("history: %v %+v", err, h)
		}
	}
	for _, points := range []string{"0", "601", "x", "-1"} {
		answer, err := http.Get("http://" + p.address + "/api/v1/history?points=" + points)
		if err != nil {
			t.Fatal(err)
		}
		answer.Body.Close()
		if answer.StatusCode != http.StatusBadRequest {
			t.Errorf("points=%s: %s", points, answer.Status)
		}
	}
	p.stop(t)
}

// TestPsFails: no exporter, something else in its place, and wrong flags are one line and exit code 2.
func TestPsFails(t *testing.T) {
	var body string
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if body == "" {
			http.NotFound(w, r)
		}
		w.Write([]byte(body))
	}))
	defer other.Close()
	ran(t, "ps", "--url="+other.URL).oneLine(t, 2, "404 Not Found")
	body = "<html>\x1b[2J"
	ran(t, "ps", "--url="+other.URL).oneLine(t, 2, "it is no gpu-exporter")
	ran(t, "ps", "--url=http://127.0.0.1:1").oneLine(t, 2, "no exporter answers at http://127.0.0.1:1")
	ran(t, "ps", "--url=nonsense").oneLine(t, 2, "not of the form")
	ran(t, "ps", "--url="+other.URL, "--replay=demo").oneLine(t, 2, "exclude each other")
	ran(t, "ps", "--url.ca-file=/no/such").oneLine(t, 2, "no such file")
	ran(t, "ps", "--sort=size").oneLine(t, 2, "--sort must be one of gpu, util, max, mem")
	none := filepath.Join(t.TempDir(), "none")
	ran(t, "ps", "--nvml.library="+none, "--docker.host=unix://"+none).oneLine(t, 2, "; gpu-exporter doctor says what to do")
}

// TestPsIdle: GPUs on which nothing runs are exit code 1, and the table is there.
func TestPsIdle(t *testing.T) {
	r := ran(t, psHost(t, fake.Scenario{GPUs: []fake.GPU{fake.H200(0)}})...)
	if r.code != 1 || !strings.Contains(r.stdout, "NVIDIA H200") {
		t.Errorf("%+v", r)
	}
}

// TestPsSamples: without an exporter ps samples the host itself.
func TestPsSamples(t *testing.T) {
	gpu, pid := fake.H200(0), sleeper(t)
	hold(&gpu, 500*mib, fake.Process{PID: pid, Memory: 2 * gib})
	gpu.Busy = []fake.Busy{{PID: pid, SM: 80, Memory: 30}}
	r := ran(t, psHost(t, fake.Scenario{GPUs: []fake.GPU{gpu}})...)
	if r.code != 0 || !regexp.MustCompile(fmt.Sprintf(`(?m)^ +0 +\(host\) +- +- +%d +80%% +80%% +2\.00GiB +1\.4%% +- +sleep 600$`, pid)).MatchString(r.stdout) {
		t.Errorf("%+v", r)
	}
	if !strings.HasPrefix(r.stderr, "gpu-exporter: docker is down: ") || strings.Count(r.stderr, "\n") != 1 {
		t.Errorf("stderr: %q", r.stderr)
	}
}

// TestPsBlind: an exporter that answers but cannot see the GPUs is not one on whose GPUs nothing runs.
func TestPsBlind(t *testing.T) {
	p := start(t, "--nvml.library="+filepath.Join(t.TempDir(), "none.so"), "--docker.host=unix://"+filepath.Join(t.TempDir(), "none"), "--tracer=off")
	p.until(t, 10*time.Second, "NVML is down", func(s scrape) bool { return s.has(0, "gpu_exporter_nvml_up") })
	if r := ran(t, "ps", "--url=http://"+p.address); r.code != 2 || !strings.Contains(r.stderr, "nvml is down: ") {
		t.Errorf("%+v", r)
	}
}

// psHost returns the arguments of a ps that samples a simulated host without Docker.
func psHost(t *testing.T, s fake.Scenario) []string {
	t.Helper()
	return []string{"ps", "--nvml.library=" + fake.Install(t, s).Library, "--docker.host=unix://" + filepath.Join(t.TempDir(), "none"), "--nvml.interval=200ms"}
}

// TestPsAuth: TLS and basic auth. The password is in the address, or better in the environment; it is never repeated.
func TestPsAuth(t *testing.T) {
	borrowed := httptest.NewTLSServer(nil) // for its certificate of 127.0.0.1
	defer borrowed.Close()
	key, err := x509.MarshalPKCS8PrivateKey(borrowed.TLS.Certificates[0].PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write := func(name string, text []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	authority := write("cert.pem", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: borrowed.Certificate().Raw}))
	write("key.pem", pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key}))
	server := write("web.yml", []byte("tls_server_config:\n  cert_file: cert.pem\n  key_file: key.pem\n"+
		"basic_auth_users:\n  user: $2a$04$Njl2obcqtcFxfocY9Sr4dOukQMbrTNivD3gXi2GpStdsXrWwWVG5e\n"))
	p := start(t, "--replay=demo", "--web.config.file="+server)
	ran(t, "ps", "--url=https://"+p.address).oneLine(t, 2, "certificate signed by unknown authority")
	ca := "--url.ca-file=" + authority
	ran(t, "ps", "--url=https://"+p.address, ca).oneLine(t, 2, "401 Unauthorized")
	ran(t, "ps", "--url=https://user:secret@"+p.address, ca).oneLine(t, 2, "user:xxxxx@")
	ran(t, "ps", "--url.ca-file="+server).oneLine(t, 2, "has no certificate")
	t.Setenv("GPU_EXPORTER_URL", "https://user:pass@"+p.address)
	for until := time.Now().Add(20 * time.Second); ; time.Sleep(200 * time.Millisecond) {
		r := ran(t, "ps", ca)
		if r.code == 0 && strings.Contains(r.stdout, "notebook") {
			break
		}
		if r.code == 2 || time.Now().After(until) {
			t.Fatalf("%+v", r)
		}
	}
	p.stop(t)
	ran(t, "ps", ca).oneLine(t, 2, "no exporter answers") // and this host is not sampled in its place
}

// TestPsHostile: an exporter that lies cannot act on the terminal, neither by the table nor by JSON.
func TestPsHostile(t *testing.T) {
	const bad = "\x1b[2J\x1b]0;owned\x07\u009b31m\u202e\U000E0001\r\n"
	text, err := json.Marshal(view.Snapshot{Sources: []view.Source{{Name: bad, Reason: bad}}, Devices: []view.Device{{UUID: bad, State: bad, Name: bad, Reason: bad}},
		Workloads: []view.Workload{{PID: 1, ContainerID: bad, ContainerName: bad, Image: bad, Command: bad, GPUUUID: bad, ProcessName: bad}}})
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.Write(text) }))
	defer server.Close()
	for _, args := range [][]string{{"ps"}, {"ps", "--json"}} {
		r := ran(t, append(args, "--url="+server.URL)...)
		if r.code != 0 || r.stdout == "" {
			t.Fatalf("%+v", r)
		}
		for _, c := range r.stdout + r.stderr {
			if c != '\n' && !unicode.IsGraphic(c) {
				t.Fatalf("%v: %U in %q", args, c, r.stdout+r.stderr)
			}
		}
		if len(args) > 1 {
			var back view.Snapshot
			if err := json.Unmarshal([]byte(r.stdout), &back); err != nil || back.Workloads[0].ContainerName != bad {
				t.Errorf("the JSON says %q, %v", back.Workloads[0].ContainerName, err)
			}
		}
	}
}
