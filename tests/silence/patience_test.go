package silence

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// takes answers after a while, unless the request is ended before.
func takes(after time.Duration, reply http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-time.After(after):
			reply(w, r)
		case <-r.Context().Done():
		}
	}
}

// serves is a success for a request with this body.
func serves(body string) http.HandlerFunc {
	if strings.Contains(body, "stream") {
		return lbtest.Streams(lbtest.StreamContent, lbtest.StreamEnd)
	}
	return lbtest.Says(200, `{"id":"chatcmpl-1","choices":[{"message":{"content":"hi"}}]}`)
}

// TestAnAttemptLeavesTimeForTheNextOne has clients say how long they wait, as
// the SDKs for Python and Node do: another backend is asked after half of that,
// and the first one is not to blame.
func TestAnAttemptLeavesTimeForTheNextOne(t *testing.T) {
	for _, header := range []string{"X-Stainless-Read-Timeout", "X-Stainless-Timeout"} {
		for _, body := range []string{`{"model":"gpt-4o"}`, `{"model":"gpt-4o","stream":true}`} {
			lbtest.InBubble(t, "openai_lb {\nlb_policy first\nbackend http://a\nbackend http://b\n}", func(t *testing.T, w *lbtest.World) {
				w.Prepares = func(r *http.Request) *http.Request {
					r.Header.Set(header, "60")
					return r
				}
				w.Backends["a"].Replies(takes(time.Hour, nil))
				began := time.Now()
				w.Post(body).WantServed(t, "b")
				if took := time.Since(began); took != 30*time.Second {
					t.Errorf("b was asked after %s", took)
				}
				w.WantNobodyBlamed()
				// nothing can follow an attempt at the last backend, so it may
				// take all the time
				w.Backends["a"].Replies(lbtest.Status(500))
				w.Backends["b"].Replies(takes(59*time.Second, serves(body)))
				w.Post(body).WantServed(t, "b")
			})
		}
	}
}

// TestTheLastBackendHasTenMinutes has a model that takes long to begin, at the
// only backend, and where another one could follow.
func TestTheLastBackendHasTenMinutes(t *testing.T) {
	for _, c := range []struct {
		backends, options string
		thinks            time.Duration
		want              string
	}{
		{"backend http://a", "", 9 * time.Minute, "a"},
		{"backend http://a\nbackend http://b", "", 4 * time.Minute, "a"},
		{"backend http://a\nbackend http://b", "", 6 * time.Minute, "b"},
		{"backend http://a", "stream_first_event_timeout 1m\nresponse_header_timeout 1m", 2 * time.Minute, ""},
	} {
		for _, body := range []string{`{"model":"gpt-4o"}`, `{"model":"gpt-4o","stream":true}`} {
			lbtest.InBubble(t, "openai_lb {\nlb_policy first\n"+c.backends+"\n"+c.options+"\n}", func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(takes(c.thinks, serves(body)))
				if reply := w.Post(body); c.want == "" {
					reply.WantError(t, 504, "upstream_timeout")
				} else {
					reply.WantServed(t, c.want)
				}
			})
		}
	}
}

// TestALoneRequestMovesFromABackendThatHangs has one client that sends one
// request after the other: no second one shows that the backend is silent.
func TestALoneRequestMovesFromABackendThatHangs(t *testing.T) {
	for _, c := range []struct{ usual, want time.Duration }{{time.Second, time.Minute}, {10 * time.Second, 100 * time.Second}} {
		lbtest.InBubble(t, "openai_lb {\nlb_policy first\nbackend http://a\nbackend http://b\n}", func(t *testing.T, w *lbtest.World) {
			for _, name := range []string{"a", "b"} {
				w.Backends[name].Replies(takes(c.usual, serves("")))
			}
			for range 20 {
				w.Post(`{"model":"gpt-4o"}`).WantServed(t, "a")
			}
			w.Backends["a"].Replies(takes(time.Hour, nil))
			began := time.Now()
			w.Post(`{"model":"gpt-4o"}`).WantServed(t, "b")
			if took := time.Since(began); took < c.want || took > c.want+c.usual+2*time.Second {
				t.Errorf("usually served after %s, it moved after %s", c.usual, took-c.usual)
			}
			w.WantNobodyBlamed()
		})
	}
}

// TestAPauseStartsNoCooldown cuts a stream that pauses for too long, and goes
// on with the backend.
func TestAPauseStartsNoCooldown(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nlb_policy first\nbackend http://a\nbackend http://b\n}", func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Streams(lbtest.StreamContent, 4*time.Minute, lbtest.StreamContent, lbtest.StreamEnd))
		if reply := w.PostStream(); reply.Err != nil {
			t.Errorf("a pause of four minutes: %v", reply.Err)
		}
		w.Backends["a"].Replies(lbtest.Streams(lbtest.StreamContent, 6*time.Minute, lbtest.StreamContent, lbtest.StreamEnd))
		if reply := w.PostStream(); reply.Err == nil {
			t.Error("a pause of six minutes is not cut")
		}
		if n := len(w.Logged("cooldown started")); n != 0 {
			t.Errorf("%d cooldowns started", n)
		}
		w.Backends["a"].Recovers()
		w.PostStream().WantServed(t, "a")
	})
}
