//go:build !openai_lb_core || openai_lb_callers

package openailb_test

import (
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/simulator"
)

// limited has a limit of tokens, because of which streams are asked for their
// usage.
const limited = "openai_lb {\nclient_key alice client-key-of-alice\ncaller alice {\ntokens 1M/minute\n}\n"

const countsStreams = limited + "request_buffers 1KiB\nbackend http://a\n}"

func TestTheUsageOfAStreamIsAskedForAndTakenOut(t *testing.T) {
	const null = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"Hello\"}}],\"usage\":null}\n\n"
	stream := lbtest.StreamPreamble + null + streamUsage + lbtest.StreamEnd
	hidden := lbtest.StreamPreamble + null + lbtest.StreamEnd
	asks := `{"stream_options":{"include_usage":true},"model":"gpt-4o","stream":true}`
	long := `{"model":"gpt-4o","stream":true,"prompt":"` + lbtest.Noise(2<<10) + `"}`
	for _, c := range []struct {
		name, config, path, body string
		reply                    http.HandlerFunc
		asked, got               string
		known                    bool
	}{
		{"asked for", countsStreams, "/v1/chat/completions", `{"model":"gpt-4o","stream":true}`, lbtest.Streams(stream), asks, hidden, true},
		{"in pieces", countsStreams, "/v1/chat/completions", `{"model":"gpt-4o","stream":true}`, lbtest.Streams(lbtest.StreamPreamble, null+streamUsage[:20], streamUsage[20:], lbtest.StreamEnd), asks, hidden, true},
		{"at Azure's path", countsStreams, "/openai/deployments/d/completions", `{"model":"gpt-4o","stream":true}`, lbtest.Streams(stream), strings.Replace(asks, "gpt-4o", "d", 1), hidden, true},
		{"refused by the client", countsStreams, "/v1/chat/completions", `{"stream":true,"stream_options":{"include_usage":false}}`, lbtest.Streams(stream), `{"stream":true,"stream_options":{"include_usage":true}}`, hidden, true},
		{"of a length", countsStreams, "/v1/chat/completions", `{"model":"gpt-4o","stream":true}`, lbtest.Says(200, stream, "Content-Type", "text/event-stream", "Content-Length", strconv.Itoa(len(stream))), asks, hidden, true},
		{"not told", countsStreams, "/v1/chat/completions", `{"model":"gpt-4o","stream":true}`, lbtest.Streams(hidden), asks, hidden, false},
		{"an error instead", countsStreams, "/v1/chat/completions", `{"model":"gpt-4o","stream":true}`, lbtest.Says(400, streamUsage), asks, streamUsage, false},
		{"compressed nevertheless", countsStreams, "/v1/chat/completions", `{"model":"gpt-4o","stream":true}`, lbtest.Says(200, lbtest.Gzipped(stream), "Content-Type", "text/event-stream", "Content-Encoding", "gzip"), asks, lbtest.Gzipped(stream), true},

		{"the client asks", countsStreams, "/v1/chat/completions", `{"stream":true,"stream_options":{"include_usage":true}}`, lbtest.Streams(stream), "", stream, true},
		{"not streamed", countsStreams, "/v1/chat/completions", `{"stream":false}`, lbtest.Says(200, wholeChat), "", wholeChat, true},
		{"responses", countsStreams, "/v1/responses", `{"stream":true}`, lbtest.Streams(stream), "", stream, true},
		{"longer than request_buffers", countsStreams, "/v1/chat/completions", long, lbtest.Streams(hidden), "", hidden, false},
		{"not JSON", countsStreams, "/v1/chat/completions", `{"stream":true,"x"`, lbtest.Streams(hidden), "", hidden, false},
		{"an error", "openai_lb {\nbackend http://a\n}", "/v1/chat/completions", `{"stream":true}`, lbtest.Says(400, streamUsage), "", streamUsage, false},
		{"not wanted", "openai_lb {\nbackend http://a\n}", "/v1/chat/completions", `{"stream":true}`, lbtest.Streams(hidden), "", hidden, false},
		{"not wanted, but told", "openai_lb {\nbackend http://a\n}", "/v1/chat/completions", `{"stream":true}`, lbtest.Streams(stream), "", stream, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			withLedger(t, c.config, func(t *testing.T, l *ledger) {
				l.Backends["a"].Replies(c.reply)
				r := l.request(c.path, c.body)
				r.Header.Set("Accept-Encoding", "gzip")
				reply := l.Send(r)
				if reply.Err != nil || reply.Body != c.got {
					t.Errorf("client got %.300q, %v, want %.300q", reply.Body, reply.Err, c.got)
				}
				call := l.Backends["a"].Received()[0]
				encoding := call.Request.Header.Get("Accept-Encoding")
				if want := c.asked; want == "" {
					if call.BodyHash != lbtest.Hash([]byte(c.body)) || encoding == "identity" {
						t.Errorf("a got another body, of %d bytes, and accepts %q", call.BodyBytes, encoding)
					}
				} else if call.BodyHash != lbtest.Hash([]byte(want)) || call.Request.ContentLength != int64(len(want)) || encoding != "identity" {
					t.Errorf("a got %d bytes, declared as %d, and accepts %q", call.BodyBytes, call.Request.ContentLength, encoding)
				}
				synctest.Wait()
				l.mu.Lock()
				defer l.mu.Unlock()
				if l.tokens.Known() != c.known {
					t.Errorf("tokens are %+v", l.tokens)
				}
			})
		})
	}
}

