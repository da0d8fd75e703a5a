package docker

import (
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"gpu-exporter/exporter/input"
)

func quick(host string) Config {
	return Config{Host: host, Timeout: 300 * time.Millisecond, BackoffMin: 10 * time.Millisecond, BackoffMax: 50 * time.Millisecond}
}

// TestNoDocker starts without Docker in each form, sees one reason and one log line, and then that Docker is picked up.
func TestNoDocker(t *testing.T) {
	tests := []struct {
		name   string
		make   func(t *testing.T, socket string)
		reason string
	}{
		{"absent", func(*testing.T, string) {}, "does not exist"},
		{"regular file", func(t *testing.T, socket string) { write(t, socket) }, "is not a socket"},
		{"directory", func(t *testing.T, socket string) { // what docker run -v makes of a socket that is not there
			if err := os.Mkdir(socket, 0o755); err != nil {
				t.Fatal(err)
			}
		}, "is not a socket"},
		{"nobody listens", func(t *testing.T, socket string) {
			fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer syscall.Close(fd)
			if err := syscall.Bind(fd, &syscall.SockaddrUnix{Name: socket}); err != nil {
				t.Fatal(err)
			}
		}, "nobody listens"},
		{"accepts and is silent", func(t *testing.T, socket string) { serve(t, socket, func(net.Conn) {}) }, "does not answer in time"},
		{"accepts and closes", func(t *testing.T, socket string) {
			serve(t, socket, func(c net.Conn) { c.Close() })
		}, "closed the connection"},
		{"speaks no HTTP", func(t *testing.T, socket string) {
			serve(t, socket, func(c net.Conn) {
				_, _ = c.Read(make([]byte, 1))
				fmt.Fprint(c, "220 mail.example.org ESMTP\x1b[31m\r\n")
				c.Close()
			})
		}, "is not Docker"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := idleFake(t)
			tt.make(t, f.socket)
			s := watch(t, quick(f.host))
			st := s.wait(t, 3*time.Second, "a reason", down(tt.reason))
			if strings.ContainsAny(st.source.Reason, "\x1b\r\n") {
				t.Errorf("control characters in the reason %q", st.source.Reason)
			}
			time.Sleep(800 * time.Millisecond) // several attempts, of the one that is silent too
			if n := s.lines("level=WARN"); n != 1 {
				t.Errorf("%d warnings, want 1:\n%s", n, s.logged())
			}
			if len(st.source.Restarts) != 0 {
				t.Errorf("reconnects %v before the first connection", st.source.Restarts)
			}
			if err := os.RemoveAll(f.socket); err != nil {
				t.Fatal(err)
			}
			f.start("one")
			f.listen(t)
			s.wait(t, 3*time.Second, "picked up", func(st state) bool { return up(st) && has("one")(st) })
		})
	}
}

func write(t *testing.T, path string) {
	t.Helper()
	if err := os.WriteFile(path, nil, 0o644); err != nil {
		t.Fatal(err)
	}
}

// serve listens on a socket until the test ends.
func serve(t *testing.T, socket string, handle func(net.Conn)) {
	t.Helper()
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { c.Close() })
			handle(c)
		}
	}()
}

