package main

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/alecthomas/kingpin/v2"
)

// right are the flags of which no value is wrong: any text, and what is a state of the host and not of the command line.
var right = map[string]string{
	"nvml.worker": "a state: it may come", "nvml.library": "a state: it may come", "driver-root": "a state: it may be mounted", "proc": "a state: it may be mounted",
	"filter": "any text",
}

// wrong are values of flags that are refused, and what is said of them.
var wrong = map[string][][2]string{
	"nvml.interval":      {{"foo", durations}, {"", durations}, {"5", durations}, {"1ms", "must be from 10ms to 1h0m0s, not 1ms"}, {"-1s", "must be from"}, {"9h", "must be from"}},
	"nvml.gpm-fast":      {{"foo", durations}, {"1ms", "must be from 10ms to 1h0m0s, not 1ms"}, {"-1s", "must be from"}},
	"window":             {{"foo", durations}, {"0s", "must be from 1s to 1h0m0s, not 0s"}, {"2d", "must be from"}},
	"linger":             {{"1x", durations}, {"-1s", "must be from 0s to 24h0m0s, not -1s"}, {"2d", "must be from"}},
	"interval":           {{"foo", durations}, {"1ms", "must be from 100ms to 1h0m0s, not 1ms"}},
	"for":                {{"foo", durations}, {"0s", "must be from 1s to 10m0s, not 0s"}, {"11m", "must be from"}},
	"count":              {{"x", numbers}, {"-1", numbers}, {"1.5", numbers}, {"", numbers}},
	"metrics.max-series": {{"x", numbers}, {"-1", numbers}, {"1e9", numbers}, {"99999999999999999999", numbers}},
	"docker.host":        {{"ftp://x", "only unix:// and tcp://"}, {"x", "want unix:///path"}, {"", "must not be empty"}},
	"proc":               {{"", "must not be empty"}},
	"driver-root":        {{"", "must not be empty"}},
	"host-ip":            {{"here", "is not an IP address"}, {"10.0.0.1:80", "is not an IP address"}, {"10.0.0.0/8", "is not an IP address"}, {"\x1b[2J", `"\x1b[2J" is not an IP address`}},
	"tracer":             {{"foo", `must be one of auto, fentry, tracepoint, off, not "foo"`}, {"", "must be one of"}},
	"probe":              {{"yes", `must be one of on, off, not "yes"`}},
	"sort":               {{"foo", `must be one of gpu, util, max, mem, name, pid, age, not "foo"`}},
	"metrics.processes":  {{"some", `must be one of true, false, not "some"`}},
	"log.level":          {{"foo", `must be one of debug, info, warn, error, not "foo"`}},
	"log.format":         {{"foo", `must be one of logfmt, json, not "foo"`}},
	"tracer.devices":     {{"1", "is not of the form MAJOR:MINOR=NODE"}},
	"metrics.include":    {{"(", "missing closing )"}},
	"metrics.exclude":    {{"[", "missing closing ]"}},
	"replay":             {{"/no/such/file", "no such file"}, {"/etc/passwd", "reading the recording"}, {"/", "is a directory"}},
	"record":             {{"/no/such/file", "no such file"}, {"/", "is a directory"}},
	"url":                {{"nonsense", "not of the form http://HOST:PORT"}, {"", "must not be empty"}, {"ftp://x", "not of the form"}, {"http://%zz", "not of the form"}},
	"url.ca-file":        {{"/no/such", "no such file"}, {"/etc/passwd", "has no certificate"}},
	"web.telemetry-path": {{"metrics", "is not a path such as /metrics"}, {"/{x", "is not a path"}, {"/a b", "is not a path"}, {"/a/../b", "is not a path"}, {"/a?b", "is not a path"},
		{"", "must not be empty"}, {"/api/v1/snapshot", "is a path of the exporter's own"}, {"/-/ready", "own"}, {"/page.js", "own"}, {"/api", "own"}},
	"web.listen-address": {{"foo", "is not of the form HOST:PORT or :PORT"}, {"127.0.0.1:99999", "has no port"}, {"127.0.0.1:", "has no port"}, {":x", "has no port"},
		{"::1", "is not of the form"}, {"", "must not be empty"}, {"vsock://x", "is not of the form"}, {"vsock://:x", "has no port"}},
	"web.config.file": {{"/no/such/file", "no such file"}, {"/", "is a directory"}, {"/etc/passwd", "cannot unmarshal"}},
	"root":            {{"/no/such", "is not a directory"}, {"/etc/passwd", "is not a directory"}, {"", "must not be empty"}},
}

