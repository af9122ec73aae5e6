package limiter

import (
	"testing"
	"time"
	_ "time/tzdata"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

func zone(t testing.TB, name string) *time.Location {
	t.Helper()
	location, err := time.LoadLocation(name)
	if err != nil {
		t.Fatal(err)
	}
	return location
}

func parse(t testing.TB, text string) time.Time {
	t.Helper()
	at, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		t.Fatal(err)
	}
	return at
}

func TestWindowsFollowTheClockAndTheCalendar(t *testing.T) {
	for _, c := range []struct {
		why, zone string
		unit      ratelimit.Unit
		at        string
		from, to  string
	}{
		{"a second", "UTC", ratelimit.Second, "2026-11-22T10:00:00.999Z", "2026-11-22T10:00:00Z", "2026-11-22T10:00:01Z"},
		{"a minute", "Europe/Berlin", ratelimit.Minute, "2026-11-22T10:00:00Z", "2026-11-22T10:00:00Z", "2026-11-22T10:01:00Z"},
		{"an hour", "UTC", ratelimit.Hour, "2026-11-22T10:59:59Z", "2026-11-22T10:00:00Z", "2026-11-22T11:00:00Z"},
		{"before 1970", "UTC", ratelimit.Minute, "1969-12-31T23:59:59.5Z", "1969-12-31T23:59:00Z", "1970-01-01T00:00:00Z"},
		{"a day", "UTC", ratelimit.Day, "2026-11-22T00:00:00Z", "2026-11-22T00:00:00Z", "2026-11-23T00:00:00Z"},
		{"a day elsewhere", "Europe/Berlin", ratelimit.Day, "2026-11-22T23:30:00Z", "2026-11-22T23:00:00Z", "2026-11-23T23:00:00Z"},
		{"the 23 hours when summer time begins", "Europe/Berlin", ratelimit.Day, "2026-03-29T12:00:00Z", "2026-03-28T23:00:00Z", "2026-03-29T22:00:00Z"},
		{"the 25 hours when it ends", "Europe/Berlin", ratelimit.Day, "2026-10-25T00:30:00Z", "2026-10-24T22:00:00Z", "2026-10-25T23:00:00Z"},
		{"the second time at half past two", "Europe/Berlin", ratelimit.Day, "2026-10-25T01:30:00Z", "2026-10-24T22:00:00Z", "2026-10-25T23:00:00Z"},
		{"a day without midnight", "America/Sao_Paulo", ratelimit.Day, "2018-11-04T12:00:00Z", "2018-11-04T03:00:00Z", "2018-11-05T02:00:00Z"},
		{"the evening before it", "America/Sao_Paulo", ratelimit.Day, "2018-11-04T02:59:59Z", "2018-11-03T03:00:00Z", "2018-11-04T03:00:00Z"},
		{"a day with two midnights", "America/Havana", ratelimit.Day, "2026-11-01T05:30:00Z", "2026-11-01T04:00:00Z", "2026-11-02T05:00:00Z"},
		{"a day before one that never was", "Pacific/Apia", ratelimit.Day, "2011-12-30T09:00:00Z", "2011-12-29T10:00:00Z", "2011-12-30T10:00:00Z"},
		{"a month", "UTC", ratelimit.Month, "2028-02-29T23:59:59Z", "2028-02-01T00:00:00Z", "2028-03-01T00:00:00Z"},
		{"a month with summer time's beginning", "Europe/Berlin", ratelimit.Month, "2026-03-15T00:00:00Z", "2026-02-28T23:00:00Z", "2026-03-31T22:00:00Z"},
		{"a year's end", "America/New_York", ratelimit.Month, "2027-01-01T04:59:59Z", "2026-12-01T05:00:00Z", "2027-01-01T05:00:00Z"},
	} {
		at := parse(t, c.at)
		got := windowAt(c.unit, at.UnixNano(), zone(t, c.zone))
		if from, to := time.Unix(0, got.start).UTC(), time.Unix(0, got.end).UTC(); !from.Equal(parse(t, c.from)) || !to.Equal(parse(t, c.to)) {
			t.Errorf("%s: from %s to %s, want %s to %s", c.why, from, to, c.from, c.to)
		}
	}
}

func TestWindowsFollowEachOtherWithoutAGap(t *testing.T) {
	for _, name := range []string{"UTC", "Europe/Berlin", "America/Havana", "America/Sao_Paulo", "Asia/Kathmandu", "Asia/Gaza", "Pacific/Auckland"} {
		location := zone(t, name)
		for _, u := range []ratelimit.Unit{ratelimit.Hour, ratelimit.Day, ratelimit.Month} {
			w := windowAt(u, parse(t, "2017-12-31T12:00:00Z").UnixNano(), location)
			for range 900 {
				next := windowAt(u, w.end, location)
				if next.index != w.index+1 || next.start != w.end || next.end <= next.start {
					t.Fatalf("%s: after %+v comes %+v", name, w, next)
				}
				w = next
			}
		}
	}
}

