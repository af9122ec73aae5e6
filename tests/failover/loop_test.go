package failover

import (
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/websocket"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

const loopHeader = "Openai-Lb-Loop"

// loops are sites of one Caddy that send requests to each other, by their
// ports. max_requests ends a loop that is not found.
type loops struct {
	t     *testing.T
	log   string
	sites strings.Builder
}

func (l *loops) site(port int, options string, backends ...string) {
	fmt.Fprintf(&l.sites, "http://:%d {\nopenai_lb {\npool %s\n%s\n", port, lbtest.Unique("loop"), options)
	for i, backend := range backends {
		fmt.Fprintf(&l.sites, "backend %s {\npriority %d\nname backend-%d\nmax_requests 20\napi_key key-of-the-balancer\n}\n", backend, i+1, i+1)
	}
	l.sites.WriteString("}\n}\n")
}

func (l *loops) run() {
	l.log = filepath.Join(l.t.TempDir(), "log.json")
	lbtest.Run(l.t, "{\nadmin off\ndefault_bind 127.0.0.1\nlog {\nlevel INFO\noutput file "+l.log+"\n}\n}\n"+l.sites.String())
}

// wantErrors checks how often the log says that a backend leads back, and that
// no cooldown started.
func (l *loops) wantErrors(want int) {
	l.t.Helper()
	log := string(lbtest.ReadFile(l.t, l.log))
	if got := strings.Count(log, `"level":"error"`); got != want || strings.Count(log, `"msg":"backend leads back to the load balancer"`) != want {
		l.t.Errorf("the log has %d errors, want %d that a backend leads back:\n%s", got, want, log)
	}
	if strings.Contains(log, "cooldown started") {
		l.t.Errorf("a cooldown started:\n%s", log)
	}
}

func at(port int) string { return fmt.Sprintf("http://127.0.0.1:%d", port) }

func TestARequestThatComesBackIsSentNoFurther(t *testing.T) {
	client := lbtest.NewClient(t)
	for name, site := range map[string]func(l *loops) (asked int, errors int){
		"the balancer is its own backend": func(l *loops) (int, int) {
			self := lbtest.FreePort(t)
			l.site(self, "", at(self))
			return self, 1
		},
		"its own backend, which has no key of a caller": func(l *loops) (int, int) {
			self, entry := lbtest.FreePort(t), lbtest.FreePort(t)
			l.site(self, "client_key balancer key-of-the-balancer", at(entry))
			l.site(entry, "", at(self))
			return entry, 2
		},
		"two balancers": func(l *loops) (int, int) {
			one, two := lbtest.FreePort(t), lbtest.FreePort(t)
			l.site(one, "", at(two))
			l.site(two, "", at(one))
			return one, 2
		},
		"three balancers behind another one": func(l *loops) (int, int) {
			entry, one, two, three := lbtest.FreePort(t), lbtest.FreePort(t), lbtest.FreePort(t), lbtest.FreePort(t)
			l.site(entry, "", at(one))
			l.site(one, "", at(two))
			l.site(two, "", at(three))
			l.site(three, "", at(one))
			return entry, 4
		},
	} {
		t.Run(name, func(t *testing.T) {
			l := &loops{t: t}
			asked, errors := site(l)
			l.run()
			for _, body := range []string{`{"model":"gpt-5"}`, `{"model":"gpt-5","stream":true}`} {
				reply := lbtest.Post(client, at(asked)+"/v1/chat/completions", body)
				reply.WantError(t, http.StatusLoopDetected, "loop_detected")
				if got := reply.Header.Get("X-Should-Retry"); got != "false" {
					t.Errorf("x-should-retry is %q", got)
				}
			}
			lbtest.Post(client, at(asked)+"/v1/files", `{}`).WantError(t, http.StatusLoopDetected, "loop_detected")
			lbtest.Get(client, at(asked)+"/v1/realtime?model=gpt-5", "Connection", "Upgrade", "Upgrade", "websocket", "Sec-WebSocket-Version", "13",
				"Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ==").WantError(t, http.StatusLoopDetected, "loop_detected")
			l.wantErrors(errors)
		})
	}
}

func TestAWebSocketThatComesBackIsAnErrorInItsFirstMessage(t *testing.T) {
	l, self := &loops{t: t}, lbtest.FreePort(t)
	l.site(self, "", at(self))
	l.run()
	socket, err := websocket.Dial(strings.Replace(at(self), "http", "ws", 1)+"/v1/responses", "", at(self))
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	socket.SetDeadline(time.Now().Add(20 * time.Second))
	if err := websocket.Message.Send(socket, `{"type":"response.create","model":"gpt-5","input":"hi"}`); err != nil {
		t.Fatal(err)
	}
	var e struct {
		Status int
		Error  struct{ Code string }
	}
	if err := websocket.JSON.Receive(socket, &e); err != nil || e.Status != http.StatusLoopDetected {
		t.Errorf("the first message is answered with %+v (%v)", e, err)
	}
	l.wantErrors(1)
}

func TestAPoolMayBeABackendOfAnotherOne(t *testing.T) {
	backend, server := lbtest.Listen(t, "a")
	l, front, back := &loops{t: t}, lbtest.FreePort(t), lbtest.FreePort(t)
	l.site(front, "", at(back))
	l.site(back, "", server.URL)
	l.run()
	client := lbtest.NewClient(t)
	for range 3 {
		lbtest.Ask(client, at(front)+"/v1/chat/completions").WantServed(t, "a")
	}
	for _, call := range backend.Received() {
		if marks := call.Request.Header[loopHeader]; len(marks) != 2 || marks[0] == marks[1] || len(marks[0]) < 26 {
			t.Errorf("the request has passed %q, want two handlers", marks)
		}
	}
	l.wantErrors(0)
}

func TestARequestThatComesBackFailsOver(t *testing.T) {
	backend, server := lbtest.Listen(t, "a")
	l, self := &loops{t: t}, lbtest.FreePort(t)
	l.site(self, "", at(self), server.URL)
	l.run()
	client := lbtest.NewClient(t)
	for range 3 {
		lbtest.Ask(client, at(self)+"/v1/chat/completions").WantServed(t, "a")
		lbtest.Post(client, at(self)+"/v1/files", `{}`).WantServed(t, "a") // it was not executed
	}
	l.wantErrors(1)
	backend.Replies(lbtest.Throttled("7"))
	for range 2 {
		lbtest.Ask(client, at(self)+"/v1/chat/completions").WantError(t, 429, "rate_limit_exceeded")
	}
	if n := len(backend.Received()); n != 7 {
		t.Errorf("a was called %d times, want 7", n)
	}
}

func TestAClientThatNamesAnotherMarkIsServed(t *testing.T) {
	backend, server := lbtest.Listen(t, "a")
	l, front := &loops{t: t}, lbtest.FreePort(t)
	l.site(front, "", server.URL)
	l.run()
	client := lbtest.NewClient(t)
	for _, mark := range []string{"", ",", "x", strings.Repeat("x,", 1000)} {
		lbtest.Ask(client, at(front)+"/v1/chat/completions", loopHeader, mark).WantServed(t, "a")
	}
	lbtest.Ask(client, at(front)+"/v1/chat/completions", loopHeader, "x", "Connection", loopHeader).WantServed(t, "a")
	marks := backend.Received()[4].Request.Header[loopHeader]
	if len(marks) != 1 || marks[0] == "x" {
		t.Errorf("a field that Connection names goes on as %q", marks)
	}
	lbtest.Ask(client, at(front)+"/v1/chat/completions", loopHeader, marks[0]).WantError(t, http.StatusLoopDetected, "loop_detected")
	lbtest.Ask(client, at(front)+"/v1/chat/completions", loopHeader, "x, "+marks[0]+" ,y").WantError(t, http.StatusLoopDetected, "loop_detected")
	l.wantErrors(0)
}

func TestNoKnownProviderIsToldWhatARequestHasPassed(t *testing.T) {
	for backend, told := range map[string]bool{
		"http://api.openai.com": false, "http://eu.api.openai.com": false, "http://api.anthropic.com": false,
		"http://x.openai.azure.com": false, "http://x.cognitiveservices.azure.com": false, "http://x.services.ai.azure.com": false,
		"http://x.openai.azure.us": false, "http://openai.azure.com": true, "http://notapi.openai.com.example": true, "http://gateway": true,
	} {
		lbtest.InBubble(t, "openai_lb {\nbackend "+backend+" {\nauth none\nheader -"+loopHeader+"\n}\n}", func(t *testing.T, w *lbtest.World) {
			r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{"model":"gpt-5"}`))
			r.Header.Set(loopHeader, "x")
			host := strings.TrimPrefix(backend, "http://")
			w.Send(r).WantServed(t, host)
			if got := w.Backends[host].Received()[0].Request.Header[loopHeader]; (got != nil) != told {
				t.Errorf("%s gets %q", backend, got)
			}
		})
	}
}
