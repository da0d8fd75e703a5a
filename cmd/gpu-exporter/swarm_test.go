package main

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"gpu-exporter/exporter/assets"
)

// TestStack: as a service of a real swarm the exporter runs on the nodes with the label, sees the host's processes and containers, comes back when its
// container is killed, and goes with the service.
func TestStack(t *testing.T) {
	d, _ := withImage(t)
	dir := t.TempDir()
	if err := assets.Export(dir, false); err != nil {
		t.Fatal(err)
	}
	client, err := exec.LookPath("docker")
	if err != nil {
		t.Fatal(err)
	}
	build := filepath.Join(dir, "client")
	if err := os.Mkdir(build, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(build+"/Dockerfile", []byte("FROM busybox\nCOPY docker /bin/docker\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("cp", "-L", client, build+"/docker").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	d.Docker(t, "build", "-q", "-t", "client", build)
	free := func() string {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		return l.Addr().String()
	}
	d.Docker(t, "swarm", "init", "--listen-addr", free(), "--advertise-addr", "127.0.0.1")
	defer func() { // its bridge would outlive the engine
		d.Command("swarm", "leave", "--force")
		d.Command("network", "rm", "docker_gwbridge")
	}()
	job := d.Run(t, "--name", "job", "--gpus", `"device=0"`, "busybox")
	p := &process{address: free(), exited: make(chan struct{})}
	deploy := exec.Command("docker", "stack", "deploy", "--resolve-image=never", "--detach=true", "-c", dir+"/install/stack.yaml", "gpu")
	deploy.Env = append(os.Environ(), "DOCKER_HOST="+d.Host, "DOCKER_SOCKET="+d.Socket, "GPU_EXPORTER_ADDRESS="+p.address, "DOCKER_CLI_IMAGE=client")
	if out, err := deploy.CombinedOutput(); err != nil {
		t.Fatalf("docker stack deploy: %v\n%s", err, out)
	}
	defer func() {
		if t.Failed() {
			out, _ := d.Command("service", "ps", "--no-trunc", "gpu_gpu-exporter")
			t.Log(out)
		}
	}()
	exporter := func(old string) string {
		t.Helper()
		for range 300 {
			if out, err := d.Command("ps", "-q", "--no-trunc", "--filter", "name=^gpu-exporter$"); err == nil && out != "" && out != old {
				return out
			}
			time.Sleep(100 * time.Millisecond)
		}
		t.Fatal("the container of the exporter does not run")
		return ""
	}
	if out := d.Docker(t, "ps", "-q", "--filter", "name=gpu_gpu-exporter"); out != "" {
		t.Errorf("a node without the label runs it: %s", out)
	}
	d.Docker(t, "node", "update", "--label-add", "gpu=true", d.Docker(t, "node", "ls", "-q"))
	first := exporter("")
	seen := func() {
		t.Helper()
		(&systemdHost{T: t}).serves(p)
		s := p.until(t, 10*time.Second, "the container that asks for a GPU", func(s scrape) bool {
			return len(s.find("gpu_container_info", "container_id", job[:12], "container_name", "job")) == 1
		})
		s.want(t, 1, "gpu_exporter_process_visibility", "reason", "ok")
	}
	seen()
	d.Docker(t, "kill", "gpu-exporter")
	exporter(first)
	seen()
	d.Docker(t, "stack", "rm", "gpu")
	for i := 0; d.Docker(t, "ps", "-q", "--filter", "name=gpu") != ""; i++ {
		if i == 200 {
			t.Fatal("the exporter outlives its service")
		}
		time.Sleep(100 * time.Millisecond)
	}
}
