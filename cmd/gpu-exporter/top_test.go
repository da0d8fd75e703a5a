package main

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestTopPlain: when the output is no terminal, top writes text and no escape sequence.
func TestTopPlain(t *testing.T) {
	p := start(t, "--replay=demo")
	p.until(t, 30*time.Second, "a process", func(s scrape) bool { return len(s.find("gpu_memory_used_bytes", "container_name", "notebook")) == 1 })
	r := ran(t, "top", "--url=http://"+p.address, "--count=2", "--interval=100ms")
	if r.code != 0 || strings.Count(r.stdout, "NVIDIA H200") != 2 || strings.Count(r.stdout, "a8067bc45d21") != 2 || strings.Contains(r.stdout, "\x1b") {
		t.Errorf("%+v", r)
	}
	ran(t, "top", "--url=http://127.0.0.1:1").oneLine(t, 2, "no exporter answers")
	ran(t, "top", "--interval=0s").oneLine(t, 2, "--interval")
	p.stop(t)
}

// TestTopTerminal: in a terminal of 80 columns it draws the table with history, and q ends it.
func TestTopTerminal(t *testing.T) {
	p := start(t, "--replay=demo")
	p.until(t, 30*time.Second, "a process", func(s scrape) bool { return len(s.find("gpu_memory_used_bytes", "container_name", "notebook")) == 1 })
	master, slave := pty(t)
	cmd := exec.Command(program(t), "top", "--url=http://"+p.address)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.Env = append(os.Environ(), "TERM=xterm-256color", "LC_ALL=C.UTF-8")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	slave.Close()
	t.Cleanup(func() { cmd.Process.Kill() })
	var screen lockedBuffer
	go func() {
		b := make([]byte, 4096)
		for {
			n, err := master.Read(b)
			if err != nil {
				return
			}
			screen.Write(b[:n])
		}
	}()
	for until := time.Now().Add(15 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		s := screen.String()
		if strings.Contains(s, "notebook") && strings.Contains(s, "10 MIN") && strings.Contains(s, "q quit") {
			break
		}
		if time.Now().After(until) {
			t.Fatalf("%q", s)
		}
	}
	fmt.Fprint(master, "q")
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("q: %v", err)
		}
	case <-time.After(5 * time.Second):
		t.Error("q does not end it")
	}
	p.stop(t)
}

// pty returns a terminal of 80 columns.
func pty(t *testing.T) (master, slave *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	fd := int(master.Fd())
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: 80}); err != nil {
		t.Fatal(err)
	}
	slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { master.Close(); slave.Close() })
	return master, slave
}
