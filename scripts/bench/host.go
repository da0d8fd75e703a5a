package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"gpu-exporter/nvml/fake"
)

// size is how large a host is.
type size struct {
	gpus       int
	containers int // that are on a GPU, by turns, with four processes each that have opened the traced device and made eight kinds of calls
	idle       int // that are on none, with four processes each
}

// perContainer are the processes of a container.
const perContainer = 4

func (s size) String() string {
	return fmt.Sprintf("%d GPUs, %d containers on them, %d others", s.gpus, s.containers, s.idle)
}

// host is what stands for one: a driver's library, a Docker engine and real processes in real control groups.
type host struct {
	library string
	flags   []string // for the exporter
	undo    []func()
}

// device is what the processes open in place of NVIDIA's, with the flag that has it traced.
const (
	device     = "/dev/full"
	deviceFlag = "--tracer.devices=1:7=ctl"
)

// newHost makes one below dir. The caller closes it.
func newHost(dir string, s size) (h *host, err error) {
	h = &host{}
	defer func() {
		if err != nil {
			h.close()
		}
	}()
	if h.library, err = fake.BuildTo(dir); err != nil {
		return h, err
	}
	scenario := fake.Scenario{}
	for i := range s.gpus {
		gpu := fake.H200(i)
		gpu.Set("memory", uint64(150754820096), 644939776, uint64(100*fake.GiB))
		gpu.Set("power", 430000)
		gpu.Set("energy", 3_600_000_000, 430000)
		scenario.GPUs = append(scenario.GPUs, gpu)
	}
	c, err := newCrowd(dir)
	if err != nil {
		return h, err
	}
	h.undo = append(h.undo, c.close)
	var engine []map[string]any
	for i := range s.containers + s.idle {
		id := fmt.Sprintf("%08x%056x", 0xabc0000+i, i)
		config := map[string]any{"Runtime": "runc"}
		node, calls := "-", 0
		if i < s.containers {
			config["DeviceRequests"] = []any{map[string]any{"DeviceIDs": []string{fmt.Sprint(i % s.gpus)}, "Capabilities": [][]string{{"gpu"}}}}
			node, calls = device, 8
		}
		pids, err := c.start(id, node, calls)
		if err != nil {
			return h, err
		}
		for k, pid := range pids {
			if i >= s.containers {
				break
			}
			gpu := &scenario.GPUs[i%s.gpus]
			gpu.Processes = append(gpu.Processes, fake.Process{PID: pid, Memory: uint64(64+i%7) << 20})
			if k == 0 {
				gpu.Busy = append(gpu.Busy, fake.Busy{PID: pid, SM: 1, Memory: 1})
			}
		}
		engine = append(engine, map[string]any{"Id": id, "Name": fmt.Sprintf("/job-%d", i), "Image": "sha256:1234", "HostConfig": config,
			"Config": map[string]any{"Image": "registry.example/team/train:2.3"},
			"State":  map[string]any{"Running": true, "Pid": pids[0], "StartedAt": time.Now().Format(time.RFC3339Nano)}})
	}
	if err := scenario.WriteFile(h.library + ".scenario"); err != nil {
		return h, err
	}
	socket := filepath.Join(dir, "docker.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		return h, fmt.Errorf("serving a Docker engine: %w", err)
	}
	server := &http.Server{Handler: dockerEngine(engine)}
	go func() { _ = server.Serve(l) }() // ends with close
	h.undo = append(h.undo, func() { server.Close() })
	h.flags = []string{"--nvml.library=" + h.library, "--docker.host=unix://" + socket, deviceFlag, "--log.level=error", "--metrics.max-series=0"}
	return h, nil
}

func (h *host) close() {
	for i := len(h.undo) - 1; i >= 0; i-- {
		h.undo[i]()
	}
	h.undo = nil
}

// dockerEngine answers as a Docker engine does that has these containers and to which nothing happens.
func dockerEngine(list []map[string]any) http.Handler {
	byID := map[string]map[string]any{}
	short := []map[string]any{}
	for _, c := range list {
		byID[c["Id"].(string)] = c
		short = append(short, map[string]any{"Id": c["Id"], "Names": []any{c["Name"]}, "Image": "image", "State": "running"})
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		path := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
		if strings.HasPrefix(path[0], "v1.") {
			path = path[1:]
		}
		switch {
		case path[0] == "_ping":
			w.Header().Set("Api-Version", "1.47")
		case path[0] == "events":
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		case len(path) == 2 && path[1] == "json":
			_ = json.NewEncoder(w).Encode(short) // who asked is gone
		case len(path) == 3 && byID[path[1]] != nil:
			_ = json.NewEncoder(w).Encode(byID[path[1]])
		default:
			http.Error(w, `{"message":"no such container"}`, http.StatusNotFound)
		}
	})
}

// crowd are processes in control groups.
type crowd struct {
	cmd    *exec.Cmd
	in     io.WriteCloser
	out    *bufio.Reader
	root   string // of the hierarchy
	groups []string
}

func newCrowd(dir string) (*crowd, error) {
	program := filepath.Join(dir, "crowd")
	if out, err := exec.Command("gcc", "-O1", "-static", "-o", program, "scripts/crowd.c").CombinedOutput(); err != nil {
		return nil, fmt.Errorf("building crowd: gcc: %w\n%s", err, out)
	}
	c := &crowd{cmd: exec.Command(program), root: "/sys/fs/cgroup"}
	// Version 1: the controller that tells the tracer groups apart, as the kernel lists them.
	if _, err := os.Stat(c.root + "/cgroup.controllers"); err != nil {
		for _, controller := range []string{"cpuset", "cpu", "cpuacct", "blkio", "memory", "devices", "freezer"} {
			if _, err := os.Stat(filepath.Join(c.root, controller, "cgroup.procs")); err == nil {
				c.root = filepath.Join(c.root, controller)
				break
			}
		}
	}
	var err error
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	c.out, c.cmd.Stderr = bufio.NewReader(out), os.Stderr
	if err := c.cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting crowd: %w", err)
	}
	return c, nil
}

// start starts the processes of a container.
func (c *crowd) start(id, node string, calls int) ([]int, error) {
	group := filepath.Join(c.root, "docker-"+id+".scope")
	if err := os.Mkdir(group, 0o755); err != nil {
		return nil, fmt.Errorf("making a control group: %w", err)
	}
	c.groups = append(c.groups, group)
	for _, file := range []string{"cpuset.cpus", "cpuset.mems"} { // a cpuset of version 1 takes no process before these are set
		if value, err := os.ReadFile(filepath.Join(c.root, file)); err == nil {
			if err := os.WriteFile(filepath.Join(group, file), value, 0o644); err != nil {
				return nil, fmt.Errorf("making a control group: %w", err)
			}
		}
	}
	if _, err := fmt.Fprintln(c.in, group, perContainer, node, calls); err != nil {
		return nil, fmt.Errorf("starting processes: %w", err)
	}
	pids := make([]int, perContainer)
	for i := range pids {
		if _, err := fmt.Fscan(c.out, &pids[i]); err != nil {
			return nil, fmt.Errorf("starting processes: %w", err)
		}
	}
	return pids, nil
}

// close ends the processes and takes their groups away.
func (c *crowd) close() {
	c.in.Close()
	_ = c.cmd.Wait() // it ends with its input
	for _, group := range c.groups {
		for range 200 {
			if os.Remove(group) == nil {
				break
			}
			time.Sleep(10 * time.Millisecond) // its processes are ending
		}
	}
}
