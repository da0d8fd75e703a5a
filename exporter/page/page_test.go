package page

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"

	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/snapshot"
	"gpu-exporter/exporter/why"
	"gpu-exporter/nvml/frame"
)

// hostile is a name that would run a script if any part of the page took it as HTML.
const hostile = `<img src=x onerror="window.owned=1"><script>window.owned=1</script>"'>&amp;` + "\x1b[2J\u202e"

func sample(load float64) *snapshot.Snapshot {
	c := containers.Container{ID: strings.Repeat("c", 64), Name: "train" + hostile, Image: hostile}
	idle := containers.Container{ID: strings.Repeat("d", 64), Name: "idle", Requests: []containers.Request{{Text: hostile, IDs: []string{"9"}}}}
	return &snapshot.Snapshot{Time: time.Now(), Host: input.Host{Name: hostile}, Library: frame.Library{DriverVersion: hostile},
		Sources: map[string]input.Source{"docker": {Name: "docker", Reason: hostile}, "nvml": {Name: "nvml", Up: true}, "z": {Name: "z", Reason: strings.Repeat("wall ", 200)}},
		Devices: []snapshot.Device{
			{UUID: "GPU-0", State: frame.StateOK, Info: frame.Info{Name: hostile, PCIBusID: hostile}, Load: &frame.Load{Utilization: frame.Some(load), MemoryUsed: frame.Some[uint64](3 << 30),
				MemoryTotal: frame.Some[uint64](140 << 30), Power: frame.Some(500.0), Throttle: frame.Some[uint64](1 << 2)}},
			{Index: 1, UUID: "GPU-1", State: frame.StateLost, Reason: hostile}},
		Workloads: []snapshot.Workload{
			{PID: 42, Alive: true, Container: c, Comm: hostile, Command: hostile, Memory: frame.Some[uint64](2 << 30), Utilization: frame.Some(load)},
			{PID: 43, Alive: true, Comm: "host", Memory: frame.Some[uint64](1 << 29)},
			{Alive: true, Memory: frame.Some[uint64](1 << 29)}},
		Containers: []snapshot.Container{{Container: c}, {Container: idle}}}
}

// served starts a server whose snapshots have the load, which may change.
func served(t *testing.T, load *atomic.Int64) (*httptest.Server, *Server) {
	t.Helper()
	var current atomic.Pointer[snapshot.Snapshot]
	renew := func() { current.Store(sample(float64(load.Load()))) }
	renew()
	s := New(current.Load)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { s.Run(ctx) })
	running.Go(func() {
		for ctx.Err() == nil {
			time.Sleep(200 * time.Millisecond)
			renew()
		}
	})
	mux := http.NewServeMux()
	s.Register(mux)
	if err := s.RegisterPage(mux, "/metrics", "v<1>"); err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(mux)
	server.Config.ReadTimeout, server.Config.WriteTimeout = 2*time.Second, 3*time.Second // shorter than a stream lives, as in the program
	server.Start()
	t.Cleanup(func() {
		cancel()
		running.Wait()
		server.Close()
	})
	return server, s
}

func get(t *testing.T, url string) (*http.Response, string) {
	t.Helper()
	r, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r, string(b)
}

// TestFiles: the page and its files are there with a policy that lets nothing else in, and the page has no script or style of its own.
func TestFiles(t *testing.T) {
	server, _ := served(t, new(atomic.Int64))
	for path, kind := range map[string]string{"/": "text/html", "/page.css": "text/css", "/page.js": "text/javascript"} {
		r, body := get(t, server.URL+path)
		h := r.Header
		if r.StatusCode != 200 || h.Get("Content-Type") != kind+"; charset=utf-8" || h.Get("Content-Security-Policy") != policy || h.Get("X-Content-Type-Options") != "nosniff" || body == "" {
			t.Errorf("%s: %s %v", path, r.Status, h)
		}
		for _, bad := range []string{"http://", "https://", "innerHTML", "eval(", " style=", "<style", " onload="} {
			if n := strings.Count(strings.ReplaceAll(body, "http://www.w3.org/2000/svg", ""), bad); n > 0 {
				t.Errorf("%s has %q", path, bad)
			}
		}
	}
	_, body := get(t, server.URL)
	for _, link := range []string{`href="metrics"`, `href="-/ready"`, `href="-/healthy"`, "v&lt;1&gt;"} {
		if !strings.Contains(body, link) {
			t.Errorf("the page lacks %s", link)
		}
	}
	if r, _ := get(t, server.URL+"/nothing"); r.StatusCode != 404 {
		t.Errorf("/nothing: %s", r.Status)
	}
}

// TestStream: events go on past the server's time limits, many pages are refused, and the end of the server ends them.
func TestStream(t *testing.T) {
	server, s := served(t, new(atomic.Int64))
	r, err := http.Get(server.URL + "/api/v1/stream")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	events := bufio.NewScanner(r.Body)
	events.Buffer(nil, 1<<20)
	var names []string
	start := time.Now()
	for time.Since(start) < 5500*time.Millisecond && events.Scan() {
		name, ok := strings.CutPrefix(events.Text(), "event: ")
		if !ok {
			continue
		}
		names = append(names, name)
		events.Scan()
		data, ok := strings.CutPrefix(events.Text(), "data: ")
		if name == "why" {
			var v map[string]why.Finding
			if err := json.Unmarshal([]byte(data), &v); !ok || err != nil || v[strings.Repeat("d", 64)].Cause != why.NotGiven.Name {
				t.Fatalf("%s: %v %q", name, err, data)
			}
			continue
		}
		var v struct{ Devices []struct{ UUID string } }
		if err := json.Unmarshal([]byte(data), &v); !ok || err != nil || len(v.Devices) != 2 || v.Devices[1].UUID != "GPU-1" {
			t.Fatalf("%s: %v %q", name, err, data)
		}
	}
	if got := strings.Join(names, " "); !strings.HasPrefix(got, "history why snapshot snapshot snapshot snapshot history why snapshot snapshot") {
		t.Errorf("events %s, %v", got, events.Err())
	}
	s.streams.Add(maxStreams)
	if r, _ := get(t, server.URL+"/api/v1/stream"); r.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("one page too many: %s", r.Status)
	}
	s.streams.Add(-maxStreams)
	r.Body.Close()
	for until := time.Now().Add(5 * time.Second); s.streams.Load() != 0; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(until) {
			t.Fatal("the stream of a reader that is gone goes on")
		}
	}
}

