package limits

import (
	"math"
	"net/http"
	"slices"
	"strconv"
	"time"
)

// The styles of the headers of a 429 that are more than fixed headers.
const (
	hintsNone      = "azure_none" // only x-rate-limit-reset-*, spelled with a hyphen: openai-python#937
	hintsDay       = "azure_day"  // azure-sdk-for-java#42696
	hintsOpenAI    = "openai_dur" // x-ratelimit-reset-* as durations such as 6m0s
	dayHintSeconds = 86400
)

// HintStyles are the styles of the headers of a 429.
var HintStyles = []string{
	"azure_ms", "azure_both", "azure_s", hintsNone, "azure_neg1", hintsDay, "date", hintsOpenAI, "zero",
}

// NamesWait reports whether a 429 says for how long its caller is to stay away.
// A wait of 0 says that it need not.
func (s Style) NamesWait() bool {
	switch s.Hints {
	case "zero":
		return false
	case "azure_neg1":
		return slices.Contains(bodiesWithWait, s.ErrorBody)
	}
	return true
}

// SetHeaders writes how much of each limit is left. Azure sends these headers
// on every reply, with whole seconds; OpenAI sends durations.
func (l *Limiter) SetHeaders(hdr http.Header, now time.Time) {
	if l.Drain > 0 {
		hdr.Set("azure-openai-deployment-utilization", strconv.FormatFloat(l.Utilization(now), 'f', 1, 64)+"%")
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	reset := seconds
	if l.Style.Hints == hintsOpenAI {
		reset = func(d time.Duration) string { return upToMillisecond(d).String() }
	}
	set := func(w *window, length time.Duration, dimension string, limit int, allowed int64) {
		if limit > 0 {
			w.roll(now, length)
			hdr.Set("x-ratelimit-limit-"+dimension, strconv.Itoa(limit))
			hdr.Set("x-ratelimit-remaining-"+dimension, strconv.FormatInt(max(0, allowed-w.used), 10))
			hdr.Set("x-ratelimit-reset-"+dimension, reset(w.end.Sub(now)))
		}
	}
	set(&l.requests, requestWindow, Requests, l.RequestsPerMinute, l.requestsPerWindow())
	set(&l.tokens, tokenWindow, Tokens, l.TokensPerMinute, int64(l.TokensPerMinute))
}

// setHints writes the wait into the headers of a 429, in the given style.
func setHints(hdr http.Header, style string, l *Limiter, r Refusal, now time.Time) {
	l.SetHeaders(hdr, now)
	// A request may be refused although something is left: it asks for more.
	if hdr.Get("x-ratelimit-remaining-"+r.Limit) != "" {
		hdr.Set("x-ratelimit-remaining-"+r.Limit, "0")
	}
	switch style {
	case "azure_ms":
		hdr.Set("retry-after-ms", milliseconds(r.Wait))
	case "azure_both":
		hdr.Set("retry-after-ms", milliseconds(r.Wait))
		hdr.Set("retry-after", seconds(r.Wait))
	case "azure_s":
		hdr.Set("retry-after", seconds(r.Wait))
	case hintsDay:
		hdr.Set("retry-after", strconv.Itoa(dayHintSeconds))
	case "zero":
		hdr.Set("retry-after-ms", "0")
		hdr.Set("retry-after", "0")
	case "date":
		// The date in retry-after is to be compared with the date of the reply.
		hdr.Set("date", now.UTC().Format(http.TimeFormat))
		hdr.Set("retry-after", now.Add(r.Wait+time.Second-1).Truncate(time.Second).UTC().Format(http.TimeFormat))
	case hintsOpenAI:
		dimension := payg(r.Limit)
		hdr.Set("x-ratelimit-remaining-"+dimension, "0")
		hdr.Set("x-ratelimit-reset-"+dimension, upToMillisecond(r.Wait).String())
	case hintsNone:
		hdr.Del("x-ratelimit-reset-" + Requests)
		hdr.Del("x-ratelimit-reset-" + Tokens)
		hdr.Del("x-ratelimit-remaining-" + r.Limit)
		hdr.Set("x-rate-limit-reset-"+payg(r.Limit), seconds(r.Wait))
	case "azure_neg1": // openai-dotnet#838
		for _, dimension := range []string{Requests, Tokens} {
			hdr.Set("x-ratelimit-limit-"+dimension, "-1")
			hdr.Set("x-ratelimit-remaining-"+dimension, "-1")
			hdr.Set("x-ratelimit-reset-"+dimension, "0")
		}
	}
}

// payg is the `x-ratelimit` dimension of a limit. For a bucket it is tokens.
func payg(limit string) string {
	if limit == Requests {
		return Requests
	}
	return Tokens
}

// Every wait is rounded up, so that a client that comes back at that time is
// admitted.

func seconds(d time.Duration) string { return strconv.FormatInt(wholeSeconds(d), 10) }

func wholeSeconds(d time.Duration) int64 { return int64(math.Ceil(d.Seconds())) }

func milliseconds(d time.Duration) string {
	return strconv.FormatInt(upToMillisecond(d).Milliseconds(), 10)
}

func upToMillisecond(d time.Duration) time.Duration {
	return (d + time.Millisecond - 1).Truncate(time.Millisecond)
}
