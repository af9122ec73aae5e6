package openailb

import (
	"context"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/secret"
)

func TestARotatedKeyIsUsedAtOnce(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	writeFile(t, file, "first\n")
	inBubble(t, `openai_lb {
		backend http://a {
			api_key {file.`+file+`}
		}
	}`, func(t *testing.T, w *world) {
		w.backends["a"].replies(wantsKey("first"))
		w.post(`{}`).wantServed(t, "a")

		// the provider takes the old key no more, before anybody looked at the file
		writeFile(t, file, "second\n")
		w.backends["a"].replies(wantsKey("second"))
		w.post(`{}`).wantServed(t, "a")
		w.wantCalls(map[string]int{"a": 3})

		// the provider still takes both
		writeFile(t, file, "third\n")
		time.Sleep(secret.ReloadInterval)
		w.backends["a"].replies(wantsKey("third"))
		w.post(`{}`).wantServed(t, "a")
		w.wantCalls(map[string]int{"a": 4})
		if n := len(w.logged("backend benched")); n > 0 {
			t.Errorf("%d benches for a key that was rotated", n)
		}
	})
}

func TestABenchForAKeyEndsWithTheKey(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	writeFile(t, file, "wrong")
	inBubble(t, `openai_lb {
		backend http://a {
			api_key {file.`+file+`}
		}
		backend http://b {
			priority 2
		}
	}`, func(t *testing.T, w *world) {
		w.backends["a"].replies(wantsKey("right"))
		w.post(`{}`).wantServed(t, "b")
		time.Sleep(5 * time.Second)
		w.post(`{}`).wantServed(t, "b")

		writeFile(t, file, "right")
		time.Sleep(secret.ReloadInterval)
		w.post(`{}`).wantServed(t, "a")
		w.wantCalls(map[string]int{"a": 2, "b": 2})
	})
}

func TestAKeyFileThatCannotBeReadChangesNothing(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	writeFile(t, file, "right")
	inBubble(t, `openai_lb {
		backend http://a {
			api_key {file.`+file+`}
		}
	}`, func(t *testing.T, w *world) {
		core, logs := observer.New(zap.DebugLevel)
		w.handler.keyFiles.Logger = zap.New(core)
		w.backends["a"].replies(wantsKey("right"))
		for _, broken := range []string{"", "two words", "a line\nand another"} {
			writeFile(t, file, broken)
			time.Sleep(secret.ReloadInterval)
			w.post(`{}`).wantServed(t, "a")
		}
		writeFile(t, file, "right")
		time.Sleep(secret.ReloadInterval)
		w.post(`{}`).wantServed(t, "a")
		if got := levels(logs.All()); !slices.Equal(got, []zapcore.Level{zap.ErrorLevel, zap.InfoLevel}) {
			t.Errorf("logged %v", logs.All())
		}
	})
}

// testSource is a credential source of another module.
type testSource struct {
	Start string `json:"start,omitempty"`

	mu      sync.Mutex
	value   string
	err     error
	renewed int
}

func init() { caddy.RegisterModule(new(testSource)) }

func (*testSource) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: credentialsNamespace + ".test", New: func() caddy.Module { return new(testSource) }}
}

func (s *testSource) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	return directive.Unmarshal(d, directive.Options{"start": directive.String(&s.Start)})
}

func (s *testSource) Provision(caddy.Context) (err error) {
	if s.Start != "" {
		s.value, err = secret.Resolve(s.Start)
	}
	return err
}

func (s *testSource) Credential(context.Context) (Credential, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return Credential{Header: "Authorization", Value: "Bearer " + s.value}, s.err
}

func (s *testSource) Renew(context.Context, Credential) (Credential, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.renewed++
	s.value = "fresh"
	return Credential{Header: "Authorization", Value: "Bearer " + s.value}, s.err
}

func (s *testSource) Identity() string { return s.Start }

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
		inBubble(t, config, func(t *testing.T, w *world) {
			for _, code := range []int{401, 403, 402, 429} {
				w.backends["a"].replies(status(code))
				if reply := w.send(w.requestWithKey("callers")); reply.status != code || reply.backend != "a" {
					t.Errorf("client got %d of %q, want a's %d", reply.status, reply.backend, code)
				}
			}
			w.wantCalls(map[string]int{"a": 4, "b": 0, "c": 0}) // one caller's limit benches nobody
		})
	})
	t.Run("a failure moves on to the same account", func(t *testing.T) {
		inBubble(t, config, func(t *testing.T, w *world) {
			w.backends["a"].replies(status(500))
			w.send(w.requestWithKey("callers")).wantServed(t, "c")
			w.wantCalls(map[string]int{"a": 1, "b": 0, "c": 1})
			if got := w.backends["c"].received()[0].request.Header.Get("Authorization"); got != "Bearer callers" {
				t.Errorf("c got Authorization %q", got)
			}
		})
	})
	t.Run("no credential of its own", func(t *testing.T) {
		inBubble(t, config, func(t *testing.T, w *world) {
			w.post(`{}`).wantServed(t, "b")
			r := w.request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{}`))
			r.SetBasicAuth("user", "a password of Caddy's")
			w.send(r).wantServed(t, "b")
			w.wantCalls(map[string]int{"a": 0, "b": 2, "c": 0})
		})
	})
	t.Run("no credential, and nowhere else to go", func(t *testing.T) {
		inBubble(t, "openai_lb {\nbackend http://a {\nauth passthrough\n}\n}", func(t *testing.T, w *world) {
			reply := w.post(`{}`)
			if reply.status != 401 || !strings.Contains(reply.body, `"code":"invalid_api_key"`) {
				t.Errorf("client got %d %s, want 401 invalid_api_key", reply.status, reply.body)
			}
			w.wantCalls(map[string]int{"a": 0})
		})
	})
}
