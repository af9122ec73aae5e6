package failover

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestWhenAllThrottleTheClientIsToldTheSoonestReturn(t *testing.T) {
	lbtest.InBubble(t, lbtest.ThreeBackends, func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Throttled("44"))
		w.Backends["b"].Replies(lbtest.Throttled("4"))
		w.Backends["c"].Replies(lbtest.Throttled("7"))
		reply := w.Post(`{}`)
		reply.WantError(t, 429, "rate_limit_exceeded")
		if got := reply.Header.Get("Retry-After"); got != "4" {
			t.Errorf("Retry-After is %q, want 4", got)
		}
		if got := reply.Header.Get("Retry-After-Ms"); got != "4000" {
			t.Errorf("Retry-After-Ms is %q, want 4000", got)
		}
		time.Sleep(1500 * time.Millisecond)
		reply = w.Post(`{}`)
		reply.WantError(t, 429, "rate_limit_exceeded")
		if s, ms := reply.Header.Get("Retry-After"), reply.Header.Get("Retry-After-Ms"); s != "3" || ms != "2500" {
			t.Errorf("after 1.5s Retry-After is %q and Retry-After-Ms %q, want 3 and 2500", s, ms)
		}
		w.WantCalls(map[string]int{"a": 1, "b": 1, "c": 1})
		w.Backends["b"].Recovers()
		time.Sleep(2500 * time.Millisecond)
		w.Post(`{}`).WantServed(t, "b")
		w.WantCalls(map[string]int{"a": 1, "b": 2, "c": 1})
	})
}

func TestAClientIsNeverToldToWaitForMoreThanAMinuteOrNotAtAll(t *testing.T) {
	for hint, want := range map[string][2]string{
		"86400": {"59", "59000"},
		"0":     {"1", "1000"},
		"0.043": {"1", "1000"},
		"1.2":   {"2", "1200"},
	} {
		t.Run(hint, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.ThreeBackends, func(t *testing.T, w *lbtest.World) {
				for _, b := range w.Backends {
					b.Replies(lbtest.Throttled(hint))
				}
				reply := w.Post(`{}`)
				reply.WantError(t, 429, "rate_limit_exceeded")
				if got := [2]string{reply.Header.Get("Retry-After"), reply.Header.Get("Retry-After-Ms")}; got != want {
					t.Errorf("told to wait %v, want %v", got, want)
				}
				w.WantCalls(map[string]int{"a": 1, "b": 1, "c": 1})
			})
		})
	}
}

func TestSuspectsAreTriedWhenNobodyElseIsLeft(t *testing.T) {
	lbtest.InBubble(t, lbtest.ThreeBackends, func(t *testing.T, w *lbtest.World) {
		for _, name := range []string{"a", "b", "c"} {
			w.Stop(name)
		}
		w.Post(`{}`).WantError(t, 502, "upstream_unreachable")
		time.Sleep(500 * time.Millisecond) // before the balancer looks for them
		w.Serve("c:80", w.Backends["c"])
		w.Post(`{}`).WantServed(t, "c")
		if n := len(w.Logged("cooldown ended")); n != 1 {
			t.Errorf("logged %d backends as back, want 1: the suspect that served", n)
		}
		w.Post(`{}`).WantServed(t, "c")
	})
}

func TestAThrottledBackendIsNotASuspect(t *testing.T) {
	lbtest.InBubble(t, lbtest.ThreeBackends, func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Throttled("30"))
		w.Stop("b")
		w.Stop("c")
		// a throttles, b and c cannot be reached: a's return is the honest
		// answer
		w.Post(`{}`).WantError(t, 429, "rate_limit_exceeded")
		w.Post(`{}`).WantError(t, 429, "rate_limit_exceeded")
		w.WantCalls(map[string]int{"a": 1})
	})
}