// TestBadAnswers lets each kind of answer hang, break off and be nonsense, and then be in order again.
func TestBadAnswers(t *testing.T) {
	const half1 = `[{"Id":"`
	for _, kind := range []string{"containers/json", "events", "_ping"} {
		for _, fault := range []struct {
			name   string
			do     func(w http.ResponseWriter, r *http.Request) bool
			reason string
		}{
			{"hang", func(_ http.ResponseWriter, r *http.Request) bool { return hang(r) }, "does not answer in time"},
			{"half", func(w http.ResponseWriter, _ *http.Request) bool { return half(w, half1) }, "broke off"},
			{"garbage", func(w http.ResponseWriter, _ *http.Request) bool { fmt.Fprint(w, "\x00\x1b[31mfoo}{"); return true }, "is not Docker"},
			{"late garbage", func(w http.ResponseWriter, _ *http.Request) bool { // after everything else was answered
				time.Sleep(40 * time.Millisecond)
				fmt.Fprint(w, "foo}{")
				return true
			}, "is not Docker"},
			{"other JSON", func(w http.ResponseWriter, _ *http.Request) bool { fmt.Fprint(w, `"text"`); return true }, "is not Docker"},
			{"error", func(w http.ResponseWriter, _ *http.Request) bool {
				w.WriteHeader(http.StatusServiceUnavailable)
				fmt.Fprint(w, `{"message":"sorry\u001b[31m"}`)
				return true
			}, "sorry"},
		} {
			if kind == "_ping" && fault.name != "hang" { // its body says nothing
				continue
			}
			t.Run(strings.ReplaceAll(kind, "/", "-")+" "+fault.name, func(t *testing.T) {
				f := newFake(t)
				f.start("one")
				s := watch(t, quick(f.host))
				s.wait(t, 3*time.Second, "connected", func(st state) bool { return up(st) && has("one")(st) })
				f.set(func() {
					f.handle = func(w http.ResponseWriter, r *http.Request, k string) bool { return k == kind && fault.do(w, r) }
				})
				f.send("") // ends the event stream, so that all begins anew
				st := s.wait(t, 5*time.Second, "a reason", down(fault.reason))
				if strings.ContainsAny(st.source.Reason, "\x1b\x00\n") {
					t.Errorf("control characters in %q", st.source.Reason)
				}
				time.Sleep(200 * time.Millisecond)
				if n := s.lines(fault.reason); n > 2 { // once; twice where the log quotes it
					t.Errorf("%d lines, want 1:\n%s", n, s.logged())
				}
				s.wait(t, time.Second, "names are kept for a while", has("one"))
				f.set(func() { f.handle = nil })
				s.wait(t, 5*time.Second, "in order again", up)
			})
		}
	}
}

// TestBadInspect sees that a container that cannot be inspected still has its name, and that the others do not suffer.
func TestBadInspect(t *testing.T) {
	for _, tt := range []struct {
		name   string
		do     func(w http.ResponseWriter, r *http.Request) bool
		reason string
	}{
		{"hang", func(_ http.ResponseWriter, r *http.Request) bool { return hang(r) }, "does not answer in time"},
		{"half", func(w http.ResponseWriter, _ *http.Request) bool { return half(w, `{"Id":"`) }, "broke off"},
		{"garbage", func(w http.ResponseWriter, _ *http.Request) bool { fmt.Fprint(w, "foo"); return true }, "is not Docker"},
		{"empty", func(w http.ResponseWriter, _ *http.Request) bool { fmt.Fprint(w, "{}"); return true }, "no container id"},
		{"another", func(w http.ResponseWriter, _ *http.Request) bool { fmt.Fprint(w, `{"Id":"77"}`); return true }, "another container"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFake(t)
			f.start("bad")
			f.start("good")
			f.handle = func(w http.ResponseWriter, r *http.Request, _ string) bool {
				return strings.Contains(r.URL.Path, id("bad")) && tt.do(w, r)
			}
			c := quick(f.host)
			c.Resync = 200 * time.Millisecond
			c.Ping = 100 * time.Millisecond
			s := watch(t, c)
			st := s.wait(t, 3*time.Second, "both", func(st state) bool { return up(st) && has("bad", "good")(st) })
			if c := st.list["bad"]; c.Image != "image-of-bad" || c.Runtime != "" {
				t.Errorf("bad one: %+v", c)
			}
			if c := st.list["good"]; c.Runtime != "runc" {
				t.Errorf("good one: %+v", c)
			}
			if !strings.Contains(st.source.Reason, tt.reason) {
				t.Errorf("reason %q, want %q", st.source.Reason, tt.reason)
			}
			time.Sleep(500 * time.Millisecond)
			if n := s.lines("level=WARN"); n != 1 {
				t.Errorf("%d warnings, want 1:\n%s", n, s.logged())
			}
			f.set(func() { f.handle = nil })
			s.wait(t, 3*time.Second, "in order", func(st state) bool { return st.source.Reason == "" && st.list["bad"].Runtime == "runc" })
		})
	}
}

