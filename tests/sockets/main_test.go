// Package sockets tests the messages of WebSockets: the first one, which
// decides on the backend, and what each response costs.
package sockets

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gobwas/ws"
	"golang.org/x/net/websocket"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

func TestMain(m *testing.M) { lbtest.Main(m) }

const aliceKey, bobKey = "sk-alice-0123456789", "sk-bob-0123456789ab"

// keyed are the options of a pool with the callers alice and bob.
func keyed(options string) string {
	return "openai_lb {\npool " + lbtest.Unique("sockets") + "\nclient_key alice " + aliceKey + "\nclient_key bob " + bobKey + "\n" + options + "\n}"
}

// client is the client's side of a WebSocket. It answers pings from its first
// message on.
type client struct {
	t *testing.T
	io.ReadWriteCloser
	r       *bufio.Reader
	frames  chan frame // what it has got
	listens sync.Once
}

type frame struct {
	first   byte
	payload string
}

// dial opens a WebSocket over HTTP/1.1 with a caller's key.
func dial(t *testing.T, w *lbtest.World, path, key string) *client {
	t.Helper()
	c, res := handshake(t, w, path, key)
	if c == nil {
		text, _ := io.ReadAll(res.Body)
		t.Fatalf("the handshake gives %d %s", res.StatusCode, text)
	}
	return c
}

// handshake is dial, but may be refused.
func handshake(t *testing.T, w *lbtest.World, path, key string, headers ...string) (*client, *http.Response) {
	t.Helper()
	r := w.Request(http.MethodGet, path, nil)
	r.Header = http.Header{
		"Connection": {"Upgrade"}, "Upgrade": {"websocket"}, "Sec-Websocket-Version": {"13"}, "Sec-Websocket-Key": {"dGhlIHNhbXBsZSBub25jZQ=="},
		"Authorization": {"Bearer " + key},
	}
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	res, err := w.Client.Transport.RoundTrip(r)
	if err != nil {
		t.Fatal(err)
	}
	if res.StatusCode != http.StatusSwitchingProtocols {
		t.Cleanup(func() { res.Body.Close() })
		return nil, res
	}
	// RFC 6455 section 1.3
	if path != "/v1/realtime" && strings.HasSuffix(path, "/responses") && res.Header.Get("Sec-WebSocket-Accept") != "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" {
		t.Errorf("the handshake is %v", res.Header)
	}
	conn := res.Body.(io.ReadWriteCloser)
	t.Cleanup(func() { conn.Close() })
	return newClient(t, conn), res
}

func newClient(t *testing.T, conn io.ReadWriteCloser) *client {
	return &client{t: t, ReadWriteCloser: conn, r: bufio.NewReader(conn), frames: make(chan frame, 1<<16)}
}

// masked returns a frame of a client.
func masked(first byte, payload string) []byte {
	f := []byte{first}
	switch n := len(payload); {
	case n < 126:
		f = append(f, 0x80|byte(n))
	case n <= 0xffff:
		f = binary.BigEndian.AppendUint16(append(f, 0x80|126), uint16(n))
	default:
		f = binary.BigEndian.AppendUint64(append(f, 0x80|127), uint64(n))
	}
	mask := []byte{1, 2, 3, 4}
	f = append(f, mask...)
	for i := range len(payload) {
		f = append(f, payload[i]^mask[i%4])
	}
	return f
}

// say sends a message.
func (c *client) say(text string) {
	c.t.Helper()
	c.listen()
	if _, err := c.Write(masked(0x81, text)); err != nil {
		c.t.Fatal(err)
	}
}

// listen begins to read what comes.
func (c *client) listen() {
	c.listens.Do(func() {
		go func() {
			defer close(c.frames)
			for {
				h, err := ws.ReadHeader(c.r)
				text := make([]byte, h.Length)
				if err == nil {
					_, err = io.ReadFull(c.r, text)
				}
				if err != nil {
					c.frames <- frame{0, err.Error()}
					return
				}
				if h.OpCode == ws.OpPing {
					go c.Write(masked(0x8a, string(text))) // while the balancer may write, too
					continue
				}
				first := byte(h.OpCode) | h.Rsv<<4
				if h.Fin {
					first |= 0x80
				}
				c.frames <- frame{first, string(text)}
			}
		}()
	})
}

