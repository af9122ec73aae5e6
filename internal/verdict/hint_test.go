package verdict

import (
	"math"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"
)

const day = 24 * time.Hour

var now = time.Date(2026, time.October, 21, 7, 28, 0, 0, time.UTC)

// headers reads "name: value" lines as net/http would.
func headers(lines ...string) http.Header {
	h := http.Header{}
	for _, line := range lines {
		name, value, _ := strings.Cut(line, ":")
		h.Add(name, strings.TrimPrefix(value, " "))
	}
	return h
}

// The errors that were seen in the wild, word for word.
const (
	azureTokenRate = `{"error":{"code":"429","message":"Requests to the ChatCompletions_Create Operation under Azure OpenAI API version 2024-10-21 have exceeded token rate limit of your current OpenAI S0 pricing tier. Please retry after 9 seconds. Please go here: https://aka.ms/oai/quotaincrease if you would like to further increase the default rate limit."}}`
	azureOneDay    = `{"error":{"code":"429","message":"Requests to the ChatCompletions_Create Operation under Azure OpenAI API version 2024-08-01-preview have exceeded token rate limit of your current OpenAI S0 pricing tier. Please retry after 86400 seconds. Please go here: https://aka.ms/oai/quotaincrease if you would like to further increase the default rate limit."}}`
	azureShort     = `{"error":{"code":"429","message":"Rate limit is exceeded. Try again in 50 seconds."}}`
	azureFoundry   = `{"error":{"code":"RateLimitReached","message":"Your requests to gpt-4.1 for gpt-4.1 in West Europe have exceeded the token rate limit for your current AIServices S0 pricing tier. This request was for ChatCompletions_Create under Azure OpenAI API version 2024-12-01-preview. Please retry after 60 seconds. To increase your default rate limit, visit: https://aka.ms/oai/quotaincrease."}}`
	azureCapacity  = `{"error":{"type":"too_many_requests","code":"no_capacity","message":"The system is currently experiencing high demand and cannot process your request. Your request exceeds the maximum usage size allowed during peak load. For improved capacity reliability, consider switching to Provisioned Throughput.","param":null}}`
	azurePTU       = `{"error":{"type":"too_many_requests","code":"rate_limit_reached","message":"Requests have exceeded the throughput limit on your Provisioned-Managed deployment. If you continue to exceed your limit, consider increasing the number of provisioned throughput units deployed."}}`
	openAIRate     = `{"error":{"message":"Rate limit reached for gpt-4o in organization org-x on tokens per min (TPM): Limit 30000, Used 29000, Requested 1500. Please try again in 1s. Visit https://platform.openai.com/account/rate-limits to learn more.","type":"tokens","param":null,"code":"rate_limit_exceeded"}}`
	openAIQuota    = `{"error":{"message":"You exceeded your current quota, please check your plan and billing details.","type":"insufficient_quota","param":null,"code":"insufficient_quota"}}`
	openAITooLarge = `{"error":{"message":"Request too large for gpt-4o in organization org-x on tokens per min (TPM): Limit 30000, Requested 30601. The input or output tokens must be reduced in order to run successfully.","type":"tokens","param":null,"code":"rate_limit_exceeded"}}`
	groqRate       = `{"error":{"message":"Rate limit reached for model llama-3.3-70b-versatile on tokens per minute (TPM): Limit 6000, Used 5500, Requested 1029. Please try again in 5.289s.","type":"tokens","code":"rate_limit_exceeded"}}`
	geminiRate     = `[{"error":{"code":429,"message":"Quota exceeded. Please retry in 34.074824224s.","status":"RESOURCE_EXHAUSTED","details":[{"@type":"type.googleapis.com/google.rpc.RetryInfo","retryDelay":"34s"}]}}]`
	geminiDelay    = `{"error":{"code":429,"status":"RESOURCE_EXHAUSTED","details":[{"@type":"type.googleapis.com/google.rpc.RetryInfo","retryDelay": "12s"}]}}`
	geminiLater    = `{"error":{"code":429,"message":"Resource exhausted. Please try again later. Please refer to https://cloud.google.com/vertex-ai/generative-ai/docs/error-code-429 for more details.","status":"RESOURCE_EXHAUSTED"}}`
	openRouterRaw  = `{"error":{"code":429,"message":"Provider returned error","metadata":{"raw":"{\n  \"error\": {\n    \"details\": [ { \"retryDelay\": \"7.5s\" } ] } }"}}}`
	mistralFlat    = `{"object":"error","message":"Rate limit exceeded","type":"rate_limited","param":null,"code":"1300","raw_status_code":429}`
)

