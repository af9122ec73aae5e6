package silence

import (
	"context"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
)

const chat = `{"model":"gpt-4o","messages":[]}`

// warm has each backend serve so many requests that its usual wait is known:
// nearly none, so that half a second is too long.
func warm(w *lbtest.World, bodies ...string) {
	w.T.Helper()
	if bodies == nil {
		bodies = []string{chat}
	}
	var members []*pool.Member
	for _, entry := range pools.Default.Entries() {
		members = append(members, entry.Pool.Members...)
	}
	for _, m := range members {
		m.Drain(pool.Order{})
	}
	for _, m := range members {
		m.Resume(pool.Order{})
		for range 12 {
			for _, body := range bodies {
				w.Post(body).WantServed(w.T, m.Name)
			}
		}
		m.Drain(pool.Order{})
	}
	for _, m := range members {
		m.Resume(pool.Order{})
	}
	for _, b := range w.Backends {
		b.Forget()
	}
	w.Logs.TakeAll()
}

func TestNewRequestsSkipASilentBackend(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
		warm(w)
		w.Backends["a"].Replies(lbtest.Hangs)
		ctx, leave := context.WithCancel(t.Context())
		var all sync.WaitGroup
		for range 2 {
			all.Go(func() {
				w.Send(w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(chat)).WithContext(ctx))
			})
		}
		synctest.Wait()
		time.Sleep(600 * time.Millisecond)
		w.WantCalls(map[string]int{"a": 2})
		for range 5 {
			began := time.Now()
			w.Post(chat).WantServed(t, "b")
			if took := time.Since(began); took > 0 {
				t.Errorf("a new request took %s", took)
			}
		}
		w.WantCalls(map[string]int{"a": 2})
		w.WantNobodyBlamed()
		leave()
		all.Wait()
	})
}

// served is a request that was served.
type served struct {
	backend string
	took    time.Duration
}

// askTogether sends n requests at once, and returns a function that waits for
// their replies.
func askTogether(w *lbtest.World, n int, body string, headers ...string) (replies func() []served) {
	var all sync.WaitGroup
	var mu sync.Mutex
	var done []served
	for range n {
		all.Go(func() {
			began := time.Now()
			r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(body))
			for i := 0; i < len(headers); i += 2 {
				r.Header.Set(headers[i], headers[i+1])
			}
			reply := w.Send(r)
			if reply.Err != nil || reply.Status != http.StatusOK {
				w.T.Errorf("client got %d %s (%v)", reply.Status, reply.Body, reply.Err)
			}
			mu.Lock()
			defer mu.Unlock()
			done = append(done, served{reply.Backend, time.Since(began)})
		})
	}
	synctest.Wait()
	return func() []served {
		all.Wait()
		return done
	}
}

// wantAll checks that all were served by the backend within these times.
func wantAll(t *testing.T, all []served, backend string, least, most time.Duration) {
	t.Helper()
	for _, s := range all {
		if s.backend != backend || s.took < least || s.took > most {
			t.Errorf("served by %s after %s, want %s after %s to %s", s.backend, s.took, backend, least, most)
		}
	}
}

const threshold = 500 * time.Millisecond

// soon is how long the others look again after the threshold, when the one that
// leads has got its byte.
const soon = threshold + 100*time.Millisecond

// leave sends requests to a silent backend whose clients leave just before they
// could move.
func leave(w *lbtest.World, all *sync.WaitGroup) {
	for range 3 {
		all.Go(func() {
			ctx, leave := context.WithTimeout(w.T.Context(), threshold-time.Millisecond)
			defer leave()
			w.Send(w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(chat)).WithContext(ctx))
		})
	}
	synctest.Wait()
}

