package ratelimits

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/simulator"
)

const (
	chat      = `{"model":"gpt-4o","messages":[]}`
	openAI    = "/v1/chat/completions"
	classic   = "/openai/deployments/gpt-4o/chat/completions?api-version=1"
	aliceKey  = "key-of-alice-123"
	ofCallers = "client_key alice " + aliceKey + "\ncaller alice {\nrequests 100/minute\n}\n"
)

// says is a reply with what is left of 60 requests and 1000 tokens a minute, in
// OpenAI's words.
func says(requests, tokens int) http.HandlerFunc {
	return lbtest.Says(200, `{"id":"chatcmpl-1","choices":[]}`, left(requests, tokens)...)
}

func left(requests, tokens int) []string {
	return []string{"X-Ratelimit-Limit-Requests", "60", "X-Ratelimit-Remaining-Requests", fmt.Sprint(requests), "X-Ratelimit-Reset-Requests", "5s",
		"X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", fmt.Sprint(tokens), "X-Ratelimit-Reset-Tokens", "30s"}
}

// post sends a request to a path, as alice.
func post(w *lbtest.World, path string) lbtest.Reply {
	r := w.Request(http.MethodPost, path, strings.NewReader(chat))
	r.Header.Set("Authorization", "Bearer "+aliceKey)
	return w.Send(r)
}

// wantLimits checks the fields on rate limits: limit, remaining and reset of
// requests, and of tokens.
func wantLimits(t *testing.T, got lbtest.Reply, want ...string) {
	t.Helper()
	var fields []string
	for _, kind := range []string{"Requests", "Tokens"} {
		for _, name := range []string{"Limit", "Remaining", "Reset"} {
			if values := got.Header["X-Ratelimit-"+name+"-"+kind]; len(values) > 1 {
				t.Errorf("%s of %s has the values %q", name, kind, values)
			} else if len(values) > 0 {
				fields = append(fields, values[0])
			}
		}
	}
	if !slices.Equal(fields, want) {
		t.Errorf("the limits are %q, want %q", fields, want)
	}
	for name := range got.Header {
		if strings.HasPrefix(name, "X-Rate-Limit-") || strings.HasPrefix(name, "Anthropic-") || strings.Contains(name, "Renewal") {
			t.Errorf("the reply has %s", name)
		}
	}
}

func TestThePoolsLimitsAreSums(t *testing.T) {
	lbtest.InBubble(t, lbtest.InOrder("a b", "ratelimit_headers pool"), func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(says(50, 900))
		wantLimits(t, post(w, openAI)) // of b, nothing is known
		w.Backends["a"].Replies(lbtest.Throttled("20"))
		w.Backends["b"].Replies(says(40, 600))
		got := post(w, openAI)
		got.WantServed(t, "b")
		wantLimits(t, got, "120", "40", "5s", "2000", "600", "30s") // nothing is left of a, which cools down
		time.Sleep(21 * time.Second)
		w.Backends["a"].Replies(says(50, 900))
		wantLimits(t, post(w, openAI), "2000", "1780", "30s") // what was read of b's requests is over, and its tokens have grown
		w.Backends["a"].Replies(lbtest.Status(500))
		wantLimits(t, post(w, openAI), "120", "40", "5s", "2000", "600", "30s")
	})
}

func TestAnAzureClientGetsSeconds(t *testing.T) {
	lbtest.InBubble(t, lbtest.InOrder("a", "ratelimit_headers pool"), func(t *testing.T, w *lbtest.World) {
		w.AllReply(says(40, 600))
		wantLimits(t, post(w, classic), "60", "40", "5", "1000", "600", "30")
		wantLimits(t, post(w, "/openai/v1/chat/completions"), "60", "40", "5", "1000", "600", "30")
		wantLimits(t, post(w, openAI), "60", "40", "5s", "1000", "600", "30s")
	})
}

func TestTheBalancersOwn429HasThePoolsLimits(t *testing.T) {
	lbtest.InBubble(t, lbtest.InOrder("a b", "ratelimit_headers pool"), func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(says(50, 900))
		post(w, openAI)
		w.Backends["a"].Replies(lbtest.Throttled("20"))
		w.Backends["b"].Replies(says(40, 600))
		post(w, openAI)
		w.Backends["b"].Replies(lbtest.Throttled("8"))
		for range 2 { // the reply of a backend, and then our own
			got := post(w, openAI)
			got.WantStatus(t, 429)
			wantLimits(t, got, "120", "0", "8s", "2000", "0", "8s")
		}
	})
}

