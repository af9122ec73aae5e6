package apierror

import "net/http"

// anthropicTypes are the types of errors that Anthropic documents for statuses
// ("Errors"). Any other 4xx is an invalid_request_error.
var anthropicTypes = map[int]string{
	http.StatusUnauthorized:          "authentication_error",
	http.StatusPaymentRequired:       "billing_error",
	http.StatusForbidden:             "permission_error",
	http.StatusNotFound:              "not_found_error",
	http.StatusRequestEntityTooLarge: "request_too_large",
	http.StatusTooManyRequests:       "rate_limit_error",
	http.StatusServiceUnavailable:    "overloaded_error",
	http.StatusGatewayTimeout:        "timeout_error",
	529:                              "overloaded_error",
}

// anthropic returns the error to the request with this id in the form of
// Anthropic's API. Its SDKs read the code there.
func (e Error) anthropic(id string) any {
	kind, known := anthropicTypes[e.Status]
	switch {
	case known:
	case e.Status >= 400 && e.Status < 500:
		kind = "invalid_request_error"
	default:
		kind = "api_error"
	}
	return map[string]any{
		"type":       "error",
		"error":      map[string]any{"type": kind, "message": e.Message, "details": map[string]string{"error_code": e.Code}},
		"request_id": id,
	}
}