func TestRequestsThatWaitAtASilentBackendMoveOnce(t *testing.T) {
	const stream = `{"model":"gpt-4o","stream":true,"messages":[]}`
	for name, reply := range map[string]http.HandlerFunc{
		"nothing": lbtest.Hangs,
		"headers at once, bytes never": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			w.WriteHeader(http.StatusOK)
			http.NewResponseController(w).Flush()
			<-r.Context().Done()
		},
		"headers of a whole reply at once, bytes never": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusOK)
			http.NewResponseController(w).Flush()
			<-r.Context().Done()
		},
		"headers with a length at once, bytes never": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.Header().Set("Content-Length", "100")
			w.WriteHeader(http.StatusOK)
			http.NewResponseController(w).Flush()
			<-r.Context().Done()
		},
	} {
		for _, body := range []string{chat, stream} {
			t.Run(name, func(t *testing.T) {
				lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
					w.AllReply(nil)
					warm(w, body)
					w.Backends["a"].Replies(reply)
					replies := askTogether(w, 2, body)
					wantAll(t, replies(), "b", threshold, soon)
					synctest.Wait()
					for _, call := range w.Backends["a"].Received() {
						if call.Request.Context().Err() == nil {
							t.Error("the request is not cancelled at a")
						}
					}
					w.WantCalls(map[string]int{"a": 2, "b": 2})
					w.WantNobodyBlamed()
				})
			})
		}
	}
}

func TestASingleSilentBackendIsStillTried(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a", ""), func(t *testing.T, w *lbtest.World) {
		warm(w)
		answers := make(chan struct{})
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			<-answers
			lbtest.Says(200, `{}`)(rw, r)
		})
		replies := askTogether(w, 3, chat)
		time.Sleep(time.Minute)
		more := askTogether(w, 3, chat)
		time.Sleep(time.Second)
		w.WantCalls(map[string]int{"a": 6})
		close(answers)
		wantAll(t, replies(), "a", 61*time.Second, 61*time.Second)
		wantAll(t, more(), "a", time.Second, time.Second)
	})
}

func TestNoRequestMovesWhileAllBackendsAreSilent(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b", ""), func(t *testing.T, w *lbtest.World) {
		warm(w)
		answers := make(chan struct{})
		w.AllReply(waits(answers, lbtest.Says(200, `{}`)))
		replies := askTogether(w, 40, chat)
		time.Sleep(10 * time.Second)
		if n := w.TotalCalls(); n != 40 {
			t.Errorf("%d calls, want 40", n)
		}
		close(answers)
		for _, s := range replies() {
			if s.took != 10*time.Second {
				t.Errorf("served after %s", s.took)
			}
		}
	})
}

func TestRequestsMoveWhenTheOtherBackendAnswersAgain(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b", ""), func(t *testing.T, w *lbtest.World) {
		warm(w)
		answers := make(chan struct{})
		w.Backends["a"].Replies(lbtest.Hangs)
		w.Backends["b"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			<-answers
			lbtest.Says(200, `{}`)(rw, r)
		})
		replies := askTogether(w, 40, chat)
		time.Sleep(10 * time.Second)
		atA := len(w.Backends["a"].Received())
		close(answers)
		wantAll(t, replies(), "b", 10*time.Second, 12*time.Second)
		w.WantCalls(map[string]int{"a": atA, "b": 40})
	})
}

func TestABackendThatAnswersIsSilentNoMore(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
		warm(w)
		w.Backends["a"].Replies(lbtest.Hangs)
		wantAll(t, askTogether(w, 2, chat)(), "b", threshold, soon)
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) { // it recovers while the trial waits
			time.Sleep(400 * time.Millisecond)
			lbtest.Says(200, `{}`)(rw, r)
		})
		time.Sleep(time.Second)
		trial := askTogether(w, 1, chat)
		wantAll(t, askTogether(w, 3, chat)(), "b", 0, 0)
		wantAll(t, trial(), "a", 400*time.Millisecond, 400*time.Millisecond)
		wantAll(t, askTogether(w, 3, chat)(), "a", 400*time.Millisecond, 400*time.Millisecond)
		w.WantNobodyBlamed()
	})
}

func TestARequestThatMustNotBeRepeatedNeverMoves(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
		warm(w)
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/v1/batches" {
				<-r.Context().Done()
				return
			}
			time.Sleep(30 * time.Second)
			lbtest.Says(200, `{}`)(rw, r)
		})
		var all sync.WaitGroup
		for range 3 {
			all.Go(func() {
				w.Send(w.Request(http.MethodPost, "/v1/batches", strings.NewReader(`{}`))).WantServed(t, "a")
			})
		}
		synctest.Wait()
		wantAll(t, askTogether(w, 3, chat)(), "b", threshold, soon)
		all.Wait()
		w.WantCalls(map[string]int{"a": 6, "b": 3})
	})
}

