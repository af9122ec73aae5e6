package observe

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// reported are the placeholders about the length of a reply.
const reported = "{http.openai_lb.tokens_input} {http.openai_lb.tokens_output} {http.openai_lb.tokens_estimated} {http.openai_lb.aborted_after}"

func event(kind, rest string) string {
	return fmt.Sprintf("event: %[1]s\ndata: {\"type\":%[1]q%[2]s}\n\n", kind, rest)
}

// TestAnAbortedReplyReportsWhatWasSeenOfIt has replies of which the beginning
// comes, and after seven seconds no more: the client leaves, or the backend
// breaks off.
func TestAnAbortedReplyReportsWhatWasSeenOfIt(t *testing.T) {
	const chat, responses, messages = "/v1/chat/completions", "/v1/responses", "/v1/messages"
	running := strings.Replace(lbtest.StreamContent, `{"choices"`, `{"usage":{"prompt_tokens":9,"completion_tokens":5},"choices"`, 1)
	delta := event("response.output_text.delta", `,"delta":"Hello"`)
	created := event("response.created", `,"response":{}`) + event("response.in_progress", "") + event("response.output_item.added", "")
	message := event("message_start", `,"message":{"usage":{"input_tokens":25,"output_tokens":1}}`) + event("content_block_start", "")
	block := event("content_block_delta", `,"delta":{"text":"Hello"}`)
	for name, c := range map[string]struct {
		path, stream, want string
		headers            []string
	}{
		"a chat":                           {chat, lbtest.StreamPreamble + strings.Repeat(lbtest.StreamContent, 3), "100 3 true 7", nil},
		"a chat before its content":        {chat, lbtest.StreamPreamble, "100 0 true 7", nil},
		"a chat with a running usage":      {chat, lbtest.StreamPreamble + running + running, "9 5  7", nil},
		"one that no longer tells it":      {chat, running + strings.Repeat(lbtest.StreamContent, 9), "9 10 true 7", nil},
		"a response":                       {responses, created + strings.Repeat(delta, 4), "100 4 true 7", nil},
		"a response that thinks":           {responses, created + event("response.reasoning_summary_text.delta", "") + delta, "100 2 true 7", nil},
		"a message of Anthropic":           {messages, message + strings.Repeat(block, 6), "25 6 true 7", nil},
		"a compressed stream":              {chat, lbtest.Gzipped(lbtest.StreamContent), "100 1 true 7", []string{"Content-Encoding", "gzip"}},
		"a reply that is no stream":        {"/v1/embeddings", `{"data":[` + strings.Repeat(" ", 100<<10), "   7", []string{"Content-Type", "application/json"}},
		"a stream that is not of a model":  {"/v1/threads/t/runs", lbtest.StreamContent, "   7", nil},
		"a stream that ends by itself":     {chat, lbtest.StreamContent + lbtest.StreamEnd, "   ", nil},
		"one that says what it did before": {chat, lbtest.StreamContent + running + lbtest.StreamEnd, "9 5  ", nil},
	} {
		for _, leaves := range []bool{true, false} {
			t.Run(fmt.Sprint(name, ", the client leaves: ", leaves), func(t *testing.T) {
				lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
					var replacer *caddy.Replacer
					w.Prepares = func(r *http.Request) *http.Request {
						replacer = r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
						return r
					}
					w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
						lbtest.Says(200, c.stream, append([]string{"Content-Type", "text/event-stream"}, c.headers...)...)(rw, r)
						rw.(http.Flusher).Flush()
						switch {
						case strings.HasSuffix(c.stream, lbtest.StreamEnd):
						case leaves:
							<-r.Context().Done()
						default:
							time.Sleep(7 * time.Second)
							lbtest.Abort()
						}
					})
					ctx, leave := context.WithCancel(t.Context())
					defer leave()
					body := `{"model":"gpt-4o","stream":true,"x":"`
					body += strings.Repeat("x", 400-len(body)-len(`"}`)) + `"}`
					start := time.Now()
					res := lbtest.Do(t, w.Client, w.Request("POST", c.path, strings.NewReader(body)).WithContext(ctx))
					io.ReadFull(res.Body, make([]byte, len(c.stream)))
					if leaves {
						time.Sleep(7*time.Second - time.Since(start))
						leave()
					}
					io.Copy(io.Discard, res.Body)
					res.Body.Close()
					synctest.Wait()
					if got := replacer.ReplaceAll(reported, ""); got != c.want {
						t.Errorf("it reports %q, want %q", got, c.want)
					}
				})
			})
		}
	}
}

// TestTheAccessLogHasWhatWasSeenOfAnAbortedReply looks at the line of Caddy
// itself, which has no duration of such a reply.
func TestTheAccessLogHasWhatWasSeenOfAnAbortedReply(t *testing.T) {
	a, serverA := lbtest.Listen(t, "a")
	a.Replies(lbtest.Streams(lbtest.StreamContent, lbtest.StreamContent, lbtest.Abort))
	file := filepath.Join(t.TempDir(), "access.log")
	address := lbtest.ServeAt(t, fmt.Sprintf("log {\noutput file %s\n}\nopenai_lb {\nbackend %s {\nname a\n}\n}", file, serverA.URL))
	lbtest.Post(lbtest.NewClient(t), "http://"+address+"/v1/chat/completions", `{"stream":true}`)
	var line struct {
		Balancer map[string]any `json:"openai_lb"`
	}
	lbtest.WaitFor(t, func() bool {
		text, _ := os.ReadFile(file)
		return json.Unmarshal(text, &line) == nil
	})
	after, ok := line.Balancer["aborted_after"].(float64)
	if !ok || after < 0 || line.Balancer["tokens_output"] != 2.0 || line.Balancer["tokens_estimated"] != true || line.Balancer["class"] != "broken_stream" {
		t.Errorf("it says %v", line.Balancer)
	}
}

func TestAReplyThatBreaksIsLoggedAndOneWhoseClientLeftIsNot(t *testing.T) {
	for _, leaves := range []bool{true, false} {
		lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
			w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
				lbtest.Says(200, lbtest.StreamContent, "Content-Type", "text/event-stream")(rw, r)
				rw.(http.Flusher).Flush()
				if leaves {
					<-r.Context().Done()
				}
				lbtest.Abort()
			})
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			res := lbtest.Do(t, w.Client, w.Request("POST", "/v1/chat/completions", strings.NewReader(`{"stream":true}`)).WithContext(ctx))
			io.ReadFull(res.Body, make([]byte, len(lbtest.StreamContent)))
			if leaves {
				leave()
			}
			io.Copy(io.Discard, res.Body)
			res.Body.Close()
			synctest.Wait()
			if broken := len(w.Logged("reply broken")); (broken == 0) != leaves {
				t.Errorf("the client leaves: %v; %d lines of a broken reply", leaves, broken)
			}
		})
	}
}
