package waiting

import (
	"context"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestARequestWaitsUntilTheBackendAcceptsItAgain(t *testing.T) {
	inBubble(t, "wait 1s", func(t *testing.T, w *world) {
		w.throttle("a", 300*time.Millisecond)
		begin := time.Now()
		w.Send(w.request(0, "")).WantServed(t, "a")
		if took := time.Since(begin); took != 300*time.Millisecond {
			t.Errorf("it took %s, want 300ms", took)
		}
		w.WantCalls(map[string]int{"a": 2})
		if got := lbtest.Scrape(t).Sum("failovers_total", map[string]string{"pool": w.Handler.Pool}); got != 0 {
			t.Errorf("%v failovers are counted, want none", got)
		}
	})
}

func TestWithoutTheOptionNoRequestWaits(t *testing.T) {
	inBubble(t, "", func(t *testing.T, w *world) {
		w.throttle("a", 60*time.Millisecond)
		begin := time.Now()
		w.Send(w.request(0, "")).WantError(t, 429, "rate_limit_exceeded")
		if took := time.Since(begin); took != 0 {
			t.Errorf("it took %s", took)
		}
	})
}

func TestWaitingRequestsGoInTheOrderInWhichTheyCame(t *testing.T) {
	inBubble(t, "wait 2s", func(t *testing.T, w *world) {
		w.knows(t, "", 10)
		w.coolDown(t, "a", time.Second)
		w.wantServed(t, make([]string, 9)...)
		w.wg.Wait()
		if got := w.numbers("a"); !slices.Equal(got, []int{-1, 0, 1, 2, 3, 4, 5, 6, 7, 8}) {
			t.Errorf("they went in the order %v", got)
		}
	})
}

const tiers = `
	client_key web sk-web-0123456789ab
	client_key batch sk-batch-0123456789
	caller web {
		tier interactive
	}
	caller batch {
		tier batch
	}
	tier interactive {
		reserve 10%
	}
	tier batch
`

func TestABetterTierGoesFirst(t *testing.T) {
	inBubble(t, "wait 2s\n"+tiers, func(t *testing.T, w *world) {
		const web, batch = "sk-web-0123456789ab", "sk-batch-0123456789"
		w.knows(t, web, 9)
		w.throttle("a", time.Second)
		w.wantServed(t, batch, batch, web, batch, web)
		w.wg.Wait()
		if got := w.numbers("a"); !slices.Equal(got, []int{0, 2, 4, 0, 1, 3}) { // the first one found out
			t.Errorf("they went in the order %v, want 2, 4, 0, 1, 3", got)
		}
	})
}

func TestARequestWithoutAPlaceIsRefusedAtOnce(t *testing.T) {
	inBubble(t, "wait 2s", func(t *testing.T, w *world) {
		w.knows(t, "", 3)
		w.throttle("a", time.Second)
		w.wantServed(t, "", "", "")
		begin := time.Now()
		got := w.Send(w.request(3, ""))
		got.WantError(t, 429, "rate_limit_exceeded")
		if took := time.Since(begin); took != 0 || got.Header.Get("Retry-After") != "1" {
			t.Errorf("it took %s, Retry-After is %q", took, got.Header.Get("Retry-After"))
		}
		w.wg.Wait()
	})
}

func TestPlacesAreCountedForEachModel(t *testing.T) {
	inBubble(t, "wait 2s", func(t *testing.T, w *world) {
		w.throttle("a", time.Second)
		for _, model := range []string{"gpt-4o", "gpt-4o-mini"} {
			w.wg.Go(func() { w.Post(`{"model":"`+model+`"}`).WantServed(t, "a") })
		}
		w.wg.Wait()
	})
}

// OmniRoute PR495: its queue waited hours for a long reset.
func TestNoRequestWaitsForALongReset(t *testing.T) {
	inBubble(t, "wait 1s", func(t *testing.T, w *world) {
		w.throttle("a", time.Hour)
		begin := time.Now()
		w.Send(w.request(0, "")).WantError(t, 429, "rate_limit_exceeded")
		w.Send(w.request(1, "")).WantError(t, 429, "rate_limit_exceeded")
		if took := time.Since(begin); took != 0 {
			t.Errorf("they took %s", took)
		}
	})
}

// slow has the backend refuse after a delay the request with number 0, for so
// long, and serve the others.
func (w *world) slow(backend string, delay, refused time.Duration) {
	w.Backends[backend].Replies(func(rw http.ResponseWriter, r *http.Request) {
		switch r.Header.Get("X-Number") {
		case "0":
			time.Sleep(delay)
			lbtest.Status(429, "Retry-After-Ms", strconv.FormatInt(refused.Milliseconds(), 10))(rw, r)
		case "1":
			lbtest.Status(429, "Retry-After-Ms", "500")(rw, r)
		default:
			lbtest.Says(200, `{}`)(rw, r)
		}
	})
}

func TestACooldownThatGrowsWhileRequestsWaitKeepsThemWaiting(t *testing.T) {
	inBubble(t, "wait 2s", func(t *testing.T, w *world) {
		w.knows(t, "", 10)
		w.slow("a", 300*time.Millisecond, 900*time.Millisecond)
		w.ask(0, "", func(lbtest.Reply, time.Duration) {})
		time.Sleep(time.Millisecond)
		w.ask(1, "", func(lbtest.Reply, time.Duration) {})
		time.Sleep(time.Millisecond)
		w.ask(2, "", func(got lbtest.Reply, took time.Duration) {
			if got.Status != 200 {
				t.Errorf("got %d after %s: %s", got.Status, took, got.Body)
			}
		})
		time.Sleep(1190 * time.Millisecond)
		w.WantCalls(map[string]int{"a": 2})
		time.Sleep(9 * time.Millisecond)
		w.WantCalls(map[string]int{"a": 3}) // 300 ms and 900 ms after the first one was sent
		w.Backends["a"].Recovers()
		w.wg.Wait()
	})
}

func TestRequestsLeaveAtOnceWhenTheCooldownGrowsTooLong(t *testing.T) {
	inBubble(t, "wait 1s", func(t *testing.T, w *world) {
		w.knows(t, "", 10)
		w.slow("a", 300*time.Millisecond, time.Minute)
		w.ask(0, "", func(lbtest.Reply, time.Duration) {})
		time.Sleep(time.Millisecond)
		for number := 1; number < 5; number++ {
			w.ask(number, "", func(got lbtest.Reply, took time.Duration) {
				if got.Status != 429 || took > 300*time.Millisecond || took < 290*time.Millisecond || got.Header.Get("Retry-After") != "59" {
					t.Errorf("request %d got %d after %s, Retry-After %s", number, got.Status, took, got.Header.Get("Retry-After"))
				}
			})
			time.Sleep(time.Millisecond)
		}
		w.wg.Wait()
	})
}

func TestARequestThatIsRefusedAgainKeepsItsPlace(t *testing.T) {
	inBubble(t, "wait 2s", func(t *testing.T, w *world) {
		w.knows(t, "", 10)
		w.coolDown(t, "a", 200*time.Millisecond)
		var refused atomic.Bool
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			if r.Header.Get("X-Number") == "0" && refused.CompareAndSwap(false, true) {
				lbtest.Status(429, "Retry-After-Ms", "300")(rw, r)
				return
			}
			lbtest.Says(200, `{}`)(rw, r)
		})
		w.wantServed(t, "", "", "")
		w.wg.Wait()
		if got := w.numbers("a"); !slices.Equal(got[1:], []int{0, 0, 1, 2}) && !slices.Equal(got, []int{0, 0, -1, 1, 2}) {
			t.Errorf("they went in the order %v", got)
		}
	})
}

