package health

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// huge marks a request that a backend with limited tokens refuses: the backend
// of a test need not read the body to know.
const huge = "X-Test-Huge"

// costs is a chat completion that asks for so many tokens.
func costs(w *lbtest.World, tokens int) *http.Request {
	return w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(fmt.Sprintf(`{"model":"gpt-4o","max_tokens":%d}`, tokens)))
}

// hugeRequest is a request with this body that is more than backends give in a
// minute.
func hugeRequest(w *lbtest.World, body string) *http.Request {
	r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(body))
	r.Header.Set(huge, "1")
	return r
}

// limits is a backend that serves what is not huge.
func limits(retryAfter string) http.HandlerFunc {
	return func(rw http.ResponseWriter, r *http.Request) {
		if r.Header.Get(huge) != "" {
			lbtest.Throttled(retryAfter)(rw, r)
		}
	}
}

var hugeBodies = map[string]string{
	"max_tokens":               `{"model":"gpt-4o","messages":[],"max_tokens":100000}`,
	"max_completion_tokens":    `{"max_completion_tokens":100000,"model":"gpt-4o","messages":[]}`,
	"max_output_tokens":        `{"model":"gpt-4o","input":"x","max_output_tokens" : 100000 }`,
	"max_tokens times n":       `{"model":"gpt-4o","n":100,"max_tokens":1000}`,
	"a long prompt":            `{"model":"gpt-4o","messages":[{"role":"user","content":"` + strings.Repeat("lorem ", 70_000) + `"}]}`,
	"more than fits a number":  `{"model":"gpt-4o","max_tokens":9223372036854775807,"n":128}`,
	"more digits than numbers": `{"model":"gpt-4o","max_tokens":99999999999999999999999999}`,
}

func TestOneHugeRequestTakesThePoolFromNobody(t *testing.T) {
	for name, body := range hugeBodies {
		for _, names := range []string{"a", "a b", "a b c"} {
			for _, hint := range []string{"60", "86400"} {
				t.Run(name+", "+names+", "+hint, func(t *testing.T) {
					lbtest.InBubble(t, lbtest.PoolOf(names, ""), func(t *testing.T, w *lbtest.World) {
						w.AllReply(limits(hint))
						w.Send(hugeRequest(w, body)).WantError(t, 429, "rate_limit_exceeded")
						for range 20 {
							w.Send(costs(w, 100)).WantServed(t, "a", "b", "c")
							time.Sleep(time.Second)
						}
						if n, want := w.TotalCalls(), len(w.Backends)+20; n != want {
							t.Errorf("backends were called %d times, want %d: a request that is served is sent once", n, want)
						}
						w.WantReady()
					})
				})
			}
		}
	}
}

func TestHugeRequestsInARowAndAtOnceTakeThePoolFromNobody(t *testing.T) {
	for name, send := range map[string]func(w *lbtest.World, n int){
		"in a row": func(w *lbtest.World, n int) {
			for range n {
				w.Send(hugeRequest(w, hugeBodies["max_tokens"])).WantError(w.T, 429, "rate_limit_exceeded")
			}
		},
		"at once": func(w *lbtest.World, n int) {
			var wg sync.WaitGroup
			for range n {
				wg.Go(func() { w.Send(hugeRequest(w, hugeBodies["max_tokens"])) })
			}
			wg.Wait()
		},
	} {
		for _, names := range []string{"a b", "a b c"} {
			t.Run(name+", "+names, func(t *testing.T) {
				lbtest.InBubble(t, lbtest.PoolOf(names, ""), func(t *testing.T, w *lbtest.World) {
					slow := limits("86400")
					w.AllReply(func(rw http.ResponseWriter, r *http.Request) {
						time.Sleep(100 * time.Millisecond)
						slow(rw, r)
					})
					for range 5 {
						send(w, 10)
						for range 3 {
							w.Send(costs(w, 100)).WantServed(t, "a", "b", "c")
						}
						time.Sleep(time.Second)
					}
				})
			})
		}
	}
}

