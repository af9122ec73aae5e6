package openailb

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

// What a reply means: the docs' page about replies, row by row, through Caddy
// itself. The first backend gives the reply, the second would serve.
func TestWhatAReplyMeans(t *testing.T) {
	const quota = `{"error":{"message":"You exceeded your current quota","type":"insufficient_quota","param":null,"code":"insufficient_quota"}}`
	const azure429 = `{"error":{"code":"429","message":"Rate limit is exceeded. Try again in 50 seconds."}}`
	const whole, model, nobody = "whole backend", "model", "nobody"
	s := newSites(t, "http")
	var rows []subtest
	for _, c := range []struct {
		name    string
		reply   http.HandlerFunc
		class   string
		scope   string
		seconds float64
		level   string
		goesOn  bool
	}{
		{"429 with a Retry-After", says(429, "{}", "Retry-After", "20"), "throttled", model, 20, "info", true},
		{"429 with milliseconds", says(429, "{}", "Retry-After-Ms", "1043"), "throttled", model, 1.043, "info", true},
		{"429 without a hint", says(429, `{"error":{"message":"no"}}`), "throttled", model, 10, "info", true},
		{"429 for a day", says(429, "{}", "Retry-After", "86400"), "throttled", model, 300, "info", true},
		{"429 that says it in words", says(429, azure429), "throttled", model, 50, "info", true},
		{"429 that says it in gzip", says(429, gzipped(azure429), "Content-Encoding", "gzip"), "throttled", model, 50, "info", true},
		{"429 that says it in zstd", says(429, zstandard(azure429), "Content-Encoding", "zstd"), "throttled", model, 50, "info", true},
		{"429 whose limits are all used up", says(429, "{}", "X-Ratelimit-Remaining-Tokens", "0", "X-Ratelimit-Reset-Tokens", "6.5s"), "throttled", model, 6.5, "info", true},
		{"429 of Mistral", says(429, `{"object":"error","message":"Rate limit exceeded","type":"rate_limited","code":"1300"}`), "throttled", model, 10, "info", true},
		{"429 of OpenRouter", says(429, `{"error":{"code":429,"message":"try again in 3s"}}`), "throttled", model, 3, "info", true},
		{"429 in HTML", says(429, "<h1>Too many</h1>"), "throttled", model, 10, "info", true},
		{"429 for want of quota", says(429, quota), "quota", whole, 300, "error", true},
		{"429 for want of quota, in gzip", says(429, gzipped(quota), "Content-Encoding", "gzip"), "quota", whole, 300, "error", true},
		{"402", says(402, "{}"), "quota", whole, 300, "error", true},
		{"429 for a request that is too large", says(429, `{"error":{"message":"Request too large for gpt-4o: Limit 3, Requested 4"}}`), "too_large", nobody, 0, "", true},
		{"429 no_capacity", says(429, `{"error":{"type":"too_many_requests","code":"no_capacity"}}`), "overloaded", model, 10, "info", true},
		{"429 slow_down with a hint", says(429, `{"error":{"type":"rate_limit_error","code":"slow_down"}}`, "Retry-After", "4"), "overloaded", model, 4, "info", true},
		{"503", says(503, "{}"), "overloaded", model, 10, "info", true},
		{"503 with a hint", says(503, "{}", "Retry-After", "30"), "overloaded", model, 30, "info", true},
		{"529", says(529, "{}"), "overloaded", model, 10, "info", true},
		{"498", says(498, "{}"), "overloaded", model, 10, "info", true},
		{"500", says(500, "{}"), "failed", model, 10, "warn", true},
		{"502", says(502, "{}"), "failed", model, 10, "warn", true},
		{"504", says(504, "{}"), "failed", model, 10, "warn", true},
		{"424", says(424, "{}"), "failed", model, 10, "warn", true},
		{"408", says(408, "{}"), "failed", model, 10, "warn", true},
		{"401", says(401, `{"error":{"code":"401"}}`), "credential", whole, 60, "error", true},
		{"403 of a firewall", says(403, `{"error":{"message":"Access denied due to Virtual Network/Firewall rules."}}`), "credential", whole, 60, "error", true},
		{"403 about the content", says(403, `{"error":{"type":"user_error","message":"no"}}`), "client_error", nobody, 0, "", false},
		{"404 DeploymentNotFound", says(404, `{"error":{"code":"DeploymentNotFound"}}`), "no_model", model, 60, "error", true},
		{"404 model_not_found", says(404, `{"error":{"code":"model_not_found"}}`), "no_model", model, 60, "error", true},
		{"404 of a stored object", says(404, `{"error":{"message":"No such file object: file-1"}}`), "client_error", nobody, 0, "", false},
		{"400", says(400, `{"error":{"code":"content_filter"}}`), "client_error", nobody, 0, "", false},
		{"409", says(409, "{}"), "client_error", nobody, 0, "", false},
		{"422", says(422, "{}"), "client_error", nobody, 0, "", false},
		{"a connection that breaks", aborts, "failed", model, 10, "warn", true},
		{"what is not HTTP", garbage, "failed", model, 10, "warn", true},
		{"a redirect", says(307, "", "Location", "/elsewhere"), "served", nobody, 0, "", false},
		{"200", says(200, "{}"), "served", nobody, 0, "", false},
	} {
		name := fmt.Sprintf("a%d", len(rows))
		a, serverA := listen(t, name)
		a.replies(c.reply)
		b, serverB := listen(t, "b")
		url := s.add(fmt.Sprintf(`openai_lb {
			backend %s {
				name %s
			}
			backend %s {
				name b
				priority 2
			}
		}`, serverA.URL, name, serverB.URL))
		rows = append(rows, subtest{name: c.name, test: func(t *testing.T) {
			client := s.newClient(t, 1)
			client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
			reply := ask(client, url, "Accept-Encoding", "gzip, zstd")
			wantFrom, wantCallsOfB := name, 0
			if c.goesOn {
				wantFrom, wantCallsOfB = "b", 1
			}
			if reply.err != nil || reply.backend != wantFrom {
				t.Errorf("the client got %d of %q (%v), want %s's reply", reply.status, reply.backend, reply.err, wantFrom)
			}
			if n, m := len(a.received()), len(b.received()); n != 1 || m != wantCallsOfB {
				t.Errorf("a was called %d times and b %d, want 1 and %d", n, m, wantCallsOfB)
			}
			attempt, benched := s.loggedOf(t, name)
			if attempt.Class != c.class {
				t.Errorf("the reply was taken for %q, want %q", attempt.Class, c.class)
			}
			scope := nobody
			switch {
			case benched == nil:
				benched = new(logEntry)
			case benched.Model == "":
				scope = whole
			case benched.Model == "gpt-4o":
				scope = model
			}
			if scope != c.scope || benched.Seconds != c.seconds || benched.Level != c.level {
				t.Errorf("benched %s for %v s at %s, want %s for %v s at %s", scope, benched.Seconds, benched.Level, c.scope, c.seconds, c.level)
			}
		}})
	}
	s.serve(t)
	sideBySide(t, rows)
}