// TestVersions connects to engines from API 1.24 to ones that refuse old clients.
func TestVersions(t *testing.T) {
	for _, tt := range []struct{ name, api, min, want string }{
		{"before negotiation", "", "", "/v1.24/"},
		{"1.24", "1.24", "1.12", "/v1.24/"},
		{"20.10", "1.41", "1.12", "/v1.41/"},
		{"29", "1.52", "1.44", "/v1.51/"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFake(t)
			f.api, f.minAPI = tt.api, tt.min
			f.start("one")
			s := watch(t, quick(f.host))
			s.wait(t, 3*time.Second, "connected", func(st state) bool { return up(st) && has("one")(st) })
			f.start("two")
			s.wait(t, 3*time.Second, "an event", has("two"))
			f.set(func() {
				for _, r := range f.requests {
					if !strings.Contains(r, tt.want) && !strings.HasSuffix(r, "/_ping") {
						t.Errorf("request %s, want %s", r, tt.want)
					}
					if m, _, _ := strings.Cut(r, " "); m != "GET" && m != "HEAD" {
						t.Errorf("request %s touches", r)
					}
				}
			})
		})
	}
	t.Run("too new", func(t *testing.T) {
		f := newFake(t)
		f.api, f.minAPI = "1.90", "1.80"
		s := watch(t, quick(f.host))
		s.wait(t, 3*time.Second, "a reason", down("client version 1.51 does not fit"))
	})
}

// TestDeadStream sees that an event stream that is open and silent is noticed by what the list says.
func TestDeadStream(t *testing.T) {
	f := newFake(t)
	c := quick(f.host)
	c.Resync, c.Ping, c.StallAfter = 200*time.Millisecond, 100*time.Millisecond, 200*time.Millisecond
	s := watch(t, c)
	s.wait(t, 3*time.Second, "connected", up)
	f.start("told")
	s.wait(t, time.Second, "an event", has("told"))
	f.set(func() { f.mute = true })
	f.start("untold")
	s.wait(t, 3*time.Second, "found by the list", has("untold"))
	s.wait(t, 3*time.Second, "a new stream", func(st state) bool { return st.source.Up && st.source.Restarts[kindStalled] == 1 })
	f.set(func() { f.mute = false })
	f.die("untold")
	s.wait(t, time.Second, "an event of the new stream", hasNot("untold"))
	time.Sleep(time.Second)
	s.wait(t, time.Second, "no reconnection without need", func(st state) bool { return st.source.Up && st.source.Restarts[kindStalled] == 1 })
}

// TestReplaced lets another daemon take the socket while the first still serves its old connections.
func TestReplaced(t *testing.T) {
	f := newFake(t)
	f.start("old")
	c := quick(f.host)
	c.Ping = 100 * time.Millisecond
	s := watch(t, c)
	s.wait(t, 3*time.Second, "connected", func(st state) bool { return up(st) && has("old")(st) })
	if err := os.Rename(f.socket, f.socket+".old"); err != nil {
		t.Fatal(err)
	}
	g := newFake(t)
	g.start("new")
	if err := os.Rename(g.socket, f.socket); err != nil {
		t.Fatal(err)
	}
	s.wait(t, 3*time.Second, "the new daemon's containers", func(st state) bool {
		return up(st) && has("new")(st) && hasNot("old")(st) && st.source.Restarts[kindReplaced] == 1
	})
}

// TestStale sees that a container of which /proc says nothing is forgotten a while after Docker went away.
func TestStale(t *testing.T) {
	f := newFake(t)
	f.start("one")
	c := quick(f.host)
	c.StaleAfter = 500 * time.Millisecond
	s := watch(t, c)
	s.wait(t, 3*time.Second, "connected", func(st state) bool { return up(st) && has("one")(st) })
	f.stop()
	s.wait(t, 2*time.Second, "down", func(st state) bool { return !st.source.Up })
	s.wait(t, time.Second, "still there", has("one"))
	s.wait(t, 2*time.Second, "forgotten", hasNot("one"))
}

