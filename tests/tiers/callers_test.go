package tiers

import (
	"math"
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
		got := askIn(t, "tier all {\nreserve 100%\n}", backends, 4*time.Minute, map[string]demand{"all/large": steady(5.4), "all/small": steady(.6), "all/tiny": steady(.1)})
		wantOf(t, got, map[string]float64{"all/large": .45, "all/small": .45, "all/tiny": .1})
	})
}

// TestInExhaustionCallersShareWhatTheirTierGets has two callers in one tier,
// whose requests may wait.
func TestInExhaustionCallersShareWhatTheirTierGets(t *testing.T) {
	if lbtest.Race {
		t.Skip("it sends thousands of requests, one after the other")
	}
	const tiers = "tier gold {\nreserve 60%\n}\ntier silver {\nreserve 40%\n}"
	for _, wait := range []string{"", "wait 1s\n"} {
		got := askIn(t, wait+tiers, pools["three backends"], 4*time.Minute, map[string]demand{"gold/large": steady(5.4), "gold/small": steady(.6), "silver": steady(2)})
		wantOf(t, got, map[string]float64{"gold/large": .3, "gold/small": .3, "silver": .4})
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
