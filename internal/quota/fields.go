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
func RemoveFields(header http.Header) {
	for name := range header {
		if strings.HasPrefix(name, "X-Ratelimit-") || strings.HasPrefix(name, "X-Rate-Limit-") || strings.HasPrefix(name, "Anthropic-Ratelimit-") {
			delete(header, name)
		}
	}
}

// Set replaces what the header says of rate limits by the limits that are known, under OpenAI's names. The
// reset is a duration, as from OpenAI, or a number of seconds, as from Azure.
func (l Limits) Set(header http.Header, seconds bool) {
	RemoveFields(header)
	for i, f := range l {
		if !f.Known {
			continue
		}
		reset := f.Reset.Truncate(time.Millisecond)
		if reset < f.Reset {
			reset += time.Millisecond
		}
		values := [...]string{strconv.FormatInt(f.Limit, 10), strconv.FormatInt(f.Remaining, 10), reset.String()}
		if seconds {
			values[2] = strconv.FormatInt(int64((f.Reset+time.Second-1)/time.Second), 10)
		}
		for j, name := range [...]string{limits[i].limit[0], limits[i].remaining[0], limits[i].reset[0]} {
			header[name] = values[j : j+1 : j+1]
		}
	}
}

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
