package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/cilium/ebpf"
)

// watcher runs an exporter and looks at what it holds.
type watcher struct {
	cmd       *exec.Cmd
	url       string // where it serves, without a path
	temporary string // its folder for temporary files
	maps      map[int]*ebpf.Map
	scraped   []byte        // the last answer
	ended     time.Duration // from SIGTERM to its end
}

// watch starts the exporter, reads its metrics once a second, opens its page now and then, and looks every so often, for as long as is asked or the
// context lasts. Then it ends the exporter.
func (w *watcher) watch(ctx context.Context, length, every time.Duration) (samples []sample, err error) {
	w.maps = map[int]*ebpf.Map{}
	w.cmd.Env = append(os.Environ(), "TMPDIR="+w.temporary)
	w.cmd.Stderr = os.Stderr
	if err := w.cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting the exporter: %w", err)
	}
	exited := make(chan error, 1)
	go func() { exited <- w.cmd.Wait() }()
	defer func() {
		told := time.Now()
		_ = w.cmd.Process.Signal(syscall.SIGTERM) // it has ended if that fails
		select {
		case <-exited:
			w.ended = time.Since(told)
		case <-time.After(10 * time.Second):
			_ = w.cmd.Process.Kill()
			err = errors.Join(err, errors.New("the exporter did not end by SIGTERM"))
		}
	}()
	began := time.Now()
	ticks := time.NewTicker(time.Second)
	defer ticks.Stop()
	failed, next := 0, every
	for time.Since(began) < length {
		select {
		case <-ctx.Done():
			return samples, nil
		case err := <-exited:
			exited <- err
			return samples, fmt.Errorf("the exporter ended: %w", err)
		case <-ticks.C:
		}
		if err := w.scrape(ctx); err != nil {
			if failed++; failed > 10 {
				return samples, err
			}
			continue
		}
		failed = 0
		if time.Since(began) < next {
			continue
		}
		next += every
		if len(samples)%4 == 0 {
			go w.open(ctx)
		}
		s, err := w.look()
		if err != nil {
			return samples, err
		}
		s.at = time.Since(began)
		samples = append(samples, s)
	}
	return samples, nil
}

// scrape reads the metrics.
func (w *watcher) scrape(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, w.url+"/metrics", nil)
	if err != nil {
		return err
	}
	r.Header.Set("User-Agent", "Prometheus/3")
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	b, err := io.ReadAll(answer.Body)
	if err != nil || answer.StatusCode != http.StatusOK {
		return fmt.Errorf("scraping: %s: %w", answer.Status, err)
	}
	w.scraped = b
	return nil
}

// open is a page that is looked at for some seconds over a connection of its own.
func (w *watcher) open(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 7*time.Second)
	defer cancel()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for _, path := range []string{"/api/v1/history?points=600", "/api/v1/stream"} {
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, w.url+path, nil)
		if err != nil {
			return
		}
		if answer, err := client.Do(r); err == nil {
			_, _ = io.Copy(io.Discard, answer.Body) // ends with the context
			answer.Body.Close()
		}
	}
}

// value returns the sum of a family's series in the last scrape, and their number.
func (w *watcher) value(family string) (sum float64, n int) {
	for text := range bytes.Lines(w.scraped) {
		rest, ok := bytes.CutPrefix(text, []byte(family))
		if !ok || len(rest) == 0 || rest[0] != '{' && rest[0] != ' ' {
			continue
		}
		v, err := strconv.ParseFloat(string(bytes.TrimSpace(rest[bytes.LastIndexByte(rest, ' '):])), 64)
		if err == nil {
			sum, n = sum+v, n+1
		}
	}
	return sum, n
}

