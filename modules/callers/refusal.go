package callers

import (
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

const (
	// longestWait is the longest wait after which a client should retry. SDKs
	// wait for at most a minute, and some clients retry for minutes before they
	// fail (Codex, Claude Code).
	longestWait = time.Minute
	// longestNamed is the longest wait that a client is told for a limit by the
	// second or minute, even if the wait after an excess is longer. Such a
	// client should come back, and SDKs ignore a Retry-After of more than a
	// minute.
	longestNamed = 59 * time.Second
)

// named returns the wait that the client is told.
func named(refusal *ratelimit.Refusal) time.Duration {
	// up to milliseconds, which is the precision that clients see
	wait := (refusal.Wait + time.Millisecond - 1).Truncate(time.Millisecond)
	if refusal.Limit.Unit <= ratelimit.Minute {
		wait = min(wait, longestNamed)
	}
	return wait
}

// Refuse implements seam.Admission. If the client should not retry soon, the
// answer has no Retry-After, because some SDKs would sleep for a day
// (openai-node 6.26 to 7.4).
func (c *Callers) Refuse(r *http.Request, now time.Time, name string, refusal *ratelimit.Refusal) apierror.Answer {
	answer, wait := c.reason(now, name, refusal).Answer(r), named(refusal)
	kind, window := refusal.Names()
	answer.Limit = &apierror.Limit{
		Name:    ofModel(strings.TrimSuffix(kind+"/"+window, "/"), refusal.Limit.Model),
		Allowed: refusal.Allowed, Used: refusal.Used, Requested: refusal.Requested,
	}
	if refusal.Reason == ratelimit.TooLarge || refusal.Reason == ratelimit.OverQuota || wait > longestWait {
		answer.Header["X-Should-Retry"] = []string{"false"}
	} else {
		verdict.SetHint(answer.Header, wait)
	}
	return answer
}

// reason returns the error that tells the client why a limit refuses the
// request.
func (c *Callers) reason(now time.Time, name string, refusal *ratelimit.Refusal) apierror.Error {
	kind := refusal.Limit.Kind.String()
	switch refusal.Reason {
	case ratelimit.TooMany:
		return limited("requests",
			fmt.Sprintf("Rate limit reached for %s on requests in progress: Limit %d, Used %d. Please try again in 1s.",
				name, refusal.Allowed, refusal.Used))
	case ratelimit.InFlight:
		return limited(kind, fmt.Sprintf("Rate limit reached for %s on %s: its requests in progress may use all that is left. Limit %d, Used %d with these, Requested %d. Please try again in %s.",
			name, described(refusal.Limit), refusal.Allowed, refusal.Used, refusal.Requested, named(refusal)))
	case ratelimit.TooLarge:
		return limited(kind, fmt.Sprintf("Request too large for %s on %s: Limit %d, Requested %d. The input must be reduced in order to run successfully.",
			name, described(refusal.Limit), refusal.Allowed, refusal.Requested))
	case ratelimit.OverQuota:
		e := limited("insufficient_quota", fmt.Sprintf("You exceeded your quota: %s has used %d of %d %s per %s, and this request needs %d. The quota begins anew at %s.",
			name, refusal.Used, refusal.Allowed, kind, ofModel(refusal.Limit.Unit.String(), refusal.Limit.Model),
			refusal.Requested,
			now.Add(refusal.Wait).In(c.location).Round(time.Second).Format(time.RFC3339)))
		e.Code = "insufficient_quota"
		return e
	}
	return limited(kind, fmt.Sprintf("Rate limit reached for %s on %s: Limit %d, Used %d, Requested %d. Please try again in %s.",
		name, described(refusal.Limit), refusal.Allowed, refusal.Used, refusal.Requested, named(refusal)))
}

func limited(kind, message string) apierror.Error {
	return apierror.Error{Status: http.StatusTooManyRequests, Message: message, Kind: kind, Code: "rate_limit_exceeded",
		Class: apierror.CallerLimited}
}

// described returns a limit in OpenAI's words, such as "tokens per min (TPM)",
// and its model.
func described(l ratelimit.Limit) string {
	unit := l.Unit.String()
	if l.Unit == ratelimit.Month { // "TPM" are tokens per minute
		return ofModel(fmt.Sprintf("%s per %s", l.Kind, unit), l.Model)
	}
	short := strings.ToUpper(l.Kind.String()[:1] + "P" + unit[:1])
	if l.Unit == ratelimit.Minute {
		unit = "min"
	}
	return ofModel(fmt.Sprintf("%s per %s (%s)", l.Kind, unit, short), l.Model)
}
