package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"

	"gpu-exporter/nvml/fake"
)

// churn is a host where containers and processes come, go and are renamed.
type churn struct {
	t    *testing.T
	r    *rand.Rand
	gpus []fake.GPU
	h    *fake.Host
	proc string
	next int // number of the next container or process

	mu         sync.Mutex
	containers []map[string]any
	listeners  []chan string // one for each stream of events
}

// nasty are names and command lines that programs give themselves.
var nasty = []string{"train", "\xff\xfe\n\"quoted\" \\ {a=\"b\"} ", strings.Repeat("x", 64<<10), "\u202e\x1b[2J", "", "a\x00b"}

// newChurn makes a host with two GPUs; none of its processes is real.
func newChurn(t *testing.T) (c *churn, socket string) {
	c = &churn{t: t, r: rand.New(rand.NewPCG(1, 2)), gpus: []fake.GPU{fake.H200(0), fake.H200(1)}, proc: procTree(t, map[int]map[string]string{}), next: 5_000_000}
	for i := range c.gpus {
		hold(&c.gpus[i], 300*mib)
		c.gpus[i].Set("energy", 1_000_000, 300_000) // 300 W
		c.gpus[i].GPM[20], c.gpus[i].GPM[21] = 1000, 2000
	}
	c.h = fake.Install(t, fake.Scenario{GPUs: c.gpus})
	return c, engine(t, nil, func(w http.ResponseWriter, r *http.Request, path string) bool {
		c.mu.Lock()
		list := slices.Clone(c.containers)
		c.mu.Unlock()
		switch {
		case path == "/events":
			events := make(chan string, 1000)
			c.mu.Lock()
			c.listeners = append(c.listeners, events)
			c.mu.Unlock()
			w.(http.Flusher).Flush()
			for {
				select {
				case <-r.Context().Done():
					return true
				case e := <-events:
					io.WriteString(w, e)
					w.(http.Flusher).Flush()
				}
			}
		case path == "/containers/json":
			all := []map[string]any{}
			for _, x := range list {
				all = append(all, map[string]any{"Id": x["Id"], "Names": []any{x["Name"]}, "Image": "image", "State": "running"})
			}
			json.NewEncoder(w).Encode(all)
		case strings.HasPrefix(path, "/containers/"):
			for _, x := range list {
				if strings.Contains(path, x["Id"].(string)) {
					json.NewEncoder(w).Encode(x)
					return true
				}
			}
			return false
		default:
			return false
		}
		return true
	})
}

func (c *churn) tell(action, id string) {
	for _, l := range c.listeners {
		select {
		case l <- fmt.Sprintf(`{"Type":"container","Action":%q,"Actor":{"ID":%q,"Attributes":{}},"timeNano":%d}`+"\n", action, id, time.Now().UnixNano()):
		default:
		}
	}
}

// step changes one thing.
func (c *churn) step() {
	c.mu.Lock()
	defer c.mu.Unlock()
	g := &c.gpus[c.r.IntN(len(c.gpus))]
	switch n := len(c.containers); {
	case n < 3 || n < 12 && c.r.IntN(4) == 0: // a container
		c.next++
		x := inspected(fmt.Sprintf("%012x%052d", c.next, 7), fmt.Sprint("job-", c.next))
		c.containers = append(c.containers, x)
		c.tell("start", x["Id"].(string))
	case c.r.IntN(4) == 0: // is renamed
		i := c.r.IntN(n)
		x := maps.Clone(c.containers[i])
		c.next++
		x["Name"] = fmt.Sprint("/renamed-", c.next)
		c.containers[i] = x
		c.tell("rename", x["Id"].(string))
	case n > 6 && c.r.IntN(4) == 0: // ends; its processes last a little longer
		i := c.r.IntN(n)
		id := c.containers[i]["Id"].(string)
		c.containers = slices.Delete(slices.Clone(c.containers), i, i+1)
		c.tell("die", id)
	case len(g.Processes) < 3 || len(g.Processes) < 20 && c.r.IntN(2) == 0: // a process, now and then in no container
		c.next++
		dir := filepath.Join(c.proc, fmt.Sprint(c.next))
		group := "0::/user.slice\n"
		if c.r.IntN(5) > 0 {
			group = "0::/docker/" + c.containers[c.r.IntN(n)]["Id"].(string) + "\n"
		}
		name := nasty[c.r.IntN(len(nasty))]
		os.Mkdir(dir, 0o755)
		os.WriteFile(dir+"/cgroup", []byte(group), 0o644)
		os.WriteFile(dir+"/cmdline", []byte(name+"\x00"+nasty[c.r.IntN(len(nasty))]), 0o644)
		os.WriteFile(dir+"/stat", fmt.Appendf(nil, "%d (%.15s) S 1 %[1]d %[1]d 0 -1 4194304 0 0 0 0 %[3]d 30 0 0 20 0 1 0 %[1]d 0 0\n", c.next, name, c.r.IntN(1000)), 0o644)
		g.Processes = append(slices.Clone(g.Processes), fake.Process{PID: c.next, Memory: uint64(c.r.IntN(1 << 30))})
		g.Busy = append(slices.Clone(g.Busy), fake.Busy{PID: c.next, SM: c.r.IntN(9)})
	default: // a process ends
		i := c.r.IntN(len(g.Processes))
		pid := g.Processes[i].PID
		os.RemoveAll(filepath.Join(c.proc, fmt.Sprint(pid)))
		g.Processes = slices.Delete(slices.Clone(g.Processes), i, i+1)
		g.Busy = slices.DeleteFunc(slices.Clone(g.Busy), func(b fake.Busy) bool { return b.PID == pid })
	}
	hold(g, 300*mib, g.Processes...)
	c.h.Set(c.t, fake.Scenario{GPUs: c.gpus})
}

