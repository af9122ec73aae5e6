package simulator

import (
	"fmt"
	"html"
	"math"
	"net/http"
	"strconv"
	"time"
)

// The styles in which the headers of a 429 tell the wait.
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

var hintStyles = []string{
	hintsMS, hintsBoth, hintsSeconds, hintsNone, hintsNeg1, hintsDay,
	hintsDate, hintsOpenAI, hintsGarbage, hintsNegative, hintsZero,
}

// The styles of a 429's body.
const (
	bodyAzureClassic      = "azure_classic"
	bodyAzureNew          = "azure_new"
	bodyAzureCapacity     = "azure_capacity"
	bodyAzurePTU          = "azure_ptu"
	bodyOpenAITokens      = "openai_tokens"
	bodyInsufficientQuota = "insufficient_quota"
	bodyMistralFlat       = "mistral_flat"
	bodyOpenRouterNum     = "openrouter_num"
	bodyHTML              = "html"
	bodyEmpty             = "empty"
	bodyStringError       = "string_error"
)

var bodyStyles = []string{
	bodyAzureClassic, bodyAzureNew, bodyAzureCapacity, bodyAzurePTU, bodyOpenAITokens, bodyInsufficientQuota,
	bodyMistralFlat, bodyOpenRouterNum, bodyHTML, bodyEmpty, bodyStringError,
}

