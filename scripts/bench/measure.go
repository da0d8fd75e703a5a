package main

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// result is what a command cost while it was measured.
type result struct {
	scrapes       []time.Duration // sorted; none without a URL
	series, bytes int             // of the last scrape
	cpu           []float64       // percent of a core, by process: the command and its children
	ended         float64         // of children that ended meanwhile
	rss           int             // kB, of all
	anon          []int           // kB, by process
}

// measure starts a command, waits, scrapes it once a second at a URL if there is one, and ends it.
func measure(cmd *exec.Cmd, url string, warm, seconds int) (r result, err error) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return r, fmt.Errorf("starting %s: %w", cmd.Path, err)
	}
	defer func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM)
		_ = cmd.Wait() // by a signal, as it was told
	}()
	var body bytes.Buffer
	for began, i := time.Now(), 0; i < warm; i++ {
		if url != "" && i > 2 { // what only the first scrapes cost
			if err := scrape(url, &body); err != nil {
				return r, err
			}
		}
		time.Sleep(time.Until(began.Add(time.Duration(i+1) * time.Second)))
	}
	before, err := cpu(cmd.Process.Pid)
	if err != nil {
		return r, err
	}
	began := time.Now()
	for i := range seconds {
		time.Sleep(time.Until(began.Add(time.Duration(i) * time.Second)))
		if url == "" {
			continue
		}
		t := time.Now()
		if err := scrape(url, &body); err != nil {
			return r, err
		}
		r.scrapes = append(r.scrapes, time.Since(t))
	}
	time.Sleep(time.Until(began.Add(time.Duration(seconds) * time.Second)))
	after, err := cpu(cmd.Process.Pid)
	if err != nil {
		return r, err
	}
	elapsed := time.Since(began).Seconds()
	slices.Sort(r.scrapes)
	r.series, r.bytes = count(body.Bytes()), body.Len()
	for _, pid := range tree(cmd.Process.Pid) {
		rss, anon := memory(pid)
		r.rss += rss
		r.anon = append(r.anon, anon)
		r.cpu = append(r.cpu, (after[pid]-before[pid]).Seconds()/elapsed*100)
		delete(after, pid)
	}
	for pid := range after {
		r.ended += (after[pid] - before[pid]).Seconds() / elapsed * 100
	}
	return r, nil
}

// sum adds up.
func sum[T int | float64](list []T) (n T) {
	for _, v := range list {
		n += v
	}
	return n
}

func join(list []string) string { return strings.Join(list, " + ") }

// line is one line of the table, with a name in its first cell.
func (r *result) line(name string) string {
	scrapes, series := "-", "-"
	if len(r.scrapes) > 0 {
		scrapes = fmt.Sprintf("%.2f / %.2f / %.2f ms", ms(quantile(r.scrapes, 0.5)), ms(quantile(r.scrapes, 0.99)), ms(r.scrapes[len(r.scrapes)-1]))
		series = strconv.Itoa(r.series)
	}
	var used, anon []string
	for i := range r.cpu {
		used, anon = append(used, fmt.Sprintf("%.2f", r.cpu[i])), append(anon, fmt.Sprintf("%.1f", float64(r.anon[i])/1024))
	}
	return fmt.Sprintf("| %s | %s | %.2f %% (%s) | %.1f MB | %.1f MB (%s) | %s |", name, scrapes, sum(r.cpu)+r.ended, join(used),
		float64(r.rss)/1024, float64(sum(r.anon))/1024, join(anon), series)
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// quantile is the smallest value that q of the sorted list does not exceed.
func quantile(list []time.Duration, q float64) time.Duration {
	return list[max(0, int(math.Ceil(q*float64(len(list))))-1)]
}

// scrape reads the metrics over a kept connection, as Prometheus does.
func scrape(url string, body *bytes.Buffer) error {
	request, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	request.Header.Set("X-Prometheus-Scrape-Timeout-Seconds", "10")
	request.Header.Set("Accept", "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2")
	r, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer r.Body.Close()
	if r.StatusCode != http.StatusOK {
		return fmt.Errorf("scraping %s: %s", url, r.Status)
	}
	body.Reset()
	if _, err := io.Copy(body, r.Body); err != nil {
		return fmt.Errorf("scraping %s: %w", url, err)
	}
	return nil
}

func count(body []byte) int {
	n := 0
	for line := range bytes.Lines(body) {
		if line[0] != '#' {
			n++
		}
	}
	return n
}

// tree lists a process and its children, theirs included.
func tree(pid int) []int {
	list := []int{pid}
	for i := 0; i < len(list); i++ {
		tasks, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", list[i]))
		for _, t := range tasks {
			b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", list[i], t.Name()))
			for _, f := range strings.Fields(string(b)) {
				if n, err := strconv.Atoi(f); err == nil {
					list = append(list, n)
				}
			}
		}
	}
	return list
}

// cpu returns the CPU time of every process of the tree, to the nanosecond where the kernel accounts so (sum_exec_runtime of its
// threads), with that of its ended children (of 10 ms ticks).
func cpu(pid int) (map[int]time.Duration, error) {
	out := map[int]time.Duration{}
	for _, p := range tree(pid) {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p))
		if err != nil {
			continue
		}
		f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
		if len(f) < 15 {
			continue
		}
		var d time.Duration
		for _, i := range []int{13, 14} { // cutime, cstime
			n, _ := strconv.ParseInt(f[i], 10, 64)
			d += time.Duration(n) * 10 * time.Millisecond
		}
		var threads time.Duration
		tasks, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", p))
		for _, t := range tasks {
			b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/schedstat", p, t.Name()))
			if f := strings.Fields(string(b)); err == nil && len(f) > 0 {
				n, _ := strconv.ParseInt(f[0], 10, 64)
				threads += time.Duration(n)
			}
		}
		var ticks time.Duration // of all threads, the ended ones too: coarser
		for _, i := range []int{11, 12} {
			n, _ := strconv.ParseInt(f[i], 10, 64)
			ticks += time.Duration(n) * 10 * time.Millisecond
		}
		threads = max(threads, ticks)
		out[p] = d + threads
	}
	if _, ok := out[pid]; !ok {
		return nil, fmt.Errorf("the command ended before it was measured")
	}
	return out, nil
}

// memory returns resident memory and its anonymous part in kB.
func memory(pid int) (rss, anon int) {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) < 2 {
			continue
		}
		switch f[0] {
		case "VmRSS:":
			rss, _ = strconv.Atoi(f[1])
		case "RssAnon:":
			anon, _ = strconv.Atoi(f[1])
		}
	}
	return rss, anon
}