func TestReadHint(t *testing.T) {
	tests := []struct {
		name   string
		status int
		header http.Header
		body   string
		want   time.Duration
		source HintSource
	}{
		// Headers of a 429 and a 503.
		{"Azure counts milliseconds", 429, headers("retry-after-ms: 2000"), "", 2 * time.Second, RetryAfterMS},
		{"milliseconds have fractions and win over seconds", 429, headers("retry-after-ms: 43.7", "retry-after: 1"), "", 43700 * time.Microsecond, RetryAfterMS},
		{"unreadable milliseconds leave it to the seconds", 429, headers("retry-after-ms: bad", "retry-after: 7"), "", 7 * time.Second, RetryAfter},
		{"zero milliseconds are an answer", 429, headers("retry-after-ms: 0", "retry-after: 9"), "", 0, RetryAfterMS},
		{"seconds", 429, headers("retry-after: 20"), "", 20 * time.Second, RetryAfter},
		{"seconds with a fraction between spaces", 429, headers("retry-after:  1.5 "), "", 1500 * time.Millisecond, RetryAfter},
		{"a date, without one of the reply's own, is compared with now", 503, headers("retry-after: Wed, 21 Oct 2026 07:28:30 GMT"), "", 30 * time.Second, RetryAfter},
		{"a date long past means now", 429, headers("retry-after: Wed, 21 Oct 2015 07:28:00 GMT"), "", 0, RetryAfter},
		{"a Go duration in a header for seconds", 429, headers("retry-after: 6m0s"), "", 6 * time.Minute, RetryAfter},
		{"a whole day is passed on as it is", 429, headers("retry-after: 86400"), "", day, RetryAfter},
		{"more seconds than a duration can hold", 429, headers("retry-after: 99999999999"), "", math.MaxInt64, RetryAfter},
		{"a 503 says when, too", 503, headers("retry-after: 30"), "", 30 * time.Second, RetryAfter},
		{"an empty header says nothing", 429, headers("retry-after:"), "", 0, NoHint},
		{"other Azure services prefix the milliseconds", 429, headers("x-ms-retry-after-ms: 1500", "retry-after: 2"), "", 1500 * time.Millisecond, XMSRetryAfterMS},
		{"the plain milliseconds win over the prefixed ones", 429, headers("x-ms-retry-after-ms: 1500", "retry-after-ms: 100"), "", 100 * time.Millisecond, RetryAfterMS},
		{"a negative number is passed over", 429, headers("retry-after-ms: -1", "retry-after: 3"), "", 3 * time.Second, RetryAfter},
		{"minus zero is negative", 429, headers("retry-after: -0"), "", 0, NoHint},
		{"NaN is passed over", 429, headers("retry-after-ms: NaN", "retry-after: 3"), "", 3 * time.Second, RetryAfter},
		{"infinity is passed over", 429, headers("retry-after-ms: inf", "retry-after: Infinity"), "", 0, NoHint},
		{"hexadecimal is not a number here", 429, headers("retry-after: 0x10"), "", 0, NoHint},
		{"underscores are not digits", 429, headers("retry-after: 0_1"), "", 0, NoHint},
		{"a number beyond float64 is still large", 429, headers("retry-after-ms: 1" + strings.Repeat("0", 400)), "", math.MaxInt64, RetryAfterMS},
		{"of several values the first usable one counts", 429, headers("retry-after: soon", "retry-after: 4", "retry-after: 2"), "", 4 * time.Second, RetryAfter},
		{"a 42 s wait in words", 429, headers("retry-after: 42 seconds"), "", 42 * time.Second, RetryAfter},
		{"words that are no duration", 429, headers("retry-after: 42 seconds or so"), "", 0, NoHint},
		{"a negative duration", 429, headers("retry-after: -6m0s"), "", 0, NoHint},
		{"the date is compared with the sender's clock, an hour behind ours", 429, headers("date: Wed, 21 Oct 2026 06:28:00 GMT", "retry-after: Wed, 21 Oct 2026 06:28:07 GMT"), "", 7 * time.Second, RetryAfter},
		{"an unreadable Date is as good as none", 429, headers("date: yesterday", "retry-after: Wed, 21 Oct 2026 07:28:07 GMT"), "", 7 * time.Second, RetryAfter},
		{"the date formats of older RFCs", 429, headers("retry-after: Wednesday, 21-Oct-26 07:28:05 GMT"), "", 5 * time.Second, RetryAfter},
		{"a server that is down for maintenance says so with a 500", 500, headers("retry-after: 120"), "", 2 * time.Minute, RetryAfter},

		// Text.
		{"Azure's token rate limit", 429, nil, azureTokenRate, 9 * time.Second, ErrorText},
		{"Azure's short form", 429, nil, azureShort, 50 * time.Second, ErrorText},
		{"minutes and seconds", 429, nil, "Please try again in 6m0s.", 6 * time.Minute, ErrorText},
		{"milliseconds", 429, nil, "Please try again in 120ms. Visit us.", 120 * time.Millisecond, ErrorText},
		{"Azure's one day", 429, nil, azureOneDay, day, ErrorText},
		{"Azure AI Foundry", 429, nil, azureFoundry, time.Minute, ErrorText},
		{"Azure's lack of capacity has no time", 429, nil, azureCapacity, 0, NoHint},
		{"a PTU's text has no time", 429, nil, azurePTU, 0, NoHint},
		{"OpenAI's rate limit", 429, nil, openAIRate, time.Second, ErrorText},
		{"OpenAI's quota has no time", 429, nil, openAIQuota, 0, NoHint},
		{"a request that is too large has no time", 429, nil, openAITooLarge, 0, NoHint},
		{"Groq's fraction", 429, nil, groqRate, 5289 * time.Millisecond, ErrorText},
		{"Gemini's text comes before its rounded delay", 429, nil, geminiRate, 34074824224, ErrorText},
		{"Google's RetryInfo", 429, nil, geminiDelay, 12 * time.Second, ErrorText},
		{"RetryInfo in a string in JSON", 429, nil, openRouterRaw, 7500 * time.Millisecond, ErrorText},
		{"later is not a time", 429, nil, geminiLater, 0, NoHint},
		{"Mistral's flat error has no time", 429, nil, mistralFlat, 0, NoHint},
		{"the text of a 503", 503, nil, "Service is starting. Retry after 2 minutes", 2 * time.Minute, ErrorText},
		{"the text of a 500 is about something else", 500, nil, azureShort, 0, NoHint},
		{"the text of a 400 may quote anybody", 400, nil, azureShort, 0, NoHint},
		{"a header is worth more than the text", 429, headers("retry-after: 3"), azureTokenRate, 3 * time.Second, RetryAfter},
		{"an unusable header leaves it to the text", 429, headers("retry-after: -1"), azureTokenRate, 9 * time.Second, ErrorText},
		{"text beyond 64 KiB is not read", 429, nil, strings.Repeat(" ", maxErrorText) + "Try again in 5s.", 0, NoHint},
		{"text just within 64 KiB is", 429, nil, strings.Repeat(" ", maxErrorText-16) + "Try again in 5s.", 5 * time.Second, ErrorText},

		// Resets.
		{"an empty budget is not why a 500 failed", 500, headers("x-ratelimit-remaining-tokens: 0", "x-ratelimit-reset-tokens: 6m0s"), "", 0, NoHint},
		{"only the exhausted dimension counts", 429, headers("x-ratelimit-remaining-requests: 59", "x-ratelimit-reset-requests: 1s", "x-ratelimit-remaining-tokens: 0", "x-ratelimit-reset-tokens: 6m0s"), "", 6 * time.Minute, RateLimitReset},
		{"with both left over the resets say nothing", 429, headers("x-ratelimit-remaining-requests: 59", "x-ratelimit-reset-requests: 1s", "x-ratelimit-remaining-tokens: 149984", "x-ratelimit-reset-tokens: 6m0s"), "", 0, NoHint},
		{"-1 means untracked (openai-dotnet issue 838)", 429, headers("x-ratelimit-limit-tokens: -1", "x-ratelimit-remaining-tokens: -1", "x-ratelimit-reset-tokens: 0"), "", 0, NoHint},
		{"an untracked dimension does not count even with a reset", 429, headers("x-ratelimit-remaining-tokens: -1", "x-ratelimit-reset-tokens: 5"), "", 0, NoHint},
		{"the text states the wait, the reset overstates it", 429, headers("x-ratelimit-remaining-tokens: 0", "x-ratelimit-reset-tokens: 59s"), openAIRate, time.Second, ErrorText},
		{"Anthropic's time of day", 429, headers("anthropic-ratelimit-requests-remaining: 0", "anthropic-ratelimit-requests-reset: 2026-10-21T07:28:12Z"), "", 12 * time.Second, RateLimitReset},
		{"Anthropic's time of day against the reply's own", 429, headers("date: Wed, 21 Oct 2026 07:28:10 GMT", "anthropic-ratelimit-input-tokens-remaining: 0", "anthropic-ratelimit-input-tokens-reset: 2026-10-21T07:28:12Z"), "", 2 * time.Second, RateLimitReset},
		{"Anthropic with something left", 429, headers("anthropic-ratelimit-tokens-remaining: 10", "anthropic-ratelimit-tokens-reset: 2026-10-21T07:28:12Z"), "", 0, NoHint},
		{"of several exhausted ones the longest counts", 429, headers("x-ratelimit-remaining-requests: 0", "x-ratelimit-reset-requests: 10", "x-ratelimit-remaining-tokens: 0", "x-ratelimit-reset-tokens: 60"), "", time.Minute, RateLimitReset},
		{"Azure counts bare seconds", 429, headers("x-ratelimit-remaining-requests: 0", "x-ratelimit-reset-requests: 10", "x-ratelimit-remaining-tokens: 1500", "x-ratelimit-reset-tokens: 300"), "", 10 * time.Second, RateLimitReset},
		{"OpenAI writes Go durations", 429, headers("x-ratelimit-remaining-requests: 0", "x-ratelimit-reset-requests: 2m59.56s"), "", 179560 * time.Millisecond, RateLimitReset},
		{"any dimension will do", 429, headers("x-ratelimit-remaining-project-tokens: 0", "x-ratelimit-reset-project-tokens: 17ms"), "", 17 * time.Millisecond, RateLimitReset},
		{"even one with underscores", 429, headers("x-ratelimit-remaining-tokens_usage_based: 0", "x-ratelimit-reset-tokens_usage_based: 17ms"), "", 17 * time.Millisecond, RateLimitReset},
		{"Cerebras resets its day with a fraction", 429, headers("x-ratelimit-remaining-requests-day: 0", "x-ratelimit-reset-requests-day: 33011.38"), "", 33011380 * time.Millisecond, RateLimitReset},
		{"Mistral states no reset", 429, headers("x-ratelimit-limit-req-minute: 60", "x-ratelimit-remaining-req-minute: 0"), "", 0, NoHint},
		{"OpenRouter has unix milliseconds and no dimension", 429, headers("x-ratelimit-limit: 50", "x-ratelimit-remaining: 0", "x-ratelimit-reset: 1792567691500"), "", 11500 * time.Millisecond, RateLimitReset},
		{"unix seconds", 429, headers("x-ratelimit-remaining: 0", "x-ratelimit-reset: 1792567684.5"), "", 4500 * time.Millisecond, RateLimitReset},
		{"a unix time that has passed", 429, headers("x-ratelimit-remaining: 0", "x-ratelimit-reset: 1761031680"), "", 0, NoHint},
		{"a unix time at the end of time", 429, headers("x-ratelimit-remaining: 0", "x-ratelimit-reset: 1e300"), "", math.MaxInt64, RateLimitReset},
		{"exhausted, yet reset at once, says nothing", 429, headers("x-ratelimit-remaining-tokens: 0", "x-ratelimit-reset-tokens: 0"), "", 0, NoHint},
		{"an unreadable remainder is not zero", 429, headers("x-ratelimit-remaining-tokens: none", "x-ratelimit-reset-tokens: 5"), "", 0, NoHint},
		{"the renewal period is not a reset", 429, headers("x-ratelimit-remaining-tokens: 0", "x-ratelimit-renewalperiod-tokens: 60"), "", 0, NoHint},
		{"what remains of a dimension whose name begins the same", 429, headers("x-ratelimit-remaining-tokens: 0", "x-ratelimit-remaining-tokens-day: 9", "x-ratelimit-reset-tokens-day: 5"), "", 0, NoHint},
		{"a reset of nothing the family knows", 429, headers("x-ratelimit-resetting: 5"), "", 0, NoHint},
		{"Azure's other spelling, without the remainder (openai-python issue 937)", 429, headers("x-rate-limit-reset-tokens: 55", "policy-id: DeploymentRatelimit-Token", "x-ratelimit-remaining-requests: 119"), "", 55 * time.Second, RateLimitReset},
		{"Azure's other spelling, with the remainder in the usual one", 429, headers("x-rate-limit-reset-tokens: 55", "x-ratelimit-remaining-tokens: 12"), "", 0, NoHint},
		{"the other spelling of both", 429, headers("x-rate-limit-reset-tokens: 55", "x-rate-limit-remaining-tokens: 0"), "", 55 * time.Second, RateLimitReset},
		{"a dimension known to be exhausted beats those that are not stated", 429, headers("x-ratelimit-reset-tokens: 55", "x-ratelimit-remaining-requests: 0", "x-ratelimit-reset-requests: 3"), "", 3 * time.Second, RateLimitReset},
		{"a 529 is about the provider's load, not about our budget", 529, headers("x-ratelimit-remaining-tokens: 0", "x-ratelimit-reset-tokens: 6m0s"), "", 0, NoHint},

		{"nothing at all", 429, nil, "", 0, NoHint},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			wait, source := ReadHint(tt.status, tt.header, []byte(tt.body), now)
			if wait != tt.want || source != tt.source {
				t.Errorf("got %v from %q, want %v from %q", wait, source, tt.want, tt.source)
			}
		})
	}
}

