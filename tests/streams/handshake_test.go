package streams

//lint:file-ignore SA1019 net/http's own client refuses the pseudo-header of an extended CONNECT

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// socket is the client's side of a WebSocket, or the error that it got.
type socket struct {
	lbtest.Reply
	io.ReadWriteCloser // nil: it was not opened
	After              time.Duration
}

// opener opens a WebSocket at a path.
type opener func(path string) socket

// inWorld runs a test with clients that open WebSockets.
func inWorld(t *testing.T, config string, test func(t *testing.T, w *lbtest.World, open opener)) {
	t.Helper()
	lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
		test(t, w, func(path string) socket { return open(t, w.Client.Transport, upgrade(w, path)) })
	})
}

// extendedConnect sends extended CONNECTs. net/http's own client refuses the
// pseudo-header.
func extendedConnect(w *lbtest.World) http.RoundTripper {
	transport := &http2.Transport{AllowHTTP: true, DialTLSContext: func(ctx context.Context, network, addr string, _ *tls.Config) (net.Conn, error) { //nolint:staticcheck
		return w.Dial(ctx, network, addr)
	}}
	w.T.Cleanup(transport.CloseIdleConnections) //nolint:staticcheck
	return transport
}

// connect is the handshake of a WebSocket by extended CONNECT, with the
// client's side as its body.
func connect(w *lbtest.World, path string, frames io.Reader) *http.Request {
	r := w.Request(http.MethodConnect, path, frames)
	r.Header = http.Header{":protocol": {"websocket"}, "Sec-Websocket-Version": {"13"}}
	return r
}

// upgrade is the handshake of a WebSocket over HTTP/1.1.
func upgrade(w *lbtest.World, path string) *http.Request {
	r := w.Request(http.MethodGet, path, nil)
	r.Header = http.Header{
		"Connection": {"keep-alive, Upgrade"}, "Upgrade": {"websocket"},
		"Sec-Websocket-Version": {"13"}, "Sec-Websocket-Key": {"dGhlIHNhbXBsZSBub25jZQ=="},
	}
	return r
}

func open(t *testing.T, transport http.RoundTripper, r *http.Request) (s socket) {
	began := time.Now()
	res, err := transport.RoundTrip(r)
	s.After = time.Since(began)
	if err != nil {
		s.Err = err
		return s
	}
	s.Status, s.Header, s.Backend = res.StatusCode, res.Header, res.Header.Get("X-Backend")
	if res.StatusCode != http.StatusSwitchingProtocols {
		text, err := io.ReadAll(res.Body)
		res.Body.Close()
		s.Body, s.Err = string(text), err
		return s
	}
	s.ReadWriteCloser = res.Body.(io.ReadWriteCloser)
	t.Cleanup(func() { s.ReadWriteCloser.Close() })
	return s
}

// wantOpen checks that the WebSocket works, and that this backend has it.
func (s socket) wantOpen(t *testing.T, backend string) {
	t.Helper()
	if s.ReadWriteCloser == nil || s.Backend != backend {
		t.Fatalf("the handshake gives %d from %q (%v) %s, want a WebSocket of %s", s.Status, s.Backend, s.Err, s.Body, backend)
	}
	go io.WriteString(s, text("ping"))
	got := make([]byte, len(text("ping")))
	if _, err := io.ReadFull(s, got); err != nil || string(got) != text("ping") {
		t.Fatalf("the echo is %q: %v", got, err)
	}
}

// text is a frame with a text, as servers send it (RFC 6455 section 5.2).
func text(payload string) string { return "\x81" + string(rune(len(payload))) + payload }

const closeFrame = "\x88\x00"

// inOrder has backend a first, and then b.
const inOrder = "openai_lb {\nbackend http://a {\napi_key key-of-backend-a\n}\nbackend http://b {\npriority 2\napi_key key-of-backend-b\n}\n}"