func TestAResponseThatGoesOnOrActsNeverMoves(t *testing.T) {
	for _, body := range []string{
		`{"model":"gpt-4o","background":true}`,
		`{"model":"gpt-4o","stream":true,"background":true}`,
		`{"model":"gpt-4o","tools":[{"type":"mcp","server_url":"http://x"}]}`,
	} {
		lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
			warm(w)
			w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/v1/responses" {
					time.Sleep(10 * time.Second)
					if strings.Contains(body, "stream") {
						lbtest.Streams(lbtest.StreamContent, "event: response.completed\ndata: {}\n\n")(rw, r)
						return
					}
					lbtest.Says(200, `{}`)(rw, r)
					return
				}
				<-r.Context().Done()
			})
			var all sync.WaitGroup
			for range 3 {
				all.Go(func() {
					w.Send(w.Request(http.MethodPost, "/v1/responses", strings.NewReader(body))).WantServed(t, "a")
				})
			}
			synctest.Wait()
			for _, s := range askTogether(w, 3, chat)() {
				if s.backend != "b" {
					t.Errorf("a chat was served by %s", s.backend)
				}
			}
			all.Wait()
			w.WantCalls(map[string]int{"a": 6, "b": 3})
		})
	}
}

func TestManyRequestsMoveWithoutAHerd(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nlb_policy first\nbackend http://a\nbackend http://b {\nmax_requests 50\n}\nbackend http://c {\nweight 2\n}\n}", func(t *testing.T, w *lbtest.World) {
		warm(w)
		w.Backends["a"].Replies(lbtest.Hangs)
		var mu sync.Mutex
		busy, most := 0, 0
		w.Backends["b"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			mu.Lock()
			busy++
			most = max(most, busy)
			mu.Unlock()
			time.Sleep(300 * time.Millisecond)
			mu.Lock()
			busy--
			mu.Unlock()
			lbtest.Says(200, `{}`)(rw, r)
		})
		for _, s := range askTogether(w, 200, chat)() {
			if s.took < threshold || s.took > 2*time.Second {
				t.Errorf("served by %s after %s", s.backend, s.took)
			}
		}
		if b, c := len(w.Backends["b"].Received()), len(w.Backends["c"].Received()); b+c != 200 || b < 40 || most > 50 {
			t.Errorf("b got %d, at most %d at once, and c %d", b, most, c)
		}
		w.WantCalls(map[string]int{"a": 200})
		wantNoneInFlight(t)
	})
}

func TestOneRequestFindsOutWhetherAnIdleBackendAnswers(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
		warm(w)
		time.Sleep(time.Minute)
		w.AllReply(lbtest.Hangs)
		var all sync.WaitGroup
		ctx, leave := context.WithCancel(t.Context())
		for range 50 {
			all.Go(func() {
				w.Send(w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(chat)).WithContext(ctx))
			})
		}
		time.Sleep(5 * time.Second)
		w.WantCalls(map[string]int{"a": 50, "b": 1})
		w.Backends["b"].Recovers()
		leave()
		all.Wait()
	})
}

func TestARequestThatMovesToABackendThatThrottlesGoesOn(t *testing.T) {
	t.Run("to another one", func(t *testing.T) {
		lbtest.InBubble(t, lbtest.PoolOf("a b c", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
			warm(w)
			w.Backends["a"].Replies(lbtest.Hangs)
			w.Backends["b"].Replies(lbtest.Throttled("60"))
			wantAll(t, askTogether(w, 20, chat)(), "c", threshold, 2*threshold)
			if n := len(w.Backends["b"].Received()); n == 0 || n > 15 {
				t.Errorf("b got %d requests", n)
			}
		})
	})
	t.Run("to the client, if no other is left", func(t *testing.T) {
		lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
			warm(w)
			w.Backends["a"].Replies(lbtest.Hangs)
			w.Backends["b"].Replies(lbtest.Throttled("60"))
			var all sync.WaitGroup
			leave(w, &all)
			reply := w.Post(chat)
			if retryAfter := reply.Header.Get("Retry-After"); reply.Status != 429 || retryAfter != "59" {
				t.Errorf("client got %d with Retry-After %q: %s", reply.Status, retryAfter, reply.Body)
			}
			all.Wait()
			wantNoneInFlight(t)
		})
	})
}