func TestABackendInDoubtIsCheckedByOneRequestAtATime(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b c", ""), func(t *testing.T, w *lbtest.World) {
		w.AllReply(limits("60"))
		w.Send(hugeRequest(w, hugeBodies["max_tokens"])).WantError(t, 429, "rate_limit_exceeded")
		w.AllReply(func(http.ResponseWriter, *http.Request) { time.Sleep(5 * time.Second) })
		for _, b := range w.Backends {
			b.Forget()
		}
		var wg sync.WaitGroup
		for range 30 {
			wg.Go(func() { w.Send(costs(w, 100)) })
		}
		synctest.Wait()
		for name, b := range w.Backends {
			if n := len(b.Received()); n > 1 {
				t.Errorf("%s is checked by %d requests at once, want 1", name, n)
			}
		}
		if w.TotalCalls() == 0 {
			t.Error("nobody checks")
		}
		wg.Wait()
		for range 20 {
			w.Send(costs(w, 100)).WantServed(t, "a", "b", "c")
		}
	})
}

func TestOnlyAMuchSmallerRequestChecks(t *testing.T) {
	for _, c := range []struct {
		name   string
		first  string // what was throttled everywhere
		small  int    // how many tokens the next one asks for
		checks bool
	}{
		{"just below a quarter", `{"model":"gpt-4o","max_tokens":100000}`, 24_900, true},
		{"just above a quarter", `{"model":"gpt-4o","max_tokens":100000}`, 25_100, false},
		{"the same", `{"model":"gpt-4o","max_tokens":100000}`, 100_000, false},
		{"half", `{"model":"gpt-4o","max_tokens":100000}`, 50_000, false},
		{"below a quarter of all choices", `{"model":"gpt-4o","max_tokens":10000,"n":10}`, 24_900, true},
		{"above a quarter of all choices", `{"model":"gpt-4o","max_tokens":10000,"n":10}`, 25_100, false},
		{"below a quarter of the prompt", `{"model":"gpt-4o","user":"` + strings.Repeat("x", 400_000) + `"}`, 24_900, true},
		{"above a quarter of the prompt", `{"model":"gpt-4o","user":"` + strings.Repeat("x", 400_000) + `"}`, 25_100, false},
		{"a limit that is not the request's own", `{"model":"gpt-4o","metadata":{"max_tokens":100000},"user":"\"max_tokens\":100000"}`, 1_000, false},
		{"a limit that is no number", `{"model":"gpt-4o","max_tokens":"100000"}`, 1_000, false},
		{"a limit of nothing", `{"model":"gpt-4o","max_tokens":null}`, 1_000, false},
		{"a limit below nothing", `{"model":"gpt-4o","max_tokens":-100000}`, 1_000, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.PoolOf("a b", ""), func(t *testing.T, w *lbtest.World) {
				w.AllReply(limits("60"))
				w.Send(hugeRequest(w, c.first)).WantError(t, 429, "rate_limit_exceeded")
				reply := w.Send(costs(w, c.small))
				if c.checks {
					reply.WantServed(t, "a", "b")
					return
				}
				reply.WantError(t, 429, "rate_limit_exceeded")
				w.WantCalls(map[string]int{"a": 1, "b": 1})
			})
		})
	}
}

// TestAPoolThatIsUsedUpIsCalledOncePerPromise refuses everything: what was
// learned from a huge request is checked once, and not once for each size.
func TestAPoolThatIsUsedUpIsCalledOncePerPromise(t *testing.T) {
	for _, names := range []string{"a", "a b", "a b c"} {
		for name, c := range map[string]struct {
			sizes []int
			calls int // of each backend
		}{
			"all of one size":      {[]int{1000, 1000, 1000, 1000}, 1},
			"ever larger":          {[]int{100, 1000, 10_000, 100_000}, 1},
			"one that is huge":     {[]int{100_000, 100, 100, 100}, 2},
			"ever smaller":         {[]int{10_000_000, 1_000_000, 100_000, 10_000, 1000, 100, 1}, 2},
			"huge and small again": {[]int{100_000, 100, 100_000, 100, 100_000, 100}, 2},
		} {
			t.Run(names+", "+name, func(t *testing.T) {
				lbtest.InBubble(t, lbtest.PoolOf(names, ""), func(t *testing.T, w *lbtest.World) {
					w.AllReply(lbtest.Throttled("60"))
					for promise := 1; promise <= 2; promise++ {
						start := time.Now()
						for range 5 {
							for _, size := range c.sizes {
								w.Send(costs(w, size)).WantError(t, 429, "rate_limit_exceeded")
							}
							time.Sleep(time.Second)
						}
						for name, b := range w.Backends {
							if n := len(b.Received()); n != promise*c.calls {
								t.Errorf("in promise %d %s was called %d times in all, want %d", promise, name, n, promise*c.calls)
							}
						}
						time.Sleep(61*time.Second - time.Since(start))
					}
				})
			})
		}
	}
}

