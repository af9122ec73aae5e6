package pool

import (
	"testing"
	"time"
)

func TestAMemberOverItsQuotaWaitsForItAndHasNoCooldown(t *testing.T) {
	tested, m := poolThatTells(t, []string{"a:1:1", "b:2:1"})
	p := tested.Pool
	over := make([]Over, 2)
	r := &Ask{At: []At{{Model: "m", Takes: true}, {Model: "m", Takes: true}}, Quotas: &Quotas{Over: over}}
	pick := func(now time.Time) string {
		chosen := p.Pick(r, now)
		if chosen == nil {
			return "nobody"
		}
		chosen.Release()
		return chosen.Name
	}
	if got := pick(start); got != "a" {
		t.Errorf("with room, %s is picked", got)
	}
	over[m["a"].Index] = Over{Until: at(10), PerSecond: 2}
	if got := pick(start); got != "b" || !m["a"].Throttles(r, start) || m["b"].Throttles(r, start) {
		t.Errorf("over the quota of a, %s is picked", got)
	}
	over[m["b"].Index] = Over{Until: at(4), PerSecond: 1}
	if got := pick(start); got != "nobody" {
		t.Errorf("over both quotas, %s is picked", got)
	}
	if wait := p.Wait(r, start); wait != 4*time.Second {
		t.Errorf("the wait is %s, want 4s", wait)
	}
	if w := p.Why(r, start); w.Throttled == nil || !w.All() {
		t.Errorf("the reasons are %+v", w)
	}
	back := p.Returns(r, nil, start, at(6))
	if len(back) != 1 || back[0].Index != m["b"].Index || back[0].At != at(4) || back[0].Places != 6 {
		t.Errorf("the returns are %+v, want b after 4s with 6 places", back)
	}
	if got := pick(at(4)); got != "b" {
		t.Errorf("after 4s, %s is picked", got)
	}
	for _, s := range p.Snapshot(start) {
		if len(s.Cooldowns)+len(s.Due) > 0 {
			t.Errorf("%s has a cooldown", s.Member.Name)
		}
	}
}

// TestAQuotaHasItsPlacesAtAMemberWithoutKnownLimits unless the member throttles
// as well.
func TestAQuotaHasItsPlacesAtAMemberWithoutKnownLimits(t *testing.T) {
	tested, m := poolThatTells(t, []string{"a:1:1"})
	a := m["a"]
	a.Models = []string{"m"}
	r := &Ask{At: []At{{Model: "m", Takes: true}}, Quotas: &Quotas{Over: []Over{{Until: at(4), PerSecond: 2}}}}
	wantPlaces := func(what string, want float64) {
		t.Helper()
		if back := tested.Pool.Returns(r, nil, start, at(6)); len(back) != 1 || back[0].Places != want {
			t.Errorf("%s, the returns are %+v, want %v places", what, back, want)
		}
	}
	wantPlaces("before the first reply", 12)
	a.Quota("m")
	wantPlaces("after a reply", 12)
	a.CoolDown(Refusal{Throttle: true, Model: "m", Wait: 5 * time.Second, Started: start}, start)
	wantPlaces("during a cooldown", 1)
}