var sampleLine = regexp.MustCompile(`^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{.*\})? (\S+)$`)

// exposed is what one scrape told: the value of each series, and which families are counters.
type exposed struct {
	values  map[string]float64
	counter map[string]bool
}

// lines reads an exposition in either text form.
func lines(text string) (x exposed, err error) {
	x = exposed{map[string]float64{}, map[string]bool{}}
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		if strings.HasPrefix(line, "#") {
			if f := strings.Fields(line); len(f) == 4 && f[1] == "TYPE" && f[3] == "counter" {
				x.counter[strings.TrimSuffix(f[2], "_total")] = true
			}
			continue
		}
		m := sampleLine.FindStringSubmatch(line)
		if m == nil {
			return x, fmt.Errorf("no sample: %.200q", line)
		}
		v, err := strconv.ParseFloat(m[3], 64)
		if err != nil {
			return x, err
		}
		name := m[1] + regexp.MustCompile(`(le|quantile)="([0-9]+)\.0"`).ReplaceAllString(m[2], `$1="$2"`)
		if strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_") || strings.HasPrefix(name, "gpu_exporter_snapshot_age") || name == "gpu_exporter_series_left_out" {
			continue // they may change where all else stays
		}
		if _, twice := x.values[name]; twice {
			return x, fmt.Errorf("twice: %s", name)
		}
		x.values[name] = v
	}
	return x, nil
}

var accepts = []string{"text/plain;version=0.0.4", "application/openmetrics-text;version=1.0.0",
	"application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited"}

// askFor scrapes in one of the forms.
func askFor(address, accept, agent string) (x exposed, err error) {
	r, err := http.NewRequest("GET", "http://"+address+"/metrics", nil)
	if err != nil {
		return x, err
	}
	r.Header.Set("Accept", accept)
	r.Header.Set("User-Agent", agent)
	if strings.HasPrefix(agent, "Prometheus") {
		r.Header.Set("X-Prometheus-Scrape-Timeout-Seconds", "10")
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return x, err
	}
	defer answer.Body.Close()
	b, err := io.ReadAll(answer.Body)
	if err != nil || answer.StatusCode != http.StatusOK {
		return x, fmt.Errorf("%s: %w %.200s", answer.Status, err, b)
	}
	kind, _, _ := strings.Cut(accept, ";")
	if got := answer.Header.Get("Content-Type"); !strings.HasPrefix(got, kind) {
		return x, fmt.Errorf("asked for %s, got %s", accept, got)
	}
	switch kind {
	case "text/plain":
	case "application/openmetrics-text":
		if !bytes.HasSuffix(b, []byte("# EOF\n")) {
			return x, fmt.Errorf("cut short")
		}
	default:
		var text bytes.Buffer
		d := expfmt.NewDecoder(bytes.NewReader(b), expfmt.NewFormat(expfmt.TypeProtoDelim))
		for {
			var f dto.MetricFamily
			if err := d.Decode(&f); err == io.EOF {
				break
			} else if err != nil {
				return x, err
			}
			if _, err := expfmt.MetricFamilyToText(&text, &f); err != nil {
				return x, err
			}
		}
		b = text.Bytes()
	}
	return lines(string(b))
}

var label = regexp.MustCompile(`([a-z_]+)="((?:[^"\\]|\\.)*)"`)

// closes returns what does not add up.
func (x exposed) closes() (wrong []string) {
	for _, a := range [][2]string{{"gpu_memory_used_bytes", "gpu_device_memory_used_bytes"}, {"gpu_energy_joules_total", "gpu_device_energy_joules_total"},
		{"gpu_pci_bandwidth_bytes_total", "gpu_device_pcie_bytes_total"}} {
		sums := map[string]float64{}
		device := map[string]float64{}
		for name, v := range x.values {
			family, labels, _ := strings.Cut(name, "{")
			if family != a[0] && family != a[1] {
				continue
			}
			k := ""
			for _, m := range label.FindAllStringSubmatch(labels, -1) {
				if m[1] == "gpu_device_uuid" || m[1] == "direction" {
					k += m[2] + " "
				}
			}
			if family == a[0] {
				sums[k] += v
			} else {
				device[k] += v
			}
		}
		for k, v := range device {
			if sums[k] != v {
				wrong = append(wrong, fmt.Sprintf("%s of %s: %v, the device's %v", a[0], k, sums[k], v))
			}
		}
	}
	return wrong
}