func TestAHandshakeGoesOnToABackendThatOpensTheWebSocket(t *testing.T) {
	for name, c := range map[string]struct {
		reply        http.HandlerFunc
		class, level string
		cause        any
		after        time.Duration
	}{
		"silence":              {lbtest.Hangs, "timeout", "warn", "no_reply", 5 * time.Second},
		"a refused key":        {lbtest.Status(401), "credential", "error", "test", 0},
		"a throttle":           {lbtest.Throttled("60"), "throttled", "info", nil, 0},
		"a 500":                {lbtest.Status(500), "failed", "warn", "test", 0},
		"a 502":                {lbtest.Status(502), "failed", "warn", "test", 0},
		"a 408":                {lbtest.Status(408), "failed", "warn", "test", 0},
		"a reset":              {func(http.ResponseWriter, *http.Request) { lbtest.Abort() }, "failed", "warn", "closed", 0},
		"a 200 with JSON":      {nil, "failed", "warn", "not_upgraded", 0},
		"a 204":                {lbtest.Status(204), "failed", "warn", "not_upgraded", 0},
		"another protocol":     {lbtest.Raw("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: foo\r\n\r\n"), "failed", "warn", "wrong_protocol", 0},
		"one more protocol":    {lbtest.Raw("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket, foo\r\n\r\n"), "failed", "warn", "wrong_protocol", 0},
		"no protocol":          {lbtest.Raw("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n\r\n"), "failed", "warn", "wrong_protocol", 0},
		"an upgrade of no use": {lbtest.Raw("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n"), "failed", "warn", "wrong_protocol", 0},
	} {
		for _, path := range []string{"/v1/realtime?model=m", "/openai/realtime?api-version=1&deployment=m"} {
			t.Run(name+", "+path, func(t *testing.T) {
				inWorld(t, inOrder, func(t *testing.T, w *lbtest.World, open opener) {
					w.Backends["a"].Replies(c.reply)
					w.Backends["b"].Replies(upgrades)
					s := open(path)
					s.wantOpen(t, "b")
					if s.After != c.after {
						t.Errorf("the handshake takes %s, want %s", s.After, c.after)
					}
					open(path).wantOpen(t, "b")
					w.WantCalls(map[string]int{"a": 1, "b": 2})
					cooldowns := w.Logged("cooldown started")
					if len(cooldowns) != 1 || cooldowns[0].ContextMap()["class"] != c.class || cooldowns[0].Level.String() != c.level ||
						cooldowns[0].ContextMap()["cause"] != c.cause {
						t.Errorf("got the cooldowns %v, want one at level %s for %s, because of %v", cooldowns, c.level, c.class, c.cause)
					}
				})
			})
		}
	}
}

// TestABackendThatForbidsAHandshakeServesOtherRequests because the key may lack
// only this permission, and servers by uvicorn answer like this where they have
// no WebSocket.
func TestABackendThatForbidsAHandshakeServesOtherRequests(t *testing.T) {
	for name, forbids := range map[string]http.HandlerFunc{
		"an empty 403":       func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(403) },
		"a missing scope":    lbtest.Says(403, `{"error":{"message":"Missing scopes: api.model.realtime.","code":"missing_scope"}}`),
		"a missing action":   lbtest.Says(401, `{"error":{"code":"PermissionDenied","message":"The principal lacks the required data action."}}`),
		"a forbidding proxy": lbtest.Says(403, "<html>Forbidden</html>"),
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, inOrder, func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(forbids)
				w.Backends["b"].Replies(upgrades)
				open(t, w.Client.Transport, upgrade(w, "/v1/realtime?model=m")).wantOpen(t, "b")
				w.AllReply(nil)
				w.Post(`{"model":"m"}`).WantServed(t, "a")
			})
		})
	}
}