func TestARequestLeavesWhenItsTimeIsOver(t *testing.T) {
	for name, test := range map[string]struct {
		options, header string
		want            time.Duration
	}{
		"wait":                 {"wait 400ms", "", 400 * time.Millisecond},
		"lb_try_duration":      {"wait 1s\nlb_try_duration 450ms", "", 450 * time.Millisecond},
		"the client's timeout": {"wait 2s", "0.5", 500 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, test.options, func(t *testing.T, w *world) {
				w.Backends["a"].Replies(lbtest.Status(429, "Retry-After-Ms", "300"))
				r := w.request(0, "")
				if test.header != "" {
					r.Header.Set("X-Stainless-Read-Timeout", test.header)
				}
				begin := time.Now()
				got := w.Send(r)
				got.WantError(t, 429, "rate_limit_exceeded")
				// it is refused again after 300 ms, and a third try would come
				// too late
				if took := time.Since(begin); took != 300*time.Millisecond {
					t.Errorf("it took %s", took)
				}
				w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
					if r.Header.Get("X-Number") == "1" {
						lbtest.Status(429, "Retry-After-Ms", "300")(rw, r)
						return
					}
					<-r.Context().Done()
				})
				// the one before it goes, and is not answered
				time.Sleep(time.Second)
			})
		})
	}
}

