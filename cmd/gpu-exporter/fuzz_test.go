package main

import (
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/alecthomas/kingpin/v2"

	"gpu-exporter/exporter"
	"gpu-exporter/exporter/docker"
)

// FuzzFlags gives the command line two arguments of any text: they are understood or refused, in words.
func FuzzFlags(f *testing.F) {
	f.Add("--nvml.interval=1s", "ps")
	f.Add("--tracer.devices=1:7=gpu", "--window=0s")
	f.Add("tcp://[::1", "1:99999999=gpu")
	f.Add("[::1]:999", "4096:*=")
	f.Add("--", "\x00")
	f.Fuzz(func(t *testing.T, a, b string) {
		for _, s := range []string{a, b} {
			if d, err := tracedDevices([]string{s}); err == nil && (len(d) != 1 || d[0].Major >= 4096 || d[0].Minor >= 1<<20) {
				t.Errorf("devices %+v", d)
			}
			if err := docker.CheckHost(s); err != nil && err.Error() == "" {
				t.Errorf("%q is refused without a word", s)
			}
			if n := len(needed(exporter.Config{}, []string{s})); n < 7 || n > 8 {
				t.Errorf("to listen at %q it needs %d capabilities", s, n)
			}
			if strings.HasPrefix(s, "@") {
				return // the name of a file with arguments
			}
		}
		parsed := errors.New("understood")
		err := run([]string{a, b}, func(app *kingpin.Application, args []string) (string, error) {
			app.Terminate(func(int) {}).UsageWriter(io.Discard).ErrorWriter(io.Discard)
			if _, err := parseArgs(app, args); err != nil {
				return "", err
			}
			return "", parsed
		})
		if err == nil || err.Error() == "" {
			t.Errorf("%q %q: %v", a, b, err)
		}
	})
}
