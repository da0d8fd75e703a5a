package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"gpu-exporter/nvml/fake"
)

// TestDaemonReload: systemd and runc as they are. A container may open /dev/nvidiactl, which runc could not tell systemd of; doctor warns of that by
// systemd's own rules, and when `systemctl daemon-reload` has taken the node, it says which container lost it and what to do.
func TestDaemonReload(t *testing.T) {
	dir, train := t.TempDir(), id(7)
	bundle(t, dir, train)
	if out, err := exec.Command("cp", program(t), dir).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	nvml := fake.Install(t, fake.Scenario{GPUs: []fake.GPU{fake.H200(0)}}).Library
	docker := engine(t, []map[string]any{inspected(train, "train")}, func(w http.ResponseWriter, r *http.Request, path string) bool {
		if path == "/info" {
			json.NewEncoder(w).Encode(map[string]any{"ServerVersion": "1", "CgroupDriver": "systemd", "CgroupVersion": "2"})
		}
		return path == "/info"
	})
	// Where this machine has its controllers in version 1, the tracer is told that it has not.
	proc := procTree(t, map[int]map[string]string{})
	if err := os.Mkdir(proc+"/self", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(proc+"/self/cgroup", []byte("0::/\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	h := bootSystemd(t, dir, proc, filepath.Dir(nvml), filepath.Dir(docker))
	h.run("sh", "-c", "cd "+dir+" && runc --systemd-cgroup run -d train </dev/null >/dev/null 2>&1")
	p, flag := &process{address: freeAddress(t)}, "--docker.host=unix://"+docker
	h.run("systemd-run", "--unit=exporter", dir+"/gpu-exporter", "--web.listen-address="+p.address, "--nvml.library="+nvml, "--proc="+proc, flag)
	h.serves(p)

	opened := func(result string) func(scrape) bool {
		return func(s scrape) bool {
			return len(s.find("gpu_device_opens_total", "container_name", "train", "node", "ctl", "result", result)) == 1
		}
	}
	says := func(lines ...string) {
		t.Helper()
		r := ran(t, "doctor", "--url=http://"+p.address, flag, fmt.Sprintf("--driver-root=/proc/%d/root", h.pid))
		for _, line := range append(lines, `warning +cgroup +version 2, Docker's driver systemd, whose rules lack the GPUs of train`) {
			if !regexp.MustCompile(`(?m)^` + line).MatchString(r.stdout) {
				t.Errorf("no %s in\n%s%s", line, r.stdout, r.stderr)
			}
		}
	}
	p.until(t, 10*time.Second, "opens that the device rules allow", opened("enxio")) // no driver is there to answer them
	says(`ok +access`)
	h.run("systemctl", "daemon-reload")
	p.until(t, 10*time.Second, "opens that they do not", opened("eperm"))
	says(`broken +access +container train: /dev/nvidiactl refused, the last time \d+s ago`)
}

// bundle writes what runc needs for a container that opens /dev/nvidiactl again and again.
func bundle(t *testing.T, dir, id string) {
	t.Helper()
	bin := filepath.Join(dir, "rootfs/bin")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sh", "-c", `cp "$(command -v busybox)" rootfs/bin/ && runc spec`)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	file := filepath.Join(dir, "config.json")
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var spec map[string]any
	if err := json.Unmarshal(b, &spec); err != nil {
		t.Fatal(err)
	}
	process, linux := spec["process"].(map[string]any), spec["linux"].(map[string]any)
	process["terminal"] = false
	process["args"] = []string{"/bin/busybox", "sh", "-c", "while :; do /bin/busybox cat /dev/nvidiactl; /bin/busybox sleep 0.1; done"}
	linux["cgroupsPath"] = "system.slice:docker:" + id
	linux["devices"] = []any{map[string]any{"path": "/dev/nvidiactl", "type": "c", "major": 195, "minor": 255, "fileMode": 0o666}}
	linux["resources"] = map[string]any{"devices": []any{map[string]any{"allow": false, "access": "rwm"},
		map[string]any{"allow": true, "type": "c", "major": 195, "minor": 255, "access": "rwm"}}}
	if b, err = json.Marshal(spec); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, b, 0o644); err != nil {
		t.Fatal(err)
	}
}
