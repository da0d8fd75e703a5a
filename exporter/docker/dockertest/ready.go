package dockertest

import (
	"context"
	"net"
	"net/http"
	"time"
)

// ready tells whether the daemon answers.
func (d *Daemon) ready() bool {
	transport := &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var dialer net.Dialer
			return dialer.DialContext(ctx, "unix", d.Socket)
		},
	}
	client := http.Client{Transport: transport, Timeout: time.Second}
	resp, err := client.Get("http://docker/_ping")
	if err != nil {
		return false
	}
	_ = resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}
