package wire

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
)

// JSONType is the content type of JSON.
const JSONType = "application/json"

// Reply is a whole reply.
type Reply struct {
	Status      int
	Header      http.Header
	ContentType string
	Body        []byte
}

// JSON returns a reply that has v as its body.
func JSON(status int, v any) *Reply {
	return &Reply{Status: status, ContentType: JSONType, Body: encode(v)}
}

// Event is the error of a reply, as an event in a WebSocket of the Responses
// API.
func (r *Reply) Event() any {
	event, headers := map[string]any{"type": "error", "status": r.Status}, map[string]string{}
	_ = json.Unmarshal(r.Body, &event) // its member "error"
	for name := range r.Header {
		headers[strings.ToLower(name)] = r.Header.Get(name)
	}
	event["headers"] = headers
	return event
}

func encode(v any) []byte {
	data, err := json.Marshal(v)
	if err != nil {
		panic("simulator: " + err.Error()) // cannot happen: all values come from JSON, or are of the simulator
	}
	return data
}

// AzureError returns an error as Azure's gateway words it.
func AzureError(status int, code, message string) *Reply {
	return JSON(status, map[string]any{"error": map[string]string{"code": code, "message": message}})
}

// openaiBody is the shape in which OpenAI, and Azure's models, refuse.
type openaiBody map[string]errorDetail // under "error"

type errorDetail struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    *string `json:"code"`
}

// newDetail returns the members of an error. An empty code is null.
func newDetail(errType, code, message string) errorDetail {
	detail := errorDetail{Message: message, Type: errType}
	if code != "" {
		detail.Code = &code
	}
	return detail
}

// OpenAIError returns an error as OpenAI, and Azure's models, word it. An empty
// code is null.
func OpenAIError(status int, errType, code, message string) *Reply {
	return JSON(status, openaiBody{"error": newDetail(errType, code, message)})
}

// Invalid returns an error about a mistake of the client's, without a code.
func Invalid(status int, message string) *Reply {
	return OpenAIError(status, "invalid_request_error", "", message)
}

// InvalidParam is Invalid with a 400 about a parameter.
func InvalidParam(param, message string) *Reply {
	detail := newDetail("invalid_request_error", "", message)
	detail.Param = &param
	return JSON(http.StatusBadRequest, openaiBody{"error": detail})
}

// ContentFilterBody is the body of Azure's content filter.
const ContentFilterBody = `{"error":{"message":"The response was filtered due to the prompt triggering Azure OpenAI's content management policy. ` +
	`Please modify your prompt and retry. To learn more about our content filtering policies please read our documentation: https://go.microsoft.com/fwlink/?linkid=2198766",` +
	`"type":null,"param":"prompt","code":"content_filter","status":400,"innererror":{"code":"ResponsibleAIPolicyViolation","content_filter_result":{` +
	`"hate":{"filtered":false,"severity":"safe"},"jailbreak":{"filtered":false,"detected":false},"self_harm":{"filtered":false,"severity":"safe"},` +
	`"sexual":{"filtered":false,"severity":"safe"},"violence":{"filtered":true,"severity":"medium"}}}}}`

// errorText has the texts of an error with a status.
type errorText struct{ kind, code, message string }

// azureErrors are the errors of Azure's gateway. They have no type.
var azureErrors = map[int]errorText{
	http.StatusUnauthorized: {code: "401", message: "Access denied due to invalid subscription key or wrong API endpoint. " +
		"Make sure to provide a valid key for an active subscription and use a correct regional API endpoint for your resource."},
	http.StatusNotFound: {code: "DeploymentNotFound", message: "The API deployment for this resource does not exist. " +
		"If you created the deployment within the last 5 minutes, please wait a moment and try again."},
	http.StatusServiceUnavailable: {code: "ServiceUnavailable", message: "The service is temporarily unable to process your request. Please try again later."},
}

// openaiErrors are those of OpenAI. The 404 names the model.
var openaiErrors = map[int]errorText{
	http.StatusUnauthorized: {"invalid_request_error", "invalid_api_key", "Incorrect API key provided. " +
		"You can find your API key at https://platform.openai.com/account/api-keys."},
	http.StatusNotFound:           {"invalid_request_error", "model_not_found", "The model '%s' does not exist or you do not have access to it."},
	http.StatusServiceUnavailable: {"service_unavailable_error", "server_is_overloaded", "The server is currently overloaded. Please try again later."},
}

// AzureStatus returns the error of Azure's gateway that has this status, other
// than 429.
func AzureStatus(status int) *Reply {
	if e, ok := azureErrors[status]; ok {
		return AzureError(status, e.code, e.message)
	}
	return otherStatus(status)
}

// OpenAIStatus is AzureStatus at OpenAI, about a model.
func OpenAIStatus(status int, model string) *Reply {
	e, ok := openaiErrors[status]
	if !ok {
		return otherStatus(status)
	}
	return OpenAIError(status, e.kind, e.code, strings.ReplaceAll(e.message, "%s", model))
}

// otherStatus returns an error in the shape that OpenAI and Azure's models have
// in common.
func otherStatus(status int) *Reply {
	if status >= 500 {
		return OpenAIError(status, "server_error", "", serverErrorText)
	}
	return Invalid(status, fmt.Sprintf("The request was refused with status %d.", status))
}

const serverErrorText = "The server had an error while processing your request. Sorry about that!"