func TestTextThatStatesAWait(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"retry after 9 seconds":                        9 * time.Second,
		"Retry after 1 second":                         time.Second,
		"RETRY AFTER 2 MINUTES":                        2 * time.Minute,
		"retry after 20":                               20 * time.Second,
		"retry after 20.":                              20 * time.Second,
		`{"message":"retry after 20"}`:                 20 * time.Second,
		"Please retry after 20, thank you":             20 * time.Second,
		"retry after: 5":                               5 * time.Second,
		"retry after 0.5 s":                            500 * time.Millisecond,
		"retry after 20\nsee the docs":                 20 * time.Second,
		"try again after 3 hours":                      3 * time.Hour,
		"try again in 1m2.5s":                          62500 * time.Millisecond,
		"try again in 120ms":                           120 * time.Millisecond,
		"try again in 250 milliseconds.":               250 * time.Millisecond,
		"try again in 1 minute":                        time.Minute,
		"try again in 20 s":                            20 * time.Second,
		"try  again\nin\t20 sec":                       20 * time.Second,
		"try again in 20 second(s)":                    20 * time.Second,
		"try again in 7m12s":                           432 * time.Second,
		"try again in 1 minute 30 seconds":             90 * time.Second,
		"try again in 1 minute and 30 seconds":         90 * time.Second,
		"try again in 1 hour, 1 minute":                61 * time.Minute,
		"try again in 2 days":                          2 * day,
		"try again in 1d2h":                            26 * time.Hour,
		"try again in 20 s, 5 minutes at the most":     20 * time.Second,
		"try again in 500µs":                           500 * time.Microsecond,
		"try again in 1 minute. 5 seconds went by":     time.Minute,
		"try again later, try again in 3s":             3 * time.Second,
		"try again in 3s or try again in 9s":           3 * time.Second,
		`wait.\nRetry after 4 seconds`:                 4 * time.Second,
		"try again in 99999999999999999999 hours":      math.MaxInt64,
		"try again in 2562047h47m16s and 10h":          2562047*time.Hour + 47*time.Minute + 16*time.Second,
		"retry after " + strings.Repeat("9", 1000):     math.MaxInt64,
		`"retryDelay":"0.250s"`:                        250 * time.Millisecond,
		`{\"retryDelay\": \"12s\"}`:                    12 * time.Second,
		"(try again in 8s)":                            8 * time.Second,
		"Rate limited: retry in 15s, tretry in 3s":     15 * time.Second,
		"no entry after 9 seconds; retry in 1 second!": time.Second,
	} {
		if wait, source := ReadHint(429, nil, []byte(text), now); wait != want || source != ErrorText {
			t.Errorf("%.80q: got %v from %q, want %v", text, wait, source, want)
		}
	}
}

