package e2e

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// refusal is what two backends reply to every request for a model, and what an
// SDK makes of it.
type refusal struct {
	call   string // Default: chat
	status int
	body   string
	// class, code and text are those of the exception.
	class, code, text string
	// gives is the status of the exception. Default: status.
	gives int
}

// refusals are replies of which the client gets the provider's own words,
// because no backend is left.
var refusals = []refusal{
	{status: 400, body: `{"error":{"code":"unknown_model","message":"Unknown model: gpt-9"}}`, class: "BadRequestError", code: "unknown_model", text: "Unknown model: gpt-9"},
	{status: 404, body: "{\"error\":{\"message\":\"The model `gpt-9` does not exist or you do not have access to it.\",\"type\":\"invalid_request_error\",\"param\":null,\"code\":\"model_not_found\"}}",
		class: "NotFoundError", code: "model_not_found", text: "does not exist or you do not have access"},
	{status: 404, body: `{"error":{"message":"This model is only supported in v1/responses and not in v1/chat/completions.","type":"invalid_request_error","param":"model","code":null}}`,
		class: "NotFoundError", text: "only supported in v1/responses"},
	{status: 404, body: `{"error":{"code":"404","message":"Resource not found"}}`, class: "NotFoundError", code: "404", text: "Resource not found"},
	{call: "streamed chat", status: 400, body: `{"error":{"message":"Your organization must be verified to stream this model.","type":"invalid_request_error","param":"stream","code":"unsupported_value"}}`,
		class: "BadRequestError", code: "unsupported_value", text: "must be verified to stream"},
	{status: 403, body: `{"error":{"message":"Your organization must be verified to use this model.","type":"invalid_request_error","param":null,"code":null}}`,
		class: "PermissionDeniedError", text: "must be verified to use"},
	{status: 400, body: `{"type":"error","error":{"type":"invalid_request_error","message":"Your credit balance is too low to access the Anthropic API."}}`,
		class: "BadRequestError", text: "credit balance is too low"},
	{status: 429, body: `{"error":{"message":"Your account is not active, please check your billing details.","type":"billing_not_active","param":null,"code":"billing_not_active"}}`,
		class: "RateLimitError", code: "billing_not_active", text: "account is not active"},
	{status: 429, body: `{"error":{"message":"You have exceeded the usage limit of your project.","type":"usage_limit_exceeded","param":null,"code":"usage_limit_exceeded"}}`,
		class: "RateLimitError", code: "usage_limit_exceeded", text: "the usage limit of your project"},
	{status: 400, body: `{"type":"error","error":{"type":"invalid_request_error","message":"You have reached your specified API usage limits. You will regain access on 2027-01-01 at 00:00 UTC."}}`,
		class: "BadRequestError", text: "You will regain access on 2027-01-01"},
	{status: 400, body: `{"error":{"message":"The service tier 'ultrafast' is not supported for this model.","type":"invalid_request_error","param":"service_tier","code":"invalid_value"}}`,
		class: "BadRequestError", code: "invalid_value", text: "service tier 'ultrafast' is not supported"},
	{status: 403, body: `{"error":{"message":"Token quota is exceeded. Try again in 1 hour 2 minutes.","code":"403"}}`, class: "PermissionDeniedError", code: "403", text: "Token quota is exceeded"},
	{status: 403, body: `<html><head><title>403 Forbidden</title></head><body>Blocked by the firewall</body></html>`, class: "PermissionDeniedError", text: "403"},
	{call: "streamed chat", status: 403, body: `<html><head><title>403 Forbidden</title></head><body>Blocked by the firewall</body></html>`, class: "PermissionDeniedError", text: "403"},
	{status: 400, body: `{"success":false,"result":[],"messages":[],"error":[{"code":2005,"message":"Failed to get response from provider"}]}`, class: "BadRequestError", text: "400"},
	{call: "responses", status: 200, body: `{"id":"resp_1","object":"response","status":"failed","error":{"code":"mass_persuasion","message":"This prompt is refused."},"output":[]}`,
		class: "InternalServerError", code: "mass_persuasion", text: "This prompt is refused.", gives: 500},
	// what SDKs would take for an answer
	{status: 200, body: `<html><head><title>Sign in</title></head></html>`, class: "InternalServerError", code: "upstream_unreachable", text: "No backend gave a valid answer.", gives: 502},
	{call: "streamed chat", status: 200, body: `<html><head><title>Sign in</title></head></html>`, class: "InternalServerError", code: "upstream_unreachable", text: "No backend gave a valid answer.", gives: 502},
	{status: 302, class: "InternalServerError", code: "upstream_unreachable", text: "No backend gave a valid answer.", gives: 502},
	{status: 204, class: "InternalServerError", code: "upstream_unreachable", text: "No backend gave a valid answer.", gives: 502},
	{status: 200, body: `{"id":"chatcmpl-1","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","conte`,
		class: "InternalServerError", code: "upstream_unreachable", text: "No backend gave a valid answer.", gives: 502},
	{call: "responses", status: 200, body: `{"id":"resp_1","object":"response","status":"failed","error":{"code":"data_residency_mismatch","message":"The data is in another region."},"output":[]}`,
		class: "BadRequestError", code: "data_residency_mismatch", text: "The data is in another region.", gives: 400},
	{call: "streamed responses", status: 200, body: `{"id":"resp_1","object":"response","status":"completed","output":[]}`, class: "InternalServerError", code: "upstream_unreachable", text: "No backend gave a valid answer.", gives: 502},
	// whose words are not passed on: they may be about the key
	{status: 400, body: `{"type":"error","error":{"type":"invalid_request_error","message":"This organization has been disabled."}}`,
		class: "InternalServerError", code: "upstream_credentials_rejected", text: "No backend accepts the credentials", gives: 502},
}

