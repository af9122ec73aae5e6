package quota

import (
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// Reply is what a meter learns from.
type Reply struct {
	Rates verdict.Rates
	// Throttles reports whether it is a throttle, and Served whether it serves
	// its request.
	Throttles, Served bool
	// Cost is what the request costs, in tokens.
	Cost int64
	// Mark is that of its request, which was sent at Sent.
	Mark Mark
	Sent time.Time
}

// See records what a reply says of the use and of the limits of a model.
func (m *Meter) See(r Reply, model string, now time.Time) {
	if r.Mark.meter != nil && r.Mark.meter != m {
		return // it was sent before the backend's key changed
	}
	if ramp := m.ramp.Load(); ramp != nil && At(r.Sent) >= ramp.begins {
		ramp.replied.Add(1)
	}
	if used, ok := r.Rates.Utilization.Number(); ok {
		m.see(utilization, used/100, now)
	}
	for i, rate := range [...]*verdict.Rate{requests: &r.Rates.Requests, tokens: &r.Rates.Tokens} {
		if said, ok := read(rate, windows[i]); ok && isOf(&r.Rates, model) {
			m.allowances[i].learn(said, &r, i, At(now))
		}
	}
	if r.Throttles {
		m.seeThrottle(now)
	}
}

// isOf reports whether the limits are those of the model. A provisioned
// deployment of Azure's may have a standard deployment serve a request, whose
// limits the reply then has (spillover).
func isOf(rates *verdict.Rates, model string) bool {
	return len(rates.Deployment) == 0 || strings.EqualFold(rates.Deployment[0], model)
}

// The limits, by their indexes.
const (
	requests = iota
	tokens
	limits
)

// windows are how long the windows of the limits last, at most.
var windows = [limits]time.Duration{requests: 10 * time.Second, tokens: time.Minute}

// longestReset is the longest reset of a limit by the minute. A longer one is
// that of a day, which says nothing of how busy the backend is.
const longestReset = time.Hour

// said is what a reply says of a rate limit.
type said struct {
	limit, remaining float64
	// most is how much of the limit there is in a window. 0: that is not known.
	most float64
	// window is in which time the limit is whole again, and whole how long a
	// window lasts.
	window, whole time.Duration
	// refill is how much the limit grows in a nanosecond. 0: not before the
	// window ends.
	refill float64
}

// read reads what a reply says of a limit. The limit is one by the minute. But
// Azure counts requests in windows of 10 s, of which it names only what
// remains: of 120 requests a minute, 19 remain after one. So where the reset is
// a number of seconds, as Azure's is, it is known how many there are in a
// window only if its length is named. Where the reset is a duration, as
// OpenAI's is, the limit grows all the time.
func read(rate *verdict.Rate, longest time.Duration) (s said, ok bool) {
	var isLimited, isKnown bool
	s.limit, isLimited = rate.Limit.Number()
	if !isLimited || s.limit == 0 {
		return s, false
	}
	if s.remaining, isKnown = rate.Remaining.Number(); !isKnown {
		return s, false
	}
	s.limit, s.remaining = min(s.limit, highestCost), min(s.remaining, highestCost) // some say "no limit" with a huge number
	s.most, s.window = s.limit, longest
	reset, isNumber := rate.Reset.Number()
	if isNumber {
		if reset > 0 { // 0 says nothing: Azure sends it with whatever remains
			s.window = time.Duration(min(reset, 2*longestReset.Seconds()) * float64(time.Second))
		}
	} else if reset, ok := resetOf(rate.Reset); ok {
		used := s.limit - s.remaining
		if reset <= 0 {
			return s, reset == 0 && used <= 0 // otherwise it was whole again before the reply was sent
		}
		s.window = reset
		if used > 0 {
			s.refill = used / float64(reset)
			if s.limit > s.refill*float64(longestReset) {
				return s, false // a limit by the day
			}
		}
	}
	if s.window > longestReset {
		return s, false
	}
	s.window, s.whole = min(s.window, longest), longest
	renewal, isNamed := rate.Renewal.Number()
	switch {
	case isNamed && renewal > 0:
		s.most *= min(1, renewal/60)
		s.whole = time.Duration(min(renewal, 60) * float64(time.Second))
		s.window = min(s.window, s.whole)
	case isNumber && longest == windows[requests]:
		s.most = 0
	}
	return s, true
}

// resetOf returns the reset that is a duration.
func resetOf(values verdict.Values) (time.Duration, bool) {
	for _, v := range values {
		if d, err := time.ParseDuration(strings.TrimSpace(v)); err == nil {
			return d, true
		}
	}
	return 0, false
}
