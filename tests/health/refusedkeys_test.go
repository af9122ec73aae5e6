package health

import (
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap/zapcore"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestAMissingPermissionStartsACooldownForInferenceOnly(t *testing.T) {
	for _, code := range []int{401, 403} {
		for _, body := range []string{
			`{"error":{"message":"You have insufficient permissions for this operation. Missing scopes: api.fine_tuning.jobs.read.","type":"invalid_request_error","param":null,"code":"missing_scope"}}`,
			`{"error":{"code":"PermissionDenied","message":"The principal lacks the required data action Microsoft.CognitiveServices/accounts/OpenAI/fine-tunes/write to perform this operation."}}`,
			`{"error":{"message":"You have insufficient permissions for this operation.","type":"invalid_request_error","param":null,"code":null}}`,
		} {
			lbtest.InBubble(t, "openai_lb {\nbackend http://a\nbackend http://b {\npriority 2\n}\n}", func(t *testing.T, w *lbtest.World) {
				for _, b := range w.Backends {
					b.Replies(func(rw http.ResponseWriter, _ *http.Request) {
						rw.WriteHeader(code)
						io.WriteString(rw, body)
					})
				}
				jobs := func() lbtest.Reply {
					return w.Send(w.Request(http.MethodPost, "/v1/fine_tuning/jobs", strings.NewReader(`{"model":"gpt-4o"}`)))
				}
				jobs().WantError(t, 502, "upstream_credentials_rejected")
				w.WantCalls(map[string]int{"a": 1, "b": 1})
				if n := len(w.Logged("cooldown started")); n > 0 {
					t.Errorf("%d %s: %d cooldowns for an operation that is not inference", code, body, n)
				}
				w.Backends["b"].Recovers()
				jobs().WantServed(t, "b")
				w.WantCalls(map[string]int{"a": 2, "b": 2})

				// a role that lacks inference is for a person to mend
				for range 5 {
					w.Post(`{"model":"gpt-4o"}`).WantServed(t, "b")
				}
				w.WantCalls(map[string]int{"a": 3, "b": 7})
				cooldowns := w.Logged("cooldown started")
				if len(cooldowns) != 1 || cooldowns[0].Level != zapcore.ErrorLevel || cooldowns[0].ContextMap()["deployment"] != "gpt-4o" {
					t.Errorf("%d %s: got the cooldowns %v, want one of gpt-4o", code, body, cooldowns)
				}
			})
		}
	}
}

func TestARequestRefusedEverywhereCoolsOneBackendDown(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nready_path /readyz\nbackend http://a\nbackend http://b {\npriority 2\n}\nbackend http://c {\npriority 3\n}\n}", func(t *testing.T, w *lbtest.World) {
		w.AllReply(lbtest.Status(401))
		w.Post(`{}`).WantError(t, 502, "upstream_credentials_rejected")
		if n := len(w.Logged("cooldown started")); n != 1 {
			t.Errorf("%d cooldowns, want 1", n)
		}
		w.WantReady()
	})
}

func TestALateRefusalOfAnOldKeySaysNothingOfTheNew(t *testing.T) {
	for _, code := range []int{401, 402, 403, 429, 500} {
		file := filepath.Join(t.TempDir(), "key")
		lbtest.WriteFile(t, file, "first-key")
		lbtest.InBubble(t, "openai_lb {\nbackend http://a {\napi_key {file."+file+"}\n}\n}", func(t *testing.T, w *lbtest.World) {
			release := make(chan struct{})
			w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
				if r.Header.Get("Authorization") == "Bearer first-key" {
					<-release
					lbtest.Status(code)(rw, r)
					return
				}
				lbtest.WantsKey("second-key")(rw, r)
			})
			done := make(chan lbtest.Reply)
			go func() { done <- w.Post(`{}`) }()
			time.Sleep(2 * keys.ReloadInterval)
			lbtest.WriteFile(t, file, "second-key")
			w.Post(`{}`).WantServed(t, "a")
			close(release)
			<-done
			if n := len(w.Logged("cooldown started")); n > 0 {
				t.Errorf("a late %d for the old key started a cooldown of the new one", code)
			}
			w.Post(`{}`).WantServed(t, "a")
		})
	}
}

// TestAnErrorInAStreamAboutACallersOwnAccountStartsNoCooldown has callers who
// bring their own keys.
func TestAnErrorInAStreamAboutACallersOwnAccountStartsNoCooldown(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a {\nauth passthrough\n}\nbackend http://b {\npriority 2\nauth passthrough\n}\n}", func(t *testing.T, w *lbtest.World) {
		w.Prepares = func(r *http.Request) *http.Request {
			r.Header.Set("Authorization", "Bearer sk-caller-0123456789")
			return r
		}
		const noMoney = `data: {"error":{"message":"no","type":"insufficient_quota","param":null,"code":"insufficient_quota"}}` + "\n\n"
		w.Backends["a"].Replies(lbtest.Streams(lbtest.StreamContent, noMoney))
		for range 2 {
			w.Post(`{"model":"gpt-4o","stream":true}`)
		}
		w.WantCalls(map[string]int{"a": 2, "b": 0})
		w.Backends["a"].Replies(lbtest.Streams(lbtest.StreamContent, lbtest.Abort)) // which is the backend's doing
		for range 2 {
			w.Post(`{"model":"gpt-4o","stream":true}`)
		}
		w.WantCalls(map[string]int{"a": 3, "b": 1})
	})
}

// TestARefusalOfACallersOwnKeyEndsNoCooldown has a backend that fails refuse
// the key of another caller: that does not show that it serves again.
func TestARefusalOfACallersOwnKeyEndsNoCooldown(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a {\nauth passthrough\n}\nbackend http://b {\npriority 2\nauth passthrough\n}\n}", func(t *testing.T, w *lbtest.World) {
		w.Prepares = func(r *http.Request) *http.Request {
			r.Header.Set("Authorization", "Bearer sk-caller-0123456789")
			return r
		}
		w.Backends["a"].Replies(lbtest.Status(500))
		w.Backends["b"].Replies(lbtest.Status(500))
		for range 3 {
			w.Post(`{}`)
		}
		cooldowns := len(w.Logged("cooldown started"))
		if cooldowns != 2 {
			t.Fatalf("%d cooldowns started, want 2", cooldowns)
		}
		time.Sleep(time.Second)
		w.Backends["a"].Replies(lbtest.Status(401))
		w.Backends["b"].Replies(lbtest.Status(401))
		if reply := w.Post(`{}`); reply.Status != 401 {
			t.Fatalf("got a %d", reply.Status)
		}
		if n := len(w.Logged("cooldown ended")); n != 0 {
			t.Errorf("a refused key ended %d cooldowns", n)
		}
	})
}