// waits is a backend that replies once it may.
func waits(may <-chan struct{}, reply http.HandlerFunc) http.HandlerFunc {
	return func(rw http.ResponseWriter, r *http.Request) {
		select {
		case <-may:
			reply(rw, r)
		case <-r.Context().Done():
		}
	}
}

func TestARequestThatReturnsToASilentBackendWhichFailsGetsAnAnswer(t *testing.T) {
	for _, c := range []struct {
		name   string
		a, b   http.HandlerFunc
		status int
		body   string
		calls  int // of b
	}{
		// the connection to b was used before, so b is tried on a new one
		{"an error", lbtest.Says(500, `{"error":{"message":"of a"}}`), lbtest.Aborts, 500, "of a", 2},
		{"an error after another", lbtest.Says(502, `{"error":{"message":"of a"}}`), lbtest.Says(500, `{"error":{"message":"of b"}}`), 502, "of a", 1},
		{"a break after an error", lbtest.Aborts, lbtest.Says(500, `{"error":{"message":"of b"}}`), 500, "of b", 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
				warm(w)
				answers := make(chan struct{})
				w.Backends["a"].Replies(waits(answers, c.a))
				w.Backends["b"].Replies(c.b)
				var all sync.WaitGroup
				leave(w, &all)
				all.Go(func() {
					if got := w.Post(chat); got.Status != c.status || !strings.Contains(got.Body, c.body) {
						t.Errorf("client got %d %s (%v), want %d with %s", got.Status, got.Body, got.Err, c.status, c.body)
					}
				})
				time.Sleep(10 * time.Second)
				close(answers)
				all.Wait()
				w.WantCalls(map[string]int{"a": 5, "b": c.calls})
				wantNoneInFlight(t)
			})
		})
	}
}

func TestAClientThatLeavesAsItsRequestMovesKeepsNoPlace(t *testing.T) {
	for early := range 3 {
		lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
			warm(w)
			w.Backends["a"].Replies(lbtest.Hangs)
			var all sync.WaitGroup
			for range 20 {
				all.Go(func() {
					ctx, leave := context.WithTimeout(t.Context(), threshold-time.Duration(early-1))
					defer leave()
					w.Send(w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(chat)).WithContext(ctx))
				})
			}
			all.Wait()
			time.Sleep(time.Second)
			wantNoneInFlight(t)
		})
	}
}

// wantNoneInFlight checks that no backend has a place taken.
func wantNoneInFlight(t *testing.T) {
	t.Helper()
	synctest.Wait()
	for _, entry := range pools.Default.Entries() {
		for _, m := range entry.Pool.Members {
			if n := m.InFlight(); n != 0 {
				t.Errorf("%d requests in flight at %s", n, m.Name)
			}
		}
	}
}

func TestARequestMovesNoFurtherThanItMayGo(t *testing.T) {
	for _, options := range []string{"silence off", "lb_retries 0", "lb_try_duration 100ms"} {
		lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first\n"+options), func(t *testing.T, w *lbtest.World) {
			warm(w)
			w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
				time.Sleep(10 * time.Second)
				lbtest.Says(200, `{}`)(rw, r)
			})
			wantAll(t, askTogether(w, 2, chat)(), "a", 10*time.Second, 10*time.Second)
		})
	}
}