// look says what the exporter and its worker hold now.
func (w *watcher) look() (sample, error) {
	s := sample{holds: map[string]float64{}}
	family := tree(w.cmd.Process.Pid)
	s.holds["processes"] = float64(len(family))
	for i, pid := range family {
		who := "main"
		if i > 0 {
			who = "worker"
		}
		if i > 1 {
			break // counted above
		}
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			continue // a worker that was just replaced
		}
		for text := range strings.Lines(string(status)) {
			f := strings.Fields(text)
			if len(f) < 2 {
				continue
			}
			v, _ := strconv.ParseFloat(f[1], 64) // the lines used below have numbers
			switch f[0] {
			case "VmRSS:":
				s.holds["RSS, MB: "+who] = v / 1024
			case "RssAnon:":
				s.holds["RssAnon, MB: "+who] = v / 1024
			case "Threads:":
				s.holds["threads: "+who] = v
			}
		}
		if files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid)); err == nil {
			s.holds["fds: "+who] = float64(len(files))
		}
	}
	if v, n := w.value("go_goroutines"); n == 1 {
		s.holds["goroutines: main"] = v
	}
	if v, n := w.value("go_memstats_heap_inuse_bytes"); n == 1 {
		s.holds["heap in use, MB: main"] = v / (1 << 20)
	}
	if v, n := w.value("gpu_exporter_series"); n == 1 {
		s.holds["series"] = v
	}
	s.holds["files left"] = 0
	err := filepath.WalkDir(w.temporary, func(path string, _ fs.DirEntry, err error) error {
		if err == nil && path != w.temporary {
			s.holds["files left"]++
		}
		return nil
	})
	if err != nil {
		return s, err
	}
	return s, w.lookAtMaps(s.holds)
}

// tree lists a process and its children.
func tree(pid int) []int {
	list := []int{pid}
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, t := range tasks {
		b, _ := os.ReadFile(t) // a thread that ended has none
		for _, f := range strings.Fields(string(b)) {
			if child, err := strconv.Atoi(f); err == nil {
				list = append(list, child)
			}
		}
	}
	return list
}

// lookAtMaps counts the entries of the exporter's BPF hash maps.
func (w *watcher) lookAtMaps(holds map[string]float64) error {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/fdinfo/*", w.cmd.Process.Pid))
	if err != nil {
		return err
	}
	found := map[int]bool{}
	for _, name := range files {
		id, ok := mapID(name)
		if !ok || found[id] {
			continue
		}
		found[id] = true
		if w.maps[id] == nil {
			m, err := ebpf.NewMapFromID(ebpf.MapID(id))
			if err != nil {
				return fmt.Errorf("opening BPF map %d: %w", id, err)
			}
			w.maps[id] = m
		}
		m := w.maps[id]
		if t := m.Type(); t != ebpf.Hash && t != ebpf.LRUHash {
			continue
		}
		info, err := m.Info()
		if err != nil {
			return fmt.Errorf("asking for BPF map %d: %w", id, err)
		}
		n, err := entries(m)
		if err != nil {
			return fmt.Errorf("reading BPF map %s: %w", info.Name, err)
		}
		holds["BPF map "+info.Name] += float64(n)
	}
	holds["BPF maps"] = float64(len(found))
	for id, m := range w.maps {
		if !found[id] {
			m.Close()
			delete(w.maps, id)
		}
	}
	return nil
}

// mapID returns the id of the BPF map that a file of /proc/PID/fdinfo is about, if it is about one.
func mapID(file string) (int, bool) {
	f, err := os.Open(file)
	if err != nil {
		return 0, false // closed meanwhile
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if value, ok := strings.CutPrefix(lines.Text(), "map_id:"); ok {
			id, err := strconv.Atoi(strings.TrimSpace(value))
			return id, err == nil
		}
	}
	return 0, false
}

// entries counts a map's. The kernel walks its buckets once: what comes and goes meanwhile does not make the walk longer.
func entries(m *ebpf.Map) (n int, err error) {
	size := 256
	var cursor ebpf.MapBatchCursor
	buffer := func(bytes uint32) any {
		t := reflect.SliceOf(reflect.ArrayOf(int(bytes), reflect.TypeFor[byte]()))
		return reflect.MakeSlice(t, size, size).Interface()
	}
	keys, values := buffer(m.KeySize()), buffer(m.ValueSize())
	for {
		got, err := m.BatchLookup(&cursor, keys, values, nil)
		if errors.Is(err, syscall.ENOSPC) && size < int(m.MaxEntries()) { // the next bucket alone is larger
			size *= 2
			keys, values = buffer(m.KeySize()), buffer(m.ValueSize())
			continue
		}
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return n, err
		}
		n += got
		if err != nil { // the end, with the last entries
			return n, nil
		}
	}
}
