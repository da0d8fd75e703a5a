package worker

import (
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"

	"gpu-exporter/nvml/frame"
)

func TestLines(t *testing.T) {
	long := strings.Repeat("x", 100)
	for _, c := range []struct {
		name, in string
		want     []string
	}{
		{"nothing", "", nil},
		{"two", "a\nb\n", []string{"a", "b"}},
		{"half a line at the end", "a\nb", []string{"a"}},
		{"empty line", "\na\n", []string{"", "a"}},
		{"longer than the buffer", strings.Repeat("y", 40) + "\nb\n", []string{strings.Repeat("y", 40), "b"}},
		{"just as long as allowed", strings.Repeat("y", 63) + "\nb\n", []string{strings.Repeat("y", 63), "b"}},
		{"too long", long + "\nb\n", []string{"!", "b"}},
		{"too long twice", long + "\n" + long + "\nb\n", []string{"!", "!", "b"}},
		{"too long and no end", long, []string{"!"}},
		{"no end for very long", strings.Repeat("x", 2300), []string{"!", "!", "!"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := newLines(strings.NewReader(c.in), 16, 64)
			var got []string
			for {
				line, err := l.next()
				if errors.Is(err, errTooLong) {
					got = append(got, "!")
					continue
				}
				if err != nil {
					if err != io.EOF {
						t.Fatal(err)
					}
					break
				}
				got = append(got, string(line))
			}
			if strings.Join(got, "|") != strings.Join(c.want, "|") || len(got) != len(c.want) {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

func TestDecode(t *testing.T) {
	for _, c := range []struct {
		name, line string
		want       string // of the error; empty: a frame
	}{
		{"library", `{"v":1,"time":5,"library":{"ok":true,"devices":2}}`, ""},
		{"device", `{"v":1,"time":5,"device":{"index":3,"state":"ok","load":{"power":12.5}}}`, ""},
		{"unknown fields", `{"v":1,"time":5,"device":{"index":3,"state":"ok","new":[1]},"more":{}}`, ""},
		{"null value is absent", `{"v":1,"time":5,"device":{"index":3,"state":"ok","load":{"power":null}}}`, ""},
		{"newer version", `{"v":2,"time":5,"library":{"ok":true}}`, "format version 2, this exporter reads 1"},
		{"newer version of another shape", `{"v":2,"library":"yes"}`, "format version 2, this exporter reads 1"},
		{"no version", `{"time":5,"library":{"ok":true}}`, "says nothing"},
		{"no time", `{"v":1,"library":{"ok":true}}`, "says nothing"},
		{"nothing in it", `{"v":1,"time":5}`, "says nothing"},
		{"index below zero", `{"v":1,"time":5,"device":{"index":-1,"state":"ok"}}`, "says nothing"},
		{"index beyond reason", `{"v":1,"time":5,"device":{"index":100000000,"state":"ok"}}`, "says nothing"},
		{"no state", `{"v":1,"time":5,"device":{"index":1}}`, "says nothing"},
		{"not a number", `{"v":1,"time":5,"device":{"index":1,"state":"ok","load":{"power":NaN}}}`, "not a frame"},
		{"wrong type", `{"v":1,"time":5,"device":{"index":1,"state":"ok","load":{"power":"12"}}}`, "not a frame"},
		{"empty", ``, "not a frame"},
		{"half", `{"v":1,"time":5,"dev`, "not a frame"},
		{"two in one line", `{"v":1,"time":5,"library":{"ok":true}}{"v":1}`, "not a frame"},
		{"text", `nvidia-modprobe: not found`, "not a frame"},
		{"null", `null`, "says nothing"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f, err := decode([]byte(c.line))
			if c.want == "" {
				if err != nil || f == nil {
					t.Fatalf("refused: %v", err)
				}
				if f.Device != nil && f.Device.Load != nil && f.Device.Load.Power.OK != strings.Contains(c.line, "12.5") {
					t.Errorf("power %+v", f.Device.Load.Power)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want %q", err, c.want)
			}
		})
	}
}

// Whatever a worker prints, reading it neither panics nor lets an impossible frame through, and what is accepted survives being written
// and read again.
func FuzzFrames(f *testing.F) {
	f.Add([]byte(`{"v":1,"time":5,"library":{"ok":true,"devices":2}}` + "\n" + `{"v":1,"time":6,"device":{"index":0,"state":"ok","load":{"power":1e3}}}` + "\n"))
	f.Add([]byte("\x00\xff\n{}\n\n{\"v\":1"))
	f.Add([]byte(`{"v":1,"time":1,"events":[{"time":1,"kind":"xid","value":79}]}` + "\n" + strings.Repeat("z", 5000) + "\n"))
	f.Add([]byte(`{"v":1,"time":1,"device":{"index":7,"uuid":"GPU-\ud800","state":"lost","samples":{"process":[{"pid":1,"t":2,"sm":3}]}},"calls":[{"name":"n","n":1,"s":0.1,"buckets":[1]}]}` + "\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		l := newLines(strings.NewReader(string(b)), 64, 4096)
		for {
			line, err := l.next()
			if errors.Is(err, errTooLong) {
				continue
			}
			if err != nil {
				return
			}
			if len(line) > 4096 || strings.Contains(string(line), "\n") {
				t.Fatalf("a line of %d bytes", len(line))
			}
			fr, err := decode(line)
			if err != nil {
				if fr != nil {
					t.Fatal("a frame beside an error")
				}
				continue
			}
			if fr.Version != frame.Version || fr.Time <= 0 {
				t.Fatalf("accepted %+v", fr)
			}
			again, err := decode(encode(t, fr))
			if err != nil || string(encode(t, again)) != string(encode(t, fr)) {
				t.Fatalf("%s does not survive: %v", line, err)
			}
		}
	})
}

func encode(t *testing.T, f *frame.Frame) []byte {
	b, err := json.Marshal(f)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
