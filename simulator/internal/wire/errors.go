package wire

import (
	"encoding/json"
	"fmt"
	"net/http"
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

// OpenAIError returns an error as OpenAI, and Azure's models, word it.
func OpenAIError(status int, errType string, code *string, message string) *Reply {
	return JSON(status, openaiBody{"error": {Message: message, Type: errType, Code: code}})
}

// ContentFilterBody is the body of Azure's content filter.
const ContentFilterBody = `{"error":{"message":"The response was filtered due to the prompt triggering Azure OpenAI's content management policy. ` +
	`Please modify your prompt and retry. To learn more about our content filtering policies please read our documentation: https://go.microsoft.com/fwlink/?linkid=2198766",` +
	`"type":null,"param":"prompt","code":"content_filter","status":400,"innererror":{"code":"ResponsibleAIPolicyViolation","content_filter_result":{` +
	`"hate":{"filtered":false,"severity":"safe"},"jailbreak":{"filtered":false,"detected":false},"self_harm":{"filtered":false,"severity":"safe"},` +
	`"sexual":{"filtered":false,"severity":"safe"},"violence":{"filtered":true,"severity":"medium"}}}}}`

// AzureStatus is an error of Azure's gateway that has this status, other than 429.
func AzureStatus(status int) *Reply {
	switch status {
	case http.StatusUnauthorized:
		return AzureError(status, "401", "Access denied due to invalid subscription key or wrong API endpoint. "+
			"Make sure to provide a valid key for an active subscription and use a correct regional API endpoint for your resource.")
	case http.StatusForbidden:
		return AzureError(status, "403", "Access denied due to Virtual Network/Firewall rules.")
	case http.StatusNotFound:
		return AzureError(status, "DeploymentNotFound", "The API deployment for this resource does not exist. "+
			"If you created the deployment within the last 5 minutes, please wait a moment and try again.")
	case http.StatusRequestTimeout:
		return AzureError(status, "Timeout", "The operation was timeout.")
	case http.StatusServiceUnavailable:
		return AzureError(status, "ServiceUnavailable", "The service is temporarily unable to process your request. Please try again later.")
	case http.StatusGatewayTimeout:
		return AzureError(status, "GatewayTimeout", "The gateway did not receive a response in time.")
	}
	return otherStatus(status)
}

// OpenAIStatus is AzureStatus at OpenAI. Its text depends on the model that was
// asked for, and on whether there was a key.
func OpenAIStatus(status int, model string, hasKey bool) *Reply {
	switch status {
	case http.StatusUnauthorized:
		if !hasKey {
			return OpenAIError(status, "invalid_request_error", nil, "You didn't provide an API key. "+
				"You need to provide your API key in an Authorization header using Bearer auth (i.e. Authorization: Bearer YOUR_KEY).")
		}
		return OpenAIError(status, "invalid_request_error", new("invalid_api_key"), "Incorrect API key provided. "+
			"You can find your API key at https://platform.openai.com/account/api-keys.")
	case http.StatusForbidden:
		return OpenAIError(status, "request_forbidden", new("unsupported_country_region_territory"), "Country, region, or territory not supported")
	case http.StatusNotFound:
		return OpenAIError(status, "invalid_request_error", new("model_not_found"),
			fmt.Sprintf("The model '%s' does not exist or you do not have access to it.", model))
	case http.StatusServiceUnavailable:
		return OpenAIError(status, "service_unavailable_error", new("server_is_overloaded"), "The server is currently overloaded. Please try again later.")
	}
	return otherStatus(status)
}

// otherStatus is a reply in the shape that OpenAI and Azure's models have in common.
func otherStatus(status int) *Reply {
	if status >= 500 {
		return OpenAIError(status, "server_error", nil, serverErrorText)
	}
	return OpenAIError(status, "invalid_request_error", nil, fmt.Sprintf("The request was refused with status %d.", status))
}

const serverErrorText = "The server had an error while processing your request. Sorry about that!"
