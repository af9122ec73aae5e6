package streams

//lint:file-ignore SA1019 net/http's own client refuses the pseudo-header of an extended CONNECT

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// upgrades accepts a WebSocket handshake and sends back what it gets.
func upgrades(w http.ResponseWriter, r *http.Request) {
	conn, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		panic(err)
	}
	defer conn.Close()
	// RFC 6455 section 1.3: the accept key of this test's handshake
	fmt.Fprintf(rw, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"+
		"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\nSec-WebSocket-Protocol: realtime\r\nX-Backend: %s\r\n\r\n", w.Header().Get("X-Backend"))
	rw.Flush()
	io.Copy(conn, rw)
}

func TestARealtimeConnectionFailsOverOnItsHandshake(t *testing.T) {
	for _, path := range []string{
		"/v1/realtime?model=gpt-realtime",
		"/openai/v1/realtime?model=gpt-realtime",
		"/openai/realtime?api-version=2024-10-01-preview&deployment=gpt-realtime&api-key=secret",
	} {
		t.Run(path, func(t *testing.T) {
			a, serverA := lbtest.Listen(t, "a")
			a.Replies(lbtest.Throttled("300"))
			b, serverB := lbtest.Listen(t, "b")
			b.Replies(upgrades)
			address := lbtest.ServeAt(t, fmt.Sprintf(`openai_lb {
				backend %s {
					auth api_key
					api_key key-of-a
				}
				backend %s {
					priority 2
					auth api_key
					api_key key-of-b
				}
			}`, serverA.URL, serverB.URL))
			for range 2 {
				conn := lbtest.Dial(t, address)
				fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: lb\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"+
					"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"+
					"Sec-WebSocket-Protocol: realtime, openai-insecure-api-key.secret, openai-beta.realtime-v1\r\n\r\n", path)
				r := bufio.NewReader(conn)
				res, err := http.ReadResponse(r, nil)
				if err != nil {
					t.Fatal(err)
				}
				if res.StatusCode != 101 || res.Header.Get("X-Backend") != "b" || res.Header.Get("Sec-WebSocket-Protocol") != "realtime" {
					t.Fatalf("the handshake gives %d %v", res.StatusCode, res.Header)
				}
				for _, message := range []string{"ping", strings.Repeat("x", 100_000)} {
					go io.WriteString(conn, message)
					got := make([]byte, len(message))
					if _, err := io.ReadFull(r, got); err != nil || string(got) != message {
						t.Fatalf("the echo of %d bytes is %d bytes: %v", len(message), len(got), err)
					}
				}
			}
			if n := len(a.Received()); n != 1 {
				t.Errorf("a was asked %d times, want once: its cooldown holds", n)
			}
			for _, call := range append(a.Received(), b.Received()...) {
				if text := fmt.Sprint(call.Request.Header, call.Request.URL); strings.Contains(text, "secret") {
					t.Errorf("a backend got the caller's key: %s", text)
				}
				if got := call.Request.Header.Get("Sec-WebSocket-Protocol"); got != "realtime, openai-beta.realtime-v1" {
					t.Errorf("a backend got the subprotocols %q", got)
				}
			}
		})
	}
}

// handshake opens a WebSocket, and returns the answer.
func handshake(t *testing.T, address, path string) (res *http.Response, body string) {
	conn := lbtest.Dial(t, address)
	defer conn.Close()
	fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: lb\r\nUpgrade: WebSocket\r\nConnection: Upgrade\r\n"+
		"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n", path)
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	if res.StatusCode != http.StatusSwitchingProtocols {
		text, err := io.ReadAll(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		body = string(text)
	}
	return res, body
}

func TestAWebSocketOfResponsesIsOpenBeforeABackendIsChosen(t *testing.T) {
	a, server := lbtest.Listen(t, "a")
	a.Replies(upgrades)
	address := lbtest.ServeAt(t, "openai_lb {\nbackend "+server.URL+" {\nmodel gpt-4o\n}\n}")
	for _, path := range []string{"/v1/responses", "/responses", "/openai/v1/responses/", "/openai/responses?api-version=1"} {
		// RFC 6455 section 1.3: the accept key of this test's handshake
		if res, _ := handshake(t, address, path); res.StatusCode != 101 || res.Header.Get("Sec-WebSocket-Accept") != "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" {
			t.Errorf("%s: the handshake gives %d %v", path, res.StatusCode, res.Header)
		}
	}
	for _, path := range []string{"/v1/Responses", "/v1/respons%65s", "/v1/responses;x"} {
		res, body := handshake(t, address, path)
		lbtest.Reply{Status: res.StatusCode, Header: res.Header, Body: body}.WantError(t, 400, "invalid_path")
	}
	if calls := len(a.Received()); calls != 0 {
		t.Errorf("there are %d calls", calls)
	}
	if res, _ := handshake(t, address, "/v1/realtime?model=gpt-4o"); res.StatusCode != 101 {
		t.Errorf("a realtime connection gives %d", res.StatusCode)
	}
}

