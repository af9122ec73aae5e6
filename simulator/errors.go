package simulator

import (
	"encoding/json"
	"fmt"
	"net/http"
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
		panic("simulator: " + err.Error()) // all of them are our own types
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

// typedError has a code, unless that is the word null.
func typedError(errType, code, message string) openaiErrorBody {
	detail := errorDetail{Message: message, Type: errType}
	if code != "null" {
		detail.Code = &code
	}
	return openaiErrorBody{detail}
}

// contentFilterBody refuses a prompt, as Azure's content filter does.
const contentFilterBody = `{"error":{"message":"The response was filtered due to the prompt triggering Azure OpenAI's content management policy. ` +
	`Please modify your prompt and retry. To learn more about our content filtering policies please read our documentation: https://go.microsoft.com/fwlink/?linkid=2198766",` +
	`"type":null,"param":"prompt","code":"content_filter","status":400,"innererror":{"code":"ResponsibleAIPolicyViolation","content_filter_result":{` +
	`"hate":{"filtered":false,"severity":"safe"},"jailbreak":{"filtered":false,"detected":false},"self_harm":{"filtered":false,"severity":"safe"},` +
	`"sexual":{"filtered":false,"severity":"safe"},"violence":{"filtered":true,"severity":"medium"}}}}}`

// statusError is what a deployment says with a status, other than 429.
func statusError(status int) *reply {
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
	if status >= 500 {
		return openaiError(status, "server_error", nil, serverErrorText)
	}
	return openaiError(status, "invalid_request_error", nil, fmt.Sprintf("The request was refused with status %d.", status))
}

const serverErrorText = "The server had an error while processing your request. Sorry about that!"
