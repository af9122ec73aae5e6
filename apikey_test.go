package openailb_test

import (
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestARotatedKeyIsUsedAtOnce(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	lbtest.WriteFile(t, file, "first\n")
	lbtest.InBubble(t, `openai_lb {
		backend http://a {
			api_key {file.`+file+`}
		}
	}`, func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.WantsKey("first"))
		w.Post(`{}`).WantServed(t, "a")

		// the provider takes the old key no more, before anybody looked at the
		// file
		lbtest.WriteFile(t, file, "second\n")
		w.Backends["a"].Replies(lbtest.WantsKey("second"))
		w.Post(`{}`).WantServed(t, "a")
		w.WantCalls(map[string]int{"a": 3})

		// the provider still takes both
		lbtest.WriteFile(t, file, "third\n")
		time.Sleep(keys.ReloadInterval)
		w.Backends["a"].Replies(lbtest.WantsKey("third"))
		w.Post(`{}`).WantServed(t, "a")
		w.WantCalls(map[string]int{"a": 4})
		if n := len(w.Logged("cooldown started")); n > 0 {
			t.Errorf("%d cooldowns for a key that was rotated", n)
		}
	})
}

func TestACooldownForAKeyEndsWithTheKey(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	lbtest.WriteFile(t, file, "wrong")
	lbtest.InBubble(t, `openai_lb {
		backend http://a {
			api_key {file.`+file+`}
		}
		backend http://b {
			priority 2
		}
	}`, func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.WantsKey("right"))
		w.Post(`{}`).WantServed(t, "b")
		time.Sleep(5 * time.Second)
		w.Post(`{}`).WantServed(t, "b")

		lbtest.WriteFile(t, file, "right")
		time.Sleep(keys.ReloadInterval)
		w.Post(`{}`).WantServed(t, "a")
		w.WantCalls(map[string]int{"a": 2, "b": 2})
		if back := w.Logged("cooldown ended"); len(back) != 1 {
			t.Errorf("%d cooldowns ended, want 1", len(back))
		}
	})
}

func TestAKeyFileThatCannotBeReadChangesNothing(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	lbtest.WriteFile(t, file, "right")
	lbtest.InBubble(t, `openai_lb {
		backend http://a {
			api_key {file.`+file+`}
		}
	}`, func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.WantsKey("right"))
		for _, broken := range []string{"", "two words", "a line\nand another"} {
			lbtest.WriteFile(t, file, broken)
			time.Sleep(keys.ReloadInterval)
			w.Post(`{}`).WantServed(t, "a")
		}
		lbtest.WriteFile(t, file, "right")
		time.Sleep(keys.ReloadInterval)
		w.Post(`{}`).WantServed(t, "a")
		told := w.Logs.Filter(func(entry observer.LoggedEntry) bool { return entry.Level > zap.DebugLevel }).All()
		if got := lbtest.Levels(told); !slices.Equal(got, []zapcore.Level{zap.ErrorLevel, zap.InfoLevel}) {
			t.Errorf("logged %v", told)
		}
	})
}

func TestPassthroughKeepsToTheCallersAccount(t *testing.T) {
	const config = `openai_lb {
		backend http://a {
			auth passthrough
		}
		backend http://b {
			priority 2
			api_key key-of-b
		}
		backend http://c {
			priority 3
			auth passthrough
		}
	}`
	t.Run("a refusal is the caller's", func(t *testing.T) {
		lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
			for _, code := range []int{401, 403, 402, 429} {
				w.Backends["a"].Replies(lbtest.Status(code))
				if reply := w.Send(w.RequestWithKey("callers")); reply.Status != code || reply.Backend != "a" {
					t.Errorf("client got %d of %q, want a's %d", reply.Status, reply.Backend, code)
				}
			}
			w.WantCalls(map[string]int{"a": 4, "b": 0, "c": 0}) // one caller's limit starts no cooldown
		})
	})
	t.Run("a failure moves on to the same account", func(t *testing.T) {
		lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
			w.Backends["a"].Replies(lbtest.Status(500))
			w.Send(w.RequestWithKey("callers")).WantServed(t, "c")
			w.WantCalls(map[string]int{"a": 1, "b": 0, "c": 1})
			if got := w.Backends["c"].Received()[0].Request.Header.Get("Authorization"); got != "Bearer callers" {
				t.Errorf("c got Authorization %q", got)
			}
		})
	})
	t.Run("no credential of its own", func(t *testing.T) {
		lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
			w.Post(`{}`).WantServed(t, "b")
			r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{}`))
			r.SetBasicAuth("user", "a password of Caddy's")
			w.Send(r).WantServed(t, "b")
			w.WantCalls(map[string]int{"a": 0, "b": 2, "c": 0})
		})
	})
	t.Run("no credential, and nowhere else to go", func(t *testing.T) {
		lbtest.InBubble(t, "openai_lb {\nbackend http://a {\nauth passthrough\n}\n}", func(t *testing.T, w *lbtest.World) {
			reply := w.Post(`{}`)
			if reply.Status != 401 || !strings.Contains(reply.Body, `"code":"invalid_api_key"`) {
				t.Errorf("client got %d %s, want 401 invalid_api_key", reply.Status, reply.Body)
			}
			w.WantCalls(map[string]int{"a": 0})
		})
	})
}

// TestABackendMayGetTwoCredentials has a gateway that wants a subscription's
// key besides the provider's credential.
func TestABackendMayGetTwoCredentials(t *testing.T) {
	for name, options := range map[string]string{
		"a token beside the key": "auth api_key\napi_key first-key\nheader Authorization \"Bearer second-key\"",
		"a key beside the token": "auth bearer\napi_key second-key\nheader api-key first-key",
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, "openai_lb {\nclient_key alice client-key-of-alice\nbackend http://a {\n"+options+"\n}\n}", func(t *testing.T, w *lbtest.World) {
				for _, header := range []string{"Authorization", "Api-Key"} { // neither is the client's
					r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{"model":"m"}`))
					r.Header.Del("Authorization")
					r.Header.Set(header, map[string]string{"Authorization": "Bearer client-key-of-alice", "Api-Key": "client-key-of-alice"}[header])
					w.Send(r).WantServed(t, "a")
				}
				for _, call := range w.Backends["a"].Received() {
					got := call.Request.Header
					if !slices.Equal(got["Authorization"], []string{"Bearer second-key"}) || !slices.Equal(got["Api-Key"], []string{"first-key"}) {
						t.Errorf("a got %v", got)
					}
				}
				// and no reply shows one of them
				for _, key := range []string{"first-key", "second-key"} {
					w.Backends["a"].Replies(lbtest.Says(400, `{"error":{"message":"the key `+key+` is not for this"}}`))
					r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{"model":"m"}`))
					r.Header.Set("Authorization", "Bearer client-key-of-alice")
					if reply := w.Send(r); strings.Contains(reply.Body, key) {
						t.Errorf("the client got %s", reply.Body)
					}
				}
			})
		})
	}
}
