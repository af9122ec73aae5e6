package limits

import (
	"cmp"
	"fmt"
	"net/http"
	"time"

	"github.com/openai-lb/caddy-openai-lb/simulator/internal/wire"
)

// Region is where all simulators are.
const Region = "Simulated"

// Style is how the 429s of a deployment look.
type Style struct {
	Hints     string // the style of the headers
	ErrorBody string // the style of the body
}

// BodyStyles are the styles of the body of a 429.
var BodyStyles = []string{
	"azure_classic", "azure_new", "azure_capacity", "azure_ptu", "openai_tokens", "insufficient_quota",
	"mistral_flat", "openrouter_num", "html", "empty", "string_error",
}

// bodiesWithWait are those whose text names the wait.
var bodiesWithWait = []string{"azure_classic", "azure_new", "openai_tokens"}

// Asked has the parts of a refused request that the 429 names.
type Asked struct {
	Operation, APIVersion, Deployment string
}

// Throttle returns the 429 of a deployment that has reached a limit.
func (s Style) Throttle(l *Limiter, asked Asked, r Refusal, now time.Time) *wire.Reply {
	rep := s.Body(asked, r)
	setHints(rep.Header, s.Hints, l, r, now)
	return rep
}

// Body returns a 429 without hints in its headers. Its text names the wait,
// unless that is zero.
func (s Style) Body(asked Asked, r Refusal) *wire.Reply {
	rep := s.body(asked, r)
	rep.Status, rep.Header = http.StatusTooManyRequests, make(http.Header)
	return rep
}

func (s Style) body(asked Asked, r Refusal) *wire.Reply {
	wait := r.Wait
	if s.Hints == hintsDay && wait > 0 {
		wait = dayHintSeconds * time.Second
	}
	azure := func(code, format string, args ...any) *wire.Reply {
		return wire.AzureError(0, code, fmt.Sprintf(format, args...))
	}
	openai := func(errType, code, message string) *wire.Reply { return wire.OpenAIError(0, errType, code, message) }
	raw := func(body string) *wire.Reply { return &wire.Reply{ContentType: wire.JSONType, Body: []byte(body)} }
	counted, perMinute := "token", "tokens per min (TPM)"
	if r.Limit == Requests {
		counted, perMinute = "call", "requests per min (RPM)"
	}
	version, model := cmp.Or(asked.APIVersion, "v1"), asked.Deployment
	switch s.ErrorBody {
	case "azure_new":
		return azure("RateLimitReached", "Your requests to %s for %s in %s have exceeded the %s rate limit for your current AIServices S0 pricing tier. "+
			"This request was for %s under Azure OpenAI API version %s.%s To increase your default rate limit, visit: https://aka.ms/oai/quotaincrease.",
			model, model, Region, counted, asked.Operation, version, retrySentence(wait))
	case "azure_capacity":
		return openai("too_many_requests", "no_capacity", "The system is currently experiencing high demand and cannot process your request. "+
			"Your request exceeds the maximum usage size allowed during peak load. For improved capacity reliability, consider switching to Provisioned Throughput.")
	case "azure_ptu":
		return openai("too_many_requests", "rate_limit_reached", "Requests have exceeded the throughput limit on your Provisioned-Managed deployment. "+
			"If you continue to exceed your limit, consider increasing the number of provisioned throughput units deployed.")
	case "openai_tokens":
		again := ""
		if wait > 0 {
			again = fmt.Sprintf(" Please try again in %s.", upToMillisecond(wait))
		}
		return openai(payg(r.Limit), "rate_limit_exceeded", fmt.Sprintf("Rate limit reached for %s in organization org-simulator on %s.%s "+
			"Visit https://platform.openai.com/account/rate-limits to learn more.", model, perMinute, again))
	case "insufficient_quota":
		return openai("insufficient_quota", "insufficient_quota", "You exceeded your current quota, please check your plan and billing details.")
	case "mistral_flat":
		return raw(`{"object":"error","message":"Rate limit exceeded","type":"rate_limited","param":null,"code":"1300","raw_status_code":429}`)
	case "openrouter_num":
		return raw(`{"error":{"code":429,"message":"Provider returned error","metadata":{"provider_name":"Simulator","raw":"rate limited upstream"}}}`)
	case "html":
		page := "<html><head><title>429 Too Many Requests</title></head><body><h1>429 Too Many Requests</h1></body></html>\n"
		return &wire.Reply{ContentType: "text/html; charset=utf-8", Body: []byte(page)}
	case "empty":
		return new(wire.Reply)
	case "string_error":
		return raw(`{"error":"Too Many Requests"}`)
	}
	return azure("429", "Requests to the %s Operation under Azure OpenAI API version %s have exceeded %s rate limit of your current OpenAI S0 pricing tier.%s "+
		"Please go here: https://aka.ms/oai/quotaincrease if you would like to further increase the default rate limit.",
		asked.Operation, version, counted, retrySentence(wait))
}

func retrySentence(wait time.Duration) string {
	if n := wholeSeconds(wait); n > 0 {
		return fmt.Sprintf(" Please retry after %d seconds.", n)
	}
	return ""
}