func TestTheUsageIsAskedForTogetherWithTheModel(t *testing.T) {
	const config = limited + "backend http://a {\ndeployment one\n}\nbackend http://b {\npriority 2\ndeployment two\nstream_usage off\n}\nbackend http://c {\npriority 3\n}\n}"
	withLedger(t, config, func(t *testing.T, l *ledger) {
		l.Backends["a"].Replies(lbtest.Throttled("1"))
		l.Backends["b"].Replies(lbtest.Streams(lbtest.StreamError))
		l.Backends["c"].Replies(lbtest.Streams(lbtest.StreamContent, streamUsage, lbtest.StreamEnd))
		reply := l.post(`{"stream":true,"model":"gpt-4o","stream_options":null}`)
		if want := lbtest.StreamContent + lbtest.StreamEnd; reply.Body != want {
			t.Errorf("client got %q, want %q", reply.Body, want)
		}
		const asks = `{"include_usage":true}`
		for name, want := range map[string]string{
			"a": `{"stream":true,"model":"one","stream_options":` + asks + `}`,
			"b": `{"stream":true,"model":"two","stream_options":null}`, // off
			"c": `{"stream":true,"model":"gpt-4o","stream_options":` + asks + `}`,
		} {
			if call := l.Backends[name].Received()[0]; call.BodyHash != lbtest.Hash([]byte(want)) {
				t.Errorf("%s got another body, of %d bytes", name, call.BodyBytes)
			}
		}
		l.wantTokens("of c", 9, 3)
	})
}

// TestOnlyAnAPIVersionThatKnowsItIsAskedForTheUsage has a client of Azure's,
// and backends of both dialects.
func TestOnlyAnAPIVersionThatKnowsItIsAskedForTheUsage(t *testing.T) {
	const azure = "backend http://a {\nauth api_key\napi_key key-of-a\n}\n}"
	for _, c := range []struct {
		config, version string
		asked           bool
	}{
		{limited + azure, "2024-06-01", false},
		{limited + azure, "2024-08-01-preview", false},
		{limited + azure, "2024-10-21", true},
		{limited + "backend http://a\n}", "2024-06-01", true}, // OpenAI, which gets no version
	} {
		withLedger(t, c.config, func(t *testing.T, l *ledger) {
			l.Backends["a"].Replies(lbtest.Streams(lbtest.StreamContent, lbtest.StreamEnd))
			l.Send(l.request("/openai/deployments/d/chat/completions?api-version="+c.version, `{"stream":true}`)).WantStatus(t, 200)
			if got := strings.Contains(string(l.Backends["a"].Received()[0].Beginning), "include_usage"); got != c.asked {
				t.Errorf("%s: asked: %t", c.version, got)
			}
		})
	}
}

func TestTheUsageIsTakenOutHoweverTheBackendCutsIt(t *testing.T) {
	stream := lbtest.StreamPreamble + lbtest.StreamContent + streamUsage + ": ping\n\n" + lbtest.StreamEnd
	want := strings.Replace(stream, streamUsage, "", 1)
	withLedger(t, limited+"backend http://a\n}", func(t *testing.T, l *ledger) {
		for size := 1; size < len(stream); size += 1 + size/3 {
			var pieces []any
			for piece := range slices.Chunk([]byte(stream), size) {
				pieces = append(pieces, string(piece))
			}
			l.Backends["a"].Replies(lbtest.Streams(pieces...))
			if reply := l.post(`{"stream":true}`); reply.Body != want || reply.Err != nil {
				t.Errorf("%d bytes at a time: client got %q, %v", size, reply.Body, reply.Err)
			}
			l.wantTokens("in pieces", 9, 3)
		}
	})
}

// The simulator does as OpenAI documents it.
func TestTheTokensOfTheSimulatorAreCounted(t *testing.T) {
	for name, c := range map[string]struct {
		path, body string
		shown      bool
	}{
		"whole":               {"/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"Hello there"}],"max_tokens":5}`, true},
		"streamed":            {"/v1/chat/completions", `{"model":"m","stream":true,"messages":[{"role":"user","content":"Hello there"}],"max_tokens":5}`, false},
		"streamed, asked for": {"/v1/chat/completions", `{"model":"m","stream":true,"stream_options":{"include_usage":true},"messages":[{"role":"user","content":"Hello there"}],"max_tokens":5}`, true},
		"a response":          {"/v1/responses", `{"model":"m","stream":true,"input":"Hello there","max_output_tokens":5}`, true},
	} {
		t.Run(name, func(t *testing.T) {
			simulator := simulate(t)
			withLedger(t, limited+"backend http://a\n}", func(t *testing.T, l *ledger) {
				l.Serve("a:80", simulator)
				reply := l.Send(l.request(c.path, c.body))
				if shown := strings.Contains(reply.Body, `"usage":{`); reply.Status != 200 || shown != c.shown {
					t.Errorf("client got %d %s", reply.Status, reply.Body)
				}
				l.wantTokens(name, 3, 5)
			})
		})
	}
}

// simulate returns a backend that answers as a provider does.
func simulate(t *testing.T) http.Handler {
	t.Helper()
	ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
	t.Cleanup(cancel)
	handler := new(simulator.Handler)
	if err := handler.Provision(ctx); err != nil {
		t.Fatal(err)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), w, new(caddyhttp.Server))
		if err := handler.ServeHTTP(w, r, nil); err != nil {
			t.Error(err)
		}
	})
}
