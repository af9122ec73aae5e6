package tiers

import (
	"math"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/simulator"
)

// TestInExhaustionCallersGetFairShares has one caller ask for nine times as
// much as another one, which asks for more than its half, and a third one that
// asks for little.
func TestInExhaustionCallersGetFairShares(t *testing.T) {
	forEachPool(t, func(t *testing.T, _ string, backends []simulator.Handler) {
		got := askIn(t, "fair_shares\ntier all", backends, 4*time.Minute, map[string]demand{"all/large": steady(5.4), "all/small": steady(.6), "all/tiny": steady(.1)})
		wantOf(t, got, map[string]float64{"all/large": .45, "all/small": .45, "all/tiny": .1})
	})
}

// TestWithoutTheOptionCallersGetByHowMuchTheyAsk of a tier that keeps a share.
func TestWithoutTheOptionCallersGetByHowMuchTheyAsk(t *testing.T) {
	if lbtest.Race {
		t.Skip("it sends thousands of requests, one after the other")
	}
	got := askIn(t, "tier all {\nreserve 100%\n}", pools["three backends"], 4*time.Minute, map[string]demand{"all/large": steady(5.4), "all/small": steady(.6)})
	wantOf(t, got, map[string]float64{"all/large": .9, "all/small": .1})
}

// TestInExhaustionCallersShareWhatTheirTierGets has two callers in one tier,
// whose requests may wait.
func TestInExhaustionCallersShareWhatTheirTierGets(t *testing.T) {
	if lbtest.Race {
		t.Skip("it sends thousands of requests, one after the other")
	}
	const tiers = "fair_shares\ntier gold {\nreserve 60%\n}\ntier silver {\nreserve 40%\n}"
	for _, wait := range []string{"", "wait 1s\n"} {
		got := askIn(t, wait+tiers, pools["three backends"], 4*time.Minute, map[string]demand{"gold/large": steady(5.4), "gold/small": steady(.6), "silver": steady(2)})
		wantOf(t, got, map[string]float64{"gold/large": .3, "gold/small": .3, "silver": .4})
	}
}

// TestACallerDoesNotWaitBehindOneThatLeavesItsShare has a PTU and a long wait,
// so that requests of the large caller always wait.
func TestACallerDoesNotWaitBehindOneThatLeavesItsShare(t *testing.T) {
	if lbtest.Race {
		t.Skip("it sends thousands of requests, one after the other")
	}
	got := askIn(t, "wait 10s\nfair_shares\ntier all", pools["a PTU"], 4*time.Minute, map[string]demand{"all/large": steady(3), "all/small": steady(.3)})
	wantOf(t, got, map[string]float64{"all/large": .7, "all/small": .3})
}

// TestARequestThatMoreCapacityWouldNotServeIsDueNothing has the backend
// throttle once, another caller send requests that the backend refuses as
// mistakes, or that no backend takes, and a caller that gets all that it asks
// for.
func TestARequestThatMoreCapacityWouldNotServeIsDueNothing(t *testing.T) {
	const backends = "fair_shares\nbackend http://b {\nmodel gpt-4o\nshared_limits\n}\nbackend http://other {\nmodel gpt-5\n}\n" +
		"client_key large sk-large-0123456789\nclient_key small sk-small-0123456789\n"
	for name, tc := range map[string]struct {
		options string
		reply   http.HandlerFunc
		status  int
	}{
		"a mistake":         {"", lbtest.Status(400), 400},
		"not allowed there": {"caller small {\nbackends other\n}", nil, 404},
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, "openai_lb {\npool "+lbtest.Unique("tiers")+"\n"+backends+tc.options+"\n}", func(t *testing.T, w *lbtest.World) {
				post := func(caller string) lbtest.Reply {
					r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(chat))
					r.Header.Set("Authorization", "Bearer sk-"+caller+"-0123456789")
					return w.Send(r)
				}
				b := w.Backends["b"]
				b.Recovers()
				post("large")
				b.Replies(lbtest.Status(429, "Retry-After-Ms", "50"))
				post("large")
				time.Sleep(5 * time.Second)
				for range 5 {
					if tc.reply != nil {
						b.Replies(tc.reply)
					}
					if got := post("small"); got.Status != tc.status {
						t.Fatalf("the other caller got %d: %s", got.Status, got.Body)
					}
					b.Replies(lbtest.Says(200, `{"id":"chatcmpl-1","choices":[]}`, "Azure-OpenAI-Deployment-Utilization", "80%"))
					if got := post("large"); got.Status != http.StatusOK {
						t.Fatalf("got %d: %s", got.Status, got.Body)
					}
				}
			})
		})
	}
}

// wantOf checks what callers get from the second to the fourth minute.
func wantOf(t *testing.T, got map[string][]part, want map[string]float64) {
	t.Helper()
	used := 0.
	for name, part := range want {
		p := between(got[name], 60, 240)
		used += p.served
		t.Logf("%s gets %.3f of %.3f", name, p.served, p.sent)
		if math.Abs(p.served-part) > .05 {
			t.Errorf("%s gets %.3f of %.3f, want %.3f", name, p.served, p.sent, part)
		}
	}
	if used < .96 {
		t.Errorf("%.3f of the capacity is used", used)
	}
}
