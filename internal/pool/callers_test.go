package pool

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
)

// asking is a caller of a shortage: what it asks for, and what it should get,
// as parts of what the servers can serve.
type asking struct {
	asks, gets float64
	tier       int
	at         []int // the servers that it may use; nil: all
}

// crowd is a caller that asks for much, and n that ask for little.
func crowd(n int, most, each asking) (all []asking) {
	for range n {
		all = append(all, each)
	}
	return append(all, most)
}

// TestInAShortageCallersGetFairShares has callers that ask for less than their
// fair share, which get all of it, and others, which get equal parts of the
// rest.
func TestInAShortageCallersGetFairShares(t *testing.T) {
	nineToOne := []asking{{asks: 9, gets: .5}, {asks: 1, gets: .5}}
	for name, servers := range map[string]func() []*server{
		"a window of 10 s":                  func() []*server { return windows(1, 10*time.Second, false) },
		"a window of 10 s, with headers":    func() []*server { return windows(1, 10*time.Second, true) },
		"two of a minute":                   func() []*server { return windows(2, time.Minute, false) },
		"two of a minute, with headers":     func() []*server { return windows(2, time.Minute, true) },
		"a bucket of 2 s":                   func() []*server { return buckets(1, 2, false) },
		"two buckets of 10 s, with headers": func() []*server { return buckets(2, 10, true) },
	} {
		for what, tc := range map[string]shortage{
			"9 to 1":       {callers: nineToOne},
			"little":       {callers: []asking{{asks: 1.8, gets: .8}, {asks: .2, gets: .2}}},
			"three":        {callers: []asking{{asks: 3, gets: .4}, {asks: .3, gets: .3}, {asks: .3, gets: .3}}},
			"many":         {callers: crowd(20, asking{asks: 5, gets: .2}, asking{asks: .04, gets: .04})},
			"uneven costs": {callers: nineToOne, uneven: true},
			"sessions":     {callers: nineToOne, sticky: true},
			"replicas":     {callers: nineToOne, replicas: 3},
			"two tiers": {
				callers: []asking{{asks: 9, gets: .3, tier: 1}, {asks: 1, gets: .3, tier: 1}, {asks: 4, gets: .4, tier: 2}},
				shares:  &quota.Shares{1: .6, 2: .4},
			},
		} {
			tc.servers = servers()
			tc.wantShares(t, name+", "+what)
		}
	}
}

// TestInAShortageACallerGetsItsShareOfTheBackendsThatItMayUse has the others
// leave these to it.
func TestInAShortageACallerGetsItsShareOfTheBackendsThatItMayUse(t *testing.T) {
	for what, callers := range map[string][]asking{
		"the small one at one of two":  {{asks: 9, gets: .5}, {asks: 1, gets: .5, at: []int{0}}},
		"the large one at one of two":  {{asks: 9, gets: .5, at: []int{0}}, {asks: 1, gets: .5}},
		"the small one at one of four": {{asks: 9, gets: .75}, {asks: 1, gets: .25, at: []int{3}}},
	} {
		n := 2
		if callers[1].gets < .5 {
			n = 4
		}
		for kind, servers := range map[string][]*server{"windows": windows(n, 10*time.Second, false), "buckets": buckets(n, 2, true)} {
			s := shortage{servers: servers, callers: callers}
			s.wantShares(t, kind+", "+what)
		}
	}
}

// wantShares checks what callers get of a shortage, from the second minute on.
func (s *shortage) wantShares(t *testing.T, name string) {
	t.Helper()
	if bubble.Race {
		t.Skip("a single goroutine sends all requests, and needs minutes")
	}
	s.replicas, s.steers = max(1, s.replicas), true
	for i, c := range s.callers {
		s.streams = append(s.streams, &stream{caller: fmt.Sprint("caller", i), tier: c.tier, at: c.at, rate: c.asks * 24})
	}
	const from, seconds = 2 * time.Minute, 600 // so that it matters little when a window begins
	s.run(t, from+seconds*time.Second, from)
	for i, c := range s.callers {
		if got := s.streams[i].served / 2400 / seconds; math.Abs(got-c.gets) > .05 {
			t.Errorf("%s: caller %d gets %.3f, want %.3f", name, i, got, c.gets)
		}
	}
	if used := s.used(seconds); used < .96 {
		t.Errorf("%s: %.3f is used, want .96", name, used)
	}
}