// TestBrowser: the page in a real browser. Names are text, nothing is loaded from elsewhere, figures and lines move, it fits on a phone, it is
// dark where people want that, and it says when the exporter is gone.
func TestBrowser(t *testing.T) {
	path, err := exec.LookPath("chromium")
	if err != nil {
		t.Fatal("chromium is missing: run scripts/setup")
	}
	var load atomic.Int64
	load.Store(61)
	server, _ := served(t, &load)
	var mu sync.Mutex
	var trouble []string
	listen := func(event any) {
		mu.Lock()
		defer mu.Unlock()
		switch e := event.(type) {
		case *network.EventRequestWillBeSent:
			if u := e.Request.URL; !strings.HasPrefix(u, server.URL+"/") && u != "data:," {
				trouble = append(trouble, "it loads "+u)
			}
		case *runtime.EventExceptionThrown:
			trouble = append(trouble, e.ExceptionDetails.Text)
		case *log.EventEntryAdded:
			trouble = append(trouble, e.Entry.Text)
		}
	}
	ctx, cancel := chromedp.NewContext(context.Background(), chromedp.WithAllocatorOptions(chromedp.ExecPath(path), chromedp.NoSandbox), chromedp.WithListener(listen))
	defer cancel()
	ctx, cancel = context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	eval := func(script string) string {
		t.Helper()
		result, err := chromedp.Run(ctx, chromedp.Evaluate[string]("String("+script+")"))
		if err != nil {
			t.Fatalf("%s: %v", script, err)
		}
		return result
	}
	until := func(what, script string) {
		t.Helper()
		for end := time.Now().Add(20 * time.Second); eval(script) != "true"; time.Sleep(50 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("not %s: %s\n%s", what, script, eval("document.body.innerText"))
			}
		}
	}
	want := func(script, result string) {
		t.Helper()
		if got := eval(script); got != result {
			t.Errorf("%s is %q, want %q", script, got, result)
		}
	}
	if err := chromedp.Do(ctx, chromedp.EmulateViewport(360, 640), chromedp.Navigate(server.URL)); err != nil {
		t.Fatal(err)
	}
	const first = "document.querySelector('#gpus article')"
	until("drawn", first+" !== null && "+first+".innerText.includes('61 %')")
	text, err := json.Marshal("train" + hostile)
	if err != nil {
		t.Fatal(err)
	}
	want("document.querySelectorAll('#gpus article').length", "2")
	want("document.querySelectorAll('#containers article').length", "3")
	want(fmt.Sprintf("document.querySelector('#containers h2').textContent === %s", text), "true")
	want("document.querySelectorAll('img').length + document.querySelectorAll('script').length", "1")
	want("window.owned", "undefined")
	want(first+".innerText.includes('Clocks limited by sw_power_cap')", "true")
	want("document.querySelectorAll('#gpus article')[1].innerText.includes('lost: <img')", "true")
	want("document.getElementById('notice').textContent.startsWith('docker is down: <img')", "true")
	want("document.getElementById('notice').textContent.endsWith('…\\nWhat to do: gpu-exporter doctor')", "true")
	want("document.getElementById('notice').textContent.length < 600", "true")
	want("document.documentElement.scrollWidth <= 360", "true")
	until("what holds a container back", "document.querySelector('#containers .why') !== null")
	const reason = "document.querySelector('#containers .why')"
	want(reason+".innerText.startsWith('It asked for GPUs, but what it asked for is no GPU that this host can use now. (it asked for <img')", "true")
	want(reason+".innerText.includes('Start it with `--gpus all`')", "true")
	want("document.querySelectorAll('#containers .why').length", "1")
	want("document.querySelectorAll('img').length", "0")
	until("a line with points", first+".querySelector('path.line').getAttribute('d').includes('M')")

	load.Store(77)
	until("the new load", first+".innerText.includes('77 %')")

	if err := chromedp.Do(ctx, chromedp.EmulateViewport(1000, 800)); err != nil {
		t.Fatal(err)
	}
	want("document.querySelector('nav').offsetTop < document.querySelector('h1').offsetTop + document.querySelector('h1').offsetHeight", "true") // one row

	back := func(scheme string) string {
		media := emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}}
		if _, err := chromedp.Call(ctx, emulation.SetEmulatedMedia, media); err != nil {
			t.Fatal(err)
		}
		return eval("getComputedStyle(document.body).backgroundColor")
	}
	if light, dark := back("light"), back("dark"); light != "rgb(246, 247, 249)" || dark != "rgb(20, 23, 27)" {
		t.Errorf("light %s, dark %s", light, dark)
	}
	mu.Lock()
	for _, x := range trouble {
		t.Error(x)
	}
	mu.Unlock()
	server.CloseClientConnections()
	server.Listener.Close()
	until("said that the exporter is gone", "document.getElementById('notice').textContent.startsWith('The exporter does not answer')")
	want(first+".innerText.includes('77 %')", "true")
}