// TestAWebSocketEndsSoonAfterOneOfItsSides has a client or a backend end its
// side without a close frame, while the other side keeps its own open, as Node
// does. The only place at the backend is then free again.
func TestAWebSocketEndsSoonAfterOneOfItsSides(t *testing.T) {
	for name, c := range map[string]struct {
		backend func(net.Conn)
		client  func(*net.TCPConn) error
	}{
		"the client":  {func(net.Conn) {}, (*net.TCPConn).CloseWrite},
		"the backend": {func(conn net.Conn) { conn.(*net.TCPConn).CloseWrite() }, func(*net.TCPConn) error { return nil }},
	} {
		for proxy, config := range map[string]string{
			"openai_lb":     "openai_lb {\nbackend http://%s {\nmax_requests 1\n}\n}",
			"reverse_proxy": "reverse_proxy %s {\nlb_policy openai_lb\ntransport openai_lb\n}",
		} {
			t.Run(name+", "+proxy, func(t *testing.T) {
				a, server := lbtest.Listen(t, "a")
				over := make(chan struct{})
				defer close(over)
				a.Replies(func(w http.ResponseWriter, r *http.Request) {
					a.Recovers()
					conn, _, err := http.NewResponseController(w).Hijack()
					if err != nil {
						panic(err)
					}
					defer conn.Close()
					io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
					c.backend(conn)
					<-over
				})
				address := lbtest.ServeAt(t, fmt.Sprintf(config, server.Listener.Addr()))
				conn := lbtest.Dial(t, address)
				io.WriteString(conn, "GET /v1/realtime?model=m HTTP/1.1\r\nHost: lb\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"+
					"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n")
				if res, err := http.ReadResponse(bufio.NewReaderSize(conn, 16), nil); err != nil || res.StatusCode != 101 {
					t.Fatal(res, err)
				}
				if err := c.client(conn.(*net.TCPConn)); err != nil {
					t.Fatal(err)
				}
				if rest, err := io.ReadAll(conn); len(rest) > 0 || err != nil {
					t.Errorf("the client reads %q, %v, and not the end", rest, err)
				}
				conn.SetDeadline(time.Time{})
				lbtest.WaitFor(t, func() bool {
					_, err := io.WriteString(conn, "x")
					return err != nil
				})
				client := lbtest.NewClient(t)
				lbtest.WaitFor(t, func() bool { return lbtest.Ask(client, "http://"+address+"/v1/chat/completions").Status == 200 })
			})
		}
	}
}

func TestAClientThatReadsNothingDoesNotHoldUpAReload(t *testing.T) {
	a, server := lbtest.Listen(t, "a")
	stuck := make(chan struct{})
	a.Replies(func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			panic(err)
		}
		defer conn.Close()
		io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n")
		for frame := append([]byte{0x82, 126, 0x10, 0}, make([]byte, 0x1000)...); err == nil; _, err = conn.Write(frame) {
			conn.SetWriteDeadline(time.Now().Add(500 * time.Millisecond))
		}
		close(stuck)
		io.Copy(io.Discard, conn)
	})
	address := fmt.Sprintf("127.0.0.1:%d", lbtest.FreePort(t))
	config := func(n int) string {
		return fmt.Sprintf("{\nadmin off\ndefault_bind 127.0.0.1\n}\nhttp://%s {\nheader X-Config %d\nopenai_lb {\nbackend %s\n}\n}", address, n, server.URL)
	}
	lbtest.Run(t, config(1))
	conn := lbtest.Dial(t, address)
	io.WriteString(conn, "GET /v1/realtime?model=m HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n")
	<-stuck
	reloaded := make(chan struct{})
	go func() {
		defer close(reloaded)
		lbtest.Reload(t, config(2))
	}()
	select {
	case <-reloaded:
	case <-time.After(15 * time.Second):
		t.Error("the reload waits for the client")
		conn.Close()
		<-reloaded
	}
}

func TestBothSidesOfAWebSocketGetACloseFrameWhenAReloadEndsIt(t *testing.T) {
	a, server := lbtest.Listen(t, "a")
	backendGot := make(chan []byte, 1)
	a.Replies(func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			panic(err)
		}
		defer conn.Close()
		io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n")
		got, _ := io.ReadAll(conn)
		backendGot <- got
	})
	address := fmt.Sprintf("127.0.0.1:%d", lbtest.FreePort(t))
	config := func(n int) string {
		return fmt.Sprintf("{\nadmin off\ndefault_bind 127.0.0.1\n}\nhttp://%s {\nheader X-Config %d\nopenai_lb {\nbackend %s\n}\n}", address, n, server.URL)
	}
	lbtest.Run(t, config(1))
	conn := lbtest.Dial(t, address)
	io.WriteString(conn, "GET /v1/realtime?model=m HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n")
	if res, err := http.ReadResponse(bufio.NewReaderSize(conn, 16), nil); err != nil || res.StatusCode != 101 {
		t.Fatal(res, err)
	}
	lbtest.Reload(t, config(2))
	if got, _ := io.ReadAll(conn); string(got) != "\x88\x02\x03\xe9" {
		t.Errorf("the client gets %q, want a close frame with 1001", got)
	}
	// a client's frame is masked (RFC 6455 section 5.3): its head is followed
	// by a key of four bytes
	if got := <-backendGot; len(got) != 8 || string(got[:2]) != "\x88\x82" || got[6]^got[2] != 0x03 || got[7]^got[3] != 0xe9 {
		t.Errorf("the backend gets %q, want a masked close frame with 1001", got)
	}
}

func TestTheClientOfAWebSocketMaySendNothingForHours(t *testing.T) {
	inWorld(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World, open opener) {
		w.ReadIdle = time.Minute
		w.Backends["a"].Replies(upgrades)
		s := open("/v1/realtime?model=m")
		s.wantOpen(t, "a")
		time.Sleep(5 * time.Hour)
		s.wantOpen(t, "a")
	})
}