func TestAHandshakeThatNoBackendAcceptsIsAnError(t *testing.T) {
	for name, c := range map[string]struct {
		reply  http.HandlerFunc
		status int
		code   string
	}{
		"silence":          {lbtest.Hangs, 504, "upstream_timeout"},
		"a refused key":    {lbtest.Status(401), 502, "upstream_credentials_rejected"},
		"a 200 with JSON":  {nil, 502, "upstream_unreachable"},
		"another protocol": {lbtest.Raw("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: foo\r\n\r\n"), 502, "upstream_unreachable"},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, inOrder, func(t *testing.T, w *lbtest.World, open opener) {
				w.AllReply(c.reply)
				open("/v1/realtime?model=m").WantError(t, c.status, c.code)
				w.WantCalls(map[string]int{"a": 1, "b": 1})
				if cooldowns := w.Logged("cooldown started"); len(cooldowns) != 1 {
					t.Errorf("got the cooldowns %v, want one: the request may be to blame", cooldowns)
				}
			})
		})
	}
}

// TestA2xxOpensNoWebSocketWhereThereIsNone has clients ask for a WebSocket
// where the API has none. The client sees that it has got an ordinary reply.
func TestA2xxOpensNoWebSocketWhereThereIsNone(t *testing.T) {
	for _, options := range []string{"", "model m\n"} {
		for _, path := range []string{"/v1/models", "/v1/files/file-12345678", "/openai/models?api-version=1"} {
			t.Run(options+path, func(t *testing.T) {
				inWorld(t, "openai_lb {\nbackend http://a {\n"+options+"}\n}", func(t *testing.T, w *lbtest.World, open opener) {
					open(path).WantStatus(t, 200)
					if n := len(w.Logged("cooldown started")); n > 0 {
						t.Errorf("%d cooldowns for a request of the client's", n)
					}
				})
			})
		}
	}
}

func TestOnlyAGetWithoutABodyOpensAWebSocket(t *testing.T) {
	for name, change := range map[string]func(*http.Request){
		"a POST":                  func(r *http.Request) { r.Method = http.MethodPost },
		"a GET with a body":       func(r *http.Request) { r.Body, r.ContentLength = io.NopCloser(strings.NewReader(text("ping"))), 6 },
		"a body of any length":    func(r *http.Request) { r.Body, r.ContentLength = io.NopCloser(strings.NewReader(text("ping"))), -1 },
		"a GET without the token": func(r *http.Request) { r.Header.Del("Connection") },
		"another upgrade":         func(r *http.Request) { r.Header.Set("Upgrade", "h2c") },
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
				r := upgrade(w, "/v1/realtime?model=m")
				change(r)
				w.Send(r).WantServed(t, "a")
				if got := w.Backends["a"].Received()[0].Request.Header; got["Upgrade"] != nil || got["Connection"] != nil {
					t.Errorf("the backend is asked for %v", got)
				}
			})
		})
	}
}

// TestABackendGetsTheProtocolAsRFC6455SpellsIt holds that whatever the case in
// which a client names it.
func TestABackendGetsTheProtocolAsRFC6455SpellsIt(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
		w.AllReply(upgrades)
		r := upgrade(w, "/v1/realtime?model=m")
		r.Header.Set("Upgrade", "WebSocket")
		open(t, w.Client.Transport, r).wantOpen(t, "a")
		if got := w.Backends["a"].Received()[0].Request.Header.Get("Upgrade"); got != "websocket" {
			t.Errorf("the backend is asked for %q", got)
		}
	})
}

// TestAnExtendedConnectIsRefused sends one whose stream goes on, and one whose
// stream has ended.
func TestAnExtendedConnectIsRefused(t *testing.T) {
	lbtest.WithExtendedConnect(t, func(t *testing.T) {
		lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
			w.AllReply(upgrades)
			frames, upload := io.Pipe()
			defer upload.Close()
			open(t, extendedConnect(w), connect(w, "/v1/realtime?model=m", frames)).WantError(t, 501, "websocket_not_supported")
			open(t, extendedConnect(w), connect(w, "/v1/realtime?model=m", nil)).WantError(t, 501, "websocket_not_supported")
			w.WantCalls(map[string]int{"a": 0})
		})
	})
}

