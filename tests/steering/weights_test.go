package steering

import (
	"fmt"
	"math"
	"net/http"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/modules/status"
)

// allows is a reply of a backend that allows so many tokens a minute, all of
// which are left.
func allows(tokens int) http.HandlerFunc {
	limit := fmt.Sprint(tokens)
	return lbtest.Says(200, `{"id":"chatcmpl-1","choices":[]}`, "X-Ratelimit-Limit-Tokens", limit, "X-Ratelimit-Remaining-Tokens", limit, "X-Ratelimit-Reset-Tokens", "60")
}

// shareOf returns which part of 1,000 requests goes to a backend.
func (w *world) shareOf(name string, bodyOf func(i int) string) float64 {
	w.t.Helper()
	for _, b := range w.Backends {
		b.Forget()
	}
	for i := range 1000 {
		if got := w.Post(bodyOf(i)); got.Status != 200 {
			w.t.Fatalf("got %d", got.Status)
		}
	}
	return float64(len(w.Backends[name].Received())) / 1000
}

func TestBackendsWithoutAWeightShareByTheirLimits(t *testing.T) {
	const stream = "data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\ndata: [DONE]\n\n"
	json := lbtest.Says(200, `{"id":"chatcmpl-1","choices":[]}`)
	for name, tc := range map[string]struct {
		options string
		body    string // with a number, which tells sessions from each other
		reply   http.HandlerFunc
		want    float64 // the part of the requests that b gets when limits are known
	}{
		"at random":     {"", `{"model":"gpt-4o","messages":[],"user":"%d"}`, json, .8},
		"by session":    {"", `{"model":"gpt-4o","messages":[],"prompt_cache_key":"%d"}`, json, .8},
		"a stream":      {"", `{"model":"gpt-4o","messages":[],"user":"%d","stream":true}`, lbtest.Says(200, stream, "Content-Type", "text/event-stream"), .8},
		"not steered":   {"quota_steering off", `{"model":"gpt-4o","messages":[],"user":"%d"}`, json, .5},
		"by a policy":   {"lb_policy round_robin", `{"model":"gpt-4o","messages":[],"user":"%d"}`, json, .5},
		"another model": {"", `{"model":"gpt-4o-mini","messages":[],"user":"%d"}`, json, .5},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, "a:1 b:1", tc.options, func(t *testing.T, w *world) {
				body := func(i int) string { return fmt.Sprintf(tc.body, i) }
				w.AllReply(tc.reply)
				if got := w.shareOf("b", body); math.Abs(got-.5) > .06 {
					t.Errorf("b gets %.2f of the requests before limits are known, want 0.5", got)
				}
				w.Backends["a"].Replies(allows(10_000_000))
				w.Backends["b"].Replies(allows(40_000_000))
				for range 20 {
					w.Post(chat)
					time.Sleep(time.Second)
				}
				w.AllReply(tc.reply)
				if got := w.shareOf("b", body); math.Abs(got-tc.want) > .06 {
					t.Errorf("b gets %.2f of the requests when limits are known, want %.1f", got, tc.want)
				}
			})
		})
	}
}

func TestOperatorsSeeTheWeightsInUse(t *testing.T) {
	inBubble(t, "a:1 b:1", "", func(t *testing.T, w *world) {
		w.Backends["a"].Replies(allows(30_000))
		w.Backends["b"].Replies(allows(60_000))
		for range 30 {
			w.Post(chat)
			time.Sleep(time.Second)
		}
		for _, b := range status.Backends(time.Now(), func(pool string) bool { return pool == w.pool }) {
			want := map[string]float64{"a": 1, "b": 2}[b.Name]
			if got := b.LearnedWeights["gpt-4o"]; got != want || b.Weight != 1 || b.WeightText() != fmt.Sprint(want) {
				t.Errorf("%s has the weight %v, shown as %s, want %v", b.Name, got, b.WeightText(), want)
			}
		}
	})
}
