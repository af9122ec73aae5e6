package pool

import (
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
)

// disproofs are the ways in which a cooldown ends before its time.
var disproofs = map[string]func(m *Member){
	"an operator resets the backend": func(m *Member) { m.Reset(Order{}) },
	"a request is served":            func(m *Member) { m.Answered(Scope{Model: "m"}, time.Now()) },
}

// TestADisprovedCooldownKeepsNoTierAway until its end. It had said that nothing
// is left until then.
func TestADisprovedCooldownKeepsNoTierAway(t *testing.T) {
	for name, disprove := range disproofs {
		t.Run(name, func(t *testing.T) {
			bubble.Test(t, func(t *testing.T) {
				p, m, _ := poolOf(t, "a:1:1")
				defer p.Close()
				p.Steers = true
				a := m["a"]
				a.health.rememberServed("m")
				meter, shares := a.Quota("m"), &quota.Shares{1: .5}
				gets := func() bool {
					meter.Ask(1, time.Now()) // the tier that keeps a share asks, too
					r := &asks{model: "m", cost: 10, tier: quota.Tier{Number: 2, Shares: shares}}
					got := p.Pick(r, time.Now())
					if got != nil {
						got.Release()
					}
					return got != nil
				}
				meter.Ask(2, time.Now())
				if !gets() {
					t.Fatal("the tier gets nothing before the cooldown")
				}
				a.CoolDown(throttle(300, 100_000), time.Now())
				time.Sleep(10 * time.Second)
				if gets() {
					t.Fatal("the tier gets something during the cooldown")
				}
				disprove(a)
				for _, wait := range []time.Duration{3 * time.Second, time.Minute, 300 * time.Second} {
					time.Sleep(wait)
					if !gets() {
						t.Errorf("%s later, the tier gets nothing", wait)
					}
				}
			})
		})
	}
}

// TestNoRampFollowsADisprovedCooldown at its end, which came long before.
func TestNoRampFollowsADisprovedCooldown(t *testing.T) {
	for name, disprove := range disproofs {
		t.Run(name, func(t *testing.T) {
			bubble.Test(t, func(t *testing.T) {
				p, m, _ := poolOf(t, "a:1:1", "b:2:1")
				defer p.Close()
				p.Steers = true
				a := m["a"]
				a.health.rememberServed("m")
				a.Quota("m")
				a.CoolDown(throttle(300, 100_000), time.Now())
				time.Sleep(10 * time.Second)
				disprove(a)
				for range 310 {
					time.Sleep(time.Second)
					now := time.Now()
					got := burst(p, m, 10, now)
					if len(got) != 10 {
						t.Fatalf("a gets %d of 10 requests", len(got))
					}
					for _, mark := range got {
						reply(a, mark, now, now)
					}
				}
			})
		})
	}
}