func TestTextThatStatesNone(t *testing.T) {
	for _, text := range []string{
		"try again later",
		"try again in a few minutes",
		"try again in 50",
		"try again in 5 parsecs",
		"try again in -5 seconds",
		"try again in",
		"retry after",
		"retry after 3 failed calls",
		"retry after 07:28",
		"retry after 1,000 seconds",
		"retry after 1.000.000 seconds",
		"retry after 20 milli-seconds",
		"retry after 5%",
		"retry afterwards 5 seconds",
		"no entry after 9 seconds",
		"this country in 5 minutes",
		"try 3 seconds",
		"retryDelay: never",
		`"retryDelay": 12`,
		`"retryDelayMultiplier": "2s"`,
		"retry-after: 5",
		"rate limit of 10 in 60 seconds",
		"try",
		"r", "t", "",
	} {
		if wait, source := ReadHint(429, nil, []byte(text), now); wait != 0 || source != NoHint {
			t.Errorf("%q: got %v from %q, want none", text, wait, source)
		}
	}
}

func TestOurClockDoesNotMatterIfTheReplyHasItsOwn(t *testing.T) {
	for _, h := range []http.Header{
		headers("date: Wed, 21 Oct 2026 07:28:00 GMT", "retry-after: Wed, 21 Oct 2026 07:28:30 GMT"),
		headers("date: Wed, 21 Oct 2026 07:28:00 GMT", "anthropic-ratelimit-tokens-remaining: 0", "anthropic-ratelimit-tokens-reset: 2026-10-21T07:28:30Z"),
		headers("date: Wed, 21 Oct 2026 07:28:00 GMT", "x-ratelimit-remaining: 0", "x-ratelimit-reset: 1792567710"),
	} {
		for _, now := range []time.Time{{}, now, now.Add(-100 * day), now.Add(100 * day)} {
			if wait, _ := ReadHint(429, h, nil, now); wait != 30*time.Second {
				t.Errorf("at %v: got %v, want 30s", now, wait)
			}
		}
	}
}

