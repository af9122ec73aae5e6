package waiting

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

const (
	aliceKey = "sk-alice-0123456789"
	bobKey   = "sk-bob-0123456789ab"
)

// inBubbleOf runs a test with alice, who has these limits, and bob, at the
// beginning of all windows.
func inBubbleOf(t *testing.T, options, limits string, test func(*testing.T, *world)) {
	t.Helper()
	inBubble(t, options+"\nclient_key alice "+aliceKey+"\nclient_key bob "+bobKey+"\ncaller alice {\n"+limits+"\n}", func(t *testing.T, w *world) {
		time.Sleep(time.Until(time.Now().Truncate(time.Hour).Add(time.Hour)))
		test(t, w)
	})
}

// limitsOf returns what each caller has used.
func limitsOf(w *world) (all []ratelimit.Snapshot) {
	for _, c := range lbtest.LimitersOf(w.Handler.Pool).All() {
		all = append(all, c.Snapshot(time.Now()))
	}
	return all
}

// alice returns what alice has used.
func (w *world) alice() ratelimit.Snapshot {
	for _, s := range limitsOf(w) {
		if s.Name == "alice" {
			return s
		}
	}
	return ratelimit.Snapshot{}
}

func TestARequestWaitsForItsCallersLimitByTheMinute(t *testing.T) {
	inBubbleOf(t, "wait 10s", "requests 60/minute", func(t *testing.T, w *world) {
		for number := range 60 {
			w.Send(w.request(number, aliceKey)).WantServed(t, "a")
			time.Sleep(time.Second)
		}
		// a minute later the first does not count any more, and in each second
		// one less does
		begin := time.Now()
		w.wantServed(t, aliceKey, aliceKey, aliceKey)
		if used := w.alice().Limits[0].Used; used != 60 {
			t.Errorf("%d requests are charged while others wait, want 60", used)
		}
		w.wg.Wait()
		if got := w.numbers("a"); !slices.Equal(got[60:], []int{0, 1, 2}) {
			t.Errorf("they went in the order %v", got[60:])
		}
		if took := time.Since(begin).Round(time.Second); took != 2*time.Second {
			t.Errorf("three requests took %s, want 2s", took)
		}
		s := w.alice()
		if s.InFlight != 0 || s.Reserved != 0 || s.Limits[0].Used != 60 || s.Limits[0].Refused != 0 {
			t.Errorf("alice has used %+v", s)
		}
	})
}

// TestARequestWaitsForTheLimitOfItsModel behind others for that model, but not
// with those for other models. What a request gives back wakes the next one.
func TestARequestWaitsForTheLimitOfItsModel(t *testing.T) {
	inBubbleOf(t, "wait 10s", "requests 100/second\ntokens 1k/second gpt-4o", func(t *testing.T, w *world) {
		// the request is charged with much more than it uses
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			time.Sleep(100 * time.Millisecond)
			lbtest.Says(200, `{"usage":{"prompt_tokens":10,"completion_tokens":1}}`)(rw, r)
		})
		w.wantServed(t, slices.Repeat([]string{aliceKey}, 8)...)
		begin := time.Now()
		for range 10 {
			r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{"model":"o3"}`))
			r.Header.Set("Authorization", "Bearer "+aliceKey)
			r.Header.Set("X-Number", "9")
			w.Send(r).WantServed(t, "a")
		}
		if took := time.Since(begin); took != time.Second {
			t.Errorf("ten requests for another model took %s, want 1s", took)
		}
		w.wg.Wait()
		if took := time.Since(begin); took > time.Second {
			t.Errorf("they took %s", took)
		}
		order := slices.DeleteFunc(w.numbers("a"), func(n int) bool { return n == 9 })
		if !slices.Equal(order, []int{0, 1, 2, 3, 4, 5, 6, 7}) {
			t.Errorf("they went in the order %v", order)
		}
	})
}

// TestARequestForALimitedModelWaitsInTurnForTheLimitOfAllModels holds that no
// more requests wait for that limit than it has room for.
func TestARequestForALimitedModelWaitsInTurnForTheLimitOfAllModels(t *testing.T) {
	inBubbleOf(t, "wait 10s", "requests 1/minute\nrequests 100/minute gpt-4o", func(t *testing.T, w *world) {
		w.Send(w.request(0, aliceKey)).WantServed(t, "a")
		time.Sleep(55 * time.Second)
		w.wantServed(t, aliceKey)
		begin := time.Now()
		r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{"model":"o3"}`))
		r.Header.Set("Authorization", "Bearer "+aliceKey)
		w.Send(r).WantError(t, http.StatusTooManyRequests, "rate_limit_exceeded")
		if took := time.Since(begin); took > time.Second {
			t.Errorf("it has waited %s behind a request that gets all there is", took)
		}
		w.wg.Wait()
	})
}