// TestAClockThatIsSetEmptiesNoWindow and the use leaves a window when it would
// have left it otherwise: no sooner, and not much later.
func TestAClockThatIsSetEmptiesNoWindow(t *testing.T) {
	for _, by := range []time.Duration{-3 * time.Second, -40 * time.Second, -61 * time.Second, -5 * time.Minute, -61 * time.Minute, -30 * time.Hour, 40 * time.Second, 5 * time.Minute, 30 * time.Hour} {
		for phase := range 13 {
			cs := NewLimiters(nil)
			cs.Configure(noon, func(string) Settings {
				return Settings{Limits: limits(t, "tokens 10k/minute", "tokens 10k/hour", "tokens 10k/day")}
			})
			other := caller(t, "tokens 10k/minute", "tokens 10k/hour", "tokens 10k/day")
			now := noon.Add(time.Duration(phase) * 7 * time.Second)
			c := cs.Get(now, "alice")
			running := admitted(t, c, now, exactly(2000))
			admitted(t, c, now, exactly(2310)).settle(now)
			admitted(t, other, now, exactly(1000)).settle(now)
			c.Heard(now, "b", 1, other.Report(now, 1, nil))
			want := func(at time.Time, limit string, least, most int64) {
				t.Helper()
				if got := used(t, c, at, limit); got < least || got > most {
					t.Errorf("clock set by %s, phase %d: after %s, %d of %s are used, want %d to %d", by, phase, at.Sub(now), got, limit, least, most)
				}
			}
			changes, _ := c.Changes()
			cs.Follow(now, by)
			if again, _ := c.Changes(); again == changes {
				t.Error("the others do not hear of the new windows")
			}
			want(now, "tokens/minute", 5310, 5310)
			want(now, "tokens/hour", 5310, 5310)
			if by < 0 {
				want(now, "tokens/day", 5310, 5310)
			}
			running.Settle(now, spent(0))
			want(now, "tokens/minute", 3310, 3310)
			want(now.Add(55*time.Second), "tokens/minute", 3310, 3310)
			want(now.Add(70*time.Second), "tokens/minute", 0, 0)
			want(now.Add(70*time.Second), "tokens/hour", 3310, 3310)
			addUp(t, c)
		}
	}
}

// TestAMachinesClockThatIsSetBackEmptiesNoWindow as well.
func TestAMachinesClockThatIsSetBackEmptiesNoWindow(t *testing.T) {
	for _, by := range []time.Duration{time.Second, 10 * time.Second, 5 * time.Minute, 30 * time.Hour} {
		c := caller(t, "tokens 10k/minute", "tokens 10k/day")
		admitted(t, c, noon, exactly(5310)).settle(noon)
		back := noon.Add(-by)
		for limit, want := range map[string]int64{"tokens/minute": 5310, "tokens/day": 5310} {
			if got := used(t, c, back, limit); got != want {
				t.Errorf("set back by %s, %d of %s are used", by, got, limit)
			}
		}
		if got := used(t, c, back.Add(72*time.Second), "tokens/minute"); got != 0 {
			t.Errorf("set back by %s, %d are used 72 s later", by, got)
		}
	}
}

// TestAClockThatIsSetOverMidnightBeginsNoNewDay has a store's clock that is set
// forward and back, again and again.
func TestAClockThatIsSetOverMidnightBeginsNoNewDay(t *testing.T) {
	for _, by := range []time.Duration{13 * time.Hour, 40 * time.Hour, 400 * time.Hour} {
		a, b := NewLimiters(nil), NewLimiters(nil)
		all := []*Limiters{a, b}
		for _, cs := range all {
			cs.Configure(noon, func(string) Settings { return Settings{Limits: limits(t, "tokens 1k/day", "tokens 10k/month")} })
			admitted(t, cs.Get(noon, "alice"), noon, exactly(300)).settle(noon)
		}
		tell(noon, 1, a.Get(noon, "alice"), b.Get(noon, "alice"))
		now := noon
		for i := range 6 {
			for _, cs := range all {
				cs.Follow(now, by*time.Duration((i+1)%2))
			}
			tell(now, uint64(i+2), a.Get(now, "alice"), b.Get(now, "alice"))
			for _, cs := range all {
				if got := cs.Get(now, "alice").Snapshot(now); got.Today < 600 || got.Month < 600 {
					t.Fatalf("set by %s: %d are used today, and %d this month", by, got.Today, got.Month)
				}
			}
			now = now.Add(time.Second)
		}
		if got := a.Get(now, "alice").Snapshot(now.Add(13 * time.Hour)).Today; got != 0 {
			t.Errorf("set by %s: after midnight %d are used", by, got)
		}
	}
}
