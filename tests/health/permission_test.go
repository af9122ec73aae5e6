package health

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap/zapcore"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

const (
	permissionPool = "openai_lb {\nbackend http://a {\napi_key sk-first-0123456789\n}\nbackend http://b {\npriority 2\napi_key sk-second-0123456789\n}\n}"
	missingScope   = `{"error":{"message":"You have insufficient permissions for this operation. Missing scopes: model.request.","type":"invalid_request_error","param":null,"code":"missing_scope"}}`
)

// mayNot refuses an operation as a key without the permission for it is
// refused, and serves the others.
func mayNot(operation string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, operation) {
			lbtest.Says(403, missingScope)(w, r)
			return
		}
		lbtest.Says(200, `{"id":"x","data":[],"choices":[]}`)(w, r)
	}
}

// asked sends the same request five times, and wants this many of them to reach
// the first backend.
func asked(t *testing.T, w *lbtest.World, path, body string, first int) {
	t.Helper()
	before := len(w.Backends["a"].Received())
	for range 5 {
		if reply := w.Send(w.Request(http.MethodPost, path, strings.NewReader(body))); reply.Status != 200 {
			t.Errorf("%s %s: got %d %s", path, body, reply.Status, reply.Body)
		}
	}
	if n := len(w.Backends["a"].Received()) - before; n != first {
		t.Errorf("%s %s: the first backend got %d of 5 requests, want %d", path, body, n, first)
	}
}

func TestAKeyThatMayNotDoOneOperationStillDoesTheOthers(t *testing.T) {
	for _, c := range []struct{ refused, body, other, otherBody string }{
		{"/v1/embeddings", `{"model":"m","input":"x"}`, "/v1/chat/completions", `{"model":"m","messages":[]}`},
		{"/v1/chat/completions", `{"model":"m","messages":[]}`, "/v1/responses", `{"model":"m","input":"x"}`},
		{"/v1/images/generations", `{"model":"m","prompt":"x"}`, "/v1/embeddings", `{"model":"m","input":"x"}`},
	} {
		t.Run(c.refused, func(t *testing.T) {
			lbtest.InBubble(t, permissionPool, func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(mayNot(c.refused))
				w.Backends["b"].Replies(lbtest.Says(200, `{"id":"x","data":[],"choices":[]}`))
				asked(t, w, c.refused, c.body, 1)
				asked(t, w, c.refused+"/", c.body, 0) // the same operation
				asked(t, w, c.other, c.otherBody, 5)
				asked(t, w, c.refused, c.body, 0) // which what it serves does not end
				asked(t, w, c.refused, strings.Replace(c.body, `"m"`, `"n"`, 1), 1)
				cooldowns := w.Logged("cooldown started")
				if len(cooldowns) != 2 || cooldowns[0].Level != zapcore.ErrorLevel || cooldowns[0].ContextMap()["operation"] != strings.TrimPrefix(c.refused, "/v1") {
					t.Errorf("the log has %v", cooldowns)
				}
				w.Backends["a"].Replies(lbtest.Says(200, `{"id":"x","data":[],"choices":[]}`))
				time.Sleep(time.Minute)
				asked(t, w, c.refused, c.body, 5)
			})
		})
	}
}

func TestAKeyThatMayNotStreamsAsItMayNotAnswer(t *testing.T) {
	lbtest.InBubble(t, permissionPool, func(t *testing.T, w *lbtest.World) {
		answer := func(rw http.ResponseWriter, r *http.Request) {
			if body, _ := io.ReadAll(r.Body); strings.Contains(string(body), `"stream":true`) {
				lbtest.Streams(lbtest.StreamContent, "data: [DONE]\n\n")(rw, r)
				return
			}
			lbtest.Says(200, `{"id":"x","choices":[]}`)(rw, r)
		}
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			if strings.HasSuffix(r.URL.Path, "/chat/completions") {
				answer(rw, r)
				return
			}
			// the error comes in a stream that has begun
			lbtest.Streams("event: error\ndata: {\"type\":\"error\",\"error\":{\"code\":\"missing_scope\",\"message\":\"no\"}}\n\n")(rw, r)
		})
		w.Backends["b"].Replies(answer)
		asked(t, w, "/v1/responses", `{"model":"m","input":"x","stream":true}`, 1)
		asked(t, w, "/v1/responses", `{"model":"m","input":"x"}`, 0) // the same operation
		asked(t, w, "/v1/chat/completions", `{"model":"m","messages":[],"stream":true}`, 5)
	})
}

func TestAMissingPermissionIsKnownAfterAReloadButNotOfAnotherKey(t *testing.T) {
	a, serverA := lbtest.Listen(t, "a")
	b, serverB := lbtest.Listen(t, "b")
	a.Replies(mayNot("/embeddings"))
	b.Replies(lbtest.Says(200, `{"data":[]}`))
	port := lbtest.FreePort(t)
	config := func(key string, n int) string {
		return fmt.Sprintf("{\nadmin off\n}\nhttp://127.0.0.1:%d {\nbind 127.0.0.1\nheader X-Config %d\nopenai_lb {\nbackend %s {\nname a\napi_key %s\n}\nbackend %s {\nname b\npriority 2\napi_key of-b\n}\n}\n}",
			port, n, serverA.URL, key, serverB.URL)
	}
	lbtest.Run(t, config("of-a", 1))
	url, n := fmt.Sprintf("http://127.0.0.1:%d", port), 1
	load := func(key string) {
		n++
		lbtest.Reload(t, config(key, n))
	}
	want := func(when, path, body string, first int) {
		t.Helper()
		client := lbtest.ClientOf(t, fmt.Sprint(n), url)
		a.Forget()
		for range 2 {
			lbtest.Post(client, url+path, body)
		}
		if got := len(a.Received()); got != first {
			t.Errorf("%s: the first backend got %d of 2 requests to %s, want %d", when, got, path, first)
		}
	}
	const embeddings, chat = `{"model":"m","input":"x"}`, `{"model":"m","messages":[]}`
	want("before", "/v1/embeddings", embeddings, 1)
	load("of-a")
	want("after a reload", "/v1/embeddings", embeddings, 0)
	want("after a reload", "/v1/chat/completions", chat, 2)
	load("another")
	want("with another key", "/v1/embeddings", embeddings, 1)
}