func TestBobDoesNotWaitForAlicesLimit(t *testing.T) {
	inBubbleOf(t, "wait 2s", "requests 1/second", func(t *testing.T, w *world) {
		w.wantServed(t, aliceKey, aliceKey)
		begin := time.Now()
		w.Send(w.request(9, bobKey)).WantServed(t, "a")
		if took := time.Since(begin); took != 0 {
			t.Errorf("it took %s", took)
		}
		w.wg.Wait()
	})
}

func TestALimitOfWhichTheWaitIsTooLongRefusesAtOnce(t *testing.T) {
	for name, limit := range map[string]string{
		"minute": "requests 1/minute", "hour": "requests 1/hour", "day": "requests 1/day",
		"tokens": "tokens 100/minute", "in progress": "max_requests 1",
	} {
		t.Run(name, func(t *testing.T) {
			inBubbleOf(t, "wait 10s", limit, func(t *testing.T, w *world) {
				w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
					time.Sleep(5 * time.Second)
					lbtest.Says(200, `{"usage":{"prompt_tokens":60,"completion_tokens":40}}`)(rw, r)
				})
				w.ask(0, aliceKey, func(lbtest.Reply, time.Duration) {})
				time.Sleep(time.Millisecond)
				begin := time.Now()
				w.Send(w.request(1, aliceKey)).WantStatus(t, 429)
				if took := time.Since(begin); took != 0 {
					t.Errorf("it took %s", took)
				}
				w.wg.Wait()
				if got := w.alice(); got.InFlight != 0 || got.Reserved != 0 {
					t.Errorf("alice has used %+v", got)
				}
			})
		})
	}
}

// The limit of the last hour or day before its window ends would be within the
// duration.
func TestNoRequestWaitsForAnHourOrADay(t *testing.T) {
	for _, limit := range []string{"requests 1/hour", "tokens 10/day"} {
		inBubbleOf(t, "wait 10s", limit, func(t *testing.T, w *world) {
			w.Backends["a"].Replies(lbtest.Says(200, `{"usage":{"prompt_tokens":6,"completion_tokens":4}}`))
			w.Send(w.request(0, aliceKey)).WantServed(t, "a")
			time.Sleep(24*time.Hour - 5*time.Second)
			w.Send(w.request(1, aliceKey))
			begin := time.Now()
			w.Send(w.request(2, aliceKey)).WantStatus(t, 429)
			if took := time.Since(begin); took != 0 {
				t.Errorf("%s: it took %s", limit, took)
			}
		})
	}
}

func TestWhatARequestGivesBackLetsTheNextOneGo(t *testing.T) {
	inBubbleOf(t, "wait 10s", "tokens 1k/second", func(t *testing.T, w *world) {
		// the request is charged with much more than it uses
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			time.Sleep(100 * time.Millisecond)
			lbtest.Says(200, `{"usage":{"prompt_tokens":10,"completion_tokens":1}}`)(rw, r)
		})
		w.wantServed(t, slices.Repeat([]string{aliceKey}, 8)...)
		begin := time.Now()
		w.wg.Wait()
		if took := time.Since(begin); took > 900*time.Millisecond { // by their charges, three would go in a second
			t.Errorf("they took %s", took)
		}
	})
}

// TestARequestWaitsForItsCallersOpenRequestsAsLongAsItMay has two open requests
// that may use so much of the limit that there is no room for a third.
func TestARequestWaitsForItsCallersOpenRequestsAsLongAsItMay(t *testing.T) {
	for _, wait := range []time.Duration{900 * time.Millisecond, 2500 * time.Millisecond} {
		for _, lasts := range []time.Duration{100 * time.Millisecond, 5 * time.Second} {
			t.Run(fmt.Sprintf("%s for requests of %s", wait, lasts), func(t *testing.T) {
				inBubbleOf(t, "wait "+wait.String(), "tokens 40k/minute", func(t *testing.T, w *world) {
					w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
						time.Sleep(lasts)
						lbtest.Says(200, `{"usage":{"prompt_tokens":50,"completion_tokens":10}}`)(rw, r)
					})
					for number := range 2 {
						w.ask(number, aliceKey, func(got lbtest.Reply, _ time.Duration) { got.WantServed(t, "a") })
					}
					time.Sleep(time.Millisecond)
					w.Backends["a"].Recovers()
					begin := time.Now()
					got := w.Send(w.request(2, aliceKey))
					if took, want := time.Since(begin), min(wait, lasts-time.Millisecond); took != want {
						t.Errorf("it took %s, want %s", took, want)
					}
					if lasts < wait {
						got.WantServed(t, "a")
					} else {
						got.WantError(t, 429, "rate_limit_exceeded")
					}
					w.wg.Wait()
				})
			})
		}
	}
}