// TestChurn: several clients scrape in every form at once, as fast as they can, while containers and processes come, go and are renamed, with names of
// all kinds, and the worker is killed. No counter ever falls for anyone, not even one that was away in between; a counter begins at 0 for a Prometheus
// only where the container or process itself is new; sums close at every scrape; and what is told at one moment is the same in every form.
func TestChurn(t *testing.T) {
	c, socket := newChurn(t)
	flags := []string{"--nvml.library=" + c.h.Library, "--docker.host=unix://" + socket, "--proc=" + c.proc, "--nvml.interval=200ms", "--linger=1s", "--tracer=off"}
	hosts := []*process{launch(t, nil, flags...), launch(t, nil, append(flags, "--metrics.max-series=400")...), launch(t, nil, append(flags, "--metrics.max-series=50")...)}
	stop := make(chan struct{})
	var clients sync.WaitGroup
	var mu sync.Mutex
	scrapes, compared, zeros, said := 0, 0, 0, 0
	complain := func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		if said++; said <= 20 {
			t.Errorf(format, args...)
		}
	}
	for i, p := range hosts {
		p.serving(t)
		for _, agent := range []string{"Prometheus/3", "curl/8", "Prometheus/2"} {
			clients.Go(func() {
				highest, known := map[string]float64{}, map[string]bool{}
				var before [6]exposed // the last scrapes, twice in each form
				for n := 0; ; n++ {
					select {
					case <-stop:
						return
					default:
					}
					x, err := askFor(p.address, accepts[n%3], agent)
					if err != nil {
						complain("host %d, %s: %v", i, agent, err)
						return
					}
					copy(before[:], before[1:])
					before[5] = x
					born := 0
					now := map[string]bool{}
					for name, v := range x.values {
						family, labels, _ := strings.Cut(name, "{")
						if !x.counter[strings.TrimSuffix(family, "_total")] {
							continue
						}
						if v < highest[name] {
							complain("host %d, %s, scrape %d: %s fell from %v to %v", i, agent, n, name, highest[name], v)
						}
						who := family
						for _, m := range label.FindAllStringSubmatch(labels, -1) {
							if m[1] != "container_name" {
								who += " " + m[2]
							}
						}
						now[who] = true
						if _, old := highest[name]; !old && v == 0 && n > 0 {
							born++
							if known[who] && highest[who] > 0 {
								complain("host %d, %s, scrape %d: %s begins at 0, and is known with %v", i, agent, n, name, highest[who])
							}
						}
						highest[name], highest[who] = v, max(v, highest[who])
					}
					maps.Copy(known, now)
					if wrong := x.closes(); i < 2 && len(wrong) > 0 && (born == 0 || agent == "curl/8") {
						complain("host %d, %s, scrape %d: %s", i, agent, n, strings.Join(wrong, "; "))
					}
					mu.Lock()
					scrapes++
					zeros += born
					// The picture changes now and then, and may change back, but not at every scrape.
					still := n >= 5
					for k := range 3 {
						still = still && maps.Equal(before[k].values, before[k+3].values)
					}
					if still {
						compared++
					}
					mu.Unlock()
					for k := 1; still && k < 3; k++ {
						for name, v := range before[k].values {
							if have, ok := before[0].values[name]; !ok || have != v || len(before[0].values) != len(before[k].values) {
								complain("host %d: %s is %v, in %s %v", i, name, have, accepts[(n-5+k)%3], v)
								break
							}
						}
					}
					time.Sleep(2 * time.Millisecond)
				}
			})
		}
	}
	for n, deadline := 0, time.Now().Add(6*time.Second); time.Now().Before(deadline); n++ {
		c.step()
		if n%80 == 79 {
			for _, p := range hosts {
				for _, pid := range descendants(p.cmd.Process.Pid) {
					syscall.Kill(pid, syscall.SIGKILL)
				}
			}
		}
		time.Sleep(20 * time.Millisecond)
	}
	close(stop)
	clients.Wait()
	if compared < 10 || zeros < 50 {
		t.Errorf("the test shows little: %d comparisons, %d counters begun at 0", compared, zeros)
	}
	t.Logf("%d scrapes, %d compared, %d counters begun at 0, %d containers and processes", scrapes, compared, zeros, c.next-5_000_000)
	for _, p := range hosts {
		p.stop(t)
	}
}
