package quota

import (
	"net/http"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// Utilization is Azure's header for provisioned throughput: `89.3%`, which may be over 100.
const Utilization = "Azure-Openai-Deployment-Utilization"

// Reply is what a meter learns from.
type Reply struct {
	Header http.Header
	// Throttles reports whether it is a throttle, and Served whether it serves its request.
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
	if used, ok := verdict.HeaderNumber(r.Header, Utilization); ok {
		m.see(utilization, used/100, now)
	}
	for i := range limits {
		said, ok := limits[i].read(r.Header, windows[i])
		if !ok || !isOf(r.Header, model) {
			continue
		}
		m.allowances[i].learn(said, &r, i, At(now))
	}
	if r.Throttles {
		m.see(throttle, 1, now)
	}
}

// isOf reports whether the limits in a header are those of the model. A provisioned deployment of Azure's
// may have a standard deployment serve a request, whose limits the reply then has (spillover).
func isOf(header http.Header, model string) bool {
	served := header["X-Ms-Deployment-Name"]
	return len(served) == 0 || strings.EqualFold(served[0], model)
}

// limit is a rate limit, with the headers that describe it, each in both spellings of Azure's.
type limit struct {
	limit, remaining, reset, renewal [2]string
}

// The limits, by their indexes.
const (
	requests = iota
	tokens
)

var limits = [...]limit{requests: limitOf("Requests"), tokens: limitOf("Tokens")}

// windows are how long the windows of the limits last, at most.
var windows = [len(limits)]time.Duration{requests: 10 * time.Second, tokens: time.Minute}

func limitOf(of string) limit {
	name := func(what string) [2]string {
		return [2]string{"X-Ratelimit-" + what + "-" + of, "X-Rate-Limit-" + what + "-" + of}
	}
	return limit{name("Limit"), name("Remaining"), name("Reset"), name("Renewalperiod")}
}

// longestReset is the longest reset of a limit by the minute. A longer one is that of a day,
// which says nothing of how busy the backend is.
const longestReset = time.Hour

// said is what a reply says of a rate limit.
type said struct {
	limit, remaining float64
	// most is how much of the limit there is in a window. 0: that is not known.
	most float64
	// window is in which time the limit is whole again.
	window time.Duration
	// refill is how much the limit grows in a nanosecond. 0: not before the window ends.
	refill float64
}

// read reads the headers of the limit. The limit is one by the minute. But Azure counts requests in
// windows of 10 s, of which it names only what remains: of 120 requests a minute, 19 remain after one. So
// where the reset is a number of seconds, as Azure's is, it is known how many there are in a window only
// if its length is named. Where the reset is a duration, as OpenAI's is, the limit grows all the time.
func (l *limit) read(header http.Header, longest time.Duration) (s said, ok bool) {
	var isLimited, isKnown bool
	s.limit, isLimited = verdict.HeaderNumber(header, l.limit[:]...)
	if !isLimited || s.limit == 0 {
		return s, false
	}
	if s.remaining, isKnown = verdict.HeaderNumber(header, l.remaining[:]...); !isKnown {
		return s, false
	}
	s.limit, s.remaining = min(s.limit, highestCost), min(s.remaining, highestCost) // some say "no limit" with a huge number
	s.most, s.window = s.limit, longest
	reset, isNumber := verdict.HeaderNumber(header, l.reset[:]...)
	if isNumber {
		if reset > 0 { // 0 says nothing: Azure sends it with whatever remains
			s.window = time.Duration(min(reset, 2*longestReset.Seconds()) * float64(time.Second))
		}
	} else if reset, ok := resetOf(header, l.reset); ok {
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
	s.window = min(s.window, longest)
	renewal, isNamed := verdict.HeaderNumber(header, l.renewal[:]...)
	switch {
	case isNamed && renewal > 0:
		s.most *= min(1, renewal/60)
		s.window = min(s.window, time.Duration(min(renewal, 60)*float64(time.Second)))
	case isNumber && longest == windows[requests]:
		s.most = 0
	}
	return s, true
}

// resetOf returns the reset that is a duration.
func resetOf(header http.Header, names [2]string) (time.Duration, bool) {
	for _, name := range names {
		for _, v := range header[name] {
			if d, err := time.ParseDuration(strings.TrimSpace(v)); err == nil {
				return d, true
			}
		}
	}
	return 0, false
}
