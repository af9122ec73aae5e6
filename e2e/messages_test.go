package e2e

import (
	"encoding/json"
	"testing"
)

// TestAnthropicsSDKsUnderstandTheErrorsOfTheBalancer has them call for errors
// of the balancer's own, in two dialects.
func TestAnthropicsSDKsUnderstandTheErrorsOfTheBalancer(t *testing.T) {
	type call struct {
		Key    string `json:"key"`
		Model  string `json:"model"`
		Counts bool   `json:"counts"` // the tokens
		Length int    `json:"length"` // of the question
	}
	cases := []struct {
		call
		want apiError
	}{
		{call{Key: "wrong", Model: "throttles"}, apiError{"AuthenticationError", 401, "invalid_api_key", "authentication_error", "Incorrect API key provided.", "", ""}},
		{call{Key: "client-key-of-bob", Model: "throttles"}, apiError{"PermissionDeniedError", 403, "permission_denied", "permission_error",
			"The API key provided is valid, but its owner may not use this server. Ask its operator for access.", "", ""}},
		{call{Key: "client-key-of-alice", Model: "none"}, apiError{"NotFoundError", 404, "model_not_found", "not_found_error", "", "", ""}},
		{call{Key: "client-key-of-alice", Model: "none", Counts: true}, apiError{"NotFoundError", 404, "model_not_found", "not_found_error", "", "", ""}},
		{call{Key: "client-key-of-alice", Model: ""}, apiError{"BadRequestError", 400, "missing_required_parameter", "invalid_request_error", "", "", ""}},
		{call{Key: "client-key-of-carol", Model: "throttles", Length: 20_000}, apiError{"ContentTooLargeError", 413, "request_too_large", "request_too_large", "", "", ""}},
		{call{Key: "client-key-of-alice", Model: "throttles"}, apiError{"RateLimitError", 429, "rate_limit_exceeded", "rate_limit_error",
			"All backends are rate limited. Please retry after 44 seconds.", "", "44"}},
		{call{Key: "client-key-of-dave", Model: "throttles"}, apiError{"RateLimitError", 429, "rate_limit_exceeded", "rate_limit_error", "", "", ""}},
		{call{Key: "client-key-of-alice", Model: "rejects"}, apiError{"InternalServerError", 502, "upstream_credentials_rejected", "api_error",
			"No backend accepts the credentials of the load balancer.", "", ""}},
		{call{Key: "client-key-of-alice", Model: "refuses"}, apiError{"InternalServerError", 502, "upstream_unreachable", "api_error", "No backend could be reached.", "", ""}},
		{call{Key: "client-key-of-alice", Model: "waits"}, apiError{"GatewayTimeoutError", 504, "upstream_timeout", "timeout_error", "No backend answered in time.", "", ""}},
	}
	order := map[string]any{}
	var calls []call
	for _, c := range cases {
		calls = append(calls, c.call)
	}
	order["calls"] = calls
	for _, client := range []struct {
		name, runtime string
		install       func() error
		trust         string
		command       []string
	}{
		{"Python", "python3", installPython, "SSL_CERT_FILE=", []string{"python/.venv/bin/python", "python/messages.py"}},
		{"Node", "node", installNode, "NODE_EXTRA_CA_CERTS=", []string{"node", "node/messages.mjs"}},
	} {
		for _, prefix := range []string{"", "/openai"} {
			t.Run(client.name+"/"+prefix, func(t *testing.T) {
				lookPath(t, client.runtime)
				if err := client.install(); err != nil {
					t.Fatal(err)
				}
				s := start(t, []backend{
					{simulator: "fault status:429:44", options: azureBackend + "\n model throttles"},
					{options: "auth api_key\n api_key wrong\n model rejects"},
					{down: true, options: azureBackend + "\n model refuses"},
					{simulator: "fault hang_before_headers", options: azureBackend + "\n model waits"},
				}, "request_buffers 10KiB", "response_header_timeout 1s",
					"client_key alice client-key-of-alice", "client_key bob client-key-of-bob", "client_key carol client-key-of-carol", "client_key dave client-key-of-dave",
					"caller alice {\n requests 100/minute\n}", "caller bob deny", "caller carol {\n models throttles\n}", "caller dave {\n tokens 1/day\n}")
				order["url"] = s.url + prefix
				text, _ := json.Marshal(order)
				var got []apiError
				runJSON(t, string(text), &got, client.trust+s.root, client.command...)
				if len(got) != len(cases) {
					t.Fatalf("got %d errors of %d calls", len(got), len(cases))
				}
				for i, c := range cases {
					if got[i].RequestID == "" || got[i].Message == "" {
						t.Errorf("%+v: %+v", c.call, got[i])
					}
					if got[i].RequestID = ""; c.want.Message == "" {
						got[i].Message = ""
					}
					if got[i] != c.want {
						t.Errorf("%+v:\n got %+v\nwant %+v", c.call, got[i], c.want)
					}
				}
			})
		}
	}
}
