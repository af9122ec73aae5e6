package limits

import (
	"cmp"
	"fmt"
	"html"
	"net/http"
	"strconv"
	"time"

	"github.com/openai-lb/caddy-openai-lb/simulator/internal/wire"
)

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

// BodyStyles are the styles of the body of a 429.
var BodyStyles = []string{
	bodyAzureClassic, bodyAzureNew, bodyAzureCapacity, bodyAzurePTU, bodyOpenAITokens, bodyInsufficientQuota,
	bodyMistralFlat, bodyOpenRouterNum, bodyHTML, bodyEmpty, bodyStringError,
}

// Style is how the 429s of a deployment look.
type Style struct {
	Hints     string // the style of the headers
	ErrorBody string // the style of the body
	Simulator string // its name
	Region    string
}

// namesSize reports whether a 429 says that a request is above the whole limit.
func (s Style) namesSize() bool { return s.ErrorBody == bodyOpenAITokens }

// Asked is what a refused request asked for, as a 429 names it.
type Asked struct {
	Operation, APIVersion, Deployment string
	Tokens                            int64
}

// Throttle is the 429 of a deployment that has reached a limit. The limiter is nil
// if the deployment is not known.
func (s Style) Throttle(l *Limiter, asked Asked, r Refusal, now time.Time) *wire.Reply {
	rep := s.Body(asked, r)
	if r.exceeds > 0 {
		l.SetHeaders(rep.Header, now)
		return rep
	}
	setHints(rep.Header, s.Hints, l, r, now)
	return rep
}

// Body is a 429 without hints in its headers. Its text names the wait, unless that
// is zero.
func (s Style) Body(asked Asked, r Refusal) *wire.Reply {
	rep := s.body(asked, r)
	rep.Header = make(http.Header)
	return rep
}

func (s Style) body(asked Asked, r Refusal) *wire.Reply {
	counted := "token"
	if r.Limit == Requests {
		counted = "call"
	}
	version, model := cmp.Or(asked.APIVersion, "v1"), asked.Deployment
	wait := r.Wait
	if s.Hints == hintsDay && wait > 0 {
		wait = dayHintSeconds * time.Second
	}

	const status = http.StatusTooManyRequests
	switch s.ErrorBody {
	case bodyAzureClassic:
		return wire.AzureError(status, "429", fmt.Sprintf("Requests to the %s Operation under Azure OpenAI API version %s have exceeded %s rate limit "+
			"of your current OpenAI S0 pricing tier.%s Please go here: https://aka.ms/oai/quotaincrease if you would like to further increase the default rate limit.",
			asked.Operation, version, counted, retrySentence(wait)))
	case bodyAzureNew:
		return wire.AzureError(status, "RateLimitReached", fmt.Sprintf("Your requests to %s for %s in %s have exceeded the %s rate limit "+
			"for your current AIServices S0 pricing tier. This request was for %s under Azure OpenAI API version %s.%s To increase your default rate limit, visit: https://aka.ms/oai/quotaincrease.",
			model, model, s.Region, counted, asked.Operation, version, retrySentence(wait)))
	case bodyAzureCapacity:
		return wire.OpenAIError(status, "too_many_requests", new("no_capacity"), "The system is currently experiencing high demand and cannot process your request. "+
			"Your request exceeds the maximum usage size allowed during peak load. For improved capacity reliability, consider switching to Provisioned Throughput.")
	case bodyAzurePTU:
		return wire.OpenAIError(status, "too_many_requests", new("rate_limit_reached"), "Requests have exceeded the throughput limit on your Provisioned-Managed deployment. "+
			"If you continue to exceed your limit, consider increasing the number of provisioned throughput units deployed.")
	case bodyOpenAITokens:
		if r.exceeds > 0 {
			return wire.OpenAIError(status, Tokens, new("rate_limit_exceeded"), fmt.Sprintf("Request too large for %s in organization org-simulator on %s: Limit %d, Requested %d. "+
				"The input or output tokens must be reduced in order to run successfully. Visit https://platform.openai.com/account/rate-limits to learn more.",
				model, openaiLimit(r.Limit), r.exceeds, asked.Tokens))
		}
		text := fmt.Sprintf("Rate limit reached for %s in organization org-simulator on %s.", model, openaiLimit(r.Limit))
		if wait > 0 {
			text += " Please try again in " + upToMillisecond(wait).String() + "."
		}
		return wire.OpenAIError(status, payg(r.Limit), new("rate_limit_exceeded"), text+" Visit https://platform.openai.com/account/rate-limits to learn more.")
	case bodyInsufficientQuota:
		return wire.OpenAIError(status, "insufficient_quota", new("insufficient_quota"), "You exceeded your current quota, please check your plan and billing details.")
	case bodyMistralFlat:
		return raw(wire.JSONType, `{"object":"error","message":"Rate limit exceeded","type":"rate_limited","param":null,"code":"1300","raw_status_code":429}`)
	case bodyOpenRouterNum:
		return raw(wire.JSONType, `{"error":{"code":429,"message":"Provider returned error","metadata":{"provider_name":"Simulator","raw":"rate limited upstream"}}}`)
	case bodyHTML:
		return raw("text/html; charset=utf-8", "<html><head><title>429 Too Many Requests</title></head><body><h1>429 Too Many Requests</h1><hr>"+
			html.EscapeString(s.Simulator)+"</body></html>\n")
	case bodyEmpty:
		return raw("", "")
	case bodyStringError:
		return raw(wire.JSONType, `{"error":"Too Many Requests"}`)
	}
	return raw(wire.JSONType, "")
}

func raw(contentType, body string) *wire.Reply {
	return &wire.Reply{Status: http.StatusTooManyRequests, ContentType: contentType, Body: []byte(body)}
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
	if limit == Requests {
		return "requests per min (RPM)"
	}
	return "tokens per min (TPM)"
}
