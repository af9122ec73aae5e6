package quota

import (
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Fields are the fields of a reply's header about a rate limit. The zero Fields
// are those of an unknown limit.
type Fields struct {
	// Limit is the limit, and Remaining is how much of it is left.
	Limit, Remaining int64
	// Reset is the time until the whole limit is available again.
	Reset time.Duration
	// Known reports whether the values are known.
	Known bool
}

// Limits are the limits of requests and of tokens, in this order.
type Limits [limits]Fields

// RemoveFields removes all fields of rate limits from a header, by the names of
// all known providers.
func RemoveFields(header http.Header) { Limits{}.Set(header, false) }

// Set replaces the header's fields of rate limits with the known limits, under
// OpenAI's names. The reset is written as a duration, as OpenAI does, or as a
// number of seconds, as Azure does.
func (l Limits) Set(header http.Header, seconds bool) {
	var values texts
	for i, f := range l {
		if f.Known {
			values[i] = f.texts(seconds)
		}
	}
	for name, sent := range header {
		if !isRateLimit(name) {
			continue
		}
		if value := values.of(name); value != nil && *value != "" && len(sent) == 1 {
			sent[0], *value = *value, "" // in place: see BenchmarkHeader
		} else {
			delete(header, name)
		}
	}
	for i := range values {
		for j, value := range values[i] {
			if value != "" {
				header[names[i][j]] = []string{value}
			}
		}
	}
}

func isRateLimit(name string) bool {
	return strings.HasPrefix(name, "X-Ratelimit-") || strings.HasPrefix(name, "X-Rate-Limit-") ||
		strings.HasPrefix(name, "Anthropic-Ratelimit-")
}

// texts are the texts of the three fields of each limit: the limit, the
// remaining amount and the reset.
type texts [limits][3]string

// names are the names of the fields that Set sets.
var names = texts{
	requests: {"X-Ratelimit-Limit-Requests", "X-Ratelimit-Remaining-Requests", "X-Ratelimit-Reset-Requests"},
	tokens:   {"X-Ratelimit-Limit-Tokens", "X-Ratelimit-Remaining-Tokens", "X-Ratelimit-Reset-Tokens"},
}

// of returns a pointer to the text of the field with this name. It returns nil
// for any other name.
func (t *texts) of(name string) *string {
	for i := range names {
		if j := slices.Index(names[i][:], name); j >= 0 {
			return &t[i][j]
		}
	}
	return nil
}

// texts returns the values of the fields. They are substrings of one string to
// save allocations: see BenchmarkHeader.
func (f Fields) texts(seconds bool) [3]string {
	all := strconv.AppendInt(make([]byte, 0, 64), f.Limit, 10)
	limit := len(all)
	all = strconv.AppendInt(all, f.Remaining, 10)
	remaining := len(all)
	if seconds {
		all = strconv.AppendInt(all, int64(roundUp(f.Reset, time.Second)/time.Second), 10)
	} else {
		all = append(all, roundUp(f.Reset, time.Millisecond).String()...)
	}
	text := string(all)
	return [...]string{text[:limit], text[limit:remaining], text[remaining:]}
}

func roundUp(d, unit time.Duration) time.Duration { return (d + unit - 1).Truncate(unit) }

// Fields returns the limit of requests (0) or of tokens (1) and how much of it
// is left. If coolingDown is true, nothing is left, and the limit alone must be
// known.
func (m *Meter) Fields(i int, coolingDown bool, now time.Time) (f Fields) {
	if m == nil {
		return f
	}
	a, at := &m.allowances[i], At(now)
	f.Limit, f.Known = a.limit.Load(), a.limit.Load() > 0
	if !coolingDown {
		until := Instant(a.until.Load())
		f.Remaining, f.Reset, f.Known = max(0, min(a.left(at), f.Limit)), time.Duration(until-at), at < until
	}
	return f
}