// TestWithEnoughForAllNoCallerIsKeptAway has callers whose requests the servers
// refuse only now and then.
func TestWithEnoughForAllNoCallerIsKeptAway(t *testing.T) {
	for name, servers := range map[string]func() []*server{
		"windows": func() []*server { return windows(2, 10*time.Second, true) },
		"buckets": func() []*server { return buckets(2, 10, true) },
	} {
		served := make(map[string]float64)
		for _, caller := range []string{"", "caller"} {
			large, small := &stream{caller: caller, rate: .8 * 24}, &stream{caller: caller, rate: .1 * 24}
			if caller != "" {
				small.caller = "another"
			}
			s := &shortage{servers: servers(), replicas: 1, steers: true, streams: []*stream{large, small}}
			s.run(t, 6*time.Minute, time.Minute)
			served[caller] = large.served
		}
		if served["caller"] < .995*served[""] {
			t.Errorf("%s: the large caller gets %.0f, and %.0f without shares", name, served["caller"], served[""])
		}
	}
}

// TestInAShortageWithoutThrottlesCallersGetFairShares has a tier that keeps
// more than it uses, so that the other one never meets a throttle where limits
// are named.
func TestInAShortageWithoutThrottlesCallersGetFairShares(t *testing.T) {
	for _, length := range []time.Duration{10 * time.Second, time.Minute} {
		large, small := &stream{tier: 1, caller: "large", rate: 9 * 24}, &stream{tier: 1, caller: "small", rate: 3}
		idle := &stream{tier: 2, caller: "idle", rate: .5}
		s := &shortage{servers: windows(2, length, true), replicas: 1, steers: true, streams: []*stream{large, small, idle}, shares: &quota.Shares{1: .6, 2: .4}}
		s.run(t, 5*time.Minute, 2*time.Minute)
		if served := small.served / 100 / small.sent; served < .9 || s.used(180) < .93 {
			t.Errorf("windows of %s: the small caller gets %.2f of what it asks for, and %.3f is used", length, served, s.used(180))
		}
	}
}

// TestInAShortageNothingIsKeptForRequestsThatNeverFit has a caller send
// requests that are larger than all that a server serves in a window.
func TestInAShortageNothingIsKeptForRequestsThatNeverFit(t *testing.T) {
	for _, headers := range []bool{false, true} {
		used := make(map[string]float64)
		for _, caller := range []string{"", "caller"} {
			most, large := &stream{caller: caller, rate: 9 * 24}, &stream{caller: caller, rate: 1, cost: 14400}
			if caller != "" {
				large.caller = "another"
			}
			s := &shortage{servers: windows(2, 10*time.Second, headers), replicas: 1, steers: true, streams: []*stream{most, large}}
			s.run(t, 12*time.Minute, 2*time.Minute)
			used[caller] = s.used(600)
		}
		if used["caller"] < .9*used[""] {
			t.Errorf("headers %t: %.3f is used, and %.3f without shares", headers, used["caller"], used[""])
		}
	}
}

// TestWithSharedLimitsATierKeepsItsShareOfAllModels has the other tier flood
// another model.
func TestWithSharedLimitsATierKeepsItsShareOfAllModels(t *testing.T) {
	for name, servers := range map[string]func() []*server{
		"windows": func() []*server { return windows(2, 10*time.Second, false) },
		"minutes": func() []*server { return windows(1, time.Minute, true) },
		"buckets": func() []*server { return buckets(1, 2, true) },
	} {
		for _, shared := range []bool{true, false} {
			first, second := &stream{tier: 1, rate: 24}, &stream{tier: 2, rate: 9 * 24, model: "n"}
			s := &shortage{servers: servers(), replicas: 1, steers: true, sharedLimits: shared, shares: &quota.Shares{1: .5, 2: .5}, streams: []*stream{first, second}}
			s.run(t, 5*time.Minute, 2*time.Minute)
			part, used := first.served/2400/180, s.used(180)
			t.Logf("%s, shared_limits %v: the tier gets %.3f of %.3f", name, shared, part, used)
			if shared && (math.Abs(part-.5) > .05 || used < .96) || !shared && part > .35 {
				t.Errorf("%s, shared_limits %v: the tier gets %.3f of %.3f, want .5", name, shared, part, used)
			}
		}
	}
}
