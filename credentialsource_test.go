package openailb_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap/zapcore"

	openailb "github.com/openai-lb/caddy-openai-lb"
	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

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
	return caddy.ModuleInfo{ID: "http.openai_lb.credentials.test", New: func() caddy.Module { return new(testSource) }}
}

func (s *testSource) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	return directive.Unmarshal(d, directive.Options{"start": directive.String(&s.Start)})
}

func (s *testSource) Provision(caddy.Context) (err error) {
	if s.Start != "" {
		s.value, err = keys.Resolve(s.Start)
	}
	return err
}

func (s *testSource) Credential(context.Context) (openailb.Credential, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return openailb.Credential{Header: "Authorization", Value: "Bearer " + s.value}, s.err
}

func (s *testSource) Renew(context.Context, openailb.Credential) (openailb.Credential, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.renewed++
	s.value = "fresh"
	return openailb.Credential{Header: "Authorization", Value: "Bearer " + s.value}, s.err
}

func (s *testSource) Identity() string { return s.Start }

func TestASourceRenewsWhatABackendRefuses(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\nbackend http://b {\npriority 2\n}\n}", func(t *testing.T, w *lbtest.World) {
		source := &testSource{value: "stale"}
		w.Handler.UseSource("a", source)

		w.Backends["a"].Replies(lbtest.WantsKey("fresh"))
		w.Post(`{"seed":1}`).WantServed(t, "a")
		w.WantCalls(map[string]int{"a": 2, "b": 0})
		for _, r := range w.Backends["a"].Received() {
			if r.BodyHash != lbtest.Hash([]byte(`{"seed":1}`)) {
				t.Error("a got another body")
			}
		}

		// no credential helps: it is renewed once, and then the backend cools
		// down
		w.Backends["a"].Replies(lbtest.Status(401))
		source.value = "stale"
		w.Post(`{}`).WantServed(t, "b")
		w.WantCalls(map[string]int{"a": 4, "b": 1})
		w.Post(`{}`).WantServed(t, "b")
		w.WantCalls(map[string]int{"a": 4, "b": 2})
		if source.renewed != 2 {
			t.Errorf("it was renewed %d times, want 2", source.renewed)
		}
	})
}

func TestABackendWithoutACredentialCoolsDownAlone(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\nbackend http://b {\npriority 2\n}\n}", func(t *testing.T, w *lbtest.World) {
		source := &testSource{err: errors.New("the token endpoint is dead")}
		w.Handler.UseSource("a", source)
		w.Post(`{}`).WantServed(t, "b")
		w.WantCalls(map[string]int{"a": 0, "b": 1})
		if cooldowns := w.Logged("cooldown started"); len(cooldowns) != 1 || cooldowns[0].ContextMap()["class"] != "no_credential" || cooldowns[0].Level != zapcore.WarnLevel {
			t.Errorf("logged %v, want a cooldown of class no_credential: a refused nothing", cooldowns)
		}

		w.Stop("b")
		w.Post(`{}`).WantError(t, 503, "upstream_credential_unavailable")
		source.err = nil
		time.Sleep(time.Minute)
		w.Post(`{}`).WantServed(t, "a")
	})
}

// untilLater is the error of a source that knows when to come back.
type untilLater struct{ error }

func (untilLater) RetryAfter() time.Duration { return 7 * time.Second }

func TestWithoutACredentialTheClientIsToldToComeBack(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
		source := &testSource{err: untilLater{errors.New("the token endpoint is dead")}}
		w.Handler.UseSource("a", source)
		for range 2 {
			reply := w.Post(`{}`)
			reply.WantError(t, 503, "upstream_credential_unavailable")
			if got := reply.Header.Get("Retry-After"); got != "7" || !strings.Contains(reply.Body, "after 7 seconds") {
				t.Errorf("Retry-After is %s with %s, want 7", got, reply.Body)
			}
		}
		w.WantCalls(map[string]int{"a": 0})
		source.err = nil
		w.Post(`{}`).WantServed(t, "a")
	})
}

// TestARefusedCredentialThatWasReplacedStartsNoCooldown also covers a body that
// is too long to be sent with the new one.
func TestARefusedCredentialThatWasReplacedStartsNoCooldown(t *testing.T) {
	for name, refuses := range map[string]int{"unauthorized": 401, "forbidden": 403} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, "openai_lb {\nrequest_buffers 1KiB\nbackend http://a\nbackend http://b {\npriority 2\n}\n}", func(t *testing.T, w *lbtest.World) {
				source := &testSource{value: "stale"}
				w.Handler.UseSource("a", source)
				w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
					if r.Header.Get("Authorization") == "Bearer stale" {
						source.Renew(t.Context(), openailb.Credential{}) // by another request
						lbtest.Status(refuses)(rw, r)
						return
					}
					lbtest.WantsKey("fresh")(rw, r)
				})
				reply := w.Post(`{"model":"gpt-4o","messages":[{"role":"user","content":"` + lbtest.Noise(8<<10) + `"}]}`)
				reply.WantError(t, 503, "upstream_credential_unavailable")
				if got := reply.Header.Get("Retry-After"); got != "1" {
					t.Errorf("Retry-After is %q, want 1", got)
				}
				w.WantNobodyBlamed()
				for range 3 {
					w.Post(`{"model":"gpt-4o"}`).WantServed(t, "a")
				}
				w.WantCalls(map[string]int{"b": 0})
			})
		})
	}
}