const (
	durations = "is not a duration, such as 500ms, 60s or 2m"
	numbers   = "is not a whole number from 0 on"
)

// TestWrongFlags: each wrong value of each flag of each command is one line that names the flag and says what is wrong, and exit code 2.
func TestWrongFlags(t *testing.T) {
	m := commandLine(t)
	seen := map[string]bool{}
	check := func(f *kingpin.FlagModel, command string) {
		seen[f.Name] = true
		if f.IsBoolFlag() {
			if f.Name == "help" || f.Name == "version" || strings.HasPrefix(f.Name, "help-") || strings.HasPrefix(f.Name, "completion-") {
				return
			}
			for _, arg := range []string{"--" + f.Name + "=yes", "--no-" + f.Name + "=no"} {
				ran(t, arguments(command, arg)...).oneLine(t, 2, "gpu-exporter: --"+f.Name+" takes no value: --"+f.Name+" sets it, --no-"+f.Name+" clears it")
			}
			return
		}
		if len(wrong[f.Name]) == 0 && right[f.Name] == "" {
			t.Errorf("nothing is known of wrong values of --%s", f.Name)
		}
		for _, w := range wrong[f.Name] {
			r := ran(t, arguments(command, "--"+f.Name+"="+w[0])...)
			r.oneLine(t, 2, w[1])
			r.oneLine(t, 2, "gpu-exporter: --"+f.Name)
			if strings.Contains(r.stderr, "\x1b") {
				t.Errorf("%q", r.stderr)
			}
		}
	}
	for _, f := range m.Flags {
		check(f, "serve")
	}
	for _, c := range m.FlattenedCommands() {
		for _, f := range c.Flags {
			check(f, c.FullCommand)
		}
	}
	for name := range wrong {
		if !seen[name] {
			t.Errorf("there is no --%s", name)
		}
	}
}

// arguments are those of a command with a flag, and with the arguments that it must have.
func arguments(command, flag string) []string {
	args := append(strings.Fields(command), flag)
	switch command {
	case "why":
		args = append(args, "nobody")
	case "assets export":
		args = append(args, "/no/such")
	}
	return args
}

// TestWrongArguments: what is no flag, no command or one too many is one line too.
func TestWrongArguments(t *testing.T) {
	for _, tt := range []struct{ args, says string }{
		{"--no-such-flag", "unknown long flag '--no-such-flag'; see gpu-exporter serve --help"},
		{"ps --count=1", "unknown long flag '--count'; see gpu-exporter ps --help"},
		{"--no-window", "unknown long flag '--no-window'"},
		{"-x", "unknown short flag '-x'"},
		{"pss", `unexpected argument "pss"; see gpu-exporter`},
		{"ps extra", `unexpected argument "extra"; see gpu-exporter ps --help`},
		{"help pss", `unexpected argument "pss"`},
		{"help assets lost", `expected command but got "lost"`},
		{"assets", "must select a subcommand of 'assets'"},
		{"assets lost", `expected command but got "lost"`},
		{"why", "required argument 'container' not provided; see gpu-exporter why --help"},
		{"ps --url", "expected argument for flag '--url'; see gpu-exporter ps --help"},
		{"ps --sort=gpu --sort=pid", "flag 'sort' cannot be repeated; see gpu-exporter ps --help"},
		{"ps --url=http://127.0.0.1:1 --replay=demo", "--url and --replay exclude each other"},
		{"@/no/such", "no such file"},
	} {
		ran(t, strings.Fields(tt.args)...).oneLine(t, 2, tt.says)
	}
	t.Setenv(urlVariable, "nonsense")
	ran(t, "ps").oneLine(t, 2, "--url: \"nonsense\" is not of the form")
}

