package quota

import (
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Fields are what the header of a reply says of a rate limit. The zero Fields say nothing.
type Fields struct {
	// Limit is how much there may be, and Remaining how much is left.
	Limit, Remaining int64
	// Reset is how long it takes until all of it is there again.
	Reset time.Duration
	// Known reports whether there is such a limit.
	Known bool
}

// Limits are the limits of requests and of tokens, in this order.
type Limits [len(limits)]Fields

// RemoveFields removes everything from the header that providers say of their rate limits.
func RemoveFields(header http.Header) { Limits{}.Set(header, false) }

// Set replaces what the header says of rate limits by the limits that are known, under OpenAI's names. The
// reset is a duration, as from OpenAI, or a number of seconds, as from Azure.
func (l Limits) Set(header http.Header, seconds bool) {
	for name := range header {
		if isRateLimit(name) && !l.names(name) {
			delete(header, name)
		}
	}
	for i, f := range l {
		if !f.Known {
			continue
		}
		reset := roundUp(f.Reset, time.Millisecond).String()
		if seconds {
			reset = strconv.FormatInt(int64(roundUp(f.Reset, time.Second)/time.Second), 10)
		}
		set(header, limits[i].limit[0], strconv.FormatInt(f.Limit, 10))
		set(header, limits[i].remaining[0], strconv.FormatInt(f.Remaining, 10))
		set(header, limits[i].reset[0], reset)
	}
}

func isRateLimit(name string) bool {
	return strings.HasPrefix(name, "X-Ratelimit-") || strings.HasPrefix(name, "X-Rate-Limit-") || strings.HasPrefix(name, "Anthropic-Ratelimit-")
}

// names reports whether it is the name of a field that Set sets.
func (l Limits) names(name string) bool {
	for i, f := range l {
		if f.Known && (name == limits[i].limit[0] || name == limits[i].remaining[0] || name == limits[i].reset[0]) {
			return true
		}
	}
	return false
}

// set sets a field of a header, in place if the backend has sent it, too: see BenchmarkHeader.
func set(header http.Header, name, value string) {
	if values := header[name]; len(values) == 1 {
		values[0] = value
	} else {
		header[name] = []string{value}
	}
}

func roundUp(d, unit time.Duration) time.Duration { return (d + unit - 1).Truncate(unit) }

// Fields returns what is left of the limit of requests (0) or of tokens (1). While the backend is benched,
// nothing is left, and only the limit must be known.
func (m *Meter) Fields(i int, benched bool, now time.Time) (f Fields) {
	if m == nil {
		return f
	}
	a, at := &m.allowances[i], At(now)
	f.Limit, f.Known = a.limit.Load(), a.limit.Load() > 0
	if !benched {
		until := Instant(a.until.Load())
		f.Remaining, f.Reset, f.Known = max(0, min(a.left(at), f.Limit)), time.Duration(until-at), at < until
	}
	return f
}
