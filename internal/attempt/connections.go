package attempt

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

const (
	// idleConnTimeout is less than the four minutes after which Azure's load
	// balancers silently drop an idle connection.
	idleConnTimeout = 90 * time.Second
	// idleConnsPerHost is enough for hundreds of parallel streams.
	idleConnsPerHost = 512
	// handshakeTimeout limits a TLS handshake with a backend, and the handshake
	// of a WebSocket, for which no model runs.
	handshakeTimeout = 5 * time.Second
	pingInterval     = 15 * time.Second
	pingTimeout      = 5 * time.Second
	// maxReceiveBuffer is how much of a reply over HTTP/2 is buffered for a
	// client that does not read. Go's default is 4 MiB.
	maxReceiveBuffer = 256 << 10
)

// CheckConnections returns an error if the options of connections are not
// valid. It can be called before they are set up.
func CheckConnections(transport *reverseproxy.HTTPTransport) error {
	if transport.ProxyProtocol != "" {
		return errors.New("http: proxy_protocol is not supported: addresses of clients are not sent to backends")
	}
	return nil
}

// DecodeTransport returns Caddy's http transport from its config, or nil if
// there is none.
func DecodeTransport(raw json.RawMessage) (*reverseproxy.HTTPTransport, error) {
	if raw == nil {
		return nil, nil
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(raw, &fields); err != nil {
		return nil, fmt.Errorf("transport: %w", err)
	}
	if string(fields["protocol"]) != `"http"` {
		return nil, fmt.Errorf("transport: protocol %s is not available: expected \"http\"",
			cmp.Or(string(fields["protocol"]), `""`))
	}
	delete(fields, "protocol")
	rest, err := json.Marshal(fields)
	if err != nil {
		return nil, err
	}
	transport := new(reverseproxy.HTTPTransport)
	if err := caddy.StrictUnmarshalJSON(rest, transport); err != nil {
		return nil, fmt.Errorf("transport: %w", err)
	}
	if err := CheckConnections(transport); err != nil {
		return nil, fmt.Errorf("transport: %w", err)
	}
	return transport, nil
}

// Provision sets up the sender: its options, and the connections to the
// backends.
func (s *Sender) Provision(ctx caddy.Context) error {
	if err := s.PassiveHealth.Provision(); err != nil {
		return err
	}
	if err := s.Options.Provision(); err != nil {
		return err
	}
	if s.HTTP == nil {
		s.HTTP = new(reverseproxy.HTTPTransport)
	}
	if err := CheckConnections(s.HTTP); err != nil {
		return err
	}
	// net/http must not ask for compression that the client did not ask for,
	// nor decompress what the client asked for
	s.HTTP.Compression = new(false)
	if s.HTTP.KeepAlive == nil {
		s.HTTP.KeepAlive = new(reverseproxy.KeepAlive)
	}
	if s.HTTP.KeepAlive.IdleConnTimeout == 0 {
		s.HTTP.KeepAlive.IdleConnTimeout = caddy.Duration(idleConnTimeout)
	}
	if s.HTTP.KeepAlive.MaxIdleConnsPerHost == 0 {
		s.HTTP.KeepAlive.MaxIdleConnsPerHost = idleConnsPerHost
	}
	s.HTTP.WriteBufferSize = cmp.Or(s.HTTP.WriteBufferSize, WriteBuffer)
	if err := s.HTTP.Provision(ctx); err != nil {
		return fmt.Errorf("http: %w", err)
	}
	transport := s.HTTP.Transport
	if transport.TLSHandshakeTimeout == 0 {
		transport.TLSHandshakeTimeout = handshakeTimeout
	}
	transport.HTTP2 = &http.HTTP2Config{
		SendPingTimeout:           pingInterval,
		PingTimeout:               pingTimeout,
		MaxReceiveBufferPerStream: maxReceiveBuffer,
	}
	hideSurplus()
	if server, ok := ctx.Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server); ok {
		KnowClients(server)
	}
	transport.DialContext, transport.Proxy = Dialing(transport.DialContext), knowProxies(transport.Proxy)
	s.RoundTripper, s.sharesConnections = s.HTTP, slices.Contains(s.HTTP.Versions, "h2c")
	closing, closes := context.WithCancel(context.Background())
	s.closing = closing
	context.AfterFunc(ctx, func() { time.AfterFunc(s.CloseDelay, closes) })
	return nil
}

// Cleanup closes idle connections.
func (s *Sender) Cleanup() error {
	hideSurplus()
	if s.HTTP == nil {
		return nil
	}
	return s.HTTP.Cleanup()
}
