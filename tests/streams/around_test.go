package streams

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// replacing is Caddy's directive intercept, which replaces errors. It leaves
// the header of an error as it is, also its length.
const replacing = `intercept {
	@failed status 401 429 5xx
	handle_response @failed {
		header >Content-Type text/plain
		header -Content-Length
		respond "{http.intercept.status_code} of {http.openai_lb.class}" 503
	}
}
`

// TestAStreamFlowsThroughAnInterceptThatDoesNotMatch has a backend that sends
// each event when the client has read the one before.
func TestAStreamFlowsThroughAnInterceptThatDoesNotMatch(t *testing.T) {
	a, server := lbtest.Listen(t, "a")
	read := make(chan struct{})
	a.Replies(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for range 5 {
			io.WriteString(w, lbtest.StreamContent)
			w.(http.Flusher).Flush()
			<-read
		}
		io.WriteString(w, lbtest.StreamEnd)
	})
	address := lbtest.ServeAt(t, replacing+"openai_lb {\nbackend "+server.URL+"\n}", "servers {\nprotocols h1 h2c\n}")
	for _, http2 := range []bool{false, true} {
		t.Run(fmt.Sprintf("HTTP/2: %t", http2), func(t *testing.T) {
			transport := &http.Transport{Protocols: new(http.Protocols)}
			defer transport.CloseIdleConnections()
			transport.Protocols.SetHTTP1(!http2)
			transport.Protocols.SetUnencryptedHTTP2(http2)
			r := lbtest.NewRequest(t, http.MethodPost, "http://"+address+"/v1/chat/completions", strings.NewReader(`{"stream":true}`))
			res := lbtest.Do(t, &http.Client{Transport: transport}, r)
			for range 5 {
				event := make([]byte, len(lbtest.StreamContent))
				if _, err := io.ReadFull(res.Body, event); err != nil || string(event) != lbtest.StreamContent {
					t.Fatalf("an event is %q: %v", event, err)
				}
				read <- struct{}{}
			}
			if rest, err := io.ReadAll(res.Body); err != nil || string(rest) != lbtest.StreamEnd {
				t.Errorf("the end is %q: %v", rest, err)
			}
		})
	}
}

func TestAWebSocketOpensThroughAnInterceptThatDoesNotMatch(t *testing.T) {
	a, server := lbtest.Listen(t, "a")
	a.Replies(upgrades)
	address := lbtest.ServeAt(t, replacing+"header >X-Site mine\nopenai_lb {\nbackend "+server.URL+"\n}")
	conn := lbtest.Dial(t, address)
	fmt.Fprint(conn, "GET /v1/realtime?model=gpt-realtime HTTP/1.1\r\nHost: lb\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"+
		"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n")
	r := bufio.NewReader(conn)
	res, err := http.ReadResponse(r, nil)
	if err != nil || res.StatusCode != http.StatusSwitchingProtocols || res.Header.Get("X-Site") != "mine" {
		t.Fatalf("the handshake gives %+v: %v", res, err)
	}
	io.WriteString(conn, "ping")
	echo := make([]byte, 4)
	if _, err := io.ReadFull(r, echo); err != nil || string(echo) != "ping" {
		t.Errorf("the echo is %q: %v", echo, err)
	}
}

func TestAnInterceptThatMatchesAnErrorReplacesIt(t *testing.T) {
	a, server := lbtest.Listen(t, "a")
	address := lbtest.ServeAt(t, replacing+"openai_lb {\nclient_key alice client-key-of-alice\nbackend "+server.URL+"\n}")
	client, url := lbtest.NewClient(t), "http://"+address+"/v1/chat/completions"
	upgrade := []string{"Connection", "Upgrade", "Upgrade", "websocket", "Sec-WebSocket-Version", "13", "Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="}
	for _, c := range []struct {
		name    string
		reply   http.HandlerFunc
		key     string
		headers []string
		want    string
	}{
		{"none, the client's mistake", lbtest.Says(400, `{"error":{}}`), "client-key-of-alice", nil, `400 {"error":{}}`},
		{"none, served", lbtest.Says(200, `{}`), "client-key-of-alice", nil, `200 {}`},
		{"the balancer's own", nil, "wrong", nil, "503 401 of unauthenticated"},
		{"a long one", lbtest.Says(500, `{"error":{"message":"`+lbtest.Noise(100<<10)+`"}}`), "client-key-of-alice", nil, "503 500 of failed"},
		{"a throttle, during the cooldown", lbtest.Throttled("60"), "client-key-of-alice", nil, "503 429 of all_throttled"},
		{"of a handshake", nil, "wrong", upgrade, "503 401 of unauthenticated"},
	} {
		t.Run(c.name, func(t *testing.T) {
			a.Replies(c.reply)
			at := url
			if c.headers != nil {
				at = "http://" + address + "/v1/realtime?model=gpt-realtime"
			}
			reply := lbtest.Post(client, at, `{"model":"gpt-4o"}`, append(c.headers, "Api-Key", c.key)...)
			if c.headers != nil {
				reply = lbtest.Get(client, at, append(c.headers, "Api-Key", c.key)...)
			}
			if got := fmt.Sprint(reply.Status, " ", reply.Body); reply.Err != nil || got != c.want {
				t.Errorf("client got %.200q (%v), want %q", got, reply.Err, c.want)
			}
		})
	}
	if n := len(a.Received()); n != 4 {
		t.Errorf("a got %d requests, want 4: none is sent again", n)
	}
}

