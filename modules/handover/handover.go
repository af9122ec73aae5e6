// Package handover adds the listener wrapper openai_lb_handover, with which a
// new Caddy process replaces an old one on the same ports.
//
// Two processes can listen on one port, and the kernel gives each new
// connection to one of them. Caddy goes on accepting connections during its
// shutdown_delay. At the end of the delay, Go's HTTP server drops each
// connection on which no request has come yet, and that client gets an error.
//
// So the wrapper closes the listening sockets when the process is told to end,
// not at the end of the delay. From then on, all new connections go to the new
// process. The old one serves those that it has accepted
// (TestAfterTheHandoverOnlyConnectionsFromBeforeAreServed). A reload within one
// process keeps the ports. Listeners that are not TCP cannot be shared, and
// stay as they are (TestAListenerThatIsNotTCPIsNotWrapped).
//
// The module uses no seam of the core: Caddy tells it that the process ends.
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
	wrapped := &listener{Listener: l, closed: closed, closeOnce: sync.OnceValue(l.Close),
		end: sync.OnceFunc(func() { close(closed) })}
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
