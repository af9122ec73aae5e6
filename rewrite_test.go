package openailb

import (
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

func TestABackendSeesItsOwnCredentialAndNoOther(t *testing.T) {
	inBubble(t, `openai_lb {
		backend http://a {
			auth api_key
			api_key key-of-a
		}
		backend http://b {
			priority 2
			api_key key-of-b
			header OpenAI-Organization org-of-b
		}
		backend http://d {
			priority 3
		}
		backend http://c {
			priority 4
			auth passthrough
		}
	}`, func(t *testing.T, w *world) {
		for _, b := range w.backends {
			b.replies(throttled("9"))
		}
		r := w.request(http.MethodPost, "/v1/chat/completions?api-key=callers&x=%2F1&subscription-key=callers&API-KEY=callers", strings.NewReader(`{}`))
		for name, value := range map[string]string{
			"Authorization": "Bearer callers", "Api-Key": "callers", "X-Api-Key": "callers",
			"Ocp-Apim-Subscription-Key": "callers", "Cookie": "session=callers",
			"OpenAI-Organization": "callers", "OpenAI-Project": "callers",
			"X-Ms-Spillover-Deployment": "callers", "X-Forwarded-For": "callers", "X-Forwarded-Host": "callers",
			"Forwarded": "for=callers", "Via": "1.1 callers", "X-Real-Ip": "callers",
			"Sec-Websocket-Protocol":  "realtime, openai-insecure-api-key.callers, openai-beta.realtime-v1",
			"X-Stainless-Retry-Count": "1",
		} {
			r.Header.Set(name, value)
		}
		if reply := w.send(r); reply.status != 429 || reply.backend != "c" {
			t.Errorf("client got %d of %q, want c's 429: it is about the caller's own key", reply.status, reply.backend)
		}

		want := map[string]http.Header{
			"a": {"Api-Key": {"key-of-a"}},
			"b": {"Authorization": {"Bearer key-of-b"}, "Openai-Organization": {"org-of-b"}},
			"c": {"Authorization": {"Bearer callers"}, "Api-Key": {"callers"}, "X-Api-Key": {"callers"},
				"Ocp-Apim-Subscription-Key": {"callers"}, "Openai-Organization": {"callers"}, "Openai-Project": {"callers"}},
			"d": {},
		}
		for name, credentials := range want {
			got := w.backends[name].received()[0].request
			for _, header := range credentialHeaders {
				if g, w := got.Header.Get(header), credentials.Get(header); g != w {
					t.Errorf("%s got %s %q, want %q", name, header, g, w)
				}
			}
			for _, header := range append([]string{"X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Forwarded-Port"}, privateHeaders...) {
				if values := got.Header.Values(header); len(values) > 0 {
					t.Errorf("%s got %s %q", name, header, values)
				}
			}
			if name != "c" {
				if got.URL.RawQuery != "x=%2F1" {
					t.Errorf("%s got the query %q, want x=%%2F1", name, got.URL.RawQuery)
				}
				if p := got.Header.Get("Sec-WebSocket-Protocol"); p != "realtime, openai-beta.realtime-v1" {
					t.Errorf("%s got the subprotocols %q", name, p)
				}
			}
			if got.Header.Get("X-Stainless-Retry-Count") != "1" {
				t.Errorf("%s did not get the SDK's own headers", name)
			}
			if got.Host != name {
				t.Errorf("%s was addressed as %q", name, got.Host)
			}
		}
		if got := w.backends["c"].received()[0].request.URL.Query().Get("api-key"); got != "callers" {
			t.Errorf("c got the caller's api-key parameter as %q", got)
		}
	})
}

func TestWhereARequestGoes(t *testing.T) {
	const body = `{"messages":[],"model":"gpt-4o","seed":9007199254740993}`
	replaced := strings.Replace(body, `"gpt-4o"`, `"dep \"x\""`, 1)
	for _, c := range []struct {
		name    string
		backend string
		path    string
		want    string
		body    string
	}{
		{"OpenAI to OpenAI", "backend http://a", "/v1/chat/completions", "/v1/chat/completions", body},
		{"OpenAI to Azure", "backend http://a {\nauth api_key\napi_key k\n}", "/v1/chat/completions", "/openai/v1/chat/completions", body},
		{"Azure v1 to Azure", "backend http://a {\nauth api_key\napi_key k\n}", "/openai/v1/responses?api-version=preview", "/openai/v1/responses?api-version=preview", body},
		{"Azure v1 to OpenAI", "backend http://a", "/openai/v1/responses", "/v1/responses", body},
		{"to a base path", "backend http://a/team-a/v1", "/v1/chat/completions", "/team-a/v1/chat/completions", body},
		{"to a base path with a trailing slash", "backend http://a/openai/v1/", "/v1/embeddings", "/openai/v1/embeddings", body},
		{"classic to Azure", "backend http://a {\nauth api_key\napi_key k\n}", "/openai/deployments/gpt-4o/chat/completions?api-version=2024-10-21", "/openai/deployments/gpt-4o/chat/completions?api-version=2024-10-21", body},
		{"the deployment on a classic path", "backend http://a {\nauth api_key\napi_key k\ndeployment my/dep\n}", "/openai/deployments/chat/chat/completions?api-version=1", "/openai/deployments/my%2Fdep/chat/completions?api-version=1", body},
		{"a deployment named openai", "backend http://a {\nauth api_key\napi_key k\ndeployment x\n}", "/openai/deployments/openai/chat/completions?api-version=1", "/openai/deployments/x/chat/completions?api-version=1", body},
		{"a slash inside a deployment", "backend http://a {\nauth api_key\napi_key k\n}", "/openai/deployments/a%2Fb/chat/completions?api-version=1", "/openai/deployments/a%2Fb/chat/completions?api-version=1", body},
		{"an empty deployment changes nothing", "backend http://a {\nauth api_key\napi_key k\ndeployment \"\"\n}", "/openai/deployments/gpt-4o/embeddings?api-version=1", "/openai/deployments/gpt-4o/embeddings?api-version=1", body},
		{"the deployment as the body's model", "backend http://a {\ndeployment `dep \"x\"`\n}", "/v1/chat/completions", "/v1/chat/completions", replaced},
		{"Azure's files", "backend http://a {\nauth api_key\napi_key k\ndeployment x\n}", "/openai/files/file-1?api-version=1", "/openai/files/file-1?api-version=1", strings.Replace(body, "gpt-4o", "x", 1)},
		{"anything else", "backend http://a", "/healthz", "/healthz", body},
	} {
		t.Run(c.name, func(t *testing.T) {
			inBubble(t, "openai_lb {\n"+c.backend+"\n}", func(t *testing.T, w *world) {
				r := w.request(http.MethodPost, c.path, strings.NewReader(body))
				w.send(r).wantServed(t, "a")
				got := w.backends["a"].received()[0]
				if got.request.RequestURI != c.want {
					t.Errorf("a was asked for %s, want %s", got.request.RequestURI, c.want)
				}
				if got.bodyHash != sha([]byte(c.body)) || got.request.ContentLength != int64(len(c.body)) {
					t.Errorf("a got %d bytes, Content-Length %d, want the %d of %s", got.bodyBytes, got.request.ContentLength, len(c.body), c.body)
				}
			})
		})
	}
}

func TestEveryBackendGetsItsOwnModel(t *testing.T) {
	inBubble(t, `openai_lb {
		backend http://a {
			deployment four-oh
		}
		backend http://b {
			priority 2
			deployment gpt-4o-global-standard
		}
		backend http://c {
			priority 3
		}
	}`, func(t *testing.T, w *world) {
		for _, name := range []string{"a", "b"} {
			w.backends[name].replies(throttled("9"))
		}
		body := "\ufeff { \"model\" : \"gpt-4o\", \"x\": 1e-7, \"y\": \"\\u0000\xff\" }\n"
		w.post(body).wantServed(t, "c")
		for name, model := range map[string]string{"a": "four-oh", "b": "gpt-4o-global-standard", "c": "gpt-4o"} {
			if got := w.backends[name].received()[0]; got.bodyHash != sha([]byte(strings.Replace(body, "gpt-4o", model, 1))) {
				t.Errorf("%s did not get the body with just the model %s", name, model)
			}
		}
	})
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

func TestAStaleIdleConnectionCostsNothing(t *testing.T) {
	inBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *world) {
		w.post(`{}`).wantServed(t, "a")
		w.backends["a"].replies(nil)
		w.restart("a")
		w.post(`{"after":"restart"}`).wantServed(t, "a")
		if n := len(w.logged("backend benched")); n != 0 {
			t.Errorf("%d backends were benched", n)
		}
	})
}

// silentlyDead is a connection that fails only when it is written to.
type silentlyDead struct {
	net.Conn
	dead *atomic.Bool
}

func (c silentlyDead) Write(p []byte) (int, error) {
	if c.dead.Load() {
		return 0, syscall.ECONNRESET
	}
	return c.Conn.Write(p)
}

func TestAnyNumberOfDeadIdleConnectionsCostsNothing(t *testing.T) {
	inBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *world) {
		const connections = 8
		dead := new(atomic.Bool)
		w.handler.transport.HTTP.Transport.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := w.dial(ctx, network, addr)
			return silentlyDead{conn, dead}, err
		}
		w.backends["a"].replies(func(http.ResponseWriter, *http.Request) { time.Sleep(time.Second) })
		var wg sync.WaitGroup
		for range connections {
			wg.Go(func() { w.post(`{}`) })
		}
		wg.Wait()
		dead.Store(true)
		dead = new(atomic.Bool) // what is dialed from now on lives
		w.backends["a"].recovers()
		w.post(`{"after":"death"}`).wantServed(t, "a")
		w.wantCalls(map[string]int{"a": connections + 1})
		if n := len(w.logged("backend benched")); n != 0 {
			t.Errorf("%d backends were benched", n)
		}
	})
}
