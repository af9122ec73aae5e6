package attempt

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"reflect"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// clientConn is the context key of a request's client connection.
type clientConn struct{}

// KnowClients makes the server put the client's connection into the context of
// each request.
func KnowClients(server *caddyhttp.Server) {
	server.RegisterConnContext(func(ctx context.Context, c net.Conn) context.Context {
		if ctx.Value(clientConn{}) != nil {
			return ctx // by another handler of the server
		}
		return context.WithValue(ctx, clientConn{}, c)
	})
}

// resetIfCut makes a cut reply to r reset the client's connection. A client of
// HTTP/1.0, which nginx is by default, takes any other end of the connection
// for the end of the reply.
func resetIfCut(r *http.Request, res *http.Response) {
	if r.ProtoAtLeast(1, 1) || res.Body == http.NoBody {
		return
	}
	client, _ := r.Context().Value(clientConn{}).(net.Conn)
	if tcp, secured := tcpOf(client); tcp != nil {
		res.Body = &resetting{ReadCloser: res.Body, client: tcp, secured: secured}
	}
}

// lingerer is a TCP connection.
type lingerer interface {
	io.WriteCloser
	SetLinger(seconds int) error
	SetWriteDeadline(t time.Time) error
}

// plainAlert is the unencrypted TLS alert "internal error". TLS fails at any
// client that receives it, because alerts must be encrypted. nginx 1.22 takes
// any other end of a TLS connection for a clean one, even a reset (tried).
var plainAlert = []byte{21, 3, 3, 0, 2, 2, 80}

// tcpOf returns the TCP connection that carries c, or nil if none does. secured
// reports whether c uses TLS.
func tcpOf(c net.Conn) (tcp lingerer, secured bool) {
	for c != nil {
		switch outer := c.(type) {
		case lingerer:
			return outer, secured
		case interface{ NetConn() net.Conn }:
			c, secured = outer.NetConn(), true
		case interface{ Raw() net.Conn }: // the PROXY protocol
			c = outer.Raw()
		default: // Caddy's own wrappers are not exported
			c = embedded(c)
		}
	}
	return nil, secured
}

// embedded returns the connection that a struct embeds, or nil.
func embedded(c net.Conn) net.Conn {
	value := reflect.Indirect(reflect.ValueOf(c))
	if value.Kind() != reflect.Struct {
		return nil
	}
	field := value.FieldByName("Conn")
	if !field.IsValid() || !field.CanInterface() {
		return nil
	}
	inner, _ := field.Interface().(net.Conn)
	return inner
}

// resetting is the body of a reply that resets the client's connection if the
// reply is cut. The reset is set up while the body is read. So it also happens
// if the server closes the connection, because the client does not read, or if
// the system does, because Caddy was stopped.
type resetting struct {
	io.ReadCloser
	client  lingerer
	secured bool
	begun   bool
	end     error
}

// Read implements io.Reader. It returns the end only after everything else was
// written.
func (b *resetting) Read(p []byte) (int, error) {
	if b.end != nil {
		return 0, b.finish()
	}
	if !b.begun {
		b.begun = true
		_ = b.client.SetLinger(0)
	}
	n, err := b.ReadCloser.Read(p)
	if err == nil {
		return n, nil
	}
	if b.end = err; n > 0 {
		return n, nil
	}
	return 0, b.finish()
}

func (b *resetting) finish() error {
	switch {
	case errors.Is(b.end, io.EOF):
		_ = b.client.SetLinger(-1)
	case b.secured:
		_ = b.client.SetLinger(-1) // a reset would overtake the alert
		_ = b.client.SetWriteDeadline(time.Now().Add(time.Second))
		_, _ = b.client.Write(plainAlert)
		_ = b.client.Close()
	}
	return b.end
}
