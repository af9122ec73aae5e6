package limiter

import (
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// missing returns callers that share a limit of 60k with a replica that uses
// 30k of alice's, is last heard 30 s later, and is missed after 10 s more.
func missing(t *testing.T, unit string, replicas int) (alice *Limiter, used time.Time) {
	t.Helper()
	l, err := ratelimit.ParseLimit(ratelimit.Tokens, "60k/"+unit)
	if err != nil {
		t.Fatal(err)
	}
	cs := NewLimiters(nil)
	used = time.Date(2026, 11, 2, 12, 0, 20, 0, time.UTC)
	cs.Configure(used, func(string) Settings { return Settings{Limits: []ratelimit.Limit{l}} })
	cs.Share(used, Sharing{Replicas: replicas})
	alice = cs.Get(used, "alice")
	cs.Get(used, "bob")
	alice.Heard(used, "b1", 1, []Entry{{ID: l.ID(), Window: windowAt(l.Unit, used.UnixNano(), time.UTC).index, Used: 30_000}})
	missed, until := used.Add(40*time.Second), used.Add(90*time.Second)
	cs.Share(missed, Sharing{Replicas: 1})
	cs.Hold(missed, []Vanished{{"b", until}, {"c", until}}, replicas)
	if got := cs.Get(missed, "bob").Snapshot(missed.Add(50 * time.Second)).Limits[0].Used; got != 0 {
		t.Errorf("bob has used %d", got)
	}
	return alice, used
}

func TestThePartOfAVanishedReplicaIsHeldBackForAMinute(t *testing.T) {
	for _, test := range []struct {
		unit     string
		replicas int
		// at 41, 61, 89 and 90 s after its use
		want [4]int64
	}{
		{"second", 2, [4]int64{}},
		{"minute", 2, [4]int64{30_000, 30_000, 30_000, 0}},
		{"minute", 3, [4]int64{30_000, 20_000, 20_000, 0}},
		{"hour", 2, [4]int64{30_000, 30_000, 30_000, 30_000}},
		{"day", 2, [4]int64{30_000, 30_000, 30_000, 30_000}},
	} {
		alice, used := missing(t, test.unit, test.replicas)
		for i, after := range []int{41, 61, 89, 90} {
			if got := alice.Snapshot(used.Add(time.Duration(after) * time.Second)).Limits[0].Used; got != test.want[i] {
				t.Errorf("%d s after its use, %d of a limit by the %s are used, want %d", after, got, test.unit, test.want[i])
			}
		}
	}
}

// TestAWaitEndsWhenNothingIsHeldBack at the latest, and no debt is left.
func TestAWaitEndsWhenNothingIsHeldBack(t *testing.T) {
	alice, used := missing(t, "minute", 2)
	at := func(s int) time.Time { return used.Add(time.Duration(s) * time.Second) }
	r, refusal := alice.Try(at(45), ratelimit.Estimate{Prompt: 20_000})
	if refusal != nil {
		t.Fatalf("got %+v", refusal)
	}
	r.Settle(at(46), ratelimit.Cost{Requests: 1, Prompt: 25_000})
	for _, test := range []struct {
		at     int
		prompt int64
		want   time.Duration
	}{
		{70, 5_000, 0},
		{70, 10_000, 20 * time.Second}, // held back until then
		{70, 40_000, 36 * time.Second}, // its own use is over a little later
		{90, 30_000, 0},
	} {
		refusal := alice.Check(at(test.at), ratelimit.Estimate{Prompt: test.prompt})
		switch {
		case test.want == 0 && refusal != nil:
			t.Errorf("after %d s, a request of %d gets %+v", test.at, test.prompt, refusal)
		case test.want > 0 && (refusal == nil || refusal.Wait < test.want-time.Second || refusal.Wait > test.want+3*time.Second):
			t.Errorf("after %d s, a request of %d gets %+v, want a wait of %s", test.at, test.prompt, refusal, test.want)
		}
	}
}

func TestAReportReplacesWhatIsHeldBack(t *testing.T) {
	alice, used := missing(t, "minute", 2)
	at := used.Add(70 * time.Second)
	minute := ratelimit.Limit{Kind: ratelimit.Tokens, Unit: ratelimit.Minute}.ID()
	entries := func(n int64) []Entry {
		return []Entry{{ID: minute, Window: windowAt(ratelimit.Minute, at.UnixNano(), time.UTC).index, Used: n}}
	}
	alice.Heard(at, "b1", 1, []Entry{{ID: minute, Window: windowAt(ratelimit.Minute, used.UnixNano(), time.UTC).index, Used: 30_000}}) // again
	alice.Heard(at, "b2", 5, entries(0))
	if got := alice.Snapshot(at).Limits[0].Used; got != 30_000 {
		t.Errorf("before its report, %d are used", got)
	}
	alice.Heard(at, "b1", 2, entries(7_000))
	if got := alice.Snapshot(at).Limits[0].Used; got != 7_000 {
		t.Errorf("after its report, %d are used", got)
	}
}

// TestWhatIsHeldBackEndsAlsoIfTheClockIsSet or the config changes.
func TestWhatIsHeldBackEndsAlsoIfTheClockIsSet(t *testing.T) {
	for _, by := range []time.Duration{time.Hour, -time.Hour, 7 * time.Second} {
		alice, used := missing(t, "minute", 2)
		alice.follow(used.Add(50*time.Second), by)
		if got := alice.Snapshot(used.Add(80 * time.Second)).Limits[0].Used; got != 30_000 {
			t.Errorf("the clock is set by %s: %d are used", by, got)
		}
		alice.Change(used.Add(81*time.Second), Settings{Limits: []ratelimit.Limit{{Kind: ratelimit.Tokens, Amount: 10_000, Unit: ratelimit.Minute}}})
		if refusal := alice.Check(used.Add(91*time.Second), ratelimit.Estimate{Prompt: 9_000}); refusal != nil {
			t.Errorf("the clock is set by %s: got %+v", by, refusal)
		}
	}
}