// The reply to a client that polls for a response in the background reports
// what the others wait for.
func TestAPollDoesNotWaitBehindRequestsThatWaitForTokens(t *testing.T) {
	inBubbleOf(t, "wait 10s", "tokens 1k/minute", func(t *testing.T, w *world) {
		const id = "resp_0123456789abcdef"
		w.Backends["a"].Replies(lbtest.Says(200, `{"id":"`+id+`","status":"queued","usage":null}`))
		r := w.Request(http.MethodPost, "/v1/responses", strings.NewReader(`{"model":"gpt-4o","background":true,"max_output_tokens":950,"input":"Hi"}`))
		r.Header.Set("Authorization", "Bearer "+aliceKey)
		w.Send(r).WantStatus(t, 200)
		w.Backends["a"].Recovers()
		time.Sleep(55 * time.Second) // in 5 s, all of it is free again
		begin := time.Now()
		w.wg.Go(func() {
			w.Send(w.sized(1, 800)).WantServed(t, "a")
			if took := time.Since(begin); took != time.Second {
				t.Errorf("it took %s, want 1s", took)
			}
		})
		time.Sleep(time.Second)
		w.Backends["a"].Replies(lbtest.Says(200, `{"id":"`+id+`","status":"completed","usage":{"input_tokens":1,"output_tokens":1}}`))
		r = w.Request(http.MethodGet, "/v1/responses/"+id, nil)
		r.Header.Set("Authorization", "Bearer "+aliceKey)
		w.Send(r).WantStatus(t, 200)
		if took := time.Since(begin); took != time.Second {
			t.Errorf("the poll took until %s", took)
		}
		w.Backends["a"].Recovers()
		w.wg.Wait()
	})
}

// Polls cost no tokens, so they wait only for limits of requests, in the order
// in which they came.
func TestPollsThatWaitForALimitOfRequestsGoInOrder(t *testing.T) {
	inBubbleOf(t, "wait 10s", "requests 1/second\ntokens 1k/minute", func(t *testing.T, w *world) {
		w.Backends["a"].Replies(lbtest.Says(200, `{"usage":{"prompt_tokens":5,"completion_tokens":895}}`))
		w.Send(w.sized(0, 900)).WantServed(t, "a")
		w.Backends["a"].Recovers()
		time.Sleep(55 * time.Second)
		w.wg.Go(func() { w.Send(w.sized(9, 800)).WantServed(t, "a") })
		begin := time.Now()
		for number, at := range []time.Duration{100 * time.Millisecond, 200 * time.Millisecond, 1500 * time.Millisecond} {
			time.Sleep(time.Until(begin.Add(at)))
			w.wg.Go(func() {
				w.Send(w.poll(1+number)).WantServed(t, "a")
				if took, most := time.Since(begin), time.Duration(2*number+1)*time.Second; took > most {
					t.Errorf("poll %d took until %s, want %s at most", 1+number, took, most)
				}
			})
		}
		w.wg.Wait()
		if got := w.numbers("a"); !slices.Equal(got, []int{0, 1, 2, 3, 9}) {
			t.Errorf("they went in the order %v", got)
		}
	})
}

func TestAPollGoesWhenAnotherRequestGivesBackItsPartOfALimit(t *testing.T) {
	inBubbleOf(t, "wait 10s", "requests 1/second", func(t *testing.T, w *world) {
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodPost {
				time.Sleep(300 * time.Millisecond)
				rw.WriteHeader(500) // it costs nothing
			}
		})
		w.wg.Go(func() { w.Send(w.request(0, aliceKey)).WantStatus(t, 500) })
		time.Sleep(100 * time.Millisecond)
		begin := time.Now()
		w.Send(w.poll(1)).WantServed(t, "a")
		if took := time.Since(begin); took != 200*time.Millisecond {
			t.Errorf("it took %s, want 200ms", took)
		}
		w.wg.Wait()
	})
}