// TestHostileNames lets an engine give names of any bytes.
func TestHostileNames(t *testing.T) {
	f := newFake(t)
	f.start("one")
	f.set(func() {
		c := f.containers[id("one")]
		c["Name"] = "/evil\x1b]0;title\x07\n\u202e\u2028name" + strings.Repeat("x", 5000)
		c["Config"] = map[string]any{"Image": "image\r\n\x00", "Labels": map[string]any{"com.docker.compose.project": "p\tq"}}
		c["HostConfig"] = map[string]any{"Runtime": 7} // not what the API says
	})
	s := watch(t, quick(f.host))
	st := s.wait(t, 3*time.Second, "connected", func(st state) bool { return up(st) && len(st.list) == 1 })
	for name, c := range st.list {
		if want := "evil\ufffd]0;title\ufffd\ufffd\ufffd\ufffdname"; !strings.HasPrefix(name, want) || len([]rune(name)) != 256 {
			t.Errorf("name %q", name)
		}
		if c.Image != "image\ufffd\ufffd\ufffd" || c.Project != "p\ufffdq" || c.Runtime != "" {
			t.Errorf("container %+v", c)
		}
	}
}

// TestEventForms sends events of odd forms; none may break the stream.
func TestEventForms(t *testing.T) {
	f := newFake(t)
	s := watch(t, quick(f.host))
	s.wait(t, 3*time.Second, "connected", up)
	f.start("one")
	s.wait(t, time.Second, "started", has("one"))
	f.send("{}\n")
	f.send(`{"Type":"network","Action":"connect","Actor":{"ID":"` + id("one") + `"}}` + "\n")
	f.send(`{"Type":"container","Action":"exec_start: sh -c 'die'","Actor":{"ID":"` + id("one") + `"}}` + "\n")
	f.send(`{"Type":"container","Action":"die","Actor":{"ID":""}}` + "\n")
	f.tell("start", "ghost", nil)                                                                       // there is no such container
	f.tell("die", "one", map[string]any{"timeNano": time.Now().Add(-time.Hour).UnixNano()})             // told again from long ago
	f.tell("pause", "one", nil)                                                                         // still there
	f.send(`{"status":"die","id":"` + id("none") + `","time":` + fmt.Sprint(time.Now().Unix()) + "}\n") // the form of API 1.21
	f.start("two")
	st := s.wait(t, time.Second, "started", has("one", "two"))
	if len(st.list) != 2 {
		t.Errorf("containers %v", st.list)
	}
	f.send(`{"status":"die","id":"` + id("two") + `","time":` + fmt.Sprint(time.Now().Unix()+1) + "}\n")
	s.wait(t, time.Second, "the old form counts", hasNot("two"))
	if n := s.lines("level=WARN"); n != 0 {
		t.Errorf("warnings:\n%s", s.logged())
	}
	f.send(strings.Repeat("x", 2*maxEvent))
	s.wait(t, 5*time.Second, "an endless event", func(st state) bool { return st.source.Restarts[kindGarbage] == 1 })
}

// TestShortLife sees that a container that ends before it can be inspected is emitted all the same.
func TestShortLife(t *testing.T) {
	f := newFake(t)
	s := watch(t, quick(f.host))
	s.wait(t, 3*time.Second, "connected", up)
	for i := range 500 {
		f.tell("start", fmt.Sprint("short", i), nil)
		f.tell("die", fmt.Sprint("short", i), nil)
		f.tell("destroy", fmt.Sprint("short", i), nil)
	}
	f.start("last")
	s.wait(t, 5*time.Second, "the last one, alone", func(st state) bool { return has("last")(st) && len(st.list) == 1 })
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range 500 {
		if !s.seen[fmt.Sprint("short", i)] {
			t.Fatalf("container %d was never emitted", i)
		}
	}
}

// TestAllowed sees that only requests that look are let through.
func TestAllowed(t *testing.T) {
	for _, tt := range []struct {
		method, path string
		want         bool
	}{
		{"GET", "/_ping", true}, {"HEAD", "/_ping", true}, {"GET", "/version", true}, {"GET", "/v1.41/events", true},
		{"GET", "/v1.41/containers/json", true}, {"GET", "/containers/" + id("a") + "/json", true},
		{"POST", "/v1.41/containers/json", false}, {"DELETE", "/v1.41/containers/" + id("a"), false},
		{"GET", "/v1.41/containers/" + id("a") + "/logs", false}, {"GET", "/v1.41/containers/" + id("a") + "/archive", false},
		{"GET", "/v1.41/info", true}, {"POST", "/v1.41/info", false}, {"POST", "/v1.41/containers/create", false}, {"GET", "/v1.41/secrets", false},
		{"PUT", "/_ping", false}, {"GET", "/", false}, {"GET", "/v1.41", false},
	} {
		if got := allowed(tt.method, &url.URL{Path: tt.path}); got != tt.want {
			t.Errorf("%s %s: %v, want %v", tt.method, tt.path, got, tt.want)
		}
	}
}

