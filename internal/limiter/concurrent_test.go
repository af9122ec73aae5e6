package limiter

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// counting returns a caller that shares a maximum of concurrent requests with
// the replicas b and c, which run.
func counting(maxRequests int) (cs *Limiters, alice *Limiter) {
	cs = NewLimiters(nil)
	cs.Configure(noon, func(string) Settings { return Settings{MaxRequests: maxRequests} })
	cs.Share(noon, Sharing{Replicas: 3, Delay: time.Second})
	cs.Running(noon, []string{"b", "c"}, nil, 3)
	return cs, cs.Get(noon, "alice")
}

// beginAll sends requests until one is refused.
func (c *Limiter) beginAll(now time.Time) (all []Reservation, refusal *ratelimit.Refusal) {
	for {
		r, refusal := c.Try(now, ratelimit.Estimate{Prompt: 1})
		if refusal != nil {
			return all, refusal
		}
		all = append(all, r)
	}
}

// said sends a report that arrives.
func said(cs *Limiters, c *Limiter, now time.Time, version uint64) (n int64) {
	c.Report(now, version, nil)
	n, _ = c.ReportInFlight()
	cs.Confirm(version)
	return n
}

func TestEachReplicaHasItsPartOfTheRequestsThatMayStillBegin(t *testing.T) {
	cs, alice := counting(30)
	now := noon
	for i, want := range []int{10, 6, 4, 3, 2, 1, 1, 1, 0} { // a third of what is left
		all, refusal := alice.beginAll(now)
		if len(all) != want || refusal.Reason != ratelimit.TooMany || !refusal.MayClaim() || refusal.Allowed != 30 {
			t.Errorf("in step %d, %d requests begin, want %d, and then %+v", i, len(all), want, refusal)
		}
		said(cs, alice, now, uint64(i+1))
		now = now.Add(time.Second)
	}
	alice.HeardInFlight(now, "b1", 1, 4)
	if refusal := alice.Check(now, ratelimit.Estimate{Prompt: 1}); refusal == nil || refusal.MayClaim() || refusal.Used != 32 {
		t.Errorf("got %+v", refusal)
	}
}

// TestARequestThatReplacesAnotherNeedsNoPart also if a report was sent when one
// had just ended.
func TestARequestThatReplacesAnotherNeedsNoPart(t *testing.T) {
	cs, alice := counting(30)
	alice.HeardInFlight(noon, "b1", 1, 20)
	all, _ := alice.beginAll(noon)
	if len(all) != 3 || said(cs, alice, noon, 1) != 3 {
		t.Fatalf("%d begin", len(all))
	}
	now := noon.Add(time.Second)
	alice.HeardInFlight(now, "b1", 2, 27)
	for i := range 5 {
		all[0].Settle(now, ratelimit.Cost{})
		if n := said(cs, alice, now, uint64(i+2)); n != 3 {
			t.Errorf("%d requests are reported", n)
		}
		all, _ = alice.beginAll(now)
		if len(all) != 1 {
			t.Errorf("%d requests begin where one has ended", len(all))
		}
		now = now.Add(time.Second)
	}
	all[0].Settle(now, ratelimit.Cost{})
	for i, want := range []int64{3, 2} {
		if n := said(cs, alice, now, uint64(i+10)); n != want {
			t.Errorf("%d requests are reported, want %d", n, want)
		}
	}
}

func TestTheLatestNumberOfRequestsOfAReplicaThatRunsCounts(t *testing.T) {
	used := func(c *Limiter, now time.Time) int64 {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.elsewhere(c.roll(now))
	}
	cs, alice := counting(30)
	version := uint64(noon.UnixMicro())
	for i, m := range []struct {
		replica string
		ago     uint64
		n, want int64
	}{
		{"b1", 100, 8, 8}, {"b1", 200, 5, 8}, {"b1", 100, 5, 8}, {"b1", 50, -1, 8}, {"b1", 50, 6, 6}, {"c1", 10, 1 << 62, 6 + maxInFlight},
		{"c1", 0, 2, 8}, {"d1", 0, 25, 18}, // an equal part, until its sign of life
		{"e1", 100_000_000, 3, 18}, // an old report of one that has crashed
	} {
		alice.HeardInFlight(noon, m.replica, version-m.ago, m.n)
		if got := used(alice, noon); got != m.want {
			t.Errorf("after report %d, %d requests are elsewhere, want %d", i, got, m.want)
		}
	}
	if got := used(alice, noon.Add(unknownFor)); got != 8 {
		t.Errorf("without a sign of life of d, %d requests are elsewhere", got)
	}
	now := noon.Add(10 * time.Second)
	cs.Running(now, []string{"b", "c", "d"}, nil, 4)
	if got := used(alice, now); got != 33 {
		t.Errorf("when d runs, %d requests are elsewhere", got)
	}
	cs.Running(now, []string{"b"}, []Vanished{{"d", now.Add(50 * time.Second)}}, 3) // c has ended
	for seconds, want := range []int64{0: 16, 49: 16, 50: 6} {
		if got := used(alice, now.Add(time.Duration(seconds)*time.Second)); want > 0 && got != want {
			t.Errorf("%d s after d was missed, %d requests are elsewhere, want %d", seconds, got, want)
		}
	}
	now = now.Add(time.Minute)
	cs.Share(now, Sharing{})
	if got := used(alice, now); got != 0 {
		t.Errorf("alone, %d requests are elsewhere", got)
	}
}

