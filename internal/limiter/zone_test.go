package limiter

import (
	"fmt"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// After a reload with another timezone, the same moment may be on another day:
// the day that a request was charged on may be the one before, or the current
// one with the day before in it.
func TestASettlementGoesToTheWindowThatWasChargedWhereverMidnightIs(t *testing.T) {
	for _, hour := range []int{1, 11, 13, 23} {
		for _, before := range []int{-12, 0, 14} {
			for after := max(-12, before-11); after <= min(14, before+11); after++ {
				at := time.Date(2026, 11, 1, hour, 0, 0, 0, time.UTC) // a month begins, too
				zone := func(hours int) *time.Location { return time.FixedZone(fmt.Sprint(hours), hours*3600) }
				c := callerWith(nil)
				l := limits(t, "tokens 10k/day", "tokens 10k/month", "requests 100/day")
				c.Change(at, Settings{Limits: l, Location: zone(before)})
				admitted(t, c, at, exactly(7)).settle(at)
				r := admitted(t, c, at, exactly(504))
				c.Change(at, Settings{Limits: l, Location: zone(after)})
				later := admitted(t, c, at, exactly(1000))
				r.Settle(at, spent(120))
				later.Settle(at, spent(1000))
				c.Change(at, Settings{Limits: l, Location: zone(before)})
				for _, id := range []ratelimit.ID{l[0].ID(), l[1].ID()} {
					m := &c.counters[id]
					if got := m.local.used[0] + m.local.used[1]; got != 1127 {
						t.Fatalf("%02d:00, from UTC%+d to %+d and back: %s is %v, want 1127 in all", hour, before, after, id, m.local.used)
					}
				}
			}
		}
	}
}

// TestATimezoneThatIsChangedAndChangedBackForgetsNothing has any two zones,
// with and without use in between.
func TestATimezoneThatIsChangedAndChangedBackForgetsNothing(t *testing.T) {
	for _, hour := range []int{1, 11, 13, 23} {
		for before := -12; before <= 14; before++ {
			for after := max(-12, before-23); after <= min(14, before+23); after++ {
				for _, between := range []int64{0, 30} {
					at := time.Date(2026, 11, 1, hour, 0, 0, 0, time.UTC) // a month begins, too
					zone := func(hours int) *time.Location { return time.FixedZone(fmt.Sprint(hours), hours*3600) }
					c := callerWith(nil)
					l := limits(t, "tokens 1k/day", "tokens 10k/month")
					c.Change(at.Add(-24*time.Hour), Settings{Limits: l, Location: zone(before)})
					admitted(t, c, at.Add(-24*time.Hour), exactly(500)).settle(at.Add(-24 * time.Hour))
					admitted(t, c, at, exactly(100)).settle(at)
					r := admitted(t, c, at, exactly(200))
					want := c.Snapshot(at).Today
					for range 3 {
						c.Change(at, Settings{Limits: l, Location: zone(after)})
						if between > 0 {
							admitted(t, c, at, exactly(1)).settle(at)
						}
						c.Change(at, Settings{Limits: l, Location: zone(before)})
					}
					r.Settle(at, spent(50))
					got, least, most := c.Snapshot(at).Today, want-150, want-150+3
					if got < least || got > most {
						t.Fatalf("%02d:00, from UTC%+d to %+d and back: %d are used, want %d", hour, before, after, got, least)
					}
				}
			}
		}
	}
}
