package openailb_test

import (
	"context"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	openailb "github.com/openai-lb/caddy-openai-lb"
	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/internal/usage"
)

// ledger serves a world's balancer a second time, and keeps what is known of
// the tokens of the last request that is over.
type ledger struct {
	*lbtest.World
	mu     sync.Mutex
	tokens usage.Tokens
}

// withLedger runs a test in virtual time.
func withLedger(t *testing.T, config string, test func(*testing.T, *ledger)) {
	t.Helper()
	lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
		l := &ledger{World: w}
		w.Serve("ledger:80", http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			r = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), rw, new(caddyhttp.Server))
			defer func() {
				l.mu.Lock()
				defer l.mu.Unlock()
				l.tokens = openailb.TokensOf(r)
			}()
			_ = w.Handler.ServeHTTP(rw, r, nil)
		}))
		test(t, l)
	})
}

func (l *ledger) request(path, body string) *http.Request {
	r := l.Request(http.MethodPost, path, strings.NewReader(body))
	r.URL.Host = "ledger"
	r.Header.Set("Authorization", "Bearer client-key-of-alice")
	return r
}

func (l *ledger) post(body string) lbtest.Reply {
	return l.Send(l.request("/v1/chat/completions", body))
}

func (l *ledger) wantTokens(name string, input, output int64) {
	l.T.Helper()
	synctest.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	if got := l.tokens; got.Known() != (input > 0) || got.Input != input || got.Output != output {
		l.T.Errorf("%s: got %+v, want %d and %d tokens", name, got, input, output)
	}
}

const (
	wholeChat   = `{"object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"Hello"}}],"usage":{"prompt_tokens":9,"completion_tokens":3,"total_tokens":12}}`
	streamUsage = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":3,\"total_tokens\":12}}\n\n"
)

func jsonInChunks(pieces ...any) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		lbtest.Streams(pieces...)(typed{w, "application/json"}, r)
	}
}

// typed is a reply of another Content-Type than its handler says.
type typed struct {
	http.ResponseWriter
	contentType string
}

func (t typed) WriteHeader(status int) {
	t.Header().Set("Content-Type", t.contentType)
	t.ResponseWriter.WriteHeader(status)
}

func (t typed) Flush() { t.ResponseWriter.(http.Flusher).Flush() }

func TestTheTokensOfAReplyAreCounted(t *testing.T) {
	long := strings.Replace(wholeChat, "Hello", lbtest.Noise(200<<10), 1)
	for _, c := range []struct {
		name, path    string
		reply         http.HandlerFunc
		input, output int64
	}{
		{"whole", "/v1/chat/completions", lbtest.Says(200, wholeChat), 9, 3},
		{"whole, longer than is read ahead", "/v1/chat/completions", lbtest.Says(200, long), 9, 3},
		{"in chunks", "/v1/chat/completions", jsonInChunks(wholeChat[:50], wholeChat[50:150], wholeChat[150:]), 9, 3},
		{"in slow chunks", "/v1/chat/completions", jsonInChunks(wholeChat[:50], 3*time.Second, wholeChat[50:150], 3*time.Second, wholeChat[150:]), 9, 3},
		{"compressed", "/v1/chat/completions", lbtest.Says(200, lbtest.Gzipped(long), "Content-Encoding", "gzip"), 9, 3},
		{"compressed by zstd", "/v1/chat/completions", lbtest.Says(200, lbtest.Zstandard(wholeChat), "Content-Encoding", "zstd"), 9, 3},
		{"compressed by whatever", "/v1/chat/completions", lbtest.Says(200, "whatever", "Content-Encoding", "br"), 0, 0},
		{"a stream", "/v1/chat/completions", lbtest.Streams(lbtest.StreamPreamble, lbtest.StreamContent, streamUsage, lbtest.StreamEnd), 9, 3},
		{"a slow stream", "/v1/chat/completions", lbtest.Streams(lbtest.StreamPreamble, 3*time.Second, lbtest.StreamContent, streamUsage[:30], time.Second, streamUsage[30:]+lbtest.StreamEnd), 9, 3},
		{"a short stream", "/v1/chat/completions", lbtest.Streams(lbtest.StreamContent + streamUsage + lbtest.StreamEnd), 9, 3},
		{"a compressed stream", "/v1/chat/completions", lbtest.Says(200, lbtest.Gzipped(lbtest.StreamContent+streamUsage+lbtest.StreamEnd), "Content-Encoding", "gzip", "Content-Type", "text/event-stream"), 9, 3},
		{"embeddings", "/v1/embeddings", lbtest.Says(200, `{"data":[],"usage":{"prompt_tokens":8,"total_tokens":8}}`), 8, 0},
		{"a response", "/v1/responses", lbtest.Says(200, `{"object":"response","usage":{"input_tokens":36,"output_tokens":87}}`), 36, 87},
		{"a streamed response", "/v1/responses", lbtest.Streams(createdEvent, "event: response.incomplete\ndata: {\"type\":\"response.incomplete\",\"response\":{\"usage\":{\"input_tokens\":36,\"output_tokens\":87}}}\n\n"), 36, 87},
		{"none", "/v1/chat/completions", lbtest.Says(200, `{"choices":[]}`), 0, 0},
		{"an error", "/v1/chat/completions", lbtest.Says(400, wholeChat), 0, 0},
		{"a stored batch", "/v1/batches", lbtest.Says(200, wholeChat), 0, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			withLedger(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, l *ledger) {
				var sent strings.Builder
				l.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) { c.reply(recorded{rw, &sent}, r) })
				reply := l.Send(l.request(c.path, `{"model":"gpt-4o"}`))
				if reply.Err != nil || reply.Body != sent.String() {
					t.Errorf("of %d bytes the client got %d, %v", sent.Len(), len(reply.Body), reply.Err)
				}
				l.wantTokens(c.name, c.input, c.output)
			})
		})
	}
}