func TestARequestThatIsRefusedIsNotCharged(t *testing.T) {
	inBubbleOf(t, "wait 500ms", "requests 1/second\ntokens 1M/day", func(t *testing.T, w *world) {
		w.throttle("a", time.Minute)
		w.Send(w.request(0, aliceKey)).WantStatus(t, 429) // by the backend: it costs nothing
		w.Backends["a"].Recovers()
		time.Sleep(time.Minute)
		w.Send(w.request(1, aliceKey)).WantServed(t, "a")
		begin := time.Now()
		got := w.Send(w.request(2, aliceKey))
		got.WantError(t, 429, "rate_limit_exceeded")
		if took := time.Since(begin); took != 0 || got.Header.Get("X-Ratelimit-Limit-Requests") != "1" {
			t.Errorf("it took %s, with %v", took, got.Header)
		}
		time.Sleep(2 * time.Second)
		w.Send(w.request(3, aliceKey)).WantServed(t, "a")
		if s := w.alice(); s.InFlight != 0 || s.Reserved != 0 || s.Limits[0].Used != 1 {
			t.Errorf("alice has used %+v", s)
		}
	})
}

func TestARequestWaitsForItsCallerAndThenForABackendNoLongerThanForOne(t *testing.T) {
	inBubbleOf(t, "wait 1500ms", "requests 1/second", func(t *testing.T, w *world) {
		w.Send(w.request(0, aliceKey)).WantServed(t, "a")
		time.Sleep(600 * time.Millisecond)
		w.throttle("a", 1800*time.Millisecond)
		w.ask(9, bobKey, func(lbtest.Reply, time.Duration) {})
		begin := time.Now()
		w.Send(w.request(1, aliceKey)).WantStatus(t, 429)
		if took := time.Since(begin); took > 1500*time.Millisecond {
			t.Errorf("it took %s", took)
		}
		w.wg.Wait()
	})
}

func TestARequestWithinItsLimitIsNotRefusedBecauseALargerOneWaits(t *testing.T) {
	for name, test := range map[string]struct {
		options, patience string
	}{
		"it may not wait so long": {"wait 10s", "0.5"},
	} {
		t.Run(name, func(t *testing.T) {
			inBubbleOf(t, test.options, "tokens 1k/minute", func(t *testing.T, w *world) {
				w.Backends["a"].Replies(lbtest.Says(200, `{"usage":{"prompt_tokens":5,"completion_tokens":895}}`))
				w.Send(w.sized(0, 900)).WantServed(t, "a")
				w.Backends["a"].Recovers()
				time.Sleep(55 * time.Second)
				w.wg.Go(func() { w.Send(w.sized(1, 800)).WantServed(t, "a") })
				time.Sleep(time.Millisecond)
				begin, small := time.Now(), w.sized(2, 20)
				if test.patience != "" {
					small.Header.Set("X-Stainless-Read-Timeout", test.patience)
				}
				w.Send(small).WantServed(t, "a")
				if took := time.Since(begin); took != 0 {
					t.Errorf("it took %s", took)
				}
				w.wg.Wait()
				if s := w.alice(); s.InFlight != 0 || s.Reserved != 0 {
					t.Errorf("alice has used %+v", s)
				}
			})
		})
	}
}

func TestASmallRequestGoesWhenTheLargerOneBeforeItLeaves(t *testing.T) {
	inBubbleOf(t, "wait 10s", "tokens 1k/minute", func(t *testing.T, w *world) {
		w.Backends["a"].Replies(lbtest.Says(200, `{"usage":{"prompt_tokens":5,"completion_tokens":895}}`))
		w.Send(w.sized(0, 900)).WantServed(t, "a")
		w.Backends["a"].Recovers()
		time.Sleep(55 * time.Second)
		ctx, leave := context.WithCancel(t.Context())
		w.wg.Go(func() { w.Send(w.sized(1, 800).WithContext(ctx)) })
		time.Sleep(100 * time.Millisecond)
		w.wg.Go(func() {
			begin := time.Now()
			w.Send(w.sized(2, 20)).WantServed(t, "a")
			if took := time.Since(begin); took != 100*time.Millisecond {
				t.Errorf("it took %s", took)
			}
		})
		time.Sleep(100 * time.Millisecond)
		leave()
		w.wg.Wait()
	})
}

// sized makes a chat of alice's that asks for so many tokens.
func (w *world) sized(number, tokens int) *http.Request {
	r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(fmt.Sprintf(`{"model":"gpt-4o","messages":[],"max_tokens":%d}`, tokens)))
	r.Header.Set("Authorization", "Bearer "+aliceKey)
	r.Header.Set("X-Number", strconv.Itoa(number))
	return r
}

// poll makes a request of alice's that costs no tokens.
func (w *world) poll(number int) *http.Request {
	r := w.Request(http.MethodGet, "/v1/responses/resp_0123456789abcdef", nil)
	r.Header.Set("Authorization", "Bearer "+aliceKey)
	r.Header.Set("X-Number", strconv.Itoa(number))
	return r
}
