package observe

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestTheLineOfACooldownSaysWhy(t *testing.T) {
	for _, c := range []struct {
		name  string
		reply http.HandlerFunc
		want  map[string]any
	}{
		{"nobody listens", nil, map[string]any{"class": "unreachable", "cause": "refused", "error": "dial: connection refused", "status": int64(0)}},
		{"a wrong key at OpenAI", lbtest.Says(401, `{"error":{"message":"Incorrect API key provided: sk-abc","type":"invalid_request_error","code":"invalid_api_key"}}`),
			map[string]any{"class": "credential", "cause": "invalid_api_key", "error": nil, "status": int64(401)}},
		{"a missing role at Azure", lbtest.Says(401, `{"error":{"code":"PermissionDenied","message":"The principal lacks the required data action"}}`),
			map[string]any{"class": "not_permitted", "cause": "PermissionDenied"}},
		{"a wrong key at Azure", lbtest.Says(401, `{"error":{"code":"401","message":"Access denied due to invalid subscription key"}}`), map[string]any{"class": "credential", "cause": "401"}},
		{"a network that is shut out", lbtest.Says(403, `{"error":{"code":"403","message":"Traffic is not from an approved private endpoint."}}`), map[string]any{"class": "credential", "cause": "403"}},
		{"the key as a code", lbtest.Says(401, `{"error":{"code":"key-of-a-backend"}}`), map[string]any{"class": "credential", "cause": "REDACTED"}},
		{"a text as a code", lbtest.Says(500, `{"error":{"code":"an error occurred\nwith \u001b[1m"}}`), map[string]any{"class": "failed", "cause": nil}},
		{"a very long code", lbtest.Says(500, `{"error":{"code":"`+strings.Repeat("x", 5000)+`"}}`), map[string]any{"class": "failed", "cause": nil}},
		{"a connection that is cut", lbtest.Aborts, map[string]any{"class": "failed", "cause": "closed", "error": "EOF"}},
		{"no answer", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, map[string]any{"class": "timeout", "cause": "no_reply", "error": "no reply in time"}},
		{"an empty stream", lbtest.Streams(), map[string]any{"class": "failed", "cause": "empty"}},
		{"a throttle", lbtest.Status(429, "Retry-After-Ms", "1439.0000004"), map[string]any{"class": "throttled", "cause": nil, "hint": "retry-after-ms", "seconds": 1.439}},
	} {
		t.Run(c.name, func(t *testing.T) {
			lbtest.InBubble(t, "openai_lb {\nbackend http://a {\napi_key key-of-a-backend\n}\n}", func(t *testing.T, w *lbtest.World) {
				if c.reply == nil {
					w.Stop("a")
				} else {
					w.Backends["a"].Replies(c.reply)
				}
				w.Post(`{"model":"gpt-4o","stream":true}`)
				lines := w.Logged("cooldown started")
				if len(lines) != 1 {
					t.Fatalf("there are %d lines", len(lines))
				}
				fields := lines[0].ContextMap()
				for name, want := range c.want {
					if got, ok := fields[name]; got != want || ok != (want != nil) {
						t.Errorf("%s is %v, want %v", name, got, want)
					}
				}
				if text := fmt.Sprint(fields); strings.Contains(text, "key-of-a-backend") || len(text) > 600 {
					t.Errorf("the line says %s", text)
				}
				if c.reply == nil {
					w.Serve("a:80", w.Backends["a"])
				}
				time.Sleep(6 * time.Minute)
				if back := w.Logged("cooldown ended"); len(back) != 1 || back[0].ContextMap()["seconds"] != fields["seconds"] {
					t.Errorf("of the return it says %v", back)
				}
			})
		})
	}
}

// TestTheEndOfACooldownSaysHowLongItWas if a request was served before its time
// had passed.
func TestTheEndOfACooldownSaysHowLongItWas(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\npool "+lbtest.Unique("early")+"\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Status(500))
		w.Post(`{"model":"gpt-4o"}`)
		time.Sleep(4 * time.Second)
		w.Backends["a"].Replies(lbtest.Says(200, `{"id":"x"}`))
		w.Post(`{"model":"gpt-4o"}`).WantStatus(t, 200)
		if back := w.Logged("cooldown ended"); len(back) != 1 || back[0].ContextMap()["seconds"] != 4. {
			t.Errorf("of the return it says %v, want 4 seconds", back)
		}
	})
}

// TestACooldownThatChangesItsReasonIsAnnouncedAgain has one backend, which is
// tried during its cooldown.
func TestACooldownThatChangesItsReasonIsAnnouncedAgain(t *testing.T) {
	pool := lbtest.Unique("changing")
	lbtest.InBubble(t, "openai_lb {\npool "+pool+"\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
		missing := lbtest.Says(404, `{"error":{"code":"DeploymentNotFound","message":"no"}}`)
		for _, reply := range []http.HandlerFunc{lbtest.Status(500), missing, lbtest.Status(500), missing} {
			w.Backends["a"].Replies(reply)
			w.Post(`{"model":"gpt-4o"}`)
		}
		var got []string
		for _, line := range w.Logged("cooldown started") {
			got = append(got, fmt.Sprint(line.Level, " ", line.ContextMap()["class"]))
		}
		if text := strings.Join(got, ", "); text != "warn failed, error no_model" {
			t.Errorf("the log says %s", text)
		}
		lbtest.WantSums(t, pool, "cooldowns_total class=failed 1", "cooldowns_total class=no_model 1")
		time.Sleep(2 * time.Minute)
		if back := w.Logged("cooldown ended"); len(back) != 1 || back[0].ContextMap()["class"] != "no_model" {
			t.Errorf("of the return it says %v", back)
		}
	})
}