func TestAMovedRequestIsOneRequestThatSucceeded(t *testing.T) {
	name := lbtest.Unique("silence")
	options := "pool " + name + "\nlb_policy first\nclient_key alice client-key-of-alice"
	for _, stream := range []bool{false, true} {
		lbtest.InBubble(t, lbtest.PoolOf("a b", options), func(t *testing.T, w *lbtest.World) {
			w.Shows = map[string]string{"X-Classes": "{http.openai_lb.classes} {http.openai_lb.class} {http.openai_lb.attempts}"}
			body, reply := chat, lbtest.Says(200, `{"usage":{"prompt_tokens":12,"completion_tokens":3}}`)
			if stream {
				body = `{"model":"gpt-4o","stream":true,"messages":[]}`
				reply = lbtest.Streams(lbtest.StreamPreamble, lbtest.StreamContent, `data: {"choices":[],"usage":{"prompt_tokens":12,"completion_tokens":3}}`+"\n\n", lbtest.StreamEnd)
			}
			ask := func() lbtest.Reply {
				r := w.RequestWithKey("client-key-of-alice")
				r.Body, r.ContentLength = io.NopCloser(strings.NewReader(body)), int64(len(body))
				return w.Send(r)
			}
			w.AllReply(reply)
			for range 12 {
				ask().WantServed(t, "a")
			}
			w.Backends["a"].Replies(lbtest.Hangs)
			tokens := func(kind string) float64 {
				return lbtest.SumOf(t, "caller_tokens_total", map[string]string{"caller": "alice", "type": kind})
			}
			input, output := tokens("input"), tokens("output")
			requests := lbtest.SumOf(t, "requests_total", map[string]string{"pool": name})
			var all sync.WaitGroup
			for range 2 {
				all.Go(func() {
					reply := ask()
					reply.WantServed(t, "b")
					if got := reply.Header.Get("X-Classes"); got != "a=silent,b=served served 2" {
						t.Errorf("the classes are %q", got)
					}
				})
			}
			all.Wait()
			synctest.Wait()
			if in, out := tokens("input")-input, tokens("output")-output; in != 24 || out != 6 {
				t.Errorf("alice pays for %g and %g tokens, want 24 and 6", in, out)
			}
			if n := lbtest.SumOf(t, "requests_total", map[string]string{"pool": name}) - requests; n != 2 {
				t.Errorf("%g requests are counted", n)
			}
			w.WantCalls(map[string]int{"a": 14, "b": 2})
		})
	}
}

func TestAMoveIsOneOfTheRetries(t *testing.T) {
	for options, want := range map[string]struct {
		status int
		calls  map[string]int
	}{
		"":                       {200, map[string]int{"a": 4, "b": 1, "c": 1}},
		"lb_retries 2":           {200, map[string]int{"a": 4, "b": 1, "c": 1}},
		"lb_retries 1":           {500, map[string]int{"a": 4, "b": 1}},
		"lb_try_duration 600ms":  {500, map[string]int{"a": 4, "b": 1}},
		"lb_try_duration 1500ms": {200, map[string]int{"a": 4, "b": 1, "c": 1}},
	} {
		t.Run(options, func(t *testing.T) {
			config := "openai_lb {\nlb_policy first\nbackend http://a\nbackend http://b {\npriority 2\n}\nbackend http://c {\npriority 3\n}\n" + options + "\n}"
			lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
				warm(w)
				w.Backends["a"].Replies(lbtest.Hangs)
				w.Backends["b"].Replies(func(rw http.ResponseWriter, r *http.Request) {
					time.Sleep(200 * time.Millisecond)
					lbtest.Says(500, `{"error":{"message":"of b"}}`)(rw, r)
				})
				var all sync.WaitGroup
				leave(w, &all)
				w.Post(chat).WantStatus(t, want.status)
				all.Wait()
				w.WantCalls(want.calls)
				wantNoneInFlight(t)
			})
		})
	}
}

func TestASilenceIsNoReasonNotToBeReady(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
		warm(w)
		w.AllReply(lbtest.Hangs)
		ctx, leave := context.WithCancel(t.Context())
		var all sync.WaitGroup
		for range 20 {
			all.Go(func() {
				w.Send(w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(chat)).WithContext(ctx))
			})
		}
		for range 60 {
			time.Sleep(time.Second)
			w.WantReady()
		}
		if n := len(w.Logged("backend silent")); n == 0 {
			t.Error("no backend was silent")
		}
		leave()
		all.Wait()
		w.WantReady()
	})
}

func TestRequestsMoveToABackendForWhichOthersHaveWaited(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nwait 2s\nbackend http://a\nbackend http://b {\npriority 2\n}\n}", func(t *testing.T, w *lbtest.World) {
		warm(w)
		w.Backends["a"].Replies(lbtest.Status(429, "Retry-After-Ms", "400"))
		w.Backends["b"].Replies(lbtest.Status(500))
		var waits sync.WaitGroup
		waits.Go(func() { w.Post(chat).WantServed(t, "a") })
		time.Sleep(time.Millisecond)
		w.Backends["a"].Recovers()
		w.Backends["b"].Replies(lbtest.Hangs)
		for _, s := range askTogether(w, 2, chat)() {
			if s.backend != "a" || s.took > time.Second {
				t.Errorf("served by %s after %s", s.backend, s.took)
			}
		}
		waits.Wait()
		wantNoneInFlight(t)
	})
}

