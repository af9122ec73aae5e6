package lbtest

import (
	"context"
	"errors"
	"net"
	"net/http"
	"sync"
)

// Serve serves an address.
func (w *World) Serve(addr string, handler http.Handler) {
	l := &pipeListener{conns: make(chan net.Conn), closed: make(chan struct{})}
	w.mu.Lock()
	w.listeners[addr] = l
	w.mu.Unlock()
	server := &http.Server{Handler: handler, Protocols: new(http.Protocols)}
	server.Protocols.SetHTTP1(true)
	server.Protocols.SetUnencryptedHTTP2(true)
	l.server = server
	go server.Serve(l)
	w.T.Cleanup(func() { server.Close() })
}

// Restart closes all connections of a host and serves new ones.
func (w *World) Restart(host string) {
	w.listeners[host+":80"].server.Close()
	w.Serve(host+":80", w.Backends[host])
}

// Stop makes the host refuse connections.
func (w *World) Stop(host string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.listeners[host+":80"].server.Close()
	delete(w.listeners, host+":80")
}

// Dial connects to an address that is served.
func (w *World) Dial(ctx context.Context, _, addr string) (net.Conn, error) {
	w.mu.Lock()
	l := w.listeners[addr]
	w.mu.Unlock()
	refused := &net.OpError{Op: "dial", Err: errors.New("connection refused")}
	if l == nil {
		return nil, refused
	}
	client, server := net.Pipe()
	select {
	case l.conns <- server:
		return client, nil
	case <-l.closed: // meanwhile
		return nil, refused
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// pipeListener listens for pipes.
type pipeListener struct {
	server *http.Server
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

func (l *pipeListener) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)} }
