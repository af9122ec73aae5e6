package limiter

import (
	"encoding/json"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

func TestAResetGivesACallerItsUseBack(t *testing.T) {
	var marks []int
	c := callerWith(func(x ratelimit.Crossing) { marks = append(marks, x.Percent) })
	for _, text := range []string{"100/minute", "100/hour", "100/day", "100/month"} {
		l, err := ratelimit.ParseLimit(ratelimit.Tokens, text)
		if err != nil {
			t.Fatal(err)
		}
		c.Change(noon, Settings{Limits: []ratelimit.Limit{l}})
		r := admitted(t, c, noon, exactly(1))
		r.Settle(noon, ratelimit.Cost{Requests: 1, Prompt: 1_000_000, Output: 1_000_000, Counted: true}) // a wrong report
		refused(t, c, noon, exactly(1))
		marks = nil
		c.Reset(noon)
		s := c.Snapshot(noon)
		if s.Limits[0].Used != 0 || s.Today != 0 || s.Month != 0 || s.Reserved != 0 || s.InFlight != 0 || s.Limits[0].Refused == 0 {
			t.Errorf("%s: after the reset: %+v", text, s)
		}
		if s.Ratio != newUsual.ratio() || s.Output != newUsual.output {
			t.Errorf("%s: the wrong report still counts for estimates: %+v", text, s)
		}
		admitted(t, c, noon, exactly(100)).settle(noon)
		refused(t, c, noon, exactly(1))
		if len(marks) == 0 {
			t.Errorf("%s: it is not reported that the limit is reached once more", text)
		}
		c.Reset(noon)
	}
}

func TestARequestThatIsInFlightAtAResetCostsNothing(t *testing.T) {
	c := caller(t, "tokens 1k/day", "requests 10/minute")
	less, more := admitted(t, c, noon, exactly(300)), admitted(t, c, noon, exactly(100))
	c.Reset(noon)
	more.Spend(noon, 5000) // of a stream, as its events arrive
	admitted(t, c, noon, exactly(500)).settle(noon)
	less.Settle(noon, spent(100)) // 200 less than it was charged with
	more.Settle(noon, spent(200))
	for _, u := range c.Snapshot(noon).Limits {
		if want := map[ratelimit.Kind]int64{ratelimit.Tokens: 500, ratelimit.Requests: 1}[u.Limit.Kind]; u.Used != want {
			t.Errorf("%d %s are used, want %d", u.Used, u.Limit.Kind, want)
		}
	}
	if s := c.Snapshot(noon); s.InFlight != 0 || s.Reserved != 0 {
		t.Errorf("got %+v", s)
	}
}

// report is what a replica sent.
type report struct {
	replica string
	version uint64
	entries []Entry
}

// TestAResetIsNotUndone has three replicas, of which one ends before the reset,
// one is not connected then, and one is restarted after it. Reports arrive in
// any order, repeatedly, and late.
func TestAResetIsNotUndone(t *testing.T) {
	for seed := range uint64(300) {
		random := rand.New(rand.NewPCG(seed, 7))
		var all []report
		version := uint64(0)
		reports := func(name string, c *Limiter, now time.Time) {
			version++
			all = append(all, report{name, version, c.Report(now, version, nil)})
		}
		hear := func(c *Limiter, name string, now time.Time) {
			for range 2 * len(all) {
				if r := all[random.IntN(len(all))]; r.replica != name {
					c.Heard(now, r.replica, r.version, r.entries)
				}
			}
		}
		now := noon.Add(time.Duration(random.Int64N(int64(30 * time.Minute))))
		limits := []string{"tokens 1M/hour", "tokens 1M/month"}
		ended, apart, last := caller(t, limits...), caller(t, limits...), caller(t, limits...)
		replicas := map[string]*Limiter{"ended": ended, "apart": apart, "last": last}
		for range 10 {
			for name, c := range replicas {
				admitted(t, c, now, exactly(random.Int64N(1000))).settle(now)
				reports(name, c, now)
				now = now.Add(time.Second)
			}
		}
		hear(last, "last", now)
		saved := last.save(now, "last")
		last.Reset(now)
		hear(last, "last", now) // late ones
		after := last.save(now, "last")
		admitted(t, last, now, exactly(1)).settle(now)
		reports("last", last, now)
		admitted(t, apart, now, exactly(500)).settle(now) // it does not know of the reset
		reports("apart", apart, now)
		if got := last.Snapshot(now).Limits; got[0].Used != 1 || got[1].Used != 1 {
			t.Fatalf("seed %d: at once %d are used, want 1", seed, got[0].Used)
		}
		for _, r := range all { // it is connected again
			if r.replica != "apart" {
				apart.Heard(now, r.replica, r.version, r.entries)
			}
		}
		admitted(t, apart, now, exactly(2)).settle(now)
		reports("apart", apart, now)
		started, restored := caller(t, limits...), caller(t, limits...)
		restored.restore(now, "last", after["last"])
		restored.restore(now, "last", saved["last"]) // the storage was slow
		if got := restored.Snapshot(now).Limits; got[0].Used != 0 || got[1].Used != 0 {
			t.Fatalf("seed %d: after a restart %d are used", seed, got[0].Used)
		}
		random.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		for _, r := range all {
			started.Heard(now, r.replica, r.version, r.entries)
			if r.replica != "last" {
				last.Heard(now, r.replica, r.version, r.entries)
			}
		}
		for name, c := range map[string]*Limiter{"last": last, "apart": apart, "started": started} {
			if got := c.Snapshot(now).Limits; got[0].Used != 3 || got[1].Used != 3 {
				t.Fatalf("seed %d: at %s %d and %d are used, want 3", seed, name, got[0].Used, got[1].Used)
			}
		}
	}
}

func TestOfTwoResetsTheLaterOneCounts(t *testing.T) {
	a, b := caller(t, "tokens 1k/day"), caller(t, "tokens 1k/day")
	a.Reset(noon)
	b.Reset(noon.Add(time.Second))
	admitted(t, a, noon.Add(2*time.Second), exactly(10)).settle(noon.Add(2 * time.Second))
	admitted(t, b, noon.Add(2*time.Second), exactly(1)).settle(noon.Add(2 * time.Second))
	tell(noon.Add(2*time.Second), 1, a, b) // a says nothing that counts, and hears of the reset
	tell(noon.Add(2*time.Second), 2, a, b)
	for _, c := range []*Limiter{a, b} {
		if got := c.Snapshot(noon.Add(2 * time.Second)).Limits[0].Used; got != 1 {
			t.Errorf("%d are used, want 1", got)
		}
	}
	b.Reset(noon) // by a clock that was set back
	if got := b.Snapshot(noon.Add(2 * time.Second)).Limits[0].Used; got != 0 {
		t.Errorf("%d are used after another reset", got)
	}
}

// TestAResetOfADistantTimeIsNotBelieved because no other one would count after
// it.
func TestAResetOfADistantTimeIsNotBelieved(t *testing.T) {
	c := caller(t, "tokens 1k/day")
	admitted(t, c, noon, exactly(10)).settle(noon)
	entries := c.Report(noon, 1, nil)
	for _, at := range []int64{1<<63 - 1, noon.Add(25 * time.Hour).UnixMicro(), -1} {
		e := entries[0]
		e.Reset = at
		c.Heard(noon, "x", 1, []Entry{e})
		c.restore(noon, "y", SavedFigures{{Entry: e}})
		if got := c.Snapshot(noon).Limits[0].Used; got != 10 {
			t.Errorf("%d: %d are used, want 10", at, got)
		}
	}
}

// TestAResetIsReportedForAsLongAsItIsNeeded has a reset just before a month
// ends, in an hour that counts for another one.
func TestAResetIsReportedForAsLongAsItIsNeeded(t *testing.T) {
	now := time.Date(2026, 1, 31, 23, 50, 0, 0, time.UTC)
	c, other := caller(t, "tokens 1k/hour"), caller(t, "tokens 1k/hour")
	c.Reset(now)
	admitted(t, other, now.Add(-time.Minute), exactly(600)).settle(now.Add(-time.Minute))
	old := other.Report(now, 1, nil)
	for _, later := range []time.Duration{0, 5 * time.Minute, 15 * time.Minute, 65 * time.Minute} {
		at := now.Add(later)
		entries := c.Report(at, 1, nil)
		started := caller(t, "tokens 1k/hour")
		started.Heard(at, "old", 1, old)
		started.Heard(at, "c", 1, entries)
		if got := started.Snapshot(at).Limits[0].Used; got != 0 {
			t.Errorf("%s later, %d are used at a new replica", later, got)
		}
	}
}

func TestAResetIsSaved(t *testing.T) {
	cs := NewLimiters(nil)
	if cs.Reset(noon, "alice") || len(cs.All()) > 0 {
		t.Error("a caller is reset that is not known")
	}
	admitted(t, cs.Get(noon, "alice"), noon, exactly(10)).settle(noon)
	before, _ := json.Marshal(cs.Save(noon))
	if !cs.Reset(noon, "alice") {
		t.Error("alice is not known")
	}
	after, _ := json.Marshal(cs.Save(noon))
	again := NewLimiters(nil)
	for _, text := range [][]byte{after, before} {
		var saved SavedUse
		if err := json.Unmarshal(text, &saved); err != nil {
			t.Fatal(err)
		}
		again.Restore(noon, saved)
	}
	if got := again.Get(noon, "alice").Snapshot(noon).Today; got != 0 {
		t.Errorf("after a restart, %d are used", got)
	}
}
