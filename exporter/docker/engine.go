package docker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/events"
	"github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/client"

	"gpu-exporter/exporter/containers"
)

// This is the only file that knows github.com/docker/docker: upstream has frozen that module in favour of moby/moby/client, and
// whoever changes over changes this file.

// engine is what the watcher needs of a container engine.
type engine interface {
	// list returns the running containers, with what identifies them only.
	list(ctx context.Context) ([]containers.Container, error)
	// inspect returns the engine's answer about one container, undecoded; errNoContainer where there is none.
	inspect(ctx context.Context, id string) ([]byte, error)
}

// stream is an engine that also tells what happens.
type stream interface {
	engine
	// ping asks for a sign of life.
	ping(ctx context.Context) error
	// events delivers what happens to containers from since on until the context ends or the stream breaks; then errs gets the reason.
	events(ctx context.Context, since time.Time) (messages <-chan event, errs <-chan error)
	close()
}

// event is something that happened to one container.
type event struct {
	id     string
	action string // "start", "die", "rename" and so on
	time   time.Time
	about  map[string]string // name and image of the container after the event, and its labels
}

// container returns what the event says of its container.
func (e event) container() containers.Container {
	return containers.Named(e.id, e.about["name"], e.about["image"], "", e.about)
}

// errNoContainer is returned by inspect for a container that does not exist.
var errNoContainer = errors.New("no such container")

// api is an engine reached through the Docker API.
type api struct {
	client    *client.Client
	transport *http.Transport
}

// CheckHost tells whether an engine's address is of a form that can be used.
func CheckHost(host string) error {
	if strings.HasPrefix(host, "/") || host == "" {
		return nil
	}
	u, err := client.ParseHostURL(host)
	if err != nil {
		return fmt.Errorf("docker host %q: want unix:///path or tcp://host:port", host)
	}
	if u.Scheme != "unix" && u.Scheme != "tcp" && u.Scheme != "http" {
		return fmt.Errorf("docker host %q: only unix:// and tcp:// are supported", host)
	}
	return nil
}

// dial connects to the engine at host ("unix:///var/run/docker.sock", "tcp://10.0.0.1:2375") and agrees on an API version: the
// engine's own, from 1.24 on, but not above the client's. timeout bounds the wait for the beginning of any answer.
func dial(ctx context.Context, host string, timeout time.Duration) (*api, error) {
	u, err := client.ParseHostURL(host)
	if err != nil {
		return nil, fmt.Errorf("docker host %q: %w", host, err)
	}
	a := &api{transport: &http.Transport{
		MaxConnsPerHost:        8,
		MaxIdleConns:           2,
		IdleConnTimeout:        time.Minute,
		MaxResponseHeaderBytes: 64 << 10,
		DisableCompression:     true,
		ResponseHeaderTimeout:  timeout,
	}}
	dialer := net.Dialer{Timeout: timeout}
	if u.Scheme == "unix" {
		a.transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, "unix", u.Host)
		}
	} else {
		a.transport.DialContext = dialer.DialContext
	}
	// The order matters: WithHost insists on a plain transport.
	a.client, err = client.NewClientWithOpts(client.WithHost(host), client.WithHTTPClient(&http.Client{
		Transport:     readOnly{a.transport},
		CheckRedirect: client.CheckRedirect,
	}))
	if err != nil {
		return nil, fmt.Errorf("docker host %q: %w", host, err)
	}
	pong, err := a.client.Ping(ctx)
	if err != nil {
		a.close()
		return nil, fmt.Errorf("connecting: %w", err)
	}
	a.client.NegotiateAPIVersionPing(pong)
	return a, nil
}

func (a *api) close() { a.transport.CloseIdleConnections() }

func (a *api) info(ctx context.Context) (i Info, err error) {
	info, err := a.client.Info(ctx)
	if err != nil {
		return i, fmt.Errorf("asking about the engine: %w", err)
	}
	i = Info{Version: info.ServerVersion, API: a.client.ClientVersion(), CgroupDriver: info.CgroupDriver, CgroupVersion: info.CgroupVersion,
		Runtimes: slices.Sorted(maps.Keys(info.Runtimes)), CDI: info.CDISpecDirs}
	return i, nil
}

func (a *api) ping(ctx context.Context) error {
	if _, err := a.client.Ping(ctx); err != nil {
		return fmt.Errorf("ping: %w", err)
	}
	return nil
}