func TestAReplicaThatHearsNobodyHasItsPartOfTheRequests(t *testing.T) {
	for _, test := range []struct{ most, own, other, first, then int }{
		{30, 0, 0, 10, 10}, {30, 0, 30, 1, 10}, {30, 0, 21, 3, 10}, {30, 20, 0, 10, 10}, {20, 2, 0, 6, 6}, {2, 0, 0, 1, 1},
	} {
		cs, alice := counting(test.most)
		now := noon
		for i := range test.own { // each is known to the others before the next one
			admitted(t, alice, now, ratelimit.Estimate{Prompt: 1})
			said(cs, alice, now, uint64(i+1))
			now = now.Add(time.Second)
		}
		alice.HeardInFlight(now, "b1", 1, int64(test.other))
		cs.Share(now, Sharing{Replicas: 3, Apart: true})
		for _, want := range []int{test.first, test.then} {
			if got := alice.Snapshot(now).MaxRequests; got != want {
				t.Errorf("%+v: it may have %d, want %d", test, got, want)
			}
			now = now.Add(time.Minute)
		}
		alice.beginAll(now)
		if got := alice.Snapshot(now).InFlight; got != max(test.own, test.then) {
			t.Errorf("%+v: it has %d", test, got)
		}
		if refusal := alice.Check(now, ratelimit.Estimate{Prompt: 1}); refusal.MayClaim() {
			t.Errorf("it may claim: %+v", refusal)
		}
	}
}

// TestNoMoreRequestsWaitThanMayBeInFlight because each holds its body.
func TestNoMoreRequestsWaitThanMayBeInFlight(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		cs, alice := counting(9)
		alice.Change(time.Now(), Settings{MaxRequests: 9})
		cs.Share(time.Now(), Sharing{Replicas: 3, Delay: 100 * time.Millisecond})
		alice.beginAll(time.Now())
		began := time.Now()
		var mu sync.Mutex
		after := make(map[time.Duration]int)
		for range 50 {
			go func() {
				if _, refusal := alice.Await(ratelimit.Estimate{Prompt: 1}); refusal == nil {
					t.Error("it is admitted, although no report arrives")
				}
				mu.Lock()
				defer mu.Unlock()
				after[min(time.Since(began), hearing)]++
			}()
		}
		time.Sleep(2 * hearing)
		mu.Lock()
		defer mu.Unlock()
		if after[0] != 40 || after[hearing] != 10 { // 9, and the one that has a claim
			t.Errorf("requests were refused after %v", after)
		}
		alice.mu.Lock()
		defer alice.mu.Unlock()
		if alice.inFlight != 3 || alice.waiting != 0 {
			t.Error("requests that were refused count")
		}
	})
}

// TestWithoutAMaximumNothingInFlightIsReported but once that there is none any
// more.
func TestWithoutAMaximumNothingInFlightIsReported(t *testing.T) {
	cs, alice := counting(3)
	admitted(t, alice, noon, ratelimit.Estimate{Prompt: 1})
	if n := said(cs, alice, noon, 1); n != 1 {
		t.Errorf("%d are reported", n)
	}
	cs.Configure(noon, func(string) Settings { return Settings{} })
	for i, want := range []bool{true, false} {
		if n, ok := alice.ReportInFlight(); n != 0 || ok != want {
			t.Errorf("in report %d: %d, %t", i, n, ok)
		}
	}
}

func TestARequestThatWaitsIsAdmittedWhenTheMaximumIsRemoved(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		cs := NewLimiters(nil)
		cs.Configure(time.Now(), func(string) Settings { return Settings{MaxRequests: 3} })
		cs.Share(time.Now(), Sharing{Replicas: 3, Delay: 100 * time.Millisecond})
		alice := cs.Get(time.Now(), "alice")
		alice.beginAll(time.Now())
		time.AfterFunc(50*time.Millisecond, func() { cs.Configure(time.Now(), func(string) Settings { return Settings{} }) })
		time.AfterFunc(60*time.Millisecond, func() { said(cs, alice, time.Now(), 1) })
		if _, refusal := alice.Await(ratelimit.Estimate{Prompt: 1}); refusal != nil {
			t.Errorf("it is refused: %+v", refusal)
		}
	})
}

// TestAReportAfterTheEndOfSharingDoesNotCount although no one will say that its
// replica has ended.
func TestAReportAfterTheEndOfSharingDoesNotCount(t *testing.T) {
	cs, alice := counting(3)
	cs.Share(noon, Sharing{})
	cs.HeardInFlight(noon, alice.ID(), "b1", 1, 3)
	if _, refusal := alice.Try(noon.Add(time.Hour), ratelimit.Estimate{Prompt: 1}); refusal != nil {
		t.Errorf("it is refused: %+v", refusal)
	}
}

// TestReplicasThatEndedLongAgoTakeNoMemory even if a store still has their
// reports.
func TestReplicasThatEndedLongAgoTakeNoMemory(t *testing.T) {
	_, alice := counting(30)
	for i := range 2 * maxFigures {
		alice.HeardInFlight(noon, fmt.Sprint("x", i), uint64(noon.Add(-time.Hour).UnixMicro()), 1)
	}
	alice.HeardInFlight(noon, "b1", uint64(noon.UnixMicro()), 30)
	if n := len(alice.concurrent.figures); n != 1 {
		t.Errorf("%d replicas are remembered, want 1", n)
	}
	if _, refusal := alice.Try(noon, ratelimit.Estimate{Prompt: 1}); refusal == nil {
		t.Error("the requests of a replica that runs do not count")
	}
}