func TestAWebSocketWithoutAModelNeedsABackendForAnyModel(t *testing.T) {
	const listed = "openai_lb {\nbackend http://a {\nmodel listed\n}\n%s}"
	for _, path := range []string{"/v1/realtime", "/v1/realtime/", "/realtime", "/v1/realtime?intent=transcription", "/openai/realtime?api-version=1", "/openai/v1/realtime?call_id="} {
		inWorld(t, fmt.Sprintf(listed, ""), func(t *testing.T, w *lbtest.World, open opener) {
			open(path).WantError(t, 400, "missing_required_parameter")
			w.WantCalls(map[string]int{"a": 0})
		})
		inWorld(t, fmt.Sprintf(listed, "backend http://b {\npriority 2\n}\n"), func(t *testing.T, w *lbtest.World, open opener) {
			w.AllReply(upgrades)
			open(path).wantOpen(t, "b")
		})
	}
	inWorld(t, fmt.Sprintf(listed, ""), func(t *testing.T, w *lbtest.World, open opener) {
		w.AllReply(upgrades)
		open("/v1/realtime?model=listed").wantOpen(t, "a")
		open("/v1/realtime?model=forbidden").WantError(t, 404, "model_not_found")
		open("/v1/realtime?call_id=rtc_12345678").wantOpen(t, "a") // it has its model
	})
}

// TestABackendThatBreaksAWebSocketOffIsBlamed unless it or the client has ended
// it, or the client has left. The backend gets a cooldown if it sent nothing
// before.
func TestABackendThatBreaksAWebSocketOffIsBlamed(t *testing.T) {
	for name, c := range map[string]struct {
		sends             string // by the backend, after the client's
		client            string
		leaves            bool
		partial           bool // the client does not get what is no whole frame
		broken, cooldowns int
	}{
		"nothing":                         {broken: 1, cooldowns: 1},
		"nothing to what the client says": {client: text("hello"), broken: 1, cooldowns: 1},
		"a ping":                          {sends: "\x89\x00", broken: 1, cooldowns: 1},
		"a part of a frame's head":        {sends: "\x81", partial: true, broken: 1, cooldowns: 1},
		"a message":                       {sends: text("hello"), broken: 1},
		"a part of a message":             {sends: "\x81\x7eff", partial: true, broken: 1},
		"a close frame":                   {sends: closeFrame},
		"a message and a close frame":     {sends: text("hello") + closeFrame},
		"what is like a close frame":      {sends: text(closeFrame), broken: 1},
		"nothing to a close frame":        {client: "\x88\x80abcd"},
		"nothing to a client that left":   {leaves: true},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, inOrder, func(t *testing.T, w *lbtest.World, open opener) {
				w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
					conn, rest, err := http.NewResponseController(rw).Hijack()
					if err != nil {
						panic(err)
					}
					defer conn.Close()
					io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nX-Backend: a\r\n\r\n")
					if c.leaves {
						io.Copy(io.Discard, rest)
					} else if _, err := io.CopyN(io.Discard, rest, int64(len(c.client))); err != nil {
						panic(err)
					}
					io.WriteString(conn, c.sends)
				})
				s := open("/v1/realtime?model=m")
				if s.ReadWriteCloser == nil || s.Backend != "a" {
					t.Fatalf("the handshake gives %d %v", s.Status, s.Err)
				}
				if c.client != "" {
					io.WriteString(s, c.client)
				}
				if c.leaves {
					s.Close()
				} else if got, _ := io.ReadAll(s); string(got) != c.sends && (len(got) > 0 || !c.partial) {
					t.Errorf("the client reads %q, want %q", got, c.sends)
				}
				time.Sleep(time.Second)
				broken, cooldowns := w.Logged("reply broken"), w.Logged("cooldown started")
				if len(broken) != c.broken || len(cooldowns) != c.cooldowns {
					t.Errorf("got the broken replies %v and the cooldowns %v, want %d and %d", broken, cooldowns, c.broken, c.cooldowns)
				}
				for _, cooldown := range cooldowns {
					if got := cooldown.ContextMap(); got["class"] != "broken_stream" || got["cause"] != "no_close_frame" || got["deployment"] != "m" {
						t.Errorf("the cooldown is %v", got)
					}
				}
			})
		})
	}
}

