package main

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/prometheus/exporter-toolkit/web"
	"go.yaml.in/yaml/v2"

	"gpu-exporter/exporter"
)

// registerRelease serves POST /-/release, which lets go of the driver so that it can be unloaded or replaced, and POST /-/resume, the way back. Only
// this host may ask, or who has given a password or a certificate that webConfig, the file of --web.config.file, demands.
func registerRelease(mux *http.ServeMux, e *exporter.Exporter, webConfig string, logger *slog.Logger) {
	guarded := http.NewCrossOriginProtection() // a page in a browser on this host is not this host
	handle := func(path string, do func(w http.ResponseWriter, r *http.Request)) {
		mux.Handle("POST "+path, guarded.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if !authenticated(r, webConfig) && !fromThisHost(r) {
				http.Error(w, "only from this host, at a loopback address, or with the authentication of --web.config.file", http.StatusForbidden)
				return
			}
			do(w, r)
		})))
	}
	handle("/-/release", func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), 20*time.Second)
		defer cancel()
		if err := e.Release(ctx); err != nil {
			http.Error(w, "not released: "+err.Error(), http.StatusServiceUnavailable)
			return
		}
		logger.Info("released: the driver's devices are closed until resumed", "client", r.RemoteAddr)
		io.WriteString(w, "released: nothing of the driver is in use here; POST /-/resume, or a restart, takes it again\n")
	})
	handle("/-/resume", func(w http.ResponseWriter, r *http.Request) {
		e.Resume()
		logger.Info("resumed", "client", r.RemoteAddr)
		io.WriteString(w, "resumed\n")
	})
}

// authenticated tells whether a request that came through the toolkit's handler has proved who it is from.
func authenticated(r *http.Request, webConfig string) bool {
	if r.TLS != nil && len(r.TLS.VerifiedChains) > 0 {
		return true
	}
	if _, _, ok := r.BasicAuth(); !ok || webConfig == "" {
		return false
	}
	// The toolkit has refused wrong passwords, but where it knows no users it asks nobody.
	var c web.Config
	b, err := os.ReadFile(webConfig)
	return err == nil && yaml.Unmarshal(b, &c) == nil && len(c.Users) > 0
}

// fromThisHost tells whether a request was made on this host, to a loopback address and by no proxy.
func fromThisHost(r *http.Request) bool {
	for _, h := range []string{"Forwarded", "X-Forwarded-For", "Via"} {
		if r.Header.Get(h) != "" {
			return false
		}
	}
	host, _, err := net.SplitHostPort(r.Host)
	if err != nil {
		host = r.Host
	}
	// A name that leads to a loopback address may be a page's from elsewhere.
	return loopback(r.RemoteAddr) && (host == "localhost" || net.ParseIP(host).IsLoopback())
}

func loopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	return err == nil && net.ParseIP(host).IsLoopback()
}