func TestABackendWithoutLimitsLeavesThePoolWithout(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b", "ratelimit_headers pool\nlb_policy round_robin"), func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(says(50, 900))
		w.Backends["b"].Replies(lbtest.Says(200, `{}`, "X-Ratelimit-Limit-Requests", "-1", "X-Ratelimit-Remaining-Requests", "-1", "X-Ratelimit-Reset-Requests", "0",
			"X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "100", "X-Ratelimit-Reset-Tokens", "60"))
		var got lbtest.Reply
		for range 4 {
			got = post(w, openAI)
		}
		wantLimits(t, got, "2000", "1000", "1m0s")
	})
}

func TestLimitsAreThoseOfTheBackendTheCallerOrNone(t *testing.T) {
	ofBackend := []string{"60", "40", "5s", "1000", "600", "30s"}
	ofAlice := []string{"100", "99", "1m0s"}
	for _, c := range []struct {
		options string
		want    []string
	}{
		{"", ofBackend},
		{"ratelimit_headers caller", ofBackend},
		{"ratelimit_headers off", nil},
		{ofCallers, ofAlice},
		{ofCallers + "ratelimit_headers caller", ofAlice},
		{ofCallers + "ratelimit_headers pool", ofBackend},
		{ofCallers + "ratelimit_headers off", nil},
	} {
		t.Run(c.options, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.InOrder("a", c.options), func(t *testing.T, w *lbtest.World) {
				w.AllReply(says(40, 600))
				wantLimits(t, post(w, openAI), c.want...)
			})
		})
	}
}

func TestAllOfABackendsLimitsAreRemoved(t *testing.T) {
	for _, options := range []string{"ratelimit_headers off", "ratelimit_headers pool", ofCallers} {
		lbtest.InBubble(t, lbtest.InOrder("a", options), func(t *testing.T, w *lbtest.World) {
			w.AllReply(lbtest.Says(400, `{"error":{}}`, "X-Rate-Limit-Limit-Tokens", "-1", "Anthropic-Ratelimit-Requests-Limit", "3", "X-Ratelimit-Renewalperiod-Tokens", "60"))
			got := post(w, openAI)
			got.WantStatus(t, 400)
			if options == ofCallers {
				wantLimits(t, got, "100", "99", "1m0s")
			} else {
				wantLimits(t, got)
			}
		})
	}
}

func TestACallersOwn429HasItsLimits(t *testing.T) {
	for options, want := range map[string][]string{"": {"100", "99", "1m0s"}, "ratelimit_headers off": nil} {
		lbtest.InBubble(t, lbtest.InOrder("a", ofCallers+options), func(t *testing.T, w *lbtest.World) {
			w.AllReply(lbtest.Throttled("20"))
			got := post(w, openAI)
			got.WantStatus(t, 429)
			wantLimits(t, got, want...)
		})
	}
}

// A client that stops when nothing is left, as careful ones do, is hardly ever
// refused after it was served.
func TestAClientThatStopsAtZeroIsHardlyEverRefused(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b", "ratelimit_headers pool"), func(t *testing.T, w *lbtest.World) {
		for name := range w.Backends {
			w.Serve(name+":80", lbtest.Simulate(t, simulator.Handler{Name: "azure", TokensPerMinute: 30_000, RequestsPerMinute: 60, OutputTokens: 100}))
		}
		refused, sent := 0, 0
		for began := time.Now(); time.Since(began) < 20*time.Minute; sent++ {
			got := post(w, classic)
			if got.Status != 200 {
				refused++
			}
			wait := 100 * time.Millisecond
			for _, kind := range []string{"Requests", "Tokens"} {
				seconds, _ := strconv.Atoi(got.Header.Get("X-Ratelimit-Reset-" + kind))
				if left := got.Header.Get("X-Ratelimit-Remaining-" + kind); left != "" && left[0] == '0' {
					wait = max(wait, time.Duration(seconds)*time.Second)
				}
			}
			time.Sleep(wait)
		}
		t.Logf("%d of %d requests were refused", refused, sent)
		if refused*100 > sent || sent < 1000 {
			t.Errorf("%d of %d requests were refused", refused, sent)
		}
	})
}
