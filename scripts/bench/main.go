// Bench measures a running exporter: how long a scrape takes, and what CPU time and memory its processes use while it is scraped once a
// second. It prints one line of a Markdown table. With a command after "--" it starts that command, measures it and its children, and
// ends it; without a URL it makes no scrape.
package main

import (
	"bytes"
	"flag"
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

// Header is the table's head, printed by --header.
const header = `| program | scrape p50 / p99 / max | CPU | RSS | RssAnon | series |
|---|---|---|---|---|---|`

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run() error {
	name := flag.String("name", "", "first cell of the line")
	url := flag.String("url", "", "URL to scrape")
	seconds := flag.Int("seconds", 60, "length of the measurement")
	warm := flag.Int("warm", 8, "seconds before it")
	head := flag.Bool("header", false, "print the table's head and end")
	flag.Parse()
	if *head {
		fmt.Println(header)
		return nil
	}
	if flag.NArg() == 0 {
		return fmt.Errorf("no command to measure")
	}
	cmd := exec.Command(flag.Arg(0), flag.Args()[1:]...)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting %s: %w", flag.Arg(0), err)
	}
	defer func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM)
		_ = cmd.Wait()
	}()
	time.Sleep(time.Duration(*warm) * time.Second)

	var took []time.Duration
	series := 0
	before, err := cpu(cmd.Process.Pid)
	if err != nil {
		return err
	}
	began := time.Now()
	for i := range *seconds {
		time.Sleep(time.Until(began.Add(time.Duration(i) * time.Second)))
		if *url == "" {
			continue
		}
		t := time.Now()
		body, err := scrape(*url)
		if err != nil {
			return err
		}
		took = append(took, time.Since(t))
		series = count(body)
	}
	time.Sleep(time.Until(began.Add(time.Duration(*seconds) * time.Second)))
	after, err := cpu(cmd.Process.Pid)
	if err != nil {
		return err
	}
	elapsed := time.Since(began)
	rss, anon, parts := 0, 0, []string{}
	for _, pid := range tree(cmd.Process.Pid) {
		r, a := memory(pid)
		rss, anon = rss+r, anon+a
		parts = append(parts, fmt.Sprintf("%.1f", float64(a)/1024))
	}
	scrapes, n := "-", "-"
	if len(took) > 0 {
		slices.Sort(took)
		scrapes = fmt.Sprintf("%.2f / %.2f / %.2f ms", ms(quantile(took, 0.5)), ms(quantile(took, 0.99)), ms(took[len(took)-1]))
		n = strconv.Itoa(series)
	}
	used := []string{}
	total := 0.0
	for _, pid := range tree(cmd.Process.Pid) {
		percent := (after[pid] - before[pid]).Seconds() / elapsed.Seconds() * 100
		used = append(used, fmt.Sprintf("%.2f", percent))
	}
	for pid := range after {
		total += (after[pid] - before[pid]).Seconds() / elapsed.Seconds() * 100
	}
	fmt.Printf("| %s | %s | %.2f %% (%s) | %.1f MB | %.1f MB (%s) | %s |\n", *name, scrapes, total, strings.Join(used, " + "),
		float64(rss)/1024, float64(anon)/1024, strings.Join(parts, " + "), n)
	return nil
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// quantile is the smallest value that q of the sorted list does not exceed.
func quantile(list []time.Duration, q float64) time.Duration {
	return list[max(0, int(math.Ceil(q*float64(len(list))))-1)]
}

// scrape reads the metrics over a kept connection, compressed if the server does that, as Prometheus does.
func scrape(url string) ([]byte, error) {
	r, err := http.Get(url)
	if err != nil {
		return nil, err
	}
	defer r.Body.Close()
	if r.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("scraping %s: %s", url, r.Status)
	}
	return io.ReadAll(r.Body)
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
		if threads == 0 { // no schedstat here: ticks
			for _, i := range []int{11, 12} {
				n, _ := strconv.ParseInt(f[i], 10, 64)
				threads += time.Duration(n) * 10 * time.Millisecond
			}
		}
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
