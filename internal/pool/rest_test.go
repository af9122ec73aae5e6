package pool

import (
	"testing"
	"time"
)

func TestABackendThatKeepsSayingAtOnceRestsLonger(t *testing.T) {
	type refusal struct {
		started, at float64
		served      bool // in place of refused
		until       float64
	}
	for name, refusals := range map[string][]refusal{
		"each time": {
			{0, 0, false, 0.05}, {0.05, 0.06, false, 0.16}, {0.16, 0.17, false, 0.37}, {0.37, 0.40, false, 0.80}, {0.80, 0.90, false, 1.70},
			{1.70, 1.70, false, 3.30}, {3.30, 3.30, false, 5.30}, // which is the longest
			{5.30, 5.30, false, 7.30},
		},
		"a burst":                            {{0, 0, false, 0.05}, {0, 0.01, false, 0.05}, {0, 0.03, false, 0.05}, {0.06, 0.07, false, 0.17}},
		"what was under way":                 {{0, 0.10, false, 0.15}, {0.02, 0.20, false, 0.25}, {0.05, 0.30, false, 0.35}},
		"a slow backend":                     {{0, 0, false, 0.05}, {0.05, 0.80, false, 0.90}},
		"one is served":                      {{0, 0, false, 0.05}, {0.05, 0.06, false, 0.16}, {0.16, 0.17, true, 0}, {0.20, 0.21, false, 0.26}},
		"one that was sent before is served": {{0, 0, false, 0.05}, {0.05, 0.06, false, 0.16}, {0.01, 0.10, true, 0}, {0.16, 0.17, false, 0.37}},
		"a pause":                            {{0, 0, false, 0.05}, {5, 5, false, 5.05}},
	} {
		t.Run(name, func(t *testing.T) {
			_, members, _ := poolOf(t, "a")
			a := members["a"]
			for _, r := range refusals {
				if r.served {
					a.Served(Scope{Model: "m"}, at(r.started))
					continue
				}
				a.CoolDown(Refusal{
					Throttle: true, Model: "m", Wait: 50 * time.Millisecond, Longest: 2 * time.Second, Started: at(r.started),
				}, at(r.at))
				if got := a.returns((&asks{model: "m"}).of(a.pool), at(r.at)).Sub(start); (got - at(r.until).Sub(start)).Abs() > time.Microsecond {
					t.Errorf("refused at %g s, it rests until %s, want %g s", r.at, got, r.until)
				}
			}
		})
	}
}

func TestABackendThatNamesATimeRestsForSoLong(t *testing.T) {
	_, members, _ := poolOf(t, "a")
	for i := range 20 {
		now := at(float64(i))
		members["a"].CoolDown(Refusal{Throttle: true, Model: "m", Wait: 43 * time.Millisecond, Started: now}, now)
		if got := members["a"].returns((&asks{model: "m"}).of(members["a"].pool), now).Sub(now); got != 43*time.Millisecond {
			t.Fatalf("it rests for %s", got)
		}
	}
}
