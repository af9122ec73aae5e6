package limiter

import (
	"maps"
	"math"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

func TestACallerHasAHistoryOfAnHour(t *testing.T) {
	cs := NewLimiters(nil)
	cs.Configure(noon, func(string) Settings {
		return Settings{Limits: []ratelimit.Limit{{Kind: ratelimit.Tokens, Amount: 100, Unit: ratelimit.Minute}}, MaxRequests: 1}
	})
	c := cs.Get(noon, "alice")
	wants := func(after time.Duration, requests, tokens int64, refused map[string]uint64) {
		t.Helper()
		got := c.Snapshot(noon.Add(after)).Hour
		if got.Requests != requests || got.Tokens != tokens || !maps.Equal(got.Refused, refused) {
			t.Errorf("after %v: got %+v, want %d requests, %d tokens and %v", after, got, requests, tokens, refused)
		}
	}
	wants(0, 0, 0, nil)
	r, _ := c.admit(noon, ratelimit.Estimate{Prompt: 60})
	if _, refusal := c.admit(noon, ratelimit.Estimate{Prompt: 1}); refusal == nil || refusal.Reason != ratelimit.TooMany {
		t.Fatalf("got %+v", refusal)
	}
	r.Settle(noon, ratelimit.Cost{Requests: 1, Prompt: 50, Output: 20})
	if _, refusal := c.admit(noon, ratelimit.Estimate{Prompt: 60}); refusal == nil {
		t.Fatal("the limit does not refuse")
	}
	c.RefusedBy(noon, ratelimit.ByModel)
	wants(54*time.Minute, 1, 70, map[string]uint64{"tokens/minute": 1, "max_requests": 1, "model": 1})
	c.RefusedBy(noon.Add(30*time.Minute), ratelimit.ByReserve)
	c.RefusedBy(noon.Add(30*time.Minute), ratelimit.ByReserve)
	wants(61*time.Minute, 0, 0, map[string]uint64{"reserve": 2})
	boundary := noon.Add(65 * time.Minute).Truncate(5 * time.Minute).Sub(noon)
	wants(boundary+time.Second, 0, 0, map[string]uint64{"reserve": 2})
	wants(boundary-2*time.Second, 0, 0, map[string]uint64{"reserve": 2}) // the clock was set back a little
	wants(24*time.Hour, 0, 0, map[string]uint64{})
	wants(-24*365*40*time.Hour, 0, 0, map[string]uint64{}) // the clock was set
}

func TestEachRefusalHasAName(t *testing.T) {
	seen := make(map[string]bool)
	for by := range refusals {
		if name := refusalName(by); name == "" || seen[name] {
			t.Errorf("%d is called %q", by, name)
		} else {
			seen[name] = true
		}
	}
}

// A chat that is served must not pay for what refusals need.
func TestTheHistoryOfAServedRequestAllocatesNothing(t *testing.T) {
	c := NewLimiters(nil).Get(noon, "alice")
	if n := testing.AllocsPerRun(100, func() {
		r, _ := c.admit(noon, ratelimit.Estimate{Prompt: 60})
		r.Settle(noon, ratelimit.Cost{Requests: 1, Prompt: 50})
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
	if c.hour.refused != nil {
		t.Error("it has room for refusals")
	}
}

// TestTheLastHourOfOthersIsANumber whatever they report: any client of the
// store can make a report up.
func TestTheLastHourOfOthersIsANumber(t *testing.T) {
	part := HourPart{Number: noon.UnixNano() / partLength, Requests: math.MaxInt64, Tokens: math.MaxInt64}
	sum := SumHour(noon, []HourPart{part, part, part})
	for _, other := range []ratelimit.LastHour{sum, {Requests: math.MaxInt64, Tokens: math.MaxInt64}, {Requests: -1, Tokens: math.MinInt64}} {
		if sum.Add(other); sum.Requests < 0 || sum.Tokens < 0 {
			t.Errorf("with %+v, the sum is %+v", other, sum)
		}
	}
}