// sleeps is a backend that replies after the time that the request says.
func sleeps(rw http.ResponseWriter, r *http.Request) {
	wait, _ := time.ParseDuration(r.Header.Get("X-Wait"))
	select {
	case <-time.After(wait):
		lbtest.Says(200, `{}`)(rw, r)
	case <-r.Context().Done():
	}
}

func TestHealthySlowRequestsDoNotMoveAsAHerd(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b", ""), func(t *testing.T, w *lbtest.World) {
		warm(w)
		w.AllReply(sleeps)
		slow := askTogether(w, 100, chat, "X-Wait", "4s")
		var quick sync.WaitGroup
		for range 20 {
			quick.Go(func() { askTogether(w, 1, chat, "X-Wait", "100ms")() })
			time.Sleep(250 * time.Millisecond)
		}
		quick.Wait()
		for _, s := range slow() {
			if s.took > 8*time.Second {
				t.Errorf("a slow request took %s", s.took)
			}
		}
		if again := w.TotalCalls() - 120; again > 6 {
			t.Errorf("%d requests were sent again", again)
		}
	})
}

func TestOneOutlierDoesNotDelayTheNextMoves(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
		warm(w)
		w.AllReply(sleeps)
		wantAll(t, askTogether(w, 1, chat, "X-Wait", "9s")(), "a", 9*time.Second, 9*time.Second)
		w.Backends["a"].Replies(lbtest.Hangs)
		w.Post(chat).WantServed(t, "b")
		for _, s := range askTogether(w, 3, chat)() {
			if s.took > 2*threshold {
				t.Errorf("a request moved after %s", s.took)
			}
		}
	})
}

func TestARequestThatWasThrottledIsNotStuckAtASilentBackend(t *testing.T) {
	for retryAfterMs, want := range map[string]struct {
		status     int
		retryAfter string
	}{
		"200":   {200, ""}, // the cooldown is over when the request would move
		"30000": {429, "30"},
	} {
		lbtest.InBubble(t, "openai_lb {\nbackend http://b\nbackend http://a {\npriority 2\n}\n}", func(t *testing.T, w *lbtest.World) {
			warm(w)
			w.Backends["a"].Replies(lbtest.Hangs)
			w.Backends["b"].Replies(lbtest.Status(429, "Retry-After-Ms", retryAfterMs))
			var all sync.WaitGroup
			all.Go(func() {
				began := time.Now()
				reply := w.Post(chat)
				if took := time.Since(began); reply.Status != want.status || reply.Header.Get("Retry-After") != want.retryAfter || took > soon {
					t.Errorf("throttled for %s ms: client got %d with Retry-After %q after %s", retryAfterMs, reply.Status, reply.Header.Get("Retry-After"), took)
				}
			})
			synctest.Wait()
			w.Backends["b"].Recovers()
			leave(w, &all)
			all.Wait()
			w.WantCalls(map[string]int{"a": 4})
			wantNoneInFlight(t)
		})
	}
}

// TestARequestWithItsCallersOwnKeyDoesNotMoveToABackendOfOurs waits where the
// caller pays.
func TestARequestWithItsCallersOwnKeyDoesNotMoveToABackendOfOurs(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a {\nauth passthrough\n}\nbackend http://b {\npriority 2\n}\n}", func(t *testing.T, w *lbtest.World) {
		key := []string{"Authorization", "Bearer the-callers-own-key"}
		for range 12 { // both are usually fast
			askTogether(w, 1, chat, key...)()
			w.Post(chat).WantServed(t, "b") // a takes no request without a key
		}
		w.Backends["a"].Forget()
		w.Backends["b"].Forget()
		w.Backends["a"].Replies(lbtest.Hangs)
		ctx, leave := context.WithTimeout(t.Context(), time.Minute)
		defer leave()
		var all sync.WaitGroup
		for range 3 {
			all.Go(func() {
				r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(chat)).WithContext(ctx)
				r.Header.Set(key[0], key[1])
				w.Send(r)
			})
		}
		all.Wait()
		w.WantCalls(map[string]int{"a": 3, "b": 0})
	})
}