func TestABackendThatIsReallyUsedUpIsNotServedByTheOthersDoubt(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b c", ""), func(t *testing.T, w *lbtest.World) {
		w.AllReply(limits("60"))
		w.Backends["a"].Replies(lbtest.Throttled("60"))
		w.Send(hugeRequest(w, hugeBodies["max_tokens"])).WantError(t, 429, "rate_limit_exceeded")
		for range 50 {
			w.Send(costs(w, 100)).WantServed(t, "b", "c")
			time.Sleep(time.Second)
		}
		if n := len(w.Backends["a"].Received()); n > 2 {
			t.Errorf("a was called %d times while its promise lasts, want 2 at most", n)
		}
	})
}

func TestAHugeRequestThatIsServedElsewhereLeavesNoDoubt(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b c", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(limits("60"))
		w.Send(hugeRequest(w, hugeBodies["max_tokens"])).WantServed(t, "b")
		for range 20 {
			w.Send(costs(w, 1)).WantServed(t, "b")
		}
		w.WantCalls(map[string]int{"a": 1})
	})
}

func TestDoubtHoldsForARequestThatMayTryFewBackends(t *testing.T) {
	for retries := range 3 {
		t.Run(fmt.Sprint("lb_retries ", retries), func(t *testing.T) {
			lbtest.InBubble(t, lbtest.PoolOf("a b c", fmt.Sprint("lb_retries ", retries)), func(t *testing.T, w *lbtest.World) {
				w.AllReply(limits("60"))
				for range 4 {
					w.Send(hugeRequest(w, hugeBodies["max_tokens"])).WantError(t, 429, "rate_limit_exceeded")
				}
				for range 10 {
					w.Send(costs(w, 100)).WantServed(t, "a", "b", "c")
				}
			})
		})
	}
}

func TestDoubtHoldsForTheBackendsThatWereLeft(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Throttled("60"))
		w.Send(costs(w, 100)).WantServed(t, "b") // a keeps its promise
		w.Backends["b"].Replies(limits("86400"))
		w.Send(hugeRequest(w, hugeBodies["max_tokens"])).WantError(t, 429, "rate_limit_exceeded")
		for range 10 {
			w.Send(costs(w, 100)).WantServed(t, "b")
		}
		w.WantCalls(map[string]int{"a": 1})
	})
}

func TestALimitBelowTheCostStartsNoCooldown(t *testing.T) {
	for _, c := range []struct {
		limit     string
		cost      int
		coolsDown bool
	}{
		{"60000", 100_000, false},
		{"99000", 100_000, false},
		{"101000", 100_000, true},
		{"60000", 1_000, true},
		{"", 100_000, true},
		{"many", 100_000, true},
		{"-1", 100_000, true},
	} {
		t.Run(c.limit+" for "+strconv.Itoa(c.cost), func(t *testing.T) {
			lbtest.InBubble(t, lbtest.PoolOf("a b c", ""), func(t *testing.T, w *lbtest.World) {
				w.AllReply(lbtest.Status(429, "Retry-After", "60", "X-Ratelimit-Limit-Tokens", c.limit))
				reply := w.Send(costs(w, c.cost))
				if reply.Status != 429 {
					t.Errorf("client got %d %s (%v), want a 429", reply.Status, reply.Body, reply.Err)
				}
				w.WantCalls(map[string]int{"a": 1, "b": 1, "c": 1})
				want := 0
				if c.coolsDown {
					want = 3
				}
				if n := len(w.Logged("cooldown started")); n != want {
					t.Errorf("%d cooldowns, want %d", n, want)
				}
				if !c.coolsDown && reply.Backend == "" {
					t.Errorf("client got %s, want a backend's own words", reply.Body)
				}
				for _, b := range w.Backends {
					b.Recovers()
				}
				if !c.coolsDown {
					w.Send(costs(w, c.cost)).WantServed(t, "a", "b", "c")
				}
			})
		})
	}
}