func TestARequestThatWaitsBehindOthersLeavesWhenItsTimeIsOver(t *testing.T) {
	inBubble(t, "wait 400ms", func(t *testing.T, w *world) {
		w.knows(t, "", 10)
		// each request is refused for 50 ms, again and again
		w.Backends["a"].Replies(lbtest.Status(429, "Retry-After-Ms", "50"))
		for number := range 2 {
			w.ask(number, "", func(got lbtest.Reply, took time.Duration) {
				if got.Status != 429 || took > 400*time.Millisecond || took < 350*time.Millisecond {
					t.Errorf("request %d got %d after %s", number, got.Status, took)
				}
			})
		}
		w.wg.Wait()
	})
}

func TestAClientThatLeavesWhileItsRequestWaitsMakesRoom(t *testing.T) {
	lbtest.OverBothVersions(t, "openai_lb {\nbackend http://a\nwait 2s\n}", func(t *testing.T, lw *lbtest.World) {
		w := &world{World: lw, took: make(map[int]time.Duration)}
		w.throttle("a", time.Second)
		ctx, leave := context.WithCancel(t.Context())
		w.wg.Go(func() { w.Send(w.request(0, "").WithContext(ctx)) })
		time.Sleep(time.Millisecond)
		w.Send(w.request(1, "")).WantError(t, 429, "rate_limit_exceeded")
		leave()
		time.Sleep(time.Millisecond)
		w.Send(w.request(2, "")).WantServed(t, "a")
		w.wg.Wait()
		if got := w.numbers("a"); !slices.Equal(got, []int{0, 2}) {
			t.Errorf("a got %v, want 0 and 2", got)
		}
	})
}

// LiteLLM PR20817: entries of requests that had timed out stayed in its queue.
func TestAThousandCancelledWaitsLeaveNothing(t *testing.T) {
	inBubble(t, "wait 10s", func(t *testing.T, w *world) {
		w.knows(t, "", 1000)
		w.throttle("a", 5*time.Second)
		ctx, leave := context.WithCancel(t.Context())
		for number := range 1000 {
			w.wg.Go(func() { w.Send(w.request(number, "").WithContext(ctx)) })
		}
		synctest.Wait()
		waits := func() float64 {
			return lbtest.Scrape(t).Sum("waiting", map[string]string{"pool": w.Handler.Pool})
		}
		if got := waits(); got != 1000 {
			t.Errorf("%v requests wait, want 1000", got)
		}
		leave()
		synctest.Wait()
		if got := waits(); got != 0 {
			t.Errorf("%v requests wait, want none", got)
		}
		w.wg.Wait()
		time.Sleep(6 * time.Second)
		w.Send(w.request(1000, "")).WantServed(t, "a")
	}) // the bubble fails if a goroutine is left
}

// LiteLLM PR21319: its queue let all requests go at once.
func TestWaitingRequestsGoOneByOne(t *testing.T) {
	inBubble(t, "wait 5s", func(t *testing.T, w *world) {
		w.knows(t, "", 10)
		// a accepts a request when none has come for 100 ms
		w.coolDown(t, "a", 400*time.Millisecond)
		var last time.Time
		var at []time.Time
		refused := 0
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			now := time.Now()
			w.mu.Lock()
			left := 100*time.Millisecond - now.Sub(last)
			if left > 0 {
				refused++
			} else {
				last, at = now, append(at, now)
			}
			w.mu.Unlock()
			if left > 0 {
				lbtest.Status(429, "Retry-After-Ms", strconv.FormatInt(left.Milliseconds()+1, 10))(rw, r)
				return
			}
			select {
			case <-time.After(time.Second):
			case <-r.Context().Done():
			}
			lbtest.Says(200, `{}`)(rw, r)
		})
		w.wantServed(t, make([]string, 9)...)
		w.wg.Wait()
		for i := 1; i < len(at); i++ {
			if gap := at[i].Sub(at[i-1]); gap > 120*time.Millisecond {
				t.Errorf("request %d went %s after the one before", i, gap)
			}
		}
		if refused > 20 { // together, they would be refused 45 times
			t.Errorf("%d refusals of 10 requests", refused)
		}
	})
}

