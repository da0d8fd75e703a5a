package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/alecthomas/kingpin/v2"

	"gpu-exporter/exporter"
	"gpu-exporter/exporter/containers"
	"gpu-exporter/exporter/history"
	"gpu-exporter/exporter/input"
	"gpu-exporter/exporter/snapshot"
	"gpu-exporter/exporter/view"
)

// unseenError says that the host's GPUs cannot be seen at all, which is not the same as that nothing runs on them.
type unseenError struct{ error }

func (e unseenError) Unwrap() error { return e.error }

// strangerError says that what answers is no gpu-exporter.
type strangerError struct{ error }

// source is where ps and top read: a running exporter, or an exporter of their own in this process.
type source struct {
	remote *remote
	local  *exporter.Exporter
}

// sourceFlags are the flags that name a running exporter.
type sourceFlags struct {
	url, authority *string
	named          bool // by the user
}

const (
	defaultURL  = "http://127.0.0.1:9400"
	urlVariable = "GPU_EXPORTER_URL" // instead of --url: a command line is seen by all
)

// sampled is the help of a command that can do without a running exporter.
const sampled = " When none answers at the default, this host is sampled."

// addSourceFlags adds them to a command; more ends the help of the first.
func addSourceFlags(c *kingpin.CmdClause, more string) *sourceFlags {
	f := &sourceFlags{}
	f.url = c.Flag("url", "A running exporter to read, with USER:PASSWORD@ before the host for basic auth."+more).
		Envar(urlVariable).Default(defaultURL).IsSetByUser(&f.named).String()
	f.authority = c.Flag("url.ca-file", "Certificates, in PEM, of the authority that signed the exporter's; the system's when empty.").PlaceHolder("FILE").String()
	return f
}

// remote returns the running exporter that the flags name; nil: there is a recording instead.
func (f *sourceFlags) remote(cfg exporter.Config) (*remote, error) {
	f.named = f.named || os.Getenv(urlVariable) != ""
	if cfg.Replay != nil && f.named {
		return nil, usageError{errors.New("--url and --replay exclude each other")}
	}
	r, err := newRemote(*f.url, *f.authority)
	if err != nil {
		return nil, usageError{err}
	}
	if cfg.Replay != nil {
		return nil, nil
	}
	return r, nil
}

// open finds the source: the recording of cfg, the running exporter, or this host. What it starts ends with ctx.
func (f *sourceFlags) open(ctx context.Context, cfg exporter.Config) (*source, error) {
	r, err := f.remote(cfg)
	if err != nil {
		return nil, err
	}
	if r != nil {
		err := r.get(ctx, "api/v1/snapshot", &view.Snapshot{})
		if err == nil {
			return &source{remote: r}, nil
		}
		var refused *net.OpError
		if f.named || !errors.As(err, &refused) {
			return nil, unseenError{err}
		}
	}
	cfg.Logger = slog.New(slog.DiscardHandler) // the states of the sources are shown instead
	cfg.Worker.Logger, cfg.Docker.Logger, cfg.Tracer.Logger = cfg.Logger, cfg.Logger, cfg.Logger
	e := exporter.New(cfg)
	go e.Run(ctx) // it fails only in opening a file to record in, and there is none
	return &source{local: e}, nil
}

// snapshot returns what the source has now.
func (s *source) snapshot(ctx context.Context) (*view.Snapshot, error) {
	if s.remote == nil {
		return view.New(s.local.Latest()), nil
	}
	v := &view.Snapshot{}
	return v, s.remote.get(ctx, "api/v1/snapshot", v)
}

const (
	quietTime  = 1500 * time.Millisecond // by then a host that is sampled from scratch has said which processes it has
	settleTime = 8 * time.Second         // by then it has said all it can say
)