// setLimitHeaders tells how much is left. Azure sends these on every reply: bare
// numbers and whole seconds; OpenAI sends durations.
func setLimitHeaders(hdr http.Header, style string, l *limiter, now time.Time) {
	if l.drain > 0 {
		hdr.Set("azure-openai-deployment-utilization", strconv.FormatFloat(l.utilization(now), 'f', 1, 64)+"%")
		return
	}
	requests, tokens := l.meters(now)
	requests.set(hdr, style, "requests")
	tokens.set(hdr, style, "tokens")
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

// setHints tells the wait in the headers of a 429, in the given style.
func setHints(hdr http.Header, style string, l *limiter, r refusal, now time.Time) {
	if l != nil {
		setLimitHeaders(hdr, style, l, now)
		// What is left may be above zero, and still too little.
		if hdr.Get("x-ratelimit-remaining-"+r.limit) != "" {
			hdr.Set("x-ratelimit-remaining-"+r.limit, "0")
		}
	}
	switch style {
	case hintsMS:
		hdr.Set("retry-after-ms", milliseconds(r.wait))
	case hintsBoth:
		hdr.Set("retry-after-ms", milliseconds(r.wait))
		hdr.Set("retry-after", seconds(r.wait))
	case hintsSeconds:
		hdr.Set("retry-after", seconds(r.wait))
	case hintsNone:
		for _, dimension := range []string{limitRequests, limitTokens} {
			hdr.Del("x-ratelimit-reset-" + dimension)
		}
		hdr.Del("x-ratelimit-remaining-" + r.limit)
		hdr.Set("x-rate-limit-reset-"+payg(r.limit), seconds(r.wait))
	case hintsNeg1:
		for _, dimension := range []string{limitRequests, limitTokens} {
			hdr.Set("x-ratelimit-limit-"+dimension, "-1")
			hdr.Set("x-ratelimit-remaining-"+dimension, "-1")
			hdr.Set("x-ratelimit-reset-"+dimension, "0")
		}
	case hintsDay:
		hdr.Set("retry-after", strconv.Itoa(dayHintSeconds))
	case hintsDate:
		// The reply's own date is what a reader should count from.
		hdr.Set("date", now.UTC().Format(http.TimeFormat))
		hdr.Set("retry-after", roundUp(now.Add(r.wait)).UTC().Format(http.TimeFormat))
	case hintsOpenAI:
		dimension := payg(r.limit)
		hdr.Set("x-ratelimit-remaining-"+dimension, "0")
		hdr.Set("x-ratelimit-reset-"+dimension, upToMillisecond(r.wait).String())
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

// payg is the `x-ratelimit` dimension of a limit: a bucket's is its tokens.
func payg(limit string) string {
	if limit == limitRequests {
		return limitRequests
	}
	return limitTokens
}

// Every wait is rounded up: who comes back when told is let in.

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

// throttle is the 429 of a deployment whose limit is reached.
func (x *exchange) throttle(r refusal) *reply {
	rep := x.throttleBody(r)
	setHints(rep.header, x.h.Hints, x.limiter, r, x.h.now())
	return rep
}

// throttleBody is a 429 without any hint in its headers. A wait of zero is not
// spoken of in its text either.
func (x *exchange) throttleBody(r refusal) *reply {
	counted, operation := "token", x.route.op.azureName()
	if r.limit == limitRequests {
		counted = "call"
	}
	version, model := x.route.apiVersion, x.route.deployment
	if version == "" {
		version = "v1"
	}
	wait := r.wait
	if x.h.Hints == hintsDay && wait > 0 {
		wait = dayHintSeconds * time.Second
	}

	rep := &reply{status: http.StatusTooManyRequests, contentType: jsonType, header: make(http.Header)}
	switch x.h.ErrorBody {
	case bodyAzureClassic:
		rep.json(azureErrorBody{errorCode{"429", fmt.Sprintf("Requests to the %s Operation under Azure OpenAI API version %s have exceeded %s rate limit "+
			"of your current OpenAI S0 pricing tier.%s Please go here: https://aka.ms/oai/quotaincrease if you would like to further increase the default rate limit.",
			operation, version, counted, retrySentence(wait))}})
	case bodyAzureNew:
		rep.json(azureErrorBody{errorCode{"RateLimitReached", fmt.Sprintf("Your requests to %s for %s in %s have exceeded the %s rate limit "+
			"for your current AIServices S0 pricing tier. This request was for %s under Azure OpenAI API version %s.%s To increase your default rate limit, visit: https://aka.ms/oai/quotaincrease.",
			model, model, x.h.Region, counted, operation, version, retrySentence(wait))}})
	case bodyAzureCapacity:
		rep.json(typedError("too_many_requests", "no_capacity", "The system is currently experiencing high demand and cannot process your request. "+
			"Your request exceeds the maximum usage size allowed during peak load. For improved capacity reliability, consider switching to Provisioned Throughput."))
	case bodyAzurePTU:
		rep.json(typedError("too_many_requests", "rate_limit_reached", "Requests have exceeded the throughput limit on your Provisioned-Managed deployment. "+
			"If you continue to exceed your limit, consider increasing the number of provisioned throughput units deployed."))
	case bodyOpenAITokens:
		text := fmt.Sprintf("Rate limit reached for %s in organization org-simulator on %s.", model, openaiLimit(r.limit))
		if wait > 0 {
			text += " Please try again in " + upToMillisecond(wait).String() + "."
		}
		rep.json(typedError(payg(r.limit), "rate_limit_exceeded", text+" Visit https://platform.openai.com/account/rate-limits to learn more."))
	case bodyInsufficientQuota:
		rep.json(typedError("insufficient_quota", "insufficient_quota", "You exceeded your current quota, please check your plan and billing details."))
	case bodyMistralFlat:
		rep.raw(`{"object":"error","message":"Rate limit exceeded","type":"rate_limited","param":null,"code":"1300","raw_status_code":429}`)
	case bodyOpenRouterNum:
		rep.raw(`{"error":{"code":429,"message":"Provider returned error","metadata":{"provider_name":"Simulator","raw":"rate limited upstream"}}}`)
	case bodyHTML:
		rep.contentType = "text/html; charset=utf-8"
		rep.raw("<html><head><title>429 Too Many Requests</title></head><body><h1>429 Too Many Requests</h1><hr>" +
			html.EscapeString(x.h.Name) + "</body></html>\n")
	case bodyEmpty:
		rep.contentType = ""
	case bodyStringError:
		rep.raw(`{"error":"Too Many Requests"}`)
	}
	return rep
}

func retrySentence(wait time.Duration) string {
	switch n := wholeSeconds(wait); {
	case n <= 0:
		return ""
	case n == 1:
		return " Please retry after 1 second."
	default:
		return " Please retry after " + strconv.FormatInt(n, 10) + " seconds."
	}
}

func openaiLimit(limit string) string {
	if limit == limitRequests {
		return "requests per min (RPM)"
	}
	return "tokens per min (TPM)"
}
