package pool

import (
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/quota"
)

// ramped is a pool of a member whose cooldown of so many seconds begins at the
// start, and of another one behind it.
func ramped(t *testing.T, r Refusal) (testPool, map[string]*Member) {
	t.Helper()
	p, m, _ := poolOf(t, "a:1:1", "b:2:1")
	p.Close() // its timer is real
	p.Steers = true
	m["a"].health.rememberServed("m")
	m["a"].Quota("m")
	m["a"].CoolDown(r, start)
	return p, m
}

// burst sends requests at a time, and returns those that a gets.
func burst(p testPool, m map[string]*Member, n int, now time.Time) (sent []quota.Mark) {
	for range n {
		if p.Pick(&asks{model: "m", cost: 1}, now) == m["a"] {
			sent = append(sent, m["a"].Deduct("m", 1))
		}
	}
	return sent
}

// reply is the first byte of a reply to a request that was sent at a time.
func reply(m *Member, mark quota.Mark, sent, now time.Time) {
	m.Quota("m").See(quota.Reply{Mark: mark, Sent: sent, Served: true}, "m", now)
	m.Answered(Scope{Model: "m"}, sent)
}

func wantBurst(t *testing.T, p testPool, m map[string]*Member, want int, now time.Time) (sent []quota.Mark) {
	t.Helper()
	if sent = burst(p, m, 100, now); len(sent) != want {
		t.Errorf("after %v a gets %d of 100 requests, want %d", now.Sub(start), len(sent), want)
	}
	return sent
}

func TestRequestsReturnStepByStepAfterALongCooldown(t *testing.T) {
	p, m := ramped(t, throttle(30, 1))
	wantBurst(t, p, m, 0, at(29))
	first := wantBurst(t, p, m, 1, at(30)) // the probe
	reply(m["a"], first[0], at(30), at(30.5))
	second := wantBurst(t, p, m, 4, at(30.5)) // twice as many
	reply(m["a"], second[0], at(30.5), at(31))
	wantBurst(t, p, m, 5, at(31))
	wantBurst(t, p, m, 8, at(32.1)) // two seconds later, without a first byte
	wantBurst(t, p, m, 100, at(50)) // it is over
}

func TestAShortCooldownHasNoRamp(t *testing.T) {
	p, m := ramped(t, throttle(10, 1))
	first := wantBurst(t, p, m, 1, at(10))
	reply(m["a"], first[0], at(10), at(10.5))
	wantBurst(t, p, m, 100, at(10.5))
}

func TestAFailureThatIsLongHasARamp(t *testing.T) {
	p, m := ramped(t, failure(20))
	first := wantBurst(t, p, m, 1, at(20))
	reply(m["a"], first[0], at(20), at(20.5))
	wantBurst(t, p, m, 4, at(20.5))
}

// A ramp, and a prediction that a member is full, keep no request away that
// another member cannot serve.
func TestSteeringRefusesNoRequest(t *testing.T) {
	for name, other := range map[string]func(b *Member){
		"another one throttles":  func(b *Member) { b.CoolDown(throttle(300, 1), start) },
		"another one is a guess": func(b *Member) { r := throttle(300, 1); r.Guess = true; b.CoolDown(r, start) },
		"another one fails":      func(b *Member) { b.CoolDown(failure(300), start) },
		"another one is drained": func(b *Member) { b.Drain(Order{}) },
	} {
		p, m := ramped(t, throttle(30, 1))
		other(m["b"])
		for _, seconds := range []float64{30, 31.5} {
			if got := burst(p, m, 100, at(seconds)); seconds > 30 && len(got) != 100 || len(got) == 0 {
				t.Errorf("%s: a gets %d of 100 requests after %v s", name, len(got), seconds)
			}
		}
		m["a"].CoolDown(throttle(.05, 1), at(90))
		if got := burst(p, m, 1, at(90.1)); len(got) != 1 {
			t.Errorf("%s: a gets no request after it was full", name)
		}
	}
}

func TestAFullMemberIsPassedOverForAFifthOfASecond(t *testing.T) {
	p, m := ramped(t, throttle(.05, 1))
	wantBurst(t, p, m, 0, at(.19))
	r := &asks{model: "m", cost: 1}
	if got := p.Pick(r, at(.19)); got != m["b"] || len(r.steered) != 1 || r.steered[0] != "a" {
		t.Errorf("a request goes to %s, past %v", got.Name, r.steered)
	}
	if got := burst(p, m, 1, at(.2)); len(got) != 1 {
		t.Error("a gets no request later")
	}
	p.Steers = false
	m["a"].CoolDown(throttle(.05, 1), at(1))
	if got := burst(p, m, 1, at(1.06)); len(got) != 1 {
		t.Error("a is passed over without steering")
	}
}

// A drained member that is full comes after one that is full.
func TestAFullMemberComesBeforeADrainedOne(t *testing.T) {
	p, m := ramped(t, throttle(.05, 1))
	m["b"].Drain(Order{})
	if got := burst(p, m, 1, at(.1)); len(got) != 1 {
		t.Error("the drained member gets the request")
	}
}
