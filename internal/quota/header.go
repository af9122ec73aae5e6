package quota

import (
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// Reply is a reply that a meter learns from.
type Reply struct {
	Rates verdict.Rates
	// Throttles reports whether the reply is a throttle, and Served whether it
	// serves the request.
	Throttles, Served bool
	// Cost is the cost of the request in tokens.
	Cost int64
	// Mark identifies the request. Sent is when it was sent.
	Mark Mark
	Sent time.Time
}

// See records a reply's information about the use and the limits of a model.
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
		if info, ok := read(rate, windows[i]); ok && isOf(&r.Rates, model) {
			m.allowances[i].learn(info, &r, i, At(now))
		}
	}
	if r.Throttles {
		m.seeThrottle(now)
	}
}

// isOf reports whether the limits in a reply are those of the model. If a
// provisioned Azure deployment passes a request on to a standard deployment
// (spillover), the reply has the limits of the latter.
func isOf(rates *verdict.Rates, model string) bool {
	return len(rates.Deployment) == 0 || strings.EqualFold(rates.Deployment[0], model)
}

// The limits, by their indexes.
const (
	requests = iota
	tokens
	limits
)

// windows are the longest windows of the limits.
var windows = [limits]time.Duration{requests: 10 * time.Second, tokens: time.Minute}

// longestReset is the longest reset of a limit per minute. A longer one belongs
// to a limit per day, which does not show how busy the backend is.
const longestReset = time.Hour

// fastestRefill is the multiple of a limit per minute that may refill in a
// minute. It is more than 1 because a reset that was rounded down seems to be
// that of a faster refill.
const fastestRefill = 1.1

// rateInfo is a reply's information about a rate limit.
type rateInfo struct {
	limit, remaining float64
	// most is how much of the limit there is in a window. It is 0 if that is
	// not known.
	most float64
	// window is for how long the reading counts: the time until the whole limit
	// is available again, or the longest window if that is not known. whole is
	// the length of a window. It is 0 if it is not known when the window ends.
	window, whole time.Duration
	// refill is how much of the limit comes back per nanosecond. It is 0 if
	// nothing comes back before the window ends.
	refill float64
}

// read reads a reply's information about a limit per minute. ok is false if the
// reply does not show what is left of it.
//
// OpenAI sends the reset as a duration. Its limits refill continuously, so a
// limit per minute refills in a minute. If the reset says that it comes back
// faster, then all of it comes back at the reset, at the end of a window.
//
// Azure sends a number of seconds, and counts requests in windows of 10 s,
// although it names the limit per minute: of 120 requests per minute, 19 remain
// after the first one. So with a number of at most 10 s, the requests in a
// window are known only if the reply names the window's length.
//
// Azure also sends 0, with whatever remains. Then it is not known when the
// window ends, so no part of it can be kept until then, unless the readings
// show when the window began: see allowance. A reset of more than a minute is
// not one of a limit per minute, of which nothing else is known.
func read(rate *verdict.Rate, longest time.Duration) (s rateInfo, ok bool) {
	var isLimited, isKnown bool
	s.limit, isLimited = rate.Limit.Number()
	if !isLimited || s.limit == 0 {
		return s, false
	}
	if s.remaining, isKnown = rate.Remaining.Number(); !isKnown {
		return s, false
	}
	// some say "no limit" with a huge number
	s.limit, s.remaining = min(s.limit, highestCost), min(s.remaining, highestCost)
	reset, isNumber := rate.Reset.Number()
	if isNumber {
		s.window = time.Duration(min(max(0, reset), 2*longestReset.Seconds()) * float64(time.Second))
	} else if reset, ok := resetOf(rate.Reset); ok {
		used := s.limit - s.remaining
		if reset < 0 || reset == 0 && used > 0 {
			return s, false // it was whole again before the reply was sent
		}
		s.window, longest = reset, time.Minute
		if used > 0 {
			s.refill = used / float64(reset)
			if s.limit > s.refill*float64(longestReset) {
				return s, false // a limit by the day
			}
			if s.refill > fastestRefill*s.limit/float64(time.Minute) {
				s.refill = 0
			}
		}
	}
	if s.window > longestReset {
		return s, false
	}
	if s.window > longest {
		longest = time.Minute
	}
	s.most, s.whole = s.limit, longest
	renewal, isNamed := rate.Renewal.Number()
	switch {
	case isNamed && renewal > 0:
		s.whole = time.Duration(min(renewal, 60) * float64(time.Second))
		s.most = s.limit * s.whole.Minutes()
	case isNumber && longest == windows[requests]:
		s.most = 0
	}
	if s.window > 0 && s.window <= time.Minute {
		s.window = min(s.window, s.whole)
	} else {
		s.window, s.whole = s.whole, 0
	}
	return s, true
}

// resetOf returns the reset if it is a duration.
func resetOf(values verdict.Values) (time.Duration, bool) {
	for _, v := range values {
		if d, err := time.ParseDuration(strings.TrimSpace(v)); err == nil {
			return d, true
		}
	}
	return 0, false
}