func TestTheReplyThatTellsMostReachesTheClient(t *testing.T) {
	for _, c := range []struct {
		name    string
		a, b, c http.HandlerFunc
		status  int
		code    string // of our own error
		backend string // of a backend's error
		retry   string
	}{
		{"a failure, then throttles: the failure", lbtest.Status(500), lbtest.Throttled("9"), lbtest.Throttled("9"), 500, "", "a", ""},
		{"an overload's hint is the soonest return of all", lbtest.Status(503, "Retry-After", "30"), lbtest.Throttled("9"), lbtest.Throttled("5"), 503, "", "a", "5"},
		{"the last of several failures", lbtest.Status(500), lbtest.Status(503), lbtest.Status(502), 502, "", "c", ""},
		{"refused credentials everywhere", lbtest.Status(401), lbtest.Status(403), lbtest.Status(401), 502, "upstream_credentials_rejected", "", ""},
		{"a refused credential and throttles", lbtest.Status(401), lbtest.Throttled("9"), lbtest.Throttled("5"), 429, "rate_limit_exceeded", "", "5"},
	} {
		t.Run(c.name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(c.a)
				w.Backends["b"].Replies(c.b)
				w.Backends["c"].Replies(c.c)
				reply := w.Post(`{}`)
				if c.code != "" {
					reply.WantError(t, c.status, c.code)
				} else if reply.Status != c.status || reply.Backend != c.backend {
					t.Fatalf("client got %d of %q, want %d of %s", reply.Status, reply.Backend, c.status, c.backend)
				}
				if got := reply.Header.Get("Retry-After"); got != c.retry {
					t.Errorf("Retry-After is %q, want %q", got, c.retry)
				}
				w.WantCalls(map[string]int{"a": 1, "b": 1, "c": 1})
			})
		})
	}
}

func TestTheClientsOwnErrorIsPassedOnAndStartsNoCooldown(t *testing.T) {
	for _, code := range []int{400, 404, 409, 413, 422} {
		lbtest.InBubble(t, lbtest.ThreeBackends, func(t *testing.T, w *lbtest.World) {
			w.Backends["a"].Replies(lbtest.Status(code))
			for range 2 {
				if reply := w.Post(`{}`); reply.Status != code || reply.Backend != "a" || !strings.Contains(reply.Body, "as told") {
					t.Fatalf("client got %d of %q %s, want a's %d", reply.Status, reply.Backend, reply.Body, code)
				}
			}
			w.WantCalls(map[string]int{"a": 2, "b": 0, "c": 0})
		})
	}
}

func TestLBRetriesLimitsFurtherBackends(t *testing.T) {
	lbtest.InBubble(t, lbtest.InOrder("a b c", "lb_retries 1"), func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Throttled("9"))
		w.Backends["b"].Replies(lbtest.Throttled("9"))
		reply := w.Post(`{}`)
		reply.WantError(t, 429, "rate_limit_exceeded")
		// c was not asked, and may be asked at once
		if got := reply.Header.Get("Retry-After"); got != "1" {
			t.Errorf("Retry-After is %q, want 1", got)
		}
		w.WantCalls(map[string]int{"a": 1, "b": 1, "c": 0})
		w.Post(`{}`).WantServed(t, "c")
	})
}

func TestLBTryDurationLimitsFurtherBackends(t *testing.T) {
	lbtest.InBubble(t, lbtest.InOrder("a b", "lb_try_duration 5s"), func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			time.Sleep(6 * time.Second)
			lbtest.Status(500)(rw, r)
		})
		if reply := w.Post(`{}`); reply.Status != 500 || reply.Backend != "a" {
			t.Errorf("client got %d of %q, want a's 500", reply.Status, reply.Backend)
		}
		w.WantCalls(map[string]int{"a": 1, "b": 0})
	})
}

func TestOverloadedEverywhereSaysWhenToComeBack(t *testing.T) {
	for name, reply := range map[string]http.HandlerFunc{
		"503":                     lbtest.Status(503),
		"529":                     lbtest.Status(529),
		"503 with a hint in text": lbtest.Says(503, `{"error":{"message":"Please retry after 20 seconds.","type":"server_error"}}`),
		"no capacity":             lbtest.Says(429, `{"error":{"message":"x","type":"server_error","code":"no_capacity"}}`),
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.ThreeBackends, func(t *testing.T, w *lbtest.World) {
				w.AllReply(reply)
				got := w.Post(`{}`)
				want := "10"
				if strings.Contains(name, "hint") {
					want = "20"
				}
				if got.Header.Get("Retry-After") != want || got.Header.Get("Retry-After-Ms") != want+"000" {
					t.Errorf("client got %d %v %s, want Retry-After %s", got.Status, got.Header, got.Body, want)
				}
			})
		})
	}
}
