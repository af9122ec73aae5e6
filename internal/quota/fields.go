package quota

import (
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Fields are what the header of a reply says of a rate limit. The zero Fields
// say nothing.
type Fields struct {
	// Limit is how much there may be, and Remaining how much is left.
	Limit, Remaining int64
	// Reset is how long it takes until all of it is there again.
	Reset time.Duration
	// Known reports whether there is such a limit.
	Known bool
}

// Limits are the limits of requests and of tokens, in this order.
type Limits [limits]Fields

// RemoveFields removes everything from the header that providers say of their
// rate limits.
func RemoveFields(header http.Header) { Limits{}.Set(header, false) }

// Set replaces what the header says of rate limits by the limits that are
// known, under OpenAI's names. The reset is a duration, as from OpenAI, or a
// number of seconds, as from Azure.
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
	return strings.HasPrefix(name, "X-Ratelimit-") || strings.HasPrefix(name, "X-Rate-Limit-") || strings.HasPrefix(name, "Anthropic-Ratelimit-")
}

// texts are texts for the three fields of each limit: how much there may be,
// how much remains, and the reset.
type texts [limits][3]string

// names are the names of the fields that Set sets.
var names = texts{
	requests: {"X-Ratelimit-Limit-Requests", "X-Ratelimit-Remaining-Requests", "X-Ratelimit-Reset-Requests"},
	tokens:   {"X-Ratelimit-Limit-Tokens", "X-Ratelimit-Remaining-Tokens", "X-Ratelimit-Reset-Tokens"},
}

// of returns the text for the field with this name. nil: there is no such
// field.
func (t *texts) of(name string) *string {
	for i := range names {
		if j := slices.Index(names[i][:], name); j >= 0 {
			return &t[i][j]
		}
	}
	return nil
}

// texts returns the values of the fields, which are cut from one string: see
// BenchmarkHeader.
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

// Fields returns what is left of the limit of requests (0) or of tokens (1).
// While the backend cools down, nothing is left, and only the limit must be
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
