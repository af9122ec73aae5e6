package health

import (
	"net/http"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// quota is a backend that serves so many requests per window, and says of the
// others nothing but what the headers say.
func quota(each int, window time.Duration, headers ...string) http.HandlerFunc {
	began := time.Now()
	counts := make(map[time.Duration]int)
	return func(rw http.ResponseWriter, r *http.Request) {
		now := time.Since(began) / window
		if counts[now]++; counts[now] > each {
			counts[now]--
			lbtest.Status(429, headers...)(rw, r)
		}
	}
}

func TestABackendThatNamesNoTimeIsTriedBeforeTheGuessIsOver(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a", ""), func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Status(429))
		w.Post(`{}`).WantError(t, 429, "rate_limit_exceeded")
		for range 3 {
			time.Sleep(500*time.Millisecond - time.Nanosecond)
			w.Post(`{}`).WantError(t, 429, "rate_limit_exceeded")
			time.Sleep(time.Nanosecond)
			reply := w.Post(`{}`)
			reply.WantError(t, 429, "rate_limit_exceeded")
			if got := reply.Header.Get("Retry-After"); got != "10" {
				t.Errorf("the client is told to wait %q s, want until the end of the guess", got)
			}
		}
		w.WantCalls(map[string]int{"a": 4})
		w.Backends["a"].Recovers()
		time.Sleep(500 * time.Millisecond)
		for range 5 {
			w.Post(`{}`).WantServed(t, "a")
		}
		if n := len(w.Logged("cooldown started")); n != 1 {
			t.Errorf("logged %d cooldowns, want 1", n)
		}
	})
}

func TestABackendThatNamesATimeIsNotTried(t *testing.T) {
	for name, reply := range map[string]http.HandlerFunc{
		"a throttle": lbtest.Throttled("10"),
		"a quota":    lbtest.Says(429, `{"error":{"code":"insufficient_quota"}}`),
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.PoolOf("a", ""), func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(reply)
				for range 99 {
					w.Post(`{}`)
					time.Sleep(100 * time.Millisecond)
				}
				w.WantCalls(map[string]int{"a": 1})
			})
		})
	}
}

func TestAGuessIsNotTriedWhileAnotherBackendIsLeft(t *testing.T) {
	lbtest.InBubble(t, aBeforeB, func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Status(429))
		for range 9 {
			w.Post(`{}`).WantServed(t, "b")
			time.Sleep(time.Second)
		}
		w.WantCalls(map[string]int{"a": 1, "b": 9})
		w.Backends["a"].Recovers()
		w.Backends["b"].Replies(lbtest.Status(500))
		w.Post(`{}`).WantServed(t, "a") // after b
		w.WantCalls(map[string]int{"a": 2, "b": 10})
	})
}

func TestAllOfAQuotaIsUsedWhateverTheBackendSays(t *testing.T) {
	for name, c := range map[string]struct {
		headers []string
		most    int // refusals per window, in the 4 s in which the quota is used up
	}{
		"nothing":                  {nil, 8},
		"an unreadable time":       {[]string{"Retry-After", "soon"}, 8},
		"a reset that is no limit": {[]string{"X-Ratelimit-Reset-Tokens", "8s", "X-Ratelimit-Remaining-Tokens", "17"}, 8},
		"Retry-After: 0":           {[]string{"Retry-After", "0"}, 20},
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.PoolOf("a", ""), func(t *testing.T, w *lbtest.World) {
				const each, windows = 60, 30
				w.Backends["a"].Replies(quota(each, 10*time.Second, c.headers...))
				served := 0
				for range windows * 100 { // 10 requests a second
					if w.Post(`{}`).Status == 200 {
						served++
					}
					time.Sleep(100 * time.Millisecond)
				}
				refused := len(w.Backends["a"].Received()) - served
				if served != each*windows || refused > c.most*windows {
					t.Errorf("of a quota of %d, %d were served and %d more refused, want all and at most %d", each*windows, served, refused, c.most*windows)
				}
			})
		})
	}
}
