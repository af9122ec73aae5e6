package silence

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

const stream = `{"model":"gpt-4o","stream":true,"messages":[]}`

// strand makes a throttle for 40 s and all other backends known as silent.
func strand(w *lbtest.World, all *sync.WaitGroup) {
	w.T.Helper()
	warm(w, chat, stream)
	for name, b := range w.Backends {
		if name != "a" {
			b.Replies(lbtest.Hangs)
		}
	}
	for range len(w.Backends) - 1 {
		w.Backends["a"].Replies(lbtest.Hangs) // so that the others get requests, too
		leave(w, all)
		time.Sleep(threshold)
		leave(w, all)
		time.Sleep(threshold)
	}
	w.Backends["a"].Recovers()
	time.Sleep(2 * time.Second)
	for range 3 { // a answers again
		w.Post(chat)
	}
	w.Backends["a"].Replies(lbtest.Throttled("40"))
	w.Post(chat)
	w.Backends["a"].Forget()
}

// ask sends a request, and checks what it gets and when.
func ask(w *lbtest.World, path, body string, check func(reply lbtest.Reply, took time.Duration)) {
	began := time.Now()
	reply := w.Send(w.Request(http.MethodPost, path, strings.NewReader(body)))
	check(reply, time.Since(began))
}

// TestARequestThatAllOthersThrottleGetsItsAnswerInTime also has requests with
// patience, which are some of many: they would find out that a silent backend
// is only slow.
func TestARequestThatAllOthersThrottleGetsItsAnswerInTime(t *testing.T) {
	for _, names := range []string{"a b", "a b c", "a b c d"} {
		for _, body := range []string{chat, stream} {
			t.Run(names, func(t *testing.T) {
				lbtest.InBubble(t, lbtest.PoolOf(names, ""), func(t *testing.T, w *lbtest.World) {
					var all sync.WaitGroup
					strand(w, &all)
					for range 35 {
						for range 6 {
							all.Go(func() {
								ask(w, "/v1/chat/completions", body, func(reply lbtest.Reply, took time.Duration) {
									if reply.Status != 429 || took > soon {
										t.Errorf("client got %d with Retry-After %q after %s: %s", reply.Status, reply.Header.Get("Retry-After"), took, reply.Body)
									}
								})
							})
						}
						time.Sleep(time.Second)
					}
					reply := w.Post(chat)
					if wait := reply.Header.Get("Retry-After"); reply.Status != 429 || wait == "" || len(wait) > 1 {
						t.Errorf("at last, a client got %d with Retry-After %q", reply.Status, wait)
					}
					all.Wait()
					w.WantCalls(map[string]int{"a": 0})
					wantNoneInFlight(t)
				})
			})
		}
	}
}

func TestARequestThatWaitsAtASilentBackendIsAnsweredOnceTheOthersThrottle(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b c", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
		warm(w)
		throttles := make(chan struct{})
		w.Backends["a"].Replies(lbtest.Hangs)
		w.Backends["b"].Replies(lbtest.Hangs)
		w.Backends["c"].Replies(waits(throttles, lbtest.Throttled("30")))
		var all sync.WaitGroup
		answered := 0
		var mu sync.Mutex
		for range 20 {
			all.Go(func() {
				reply := w.Post(chat)
				if got := reply.Header.Get("Retry-After"); reply.Status != 429 || got != "30" && got != "29" && got != "28" {
					t.Errorf("client got %d with Retry-After %q", reply.Status, got)
				}
				mu.Lock()
				defer mu.Unlock()
				answered++
			})
		}
		time.Sleep(20 * time.Second)
		close(throttles)
		// b is known to be silent after the threshold of a second request, and
		// those that have waited for long look each second
		time.Sleep(threshold + 1100*time.Millisecond)
		mu.Lock()
		if answered != 20 {
			t.Errorf("%d of 20 requests are answered", answered)
		}
		mu.Unlock()
		all.Wait()
		wantNoneInFlight(t)
	})
}

func TestARequestWaitsAtASilentBackendIfNoOtherReturnsByItself(t *testing.T) {
	for name, reply := range map[string]http.HandlerFunc{
		"no budget": lbtest.Says(429, `{"error":{"code":"insufficient_quota"}}`),
		"failures":  lbtest.Status(500),
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, "openai_lb {\nbackend http://a\nbackend http://b {\npriority 2\n}\n}", func(t *testing.T, w *lbtest.World) {
				warm(w)
				answers := make(chan struct{})
				w.Backends["a"].Replies(reply)
				w.Backends["b"].Replies(waits(answers, lbtest.Says(200, `{}`)))
				replies := askTogether(w, 6, chat)
				time.Sleep(5 * time.Second)
				close(answers)
				for _, s := range replies() {
					if s.backend != "b" || s.took != 5*time.Second {
						t.Errorf("served by %s after %s", s.backend, s.took)
					}
				}
			})
		})
	}
}

func TestARequestThatMustNotBeRepeatedStaysAtASilentBackendWhileOthersThrottle(t *testing.T) {
	for body, reply := range map[string]http.HandlerFunc{
		`{"model":"gpt-4o","background":true}`:                                              lbtest.Says(200, `{}`),
		`{"model":"gpt-4o","stream":true,"tools":[{"type":"mcp","server_url":"http://x"}]}`: lbtest.Streams(lbtest.StreamContent, lbtest.StreamEnd),
	} {
		lbtest.InBubble(t, lbtest.PoolOf("a b", ""), func(t *testing.T, w *lbtest.World) {
			var all sync.WaitGroup
			strand(w, &all)
			w.Backends["b"].Forget()
			w.Backends["b"].Replies(func(rw http.ResponseWriter, r *http.Request) {
				time.Sleep(5 * time.Second)
				reply(rw, r)
			})
			for range 3 {
				all.Go(func() {
					ask(w, "/v1/responses", body, func(reply lbtest.Reply, took time.Duration) {
						if reply.WantServed(t, "b"); took != 5*time.Second {
							t.Errorf("%s was served after %s", body, took)
						}
					})
				})
			}
			all.Wait()
			w.WantCalls(map[string]int{"a": 0, "b": 3})
		})
	}
}

func TestARequestThatMayWaitWaitsForTheBackendThatThrottlesAndNotForASilentOne(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b c", "wait 5s"), func(t *testing.T, w *lbtest.World) {
		var all sync.WaitGroup
		strand(w, &all)
		time.Sleep(37 * time.Second)
		w.Backends["a"].Recovers()
		ask(w, "/v1/chat/completions", chat, func(reply lbtest.Reply, took time.Duration) {
			if reply.WantServed(t, "a"); took > 3*time.Second {
				t.Errorf("served after %s", took)
			}
		})
		all.Wait()
	})
}

// TestASilentBackendThatAnswersAgainServesWhileOthersThrottle has requests try
// it all the time.
func TestASilentBackendThatAnswersAgainServesWhileOthersThrottle(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b", ""), func(t *testing.T, w *lbtest.World) {
		var all sync.WaitGroup
		strand(w, &all)
		ctx, leave := context.WithCancel(t.Context())
		for range 3 {
			all.Go(func() {
				w.Send(w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(chat)).WithContext(ctx))
			})
		}
		time.Sleep(100 * time.Millisecond)
		w.Backends["b"].Recovers()
		for range 5 {
			w.Post(chat).WantServed(t, "b")
		}
		leave()
		all.Wait()
		synctest.Wait()
		wantNoneInFlight(t)
	})
}
