package limiter

import (
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// TestWhatExceedsALimitIsPaidBack has a caller whose requests cost more than
// its limit, whenever one is admitted.
func TestWhatExceedsALimitIsPaidBack(t *testing.T) {
	for _, times := range []int64{1, 2, 3, 9} {
		c, now, all := caller(t, "tokens 60k/minute"), noon, int64(0)
		for now.Before(noon.Add(time.Hour)) {
			r, refusal := c.admit(now, ratelimit.Estimate{Prompt: 10, Output: ratelimit.Undeclared})
			if refusal != nil {
				now = now.Add(max(refusal.Wait, time.Millisecond))
				continue
			}
			r.Settle(now, spent(times*60_000))
			all += times
		}
		if all > 60+times || all < 60-times {
			t.Errorf("requests of %d times a limit used %d times the limit of a minute in an hour", times, all)
		}
	}
}

func TestTheNextDayBeginsWithWhatWasTooMuch(t *testing.T) {
	c := caller(t, "tokens 1k/day")
	for _, cost := range []int64{600, 700} {
		admitted(t, c, noon, exactly(10)).end(noon, spent(cost))
	}
	refused(t, c, noon, exactly(1))
	next := noon.Add(12 * time.Hour)
	if got := used(t, c, next, "tokens/day"); got != 300 {
		t.Errorf("%d are used in the next day", got)
	}
	if got := refused(t, c, next, exactly(701)); got.Reason != ratelimit.OverQuota {
		t.Errorf("got %+v", got)
	}
	admitted(t, c, next, exactly(700))
	if got := used(t, c, next.Add(24*time.Hour), "tokens/day"); got != 0 {
		t.Errorf("%d are used in the day after", got)
	}
	c = caller(t, "tokens 1k/day") // a debt is one day at most
	admitted(t, c, noon, exactly(10)).end(noon, spent(500_000))
	refused(t, c, next, exactly(1))
	admitted(t, c, next.Add(24*time.Hour), exactly(1))
}

// TestNoDebtComesFromWhatIsAllowed has limits that are lowered, limits over
// which a tier is, estimates that were too high, and what is known of before a
// restart.
func TestNoDebtComesFromWhatIsAllowed(t *testing.T) {
	c := caller(t, "tokens 1k/hour")
	admitted(t, c, noon, exactly(900)).settle(noon)
	c.Change(noon, Settings{Limits: limits(t, "tokens 100/hour")})
	later := noon.Add(time.Hour)
	admitted(t, c, later, exactly(100)).settle(later)

	l := limits(t, "tokens 100/minute")
	l[0].Then = "nightly"
	c = callerWith(nil)
	c.Change(noon, Settings{Limits: l, Tiers: []string{"nightly"}})
	for range 30 {
		admitted(t, c, noon, exactly(100)).settle(noon)
	}
	if r := admitted(t, c, noon.Add(time.Minute), exactly(100)); r.Tier() != 0 {
		t.Error("a minute later, a request has the tier of those over the limit")
	}

	c = caller(t, "tokens 100/minute")
	admitted(t, c, noon, ratelimit.Estimate{Prompt: 10, Output: ratelimit.Undeclared}).end(noon.Add(time.Second), spent(20)) // charged with 266
	admitted(t, c, noon.Add(time.Second), exactly(80))
	if m := &c.counters[minute]; m.debt.excess != 0 {
		t.Errorf("%d are owed", m.debt.excess)
	}

	w := windowAt(ratelimit.Minute, noon.UnixNano(), time.UTC).index
	c = caller(t, "tokens 100/minute")
	c.restore(noon, "x", SavedFigures{{Entry: Entry{minute, w, 500, 0}}})
	admitted(t, c, noon.Add(time.Minute), exactly(100))
}

// TestReplicasOweTogether what one of them cannot see alone.
func TestReplicasOweTogether(t *testing.T) {
	a, b := caller(t, "tokens 100/minute"), caller(t, "tokens 100/minute")
	for _, c := range []*Limiter{a, b} {
		admitted(t, c, noon, exactly(100)).settle(noon)
	}
	tell(noon, 1, a, b)
	later := noon.Add(61 * time.Second)
	for i, c := range []*Limiter{a, b} {
		if got := used(t, c, later, "tokens/minute"); got < 98 || got > 100 {
			t.Errorf("a minute later, %d are used at replica %d", got, i)
		}
	}
}

// TestReplicasThatHaveJustFoundEachOtherOweNothing that the others used: each
// was allowed its part, and they do not agree on when that was. After a minute,
// they owe together again.
func TestReplicasThatHaveJustFoundEachOtherOweNothing(t *testing.T) {
	for _, before := range []Sharing{{Replicas: 1}, {Replicas: 2, Apart: true}} {
		for _, passed := range []time.Duration{30 * time.Second, 3 * time.Minute} {
			c := caller(t, "tokens 100/minute")
			c.Share(noon, before)
			c.Share(noon, Sharing{Replicas: 2})
			c.Heard(noon.Add(passed), "b", 1, []Entry{{minute, windowAt(ratelimit.Minute, noon.Add(passed).UnixNano(), time.UTC).index, 190, 0}})
			want := int64(0)
			if passed > time.Minute {
				want = 90
			}
			if got := used(t, c, noon.Add(passed+61*time.Second), "tokens/minute"); got < want-5 || got > want {
				t.Errorf("%s after %+v, what others used leaves %d, want %d", passed, before, got, want)
			}
		}
	}
}

// TestARequestThatGetsNothingBackOfAWindowThatIsOver has streams that paused
// before a minute ended, and that cost less than they were charged with when
// they began. Nothing of what they were charged with later goes back: this must
// not look for a time that no window has, and leave the caller locked.
func TestARequestThatGetsNothingBackOfAWindowThatIsOver(t *testing.T) {
	for pause := time.Second; pause < 2*time.Minute; pause += 700 * time.Millisecond {
		c := caller(t, "tokens 10k/minute", "tokens 100k/hour")
		admitted(t, c, noon.Add(-3*time.Minute), exactly(1)).settle(noon.Add(-3 * time.Minute))
		start := noon.Add(20 * time.Second)
		r := admitted(t, c, start, ratelimit.Estimate{Prompt: 1000, Output: -1})
		r.Spend(start.Add(time.Second), r.output+50)
		r.Settle(start.Add(time.Second+pause), ratelimit.Cost{Requests: 1, Prompt: 500, Output: r.output + 50})
		if got := c.Snapshot(start.Add(time.Second + pause)).InFlight; got != 0 {
			t.Errorf("after a pause of %s, %d requests are in flight", pause, got)
		}
	}
}
