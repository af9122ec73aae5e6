package limiter

import (
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// noon is in the middle of a day and a month, at the beginning of a minute.
var noon = time.Date(2026, 11, 15, 12, 0, 0, 0, time.UTC)

// callerWith returns a caller that has used nothing, with a hook, which may be
// nil.
func callerWith(hook func(ratelimit.Crossing)) *Limiter {
	return newLimiter("alice", ratelimit.IDOf("alice"), hook, new(reports))
}

// limits reads the limits of a caller, such as "tokens 5M/day".
func limits(t testing.TB, texts ...string) (limits []ratelimit.Limit) {
	t.Helper()
	for _, text := range texts {
		kind := ratelimit.Requests
		if text[0] == 't' {
			kind = ratelimit.Tokens
		}
		l, err := ratelimit.ParseLimit(kind, text[len(kind.String())+1:])
		if err != nil {
			t.Fatal(err)
		}
		limits = append(limits, l)
	}
	return limits
}

func caller(t testing.TB, texts ...string) *Limiter {
	t.Helper()
	c := callerWith(nil)
	c.Change(noon, Settings{Limits: limits(t, texts...)})
	return c
}

// exactly estimates a cost that is known: the ratio and the usual output do not
// change it.
func exactly(tokens int64) ratelimit.Estimate { return ratelimit.Estimate{Prompt: tokens} }

func spent(tokens int64) ratelimit.Cost { return ratelimit.Cost{Requests: 1, Prompt: tokens} }

// admit is Try, and counts a refusal.
func (c *Limiter) admit(now time.Time, e ratelimit.Estimate) (Reservation, *ratelimit.Refusal) {
	r, refusal := c.Try(now, e)
	if refusal != nil {
		c.Refused(now, refusal)
	}
	return r, refusal
}

func admitted(t testing.TB, c *Limiter, now time.Time, e ratelimit.Estimate) Reservation {
	t.Helper()
	r, refusal := c.admit(now, e)
	if refusal != nil {
		t.Fatalf("%+v at %s is refused: %+v", e, now, *refusal)
	}
	return r
}

func refused(t testing.TB, c *Limiter, now time.Time, e ratelimit.Estimate) ratelimit.Refusal {
	t.Helper()
	_, refusal := c.admit(now, e)
	if refusal == nil {
		t.Fatalf("%+v at %s is admitted", e, now)
	}
	return *refusal
}

func used(t testing.TB, c *Limiter, now time.Time, text string) int64 {
	t.Helper()
	id := limits(t, "tokens 1/second")[0].ID()
	if err := id.UnmarshalText([]byte(text)); err != nil {
		t.Fatal(err)
	}
	for _, u := range c.Snapshot(now).Limits {
		if u.Limit.ID() == id {
			return u.Used
		}
	}
	t.Fatalf("no limit %s", text)
	return 0
}

// The first request must not be refused for ever because its estimate exceeds
// the limit, and requests that come together must not all be the first (LiteLLM
// PR28805, #40095).
func TestOfFiftyParallelFirstRequestsALimitOfOneAdmitsOne(t *testing.T) {
	for _, limit := range []string{"requests 1/minute", "tokens 1/minute", "requests 1/day", "tokens 1/month"} {
		c := caller(t, limit)
		var admitted atomic.Int64
		var all sync.WaitGroup
		for range 50 {
			all.Go(func() {
				if _, refusal := c.admit(noon, ratelimit.Estimate{Prompt: 1, Output: ratelimit.Undeclared}); refusal == nil {
					admitted.Add(1)
				}
			})
		}
		all.Wait()
		if got := admitted.Load(); got != 1 {
			t.Errorf("%s: %d requests are admitted", limit, got)
		}
	}
}

// LiteLLM reserved 1,025 tokens for a request that declared none, so a limit of
// 1,000 admitted nothing (PR29193).
func TestALimitOf100AdmitsARequestWithoutMaxTokens(t *testing.T) {
	c := caller(t, "tokens 100/minute")
	r := admitted(t, c, noon, ratelimit.Estimate{Prompt: 20, Output: ratelimit.Undeclared})
	if prompt, output := r.Estimated(); prompt != 20 || output != 256 {
		t.Errorf("the estimate is %d and %d", prompt, output)
	}
	refused(t, c, noon, ratelimit.Estimate{Prompt: 20, Output: ratelimit.Undeclared})
	r.Settle(noon, ratelimit.Cost{Requests: 1, Prompt: 20, Output: 10, Counted: true})
	if got := used(t, c, noon, "tokens/minute"); got != 30 {
		t.Errorf("%d tokens are used", got)
	}
}

func TestAPromptThatExceedsTheLimitAloneIsTooLarge(t *testing.T) {
	for _, limit := range []string{"tokens 100/minute", "tokens 100/day"} {
		c := caller(t, limit)
		admitted(t, c, noon, exactly(100)).settle(noon)
		if got := refused(t, c, noon.Add(24*time.Hour), exactly(101)); got.Reason != ratelimit.TooLarge || got.Requested != 101 || got.Wait != 0 {
			t.Errorf("%s: %+v", limit, got)
		}
	}
	c := callerWith(nil)
	l := limits(t, "tokens 100/day")
	l[0].Then = "nightly"
	c.Change(noon, Settings{Limits: l, Tiers: []string{"nightly"}})
	for want := range 2 { // the first one is an idle caller's
		if r := admitted(t, c, noon, exactly(101)); r.Tier() != want {
			t.Errorf("the request has the tier %d, want %d", r.Tier(), want)
		}
	}
}

// settle ends a request that cost as much as it was expected to.
func (r Reservation) settle(now time.Time) {
	r.Settle(now, ratelimit.Cost{Requests: 1, Prompt: r.prompt, Output: r.output})
}

// APISIX and WSO2 charged the limits that came first in a list for requests
// that a later one refused (wso2/api-platform#3116).
// TestAnIdleCallerWhosePromptsWereLongerThanTheyLookedIsAdmitted has prompts
// that backends have most of: a response that goes on from an earlier one, say.
// An estimate that learned from them must not refuse other prompts for ever.
func TestAnIdleCallerWhosePromptsWereLongerThanTheyLookedIsAdmitted(t *testing.T) {
	c, now := caller(t, "tokens 1000/minute"), noon
	for range 20 {
		r := admitted(t, c, now, ratelimit.Estimate{Prompt: 10, Output: 1})
		r.Settle(now, ratelimit.Cost{Requests: 1, Prompt: 100, Output: 1, Counted: true})
		now = now.Add(2 * time.Minute)
	}
	r := admitted(t, c, now, ratelimit.Estimate{Prompt: 300, Output: 1})
	if got := refused(t, c, now, ratelimit.Estimate{Prompt: 300, Output: 1}); got.Reason != ratelimit.OverRate {
		t.Errorf("the next one is refused with %+v", got)
	}
	r.Settle(now, ratelimit.Cost{Requests: 1, Prompt: 300, Output: 1, Counted: true})
	if got := refused(t, c, now.Add(2*time.Minute), ratelimit.Estimate{Prompt: 1001, Output: 1}); got.Reason != ratelimit.TooLarge {
		t.Errorf("a prompt that looks longer than the limit is refused with %+v", got)
	}
}

func TestARefusedRequestChargesNoLimit(t *testing.T) {
	c := caller(t, "requests 10/minute", "requests 1/hour", "tokens 1k/minute")
	admitted(t, c, noon, exactly(5)).settle(noon)
	for range 100 {
		refused(t, c, noon, exactly(5))
	}
	for text, want := range map[string]int64{"requests/minute": 1, "requests/hour": 1, "tokens/minute": 5} {
		if got := used(t, c, noon, text); got != want {
			t.Errorf("%s: %d are used, want %d", text, got, want)
		}
	}
	s := c.Snapshot(noon)
	if s.InFlight != 0 || s.Reserved != 0 || s.Limits[1].Refused != 100 || s.Limits[0].Refused != 0 {
		t.Errorf("got %+v", s)
	}
}

// An SDK that retries when it is told to gets through: refusals do not prolong
// the wait (LiteLLM #39726).
func TestAnSDKThatRetriesAfterA429DoesNotLockItselfOut(t *testing.T) {
	for _, limit := range []string{"tokens 100/second", "tokens 100/minute", "tokens 100/hour", "tokens 100/day"} {
		c := caller(t, limit)
		now := noon.Add(333 * time.Millisecond)
		for range 300 {
			_, refusal := c.admit(now, exactly(7))
			if refusal == nil {
				continue
			}
			for range 3 {
				if again := refused(t, c, now.Add(refusal.Wait/2), exactly(7)); again.Wait != refusal.Wait-refusal.Wait/2 {
					t.Fatalf("%s: after half of %s the wait is %s", limit, refusal.Wait, again.Wait)
				}
			}
			refused(t, c, now.Add(refusal.Wait-1), exactly(7))
			now = now.Add(refusal.Wait)
			admitted(t, c, now, exactly(7))
		}
	}
}

func TestAWindowSlides(t *testing.T) {
	for after, want := range map[time.Duration]struct{ burst, even int64 }{
		59 * time.Second: {60, 60}, 60*time.Second - 1: {60, 60}, 60 * time.Second: {0, 60}, 61 * time.Second: {0, 59}, 61*time.Second - 1: {0, 59},
		62 * time.Second: {0, 57}, 92*time.Second + 1: {0, 27}, 119 * time.Second: {0, 0}, // a part of a token counts as one
	} {
		burst, even := caller(t, "tokens 60/minute"), caller(t, "tokens 60/minute")
		admitted(t, burst, noon, exactly(60)).settle(noon)
		for second := range 60 {
			now := noon.Add(time.Duration(second) * time.Second)
			admitted(t, even, now, exactly(1)).settle(now)
		}
		if got := used(t, burst, noon.Add(after), "tokens/minute"); got != want.burst {
			t.Errorf("%s after a burst %d are used, want %d", after, got, want.burst)
		}
		if got := used(t, even, noon.Add(after), "tokens/minute"); got != want.even {
			t.Errorf("%s after requests each second %d are used, want %d", after, got, want.even)
		}
	}
	c := caller(t, "tokens 60/minute")
	admitted(t, c, noon, exactly(60)).settle(noon)
	if got := refused(t, c, noon.Add(10*time.Second), exactly(20)); got.Wait != 50*time.Second || got.Used != 60 || got.Requested != 20 || got.Reason != ratelimit.OverRate {
		t.Errorf("got %+v", got)
	}
}

func TestOfTwoRefusalsTheLongerWaitCounts(t *testing.T) {
	c := caller(t, "tokens 100/minute", "requests 1/day", "tokens 100/hour")
	admitted(t, c, noon, exactly(100)).settle(noon)
	if got := refused(t, c, noon, exactly(1)); got.Reason != ratelimit.OverQuota || got.Limit.String() != "1/day" || got.Wait != 12*time.Hour {
		t.Errorf("got %+v", got)
	}
	c = caller(t, "tokens 100/hour", "tokens 100/minute")
	admitted(t, c, noon, exactly(100)).settle(noon)
	if got := refused(t, c, noon, exactly(1)); got.Limit.String() != "100/hour" {
		t.Errorf("got %+v", got)
	}
}

// agentgateway forgives an overshoot: its counter never goes below 0.
func TestADebtStays(t *testing.T) {
	c := caller(t, "tokens 100/minute", "tokens 1k/day")
	r := admitted(t, c, noon, exactly(10))
	r.Settle(noon.Add(time.Second), spent(1000))
	if got := used(t, c, noon.Add(time.Second), "tokens/minute"); got != 1000 {
		t.Errorf("%d are used", got)
	}
	got := refused(t, c, noon.Add(time.Second), exactly(10))
	if got.Limit.Unit != ratelimit.Day || got.Reason != ratelimit.OverQuota {
		t.Errorf("got %+v", got)
	}
	c = caller(t, "tokens 100/minute")
	r = admitted(t, c, noon, exactly(10))
	r.Settle(noon, spent(1000))
	if got := refused(t, c, noon, exactly(10)); got.Wait != 9*time.Minute+6*time.Second+1 { // 900 are owed, of which 90 may be left
		t.Errorf("got %+v", got)
	}
}

func TestAnExcessGoesBackToTheWindowThatItCameFrom(t *testing.T) {
	c := caller(t, "tokens 100/minute")
	first, second := admitted(t, c, noon, exactly(30)), admitted(t, c, noon, exactly(30))
	admitted(t, c, noon.Add(2400*time.Millisecond), exactly(30)).settle(noon.Add(2400 * time.Millisecond))
	later := noon.Add(62 * time.Second) // the 90 count without a 24th of the limit
	if got := used(t, c, later, "tokens/minute"); got != 86 {
		t.Fatalf("%d are used", got)
	}
	if first.Settle(later, spent(10)); used(t, c, later, "tokens/minute") != 66 {
		t.Errorf("after an excess of 20 %d are used", used(t, c, later, "tokens/minute"))
	}
	if second.Settle(later, spent(40)); used(t, c, later, "tokens/minute") != 76 {
		t.Errorf("after a shortfall of 10 %d are used", used(t, c, later, "tokens/minute"))
	}
	r := admitted(t, c, later, exactly(5))
	if r.Settle(later.Add(time.Hour), spent(1)); used(t, c, later.Add(time.Hour), "tokens/minute") != 0 {
		t.Errorf("a window that is not kept got something back")
	}
	c = caller(t, "tokens 100/minute")
	first, second = admitted(t, c, noon, exactly(30)), admitted(t, c, noon.Add(30*time.Second), exactly(30))
	if first.Settle(noon.Add(40*time.Second), spent(10)); used(t, c, noon.Add(70*time.Second), "tokens/minute") != 30 {
		t.Errorf("an excess came from another part")
	}
	c.Change(noon.Add(70*time.Second), Settings{})
	c.Change(noon.Add(70*time.Second), Settings{Limits: limits(t, "tokens 100/minute")}) // its parts are not known any more
	// the 40 count as if they had been spread over half a minute; 25 of them
	// are taken from the 31st second and then from the end
	if second.Settle(noon.Add(70*time.Second), spent(5)); used(t, c, noon.Add(70*time.Second), "tokens/minute") != 15 {
		t.Errorf("of a window without known parts %d are used", used(t, c, noon.Add(70*time.Second), "tokens/minute"))
	}
}

func TestAStreamOverMidnight(t *testing.T) {
	for _, c := range []struct{ cost, yesterday, today int64 }{{30, 30, 0}, {130, 100, 30}, {0, 0, 0}} {
		a := caller(t, "tokens 1k/day", "requests 10/day")
		evening := time.Date(2026, 11, 15, 23, 59, 59, 0, time.UTC)
		r := admitted(t, a, evening, exactly(100))
		morning := evening.Add(2 * time.Second)
		if got := used(t, a, morning, "tokens/day"); got != 0 {
			t.Errorf("the day begins with %d", got)
		}
		r.Settle(morning, spent(c.cost))
		entries := a.Report(morning, 1, nil)
		got := make(map[string]int64)
		for _, e := range entries {
			if e.Window == windowAt(e.ID.Unit(), evening.UnixNano(), time.UTC).index {
				got["evening "+e.ID.String()] = e.Used
			} else {
				got["morning "+e.ID.String()] = e.Used
			}
		}
		if got["evening tokens/day"] != c.yesterday || got["morning tokens/day"] != c.today || got["evening requests/day"] != 1 || got["morning requests/day"] != 0 ||
			got["evening tokens/month"] != c.cost {
			t.Errorf("%d tokens: %v", c.cost, got)
		}
	}
}

// LiteLLM reset budgets at 15:43 (#10288).
func TestTheDaysWhenSummerTimeBeginsAndEnds(t *testing.T) {
	for day, length := range map[string]time.Duration{"2026-03-29": 23 * time.Hour, "2026-10-25": 25 * time.Hour, "2026-11-22": 24 * time.Hour} {
		c := callerWith(nil)
		c.Change(noon, Settings{Limits: limits(t, "tokens 100/day"), Location: zone(t, "Europe/Berlin")})
		begin, err := time.ParseInLocation(time.DateOnly, day, zone(t, "Europe/Berlin"))
		if err != nil {
			t.Fatal(err)
		}
		admitted(t, c, begin.Add(-time.Nanosecond), exactly(100)).settle(begin)
		admitted(t, c, begin, exactly(100)).settle(begin)
		if got := refused(t, c, begin, exactly(1)); got.Wait != length {
			t.Errorf("%s: the wait is %s", day, got.Wait)
		}
		refused(t, c, begin.Add(length-1), exactly(1))
		admitted(t, c, begin.Add(length), exactly(1))
	}
}

func TestALimitThatAReloadLowersKeepsItsUse(t *testing.T) {
	c := caller(t, "tokens 1k/minute", "tokens 1k/day")
	admitted(t, c, noon, exactly(400)).settle(noon)
	running := admitted(t, c, noon, exactly(100))
	c.Change(noon, Settings{Limits: limits(t, "tokens 450/minute", "requests 10/minute")})
	if got := refused(t, c, noon, exactly(10)); got.Used != 500 || got.Limit.Amount != 450 {
		t.Errorf("got %+v", got)
	}
	running.Settle(noon, spent(20))
	if got := used(t, c, noon, "tokens/minute"); got != 420 {
		t.Errorf("%d are used", got)
	}
	if got := used(t, c, noon, "requests/minute"); got != 1 {
		t.Errorf("the new limit has counted %d requests", got)
	}
	admitted(t, c, noon, exactly(10)).settle(noon)
	running = admitted(t, c, noon, exactly(15))
	c.Change(noon, Settings{Limits: limits(t, "tokens 1k/day")})
	running.Settle(noon, spent(5))
	c.Change(noon, Settings{Limits: limits(t, "tokens 1k/minute", "tokens 1k/day")})
	if got := used(t, c, noon, "tokens/minute"); got != 435 {
		t.Errorf("of a limit that was taken away for a while %d are used", got)
	}
	if got := used(t, c, noon, "tokens/day"); got != 435 {
		t.Errorf("of the day %d are used", got)
	}
	if s := c.Snapshot(noon); s.Reserved != 0 || s.InFlight != 0 {
		t.Errorf("got %+v", s)
	}
}

// TestALimitThatAReloadLowersByMuchDoesNotPanic has a caller with a large limit
// by the hour owe some millions of tokens. Then its limit is lowered to almost
// nothing, to stop it.
func TestALimitThatAReloadLowersByMuchDoesNotPanic(t *testing.T) {
	now := time.Date(2026, 11, 22, 9, 0, 0, 0, time.UTC)
	hour := func(amount int64) Settings {
		return Settings{Limits: []ratelimit.Limit{{Kind: ratelimit.Tokens, Unit: ratelimit.Hour, Amount: amount}}}
	}
	c := newLimiter("alice", ratelimit.IDOf("alice"), nil, &reports{})
	c.Change(now, hour(10_000_000))
	var open []Reservation
	for range 40 {
		r, refusal := c.Try(now, ratelimit.Estimate{Prompt: 200_000, Output: 10, Model: "m"})
		if refusal != nil {
			break
		}
		open = append(open, r)
	}
	for i := range open {
		now = now.Add(time.Second)
		open[i].Settle(now, ratelimit.Cost{Requests: 1, Prompt: 500_000, Output: 10, Counted: true, Model: "m"})
	}
	c.Change(now, hour(1))
	refusal := c.Check(now, ratelimit.Estimate{Prompt: 1, Model: "m"})
	if refusal == nil || refusal.Wait < time.Hour || refusal.Wait > 62*time.Hour {
		t.Errorf("got %+v, want a wait of 1 to 62 h", refusal)
	}
}

func TestATimeZoneThatAReloadChangesKeepsTheUse(t *testing.T) {
	c := caller(t, "tokens 100/day")
	admitted(t, c, noon, exactly(60)).settle(noon)
	c.Change(noon, Settings{Limits: limits(t, "tokens 100/day"), Location: zone(t, "Europe/Berlin")})
	if got := refused(t, c, noon, exactly(60)); got.Used != 60 || got.Wait != 11*time.Hour {
		t.Errorf("got %+v", got)
	}
}

func TestARequestOverALimitGetsAnotherTier(t *testing.T) {
	l := limits(t, "tokens 100/day", "tokens 200/month", "requests 5/minute")
	l[0].Then, l[1].Then = "batch", "nightly"
	c := callerWith(nil)
	settings := Settings{Limits: l, Tiers: []string{"interactive", "batch", "nightly"}}
	c.Change(noon, settings)
	for i, want := range []int{0, 2, 3, 3, 3} {
		r := admitted(t, c, noon, exactly(100))
		if r.Tier() != want {
			t.Errorf("request %d has the tier %d, want %d", i, r.Tier(), want)
		}
		r.settle(noon)
	}
	if got := refused(t, c, noon, exactly(100)); got.Limit.Unit != ratelimit.Minute {
		t.Errorf("got %+v", got)
	}
	s := c.Snapshot(noon)
	if s.Limits[1].Demoted != 4 || s.Limits[2].Demoted != 3 || s.Limits[1].Refused != 0 || s.Today != 500 {
		t.Errorf("got %+v", s)
	}
	settings.Tier = "nightly"
	c.Change(noon, settings)
	c.Change(noon.Add(24*time.Hour), settings)
	if r := admitted(t, c, noon.Add(24*time.Hour), exactly(1)); r.Tier() != 3 {
		t.Errorf("of its own it has the tier %d", r.Tier())
	}
}

// LiteLLM's slots leak when a stream is cancelled: the key is dead for an hour
// (#20256, #27955).
func TestASlotIsFreeWhenItsRequestIsOver(t *testing.T) {
	c := callerWith(nil)
	c.Change(noon, Settings{MaxRequests: 2})
	first := admitted(t, c, noon, exactly(1))
	admitted(t, c, noon, exactly(1))
	if got := refused(t, c, noon, exactly(1)); got.Reason != ratelimit.TooMany || got.Allowed != 2 || got.Used != 2 {
		t.Errorf("got %+v", got)
	}
	first.Settle(noon, ratelimit.Cost{})
	first.Settle(noon, ratelimit.Cost{}) // does nothing
	if got := c.Snapshot(noon); got.InFlight != 1 || got.Busy != 1 || got.Today != 1 {
		t.Errorf("got %+v", got)
	}
	admitted(t, c, noon, exactly(1))
	refused(t, c, noon, exactly(1))
}

func TestARequestThatWasNotSentCostsNothing(t *testing.T) {
	c := caller(t, "requests 10/minute", "tokens 100/day")
	r := admitted(t, c, noon, exactly(50))
	r.Settle(noon, ratelimit.Cost{})
	r = admitted(t, c, noon, exactly(50))
	r.Settle(noon, ratelimit.Cost{Requests: 1}) // its client's own error
	for text, want := range map[string]int64{"requests/minute": 1, "tokens/day": 0} {
		if got := used(t, c, noon, text); got != want {
			t.Errorf("%s: %d are used, want %d", text, got, want)
		}
	}
	var none Reservation
	none.Settle(noon, spent(1))
	if none.Open() || none.Tier() != 0 {
		t.Errorf("a request without a caller has %+v", none)
	}
}

func TestARequestWithoutTokensIsRefusedByNoLimitOfTokens(t *testing.T) {
	c := caller(t, "tokens 100/minute", "requests 3/minute")
	admitted(t, c, noon, exactly(100)).settle(noon)
	admitted(t, c, noon, ratelimit.Estimate{}).settle(noon)
	admitted(t, c, noon, ratelimit.Estimate{}).settle(noon)
	if got := refused(t, c, noon, ratelimit.Estimate{}); got.Limit.Kind != ratelimit.Requests {
		t.Errorf("got %+v", got)
	}
}

// A caller could reserve next to nothing with a small max_tokens and have a
// large output (LiteLLM PR37001): the shortfall is charged, and the usual
// output follows.
func TestEstimatesFollowWhatRequestsReallyCost(t *testing.T) {
	c := caller(t, "tokens 1000G/day")
	for range 100 {
		r := admitted(t, c, noon, ratelimit.Estimate{Prompt: 100, Output: ratelimit.Undeclared})
		r.Settle(noon, ratelimit.Cost{Requests: 1, Prompt: 150, Output: 1000, Counted: true})
	}
	for _, want := range []struct{ declared, output, most int64 }{{ratelimit.Undeclared, 1990, 2000}, {1, 1, 1}, {10000, 1990, 2000}, {0, 0, 0}} {
		r := admitted(t, c, noon, ratelimit.Estimate{Prompt: 1000, Output: want.declared})
		if prompt, output := r.Estimated(); prompt < 1490 || prompt > 1501 || output < want.output || output > want.most {
			t.Errorf("%d declared: the estimate is %d and %d", want.declared, prompt, output)
		}
		r.Settle(noon, ratelimit.Cost{})
	}
	for range 1000 {
		r := admitted(t, c, noon, ratelimit.Estimate{Prompt: 1, Output: 0})
		r.Settle(noon, ratelimit.Cost{Requests: 1, Prompt: 1_000_000, Counted: true})
	}
	s := c.Snapshot(noon)
	if s.Ratio != 4 || s.Output < 990 {
		t.Errorf("the ratio is %g, the usual output %g", s.Ratio, s.Output)
	}
	for range 1000 {
		r := admitted(t, c, noon, ratelimit.Estimate{Prompt: 1_000_000, Output: ratelimit.Undeclared})
		r.Settle(noon, ratelimit.Cost{Requests: 1, Prompt: 1, Counted: true})
	}
	if s = c.Snapshot(noon); s.Ratio != 1.0/8 || s.Output > 0.1 {
		t.Errorf("the ratio is %g, the usual output %g", s.Ratio, s.Output)
	}
	r := admitted(t, c, noon, ratelimit.Estimate{Prompt: 1, Output: ratelimit.Undeclared})
	if prompt, output := r.Estimated(); prompt != 1 || output != 1 {
		t.Errorf("the least estimate is %d and %d", prompt, output)
	}
	r.Settle(noon, ratelimit.Cost{Requests: 1, Prompt: 500, Output: 500}) // an estimate of ours teaches nothing
	if s = c.Snapshot(noon); s.Ratio != 1.0/8 || s.Output > 0.1 {
		t.Errorf("the ratio is %g, the usual output %g", s.Ratio, s.Output)
	}
}

// One model answers in a few tokens, and another one thinks for thousands; a
// third one is asked about images.
func TestEstimatesForOneModelDoNotFollowWhatAnotherCosts(t *testing.T) {
	c := caller(t, "tokens 1000G/day")
	uses := map[string]ratelimit.Cost{"short": {Prompt: 100, Output: 10}, "long": {Prompt: 100, Output: 8000}, "images": {Prompt: 300, Output: 10}}
	for range 30 {
		for model, cost := range uses {
			r := admitted(t, c, noon, ratelimit.Estimate{Prompt: 100, Output: ratelimit.Undeclared, Model: model})
			cost.Requests, cost.Counted, cost.Model = 1, true, model
			r.Settle(noon, cost)
		}
	}
	for model, cost := range uses {
		r := admitted(t, c, noon, ratelimit.Estimate{Prompt: 100, Output: ratelimit.Undeclared, Model: model})
		if prompt, output := r.Estimated(); prompt < cost.Prompt*9/10 || prompt > cost.Prompt*11/10 || output < cost.Output*19/10 || output > cost.Output*2+20 {
			t.Errorf("%s: the estimate is %d and %d, want about %d and twice %d", model, prompt, output, cost.Prompt, cost.Output)
		}
		r.Settle(noon, ratelimit.Cost{})
	}
}

// TestAnAbsurdReportIsForgottenSoon has a backend report more tokens for one
// request than any model reads or writes.
func TestAnAbsurdReportIsForgottenSoon(t *testing.T) {
	for _, absurd := range []ratelimit.Cost{
		{Requests: 1, Prompt: 100, Output: ratelimit.MaxAmount, Counted: true},
		{Requests: 1, Prompt: ratelimit.MaxAmount, Output: 20, Counted: true},
	} {
		c, now := caller(t, "tokens 500k/minute"), noon
		r := admitted(t, c, now, ratelimit.Estimate{Prompt: 100, Output: ratelimit.Undeclared})
		r.Settle(now, absurd)
		for range 32 { // it may send one request in each window at least
			now = now.Add(4 * time.Minute)
			r := admitted(t, c, now, ratelimit.Estimate{Prompt: 100, Output: ratelimit.Undeclared})
			r.Settle(now, ratelimit.Cost{Requests: 1, Prompt: 100, Output: 20, Counted: true})
		}
		now = now.Add(4 * time.Minute)
		if r, _ := c.Try(now, ratelimit.Estimate{Prompt: 100, Output: ratelimit.Undeclared}); r.prompt+r.output > 100_000 {
			t.Errorf("%+v: after 32 usual requests, the next one is charged with %d and %d tokens", absurd, r.prompt, r.output)
		}
	}
}

func TestAMarkIsReportedOnceInAWindow(t *testing.T) {
	var crossed []ratelimit.Crossing
	var c *Limiter
	var at time.Time
	c = callerWith(func(x ratelimit.Crossing) {
		c.Snapshot(at) // no lock is held
		crossed = append(crossed, x)
	})
	c.Change(noon, Settings{Limits: limits(t, "tokens 100/day", "tokens 1k/month")})
	day := func(tokens ...int64) (percents []int) {
		crossed = nil
		for _, n := range tokens {
			if r, refusal := c.admit(at, exactly(n)); refusal == nil {
				r.settle(at)
			}
		}
		for _, x := range crossed {
			if x.Caller != "alice" || x.Limit.Unit != ratelimit.Day || x.Allowed != 100 {
				t.Errorf("got %+v", x)
			}
			percents = append(percents, x.Percent)
		}
		return percents
	}
	for i, c := range []struct {
		tokens []int64
		want   []int
	}{
		{[]int64{79}, nil},
		{[]int64{79, 1}, []int{80}},
		{[]int64{80, 5, 5}, []int{80}},
		{[]int64{80, 5, 15, 1, 1}, []int{80, 100}},
		{[]int64{100, 1}, []int{100}},
		{[]int64{90, 20, 20}, []int{80, 100}},
		{[]int64{101}, nil}, // too large
	} {
		at = noon.Add(time.Duration(i) * 24 * time.Hour)
		got := day(c.tokens...)
		if !slices.Equal(got, c.want) {
			t.Errorf("%v: got %v, want %v", c.tokens, got, c.want)
		}
	}
}

func TestTheTightestLimitIsTheOneWithTheSmallestPartLeft(t *testing.T) {
	c := caller(t, "tokens 1k/minute", "tokens 100k/day", "requests 10/minute")
	if u := c.Tightest(noon, "")[ratelimit.Tokens]; u.Left() != 1000 || u.Reset != 0 {
		t.Errorf("got %+v", u)
	}
	admitted(t, c, noon.Add(45*time.Second), exactly(900)).settle(noon.Add(45 * time.Second))
	if u := c.Tightest(noon.Add(45*time.Second), "")[ratelimit.Tokens]; u.Limit.Unit != ratelimit.Minute || u.Left() != 100 || u.Reset != time.Minute {
		t.Errorf("got %+v", u)
	}
	if u := c.Tightest(noon.Add(75*time.Second), "")[ratelimit.Tokens]; u.Used != 900 || u.Reset != 30*time.Second {
		t.Errorf("got %+v", u)
	}
	if u := c.Tightest(noon.Add(3*time.Minute), "")[ratelimit.Tokens]; u.Limit.Unit != ratelimit.Day || u.Left() != 99_100 || u.Reset != 12*time.Hour-3*time.Minute {
		t.Errorf("got %+v", u)
	}
	if u := caller(t, "tokens 1/day").Tightest(noon, "")[ratelimit.Requests]; u.Limit.Amount != 0 {
		t.Error("there is a limit of requests")
	}
}

func TestAClockThatIsSetBackLosesNoUse(t *testing.T) {
	c := caller(t, "tokens 100/day")
	midnight := noon.Add(12 * time.Hour)
	admitted(t, c, midnight.Add(-time.Hour), exactly(50)).settle(noon)
	admitted(t, c, midnight, exactly(20)).settle(midnight)
	for _, b := range []struct {
		back time.Duration
		want int64
	}{{time.Second, 20}, {2 * time.Hour, 70}} {
		if got := used(t, c, midnight.Add(-b.back), "tokens/day"); got != b.want {
			t.Errorf("%s back: %d are used, want %d", b.back, got, b.want)
		}
	}
}

func TestTheLargestFiguresDoNotOverflow(t *testing.T) {
	c := caller(t, "tokens 1000000G/minute", "tokens 1000000G/month")
	now := noon
	for range 10_000 {
		r, refusal := c.admit(now, ratelimit.Estimate{Prompt: 1 << 62, Output: 1 << 62})
		if refusal != nil {
			r, refusal = c.admit(now, ratelimit.Estimate{})
		}
		if refusal != nil {
			t.Fatal(refusal)
		}
		r.Settle(now, ratelimit.Cost{Requests: 1, Prompt: 1 << 62, Output: 1 << 62, Counted: true})
		now = now.Add(time.Second)
		if s := c.Snapshot(now); s.Month <= 0 || s.Limits[0].Used < 0 || s.Reserved != 0 {
			t.Fatalf("got %+v", s)
		}
	}
	r := admitted(t, c, now, ratelimit.Estimate{})
	r.Settle(now, ratelimit.Cost{Requests: -5, Prompt: -5, Output: -7})
	refused(t, c, now, exactly(1))
}

func BenchmarkAdmitAndSettle(b *testing.B) {
	for _, c := range []struct {
		name   string
		limits []string
	}{
		{"typical", []string{"requests 1M/minute", "tokens 1000G/minute", "tokens 100000G/day"}},
		{"all ten", []string{"requests 1G/second", "requests 1G/minute", "requests 1G/hour", "requests 1G/day", "requests 1000G/month",
			"tokens 1000G/second", "tokens 1000G/minute", "tokens 10000G/hour", "tokens 100000G/day", "tokens 1000000G/month"}},
	} {
		b.Run(c.name, func(b *testing.B) {
			a := caller(b, c.limits...)
			b.ReportAllocs()
			now := noon
			for b.Loop() {
				now = now.Add(100 * time.Microsecond)
				r, refusal := a.admit(now, ratelimit.Estimate{Prompt: 1000, Output: 500})
				if refusal != nil {
					b.Fatal(*refusal)
				}
				r.Settle(now, ratelimit.Cost{Requests: 1, Prompt: 900, Output: 100, Counted: true})
			}
		})
	}
}

func TestAdmittingAndSettlingAllocatesNothing(t *testing.T) {
	a := caller(t, "requests 1M/minute", "tokens 1G/minute", "tokens 1G/day")
	now := noon
	if n := testing.AllocsPerRun(1000, func() {
		now = now.Add(time.Second)
		r, _ := a.admit(now, ratelimit.Estimate{Prompt: 1000, Output: 500})
		r.Settle(now, ratelimit.Cost{Requests: 1, Prompt: 900, Output: 100, Counted: true})
	}); n != 0 {
		t.Errorf("%g allocations", n)
	}
}

// TestAClockThatIsSetBackALittleRefusesNothingForLong has a clock that goes
// wrong by less than a minute, as some do before they are synchronized.
func TestAClockThatIsSetBackALittleRefusesNothingForLong(t *testing.T) {
	for _, back := range []time.Duration{time.Millisecond, time.Second, 3 * time.Second, 30 * time.Second, 59 * time.Second, 2 * time.Minute} {
		c := caller(t, "requests 10/second")
		for range 10 {
			admitted(t, c, noon, exactly(1)).settle(noon)
		}
		if back < time.Second {
			refused(t, c, noon.Add(-back), exactly(1))
		}
		passed, refusal := time.Duration(0), new(ratelimit.Refusal)
		for ; refusal != nil; passed += 100 * time.Millisecond {
			_, refusal = c.admit(noon.Add(passed-back), exactly(1))
		}
		if passed > 3500*time.Millisecond {
			t.Errorf("a request is admitted %s after the clock was set back by %s", passed, back)
		}
	}
}
