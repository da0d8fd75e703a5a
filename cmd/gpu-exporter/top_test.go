package main

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestTop: when the output is no terminal, top writes text and no escape sequence; and it draws in any terminal.
func TestTop(t *testing.T) {
	p := start(t, "--replay=demo")
	p.until(t, 30*time.Second, "a process", func(s scrape) bool { return len(s.find("gpu_memory_used_bytes", "container_name", "notebook")) == 1 })
	r := ran(t, "top", "--url=http://"+p.address, "--count=2", "--interval=100ms")
	if r.code != 0 || strings.Count(r.stdout, "NVIDIA H200") != 2 || strings.Count(r.stdout, "a8067bc45d21") != 2 || strings.Contains(r.stdout, "\x1b") {
		t.Errorf("%+v", r)
	}
	ran(t, "top", "--url=http://127.0.0.1:1").oneLine(t, 2, "no exporter answers")
	topTerminal(t, p)
}

// topTerminal: in any terminal it draws the table, and q ends it: in 80 columns with history, in 40 without, without UTF-8, without colour, and on
// terminals that it does not know by name. An exporter that goes is said, above what was last seen.
func topTerminal(t *testing.T, p *process) {
	t.Helper()
	for _, tt := range []struct {
		columns    uint16
		env, shown string
	}{
		{80, "LC_ALL=C TERM=vt100", "10 MIN"},
		{40, "LC_ALL=C TERM=linux", "MEMORY"},
		{40, "LC_ALL=C.UTF-8 TERM=no-such-terminal NO_COLOR=1", "recording"},
		{80, "LC_ALL=C.UTF-8 TERM=xterm-256color NO_COLOR=1", "10 MIN"}, // the last one: it sees the exporter go
	} {
		master, slave := pty(t, tt.columns)
		cmd := exec.Command(program(t), "top", "--url=http://"+p.address, "--interval=200ms")
		cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
		cmd.Env = append(os.Environ(), strings.Fields(tt.env)...)
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
		until := func(words ...string) {
			t.Helper()
			for end := time.Now().Add(15 * time.Second); ; time.Sleep(50 * time.Millisecond) {
				s := screen.String()
				if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(s, w) }) {
					return
				}
				if time.Now().After(end) {
					t.Fatalf("%s: %q", tt.env, s)
				}
			}
		}
		until("notebook", "q quit", tt.shown)
		if strings.Contains(tt.env, "xterm") {
			p.stop(t)
			for i, end := 0, time.Now().Add(15*time.Second); !strings.Contains(screen.String(), "no exporter answers") && time.Now().Before(end); i++ {
				resize(t, master, tt.columns+uint16(i%2)) // so that all is drawn anew, and not what changed
				time.Sleep(200 * time.Millisecond)
			}
			until("no exporter answers")
		}
		if s := screen.String(); strings.Contains(tt.env, "LC_ALL=C ") && strings.ContainsFunc(s, func(r rune) bool { return r > 126 }) {
			t.Errorf("%s: more than ASCII: %q", tt.env, s)
		} else if strings.Contains(tt.env, "NO_COLOR") && colour.MatchString(s) {
			t.Errorf("%s: colour: %q", tt.env, colour.FindString(s))
		}
		fmt.Fprint(master, "q")
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("%s: q: %v", tt.env, err)
			}
		case <-time.After(20 * time.Second):
			t.Errorf("%s: q does not end it", tt.env)
		}
	}
}

// colour is the sequence that sets the colour of text.
var colour = regexp.MustCompile(`\x1b\[(\d+;)*(3[0-8]|9[0-7])[;m]`)

// pty returns a terminal of 24 rows.
func pty(t *testing.T, columns uint16) (master, slave *os.File) {
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
	resize(t, master, columns)
	slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { master.Close(); slave.Close() })
	return master, slave
}

// resize gives a terminal another width, which its program is told.
func resize(t *testing.T, master *os.File, columns uint16) {
	t.Helper()
	if err := unix.IoctlSetWinsize(int(master.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: columns}); err != nil {
		t.Fatal(err)
	}
}