func TestAReplyIsTheBackendsButForHeadersThatAreBetweenItAndUs(t *testing.T) {
	inBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *world) {
		w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) {
			for _, name := range []string{"Set-Cookie", "Alt-Svc", "Strict-Transport-Security", "Keep-Alive",
				"X-Request-Id", "Apim-Request-Id", "X-Ratelimit-Remaining-Tokens", "X-Ms-Region", "Openai-Processing-Ms"} {
				rw.Header().Set(name, "backends")
			}
			rw.Header().Set("Content-Type", "application/json")
			rw.Header().Set("Content-Encoding", "gzip") // as it says: we do not look
			io.WriteString(rw, "\x1f\x8b not really")
		})
		r := w.request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{}`))
		r.Header.Set("Accept-Encoding", "gzip")
		reply := w.send(r)
		if reply.body != "\x1f\x8b not really" {
			t.Errorf("the body is %q", reply.body)
		}
		if got := w.backends["a"].received()[0].request.Header.Get("Accept-Encoding"); got != "gzip" {
			t.Errorf("a got Accept-Encoding %q, want the client's", got)
		}
		for _, name := range []string{"Set-Cookie", "Alt-Svc", "Strict-Transport-Security", "Keep-Alive"} {
			if got := reply.header.Get(name); got != "" {
				t.Errorf("the client got %s: %s", name, got)
			}
		}
		for _, name := range []string{"X-Request-Id", "Apim-Request-Id", "X-Ratelimit-Remaining-Tokens", "X-Ms-Region", "Openai-Processing-Ms", "Content-Encoding"} {
			if reply.header.Get(name) == "" {
				t.Errorf("the client did not get %s", name)
			}
		}
	})
}

func TestAnErrorsReplyReachesTheClientWhole(t *testing.T) {
	long := strings.Repeat("why ", 100<<10/4) // more than is read to judge it
	inBubble(t, threeInOrder, func(t *testing.T, w *world) {
		w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) {
			rw.WriteHeader(500)
			io.WriteString(rw, long)
		})
		w.backends["b"].replies(throttled("9"))
		w.backends["c"].replies(throttled("9"))
		if reply := w.post(`{}`); reply.status != 500 || reply.body != long {
			t.Errorf("client got %d and %d bytes, want a's 500 and all %d", reply.status, len(reply.body), len(long))
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
			inBubble(t, threeInOrder, func(t *testing.T, w *world) {
				w.backends["a"].replies(breakOff)
				start := time.Now()
				w.post(`{}`).wantServed(t, "b")
				if waited := time.Since(start); waited > errorBodyTimeout {
					t.Errorf("waited %s", waited)
				}
				w.stop("b")
				w.stop("c")
				w.post(`{}`).wantError(t, 502, "upstream_unreachable")
			})
		})
	}
}

func TestACutReplyIsCutForTheClient(t *testing.T) {
	for name, framing := range map[string]string{"with a length": "100000", "chunked": ""} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, threeInOrder, func(t *testing.T, w *world) {
				w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) {
					if framing != "" {
						rw.Header().Set("Content-Length", framing)
					}
					io.WriteString(rw, strings.Repeat("x", 50000))
					rw.(http.Flusher).Flush()
					panic(http.ErrAbortHandler)
				})
				if reply := w.post(`{}`); reply.err == nil {
					t.Errorf("client got a clean end after %d bytes", len(reply.body))
				}
				w.wantCalls(map[string]int{"b": 0})
			})
		})
	}
}