func (a *api) list(ctx context.Context) ([]containers.Container, error) {
	summaries, err := a.client.ContainerList(ctx, container.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("listing containers: %w", err)
	}
	list := make([]containers.Container, 0, len(summaries))
	for _, s := range summaries {
		if s.ID == "" {
			return nil, fmt.Errorf("listing containers: %w", containers.ErrNoID)
		}
		name := ""
		for _, n := range s.Names {
			// Links give further names, with the other container's in front: "/web/db".
			if strings.Count(n, "/") <= 1 {
				name = n
				break
			}
		}
		if s.State == container.StateRestarting {
			continue // it has no process
		}
		list = append(list, containers.Named(s.ID, name, s.Image, s.ImageID, s.Labels))
	}
	return list, nil
}

func (a *api) inspect(ctx context.Context, id string) ([]byte, error) {
	_, raw, err := a.client.ContainerInspectWithRaw(ctx, id, false)
	//lint:ignore SA1019 what replaces it is one more module
	missing := client.IsErrNotFound(err)
	switch {
	case missing:
		return nil, errNoContainer
	case err != nil && (len(raw) == 0 || !json.Valid(raw)):
		return nil, fmt.Errorf("inspecting container %s: %w", containers.ShortID(id), err)
	}
	return raw, nil // a field of an unexpected type is no reason to know nothing
}

func (a *api) events(ctx context.Context, since time.Time) (<-chan event, <-chan error) {
	options := events.ListOptions{Filters: filters.NewArgs(filters.Arg("type", string(events.ContainerEventType)))}
	if !since.IsZero() {
		options.Since = fmt.Sprintf("%d.%09d", since.Unix(), since.Nanosecond())
	}
	raw, rawErrs := a.client.Events(ctx, options)
	// The engine drops events for a reader that is slow, so there is room for a burst.
	out, errs := make(chan event, 1024), make(chan error, 1)
	go func() {
		for {
			select {
			case m := <-raw:
				if e, ok := decodeEvent(m); ok {
					select {
					case out <- e:
					case <-ctx.Done():
						errs <- ctx.Err()
						return
					}
				}
			case err := <-rawErrs:
				errs <- fmt.Errorf("event stream: %w", err)
				return
			}
		}
	}()
	return out, errs
}

// decodeEvent returns what matters of a message; ok is false for one that names no container.
func decodeEvent(m events.Message) (e event, ok bool) {
	e = event{id: m.Actor.ID, action: string(m.Action), about: m.Actor.Attributes}
	if e.id == "" {
		e.id = m.ID //lint:ignore SA1019 the only id that API 1.21 and older give
	}
	if e.action == "" {
		e.action = m.Status //lint:ignore SA1019 likewise
	}
	// "exec_start: sh -c …": what runs there is nobody's business.
	e.action, _, _ = strings.Cut(e.action, ":")
	switch {
	case m.TimeNano > 0:
		e.time = time.Unix(0, m.TimeNano)
	case m.Time > 0:
		e.time = time.Unix(m.Time, 0)
	}
	return e, e.id != "" && e.action != "" && (m.Type == events.ContainerEventType || m.Type == "")
}

// Longest answers that are read. An inspect answer has some ten kilobytes, a list about two per container.
const (
	maxAnswer = 16 << 20
	maxEvent  = 1 << 20
)

// readOnly lets only the requests pass that look and do not touch, and bounds what is read of an answer.
type readOnly struct{ next http.RoundTripper }

// errForbidden is returned for a request that this exporter never makes.
var errForbidden = errors.New("request not allowed")

func (r readOnly) RoundTrip(req *http.Request) (*http.Response, error) {
	if !allowed(req.Method, req.URL) {
		return nil, fmt.Errorf("%w: %s %s", errForbidden, req.Method, req.URL.Path)
	}
	resp, err := r.next.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	limit := &limited{body: resp.Body, left: maxAnswer, limit: maxAnswer}
	if path.Base(req.URL.Path) == "events" {
		limit.left, limit.limit, limit.lines = maxEvent, maxEvent, true
	}
	resp.Body = limit
	return resp, nil
}

// allowed tells whether a request is one of: ping, version, info, the list, an inspect, the events.
func allowed(method string, u *url.URL) bool {
	if method != http.MethodGet && method != http.MethodHead {
		return false
	}
	parts := strings.Split(strings.Trim(u.Path, "/"), "/")
	if len(parts) > 1 && len(parts[0]) > 1 && parts[0][0] == 'v' && strings.Trim(parts[0][1:], "0123456789.") == "" {
		parts = parts[1:]
	}
	switch len(parts) {
	case 1:
		return parts[0] == "_ping" || parts[0] == "version" || parts[0] == "info" || parts[0] == "events"
	case 2:
		return parts[0] == "containers" && parts[1] == "json"
	case 3:
		return parts[0] == "containers" && parts[2] == "json"
	}
	return false
}
