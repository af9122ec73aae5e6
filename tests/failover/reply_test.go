package failover

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// What a reply means: the docs' page about replies, row by row, through Caddy
// itself. The first backend gives the reply, the second would serve.
func TestWhatAReplyMeans(t *testing.T) {
	const quota = `{"error":{"message":"You exceeded your current quota","type":"insufficient_quota","param":null,"code":"insufficient_quota"}}`
	const azure429 = `{"error":{"code":"429","message":"Rate limit is exceeded. Try again in 50 seconds."}}`
	const whole, model, nobody = "whole backend", "model", "nobody"
	s := lbtest.NewSites(t, "http")
	var rows []lbtest.Row
	for _, c := range []struct {
		name    string
		reply   http.HandlerFunc
		class   string
		scope   string
		seconds float64
		level   string
		goesOn  bool
	}{
		{"429 with a Retry-After", lbtest.Says(429, "{}", "Retry-After", "20"), "throttled", model, 20, "info", true},
		{"429 with milliseconds", lbtest.Says(429, "{}", "Retry-After-Ms", "1043"), "throttled", model, 1.043, "info", true},
		{"429 without a hint", lbtest.Says(429, `{"error":{"message":"no"}}`), "throttled", model, 10, "info", true},
		{"429 for a day", lbtest.Says(429, "{}", "Retry-After", "86400"), "throttled", model, 300, "info", true},
		{"429 that says it in words", lbtest.Says(429, azure429), "throttled", model, 50, "info", true},
		{"429 that says it in gzip", lbtest.Says(429, lbtest.Gzipped(azure429), "Content-Encoding", "gzip"), "throttled", model, 50, "info", true},
		{"429 that says it in zstd", lbtest.Says(429, lbtest.Zstandard(azure429), "Content-Encoding", "zstd"), "throttled", model, 50, "info", true},
		{"429 whose limits are all used up", lbtest.Says(429, "{}", "X-Ratelimit-Remaining-Tokens", "0", "X-Ratelimit-Reset-Tokens", "6.5s"), "throttled", model, 6.5, "info", true},
		{"403 for a model", lbtest.Says(403, `{"error":{"type":"invalid_request_error","param":null,"code":"model_not_found"}}`), "no_model", model, 60, "error", true},
		{"424 of the client's MCP server", lbtest.Says(424, `{"error":{"type":"external_connector_error","param":"tools","code":"http_error"}}`), "client_error", nobody, 0, "", false},
		{"200 that is an error in gzip", lbtest.Says(200, lbtest.Gzipped(`{"error":{"code":"server_error"}}`), "Content-Type", "application/json", "Content-Encoding", "gzip"), "failed", model, 10, "warn", true},
		{"429 of Mistral", lbtest.Says(429, `{"object":"error","message":"Rate limit exceeded","type":"rate_limited","code":"1300"}`), "throttled", model, 10, "info", true},
		{"429 of OpenRouter", lbtest.Says(429, `{"error":{"code":429,"message":"try again in 3s"}}`), "throttled", model, 3, "info", true},
		{"429 in HTML", lbtest.Says(429, "<h1>Too many</h1>"), "throttled", model, 10, "info", true},
		{"429 for want of quota", lbtest.Says(429, quota), "quota", whole, 300, "error", true},
		{"429 for want of quota, in gzip", lbtest.Says(429, lbtest.Gzipped(quota), "Content-Encoding", "gzip"), "quota", whole, 300, "error", true},
		{"402", lbtest.Says(402, "{}"), "quota", whole, 300, "error", true},
		{"429 for a request that is too large", lbtest.Says(429, `{"error":{"message":"Request too large for gpt-4o: Limit 3, Requested 4"}}`), "too_large", nobody, 0, "", true},
		{"429 no_capacity", lbtest.Says(429, `{"error":{"type":"too_many_requests","code":"no_capacity"}}`), "overloaded", model, 10, "info", true},
		{"429 slow_down with a hint", lbtest.Says(429, `{"error":{"type":"rate_limit_error","code":"slow_down"}}`, "Retry-After", "4"), "overloaded", model, 4, "info", true},
		{"503", lbtest.Says(503, "{}"), "overloaded", model, 10, "info", true},
		{"503 with a hint", lbtest.Says(503, "{}", "Retry-After", "30"), "overloaded", model, 30, "info", true},
		{"508", lbtest.Says(508, "{}"), "loop", nobody, 0, "", true},
		{"529", lbtest.Says(529, "{}"), "overloaded", model, 10, "info", true},
		{"498", lbtest.Says(498, "{}"), "overloaded", model, 10, "info", true},
		{"500", lbtest.Says(500, "{}"), "failed", model, 10, "warn", true},
		{"502", lbtest.Says(502, "{}"), "failed", model, 10, "warn", true},
		{"504", lbtest.Says(504, "{}"), "failed", model, 10, "warn", true},
		{"424", lbtest.Says(424, "{}"), "failed", model, 10, "warn", true},
		{"408", lbtest.Says(408, "{}"), "failed", model, 10, "warn", true},
		{"401", lbtest.Says(401, `{"error":{"code":"401"}}`), "credential", whole, 60, "error", true},
		{"403 of a firewall", lbtest.Says(403, `{"error":{"message":"Access denied due to Virtual Network/Firewall rules."}}`), "credential", whole, 60, "error", true},
		{"403 about the content", lbtest.Says(403, `{"error":{"type":"user_error","message":"no"}}`), "client_error", nobody, 0, "", false},
		{"404 DeploymentNotFound", lbtest.Says(404, `{"error":{"code":"DeploymentNotFound"}}`), "no_model", model, 60, "error", true},
		{"404 model_not_found", lbtest.Says(404, `{"error":{"code":"model_not_found"}}`), "no_model", model, 60, "error", true},
		{"404 of a stored object", lbtest.Says(404, `{"error":{"message":"No such file object: file-1"}}`), "client_error", nobody, 0, "", false},
		{"400", lbtest.Says(400, `{"error":{"code":"content_filter"}}`), "client_error", nobody, 0, "", false},
		{"409", lbtest.Says(409, "{}"), "client_error", nobody, 0, "", false},
		{"422", lbtest.Says(422, "{}"), "client_error", nobody, 0, "", false},
		{"a connection that breaks", lbtest.Aborts, "failed", model, 10, "warn", true},
		{"what is not HTTP", lbtest.Raw("SSH-2.0-OpenSSH_9.2p1\r\n"), "failed", model, 10, "warn", true},
		{"a redirect", lbtest.Says(307, "", "Location", "/elsewhere"), "failed", model, 10, "warn", true},
		{"200", lbtest.Says(200, "{}"), "served", nobody, 0, "", false},
	} {
		name := fmt.Sprintf("a%d", len(rows))
		a, serverA := lbtest.Listen(t, name)
		a.Replies(c.reply)
		b, serverB := lbtest.Listen(t, "b")
		url := s.Add(fmt.Sprintf(`openai_lb {
			backend %s {
				name %s
			}
			backend %s {
				name b
				priority 2
			}
		}`, serverA.URL, name, serverB.URL))
		rows = append(rows, lbtest.Row{Name: c.name, Test: func(t *testing.T) {
			client := s.NewClient(t, 1)
			client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
			reply := lbtest.Ask(client, url, "Accept-Encoding", "gzip, zstd")
			wantFrom, wantCallsOfB := name, 0
			if c.goesOn {
				wantFrom, wantCallsOfB = "b", 1
			}
			if reply.Err != nil || reply.Backend != wantFrom {
				t.Errorf("the client got %d of %q (%v), want %s's reply", reply.Status, reply.Backend, reply.Err, wantFrom)
			}
			if n, m := len(a.Received()), len(b.Received()); n != 1 || m != wantCallsOfB {
				t.Errorf("a was called %d times and b %d, want 1 and %d", n, m, wantCallsOfB)
			}
			attempt, cooldown := s.LoggedOf(t, name)
			if attempt.Class != c.class {
				t.Errorf("the reply was taken for %q, want %q", attempt.Class, c.class)
			}
			scope := nobody
			switch {
			case cooldown == nil:
				cooldown = new(lbtest.LogEntry)
			case cooldown.Deployment == "":
				scope = whole
			case cooldown.Deployment == "gpt-4o":
				scope = model
			}
			if scope != c.scope || cooldown.Seconds != c.seconds || cooldown.Level != c.level {
				t.Errorf("got a cooldown of %s for %v s at %s, want one of %s for %v s at %s", scope, cooldown.Seconds, cooldown.Level, c.scope, c.seconds, c.level)
			}
		}})
	}
	s.Serve(t)
	lbtest.SideBySide(t, rows)
}