// settled waits until a local source has something to show: the processes with their load, that there is none, or why it cannot.
func (s *source) settled(ctx context.Context) error {
	if s.remote != nil {
		return nil
	}
	for start := time.Now(); time.Since(start) < settleTime && !settled(s.local.Latest(), time.Since(start)); {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
	nvml := s.local.Latest().Sources[input.SourceNVML]
	if !nvml.Up {
		return unseenError{fmt.Errorf("no exporter answers at %s, and this host cannot be sampled: %s; gpu-exporter doctor says what to do", defaultURL,
			containers.Cut(nvml.Reason, maxReason))}
	}
	return nil
}

func settled(s *snapshot.Snapshot, after time.Duration) bool {
	if nvml, ok := s.Sources[input.SourceNVML]; ok && !nvml.Up && nvml.Reason != "starting" {
		return true
	}
	quiet := true
	for i := range s.Workloads {
		if w := &s.Workloads[i]; w.Alive && w.PID != 0 {
			if quiet = false; w.Utilization.OK {
				return true
			}
		}
	}
	return quiet && after > quietTime && len(s.Devices) > 0
}

// busiest returns one of a recording's moments with the most processes, and the time up to then: five seconds before the last of them, for at that one
// a process is ending.
func busiest(cfg exporter.Config) (*snapshot.Snapshot, *history.Past) {
	type moment struct {
		snapshot *snapshot.Snapshot
		past     *history.Past
	}
	b, h := snapshot.NewBuilder(cfg.Snapshot), history.New()
	var best []moment
	most := 0
	var next time.Time
	for _, in := range cfg.Replay {
		b.Apply(in)
		at := time.Unix(0, in.Time)
		if at.Before(next) {
			continue
		}
		next = at.Add(time.Second)
		s, n := b.Snapshot(at), 0
		h.Add(view.New(s))
		for i := range s.Workloads {
			if w := &s.Workloads[i]; w.Alive && w.PID != 0 && w.Utilization.OK {
				n++
			}
		}
		if n > most {
			best, most = nil, n
		}
		if n == most {
			best = append(best, moment{s, h.Past()})
			best = best[max(len(best)-6, 0):]
		}
	}
	return best[0].snapshot, best[0].past
}

// remote is a running exporter.
type remote struct {
	base   *url.URL
	client *http.Client
}

func newRemote(address, file string) (*remote, error) {
	base, err := url.Parse(address)
	if err != nil || (base.Scheme != "http" && base.Scheme != "https") || base.Host == "" {
		return nil, fmt.Errorf("--url: %q is not of the form http://HOST:PORT", containers.Clean(address, 100))
	}
	if !strings.HasSuffix(base.Path, "/") {
		base.Path += "/"
	}
	client := &http.Client{Timeout: 5 * time.Second}
	if file != "" {
		pem, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("--url.ca-file: %w", err)
		}
		roots := x509.NewCertPool()
		if !roots.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("--url.ca-file: %s has no certificate", file)
		}
		transport := http.DefaultTransport.(*http.Transport).Clone()
		transport.TLSClientConfig = &tls.Config{RootCAs: roots}
		client.Transport = transport
	}
	return &remote{base: base, client: client}, nil
}

// maxAnswer bounds what is read of an exporter's answer.
const maxAnswer = 64 << 20

// address is where the exporter is, without a password.
func (r *remote) address() string { return strings.TrimSuffix(r.base.Redacted(), "/") }

// refusal is an answer of an exporter that is none.
type refusal struct {
	code               int
	at, status, reason string
}

func (r refusal) Error() string { return fmt.Sprintf("reading %s: %s", r.at, r.status) }

// get reads a path of the exporter, relative to its address, into a view.
func (r *remote) get(ctx context.Context, path string, into any) error {
	at := r.address()
	address, err := r.base.Parse(path)
	if err != nil {
		return fmt.Errorf("reading %s: %w", at, err)
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address.String(), nil)
	if err != nil {
		return fmt.Errorf("reading %s: %w", at, err)
	}
	answer, err := r.client.Do(request)
	if err != nil {
		var u *url.Error
		if errors.As(err, &u) {
			err = u.Err // without the address again
		}
		return fmt.Errorf("no exporter answers at %s: %w", at, err)
	}
	defer answer.Body.Close()
	if answer.StatusCode == http.StatusNotFound {
		return strangerError{fmt.Errorf("reading %s: it is no gpu-exporter, or of another version: %s", at, containers.Clean(answer.Status, 100))}
	}
	b, err := io.ReadAll(io.LimitReader(answer.Body, maxAnswer))
	if err != nil {
		return fmt.Errorf("reading %s: %w", at, err)
	}
	if answer.StatusCode != http.StatusOK {
		return refusal{answer.StatusCode, at, containers.Clean(answer.Status, 100), containers.Clean(strings.TrimSpace(string(b)), 200)}
	}
	if err := json.NewDecoder(bytes.NewReader(b)).Decode(into); err != nil {
		return strangerError{fmt.Errorf("reading %s: it is no gpu-exporter, or of another version: %w", at, err)}
	}
	return nil
}