// TestCannotListen: a right address that cannot be listened at is one line and exit code 1, and nothing is begun: a recording stays as it was.
func TestCannotListen(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	old := filepath.Join(t.TempDir(), "old")
	if err := os.WriteFile(old, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	at := taken.Addr().String()
	ran(t, "--web.listen-address="+at, "--record="+old).oneLine(t, 1, "gpu-exporter: --web.listen-address: listen tcp "+at+": bind: address already in use; --web.listen-address=:9401 takes another port\n")
	ran(t, "--web.listen-address=192.0.2.1:80").oneLine(t, 1, "gpu-exporter: --web.listen-address: listen tcp 192.0.2.1:80: bind: cannot assign requested address\n")
	r := ran(t, "--web.systemd-socket")
	if r.code != 1 || !strings.HasSuffix(r.stderr, "gpu-exporter: --web.systemd-socket: no socket activation file descriptors found\n") {
		t.Errorf("%+v", r)
	}
	if b, err := os.ReadFile(old); err != nil || string(b) != "precious" {
		t.Errorf("the recording is now %q, %v", b, err)
	}
}

// TestHelp: the help of a command fits on a screen, and has its own flags and no others; that of the program has every command and the flags of all.
func TestHelp(t *testing.T) {
	m := commandLine(t)
	has := func(text string, f *kingpin.FlagModel) bool {
		return strings.Contains(text, "--"+f.Name+"=") || strings.Contains(text, "--[no-]"+f.Name+" ")
	}
	all := ran(t, "--help")
	if all.code != 0 || all.stderr != "" || !strings.HasPrefix(all.stdout, "usage: gpu-exporter [COMMAND] [FLAGS]\n") {
		t.Errorf("%+v", all)
	}
	for _, c := range m.FlattenedCommands() {
		if !strings.Contains(all.stdout, "\n  "+c.FullCommand+" ") {
			t.Errorf("--help does not have the command %s", c.FullCommand)
		}
		if c.Name == "help" {
			continue
		}
		r := ran(t, append(strings.Fields(c.FullCommand), "--help")...)
		if n := strings.Count(r.stdout, "\n"); r.code != 0 || r.stderr != "" || !strings.HasPrefix(r.stdout, "usage: gpu-exporter "+c.FullCommand) || n > 45 {
			t.Errorf("%s --help has %d lines: %+v", c.FullCommand, n, r)
		}
		if other := ran(t, append([]string{"help"}, strings.Fields(c.FullCommand)...)...); other != r {
			t.Errorf("help %s: %+v", c.FullCommand, other)
		}
		for _, f := range c.Flags {
			if !has(r.stdout, f) {
				t.Errorf("%s --help does not have --%s", c.FullCommand, f.Name)
			}
		}
		for _, f := range m.Flags {
			if has(r.stdout, f) {
				t.Errorf("%s --help has --%s", c.FullCommand, f.Name)
			}
		}
	}
	for _, f := range m.Flags {
		if hidden := f.Hidden || f.Name == "help-long"; has(all.stdout, f) == hidden {
			t.Errorf("--help: --%s: %v", f.Name, !hidden)
		}
	}
}

// TestVersion: what the build did not tell is left out.
func TestVersion(t *testing.T) {
	r := ran(t, "--version")
	if r.code != 0 || !strings.HasPrefix(r.stdout, "gpu-exporter, version ") || !strings.Contains(r.stdout, "\n  go version:  go1.") {
		t.Errorf("%+v", r)
	}
	for _, line := range strings.Split(strings.TrimSpace(r.stdout), "\n") {
		if _, value, _ := strings.Cut(line, ":"); strings.HasPrefix(line, " ") && (strings.TrimSpace(value) == "" || strings.Contains(value, "unknown")) {
			t.Errorf("%q says nothing", line)
		}
	}
}

// TestOneLine: errors of several lines, as those of YAML, become one.
func TestOneLine(t *testing.T) {
	if got := oneLine(errors.New("yaml: errors:\n  line 1: x\n")).Error(); got != "yaml: errors: line 1: x" {
		t.Error(got)
	}
}