// TestSDKsRaiseTheProvidersOwnError has each pair of backends refuse all that
// it gets. The SDKs make their usual retries of an error that must not be
// retried.
func TestSDKsRaiseTheProvidersOwnError(t *testing.T) {
	for _, language := range languages {
		if language.name == "Go" {
			continue
		}
		t.Run(language.name, func(t *testing.T) {
			t.Parallel()
			var mu sync.Mutex
			asked := make(map[string]int)
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				number, _, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
				i, err := strconv.Atoi(number)
				if err != nil || r.Method != http.MethodPost {
					return
				}
				mu.Lock()
				asked[number]++
				mu.Unlock()
				if strings.HasPrefix(refusals[i].body, "<") {
					w.Header().Set("Content-Type", "text/html")
				} else {
					w.Header().Set("Content-Type", "application/json")
				}
				w.Header().Set("X-Request-Id", "req_of_the_backend")
				w.WriteHeader(refusals[i].status)
				io.WriteString(w, refusals[i].body)
			}))
			defer server.Close()
			var options []string
			for i := range refusals {
				for _, name := range []string{"a", "b"} {
					options = append(options, fmt.Sprintf("backend %s/%d/%s/v1 {\n name %d%s\n model m%d\n}", server.URL, i, name, i, name, i))
				}
			}
			s := start(t, nil, options...)
			for i, r := range refusals {
				sc := scenario{calls: []call{{name: r.call, model: fmt.Sprint("m", i)}}, retries: r.code == "mass_persuasion"}
				if r.call == "" {
					sc.calls[0].name = "chat"
				}
				got := language.run(t, s, sc.order(s.url, "OpenAI"))[0].Error
				if r.gives == 0 {
					r.gives = r.status
				}
				if got.Class != r.class || got.Status != r.gives || got.Code != r.code || !strings.Contains(got.Message, r.text) {
					t.Errorf("%d %s:\n got %+v", r.status, r.body, got)
				}
				mu.Lock()
				if n := asked[strconv.Itoa(i)]; n != 2 {
					t.Errorf("%d %s: %d attempts, want one at each backend", r.status, r.body, n)
				}
				mu.Unlock()
			}
		})
	}
}