// next returns the next frame that is no ping.
func (c *client) next() (first byte, payload string) {
	c.t.Helper()
	c.listen()
	f := <-c.frames
	return f.first, f.payload
}

// event is one of a server's.
type event struct {
	Type     string
	Status   int
	Text     string // of a delta
	Response struct {
		ID, Status    string
		StatusDetails struct {
			Error struct{ Code, Type string }
		} `json:"status_details"`
	}
	Error struct {
		Code, Type, Message string
		EventID             string `json:"event_id"`
		Headers             map[string]string
	}
	Headers map[string]string
	raw     string
}

// hears returns the next event.
func (c *client) hears() (e event) {
	c.t.Helper()
	first, text := c.next()
	if first != 0x81 || json.Unmarshal([]byte(text), &e) != nil {
		c.t.Fatalf("the client got a frame %#x %q, want an event", first, text)
	}
	e.raw = text
	return e
}

// wantError checks that the next event is an error with this status and code.
func (c *client) wantError(status int, code string) event {
	c.t.Helper()
	e := c.hears()
	if e.Type != "error" || e.Status != status || e.Error.Code != code {
		c.t.Fatalf("the client got %s, want an error %d %s", e.raw, status, code)
	}
	return e
}

// wantServed checks that the next events are a response, and returns its id.
func (c *client) wantServed(by string) string {
	c.t.Helper()
	for {
		e := c.hears()
		if e.Type == "error" {
			c.t.Fatalf("the client got %s", e.raw)
		}
		if e.Type == "response.completed" || e.Type == "response.done" {
			if !strings.Contains(e.Response.ID, "_"+by+"_") {
				c.t.Fatalf("the client got %s, want it from %s", e.raw, by)
			}
			return e.Response.ID
		}
	}
}

// wantClosed checks that a close frame with this code comes next.
func (c *client) wantClosed(code uint16) {
	c.t.Helper()
	if first, text := c.next(); first != 0x88 || len(text) < 2 || binary.BigEndian.Uint16([]byte(text)) != code {
		c.t.Fatalf("the client got a frame %#x %q, want it to be closed with %d", first, text, code)
	}
}

// speaks is a backend that answers each message with these events.
func speaks(answer func(socket *websocket.Conn, message string)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		websocket.Server{Handler: func(socket *websocket.Conn) {
			socket.MaxPayloadBytes = 64 << 20
			for {
				var message string
				if websocket.Message.Receive(socket, &message) != nil {
					return
				}
				answer(socket, message)
			}
		}}.ServeHTTP(w, r)
	}
}

// responds is a backend that answers each response.create with a response of
// its own that has used these tokens.
func responds(name string, input, output int) http.HandlerFunc {
	var n atomic.Int32
	return speaks(func(socket *websocket.Conn, message string) {
		if !strings.Contains(message, "response.create") {
			return
		}
		id := fmt.Sprintf("resp_%s_%010d", name, n.Add(1))
		for _, text := range []string{
			`{"type":"response.created","sequence_number":0,"response":{"id":"` + id + `","object":"response","status":"in_progress","error":null,"usage":null}}`,
			`{"type":"response.output_text.delta","sequence_number":1,"delta":"hello"}`,
			fmt.Sprintf(`{"type":"response.completed","sequence_number":2,"response":{"id":"%s","object":"response","status":"completed","error":null,"usage":{"input_tokens":%d,"output_tokens":%d,"total_tokens":%d}}}`, id, input, output, input+output),
		} {
			websocket.Message.Send(socket, text)
		}
	})
}

// of returns what a caller has used.
func of(w *lbtest.World, name string) ratelimit.Snapshot {
	for _, c := range lbtest.LimitersOf(w.Handler.Pool).All() {
		if c.Name() == name {
			return c.Snapshot(time.Now())
		}
	}
	return ratelimit.Snapshot{}
}
