package main

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// on measures the exporter on a host of a size.
func on(exporter string, s size, warm, seconds int) (r result, err error) {
	dir, err := os.MkdirTemp("", "bench")
	if err != nil {
		return r, err
	}
	defer os.RemoveAll(dir)
	h, err := newHost(dir, s)
	if err != nil {
		return r, err
	}
	defer h.close()
	return serve(exporter, h.flags, warm, seconds)
}

// serve measures the exporter with some flags.
func serve(exporter string, flags []string, warm, seconds int) (result, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return result{}, err
	}
	address := l.Addr().String()
	l.Close()
	cmd := exec.Command(exporter, append(flags, "--web.listen-address="+address)...)
	cmd.Stderr = os.Stderr
	return measure(cmd, "http://"+address+"/metrics", warm, seconds)
}

// floor measures the C program that makes the same NVML calls on the same library.
func floor(warm, seconds int) (r result, err error) {
	dir, err := os.MkdirTemp("", "bench")
	if err != nil {
		return r, err
	}
	defer os.RemoveAll(dir)
	program := filepath.Join(dir, "floor")
	if out, err := exec.Command("gcc", "-O2", "-I", "nvml/fake/src", "-o", program, "scripts/floor.c", "-ldl").CombinedOutput(); err != nil {
		return r, fmt.Errorf("building floor: gcc: %w\n%s", err, out)
	}
	h, err := newHost(dir, size{gpus: 1, containers: 3})
	if err != nil {
		return r, err
	}
	defer h.close()
	cmd := exec.Command(program)
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+filepath.Dir(h.library))
	return measure(cmd, "", warm, seconds)
}

// machine says where the figures are from.
func machine(exporter string) string {
	version, _ := exec.Command(exporter, "--version").CombinedOutput() // "" says as much
	first, _, _ := strings.Cut(string(version), " (")
	var model string
	info, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(info)) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "model name" {
			model = strings.TrimSpace(v)
			break
		}
	}
	release, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	load, _ := os.ReadFile("/proc/loadavg")
	return fmt.Sprintf("%s, kernel %s, %s, load before %s", first, strings.TrimSpace(string(release)), model, strings.Fields(string(load))[0])
}

// hosts prints the table, and where it is asked for how cost grows.
func hosts(exporter, drawing string, warm, seconds int) error {
	fmt.Printf("%s; %d s each, one scrape a second\n\n%s\n", machine(exporter), seconds, header)
	small := size{gpus: 1, containers: 3}
	r, err := on(exporter, small, warm, seconds)
	if err != nil {
		return err
	}
	fmt.Println(r.line("gpu-exporter on a fake library: " + small.String()))
	if r, err = floor(warm, seconds); err != nil {
		return err
	}
	fmt.Println(r.line("floor: the same NVML calls from C, on the fake library"))
	if r, err = serve(exporter, []string{"--replay=demo", "--log.level=error"}, warm, seconds); err != nil {
		return err
	}
	fmt.Println(r.line("gpu-exporter --replay=demo"))
	if drawing == "" {
		return nil
	}
	return scale(exporter, drawing, warm, seconds)
}

// most is the largest host.
var most = size{gpus: 16, containers: 1000}

// sizes are the hosts that show how cost grows, one thing at a time.
var sizes = []size{
	{gpus: 1}, {gpus: 4}, {gpus: 8}, {gpus: 16},
	{gpus: 16, containers: 250}, {gpus: 16, containers: 500}, most,
	{gpus: 16, idle: 500}, {gpus: 16, idle: 1000},
}

// point is what a host of a size cost.
type point struct {
	size
	result
}

// scale measures the exporter on hosts of many sizes, prints a table and draws the figures.
func scale(exporter, drawing string, warm, seconds int) error {
	fmt.Printf("\n| GPUs | containers on them | others | processes on GPUs | series | bytes | scrape p50 / p99 | CPU | RssAnon |\n|---|---|---|---|---|---|---|---|---|\n")
	var points []point
	for _, s := range sizes {
		r, err := on(exporter, s, warm, seconds)
		if err != nil {
			return fmt.Errorf("%v: %w", s, err)
		}
		points = append(points, point{s, r})
		fmt.Printf("| %d | %d | %d | %d | %d | %d | %.1f / %.1f ms | %.1f %% | %.1f MB |\n", s.gpus, s.containers, s.idle, perContainer*s.containers, r.series, r.bytes,
			ms(quantile(r.scrapes, 0.5)), ms(quantile(r.scrapes, 0.99)), sum(r.cpu), float64(sum(r.anon))/1024)
	}
	find := func(s size) *point {
		for i := range points {
			if points[i].size == s {
				return &points[i]
			}
		}
		return nil
	}
	none, large, idle := find(size{gpus: 16}), find(most), find(size{gpus: 16, idle: 1000})
	fmt.Printf("\nRssAnon: %.1f kB for each container with %d processes on a GPU, %.1f kB for each on none. CPU: %.4f %% and %.4f %%.\n",
		float64(sum(large.anon)-sum(none.anon))/float64(most.containers), perContainer, float64(sum(idle.anon)-sum(none.anon))/1000,
		(sum(large.cpu)-sum(none.cpu))/float64(most.containers), (sum(idle.cpu)-sum(none.cpu))/1000)
	return os.WriteFile(drawing, []byte(draw(points)), 0o644)
}
