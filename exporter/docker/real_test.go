package docker

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/docker/dockertest"
)

// TestEngine follows a real daemon through everything that happens to containers and to the daemon itself.
func TestEngine(t *testing.T) {
	d := dockertest.Start(t)
	s := watch(t, Config{Host: d.Host})
	s.wait(t, 5*time.Second, "connected", up)

	t.Run("look", func(t *testing.T) {
		i := Look(t.Context(), Config{Host: d.Host})
		if want := d.Docker(t, "info", "-f", "{{.ServerVersion}} {{.CgroupDriver}} {{.CgroupVersion}}"); want != i.Version+" "+i.CgroupDriver+" "+i.CgroupVersion || i.API == "" || i.Reason != "" {
			t.Errorf("%+v, Docker says %s", i, want)
		}
		if !slices.Contains(i.Runtimes, "nvidia") || !slices.Contains(i.Runtimes, "runc") {
			t.Errorf("runtimes %q", i.Runtimes)
		}
		none := filepath.Join(t.TempDir(), "none")
		if i := Look(t.Context(), Config{Host: none}); i.Reason != "no Docker here: "+none+" does not exist" {
			t.Errorf("%+v", i)
		}
		if i := Look(t.Context(), Config{Host: "unix://" + t.TempDir()}); !strings.Contains(i.Reason, "is not a socket") {
			t.Errorf("%+v", i)
		}
	})
	t.Run("look at one that hangs", func(t *testing.T) {
		d.Pause()
		defer d.Resume()
		begin := time.Now()
		if i := Look(t.Context(), Config{Host: d.Host, Timeout: 300 * time.Millisecond}); !strings.Contains(i.Reason, "does not answer in time") || time.Since(begin) > 2*time.Second {
			t.Errorf("after %v: %+v", time.Since(begin), i)
		}
	})
	t.Run("start and die", func(t *testing.T) {
		id := d.Run(t, "--name", "one", "--label", "com.docker.compose.project=shop", "--label", "com.docker.compose.service=web",
			"--label", "io.kubernetes.pod.name=pod-1", "--label", "io.kubernetes.pod.namespace=prod", "-e", "SECRET=hunter2", "busybox")
		c := s.wait(t, 2*time.Second, "started", has("one")).list["one"]
		if c.ID != id || c.Image != "busybox" || !strings.HasPrefix(c.ImageID, "sha256:") || c.Runtime != "runc" ||
			c.Project != "shop" || c.Service != "web" || c.Pod != "pod-1" || c.Namespace != "prod" || c.Requests != nil {
			t.Errorf("container %+v", c)
		}
		if want := d.Docker(t, "inspect", "-f", "{{.State.Pid}}", "one"); fmt.Sprint(c.PID) != want {
			t.Errorf("pid %d, Docker says %s", c.PID, want)
		}
		if c.Nodes == nil || len(c.Nodes) != 0 {
			t.Errorf("nodes %#v, want none, but known", c.Nodes)
		}
		if time.Since(c.Started) > time.Minute {
			t.Errorf("started %v", c.Started)
		}
		began := time.Now()
		d.Docker(t, "kill", "one")
		s.wait(t, time.Second, "gone", hasNot("one"))
		t.Logf("gone %v after the docker kill command began", time.Since(began))
		d.Docker(t, "start", "one")
		again := s.wait(t, 2*time.Second, "started again", has("one")).list["one"]
		if again.ID != id || again.PID == c.PID || !again.Started.After(c.Started) {
			t.Errorf("started again: %+v, before: %+v", again, c)
		}
		d.Docker(t, "restart", "one")
		s.wait(t, 2*time.Second, "restarted", func(st state) bool {
			c, ok := st.list["one"]
			return ok && c.PID != again.PID
		})
	})
	t.Run("rename", func(t *testing.T) {
		d.Docker(t, "rm", "-f", "one")
		s.wait(t, time.Second, "removed", hasNot("one"))
		d.Run(t, "--name", "one", "busybox")
		s.wait(t, time.Second, "started", has("one"))
		d.Docker(t, "rename", "one", "uno")
		st := s.wait(t, time.Second, "renamed", has("uno"))
		if _, ok := st.list["one"]; ok {
			t.Error("the old name is still there")
		}
	})
	t.Run("pause", func(t *testing.T) {
		d.Docker(t, "pause", "uno")
		time.Sleep(100 * time.Millisecond)
		s.wait(t, time.Second, "a paused container is a running one", has("uno"))
		d.Docker(t, "unpause", "uno")
		d.Docker(t, "update", "--restart", "always", "uno")
		s.wait(t, time.Second, "there after an update", has("uno"))
		d.Docker(t, "update", "--restart", "no", "uno")
	})
	t.Run("same name, another container", func(t *testing.T) {
		before := s.wait(t, time.Second, "there", has("uno")).list["uno"].ID
		d.Docker(t, "rm", "-f", "uno")
		s.wait(t, time.Second, "removed", hasNot("uno"))
		d.Run(t, "--name", "uno", "busybox")
		if s.wait(t, time.Second, "there again", has("uno")).list["uno"].ID == before {
			t.Error("same id")
		}
	})
	t.Run("first process killed from outside", func(t *testing.T) {
		c := s.wait(t, time.Second, "there", has("uno")).list["uno"]
		if err := syscall.Kill(c.PID, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		s.wait(t, 2*time.Second, "gone", hasNot("uno"))
	})
	t.Run("restart of the daemon", func(t *testing.T) {
		d.Run(t, "--name", "comes-back", "--restart", "always", "busybox")
		d.Run(t, "--name", "stays-away", "busybox")
		s.wait(t, 2*time.Second, "both", has("comes-back", "stays-away"))
		d.Stop()
		s.wait(t, 2*time.Second, "down", func(st state) bool { return !st.source.Up && st.source.Reason != "" })
		s.wait(t, 2*time.Second, "no containers while it is down", hasNot("comes-back"))
		d.Restart(t)
		st := s.wait(t, 3*time.Second, "up again", func(st state) bool { return up(st) && has("comes-back")(st) })
		if _, ok := st.list["stays-away"]; ok {
			t.Error("a container that ended is listed")
		}
		total := uint64(0)
		for _, n := range st.source.Restarts {
			total += n
		}
		if total != 1 {
			t.Errorf("reconnects %v, want one", st.source.Restarts)
		}
	})
	t.Run("kill -9 of the daemon", func(t *testing.T) {
		pid := s.wait(t, time.Second, "there", has("comes-back")).list["comes-back"].PID
		d.Kill()
		s.wait(t, 2*time.Second, "down", down("nobody listens"))
		s.wait(t, time.Second, "the container goes on, so does its name", has("comes-back"))
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		s.wait(t, 2*time.Second, "ended while Docker is down", hasNot("comes-back"))
		d.Restart(t)
		s.wait(t, 3*time.Second, "up again", func(st state) bool { return up(st) && has("comes-back")(st) })
	})
	t.Run("frozen daemon", func(t *testing.T) {
		// A watcher of its own, with less patience.
		s := watch(t, Config{Host: d.Host, Timeout: 500 * time.Millisecond, Ping: 200 * time.Millisecond})
		s.wait(t, 5*time.Second, "connected", up)
		d.Pause()
		s.wait(t, 5*time.Second, "noticed", down("does not answer in time"))
		d.Resume()
		s.wait(t, 10*time.Second, "up again", up)
	})
	t.Run("socket removed", func(t *testing.T) {
		moved := d.Socket + ".moved"
		if err := os.Rename(d.Socket, moved); err != nil {
			t.Fatal(err)
		}
		s.wait(t, 3*time.Second, "noticed", down("does not exist"))
		s.wait(t, time.Second, "the container goes on", has("comes-back"))
		if err := os.Rename(moved, d.Socket); err != nil {
			t.Fatal(err)
		}
		s.wait(t, 4*time.Second, "up again", up)
	})
	if n := s.lines("level=WARN"); n > 8 {
		t.Errorf("%d warnings, want one per change:\n%s", n, s.logged())
	}
	if strings.Contains(s.logged(), "hunter2") {
		t.Error("an environment variable was logged")
	}
}

// TestGivingGPUs starts a real container for every way of giving a GPU that this engine can express, and sees what it resolves to.
func TestGivingGPUs(t *testing.T) {
	d := dockertest.Start(t)
	node := filepath.Join(d.Dir, "nvidia0") // minor 0, made elsewhere: the host's /dev stays as it is
	node5 := filepath.Join(d.Dir, "nvidia5")
	for path, minor := range map[string]uint32{node: 0, node5: 5} {
		if err := unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(nvidiaMajor, minor))); err != nil {
			t.Fatalf("mknod %s: %v", path, err)
		}
	}
	gpus := []containers.GPU{
		{UUID: "GPU-8e000000-0000-0000-0000-000000000000", Index: 0, Minor: 5, PCIBusID: "0000:0a:00.0"},
		{UUID: "GPU-9f000000-0000-0000-0000-000000000000", Index: 1, Minor: 0, PCIBusID: "0000:0b:00.0",
			MIG: []containers.MIG{{UUID: "MIG-11111111-2222-3333-4444-555555555555", Index: 0, GI: 3, CI: 0}}},
	}
	a, b := gpus[0].UUID, gpus[1].UUID
	give5, give0 := []string{"--device", node5 + ":/dev/nvidia5"}, []string{"--device", node + ":/dev/nvidia0"}
	join := func(lists ...[]string) (all []string) {
		for _, l := range lists {
			all = append(all, l...)
		}
		return all
	}
	tests := []struct {
		name       string
		args       []string
		text       string
		nodes      []int
		want       []containers.Assignment
		privileged bool // has whatever nodes the host has, too
	}{
		{name: "none", nodes: []int{}},
		{name: "all", args: join([]string{"--gpus", "all"}, give0, give5), text: "all;node:" + node + "," + node5, nodes: []int{0, 5},
			want: []containers.Assignment{{UUID: a, Source: "device_requests"}, {UUID: b, Source: "device_requests"}}},
		{name: "all-but-one-node", args: join([]string{"--gpus", "all"}, give5), text: "all;node:" + node5, nodes: []int{5},
			want: []containers.Assignment{{UUID: a, Source: "device_requests"}}},
		{name: "count", args: []string{"--gpus", "2"}, text: "count=2", nodes: []int{},
			want: []containers.Assignment{{UUID: a, Source: "device_requests"}, {UUID: b, Source: "device_requests"}}},
		{name: "count-1", args: []string{"--gpus", "1"}, text: "count=1", nodes: []int{},
			want: []containers.Assignment{{UUID: a, Source: "device_requests"}}},
		{name: "index", args: []string{"--gpus", "device=1"}, text: "device=1", nodes: []int{},
			want: []containers.Assignment{{UUID: b, Source: "device_requests"}}},
		{name: "indexes", args: []string{"--gpus", `"device=0,1"`}, text: "device=0,1", nodes: []int{},
			want: []containers.Assignment{{UUID: a, Source: "device_requests"}, {UUID: b, Source: "device_requests"}}},
		{name: "uuid", args: []string{"--gpus", "device=" + b}, text: "device=" + b, nodes: []int{},
			want: []containers.Assignment{{UUID: b, Source: "device_requests"}}},
		{name: "uuid-prefix", args: []string{"--gpus", "device=GPU-9f"}, text: "device=GPU-9f", nodes: []int{},
			want: []containers.Assignment{{UUID: b, Source: "device_requests"}}},
		{name: "mig-uuid", args: []string{"--gpus", "device=" + gpus[1].MIG[0].UUID}, text: "device=" + gpus[1].MIG[0].UUID, nodes: []int{},
			want: []containers.Assignment{{UUID: b, MIG: gpus[1].MIG[0].UUID, Source: "device_requests"}}},
		{name: "mig-index", args: []string{"--gpus", "device=1:0"}, text: "device=1:0", nodes: []int{},
			want: []containers.Assignment{{UUID: b, MIG: gpus[1].MIG[0].UUID, Source: "device_requests"}}},
		{name: "env", args: []string{"--runtime", "nvidia", "-e", "NVIDIA_VISIBLE_DEVICES=1"}, text: "env:1", nodes: []int{},
			want: []containers.Assignment{{UUID: b, Source: "env"}}},
		{name: "env-all", args: join([]string{"--runtime", "nvidia", "-e", "NVIDIA_VISIBLE_DEVICES=all"}, give0), text: "env:all;node:" + node,
			nodes: []int{0}, want: []containers.Assignment{{UUID: b, Source: "env"}}},
		{name: "env-cdi", args: []string{"--runtime", "nvidia", "-e", "NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=0"}, text: "env:nvidia.com/gpu=0",
			nodes: []int{}, want: []containers.Assignment{{UUID: a, Source: "env"}}},
		{name: "env-void", args: []string{"--runtime", "nvidia", "-e", "NVIDIA_VISIBLE_DEVICES=void"}, nodes: []int{}},
		{name: "env-without-runtime", args: []string{"-e", "NVIDIA_VISIBLE_DEVICES=all"}, nodes: []int{}},
		{name: "gpus-over-env", args: []string{"--runtime", "nvidia", "-e", "NVIDIA_VISIBLE_DEVICES=all", "--gpus", "device=1"}, text: "device=1",
			nodes: []int{}, want: []containers.Assignment{{UUID: b, Source: "device_requests"}}},
		{name: "device", args: give0, text: "node:" + node, nodes: []int{0}, want: []containers.Assignment{{UUID: b, Source: "device_node"}}},
		{name: "privileged", args: join([]string{"--privileged"}, give5), text: "node:" + node5 + ";privileged", privileged: true},
	}
	s := watch(t, Config{Host: d.Host})
	s.wait(t, 5*time.Second, "connected", up)
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d.Run(t, append(append([]string{"--name", tt.name}, tt.args...), "busybox")...)
			c := s.wait(t, 2*time.Second, "started", has(tt.name)).list[tt.name]
			if c.RequestText() != tt.text {
				t.Errorf("request %q, want %q", c.RequestText(), tt.text)
			}
			if tt.privileged {
				if !slices.Contains(c.Nodes, 5) {
					t.Errorf("nodes %v, without 5", c.Nodes)
				}
				if got := containers.Resolve(c, gpus); len(got) == 0 || got[0] != (containers.Assignment{UUID: a, Source: "device_node"}) {
					t.Errorf("assigned %v", got)
				}
				return
			}
			if !reflect.DeepEqual(c.Nodes, tt.nodes) {
				t.Errorf("nodes %#v, want %#v", c.Nodes, tt.nodes)
			}
			if got := containers.Resolve(c, gpus); !reflect.DeepEqual(got, tt.want) {
				t.Errorf("assigned %v, want %v", got, tt.want)
			}
		})
	}
}

// TestChurn starts and removes many containers and sees that nothing of them is left. (TestTracer of cmd/gpu-exporter does so with 200 and all sources.)
func TestChurn(t *testing.T) {
	d := dockertest.Start(t)
	s := watch(t, Config{Host: d.Host})
	s.wait(t, 5*time.Second, "connected", up)
	d.Run(t, "--name", "stays", "busybox")
	const total, parallel = 60, 4
	var wg sync.WaitGroup
	next := make(chan int)
	began := time.Now()
	for range parallel {
		wg.Go(func() {
			for i := range next {
				if _, err := d.Command("run", "--rm", "--name", fmt.Sprint("c", i), "busybox", "true"); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for i := range total {
		next <- i
	}
	close(next)
	wg.Wait()
	t.Logf("%d containers in %v", total, time.Since(began))
	s.wait(t, 2*time.Second, "only the one that stays", func(st state) bool { return len(st.list) == 1 && has("stays")(st) })
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range total {
		if name := fmt.Sprint("c", i); !s.seen[name] {
			t.Errorf("container %s was never seen", name)
		}
	}
}