func TestAListDoesNotSlowDownABackendThatAcceptsRequestsAgain(t *testing.T) {
	inBubble(t, "wait 2s", func(t *testing.T, w *world) {
		w.coolDown(t, "a", 60*time.Second)
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			time.Sleep(300 * time.Millisecond)
			lbtest.Says(200, `{}`)(rw, r)
		})
		time.Sleep(59 * time.Second)
		served := 0
		for number := range 300 { // 100 requests a second, from the end of the cooldown on
			w.ask(number, "", func(got lbtest.Reply, _ time.Duration) {
				if got.Status == 200 {
					served++
				}
			})
			time.Sleep(10 * time.Millisecond)
		}
		w.wg.Wait()
		if served < 120 {
			t.Errorf("%d of 300 requests were served", served)
		}
	})
}

func TestARequestDoesNotOvertakeThoseThatWait(t *testing.T) {
	inBubble(t, "wait 2s", func(t *testing.T, w *world) {
		w.knows(t, "", 10)
		w.coolDown(t, "a", time.Second)
		w.wantServed(t, "", "", "", "")
		time.Sleep(time.Until(time.Now().Truncate(time.Second).Add(time.Second)))
		w.ask(4, "", func(lbtest.Reply, time.Duration) {})
		w.wg.Wait()
		if got := w.numbers("a"); !slices.Equal(got, []int{-1, 0, 1, 2, 3, 4}) {
			t.Errorf("they went in the order %v", got)
		}
	})
}

// Request 0 waits for a only, because b has failed for it. Request 1 waits for
// both. When request 0 has gone, and b is back before request 1 may go, request
// 2 does not take b.
func TestARequestDoesNotOvertakeOneThatWaitsForMoreBackendsThanTheOneBeforeDid(t *testing.T) {
	inBubbleWith(t, "wait 10s\nbackend http://a\nbackend http://b {\npriority 2\n}", func(t *testing.T, w *world) {
		w.throttle("a", time.Second)
		w.Backends["b"].Replies(lbtest.Status(500))
		var sent []int
		ask := func(number int) {
			w.ask(number, "", func(got lbtest.Reply, _ time.Duration) { got.WantServed(t, "a", "b") })
			time.Sleep(10 * time.Millisecond)
		}
		ask(0)
		w.throttle("b", 1040*time.Millisecond)
		ask(1)
		time.Sleep(900 * time.Millisecond)
		serves := func(rw http.ResponseWriter, r *http.Request) {
			number, _ := strconv.Atoi(r.Header.Get("X-Number"))
			w.mu.Lock()
			sent = append(sent, number)
			w.mu.Unlock()
			time.Sleep(500 * time.Millisecond)
			lbtest.Says(200, `{"id":"chatcmpl-1"}`)(rw, r)
		}
		w.AllReply(serves)
		time.Sleep(150 * time.Millisecond)
		ask(2)
		w.wg.Wait()
		if !slices.Equal(sent, []int{0, 1, 2}) {
			t.Errorf("they are sent in the order %v", sent)
		}
	})
}

func TestARequestThatWaitsForOneBackendKeepsNoOtherRequestFromAnother(t *testing.T) {
	inBubbleWith(t, "wait 2s\nbackend http://a\nbackend http://b {\npriority 2\n}", func(t *testing.T, w *world) {
		w.throttle("a", time.Second)
		w.Backends["b"].Replies(lbtest.Status(400, "X-B", "1"))
		w.Backends["b"].Replies(lbtest.Status(500))
		w.ask(0, "", func(got lbtest.Reply, _ time.Duration) { got.WantServed(t, "a") })
		time.Sleep(time.Millisecond)
		w.Backends["b"].Recovers()
		begin := time.Now()
		w.Send(w.request(1, "")).WantServed(t, "b") // a suspect
		if took := time.Since(begin); took != 0 {
			t.Errorf("it took %s", took)
		}
		w.wg.Wait()
	})
}

func TestWaitingRequestsGoToWhicheverBackendReturnsFirst(t *testing.T) {
	inBubbleWith(t, "wait 2s\nbackend http://a\nbackend http://b {\npriority 2\n}", func(t *testing.T, w *world) {
		w.throttle("a", time.Second)
		w.throttle("b", 300*time.Millisecond)
		begin := time.Now()
		w.Send(w.request(0, "")).WantServed(t, "b")
		if took := time.Since(begin); took != 300*time.Millisecond {
			t.Errorf("it took %s", took)
		}
	})
}

