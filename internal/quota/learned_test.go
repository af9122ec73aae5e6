package quota

import (
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
