// Package callers tests what callers may use: limits of requests and tokens,
// what a request costs, and what the client gets if a limit refuses it.
package callers

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

func TestMain(m *testing.M) { lbtest.Main(m) }

const (
	aliceKey = "sk-alice-0123456789"
	bobKey   = "sk-bob-0123456789ab"
)

// world is a balancer with the callers alice and bob, and a backend called a.
type world struct{ *lbtest.World }

// inBubble runs a test with these options. Each pool has its own name, because
// a name's use is saved.
func inBubble(t *testing.T, options string, test func(*testing.T, *world)) {
	t.Helper()
	inBubbleWith(t, "backend http://a\n"+options, test)
}

// inBubbleWith is inBubble with other backends.
func inBubbleWith(t *testing.T, options string, test func(*testing.T, *world)) {
	t.Helper()
	config := "openai_lb {\npool " + lbtest.Unique("callers") + "\nclient_key alice " + aliceKey + "\nclient_key bob " + bobKey + "\n" + options + "\n}"
	lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
		time.Sleep(time.Until(time.Now().Truncate(time.Hour).Add(time.Hour))) // windows begin here
		test(t, &world{w})
	})
}

// post sends a request with a caller's key.
func (w *world) post(key, path, body string) lbtest.Reply {
	r := w.Request(http.MethodPost, path, strings.NewReader(body))
	r.Header.Set("Authorization", "Bearer "+key)
	return w.Send(r)
}

// chat sends a chat of alice's.
func (w *world) chat(body string) lbtest.Reply { return w.post(aliceKey, "/v1/chat/completions", body) }

// of returns what a caller has used.
func (w *world) of(name string) ratelimit.Snapshot {
	for _, c := range lbtest.LimitersOf(w.Handler.Pool).All() {
		if c.Name() == name {
			return c.Snapshot(time.Now())
		}
	}
	return ratelimit.Snapshot{}
}

// wantUse checks what alice has used today, that no request is in flight and
// nothing reserved.
func (w *world) wantUse(t *testing.T, tokens int64) {
	t.Helper()
	s := w.of("alice")
	if s.Today != tokens || s.Reserved != 0 || s.InFlight != 0 {
		t.Errorf("alice has used %d tokens (%d reserved, %d in flight), want %d", s.Today, s.Reserved, s.InFlight, tokens)
	}
}

// used answers with a chat completion that used these tokens.
func used(prompt, output int) http.HandlerFunc {
	return lbtest.Says(200, `{"id":"chatcmpl-1","choices":[],"usage":`+usage(prompt, output)+`}`)
}

func usage(prompt, output int) string {
	return fmt.Sprintf(`{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}`, prompt, output, prompt+output)
}

// prompt returns a chat that is as long as so many tokens, and has these
// further members.
func prompt(tokens int, members string) string {
	body := `{"model":"gpt-4o",` + members + `"messages":[{"role":"user","content":""}]}`
	return strings.Replace(body, `""`, `"`+strings.Repeat("x", 4*tokens-len(body))+`"`, 1)
}

// wantRefused checks for a 429 with this code, type and message.
func wantRefused(t *testing.T, got lbtest.Reply, code, kind, message string) {
	t.Helper()
	got.WantError(t, http.StatusTooManyRequests, code)
	if want := `{"error":{"message":` + strconv.Quote(message) + `,"type":"` + kind + `","param":null,"code":"` + code + `"}}`; got.Body != want {
		t.Errorf("got %s, want %s", got.Body, want)
	}
}

// wantHeaders checks headers, in pairs. An empty value is none.
func wantHeaders(t *testing.T, got lbtest.Reply, headers ...string) {
	t.Helper()
	for i := 0; i < len(headers); i += 2 {
		if value := got.Header.Get(headers[i]); value != headers[i+1] {
			t.Errorf("%s is %q, want %q", headers[i], value, headers[i+1])
		}
	}
}

// now is the time of tests with sockets.
func now() time.Time { return time.Now() }
