package failover

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// notJSON are replies that say that they are JSON.
var notJSON = map[string]string{
	"nothing":              "",
	"white space":          " \r\n",
	"a page":               "<html><body><h1>502 Bad Gateway</h1></body></html>",
	"a text":               "upstream connect error or disconnect/reset before headers",
	"a word":               "failed",
	"half of a reply":      `{"id":"chatcmpl-1","choices":[{"index":0,"message":{"content":"Hel`,
	"a reply without }":    `{"id":"chatcmpl-1","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1}`,
	"a reply, and a half":  `{"id":"chatcmpl-1"}{"id":`,
	"two replies":          `{"id":"chatcmpl-1","usage":{"prompt_tokens":9}}{"id":"chatcmpl-1","usage":{"prompt_tokens":9}}`,
	"an object of Python":  `{'error': 'no'}`,
	"a stream":             lbtest.StreamContent + lbtest.StreamEnd,
	"half of a list":       `[{"index":0}`,
	"quotes not escaped":   `{"text":"He said "Hello" to me"}`,
	"an object and a text": `{"id":"chatcmpl-1"} and more`,
}

// sent are the ways to send a reply.
var sent = map[string]func(body string) http.HandlerFunc{
	"with a length": func(body string) http.HandlerFunc {
		return lbtest.Says(200, body, "Content-Length", fmt.Sprint(len(body)))
	},
	"in chunks": func(body string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json; charset=utf-8")
			w.WriteHeader(200)
			for _, half := range []string{body[:len(body)/2], body[len(body)/2:]} {
				w.(http.Flusher).Flush()
				w.Write([]byte(half))
			}
		}
	},
	"in gzip": func(body string) http.HandlerFunc {
		return lbtest.Says(200, lbtest.Gzipped(body), "Content-Encoding", "gzip")
	},
	"in zstd": func(body string) http.HandlerFunc {
		return lbtest.Says(200, lbtest.Zstandard(body), "Content-Encoding", "zstd")
	},
}

func TestAReplyThatIsNotJSONIsTheBackendsFailure(t *testing.T) {
	for name, body := range notJSON {
		for way, reply := range sent {
			t.Run(name+" "+way, func(t *testing.T) {
				lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
					w.Backends["a"].Replies(reply(body))
					w.Post(`{"model":"gpt-4o"}`).WantServed(t, "b")
					w.WantCalls(map[string]int{"a": 1, "b": 1, "c": 0})
					cooldowns := w.Logged("cooldown started")
					if len(cooldowns) != 1 || cooldowns[0].ContextMap()["class"] != "failed" || cooldowns[0].ContextMap()["cause"] != "not_json" && cooldowns[0].ContextMap()["cause"] != "no_answer" {
						t.Errorf("logged %v, want a cooldown", cooldowns)
					}
					w.AllReply(reply(body))
					w.Post(`{"model":"gpt-4o"}`).WantError(t, 502, "upstream_unreachable")
				})
			})
		}
	}
}

func TestJSONInPlaceOfAStreamIsAFailureButForOldCompletions(t *testing.T) {
	const whole = `{"object":"text_completion","choices":[{"text":"Hello"}]}`
	for name, c := range map[string]struct{ path, body, by string }{
		"a chat":                        {"/v1/chat/completions", whole, "b"},
		"an old completion":             {"/v1/completions", whole, "a"},
		"an old completion that is not": {"/v1/completions", `{"code":0,"message":"Please log in."}`, "b"},
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(lbtest.Says(200, c.body))
				w.Backends["b"].Replies(lbtest.Streams(lbtest.StreamContent, lbtest.StreamEnd))
				w.Send(w.Request(http.MethodPost, c.path, strings.NewReader(`{"model":"m","stream":true}`))).WantServed(t, c.by)
			})
		})
	}
}

