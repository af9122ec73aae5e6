package websocket

import (
	"io"
	"net/http"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

func init() { caddy.RegisterModule(Module{}) }

// Module lets pools open WebSockets. It has no options.
type Module struct{}

// CaddyModule returns the Caddy module information.
func (Module) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  seam.WebSocketNamespace + ".relay",
		New: func() caddy.Module { return new(Module) },
	}
}

// Accept implements seam.WebSocketModule.
func (Module) Accept(w http.ResponseWriter, r *http.Request, longest int64,
	o seam.WebSocketOptions) (seam.WebSocket, error) {
	c, err := Accept(w, r, longest, Options{WebSocketOptions: o})
	if err != nil {
		return nil, err // not a nil *Client, which is another value
	}
	return c, nil
}

// Open implements seam.WebSocketModule.
func (Module) Open(w http.ResponseWriter, o seam.WebSocketOptions) (seam.WebSocket, error) {
	c, err := Open(w, Options{WebSocketOptions: o})
	if err != nil {
		return nil, err
	}
	return c, nil
}

// Backend implements seam.WebSocket.
func (*Client) Backend(conn io.ReadWriteCloser) seam.WebSocketBackend { return NewBackend(conn) }

// Interface guards
var (
	_ seam.WebSocketModule  = Module{}
	_ seam.WebSocket        = (*Client)(nil)
	_ seam.WebSocketBackend = (*Backend)(nil)
)
