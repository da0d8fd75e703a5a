package main

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// engine serves a Docker API of a few lines on a socket of its own and returns the socket's path. containers are the answers to inspect;
// answer, if not nil, may answer a request instead, and then returns true.
func engine(t *testing.T, containers []map[string]any, answer func(w http.ResponseWriter, r *http.Request, path string) bool) string {
	t.Helper()
	return listen(t, func(l net.Listener) {
		http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			path := r.URL.Path
			if strings.HasPrefix(path, "/v1.") {
				path = path[strings.Index(path[1:], "/")+1:]
			}
			if answer != nil && answer(w, r, path) {
				return
			}
			switch {
			case path == "/_ping":
				w.Header().Set("Api-Version", "1.47")
			case path == "/events":
				w.(http.Flusher).Flush()
				<-r.Context().Done()
			case path == "/containers/json":
				list := []map[string]any{}
				for _, c := range containers {
					list = append(list, map[string]any{"Id": c["Id"], "Names": []any{c["Name"]}, "Image": "image", "State": "running"})
				}
				json.NewEncoder(w).Encode(list)
			default:
				for _, c := range containers {
					if strings.Contains(path, c["Id"].(string)) {
						json.NewEncoder(w).Encode(c)
						return
					}
				}
				http.Error(w, `{"message":"no such container"}`, http.StatusNotFound)
			}
		}))
	})
}

// listen serves a unix socket that anyone may connect to.
func listen(t *testing.T, serve func(net.Listener)) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "engine") // short: a socket's path has 107 bytes at most
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	path := filepath.Join(dir, "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go serve(l)
	return path
}

// inspected is what the engine says of a running container that may use every GPU.
func inspected(id, name string) map[string]any {
	return map[string]any{"Id": id, "Name": "/" + name, "Image": "sha256:1234", "Config": map[string]any{"Image": "image"},
		"State": map[string]any{"Running": true, "Pid": 999999999, "StartedAt": "2026-01-01T00:00:00Z"},
		"HostConfig": map[string]any{"Runtime": "runc", "DeviceRequests": []any{
			map[string]any{"Driver": "", "Count": -1, "Capabilities": [][]string{{"gpu"}}}}}}
}

// silent is a socket that accepts connections and never answers.
func silent(t *testing.T) string {
	t.Helper()
	return listen(t, func(l net.Listener) {
		var kept []net.Conn
		for {
			c, err := l.Accept()
			if err != nil {
				break
			}
			kept = append(kept, c)
		}
		for _, c := range kept {
			c.Close()
		}
	})
}

// id makes a container id.
func id(n int) string { return fmt.Sprintf("%064x", n) }
