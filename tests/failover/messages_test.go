package failover

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// TestAtMessagesEachErrorOfTheBalancerHasAnthropicsForm makes errors wherever
// the balancer makes some: before the path is read, for a caller's limit,
// without a backend, and instead of a backend's own.
func TestAtMessagesEachErrorOfTheBalancerHasAnthropicsForm(t *testing.T) {
	const withKeys = "client_key alice client-key-of-alice\nclient_key bob client-key-of-bob\nbackend http://a\n"
	for name, c := range map[string]struct {
		config string
		path   string // default: /v1/messages
		header []string
		body   string // default: {"model":"claude"}
		reply  http.HandlerFunc
		again  bool // the second request counts

		status     int
		kind, code string
		retries    bool // Retry-After
	}{
		"no key":               {config: withKeys, status: 401, kind: "authentication_error", code: "invalid_api_key"},
		"a wrong key":          {config: withKeys, header: []string{"X-Api-Key", "wrong"}, status: 401, kind: "authentication_error", code: "invalid_api_key"},
		"at an unknown prefix": {config: withKeys, path: "/claude/v1/messages", status: 401, kind: "authentication_error", code: "invalid_api_key"},
		"an unknown path":      {config: "backend http://a", path: "/claude/v1/messages", status: 404, kind: "not_found_error", code: "unknown_url"},
		"at Foundry's path":    {config: withKeys, path: "/anthropic/v1/messages", status: 401, kind: "authentication_error", code: "invalid_api_key"},
		"an odd path":          {config: "backend http://a", path: "//v1/messages", status: 400, kind: "invalid_request_error", code: "invalid_path"},
		"a caller that may not": {config: withKeys + "caller bob deny", header: []string{"X-Api-Key", "client-key-of-bob"},
			status: 403, kind: "permission_error", code: "permission_denied"},
		"a caller's limit": {config: withKeys + "caller alice {\nrequests 1/minute\n}", header: []string{"X-Api-Key", "client-key-of-alice"}, again: true,
			status: 429, kind: "rate_limit_error", code: "rate_limit_exceeded", retries: true},
		"a caller's quota": {config: withKeys + "caller alice {\nrequests 1/day\n}", header: []string{"X-Api-Key", "client-key-of-alice"}, again: true,
			status: 429, kind: "rate_limit_error", code: "insufficient_quota"},
		"a caller's model": {config: withKeys + "caller alice {\nmodels gpt-4o\n}", header: []string{"X-Api-Key", "client-key-of-alice"},
			status: 404, kind: "not_found_error", code: "model_not_found"},
		"an unknown model": {config: "backend http://a {\nmodel gpt-4o\n}", status: 404, kind: "not_found_error", code: "model_not_found"},
		"counting the tokens of an unknown model": {config: "backend http://a {\nmodel gpt-4o\n}", path: "/v1/messages/count_tokens",
			status: 404, kind: "not_found_error", code: "model_not_found"},
		"another dialect": {config: "backend http://a {\nmodel gpt-4o\n}", path: "/openai/v1/messages", status: 404, kind: "not_found_error", code: "model_not_found"},
		"a classic path": {config: "backend http://a {\nmodel gpt-4o\n}", path: "/openai/deployments/claude/messages?api-version=1",
			status: 404, kind: "not_found_error", code: "model_not_found"},
		"no model": {config: "backend http://a {\nmodel gpt-4o\n}", body: `{}`, status: 400, kind: "invalid_request_error", code: "missing_required_parameter"},
		"a model too far": {config: "request_buffers 1KiB\nbackend http://a {\nmodel claude\n}", body: `{"x":"` + strings.Repeat("x", 2000) + `","model":"claude"}`,
			status: 413, kind: "request_too_large", code: "request_too_large"},
		"a compressed body": {config: "backend http://a {\nmodel claude\n}", header: []string{"Content-Encoding", "br"},
			status: 415, kind: "invalid_request_error", code: "unsupported_content_encoding"},
		"all throttle":  {config: "backend http://a", reply: lbtest.Throttled("7"), status: 429, kind: "rate_limit_error", code: "rate_limit_exceeded", retries: true},
		"no connection": {config: "backend http://a", reply: lbtest.Aborts, status: 502, kind: "api_error", code: "upstream_unreachable"},
		"a refused credential": {config: "backend http://a {\napi_key key-of-a\n}", reply: lbtest.Status(401),
			status: 502, kind: "api_error", code: "upstream_credentials_rejected"},
		"no answer in time": {config: "backend http://a\nresponse_header_timeout 1s", reply: func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
			status: 504, kind: "timeout_error", code: "upstream_timeout"},
		"a withheld error": {config: "backend http://a/team {\napi_key key-of-a\n}", reply: lbtest.Says(500, "(", "Content-Encoding", "unknown"),
			status: 500, kind: "api_error", code: "upstream_error"},
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, "openai_lb {\n"+c.config+"\n}", func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(c.reply)
				send := func() lbtest.Reply {
					path, body := c.path, c.body
					if path == "" {
						path = "/v1/messages"
					}
					if body == "" {
						body = `{"model":"claude"}`
					}
					r := w.Request(http.MethodPost, path, strings.NewReader(body))
					for i := 0; i+1 < len(c.header); i += 2 {
						r.Header.Set(c.header[i], c.header[i+1])
					}
					return w.Send(r)
				}
				if c.again {
					send()
				}
				got := send()
				var body struct {
					Type  string
					Error struct {
						Type, Message string
						Details       struct {
							ErrorCode string `json:"error_code"`
						}
					}
					RequestID string `json:"request_id"`
				}
				if err := json.Unmarshal([]byte(got.Body), &body); err != nil || got.Err != nil {
					t.Fatal(got.Err, err, got.Body)
				}
				if got.Status != c.status || body.Type != "error" || body.Error.Type != c.kind || body.Error.Details.ErrorCode != c.code || body.Error.Message == "" {
					t.Errorf("client got %d %s, want %d %s with %s", got.Status, got.Body, c.status, c.kind, c.code)
				}
				if body.RequestID == "" || body.RequestID != got.Header.Get("Request-Id") || body.RequestID != got.Header.Get("X-Request-Id") {
					t.Errorf("request_id is %q, the headers %v", body.RequestID, got.Header)
				}
				if hint := got.Header.Get("Retry-After"); (hint != "") != c.retries {
					t.Errorf("Retry-After is %q", hint)
				}
			})
		})
	}
}
