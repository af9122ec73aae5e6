package quota

import (
	"net/http"
	"testing"
	"time"
)

// TestASecondThrottleOfABurstHidesNoShorterWindow has a backend whose windows
// of a minute become such of ten seconds.
func TestASecondThrottleOfABurstHidesNoShorterWindow(t *testing.T) {
	m, at := new(Meter), time.Now()
	for i := range 14 {
		every := time.Minute
		if i >= 4 {
			every = 10 * time.Second
		}
		end, throttled := at.Add(every), at.Add(every-2*time.Second)
		m.spend(100, at.Add(time.Millisecond))
		c := Cooldown{Since: throttled, Until: end, Throttle: true, Named: true}
		m.CoolDown(c, throttled)
		m.CoolDown(c, throttled.Add(20*time.Millisecond))
		at = end
	}
	if l := m.learned.Load(); l.length != 10*time.Second {
		t.Errorf("the windows last %s, want 10s", l.length)
	}
}

// TestThrottlesTeachOnlyWhatRepliesDoNotSay has a backend that has served
// little in its last windows. Its replies may say themselves what is left.
func TestThrottlesTeachOnlyWhatRepliesDoNotSay(t *testing.T) {
	rest := header("X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "1000",
		"X-Ratelimit-Reset-Tokens", "60")
	for name, tc := range map[string]struct {
		said     http.Header
		replicas bool
		want     bool
	}{
		"nothing is said":                   {header(), false, true},
		"a limit of tokens":                 {rest, false, false},
		"a limit that other replicas share": {rest, true, true},
		"a utilization":                     {header("Azure-Openai-Deployment-Utilization", "10%"), false, false},
	} {
		m := new(Meter)
		for end := 10.; end <= 30; end += 10 {
			m.spend(100, at(end-9))
			m.CoolDown(Cooldown{Since: at(end - 1), Until: at(end), Throttle: true, Named: true}, at(end-1))
		}
		if m.learned.Load().most != 100 {
			t.Fatalf("learned %+v", m.learned.Load())
		}
		now := at(32.5) // the reading of the last throttle has faded
		m.Ask(1, now)
		m.spend(40, now) // of 100, of which gold keeps 80
		if tc.replicas {
			m.Hear("b", TierCosts{}, now)
		}
		see(m, tc.said, false, now)
		_, kept := m.Kept(beyond(2, .8), At(now))
		if got := !m.Leaves(kept, 1, At(now)); got != tc.want {
			t.Errorf("%s: reserved is %v, want %v", name, got, tc.want)
		}
		if wait := m.Wait(kept, 1, now); wait > 0 != tc.want {
			t.Errorf("%s: the wait is %v, although reserved is %v", name, wait, tc.want)
		}
	}
}