func TestNoRequestWaitsForABudget(t *testing.T) {
	inBubble(t, "wait 5s\nretry_after_max 4s", func(t *testing.T, w *world) {
		w.Backends["a"].Replies(lbtest.Says(429, `{"error":{"message":"x","type":"insufficient_quota","param":null,"code":"insufficient_quota"}}`))
		begin := time.Now()
		w.Send(w.request(0, "")).WantStatus(t, 429)
		w.Send(w.request(1, "")).WantStatus(t, 429)
		if took := time.Since(begin); took != 0 {
			t.Errorf("they took %s", took)
		}
	})
}

func TestNoRequestWaitsForTheOwnerOfAnObject(t *testing.T) {
	inBubbleWith(t, "wait 5s\nbackend http://a {\nmodel gpt-4o\n}\nbackend http://b {\nmodel gpt-4o\n}", func(t *testing.T, w *world) {
		w.AllReply(lbtest.Says(200, `{"id":"resp_0123456789abcdef0123","object":"response","output":[]}`))
		send := func(body string) lbtest.Reply {
			return w.Send(w.Request(http.MethodPost, "/v1/responses", strings.NewReader(body)))
		}
		owner := send(`{"model":"gpt-4o","input":"x"}`).Backend
		w.throttle(owner, time.Second)
		begin := time.Now()
		send(`{"model":"gpt-4o","input":"x","previous_response_id":"resp_0123456789abcdef0123"}`).WantStatus(t, 429)
		if took := time.Since(begin); took != 0 {
			t.Errorf("it took %s", took)
		}
	})
}

func TestNoRequestWaitsForABackendThatIsFull(t *testing.T) {
	inBubbleWith(t, "wait 5s\nbackend http://a {\nmax_requests 1\n}", func(t *testing.T, w *world) {
		w.knows(t, "", 10)
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
				time.Sleep(2 * time.Second)
				lbtest.Says(200, `{}`)(rw, r)
			})
			lbtest.Status(429, "Retry-After-Ms", "300")(rw, r)
		})
		w.wantServed(t, "")
		// when the backend returns, the other request takes its only place
		begin := time.Now()
		got := w.Send(w.request(1, ""))
		got.WantError(t, 429, "rate_limit_exceeded")
		if took := time.Since(begin); took > 400*time.Millisecond || !strings.Contains(got.Body, "busy") {
			t.Errorf("after %s, it got %s", took, got.Body)
		}
		w.wg.Wait()
	})
}

func TestNoRequestWaitsForABackendThatNamesNoTime(t *testing.T) {
	for name, header := range map[string][]string{"none": nil, "zero": {"Retry-After", "0"}} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, "wait 10s", func(t *testing.T, w *world) {
				w.knows(t, "", 100)
				w.Backends["a"].Replies(lbtest.Status(429, header...))
				begin := time.Now()
				w.Send(w.request(0, "")).WantError(t, 429, "rate_limit_exceeded")
				w.Send(w.request(1, "")).WantError(t, 429, "rate_limit_exceeded")
				if took := time.Since(begin); took != 0 {
					t.Errorf("they took %s", took)
				}
				w.WantCalls(map[string]int{"a": 1})
			})
		})
	}
}

func TestLBRetriesDoNotCountTriesOfTheBackendThatIsWaitedFor(t *testing.T) {
	inBubble(t, "wait 2s\nlb_retries 0", func(t *testing.T, w *world) {
		w.throttle("a", 300*time.Millisecond)
		w.Send(w.request(0, "")).WantServed(t, "a")
	})
}

// Another handler may give requests a deadline. reverse_proxy would send a GET
// again after that, and again.
func TestARequestWhoseDeadlinePassesWhileItWaitsEnds(t *testing.T) {
	inBubble(t, "wait 2s", func(t *testing.T, w *world) {
		w.throttle("a", 3*time.Second)
		w.Send(w.Request(http.MethodGet, "/v1/models", nil))
		time.Sleep(2 * time.Second)
		w.Prepares = func(r *http.Request) *http.Request {
			ctx, cancel := context.WithTimeout(r.Context(), 100*time.Millisecond)
			t.Cleanup(cancel)
			return r.WithContext(ctx)
		}
		begin := time.Now()
		got := w.Send(w.Request(http.MethodGet, "/v1/models", nil))
		if took := time.Since(begin); took != 100*time.Millisecond {
			t.Errorf("it got %d after %s", got.Status, took)
		}
	})
}

func TestARequestWaitsForABackendThatReturnsAtTheEndOfItsWait(t *testing.T) {
	inBubble(t, "wait 1s", func(t *testing.T, w *world) {
		w.throttle("a", time.Second)
		w.Send(w.request(0, "")).WantServed(t, "a")
	})
}
