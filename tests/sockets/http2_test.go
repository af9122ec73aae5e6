package sockets

//lint:file-ignore SA1019 net/http's own client refuses the pseudo-header of an extended CONNECT

import (
	"bufio"
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestMessagesAreReadOverHTTP2(t *testing.T) {
	lbtest.WithExtendedConnect(t, readOverHTTP2)
}

func readOverHTTP2(t *testing.T) {
	lbtest.InBubble(t, keyed("backend http://a\nbackend http://b {\npriority 2\n}\ncaller alice {\ntokens 1k/minute\nmodels gpt-5 gpt-realtime\n}"), func(t *testing.T, w *lbtest.World) {
		w.ReadIdle = time.Minute
		w.Backends["a"].Replies(lbtest.Throttled("300"))
		w.Backends["b"].Replies(responds("b", 300, 200))
		s := connect(t, w, "/v1/responses")
		s.say(`{"type":"response.create","model":"o3","input":"hi"}`)
		s.wantError(404, "model_not_found")
		time.Sleep(4 * time.Minute) // longer than a request's body may stall
		s.say(hi)
		s.wantServed("b")
		s.say(hi)
		s.wantServed("b")
		s.say(hi)
		s.wantError(429, "rate_limit_exceeded")
		s.Close()

		time.Sleep(time.Hour)
		w.Backends["b"].Replies(speaks(realtime(700, 500)))
		s = connect(t, w, session)
		s.say(`{"type":"response.create"}`)
		s.wantServed("a")
		s.say(`{"type":"response.create"}`)
		if e := s.hears(); e.Response.StatusDetails.Error.Code != "rate_limit_exceeded" {
			t.Errorf("the client got %s", e.raw)
		}
		s.say(`{"type":"session.update","session":{"model":"o3"}}`)
		if e := s.hears(); e.Error.Code != "model_not_found" {
			t.Errorf("the client got %s", e.raw)
		}
		s.Close()
		time.Sleep(time.Minute)
		if u := of(w, "alice"); u.Today != 2200 || u.InFlight != 0 || u.Reserved != 0 {
			t.Errorf("alice has used %+v", u)
		}

		time.Sleep(time.Hour)
		s = connect(t, w, "/v1/responses") // and leaves
		s.Close()
		s = connect(t, w, "/v1/responses") // and says nothing
		s.wantError(408, "request_timeout")
		s.wantClosed(1008)
		s.Close()
		// Caddy is not to stop while a tunnel is open: it would write a close frame to the HTTP/2 stream, with the data race that is its own
		time.Sleep(time.Minute)
	})
}

// connect opens a WebSocket of alice's by extended CONNECT.
func connect(t *testing.T, w *lbtest.World, path string) *client {
	t.Helper()
	transport := &http2.Transport{AllowHTTP: true, DialTLSContext: func(ctx context.Context, network, addr string, _ *tls.Config) (net.Conn, error) { //nolint:staticcheck
		return w.Dial(ctx, network, addr)
	}}
	t.Cleanup(transport.CloseIdleConnections) //nolint:staticcheck
	frames, upload := io.Pipe()
	r := w.Request(http.MethodConnect, path, frames)
	r.Header = http.Header{":protocol": {"websocket"}, "Sec-Websocket-Version": {"13"}, "Authorization": {"Bearer " + aliceKey}}
	res, err := transport.RoundTrip(r) //nolint:staticcheck
	if err != nil {
		t.Fatal(err)
	}
	if res.StatusCode != http.StatusOK {
		t.Fatalf("the handshake gives %d", res.StatusCode)
	}
	return &client{t, side{res.Body, upload}, bufio.NewReader(res.Body)}
}

// side writes to one side of a connection, and closes both.
type side struct {
	io.ReadCloser
	up *io.PipeWriter
}

func (s side) Write(p []byte) (int, error) { return s.up.Write(p) }

func (s side) Close() error {
	s.up.Close()
	return s.ReadCloser.Close()
}
