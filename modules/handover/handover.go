// Package handover adds the listener wrapper openai_lb_handover, for two
// processes that share their ports while one replaces the other. It uses no
// seam: Caddy tells it that the process ends.
package handover

import (
	"errors"
	"net"
	"sync"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
)

func init() {
	caddy.RegisterModule(new(Handover))
}

// Handover is a listener wrapper for a Caddy that is replaced by another
// process on the same ports. When this one ends, it takes no new connections
// from that moment on, and serves those that it has during shutdown_delay.
//
// Without it, both processes get new connections until the end of that delay.
// Then Go's HTTP server drops each one of which it has not read a request yet.
type Handover struct {
	mu        sync.Mutex
	listeners []*listener
}

// CaddyModule returns the Caddy module information.
func (*Handover) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "caddy.listeners.openai_lb_handover",
		New: func() caddy.Module { return new(Handover) },
	}
}

// Provision sets up the wrapper.
func (w *Handover) Provision(ctx caddy.Context) error {
	return observe.On(ctx, observe.Stopping, func() {
		if caddy.Exiting() { // a reload keeps the ports
			w.handOver()
		}
	})
}

// WrapListener implements caddy.ListenerWrapper.
func (w *Handover) WrapListener(l net.Listener) net.Listener {
	if l.Addr().Network() != "tcp" { // others are not shared between processes
		return l
	}
	closed := make(chan struct{})
	wrapped := &listener{Listener: l, closed: closed, closeOnce: sync.OnceValue(l.Close), end: sync.OnceFunc(func() { close(closed) })}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.listeners = append(w.listeners, wrapped)
	return wrapped
}

func (w *Handover) handOver() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, l := range w.listeners {
		_ = l.closeOnce() // the server goes on
	}
}

// UnmarshalCaddyfile reads the wrapper, which has no options.
func (w *Handover) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	return directive.Unmarshal(d)
}

// listener is one that can be closed before its server knows.
type listener struct {
	net.Listener
	closeOnce func() error
	closed    chan struct{} // by the server
	end       func()        // closes closed
}

// Accept waits after the last connection until the server closes the listener.
func (l *listener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if errors.Is(err, net.ErrClosed) {
		<-l.closed
	}
	return conn, err
}

// Close implements net.Listener.
func (l *listener) Close() error {
	l.end()
	return l.closeOnce()
}

// Interface guards
var (
	_ caddy.Provisioner     = (*Handover)(nil)
	_ caddy.ListenerWrapper = (*Handover)(nil)
	_ caddyfile.Unmarshaler = (*Handover)(nil)
)