func FuzzReadHint(f *testing.F) {
	f.Add(429, "Retry-After-Ms", "43.7", "Retry-After", "1", []byte(nil))
	f.Add(503, "Retry-After", "Wed, 21 Oct 2026 07:28:30 GMT", "Date", "Wed, 21 Oct 2026 07:28:00 GMT", []byte(nil))
	f.Add(429, "X-Ratelimit-Remaining-Tokens", "0", "X-Ratelimit-Reset-Tokens", "6m0s", []byte(nil))
	f.Add(429, "X-Ratelimit-Reset", "1e300", "X-Rate-Limit-Reset-Requests", "2026-10-21T07:28:12Z", []byte(nil))
	f.Add(429, "Anthropic-Ratelimit-Requests-Remaining", "0", "Anthropic-Ratelimit-Requests-Reset", "2026-10-21T07:28:12Z", []byte(nil))
	for _, body := range []string{azureTokenRate, openAIRate, geminiRate, openRouterRaw, "try again in 1 hour, 2 minutes and 3µs", "retry after 1,5"} {
		f.Add(429, "A", "", "B", "", []byte(body))
	}
	f.Fuzz(func(t *testing.T, status int, name1, value1, name2, value2 string, body []byte) {
		h := http.Header{}
		h.Add(name1, value1)
		h.Add(name2, value2)
		wait, source := ReadHint(status, h, body, now)
		if wait < 0 {
			t.Errorf("a negative wait: %v from %q", wait, source)
		}
		if source == NoHint && wait != 0 {
			t.Errorf("%v from nowhere", wait)
		}
		if w, s := ReadHint(status, h.Clone(), body, now); w != wait || s != source {
			t.Errorf("first %v from %q, then %v from %q", wait, source, w, s)
		}
	})
}

