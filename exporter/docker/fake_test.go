package docker

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// fake is a Docker daemon of a few lines, which can misbehave.
type fake struct {
	socket string
	host   string

	mu         sync.Mutex
	api        string // version that ping tells; empty: none, as before API negotiation
	minAPI     string // requests below are refused
	containers map[string]map[string]any
	handle     func(w http.ResponseWriter, r *http.Request, kind string) bool // true: it has answered
	requests   []string
	mute       bool // events are not told
	streams    map[chan string]bool
	server     *http.Server
}

// newFake starts a fake daemon, which ends with the test.
func newFake(t *testing.T) *fake {
	t.Helper()
	f := idleFake(t)
	f.listen(t)
	return f
}

// idleFake makes a fake daemon that does not listen yet.
func idleFake(t *testing.T) *fake {
	f := &fake{socket: filepath.Join(t.TempDir(), "s"), api: "1.47", containers: map[string]map[string]any{}, streams: map[chan string]bool{}}
	f.host = "unix://" + f.socket
	return f
}

func (f *fake) listen(t *testing.T) {
	t.Helper()
	l, err := net.Listen("unix", f.socket)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: f}
	f.mu.Lock()
	f.server = server
	f.mu.Unlock()
	go func() { _ = server.Serve(l) }()
	t.Cleanup(func() { server.Close(); l.Close() })
}

func (f *fake) stop() {
	f.mu.Lock()
	server := f.server
	f.mu.Unlock()
	_ = server.Close()
}

// set changes the fake.
func (f *fake) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

// id makes a container id of a short name.
func id(name string) string { return fmt.Sprintf("%064x", name) }

func (f *fake) start(name string) {
	f.set(func() {
		f.containers[id(name)] = map[string]any{
			"Id": id(name), "Name": "/" + name, "Image": "sha256:1234", "Config": map[string]any{"Image": "image-of-" + name},
			"State":      map[string]any{"Running": true, "Pid": 999999999, "StartedAt": time.Now().Format(time.RFC3339Nano)},
			"HostConfig": map[string]any{"Runtime": "runc"},
		}
	})
	f.tell("start", name, nil)
}

func (f *fake) die(name string) {
	f.set(func() { delete(f.containers, id(name)) })
	f.tell("die", name, nil)
}

func (f *fake) tell(action, name string, more map[string]any) {
	e := map[string]any{"Type": "container", "Action": action, "status": action, "id": id(name), "timeNano": time.Now().UnixNano(),
		"Actor": map[string]any{"ID": id(name), "Attributes": map[string]string{"name": name, "image": "image-of-" + name}}}
	for k, v := range more {
		e[k] = v
	}
	line, err := json.Marshal(e)
	if err != nil {
		panic(err)
	}
	f.send(string(line) + "\n")
}

func (f *fake) send(line string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.mute {
		return
	}
	for s := range f.streams {
		s <- line
	}
}

func (f *fake) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := r.URL.Path
	version := ""
	if strings.HasPrefix(path, "/v") {
		if parts := strings.SplitN(path[2:], "/", 2); len(parts) == 2 && strings.Contains(parts[0], ".") {
			version, path = parts[0], "/"+parts[1]
		}
	}
	kind := strings.Trim(path, "/")
	if strings.HasPrefix(kind, "containers/") && kind != "containers/json" {
		kind = "inspect"
	}
	f.mu.Lock()
	f.requests = append(f.requests, r.Method+" "+r.URL.Path)
	handle, api, minAPI := f.handle, f.api, f.minAPI
	f.mu.Unlock()
	if handle != nil && handle(w, r, kind) {
		return
	}
	fail := func(status int, message string) {
		w.WriteHeader(status)
		_ = json.NewEncoder(w).Encode(map[string]string{"message": message})
	}
	if version != "" && (less(version, minAPI) || less(api, version)) {
		fail(http.StatusBadRequest, "client version "+version+" does not fit: this is "+minAPI+" to "+api)
		return
	}
	switch kind {
	case "_ping":
		if api != "" {
			w.Header().Set("Api-Version", api)
		}
		fmt.Fprint(w, "OK")
	case "containers/json":
		f.mu.Lock()
		list := []map[string]any{}
		for cid, c := range f.containers {
			list = append(list, map[string]any{"Id": cid, "Names": []any{c["Name"]}, "Image": c["Config"].(map[string]any)["Image"],
				"ImageID": c["Image"], "State": "running"})
		}
		f.mu.Unlock()
		_ = json.NewEncoder(w).Encode(list)
	case "inspect":
		f.mu.Lock()
		c, ok := f.containers[strings.Split(path, "/")[2]]
		data, err := json.Marshal(c)
		f.mu.Unlock()
		if err != nil || !ok {
			fail(http.StatusNotFound, "No such container")
			return
		}
		_, _ = w.Write(data)
	case "events":
		lines := make(chan string, 10000)
		f.set(func() { f.streams[lines] = true })
		defer f.set(func() { delete(f.streams, lines) })
		flusher := w.(http.Flusher)
		flusher.Flush()
		for {
			select {
			case <-r.Context().Done():
				return
			case line := <-lines:
				if line == "" {
					return
				}
				fmt.Fprint(w, line)
				flusher.Flush()
			}
		}
	default:
		fail(http.StatusNotFound, "page not found")
	}
}

// less compares API versions; an empty one is no bound.
func less(a, b string) bool {
	var amajor, aminor, bmajor, bminor int
	if n, _ := fmt.Sscanf(a, "%d.%d", &amajor, &aminor); n != 2 {
		return false
	}
	if n, _ := fmt.Sscanf(b, "%d.%d", &bmajor, &bminor); n != 2 {
		return false
	}
	return amajor < bmajor || amajor == bmajor && aminor < bminor
}

// hang answers nothing until the client gives up.
func hang(r *http.Request) bool {
	<-r.Context().Done()
	return true
}

// half promises more than it sends.
func half(w http.ResponseWriter, text string) bool {
	w.Header().Set("Content-Length", fmt.Sprint(len(text)+1000))
	fmt.Fprint(w, text)
	w.(http.Flusher).Flush()
	panic(http.ErrAbortHandler)
}
