package verdict

import "testing"

func TestReplyMeans(t *testing.T) {
	for _, c := range []struct {
		name   string
		status int
		body   string
		want   Class
	}{
		{"a success", 200, "", Served},
		{"an upgrade", 101, "", Served},
		{"a redirect", 307, "", Served},
		{"a bare 429", 429, "", Throttled},
		{"Azure's classic 429", 429, `{"error":{"code":"429","message":"Rate limit is exceeded. Try again in 50 seconds."}}`, Throttled},
		{"Azure's newer 429", 429, `{"error":{"code":"RateLimitReached","message":"Your requests have exceeded the token rate limit. Please retry after 60 seconds."}}`, Throttled},
		{"a full PTU deployment", 429, `{"error":{"type":"too_many_requests","code":"rate_limit_reached","message":"Requests have exceeded the throughput limit"}}`, Throttled},
		{"OpenAI's tokens per minute", 429, `{"error":{"message":"Rate limit reached for gpt-4o","type":"tokens","param":null,"code":"rate_limit_exceeded"}}`, Throttled},
		{"a numeric code", 429, `{"error":{"code":429,"message":"slow down","metadata":{}}}`, Throttled},
		{"Mistral's flat shape", 429, `{"object":"error","message":"Rate limit exceeded","type":"rate_limited","param":null,"code":"1300"}`, Throttled},
		{"an error that is a string", 429, `{"error":"Too many requests"}`, Throttled},
		{"a page of HTML", 429, `<html>429</html>`, Throttled},
		{"an exhausted account", 429, `{"error":{"message":"You exceeded your current quota","type":"insufficient_quota","param":null,"code":"insufficient_quota"}}`, Quota},
		{"a project's spend limit", 429, `{"error":{"message":"","type":"insufficient_quota","code":"project_spend_limit_exceeded"}}`, Quota},
		{"spent credits", 429, `{"error":{"code":"credit_balance_exhausted"}}`, Quota},
		{"Anthropic's spend limit", 429, `{"type":"error","error":{"type":"rate_limit_error","details":{"error_code":"enforced_spend_limit_reached"}}}`, Quota},
		{"payment required", 402, "", Quota},
		{"a request over the whole limit", 429, `{"error":{"message":"Request too large for gpt-4o in organization org-x on tokens per min (TPM): Limit 30000, Requested 30601.","type":"tokens","code":"rate_limit_exceeded"}}`, TooLarge},
		{"Azure without capacity", 429, `{"error":{"type":"too_many_requests","code":"no_capacity","message":"The system is currently experiencing high demand"}}`, Overloaded},
		{"OpenAI's ramp limit", 429, `{"error":{"type":"rate_limit_error","code":"slow_down"}}`, Overloaded},
		{"service unavailable", 503, "", Overloaded},
		{"Anthropic overloaded", 529, "", Overloaded},
		{"Groq's flex tier", 498, "", Overloaded},
		{"a 500 that means no capacity", 500, `{"error":{"code":"no_capacity"}}`, Overloaded},
		{"an internal error", 500, `{"error":{"message":"sorry","type":"server_error","param":null,"code":null}}`, Failed},
		{"a bad gateway", 502, "", Failed},
		{"a gateway timeout", 504, "", Failed},
		{"a failed model server", 424, "", Failed},
		{"an operation timeout", 408, "", Failed},
		{"an unheard-of 5xx", 599, "", Failed},
		{"a wrong key", 401, `{"error":{"code":"401","message":"Access denied due to invalid subscription key"}}`, Credential},
		{"a firewall", 403, `{"error":{"code":"403","message":"Access denied due to Virtual Network/Firewall rules."}}`, Credential},
		{"a forbidden prompt", 403, `{"error":{"type":"user_error","message":"not allowed"}}`, ClientError},
		{"a missing deployment", 404, `{"error":{"code":"DeploymentNotFound","message":"The API deployment for this resource does not exist."}}`, NoModel},
		{"a missing model", 404, `{"error":{"message":"The model does not exist","type":"invalid_request_error","code":"model_not_found"}}`, NoModel},
		{"a missing response", 404, `{"error":{"message":"Response with id 'resp_1' not found.","type":"invalid_request_error","code":null}}`, ClientError},
		{"a content filter", 400, `{"error":{"code":"content_filter","status":400}}`, ClientError},
		{"an unprocessable request", 422, "", ClientError},
		{"a conflict", 409, "", ClientError},
		{"a body too large", 413, "", ClientError},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := Judge(c.status, []byte(c.body)); got != c.want {
				t.Errorf("Judge(%d, %q) = %s, want %s", c.status, c.body, got, c.want)
			}
		})
	}
}

func FuzzJudge(f *testing.F) {
	f.Add(429, []byte(`{"error":{"code":"insufficient_quota"}}`))
	f.Add(404, []byte(`{"error":"x"}`))
	f.Add(403, []byte(`[`))
	f.Fuzz(func(t *testing.T, status int, body []byte) {
		if class := Judge(status, body); (status < 400) != (class == Served) {
			t.Errorf("Judge(%d, %q) = %s", status, body, class)
		}
	})
}
