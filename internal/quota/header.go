package quota

import (
	"net/http"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/hint"
)

// Utilization is Azure's header for provisioned throughput: `89.3%`, which may be over 100.
const Utilization = "Azure-Openai-Deployment-Utilization"

// See records what the header of a reply says of the use, and whether the backend throttles.
func (m *Meter) See(header http.Header, throttles bool, now time.Time) {
	if used, ok := hint.Number(header, Utilization); ok {
		m.see(utilization, used/100, 0, now)
	}
	for _, limit := range limits {
		if used, window, ok := limit.read(header); ok {
			m.see(limit.kind, used, window, now)
		}
	}
	if throttles {
		m.see(throttle, 1, 0, now)
	}
}

// limit is a rate limit, with the headers that describe it.
type limit struct {
	kind                             kind
	limit, remaining, reset, renewal string
}

var limits = [...]limit{limitOf(requests, "Requests"), limitOf(tokens, "Tokens")}

func limitOf(k kind, of string) limit {
	return limit{k, "X-Ratelimit-Limit-" + of, "X-Ratelimit-Remaining-" + of, "X-Ratelimit-Reset-" + of, "X-Ratelimit-Renewalperiod-" + of}
}

// longestReset is the longest reset of a limit by the minute. A longer one is that of a day,
// which says nothing of how busy the backend is.
const longestReset = time.Hour

// read returns how much of the limit is used, and in which time that fades. The limit is one by
// the minute. But Azure counts requests in windows of 10 s, of which it names only what remains:
// of 120 requests a minute, 19 remain after one. So where the reset is a number of seconds, as
// Azure's is, requests count only if their window is named.
func (l limit) read(header http.Header) (used float64, window time.Duration, ok bool) {
	most, isLimited := hint.Number(header, l.limit)
	remaining, isKnown := hint.Number(header, l.remaining)
	if !isLimited || !isKnown || most == 0 {
		return 0, 0, false
	}
	reset, isNumber := hint.Number(header, l.reset)
	if isNumber {
		window = time.Duration(min(reset, 2*longestReset.Seconds()) * float64(time.Second))
	} else if values := header[l.reset]; len(values) > 0 {
		window, _ = time.ParseDuration(strings.TrimSpace(values[0]))
	}
	if window > longestReset {
		return 0, 0, false
	}
	renewal, isNamed := hint.Number(header, l.renewal)
	switch {
	case isNamed && renewal > 0:
		most *= min(1, renewal/60)
	case isNumber && l.kind == requests:
		return 0, 0, false
	}
	return max(0, 1-remaining/most), window, true
}