// cannotAfford is OpenRouter's answer to a request whose max_tokens cost more
// than the account has.
const cannotAfford = `{"error":{"message":"This request requires more credits, or fewer max_tokens. You requested up to 65536 tokens, but can only afford 2500. To increase, visit https://openrouter.ai/settings/credits","code":402}}`

func TestARefusalOfTheRequestsOwnTokensStartsNoCooldown(t *testing.T) {
	for name, reply := range map[string]http.HandlerFunc{
		"a 402":         lbtest.Says(402, cannotAfford),
		"a 429":         lbtest.Says(429, strings.Replace(cannotAfford, "402", "429", 1)),
		"a 402 in text": lbtest.Says(402, `{"error":"you can only afford 2500 tokens"}`),
		"inside a 200":  lbtest.Says(200, cannotAfford),
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(reply)
				w.Send(costs(w, 65_536)).WantServed(t, "b")
				w.Backends["b"].Replies(reply)
				if reply := w.Send(costs(w, 65_536)); reply.Status/100 != 4 || !strings.Contains(reply.Body, "can only afford") {
					t.Errorf("client got %d %s (%v), want a backend's own words", reply.Status, reply.Body, reply.Err)
				}
				w.WantCalls(map[string]int{"a": 2, "b": 2})
				w.WantNobodyBlamed()
			})
		})
	}
}

func TestOneRequestBeyondTheBudgetTakesThePoolFromNobody(t *testing.T) {
	broke := lbtest.Says(402, `{"error":{"message":"Insufficient credits","code":402}}`)
	exhausted := lbtest.Says(429, `{"error":{"message":"You exceeded your current quota","type":"insufficient_quota","code":"insufficient_quota"}}`)
	tooLarge := lbtest.Says(429, `{"error":{"message":"Request too large for gpt-4o","code":"rate_limit_exceeded"}}`)
	for name, refusals := range map[string][3]http.HandlerFunc{
		"402s":               {broke, broke, broke},
		"quota":              {exhausted, exhausted, exhausted},
		"quota and throttle": {broke, lbtest.Throttled("60"), exhausted},
		"quota and a limit":  {broke, tooLarge, exhausted},
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.PoolOf("a b c", ""), func(t *testing.T, w *lbtest.World) {
				for i, backend := range []string{"a", "b", "c"} {
					w.Backends[backend].Replies(func(rw http.ResponseWriter, r *http.Request) {
						if r.Header.Get(huge) != "" {
							refusals[i](rw, r)
						}
					})
				}
				for range 3 {
					if status := w.Send(hugeRequest(w, hugeBodies["max_tokens"])).Status; status != 402 && status != 429 {
						t.Errorf("client got %d, want a 402 or 429", status)
					}
					for range 30 {
						w.Send(costs(w, 100)).WantServed(t, "a", "b", "c")
					}
					// also for another model, since the cooldown is of the
					// whole backend
					w.Post(`{"model":"gpt-4o-mini","max_tokens":100}`).WantServed(t, "a", "b", "c")
					time.Sleep(time.Second)
				}
				for name, b := range w.Backends {
					if len(b.Received()) < 10 {
						t.Errorf("%s was called %d times, want its share", name, len(b.Received()))
					}
				}
			})
		})
	}
}

func TestABackendWithoutBudgetIsCheckedOnce(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b c", ""), func(t *testing.T, w *lbtest.World) {
		w.AllReply(lbtest.Status(402))
		for range 100 {
			w.Send(hugeRequest(w, hugeBodies["max_tokens"]))
			w.Send(costs(w, 100))
			time.Sleep(2 * time.Second)
		}
		w.WantCalls(map[string]int{"a": 2, "b": 2, "c": 2})
	})
}