// TestPermission runs a watcher as another user, who may not connect.
func TestPermission(t *testing.T) {
	if socket := os.Getenv("GPU_EXPORTER_TEST_DENIED"); socket != "" {
		s := watch(t, quick("unix://"+socket))
		s.wait(t, 3*time.Second, "a reason", down("permission denied"))
		time.Sleep(200 * time.Millisecond)
		if n := s.lines("level=WARN"); n != 1 {
			t.Errorf("%d warnings, want 1", n)
		}
		return
	}
	if os.Geteuid() != 0 {
		t.Fatal("root is needed to become another user")
	}
	for _, tt := range []struct {
		name      string
		dir, file os.FileMode
	}{{"socket", 0o755, 0o600}, {"directory", 0o700, 0o666}} {
		t.Run(tt.name, func(t *testing.T) {
			dir, err := os.MkdirTemp("/tmp", "dk")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { os.RemoveAll(dir) })
			socket := filepath.Join(dir, "s")
			serve(t, socket, func(net.Conn) {})
			if err := os.Chmod(socket, tt.file); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(dir, tt.dir); err != nil {
				t.Fatal(err)
			}
			cmd := exec.Command("/proc/self/exe", "-test.run=^TestPermission$", "-test.v")
			cmd.Dir = "/"
			cmd.Env = []string{"GPU_EXPORTER_TEST_DENIED=" + socket}
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
			if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS") {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// TestWrongHost sees that an address that cannot be used is a reason.
func TestWrongHost(t *testing.T) {
	for host, reason := range map[string]string{
		"ssh://root@host":     "only unix:// and tcp:// are supported",
		"nonsense":            "want unix:///path or tcp://host:port",
		"tcp://127.0.0.1:1":   "nobody listens",
		"unix:///nowhere/s":   "does not exist",
		"/also/nowhere":       "does not exist",
		"unix:///dev/null/no": "does not exist",
	} {
		t.Run(host, func(t *testing.T) {
			s := watch(t, quick(host))
			s.wait(t, 3*time.Second, "a reason", down(reason))
		})
	}
}

// TestTCP follows an engine over TCP.
func TestTCP(t *testing.T) {
	f := newFake(t)
	f.start("one")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: f}
	go func() { _ = server.Serve(l) }()
	t.Cleanup(func() { server.Close() })
	s := watch(t, quick("tcp://"+l.Addr().String()))
	s.wait(t, 3*time.Second, "connected", func(st state) bool { return up(st) && has("one")(st) })
	f.die("one")
	s.wait(t, time.Second, "gone", hasNot("one"))
}

// TestNothingLeft runs containers through one session and looks into its maps.
func TestNothingLeft(t *testing.T) {
	f := newFake(t)
	w := New(Config{Host: f.host, Resync: 100 * time.Millisecond, Ping: 50 * time.Millisecond, Logger: slog.New(slog.DiscardHandler)})
	w.emit = func(input.Input) {}
	var used *session
	w.watchSession = func(s *session) { used = s }
	ended := make(chan error)
	go func() { ended <- w.session(t.Context()) }()
	for i := range 200 {
		f.start(fmt.Sprint("c", i))
	}
	for i := range 200 {
		if i%3 == 0 {
			f.tell("rename", fmt.Sprint("c", i), nil)
		}
		f.die(fmt.Sprint("c", i))
		f.tell("destroy", fmt.Sprint("c", i), nil)
	}
	time.Sleep(time.Second)
	f.stop()
	<-ended
	sizes := []int{len(w.known), len(used.pending), len(used.told), len(used.born), len(used.failed), len(used.heard), len(used.missed), len(used.first)}
	if slices.Max(sizes) != 0 {
		t.Errorf("left in the maps known, pending, told, born, failed, heard, missed, first: %v", sizes)
	}
}