const createdEvent = "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"usage\":null}}\n\n"

// recorded keeps what a handler writes.
type recorded struct {
	http.ResponseWriter
	body *strings.Builder
}

func (r recorded) Write(p []byte) (int, error) {
	r.body.Write(p)
	return r.ResponseWriter.Write(p)
}

func (r recorded) Flush() { r.ResponseWriter.(http.Flusher).Flush() }

func TestOnlyTheTokensOfTheClientsReplyAreCounted(t *testing.T) {
	failed := "event: message_start\ndata: {\"type\":\"ping\",\"message\":{\"usage\":{\"input_tokens\":7}}}\n\n" + lbtest.StreamError
	withLedger(t, lbtest.ThreeInOrder, func(t *testing.T, l *ledger) {
		l.Backends["a"].Replies(lbtest.Streams(failed))
		l.Backends["b"].Replies(lbtest.Streams(lbtest.StreamContent, streamUsage, lbtest.StreamEnd))
		l.post(`{"stream":true}`)
		l.wantTokens("a stream after one that failed", 9, 3)
		l.Backends["b"].Replies(lbtest.Says(200, "audio", "Content-Type", "audio/mpeg"))
		l.post(`{"stream":true}`)
		l.wantTokens("audio", 0, 0)
		l.AllReply(lbtest.Streams(failed))
		l.post(`{"model":"gpt-4o"}`)
		l.wantTokens("nobody serves", 0, 0)
	})
}

// No decoder may stay behind: the bubble ends with every goroutine.
func TestTheTokensUpToThenAreCountedIfTheClientLeaves(t *testing.T) {
	compressed := lbtest.Gzipped(lbtest.StreamContent + streamUsage + lbtest.StreamContent)
	for name, c := range map[string]struct {
		headers       []string
		body          string
		input, output int64
	}{
		"a stream":            {nil, lbtest.StreamContent + streamUsage, 9, 3},
		"before its usage":    {nil, lbtest.StreamContent + streamUsage[:60], 0, 0},
		"a compressed stream": {[]string{"Content-Encoding", "gzip"}, compressed[:len(compressed)-12], 9, 3},
		"not even a header":   {[]string{"Content-Encoding", "gzip"}, compressed[:5], 0, 0},
		"whole":               {[]string{"Content-Type", "application/json"}, wholeChat[:len(wholeChat)-1], 9, 3},
		"whole, compressed":   {[]string{"Content-Type", "application/json", "Content-Encoding", "deflate"}, "x", 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			withLedger(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, l *ledger) {
				l.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
					lbtest.Says(200, "", append([]string{"Content-Type", "text/event-stream"}, c.headers...)...)(rw, r)
					io.WriteString(rw, c.body)
					rw.(http.Flusher).Flush()
					<-r.Context().Done()
				})
				ctx, leave := context.WithCancel(t.Context())
				defer leave()
				res := lbtest.Do(t, l.Client, l.request("/v1/chat/completions", `{}`).WithContext(ctx))
				io.ReadFull(res.Body, make([]byte, len(c.body)))
				leave()
				res.Body.Close()
				l.wantTokens(name, c.input, c.output)
			})
		})
	}
}
