package tiers

import (
	"net/http"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestALoneTierGetsEverything(t *testing.T) {
	inBubble(t, twoBackends, func(t *testing.T, w *world) {
		w.used("ptu", "127%")
		for range 50 {
			w.wantAt(t, "nightly", "ptu")
		}
		w.wantAt(t, "batch", "ptu")
		w.wantAt(t, "batch", "ptu")
	})
}

func TestATierLeavesTheShareOfAnotherOneThatAsksForTheModel(t *testing.T) {
	inBubble(t, twoBackends, func(t *testing.T, w *world) {
		w.used("ptu", "70%")
		w.wantAt(t, "web", "ptu")
		w.wantAt(t, "batch", "ptu")
		w.wantAt(t, "nightly", "ptu")
		w.used("ptu", "127%")
		w.wantAt(t, "web", "ptu")
		w.wantAt(t, "batch", "payg")
		w.wantAt(t, "nightly", "payg")
		w.wantAt(t, "web", "ptu") // no other tier keeps a share
	})
}

// Otherwise a key that is added without a block would go before all others.
func TestACallerWithoutATierIsInTheLastTier(t *testing.T) {
	for name, block := range map[string]string{"without a block": "", "with its own": "caller plain {\nrequests 1k/day\n}", "with that of all others": "caller * {\nrequests 1k/day\n}"} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, block+twoBackends, func(t *testing.T, w *world) {
				w.used("ptu", "127%")
				w.wantAt(t, "plain", "ptu") // it asks alone
				w.wantAt(t, "web", "ptu")
				w.wantAt(t, "plain", "payg")
				w.wantPassedOver(t, "ptu", "nightly", 1)
			})
		})
	}
}

func TestATierIsBackAMinuteAfterTheLastRequestOfTheOther(t *testing.T) {
	for better, after := range map[string]bool{"web": true, "plain": false, "batch": false} {
		inBubble(t, twoBackends, func(t *testing.T, w *world) {
			w.used("ptu", "127%")
			w.wantAt(t, better, "ptu")
			time.Sleep(58 * time.Second)
			w.wantAt(t, "batch", "ptu") // the reading is stale, and a new one comes
			want := "ptu"
			if after {
				want = "payg"
			}
			w.wantAt(t, "batch", want)
			time.Sleep(2 * time.Second)
			w.wantAt(t, "batch", "ptu")
			w.wantAt(t, "batch", "ptu")
		})
	}
}

func TestAStaleReadingDoesNotKeepATierAway(t *testing.T) {
	inBubble(t, twoBackends, func(t *testing.T, w *world) {
		w.used("ptu", "100%")
		w.wantAt(t, "web", "ptu")
		w.wantAt(t, "batch", "payg")
		time.Sleep(900 * time.Millisecond) // 80 % come at .8 s
		w.wantAt(t, "batch", "ptu")
	})
}

func TestAThrottleKeepsATierAwayWithoutHeaders(t *testing.T) {
	inBubble(t, twoBackends, func(t *testing.T, w *world) {
		w.wantAt(t, "web", "ptu")
		w.Backends["ptu"].Replies(lbtest.Status(429, "Retry-After-Ms", "50"))
		w.wantAt(t, "web", "payg")
		time.Sleep(100 * time.Millisecond)
		w.Backends["ptu"].Recovers()
		w.wantAt(t, "web", "payg") // it would be refused again
		time.Sleep(100 * time.Millisecond)
		w.wantAt(t, "batch", "payg")
		w.wantAt(t, "web", "ptu")
		time.Sleep(300 * time.Millisecond)
		w.wantAt(t, "batch", "ptu")
	})
}

func TestWhereOnlySharesOfOthersAreLeftItIsA429WithTheShortestWait(t *testing.T) {
	inBubble(t, twoBackends, func(t *testing.T, w *world) {
		w.used("ptu", "200%")
		w.used("payg", "100%")
		w.wantAt(t, "web", "ptu")
		w.wantAt(t, "batch", "payg")
		for caller, wait := range map[string]string{"batch": "1000", "nightly": "1000"} {
			got := w.post(caller, "/v1/chat/completions", chat)
			got.WantError(t, http.StatusTooManyRequests, "rate_limit_exceeded")
			if ms := got.Header.Get("Retry-After-Ms"); ms != wait {
				t.Errorf("%s waits %s ms, want %s", caller, ms, wait)
			}
		}
		w.wantAt(t, "web", "ptu")
		w.wantAt(t, "web", "ptu")
		w.WantCalls(map[string]int{"ptu": 3, "payg": 1})
		w.wantPassedOver(t, "ptu", "batch", 2)
		w.wantPassedOver(t, "payg", "batch", 1)
		w.wantPassedOver(t, "payg", "nightly", 1)
	})
}

func TestTiersCountForEachModel(t *testing.T) {
	inBubble(t, twoBackends, func(t *testing.T, w *world) {
		w.used("ptu", "100%")
		w.wantAt(t, "web", "ptu")
		const other = `{"model":"gpt-4o-mini","messages":[]}`
		for range 2 {
			got := w.post("batch", "/v1/chat/completions", other)
			got.WantServed(t, "ptu")
		}
	})
}

func TestNamesOfOneDeploymentAreOneModel(t *testing.T) {
	inBubble(t, "backend http://ptu {\nmodel gpt-4o d\nmodel cheap d\n}\nbackend http://payg {\npriority 2\n}", func(t *testing.T, w *world) {
		w.used("ptu", "100%")
		w.wantAt(t, "web", "ptu")
		w.wantAt(t, "web", "ptu")
		w.post("batch", "/v1/chat/completions", `{"model":"cheap","messages":[]}`).WantServed(t, "payg")
	})
}

func TestKeysOfPromptCachesMoveAndOwnedObjectsStay(t *testing.T) {
	options := "backend http://ptu {\naccount one\n}\nbackend http://payg {\naccount two\npriority 2\n}\naffinity {\nprompt_cache\n}"
	inBubble(t, options, func(t *testing.T, w *world) {
		const cached = `{"model":"gpt-4o","prompt_cache_key":"k","messages":[]}`
		serve := lbtest.Says(200, `{"id":"resp_12345678","object":"response","output":[]}`, "Azure-OpenAI-Deployment-Utilization", "100%", "X-Backend", "ptu")
		w.Backends["ptu"].Replies(serve)
		w.post("batch", "/v1/responses", `{"model":"gpt-4o","input":"x"}`).WantServed(t, "ptu")
		w.post("batch", "/v1/chat/completions", cached).WantServed(t, "ptu")
		w.wantAt(t, "web", "ptu")
		w.post("batch", "/v1/chat/completions", cached).WantServed(t, "payg")
		w.post("batch", "/v1/responses", `{"model":"gpt-4o","previous_response_id":"resp_12345678","input":"x"}`).WantServed(t, "ptu")
		w.post("batch", "/v1/responses", `{"model":"gpt-4o","input":"x"}`).WantServed(t, "payg")
	})
}

// TestWithoutTiersNothingChanges is named after LiteLLM's PR19092, by which a
// caller alone got a quarter.
func TestWithoutTiersNothingChanges(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nclient_key web "+keys["web"]+"\nclient_key batch "+keys["batch"]+"\ncaller batch {\nrequests 1M/minute\n}\n"+twoBackends+"}", func(t *testing.T, lb *lbtest.World) {
		w := &world{lb}
		w.used("ptu", "127%")
		for range 20 {
			w.wantAt(t, "web", "ptu")
			w.wantAt(t, "batch", "ptu")
		}
	})
}