// resets opens a WebSocket, and resets it.
func resets(w http.ResponseWriter, _ *http.Request) {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		panic(err)
	}
	io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nX-Backend: a\r\n\r\n")
	conn.(*net.TCPConn).SetLinger(0)
	conn.Close()
}

// TestABackendThatOpensNoWebSocketIsLeftAlone has real sockets, and also a
// plain reverse_proxy.
func TestABackendThatOpensNoWebSocketIsLeftAlone(t *testing.T) {
	for proxy, config := range map[string]string{
		"openai_lb":     "openai_lb {\npool %[3]s\nbackend http://%[1]s\nbackend http://%[2]s {\npriority 2\n}\n}",
		"reverse_proxy": "reverse_proxy %[1]s %[2]s {\nlb_policy openai_lb {\nupstream %[2]s {\npriority 2\n}\n}\ntransport openai_lb\n}",
	} {
		t.Run(proxy, func(t *testing.T) {
			a, serverA := lbtest.Listen(t, "a")
			b, serverB := lbtest.Listen(t, "b")
			b.Replies(upgrades)
			certificate, client := lbtest.ServerCertificate(t)
			http1 := client.Transport.(*http.Transport).Clone()
			http1.Protocols, http1.TLSClientConfig.NextProtos = new(http.Protocols), nil
			http1.Protocols.SetHTTP1(true)
			for name, reply := range map[string]http.HandlerFunc{
				"a refused key": lbtest.Status(401), "a 500": lbtest.Status(500), "a 200": nil,
				"another protocol": lbtest.Raw("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: foo\r\n\r\n"), "a reset after the 101": resets,
			} {
				{
					t.Run(name, func(t *testing.T) {
						a.Replies(reply)
						a.Forget()
						port, pool := lbtest.FreePort(t), lbtest.Unique("websockets")
						lbtest.Run(t, fmt.Sprintf("{\nadmin off\nauto_https off\ndefault_bind 127.0.0.1\n}\nhttps://127.0.0.1:%d {\n%s\n%s\n}", port, certificate,
							fmt.Sprintf(config, serverA.Listener.Addr(), serverB.Listener.Addr(), pool)))
						before := runtime.NumGoroutine()
						for i := range 3 {
							header := http.Header{"Sec-Websocket-Version": {"13"}, "Sec-Websocket-Key": {"dGhlIHNhbXBsZSBub25jZQ=="}}
							r := lbtest.NewRequest(t, http.MethodGet, fmt.Sprintf("https://127.0.0.1:%d/v1/realtime?model=m", port), nil)
							r.Header = header
							header["Connection"], header["Upgrade"] = []string{"Upgrade"}, []string{"websocket"}
							s := open(t, http1, r)
							if s.ReadWriteCloser == nil {
								t.Fatalf("the handshake gives %d %s (%v)", s.Status, s.Body, s.Err)
							}
							if s.Backend == "a" && i == 0 && name == "a reset after the 101" {
								io.ReadAll(s) // until the reset, of which the directive learns when its request is over
								lbtest.WaitFor(t, func() bool {
									return proxy == "reverse_proxy" || lbtest.SumOf(t, "cooldowns_total", map[string]string{"pool": pool, "class": "broken_stream"}) == 1
								})
							} else if s.Backend != "b" {
								t.Errorf("%s opens the WebSocket", s.Backend)
							}
							s.Close()
						}
						if n := len(a.Received()); n != 1 {
							t.Errorf("a was called %d times, want once: its cooldown holds", n)
						}
						http1.CloseIdleConnections()
						lbtest.WaitFor(t, func() bool { return runtime.NumGoroutine() <= before+5 })
					})
				}
			}
		})
	}
}
