package main

import (
	"bufio"
	"net/http"
	"strings"
	"testing"
	"time"
)

// TestPage: the program serves the page with its links, its stream gives the containers, and an open page does not hold up its end.
func TestPage(t *testing.T) {
	p := start(t, "--replay=demo", "--web.telemetry-path=/m")
	body := p.get(t, "/")
	for _, link := range []string{`href="m"`, `href="-/ready"`, `href="-/healthy"`} {
		if !strings.Contains(body, link) {
			t.Errorf("the page lacks %s", link)
		}
	}
	r, err := http.Get("http://" + p.address + "/api/v1/stream")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	events := bufio.NewScanner(r.Body)
	events.Buffer(nil, 1<<20)
	found := false
	for end := time.Now().Add(20 * time.Second); !found && time.Now().Before(end) && events.Scan(); {
		found = strings.HasPrefix(events.Text(), `data: {"time":`) && strings.Contains(events.Text(), `"container_name":"notebook"`)
	}
	if !found {
		t.Errorf("no container in the stream: %v", events.Err())
	}
	begin := time.Now()
	p.stop(t)
	if d := time.Since(begin); d > 1500*time.Millisecond {
		t.Errorf("it took %v to end", d)
	}
}
