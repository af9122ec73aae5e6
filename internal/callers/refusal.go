package callers

import (
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/hint"
	"github.com/openai-lb/caddy-openai-lb/internal/meter"
)

// Refuse returns the answer to a request that a limit refuses.
func (c *Callers) Refuse(r *http.Request, now time.Time, name string, refusal *meter.Refusal) apierror.Answer {
	kind := refusal.Limit.Kind.String()
	switch refusal.Reason {
	case meter.TooMany:
		answer := limited("requests", fmt.Sprintf("Rate limit reached for %s on requests in progress: Limit %d, Used %d. Please try again in 1s.", name, refusal.Allowed, refusal.Used)).Answer(r)
		hint.Set(answer.Header, time.Second)
		return answer
	case meter.TooLarge:
		answer := limited(kind, fmt.Sprintf("Request too large for %s on %s: Limit %d, Requested %d. The input must be reduced in order to run successfully.",
			name, described(refusal.Limit), refusal.Allowed, refusal.Requested)).Answer(r)
		final(answer)
		return answer
	case meter.OverQuota:
		e := limited("insufficient_quota", fmt.Sprintf("You exceeded your quota: %s has used %d of %d %s per %s, and this request needs %d. The quota begins anew at %s.",
			name, refusal.Used, refusal.Allowed, kind, refusal.Limit.Unit, refusal.Requested, now.Add(refusal.Wait).In(c.location).Round(time.Second).Format(time.RFC3339)))
		e.Code = "insufficient_quota"
		answer := e.Answer(r)
		final(answer)
		return answer
	}
	answer := limited(kind, fmt.Sprintf("Rate limit reached for %s on %s: Limit %d, Used %d, Requested %d. Please try again in %s.",
		name, described(refusal.Limit), refusal.Allowed, refusal.Used, refusal.Requested, rounded(refusal.Wait))).Answer(r)
	hint.Set(answer.Header, rounded(refusal.Wait))
	return answer
}

// final finishes an answer after which a client must not soon send the same request again. Such an answer has
// no Retry-After: some SDKs would sleep for a day (openai-node 6.26 to 7.4).
func final(answer apierror.Answer) {
	answer.Header["X-Should-Retry"] = []string{"false"}
}

func limited(kind, message string) apierror.Error {
	return apierror.Error{Status: http.StatusTooManyRequests, Message: message, Kind: kind, Code: "rate_limit_exceeded", Class: apierror.CallerLimited}
}

// described returns a limit in OpenAI's words, such as "tokens per min (TPM)".
func described(l meter.Limit) string {
	unit := l.Unit.String()
	short := strings.ToUpper(l.Kind.String()[:1] + "P" + unit[:1])
	if l.Unit == meter.Minute {
		unit = "min"
	}
	return fmt.Sprintf("%s per %s (%s)", l.Kind, unit, short)
}
