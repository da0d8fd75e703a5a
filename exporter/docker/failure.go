package docker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/docker/docker/client"

	"gpu-exporter/exporter/containers"
)

// The kinds of failure: the keys of Restarts in the source's state.
const (
	kindAbsent   = "absent"      // no socket
	kindNoSocket = "not_socket"  // something else has the socket's name
	kindDenied   = "denied"      // permission
	kindRefused  = "refused"     // nobody listens
	kindHang     = "hang"        // no answer in time
	kindHalf     = "half_answer" // the connection ended in the middle of an answer
	kindGarbage  = "garbage"     // an answer that is not what the API promises
	kindEnded    = "ended"       // the event stream ended
	kindReplaced = "replaced"    // another daemon's socket took the place
	kindStalled  = "stalled"     // events do not come
	kindError    = "error"       // the engine says so
)

// failure says why the engine cannot be followed.
type failure struct {
	kind   string
	reason string // one line for people
	cheap  bool   // trying again costs next to nothing
}

// The outcomes of preflight.
var (
	errAbsent   = errors.New("no socket")
	errNoSocket = errors.New("not a socket")
	errRefused  = errors.New("nobody listens")
	errDenied   = errors.New("permission denied")
)

// preflight tries to connect, because the client's own errors do not say what is wrong.
func preflight(ctx context.Context, host string, timeout time.Duration) error {
	if err := CheckHost(host); err != nil {
		return err
	}
	dialer := net.Dialer{Timeout: timeout}
	socket, ok := strings.CutPrefix(host, "unix://")
	if !ok {
		conn, err := dialer.DialContext(ctx, "tcp", strings.TrimPrefix(strings.TrimPrefix(host, "tcp://"), "http://"))
		if err != nil {
			return err
		}
		return conn.Close()
	}
	info, err := os.Stat(socket)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		return errAbsent
	case errors.Is(err, fs.ErrPermission):
		return errDenied
	case err != nil:
		return err
	case info.Mode()&fs.ModeSocket == 0:
		return errNoSocket
	}
	conn, err := dialer.DialContext(ctx, "unix", socket)
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return errRefused
	case errors.Is(err, fs.ErrNotExist):
		return errAbsent
	case errors.Is(err, fs.ErrPermission):
		return errDenied
	case err != nil:
		return err
	}
	return conn.Close()
}

// diagnose turns an error into a reason.
func diagnose(host string, err error) failure {
	where := strings.TrimPrefix(host, "unix://")
	var syntax *json.SyntaxError
	var wrongType *json.UnmarshalTypeError
	var timeout net.Error
	switch {
	case errors.Is(err, errAbsent):
		return failure{kindAbsent, "no Docker here: " + where + " does not exist", true}
	case errors.Is(err, errNoSocket):
		return failure{kindNoSocket, where + " is not a socket", true}
	case errors.Is(err, errDenied):
		return failure{kindDenied, "permission denied on " + where + ": run as root or in the group that owns it", true}
	case errors.Is(err, errRefused), errors.Is(err, syscall.ECONNREFUSED):
		return failure{kindRefused, "nobody listens on " + where + ": is the Docker daemon running?", true}
	case errors.Is(err, errReplaced):
		return failure{kindReplaced, "the Docker daemon on " + where + " was replaced", true}
	case errors.Is(err, errStalled):
		return failure{kindStalled, "Docker on " + where + " answers, but its event stream is dead", false}
	case errors.Is(err, io.ErrUnexpectedEOF):
		return failure{kindHalf, "Docker on " + where + " broke off in the middle of an answer", false}
	case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return failure{kindEnded, "Docker on " + where + " closed the connection", true}
	case errors.As(err, &syntax), errors.As(err, &wrongType), errors.Is(err, errTooLong), errors.Is(err, containers.ErrNoID),
		strings.Contains(fmt.Sprint(err), "malformed HTTP"):
		return failure{kindGarbage, "what answers on " + where + " is not Docker: " + oneLine(err), false}
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout(),
		client.IsErrConnectionFailed(err) && strings.Contains(err.Error(), "Cannot connect"):
		// The client hides a timeout behind this text; that a connection can be made was tried before.
		return failure{kindHang, "Docker on " + where + " does not answer in time", false}
	case client.IsErrConnectionFailed(err): // one of the forms that net/http gives to a connection that was closed
		return failure{kindEnded, "Docker on " + where + " closed the connection", true}
	}
	return failure{kindError, "Docker on " + where + ": " + oneLine(err), false}
}

// oneLine makes an error's text, which may quote what a stranger sent, fit for a log and a label.
func oneLine(err error) string { return containers.Clean(fmt.Sprint(err), 300) }

// identity tells one socket file from another of the same name.
type identity struct {
	dev, ino uint64
	changed  int64 // ns; inode numbers are used again at once
}

// identify returns the identity of the file at path, or the zero value where there is none.
func identify(path string) identity {
	if path == "" {
		return identity{}
	}
	var st syscall.Stat_t
	if err := syscall.Stat(path, &st); err != nil {
		return identity{}
	}
	return identity{dev: uint64(st.Dev), ino: st.Ino, changed: birth(&st)}
}

// birth is the modification time, which a socket file keeps from its creation on: connections and chmod do not change it.
func birth(st *syscall.Stat_t) int64 { return st.Mtim.Nano() }