// TestCaddysHeaderChangesAllReplies has fields that the backend sends, too.
func TestCaddysHeaderChangesAllReplies(t *testing.T) {
	a, server := lbtest.Listen(t, "a")
	address := lbtest.ServeAt(t, `
		header >X-Set ours
		header >X-Backend-Shown {http.openai_lb.backend}
		header X-Early ours
		header ?X-Default ours
		header +X-Added ours
		header -X-Removed
		openai_lb {
			client_key alice client-key-of-alice
			ready_path /readyz
			backend `+server.URL+` {
				name a
			}
		}`)
	client, url := lbtest.NewClient(t), "http://"+address
	theirs := []string{"X-Set", "theirs", "X-Early", "theirs", "X-Default", "theirs", "X-Added", "theirs", "X-Removed", "theirs"}
	type fields struct{ set, early, byDefault, added, removed, backend []string }
	ours := []string{"ours"}
	both := fields{ours, []string{"ours", "theirs"}, []string{"theirs"}, []string{"ours", "theirs"}, nil, []string{"a"}}
	own := fields{ours, ours, ours, ours, nil, []string{""}}
	for _, c := range []struct {
		name string
		ask  func() lbtest.Reply
		body string
		want fields
	}{
		{"a reply", func() lbtest.Reply {
			a.Replies(lbtest.Says(200, "{}", theirs...))
			return lbtest.Post(client, url+"/v1/chat/completions", "{}", "Api-Key", "client-key-of-alice")
		}, "{}", both},
		{"a client's error", func() lbtest.Reply {
			a.Replies(lbtest.Says(400, "{}", theirs...))
			return lbtest.Post(client, url+"/v1/chat/completions", "{}", "Api-Key", "client-key-of-alice")
		}, "{}", both},
		{"a stream", func() lbtest.Reply {
			a.Replies(func(w http.ResponseWriter, r *http.Request) {
				for i := 0; i < len(theirs); i += 2 {
					w.Header().Set(theirs[i], theirs[i+1])
				}
				lbtest.Streams(lbtest.StreamContent, lbtest.StreamEnd)(w, r)
			})
			return lbtest.Post(client, url+"/v1/chat/completions", `{"stream":true}`, "Api-Key", "client-key-of-alice")
		}, lbtest.StreamContent + lbtest.StreamEnd, both},
		{"a wrong key", func() lbtest.Reply { return lbtest.Post(client, url+"/v1/chat/completions", "{}", "Api-Key", "wrong") }, "", own},
		{"readiness", func() lbtest.Reply { return lbtest.Get(client, url+"/readyz") }, "", own},
	} {
		t.Run(c.name, func(t *testing.T) {
			reply := c.ask()
			h := reply.Header
			for name, want := range map[string][]string{
				"X-Set": c.want.set, "X-Early": c.want.early, "X-Default": c.want.byDefault, "X-Added": c.want.added,
				"X-Removed": c.want.removed, "X-Backend-Shown": c.want.backend,
			} {
				if got := h.Values(name); !slices.Equal(slices.Sorted(slices.Values(got)), want) {
					t.Errorf("%d has %s: %q, want %q", reply.Status, name, got, want)
				}
			}
			if reply.Err != nil || c.body != "" && reply.Body != c.body {
				t.Errorf("the body is %q: %v", reply.Body, reply.Err)
			}
		})
	}
}