func FuzzEveryGoDurationIsReadBack(f *testing.F) {
	for _, d := range []int64{0, 1, 1500, 17e6, 62500e6, 360e9, math.MaxInt64} {
		f.Add(d)
	}
	f.Fuzz(func(t *testing.T, ns int64) {
		d := time.Duration(ns)
		wait, source := ReadHint(429, http.Header{"Retry-After": {d.String()}}, nil, now)
		if (source == RetryAfter) != (d >= 0) || wait != max(0, d) {
			t.Errorf("%v: got %v from %q", d, wait, source)
		}
	})
}

func BenchmarkReadHint(b *testing.B) {
	azure := headers("retry-after-ms: 2000", "retry-after: 2", "x-ratelimit-remaining-tokens: 0", "x-ratelimit-reset-tokens: 60", "date: Wed, 21 Oct 2026 07:28:00 GMT")
	seconds := headers("retry-after: 20", "date: Wed, 21 Oct 2026 07:28:00 GMT")
	resets := headers("x-ratelimit-remaining-requests: 59", "x-ratelimit-reset-requests: 1s", "x-ratelimit-remaining-tokens: 0", "x-ratelimit-reset-tokens: 6m0s")
	for _, bb := range []struct {
		name   string
		header http.Header
		body   []byte
	}{
		{"retry-after-ms", azure, nil},
		{"retry-after", seconds, nil},
		{"body", nil, []byte(azureTokenRate)},
		{"resets", resets, []byte(azurePTU)},
		{"64KiB without a hint", nil, []byte(strings.Repeat("try again after retrying the retry ", 2000))},
	} {
		b.Run(bb.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				ReadHint(429, bb.header, bb.body, now)
			}
		})
	}
}

func TestTheCommonHintsAllocateNothing(t *testing.T) {
	for _, h := range []http.Header{headers("retry-after-ms: 2000"), headers("x-ms-retry-after-ms: 43.7"), headers("retry-after: 20")} {
		if n := testing.AllocsPerRun(100, func() { ReadHint(429, h, nil, now) }); n != 0 {
			t.Errorf("%v: %v allocations", h, n)
		}
	}
}

// TestEachSourceOfHintsIsKnown because replicas refuse what others report with
// an unknown source.
func TestEachSourceOfHintsIsKnown(t *testing.T) {
	text, err := os.ReadFile("hint.go")
	if err != nil {
		t.Fatal(err)
	}
	sources := regexp.MustCompile(`(?m)^\t\w+ HintSource = "(.*)"$`).FindAllStringSubmatch(string(text), -1)
	if len(sources) < 6 {
		t.Errorf("found %d sources", len(sources))
	}
	for _, found := range sources {
		if !HintSource(found[1]).IsKnown() {
			t.Errorf("%q is not known", found[1])
		}
	}
	if HintSource("retry-later").IsKnown() {
		t.Error("any source is known")
	}
}
