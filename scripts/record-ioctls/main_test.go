package main

import (
	"compress/gzip"
	"context"
	"encoding/json"
	"io"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-exporter/nvml/fake"
)

// TestRecord records real ioctls of this process on /dev/null, whose major is 1.
func TestRecord(t *testing.T) {
	name := t.TempDir() + "/test"
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	go func() {
		for ctx.Err() == nil {
			_ = unix.IoctlSetPointerInt(int(null.Fd()), 0xc0044600, 0x11223344) // fails: the device knows no calls
			time.Sleep(10 * time.Millisecond)
		}
	}()
	if err := record(ctx, name, 0, "", "1"); err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(name + ".ioctl.jsonl.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	unzipped, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for lines := json.NewDecoder(unzipped); ; {
		var c call
		if err := lines.Decode(&c); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if c.Cmd == "0xc0044600" && int(c.TGID) == os.Getpid() {
			found++
			if c.Ret != -int64(unix.ENOTTY) || c.Rdev != "1:3" || !strings.HasPrefix(c.In, "44332211") || !strings.HasPrefix(c.Out, "44332211") || c.TS == 0 || len(c.Out) != 384 || len(c.Deep) != 320 {
				t.Fatalf("%+v", c)
			}
		}
	}
	if found < 10 {
		t.Errorf("%d calls recorded", found)
	}
}

func TestMajors(t *testing.T) {
	if got, err := deviceMajors("1,10"); err != nil || len(got) < 3 || got[0] != 195 {
		t.Errorf("%v, %v", got, err)
	}
	for _, text := range []string{"x", "1,-2", "99999"} {
		if _, err := deviceMajors(text); err == nil {
			t.Errorf("%q: no error", text)
		}
	}
}

// TestPoll: NVML's word on a process is written with each reading.
func TestPoll(t *testing.T) {
	gpu := fake.H200(0)
	gpu.Processes = []fake.Process{{PID: os.Getpid(), Memory: 3 << 30}}
	h := fake.Install(t, fake.Scenario{GPUs: []fake.GPU{gpu, fake.H200(1)}})
	path := t.TempDir() + "/nvml.jsonl"
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	var readings atomic.Int64
	if err := poll(ctx, path, h.Library, 50*time.Millisecond, &readings); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	if len(lines) < 5 || int64(len(lines)) != readings.Load() {
		t.Fatalf("%d lines, %d readings", len(lines), readings.Load())
	}
	for _, l := range lines {
		var p checkpoint
		if err := json.Unmarshal([]byte(l), &p); err != nil {
			t.Fatal(err)
		}
		if p.Procs[strconv.Itoa(os.Getpid())] != 3<<30 || p.T1 < p.T0 {
			t.Errorf("%s", l)
		}
	}
}
