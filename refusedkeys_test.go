package openailb

import (
	"errors"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap/zapcore"

	"github.com/openai-lb/caddy-openai-lb/internal/secret"
)

func TestWhatIsNotPermittedBenchesForInferenceOnly(t *testing.T) {
	for _, code := range []int{401, 403} {
		for _, body := range []string{
			`{"error":{"message":"You have insufficient permissions for this operation. Missing scopes: api.fine_tuning.jobs.read.","type":"invalid_request_error","param":null,"code":"missing_scope"}}`,
			`{"error":{"code":"PermissionDenied","message":"The principal lacks the required data action Microsoft.CognitiveServices/accounts/OpenAI/fine-tunes/write to perform this operation."}}`,
			`{"error":{"message":"You have insufficient permissions for this operation.","type":"invalid_request_error","param":null,"code":null}}`,
		} {
			inBubble(t, "openai_lb {\nbackend http://a\nbackend http://b {\npriority 2\n}\n}", func(t *testing.T, w *world) {
				for _, b := range w.backends {
					b.replies(func(rw http.ResponseWriter, _ *http.Request) {
						rw.WriteHeader(code)
						io.WriteString(rw, body)
					})
				}
				jobs := func() clientReply {
					return w.send(w.request(http.MethodPost, "/v1/fine_tuning/jobs", strings.NewReader(`{"model":"gpt-4o"}`)))
				}
				jobs().wantError(t, 502, "upstream_credentials_rejected")
				w.wantCalls(map[string]int{"a": 1, "b": 1})
				if n := len(w.logged("backend benched")); n > 0 {
					t.Errorf("%d %s: %d benches for an operation of its own", code, body, n)
				}
				w.backends["b"].recovers()
				jobs().wantServed(t, "b")
				w.wantCalls(map[string]int{"a": 2, "b": 2})

				// a role that lacks inference is for a person to mend
				for range 5 {
					w.post(`{"model":"gpt-4o"}`).wantServed(t, "b")
				}
				w.wantCalls(map[string]int{"a": 3, "b": 7})
				benches := w.logged("backend benched")
				if len(benches) != 1 || benches[0].Level != zapcore.ErrorLevel || benches[0].ContextMap()["model"] != "gpt-4o" {
					t.Errorf("%d %s: benches %v", code, body, benches)
				}
			})
		}
	}
}

func TestARequestRefusedEverywhereBenchesOneBackend(t *testing.T) {
	inBubble(t, "openai_lb {\nbackend http://a\nbackend http://b {\npriority 2\n}\nbackend http://c {\npriority 3\n}\n}", func(t *testing.T, w *world) {
		for _, b := range w.backends {
			b.replies(status(401))
		}
		w.post(`{}`).wantError(t, 502, "upstream_credentials_rejected")
		if n := len(w.logged("backend benched")); n != 1 {
			t.Errorf("%d benches, want 1", n)
		}
		if usable, _ := w.handler.balancer.Pool.Usable(time.Now()); !usable {
			t.Error("no backend is usable any more")
		}
	})
}

func TestALateRefusalOfAnOldKeySaysNothingOfTheNew(t *testing.T) {
	for _, code := range []int{401, 402, 403, 429, 500} {
		file := filepath.Join(t.TempDir(), "key")
		writeFile(t, file, "first-key")
		inBubble(t, "openai_lb {\nbackend http://a {\napi_key {file."+file+"}\n}\n}", func(t *testing.T, w *world) {
			release := make(chan struct{})
			w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) {
				if r.Header.Get("Authorization") == "Bearer first-key" {
					<-release
					status(code)(rw, r)
					return
				}
				wantsKey("second-key")(rw, r)
			})
			done := make(chan clientReply)
			go func() { done <- w.post(`{}`) }()
			time.Sleep(2 * secret.ReloadInterval)
			writeFile(t, file, "second-key")
			w.post(`{}`).wantServed(t, "a")
			close(release)
			<-done
			if n := len(w.logged("backend benched")); n > 0 {
				t.Errorf("a late %d for the old key benched the new one", code)
			}
			w.post(`{}`).wantServed(t, "a")
		})
	}
}

func TestAKeyIsRenewedWhateverUnhealthyStatusSays(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	writeFile(t, file, "first-key")
	inBubble(t, "openai_lb {\nunhealthy_status 429 5xx\nbackend http://a {\napi_key {file."+file+"}\n}\n}", func(t *testing.T, w *world) {
		w.backends["a"].replies(wantsKey("first-key"))
		w.post(`{}`).wantServed(t, "a")
		writeFile(t, file, "second-key")
		w.backends["a"].replies(wantsKey("second-key"))
		w.post(`{}`).wantServed(t, "a")
	})
}

func TestASourceRenewsWhatABackendRefuses(t *testing.T) {
	inBubble(t, "openai_lb {\nbackend http://a\nbackend http://b {\npriority 2\n}\n}", func(t *testing.T, w *world) {
		source := &testSource{value: "stale"}
		w.useSource("a", source)

		w.backends["a"].replies(wantsKey("fresh"))
		w.post(`{"seed":1}`).wantServed(t, "a")
		w.wantCalls(map[string]int{"a": 2, "b": 0})
		for _, r := range w.backends["a"].received() {
			if r.bodyHash != sha([]byte(`{"seed":1}`)) {
				t.Error("a got another body")
			}
		}

		// no credential helps: it is renewed once, and then the backend is benched
		w.backends["a"].replies(status(401))
		source.value = "stale"
		w.post(`{}`).wantServed(t, "b")
		w.wantCalls(map[string]int{"a": 4, "b": 1})
		w.post(`{}`).wantServed(t, "b")
		w.wantCalls(map[string]int{"a": 4, "b": 2})
		if source.renewed != 2 {
			t.Errorf("it was renewed %d times, want 2", source.renewed)
		}
	})
}

func TestABackendWithoutACredentialIsBenchedAlone(t *testing.T) {
	inBubble(t, "openai_lb {\nbackend http://a\nbackend http://b {\npriority 2\n}\n}", func(t *testing.T, w *world) {
		source := &testSource{err: errors.New("the token endpoint is dead")}
		w.useSource("a", source)
		w.post(`{}`).wantServed(t, "b")
		w.wantCalls(map[string]int{"a": 0, "b": 1})
		if benches := w.logged("backend benched"); len(benches) != 1 || benches[0].ContextMap()["class"] != "credential" {
			t.Errorf("logged %v, want a bench of class credential", benches)
		}

		w.stop("b")
		if reply := w.post(`{}`); reply.status != 502 || !strings.Contains(reply.body, "upstream_") {
			t.Errorf("client got %d %s, want a 502", reply.status, reply.body)
		}
		source.err = nil
		time.Sleep(time.Minute)
		w.post(`{}`).wantServed(t, "a")
	})
}

func TestForwardNeverPassesARefusedKeyOn(t *testing.T) {
	inBubble(t, `openai_lb {
		backend http://a
		all_throttled forward
	}`, func(t *testing.T, w *world) {
		w.backends["a"].replies(throttled("60"))
		w.post(`{}`)
		w.backends["a"].replies(status(401))
		w.post(`{}`).wantError(t, 429, "rate_limit_exceeded")
	})
}
