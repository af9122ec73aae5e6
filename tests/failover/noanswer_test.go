package failover

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// successes are replies that say that all is well, and are no answer to a chat,
// whether it is streamed or not.
var successes = map[string]http.HandlerFunc{
	"a page":                          lbtest.Says(200, "<!DOCTYPE html><html><title>Sign in</title></html>", "Content-Type", "text/html; charset=utf-8"),
	"a page that says that it is one": lbtest.Says(200, "\r\n\r\n<html>", "Content-Type", "text/event-stream"),
	"a page of JSON's type":           lbtest.Says(200, "<html>"),
	"a page without a type":           lbtest.Says(200, "<html>", "Content-Type", ""),
	"a text":                          lbtest.Says(200, "OK", "Content-Type", "text/plain"),
	"a text of a proxy":               lbtest.Says(200, "upstream connect error", "Content-Type", "application/octet-stream"),
	"nothing of a text":               lbtest.Says(200, "", "Content-Type", "text/plain"),
	"nothing at all":                  lbtest.Says(200, "", "Content-Length", "0"),
	"white space":                     lbtest.Says(200, " \n", "Content-Type", "text/plain"),
	"no content":                      lbtest.Says(204, ""),
	"a redirect to a login":           lbtest.Says(302, "", "Location", "https://login.example/"),
	"a redirect to another path":      lbtest.Says(307, "", "Location", "/v2/chat/completions"),
	"half of JSON":                    lbtest.Says(200, `{"id":"chatcmpl-1","choices":[{"ind`),
	"half of JSON of another type":    lbtest.Says(200, `{"id":"chatcmpl-1","choices":[{"ind`, "Content-Type", "text/plain"),
}

func TestASuccessThatIsNoAnswerIsAFailure(t *testing.T) {
	for name, reply := range successes {
		for _, stream := range []bool{true, false} {
			for _, path := range []string{"/v1/chat/completions", "/v1/responses", "/v1/messages"} {
				t.Run(fmt.Sprint(name, " to ", path, ", stream ", stream), func(t *testing.T) {
					lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
						w.Client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
						w.Backends["a"].Replies(reply)
						ask := func(members string) lbtest.Reply {
							return w.Send(w.Request(http.MethodPost, path, strings.NewReader(fmt.Sprintf(`{"model":"m","stream":%v,"store":false%s}`, stream, members))))
						}
						ask("").WantServed(t, "b")
						if cooldowns := w.Logged("cooldown started"); len(cooldowns) != 1 || cooldowns[0].ContextMap()["class"] != "failed" {
							t.Errorf("logged %v, want a failure", cooldowns)
						}
						w.AllReply(reply)
						wantUpstreamError(t, ask(""), path)
						before := len(w.Backends["a"].Received()) + len(w.Backends["b"].Received())
						once := ask(`,"tools":[{"type":"mcp","server_url":"http://x"}]`)
						wantUpstreamError(t, once, path)
						if n := len(w.Backends["a"].Received()) + len(w.Backends["b"].Received()) - before; n != 1 || once.Header.Get("X-Should-Retry") != "false" {
							t.Errorf("what must not be repeated was sent %d times, and X-Should-Retry is %q", n, once.Header.Get("X-Should-Retry"))
						}
					})
				})
			}
		}
	}
}

// wantUpstreamError wants a 502, in the form of the path's API.
func wantUpstreamError(t *testing.T, reply lbtest.Reply, path string) {
	t.Helper()
	if reply.Status != 502 || reply.Backend != "" || path != "/v1/messages" && !strings.Contains(reply.Body, `"upstream_unreachable"`) {
		t.Errorf("the client got %d %s of %q, want an error of the balancer's own", reply.Status, reply.Body, reply.Backend)
	}
}

func TestJSONInPlaceOfAStreamIsAFailure(t *testing.T) {
	const whole = `{"id":"chatcmpl-1","object":"chat.completion","choices":[]}`
	for name, reply := range map[string]http.HandlerFunc{
		"as it is":         lbtest.Says(200, whole),
		"of another type":  lbtest.Says(200, whole, "Content-Type", "text/plain"),
		"of a stream's":    lbtest.Says(200, whole, "Content-Type", "text/event-stream"),
		"compressed":       lbtest.Says(200, lbtest.Gzipped(whole), "Content-Encoding", "gzip"),
		"a list":           lbtest.Says(200, "[]"),
		"in several parts": lbtest.Says(200, whole+strings.Repeat(" ", 10<<10)),
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(reply)
				w.PostStream().WantServed(t, "b")
				if cooldowns := w.Logged("cooldown started"); len(cooldowns) != 1 || cooldowns[0].ContextMap()["class"] != "failed" {
					t.Errorf("logged %v, want a failure", cooldowns)
				}
			})
		})
	}
}

func TestTheBytesDecideWhatIsAnAnswer(t *testing.T) {
	const whole = `{"id":"chatcmpl-1","choices":[]}`
	stream := lbtest.StreamPreamble + lbtest.StreamContent + lbtest.StreamEnd
	for name, c := range map[string]struct {
		path, body string
		reply      http.HandlerFunc
	}{
		"JSON as text":               {"/v1/chat/completions", `{}`, lbtest.Says(200, whole, "Content-Type", "text/plain")},
		"JSON as a page":             {"/v1/chat/completions", `{}`, lbtest.Says(200, "\xef\xbb\xbf "+whole, "Content-Type", "text/html")},
		"JSON without a type":        {"/v1/chat/completions", `{}`, lbtest.Says(200, whole, "Content-Type", "")},
		"a stream as text":           {"/v1/chat/completions", `{"stream":true}`, lbtest.Says(200, stream, "Content-Type", "text/plain")},
		"a stream as JSON":           {"/v1/chat/completions", `{"stream":true}`, lbtest.Says(200, stream)},
		"a comment first":            {"/v1/chat/completions", `{"stream":true}`, lbtest.Says(200, ": hello\n\n"+stream, "Content-Type", "text/plain")},
		"text of audio":              {"/v1/audio/transcriptions", `{"model":"m"}`, lbtest.Says(200, "Hello", "Content-Type", "text/plain")},
		"audio":                      {"/v1/audio/speech", `{"model":"m"}`, lbtest.Says(200, "\xff\xfb\x90", "Content-Type", "audio/mpeg")},
		"JSON of what never streams": {"/v1/embeddings", `{"model":"m","stream":true}`, lbtest.Says(200, `{"data":[]}`)},
		"a stored file":              {"/v1/files", `{}`, lbtest.Says(200, "Hello", "Content-Type", "text/plain")},
		"a new status":               {"/v1/chat/completions", `{}`, lbtest.Says(202, "", "Content-Type", "text/plain")},
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(c.reply)
				if reply := w.Send(w.Request(http.MethodPost, c.path, strings.NewReader(c.body))); reply.Backend != "a" || reply.Err != nil || reply.Status >= 300 {
					t.Errorf("the client got %d %s of %q (%v)", reply.Status, reply.Body, reply.Backend, reply.Err)
				}
				w.WantNobodyBlamed()
			})
		})
	}
}
