package openailb

import (
	"net/http"
	"strings"
	"testing"
	"time"
)

func TestWhenAllThrottleTheClientIsToldTheSoonestReturn(t *testing.T) {
	inBubble(t, threeBackends, func(t *testing.T, w *world) {
		w.backends["a"].replies(throttled("44"))
		w.backends["b"].replies(throttled("4"))
		w.backends["c"].replies(throttled("7"))
		reply := w.post(`{}`)
		reply.wantError(t, 429, "rate_limit_exceeded")
		if got := reply.header.Get("Retry-After"); got != "4" {
			t.Errorf("Retry-After is %q, want 4", got)
		}
		if got := reply.header.Get("Retry-After-Ms"); got != "4000" {
			t.Errorf("Retry-After-Ms is %q, want 4000", got)
		}
		time.Sleep(1500 * time.Millisecond)
		reply = w.post(`{}`)
		reply.wantError(t, 429, "rate_limit_exceeded")
		if s, ms := reply.header.Get("Retry-After"), reply.header.Get("Retry-After-Ms"); s != "3" || ms != "2500" {
			t.Errorf("after 1.5s Retry-After is %q and Retry-After-Ms %q, want 3 and 2500", s, ms)
		}
		w.wantCalls(map[string]int{"a": 1, "b": 1, "c": 1})
		w.backends["b"].recovers()
		time.Sleep(2500 * time.Millisecond)
		w.post(`{}`).wantServed(t, "b")
		w.wantCalls(map[string]int{"a": 1, "b": 2, "c": 1})
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
			inBubble(t, threeBackends, func(t *testing.T, w *world) {
				for _, b := range w.backends {
					b.replies(throttled(hint))
				}
				reply := w.post(`{}`)
				reply.wantError(t, 429, "rate_limit_exceeded")
				if got := [2]string{reply.header.Get("Retry-After"), reply.header.Get("Retry-After-Ms")}; got != want {
					t.Errorf("told to wait %v, want %v", got, want)
				}
				w.wantCalls(map[string]int{"a": 1, "b": 1, "c": 1})
			})
		})
	}
}

func TestSuspectsAreTriedWhenNobodyElseIsLeft(t *testing.T) {
	inBubble(t, threeBackends, func(t *testing.T, w *world) {
		for _, name := range []string{"a", "b", "c"} {
			w.stop(name)
		}
		w.post(`{}`).wantError(t, 502, "upstream_unreachable")
		time.Sleep(time.Second)
		w.serve("c:80", w.backends["c"])
		w.post(`{}`).wantServed(t, "c")
		if n := len(w.logged("backend back")); n != 1 {
			t.Errorf("logged %d backends as back, want 1: the suspect that served", n)
		}
		w.post(`{}`).wantServed(t, "c")
	})
}

func TestAThrottledBackendIsNotASuspect(t *testing.T) {
	inBubble(t, threeBackends, func(t *testing.T, w *world) {
		w.backends["a"].replies(throttled("30"))
		w.stop("b")
		w.stop("c")
		// a throttles, b and c cannot be reached: a's return is the honest answer
		w.post(`{}`).wantError(t, 429, "rate_limit_exceeded")
		w.post(`{}`).wantError(t, 429, "rate_limit_exceeded")
		w.wantCalls(map[string]int{"a": 1})
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
		{"a failure, then throttles: the failure", status(500), throttled("9"), throttled("9"), 500, "", "a", ""},
		{"an overload's hint is the soonest return of all", status(503, "Retry-After", "30"), throttled("9"), throttled("5"), 503, "", "a", "5"},
		{"the last of several failures", status(500), status(503), status(502), 502, "", "c", ""},
		{"refused credentials everywhere", status(401), status(403), status(401), 502, "upstream_credentials_rejected", "", ""},
		{"a refused credential and throttles", status(401), throttled("9"), throttled("5"), 429, "rate_limit_exceeded", "", "5"},
	} {
		t.Run(c.name, func(t *testing.T) {
			inBubble(t, threeInOrder, func(t *testing.T, w *world) {
				w.backends["a"].replies(c.a)
				w.backends["b"].replies(c.b)
				w.backends["c"].replies(c.c)
				reply := w.post(`{}`)
				if c.code != "" {
					reply.wantError(t, c.status, c.code)
				} else if reply.status != c.status || reply.backend != c.backend {
					t.Fatalf("client got %d of %q, want %d of %s", reply.status, reply.backend, c.status, c.backend)
				}
				if got := reply.header.Get("Retry-After"); got != c.retry {
					t.Errorf("Retry-After is %q, want %q", got, c.retry)
				}
				w.wantCalls(map[string]int{"a": 1, "b": 1, "c": 1})
			})
		})
	}
}

func TestTheClientsOwnErrorIsPassedOnAndBenchesNobody(t *testing.T) {
	for _, code := range []int{400, 404, 409, 413, 422} {
		inBubble(t, threeBackends, func(t *testing.T, w *world) {
			w.backends["a"].replies(status(code))
			for range 2 {
				if reply := w.post(`{}`); reply.status != code || reply.backend != "a" || !strings.Contains(reply.body, "as told") {
					t.Fatalf("client got %d of %q %s, want a's %d", reply.status, reply.backend, reply.body, code)
				}
			}
			w.wantCalls(map[string]int{"a": 2, "b": 0, "c": 0})
		})
	}
}

func TestLBRetriesLimitsFurtherBackends(t *testing.T) {
	inBubble(t, `openai_lb {
		backend http://a
		backend http://b {
			priority 2
		}
		backend http://c {
			priority 3
		}
		lb_retries 1
	}`, func(t *testing.T, w *world) {
		w.backends["a"].replies(throttled("9"))
		w.backends["b"].replies(throttled("9"))
		reply := w.post(`{}`)
		reply.wantError(t, 429, "rate_limit_exceeded")
		// c was not asked, and may be asked at once
		if got := reply.header.Get("Retry-After"); got != "1" {
			t.Errorf("Retry-After is %q, want 1", got)
		}
		w.wantCalls(map[string]int{"a": 1, "b": 1, "c": 0})
		w.post(`{}`).wantServed(t, "c")
	})
}

func TestLBTryDurationLimitsFurtherBackends(t *testing.T) {
	inBubble(t, `openai_lb {
		backend http://a
		backend http://b {
			priority 2
		}
		lb_try_duration 5s
	}`, func(t *testing.T, w *world) {
		w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) {
			time.Sleep(6 * time.Second)
			status(500)(rw, r)
		})
		if reply := w.post(`{}`); reply.status != 500 || reply.backend != "a" {
			t.Errorf("client got %d of %q, want a's 500", reply.status, reply.backend)
		}
		w.wantCalls(map[string]int{"a": 1, "b": 0})
	})
}

func TestAllThrottledForwardPassesTheSoonestBackendsReplyOn(t *testing.T) {
	inBubble(t, `openai_lb {
		backend http://a
		backend http://b
		all_throttled forward
	}`, func(t *testing.T, w *world) {
		w.backends["a"].replies(throttled("44"))
		w.backends["b"].replies(throttled("4"))
		for range 2 {
			reply := w.post(`{}`)
			if reply.status != 429 || !strings.Contains(reply.body, "as told") {
				t.Fatalf("client got %d %s, want a backend's own 429", reply.status, reply.body)
			}
		}
		w.wantCalls(map[string]int{"a": 1, "b": 2})
		w.backends["b"].recovers()
		w.post(`{}`).wantServed(t, "b")
		w.wantCalls(map[string]int{"a": 1, "b": 3})
	})
}
