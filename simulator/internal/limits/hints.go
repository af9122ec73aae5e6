package limits

import (
	"math"
	"net/http"
	"slices"
	"strconv"
	"time"
)

// The styles of the headers of a 429.
const (
	hintsMS        = "azure_ms"   // retry-after-ms alone
	hintsBoth      = "azure_both" // retry-after-ms and retry-after
	hintsSeconds   = "azure_s"    // retry-after alone
	hintsNone      = "azure_none" // only x-rate-limit-reset-*, spelled with a hyphen: openai-python#937
	hintsNeg1      = "azure_neg1" // limit and remaining -1, reset 0: openai-dotnet#838
	hintsDay       = "azure_day"  // retry-after: 86400: azure-sdk-for-java#42696
	hintsDate      = "date"       // retry-after as an HTTP-date
	hintsOpenAI    = "openai_dur" // x-ratelimit-reset-* as durations such as 6m0s
	hintsGarbage   = "garbage"    // no numbers at all
	hintsNegative  = "negative"   // numbers below zero
	hintsZero      = "zero"       // come back at once
	dayHintSeconds = 86400
)

// HintStyles are the styles of the headers of a 429.
var HintStyles = []string{
	hintsMS, hintsBoth, hintsSeconds, hintsNone, hintsNeg1, hintsDay,
	hintsDate, hintsOpenAI, hintsGarbage, hintsNegative, hintsZero,
}

// NamesWait reports whether a 429 says for how long its caller is to stay away.
// A wait of 0 says that it need not.
func (s Style) NamesWait() bool {
	switch s.Hints {
	case hintsZero:
		return false
	case hintsNeg1, hintsGarbage, hintsNegative:
		return slices.Contains([]string{bodyAzureClassic, bodyAzureNew, bodyOpenAITokens}, s.ErrorBody)
	}
	return true
}

// SetHeaders writes how much of each limit is left. Azure sends these headers on
// every reply, with whole seconds; OpenAI sends durations.
func (l *Limiter) SetHeaders(hdr http.Header, now time.Time) {
	if l.Drain > 0 {
		hdr.Set("azure-openai-deployment-utilization", strconv.FormatFloat(l.Utilization(now), 'f', 1, 64)+"%")
		return
	}
	requests, tokens := l.meters(now)
	requests.set(hdr, l.Style.Hints, "requests")
	tokens.set(hdr, l.Style.Hints, "tokens")
}

func (m meter) set(hdr http.Header, style, dimension string) {
	if m.limit == 0 {
		return
	}
	hdr.Set("x-ratelimit-limit-"+dimension, strconv.Itoa(m.limit))
	hdr.Set("x-ratelimit-remaining-"+dimension, strconv.FormatInt(m.remaining, 10))
	if style == hintsOpenAI {
		hdr.Set("x-ratelimit-reset-"+dimension, upToMillisecond(m.reset).String())
		return
	}
	hdr.Set("x-ratelimit-reset-"+dimension, seconds(m.reset))
	hdr.Set("x-ratelimit-renewalperiod-"+dimension, seconds(m.renewal))
}

// setHints writes the wait into the headers of a 429, in the given style.
func setHints(hdr http.Header, style string, l *Limiter, r Refusal, now time.Time) {
	if l != nil {
		l.SetHeaders(hdr, now)
		// A request may be refused although something is left: it asks for more.
		if hdr.Get("x-ratelimit-remaining-"+r.Limit) != "" {
			hdr.Set("x-ratelimit-remaining-"+r.Limit, "0")
		}
	}
	switch style {
	case hintsMS:
		hdr.Set("retry-after-ms", milliseconds(r.Wait))
	case hintsBoth:
		hdr.Set("retry-after-ms", milliseconds(r.Wait))
		hdr.Set("retry-after", seconds(r.Wait))
	case hintsSeconds:
		hdr.Set("retry-after", seconds(r.Wait))
	case hintsNone:
		for _, dimension := range []string{Requests, Tokens} {
			hdr.Del("x-ratelimit-reset-" + dimension)
		}
		hdr.Del("x-ratelimit-remaining-" + r.Limit)
		hdr.Set("x-rate-limit-reset-"+payg(r.Limit), seconds(r.Wait))
	case hintsNeg1:
		for _, dimension := range []string{Requests, Tokens} {
			hdr.Set("x-ratelimit-limit-"+dimension, "-1")
			hdr.Set("x-ratelimit-remaining-"+dimension, "-1")
			hdr.Set("x-ratelimit-reset-"+dimension, "0")
		}
	case hintsDay:
		hdr.Set("retry-after", strconv.Itoa(dayHintSeconds))
	case hintsDate:
		// The date in retry-after is to be compared with the date of the reply.
		hdr.Set("date", now.UTC().Format(http.TimeFormat))
		hdr.Set("retry-after", roundUp(now.Add(r.Wait)).UTC().Format(http.TimeFormat))
	case hintsOpenAI:
		dimension := payg(r.Limit)
		hdr.Set("x-ratelimit-remaining-"+dimension, "0")
		hdr.Set("x-ratelimit-reset-"+dimension, upToMillisecond(r.Wait).String())
	case hintsGarbage:
		hdr.Set("retry-after-ms", "soon")
		hdr.Set("retry-after", "later")
	case hintsNegative:
		hdr.Set("retry-after-ms", "-1000")
		hdr.Set("retry-after", "-1")
	case hintsZero:
		hdr.Set("retry-after-ms", "0")
		hdr.Set("retry-after", "0")
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

func roundUp(t time.Time) time.Time {
	if whole := t.Truncate(time.Second); !whole.Equal(t) {
		return whole.Add(time.Second)
	}
	return t
}
