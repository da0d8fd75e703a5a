package main

import (
	"net"
	"net/http"
	"sync"
)

// maxConnections is how many HTTP connections are open at most: many times what a host's scrapers and readers of the page need.
const maxConnections = 512

// connections keeps the connections of a server to a number. Beyond it the address that has the most loses its oldest one, so that who opens many,
// whatever is or is not sent on them, takes them from itself.
type connections struct {
	most int

	mu   sync.Mutex
	open int
	of   map[string][]net.Conn // by the remote host, the oldest first
}

// state is for http.Server.ConnState.
func (c *connections) state(conn net.Conn, s http.ConnState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch s {
	case http.StateNew:
		host := remoteHost(conn)
		c.of[host] = append(c.of[host], conn)
		c.open++
		if c.open > c.most {
			go c.crowded().Close() // of TLS, it waits for what it still has to send
		}
	case http.StateClosed, http.StateHijacked:
		c.forget(conn)
	}
}

// crowded takes the oldest connection from the address that has the most, and returns it.
func (c *connections) crowded() net.Conn {
	var most string
	for host, list := range c.of {
		if len(list) > len(c.of[most]) {
			most = host
		}
	}
	conn := c.of[most][0]
	c.forget(conn)
	return conn
}

func (c *connections) forget(conn net.Conn) {
	host := remoteHost(conn)
	list := c.of[host]
	for i, x := range list {
		if x != conn {
			continue
		}
		c.open--
		if list = append(list[:i], list[i+1:]...); len(list) == 0 {
			delete(c.of, host)
		} else {
			c.of[host] = list
		}
		return
	}
}

// remoteHost is the other end's address without its port.
func remoteHost(conn net.Conn) string {
	address := conn.RemoteAddr().String()
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return address
	}
	return host
}
