package verdict

import (
	"errors"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// HintSource is the part of a reply that says when its sender may be called
// again. It is one of a few fixed words, so that it can be a log field and a
// metric's label. RateLimitReset stands for a whole family of headers, in every
// spelling and with any dimension.
type HintSource string

const (
	// NoHint means that the reply has no hint.
	NoHint HintSource = ""
	// RetryAfterMS is the header Azure OpenAI sends and the OpenAI SDKs prefer.
	// Milliseconds, with or without a fraction.
	RetryAfterMS HintSource = "retry-after-ms"
	// XMSRetryAfterMS is the same header under the name other Azure services
	// use.
	XMSRetryAfterMS HintSource = "x-ms-retry-after-ms"
	// RetryAfter is the header of RFC 9110 section 10.2.3.
	RetryAfter HintSource = "retry-after"
	// ErrorText is the text of the error: "Please retry after 9 seconds."
	ErrorText HintSource = "body"
	// RateLimitReset is the reset of an exhausted budget:
	// x-ratelimit-reset-<dimension>, x-rate-limit-reset-<dimension> or
	// anthropic-ratelimit-<dimension>-reset.
	RateLimitReset HintSource = "x-ratelimit-reset"
)

// hintHeaders are the headers that contain a hint, the most specific one first,
// with the function that parses their values.
var hintHeaders = []struct {
	name   string // in canonical form
	source HintSource
	parse  func(value string, header http.Header, now time.Time) (wait time.Duration, ok bool)
}{
	{"Retry-After-Ms", RetryAfterMS, parseMilliseconds},
	{"X-Ms-Retry-After-Ms", XMSRetryAfterMS, parseMilliseconds},
	{"Retry-After", RetryAfter, parseRetryAfter},
}

// IsKnown reports whether the source is one of the constants above. A replica
// accepts no other source from a cooldown that another replica reports.
func (h HintSource) IsKnown() bool {
	for i := range hintHeaders {
		if hintHeaders[i].source == h {
			return true
		}
	}
	return h == NoHint || h == ErrorText || h == RateLimitReset
}

// ReadHint returns how long to wait before the sender of this reply may be
// called again, and the source of that hint. Providers send such hints in many
// forms, of which the official SDKs read only two. The first usable source
// wins: hintHeaders in their order, then the error's text, then the resets. The
// more specific a source is, the closer it is to the wait that is really
// needed. An x-ratelimit-reset header says when the whole budget is refilled.
// That can be sixty times later than the moment when this request would have
// passed, so it comes last. If a header has several values, the first usable
// one wins. Negative, NaN, infinite, empty and unreadable values are not
// usable. A finite number that is too large for a time.Duration is usable: it
// becomes the longest Duration there is. Without a usable source, wait is 0 and
// source is NoHint.
//
// Nothing is rounded and nothing is clamped. A provisioned Azure deployment
// asks for exactly 43 ms; an exhausted standard deployment asks for 86400 s.
// The caller decides how to use the hint.
//
// A retry-after of any kind is read for every status. The body and the resets
// are read for 429 and 503 only: in any other error a phrase like "try again
// in" is about something else, and a budget that happens to be used up is not
// why it failed.
//
// Body is the beginning of the decoded error body and may be nil; only its
// first 64 KiB count. Times of day are compared with the reply's own Date,
// because the same clock wrote both. If there is none, they are compared with
// now.
func ReadHint(status int, header http.Header, body []byte, now time.Time) (wait time.Duration, source HintSource) {
	for i := range hintHeaders {
		h := &hintHeaders[i]
		for _, v := range header[h.name] {
			if wait, ok := h.parse(v, header, now); ok {
				return wait, h.source
			}
		}
	}
	if status != http.StatusTooManyRequests && status != http.StatusServiceUnavailable {
		return 0, NoHint
	}
	if wait, ok := readErrorText(body, clock(header, now)); ok {
		return wait, ErrorText
	}
	if wait, ok := readResets(header, now); ok {
		return wait, RateLimitReset
	}
	return 0, NoHint
}

// HintOf returns the hint in a reply of this class, as [ReadHint] does. If the
// class says that a limit or a budget is used up, the text and the resets are
// about that, so they are read with any status.
func HintOf(class Class, status int, header http.Header, body []byte,
	now time.Time) (wait time.Duration, source HintSource) {
	if class.Promise() {
		status = http.StatusTooManyRequests
	}
	return ReadHint(status, header, body, now)
}

func parseMilliseconds(v string, _ http.Header, _ time.Time) (time.Duration, bool) {
	return parseNumber(v, time.Millisecond)
}

// parseRetryAfter parses the two forms of RFC 9110 section 10.2.3,
// delay-seconds and HTTP-date, and two more that servers send: seconds with a
// fraction, and Go's "6m0s". A date that has passed means now.
func parseRetryAfter(v string, header http.Header, now time.Time) (time.Duration, bool) {
	if wait, ok := parseNumber(v, time.Second); ok {
		return wait, true
	}
	v = strings.TrimSpace(v)
	if wait, ok := parseDuration(v); ok {
		return wait, true
	}
	if t, err := http.ParseTime(v); err == nil {
		return max(0, t.Sub(clock(header, now))), true
	}
	return 0, false
}

// clock returns the sender's time when it replied.
func clock(header http.Header, now time.Time) time.Time {
	for _, v := range header["Date"] {
		if t, err := http.ParseTime(v); err == nil {
			return t
		}
	}
	return now
}

// readResets returns the longest reset among the exhausted dimensions. A
// dimension is any suffix of a reset header's name, such as requests, tokens,
// input-tokens or requests-day. OpenRouter's has none.
//
// A dimension that is not exhausted does not count: OpenAI's reset says when
// the bucket will be full again, and Groq's for requests is at the end of the
// day. Neither does -1, which means "not tracked" (openai-dotnet issue #838). A
// dimension whose remainder is not stated counts only if no other is known to
// be exhausted: Azure has sent a 429 with x-rate-limit-reset-tokens alone
// (openai-python issue #937).
func readResets(header http.Header, now time.Time) (time.Duration, bool) {
	var stated, unstated time.Duration
	exhausted := false
	for name, values := range header {
		remaining, known, isReset := remainder(header, name)
		if !isReset || known && remaining != 0 {
			continue
		}
		wait := time.Duration(0)
		for _, v := range values {
			if w, ok := parseReset(v, header, now); ok {
				wait = w
				break
			}
		}
		if known {
			exhausted = true
			stated = max(stated, wait)
		} else {
			unstated = max(unstated, wait)
		}
	}
	if exhausted {
		return stated, stated > 0
	}
	return unstated, unstated > 0
}

// remainder reports whether name is a reset header, and returns what remains of
// its dimension. known reports whether the reply states that. An unreadable
// value is NaN, which is not 0.
func remainder(header http.Header, name string) (remaining float64, known, isReset bool) {
	var values []string
	if dimension, ok := strings.CutPrefix(name, "Anthropic-Ratelimit-"); ok {
		if dimension, isReset = strings.CutSuffix(dimension, "-Reset"); isReset {
			values = header.Values("Anthropic-Ratelimit-" + dimension + "-Remaining")
		}
	} else if dimension, ok := cutReset(name); ok && (dimension == "" || dimension[0] == '-') {
		isReset = true
		values = header.Values("X-Ratelimit-Remaining" + dimension)
		if len(values) == 0 {
			values = header.Values("X-Rate-Limit-Remaining" + dimension)
		}
	}
	if len(values) == 0 {
		return 0, false, isReset
	}
	for _, v := range values {
		if f, err := strconv.ParseFloat(strings.TrimSpace(v), 64); err == nil {
			return f, true, isReset
		}
	}
	return math.NaN(), true, isReset
}

// NoneLeft reports whether a header says that nothing remains of a rate limit.
func NoneLeft(header http.Header) bool {
	for name := range header {
		if remaining, known, _ := remainder(header, strings.Replace(name, "-Remaining", "-Reset", 1)); known &&
			remaining == 0 {
			return true
		}
	}
	return false
}

func cutReset(name string) (dimension string, ok bool) {
	if dimension, ok = strings.CutPrefix(name, "X-Ratelimit-Reset"); ok {
		return dimension, true
	}
	return strings.CutPrefix(name, "X-Rate-Limit-Reset")
}

// parseReset parses seconds, Go durations, RFC 3339 (Anthropic) and Unix time
// in seconds or milliseconds (OpenRouter). The size of a bare number shows
// which it is: 1e9 seconds are 31 years, 1e12 seconds 31,000. Only a time in
// the future is usable: an empty budget with a reset in the past does not say
// when to return.
func parseReset(v string, header http.Header, now time.Time) (time.Duration, bool) {
	v = strings.TrimSpace(v)
	if f, ok := parseFloat(v); ok {
		switch {
		case f > 1e12:
			// Beyond 1e16 ms, the year 318857, an int64 would soon overflow.
			wait := time.UnixMilli(int64(min(f, 1e16))).Sub(clock(header, now))
			return wait, wait > 0
		case f > 1e9:
			whole, fraction := math.Modf(f)
			wait := time.Unix(int64(whole), int64(fraction*1e9)).Sub(clock(header, now))
			return wait, wait > 0
		}
		wait := scale(f, time.Second)
		return wait, wait > 0
	}
	if wait, ok := parseDuration(v); ok {
		return wait, wait > 0
	}
	if t, err := time.Parse(time.RFC3339, v); err == nil {
		wait := t.Sub(clock(header, now))
		return wait, wait > 0
	}
	return 0, false
}

// parseNumber parses a header value that is a number of units, with or without
// white space around it.
func parseNumber(v string, unit time.Duration) (time.Duration, bool) {
	f, ok := parseFloat(strings.TrimSpace(v))
	if !ok {
		return 0, false
	}
	return scale(f, unit), true
}

// parseFloat parses a decimal number that is neither negative nor spelled "inf"
// or "nan". A number that is too large for a float64 becomes +Inf, which scale
// turns into the longest duration.
func parseFloat(v string) (float64, bool) {
	if n, ok := parseDigits(v); ok {
		return n, true
	}
	// ParseFloat would also take words, signs, hexadecimal and underscores. The
	// check also avoids its error, which would be an allocation for every date.
	if v == "" || v[0] > '9' || v[0] < '.' || v[0] == '/' || strings.ContainsAny(v, "xXpP_") {
		return 0, false
	}
	f, err := strconv.ParseFloat(v, 64)
	if err != nil && !errors.Is(err, strconv.ErrRange) {
		return 0, false
	}
	return f, true
}

// parseDigits parses a number of a few digits, which is the usual case, faster
// than strconv.
func parseDigits(v string) (float64, bool) {
	if v == "" || len(v) > 15 { // a float64 has 15 digits
		return 0, false
	}
	n := int64(0)
	for i := range len(v) {
		if !isDigit(v[i]) {
			return 0, false
		}
		n = 10*n + int64(v[i]-'0')
	}
	return float64(n), true
}

// scale returns f units. If that does not fit, it returns the longest Duration.
func scale(f float64, unit time.Duration) time.Duration {
	ns := math.Round(f * float64(unit))
	if ns >= math.MaxInt64 {
		return math.MaxInt64
	}
	return time.Duration(ns)
}

// add adds two non-negative durations. If the sum does not fit, it returns the
// longest Duration.
func add(a, b time.Duration) time.Duration {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}