func TestAReplyThatIsJSONOrCannotBeReadIsPassedOn(t *testing.T) {
	const usage = `,"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}`
	bodies := map[string]string{
		"an empty object":    `{}`,
		"a list":             `[{"index":0,"score":0.5}]`,
		"a text":             `"Hello"`,
		"a number":           ` 3.5 `,
		"null":               `null`,
		"space around it":    "\r\n {\"id\":\"x\"} \n\n",
		"a byte order mark":  "\xef\xbb\xbf" + `{"id":"x"}`,
		"one before a list":  "\xef\xbb\xbf" + `[]`,
		"Python's numbers":   `{"choices":[{"logprobs":{"content":[{"logprob":-Infinity}]}}],"x":NaN}`,
		"usage at the end":   `{"choices":[{"message":{"content":"{\"usage\": }"}}]` + usage,
		"usage in between":   `{"usage":{"prompt_tokens":9},"choices":[{"message":{"content":"}}]\\"}}]}`,
		"usage in an object": `{"x":{"usage":{"prompt_tokens":9}}}`,
		"a character in two": `{"text":"\ud83d\ude00 é 😀"}`,
		"more than is held":  `{"data":"` + strings.Repeat("x", 100<<10) + `"}`,
	}
	for name, body := range bodies {
		for way, reply := range sent {
			t.Run(name+" "+way, func(t *testing.T) {
				lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
					w.Backends["a"].Replies(reply(body))
					w.Post(`{"model":"gpt-4o"}`).WantServed(t, "a")
					w.WantNobodyBlamed()
				})
			})
		}
	}
	const page = "<html>"
	for name, c := range map[string]struct {
		method, path, body string
		reply              http.HandlerFunc
	}{
		"a coding that is unknown":      {reply: lbtest.Says(200, page, "Content-Encoding", "br")},
		"a coding that is not as said":  {reply: lbtest.Says(200, page, "Content-Encoding", "gzip")},
		"two codings":                   {reply: lbtest.Says(200, lbtest.Gzipped(page), "Content-Encoding", "gzip, br")},
		"more than is held back":        {reply: lbtest.Says(200, strings.Repeat(page, 20_000))},
		"another type of audio":         {path: "/v1/audio/transcriptions", reply: lbtest.Says(200, page, "Content-Type", "text/plain")},
		"a bomb":                        {reply: lbtest.Says(200, lbtest.Gzipped(strings.Repeat(" ", 8<<20)+"{}"), "Content-Encoding", "gzip")},
		"a stream that was asked for":   {body: `{"stream":true}`, reply: lbtest.Says(200, lbtest.StreamContent)},
		"another status":                {reply: lbtest.Says(201, page)},
		"no content of what is stored":  {path: "/v1/files", reply: lbtest.Status(204)},
		"a GET":                         {method: "GET", path: "/v1/models", reply: lbtest.Says(200, page)},
		"what is not inference":         {path: "/v1/files", reply: lbtest.Says(200, page)},
		"what takes more than a moment": {reply: lbtest.Streams("<html>", 5*time.Second, "</html>")},
	} {
		if name == "what takes more than a moment" {
			streams := c.reply
			c.reply = func(w http.ResponseWriter, r *http.Request) { streams(typed{w}, r) }
		}
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(c.reply)
				method, path := "POST", "/v1/chat/completions"
				if c.method != "" {
					method = c.method
				}
				if c.path != "" {
					path = c.path
				}
				if reply := w.Send(w.Request(method, path, strings.NewReader(c.body))); reply.Backend != "a" || reply.Err != nil {
					t.Errorf("client got %d of %q (%v)", reply.Status, reply.Backend, reply.Err)
				}
				w.WantNobodyBlamed()
			})
		})
	}
}

// typed is a writer of replies that say that they are JSON, whatever they are.
type typed struct{ http.ResponseWriter }

func (w typed) WriteHeader(status int) {
	w.Header().Set("Content-Type", "application/json")
	w.ResponseWriter.WriteHeader(status)
}

func (w typed) Flush() { w.ResponseWriter.(http.Flusher).Flush() }
