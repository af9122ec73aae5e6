package quota

import (
	"testing"
	"time"
)

// TestAThrottleAfterAnIdleTimeLeavesTheLearnedRate has a deployment that works
// off 1,000 a second throttle after it got 300 a second for half a minute, and
// then more than it can work off. That is less than its rate in all, so it must
// not be taken for the rate.
func TestAThrottleAfterAnIdleTimeLeavesTheLearnedRate(t *testing.T) {
	const rate = 1000 / float64(time.Second)
	full := Instant(time.Hour)
	for name, tc := range map[string]struct {
		passed time.Duration
		spent  int64
		want   float64 // as a part of the rate
	}{
		"at once":                     {time.Second, 900, .98},
		"at a lower rate":             {10 * time.Second, 8000, .8},
		"at a much lower rate":        {4 * time.Second, 1000, .98 * .75},
		"after an idle half a minute": {40 * time.Second, 9000 + 12_000, 1},
		"after an idle minute":        {60 * time.Second, 5000, 1},
	} {
		d := &drain{full: full, rate: rate, throttled: full, raised: full, begun: full}
		now := full + Instant(tc.passed)
		got := d.throttle(now+Instant(50*time.Millisecond), now, tc.spent, false).rate / rate
		if got < tc.want-1e-9 || got > tc.want+1e-9 {
			t.Errorf("%s: the rate is %.4f of the one before, want %.4f", name, got, tc.want)
		}
	}
}
