package simulator

import (
	"encoding/json"
	"fmt"
	"html"
	"net/http"
	"strconv"
	"time"
)

const jsonType = "application/json"

// reply is a whole reply.
type reply struct {
	status      int
	header      http.Header
	contentType string
	body        []byte
}

func (rep *reply) json(v any) {
	body, err := json.Marshal(v)
	if err != nil {
		panic("simulator: " + err.Error()) // cannot happen: v is a type of this package
	}
	rep.body = body
}

func (rep *reply) raw(body string) { rep.body = []byte(body) }

func jsonReply(status int, v any) *reply {
	rep := &reply{status: status, contentType: jsonType}
	rep.json(v)
	return rep
}

// azureErrorBody is the shape in which Azure's gateway refuses.
type azureErrorBody struct {
	Error errorCode `json:"error"`
}

type errorCode struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

func azureError(status int, code, message string) *reply {
	return jsonReply(status, azureErrorBody{errorCode{code, message}})
}

// openaiErrorBody is the shape in which OpenAI, and Azure's models, refuse.
type openaiErrorBody struct {
	Error errorDetail `json:"error"`
}

type errorDetail struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    *string `json:"code"`
}

func openaiError(status int, errType string, code *string, message string) *reply {
	return jsonReply(status, openaiErrorBody{errorDetail{Message: message, Type: errType, Code: code}})
}

// typedError makes an error body. The code "null" stands for a JSON null.
func typedError(errType, code, message string) openaiErrorBody {
	detail := errorDetail{Message: message, Type: errType}
	if code != "null" {
		detail.Code = &code
	}
	return openaiErrorBody{detail}
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

// throttleBody is a 429 without hints in its headers. Its text names the wait,
// unless that is zero.
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
		if r.tooLarge {
			rep.json(typedError(limitTokens, "rate_limit_exceeded", fmt.Sprintf("Request too large for %s in organization org-simulator on %s: Limit %d, Requested %d. "+
				"The input or output tokens must be reduced in order to run successfully. Visit https://platform.openai.com/account/rate-limits to learn more.",
				model, openaiLimit(r.limit), x.h.TokensPerMinute, x.cost.tokens())))
			break
		}
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

// contentFilterBody is the body of Azure's content filter.
const contentFilterBody = `{"error":{"message":"The response was filtered due to the prompt triggering Azure OpenAI's content management policy. ` +
	`Please modify your prompt and retry. To learn more about our content filtering policies please read our documentation: https://go.microsoft.com/fwlink/?linkid=2198766",` +
	`"type":null,"param":"prompt","code":"content_filter","status":400,"innererror":{"code":"ResponsibleAIPolicyViolation","content_filter_result":{` +
	`"hate":{"filtered":false,"severity":"safe"},"jailbreak":{"filtered":false,"detected":false},"self_harm":{"filtered":false,"severity":"safe"},` +
	`"sexual":{"filtered":false,"severity":"safe"},"violence":{"filtered":true,"severity":"medium"}}}}}`

// statusError is the reply of the API that is called, with an error status other
// than 429.
func (x *exchange) statusError(status int) *reply {
	if x.route.openai {
		return x.openaiStatus(status)
	}
	switch status {
	case http.StatusUnauthorized:
		return azureError(status, "401", "Access denied due to invalid subscription key or wrong API endpoint. "+
			"Make sure to provide a valid key for an active subscription and use a correct regional API endpoint for your resource.")
	case http.StatusForbidden:
		return azureError(status, "403", "Access denied due to Virtual Network/Firewall rules.")
	case http.StatusNotFound:
		return azureError(status, "DeploymentNotFound", "The API deployment for this resource does not exist. "+
			"If you created the deployment within the last 5 minutes, please wait a moment and try again.")
	case http.StatusRequestTimeout:
		return azureError(status, "Timeout", "The operation was timeout.")
	case http.StatusServiceUnavailable:
		return azureError(status, "ServiceUnavailable", "The service is temporarily unable to process your request. Please try again later.")
	case http.StatusGatewayTimeout:
		return azureError(status, "GatewayTimeout", "The gateway did not receive a response in time.")
	}
	return otherStatus(status)
}

// openaiStatus is statusError at OpenAI.
func (x *exchange) openaiStatus(status int) *reply {
	switch status {
	case http.StatusUnauthorized:
		if x.r.Header.Get("Authorization") == "" {
			return openaiError(status, "invalid_request_error", nil, "You didn't provide an API key. "+
				"You need to provide your API key in an Authorization header using Bearer auth (i.e. Authorization: Bearer YOUR_KEY).")
		}
		return openaiError(status, "invalid_request_error", new("invalid_api_key"), "Incorrect API key provided. "+
			"You can find your API key at https://platform.openai.com/account/api-keys.")
	case http.StatusForbidden:
		return openaiError(status, "request_forbidden", new("unsupported_country_region_territory"), "Country, region, or territory not supported")
	case http.StatusNotFound:
		return openaiError(status, "invalid_request_error", new("model_not_found"),
			fmt.Sprintf("The model '%s' does not exist or you do not have access to it.", x.route.deployment))
	case http.StatusServiceUnavailable:
		return openaiError(status, "service_unavailable_error", new("server_is_overloaded"), "The server is currently overloaded. Please try again later.")
	}
	return otherStatus(status)
}

// otherStatus is a reply in the shape that OpenAI and Azure's models have in common.
func otherStatus(status int) *reply {
	if status >= 500 {
		return openaiError(status, "server_error", nil, serverErrorText)
	}
	return openaiError(status, "invalid_request_error", nil, fmt.Sprintf("The request was refused with status %d.", status))
}

const serverErrorText = "The server had an error while processing your request. Sorry about that!"