func TestAReplyIsTheBackendsButForHeadersThatAreBetweenItAndUs(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			for _, name := range []string{"Set-Cookie", "Alt-Svc", "Strict-Transport-Security", "Keep-Alive",
				"X-Request-Id", "Apim-Request-Id", "X-Ratelimit-Remaining-Tokens", "X-Ms-Region", "Openai-Processing-Ms"} {
				rw.Header().Set(name, "backends")
			}
			rw.Header().Set("Content-Type", "application/json")
			rw.Header().Set("Content-Encoding", "gzip") // as it says: we do not look
			io.WriteString(rw, "\x1f\x8b not really")
		})
		r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{}`))
		r.Header.Set("Accept-Encoding", "gzip")
		reply := w.Send(r)
		if reply.Body != "\x1f\x8b not really" {
			t.Errorf("the body is %q", reply.Body)
		}
		if got := w.Backends["a"].Received()[0].Request.Header.Get("Accept-Encoding"); got != "gzip" {
			t.Errorf("a got Accept-Encoding %q, want the client's", got)
		}
		for _, name := range []string{"Set-Cookie", "Alt-Svc", "Strict-Transport-Security", "Keep-Alive"} {
			if got := reply.Header.Get(name); got != "" {
				t.Errorf("the client got %s: %s", name, got)
			}
		}
		for _, name := range []string{"X-Request-Id", "Apim-Request-Id", "X-Ratelimit-Remaining-Tokens", "X-Ms-Region", "Openai-Processing-Ms", "Content-Encoding"} {
			if reply.Header.Get(name) == "" {
				t.Errorf("the client did not get %s", name)
			}
		}
	})
}

// TestAFieldWithAKeyIsAsIfTheBackendHadNotSentIt includes those that net/http's
// server sets if there are none.
func TestAFieldWithAKeyIsAsIfTheBackendHadNotSentIt(t *testing.T) {
	const key = "sk-abcdefghijklmnop"
	lbtest.InBubble(t, "openai_lb {\nbackend http://a {\napi_key "+key+"\n}\n}", func(t *testing.T, w *lbtest.World) {
		w.AllReply(lbtest.Says(400, "no", "Content-Type", "text/"+key, "Date", key, "X-Echo", key))
		header := w.Post("{}").Header
		if got := header.Get("Content-Type"); got != "text/plain; charset=utf-8" {
			t.Errorf("Content-Type is %q", got)
		}
		if header.Get("Date") == "" || header["X-Echo"] != nil {
			t.Errorf("Date is %q, X-Echo is %q", header["Date"], header["X-Echo"])
		}
	})
}

func TestAnErrorsReplyReachesTheClientWhole(t *testing.T) {
	long := strings.Repeat("why ", 100<<10/4) // more than is read to judge it
	lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			rw.WriteHeader(500)
			io.WriteString(rw, long)
		})
		w.Backends["b"].Replies(lbtest.Throttled("9"))
		w.Backends["c"].Replies(lbtest.Throttled("9"))
		if reply := w.Post(`{}`); reply.Status != 500 || reply.Body != long {
			t.Errorf("client got %d and %d bytes, want a's 500 and all %d", reply.Status, len(reply.Body), len(long))
		}
	})
}

func TestAnErrorThatBreaksOffIsNotPassedOnAsWhole(t *testing.T) {
	for name, breakOff := range map[string]http.HandlerFunc{
		"cut": func(rw http.ResponseWriter, r *http.Request) {
			rw.Header().Set("Content-Length", "1000")
			rw.WriteHeader(500)
			io.WriteString(rw, "half of")
			panic(http.ErrAbortHandler)
		},
		"stalled": func(rw http.ResponseWriter, r *http.Request) {
			rw.WriteHeader(500)
			rw.(http.Flusher).Flush()
			<-r.Context().Done()
		},
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(breakOff)
				start := time.Now()
				w.Post(`{}`).WantServed(t, "b")
				if waited := time.Since(start); waited > 2*time.Second {
					t.Errorf("waited %s", waited)
				}
				w.Stop("b")
				w.Stop("c")
				w.Post(`{}`).WantError(t, 502, "upstream_unreachable")
			})
		})
	}
}

func TestACutReplyIsCutForTheClient(t *testing.T) {
	for name, framing := range map[string]string{"with a length": "100000", "chunked": ""} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
					if framing != "" {
						rw.Header().Set("Content-Length", framing)
					}
					io.WriteString(rw, `{"id":"`+strings.Repeat("x", 70000))
					rw.(http.Flusher).Flush()
					panic(http.ErrAbortHandler)
				})
				if reply := w.Post(`{}`); reply.Err == nil {
					t.Errorf("client got a clean end after %d bytes", len(reply.Body))
				}
				w.WantCalls(map[string]int{"b": 0})
			})
		})
	}
}
