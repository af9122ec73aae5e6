package verdict

import (
	"math"
	"net/http"
	"strings"
	"testing"
)

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
		{"a request beyond the credits", 402, `{"error":{"message":"This request requires more credits, or fewer max_tokens. You requested up to 65536 tokens, but can only afford 2500.","code":402}}`, TooLarge},
		{"a request beyond the credits of a day", 429, `{"error":{"message":"Limit reached. Try fewer max_tokens.","code":429}}`, TooLarge},
		{"no credits at all", 402, `{"error":{"message":"Insufficient credits","code":402}}`, Quota},
		{"Azure without capacity", 429, `{"error":{"type":"too_many_requests","code":"no_capacity","message":"The system is currently experiencing high demand"}}`, Overloaded},
		{"OpenAI's ramp limit", 429, `{"error":{"type":"rate_limit_error","code":"slow_down"}}`, Overloaded},
		{"service unavailable", 503, "", Overloaded},
		{"a loop", 508, `{"error":{"type":"server_error","code":"loop_detected"}}`, Loop},
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
		{"a refused key with the type of nearly every error", 403, `{"error":{"type":"invalid_request_error","code":null}}`, Credential},
		{"a forbidden image", 403, `{"error":{"code":"image_content_policy_violation"}}`, ClientError},
		{"a forbidden prompt", 403, `{"error":{"type":"user_error","message":"not allowed"}}`, ClientError},
		{"a missing deployment", 404, `{"error":{"code":"DeploymentNotFound","message":"The API deployment for this resource does not exist."}}`, NoModel},
		{"a missing model", 404, `{"error":{"message":"The model does not exist","type":"invalid_request_error","code":"model_not_found"}}`, NoModel},
		{"a missing model, by its parameter", 404, `{"error":{"param":"model","code":"model_not_found"}}`, NoModel},
		{"a missing model of a tool", 404, `{"error":{"type":"invalid_request_error","param":"tools[0].model","code":"model_not_found"}}`, ClientError},
		{"a missing model of a tool, as a 400", 400, `{"error":{"param":"tools[0].model","code":"model_not_found"}}`, ClientError},
		{"a model that the project may not use", 403, "{\"error\":{\"message\":\"Project `proj_x` does not have access to model `o3-pro`\",\"type\":\"invalid_request_error\",\"param\":null,\"code\":\"model_not_found\"}}", NoModel},
		{"a model of a tool that the project may not use", 403, `{"error":{"param":"tools[0].model","code":"model_not_found"}}`, ClientError},
		{"an MCP server of the caller's that fails", 424, `{"error":{"message":"Error retrieving tool list from MCP server: 'x'. Http status code: 401 (Unauthorized)","type":"external_connector_error","param":"tools","code":"http_error"}}`, ClientError},
		{"a missing response", 404, `{"error":{"message":"Response with id 'resp_1' not found.","type":"invalid_request_error","code":null}}`, ClientError},
		{"a content filter", 400, `{"error":{"code":"content_filter","status":400}}`, ClientError},
		{"an unprocessable request", 422, "", ClientError},
		{"a conflict", 409, "", ClientError},
		{"a body too large", 413, "", ClientError},
		{"no status", 0, "", Failed},
		{"a status that HTTP does not have", 99, "", Failed},
		{"a negative status", -1, "", Failed},
		{"a status beyond HTTP", 1000, "", Failed},
		{"an interim reply", 100, "", Served},
		{"a bad request", 400, `{"error":{"code":"invalid_value","type":"invalid_request_error"}}`, ClientError},
		{"a bad request without a body", 400, "", ClientError},
		{"a prompt longer than the context", 400, `{"error":{"message":"This model's maximum context length is 128000 tokens. However, your messages resulted in 192041 tokens. Please reduce the length of the messages.","type":"invalid_request_error","param":"messages","code":"context_length_exceeded"}}`, TooLarge},
		{"a prompt longer than what a reasoning model takes", 400, `{"error":{"message":"Input tokens exceed the configured limit of 272000 tokens. Your messages resulted in 500037 tokens.","type":"invalid_request_error","param":"messages","code":"context_length_exceeded"}}`, TooLarge},
		{"a failed response whose input was too long", 400, `{"error":{"code":"context_length_exceeded","message":"Your input exceeds the context window of this model. Please adjust your input and try again."}}`, TooLarge},
		{"Azure's embeddings, which have no code for it", 400, `{"error":{"message":"This model's maximum context length is 8192 tokens, however you requested 155434 tokens (155434 in your prompt; 0 for the completion). Please reduce your prompt; or completion length.","type":"invalid_request_error","param":null,"code":null}}`, TooLarge},
		{"vLLM's number for a code", 400, `{"error":{"message":"This model's maximum context length is 2048 tokens.","type":"BadRequestError","param":null,"code":400}}`, TooLarge},
		{"FastChat's flat shape", 400, `{"object":"error","message":"This model's maximum context length is 2048 tokens. However, your messages resulted in 3503 tokens.","code":40303}`, TooLarge},
		{"OpenRouter's endpoint", 400, `{"error":{"message":"This endpoint's maximum context length is 32768 tokens.","code":400}}`, TooLarge},
		{"llama.cpp's type", 400, `{"error":{"code":400,"message":"the request exceeds the available context size","type":"exceed_context_size_error"}}`, TooLarge},
		{"a context length under another status", 422, `{"error":{"code":"context_length_exceeded"}}`, ClientError},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := Judge(Reply{Status: c.status, Body: []byte(c.body)}); got != c.want {
				t.Errorf("%d %s is %s, want %s", c.status, c.body, got, c.want)
			}
			if without := Judge(Reply{Status: c.status}); without != c.want && !NeedsBody(c.status) {
				t.Errorf("%d is %s, but %s with its body, which it needs", c.status, without, c.want)
			}
		})
	}
}

func TestEveryWordMeansTheSameInAnErrorAndInA200(t *testing.T) {
	for word, meaning := range words {
		if strings.HasPrefix(word, "_") {
			word = "team" + word
		}
		want := meaning.class
		if want == "" {
			want = Judge(Reply{Status: meaning.status})
		}
		for _, body := range []string{
			`{"error":{"code":"` + word + `","type":"invalid_request_error","message":"x"}}`,
			`{"error":{"code":"a word that is unknown","type":"` + word + `","message":"x"}}`,
			`{"error":{"code":null,"type":"` + word + `"}}`,
			`{"code":"` + word + `"}`,
		} {
			if got := Judge(Reply{Status: meaning.status, Body: []byte(body)}); got != want {
				t.Errorf("%d %s is %s, want %s", meaning.status, body, got, want)
			}
			if got := Status([]byte(body)); got != meaning.status {
				t.Errorf("in a 200 %s stands for %d, want %d", body, got, meaning.status)
			}
		}
	}
}

func TestAnErrorInA200StandsForAStatus(t *testing.T) {
	for _, c := range []struct {
		body   string
		status int
		class  Class
	}{
		{`{"error":{"message":"You exceeded your current quota","type":"insufficient_quota","code":"insufficient_quota"}}`, 429, Quota},
		{`{"error":{"type":"insufficient_quota","code":"credit_balance_exhausted"}}`, 429, Quota},
		{`{"error":{"type":"insufficient_quota","code":"organization_spend_limit_exceeded"}}`, 429, Quota},
		{`{"error":{"type":"rate_limit_error","details":{"error_code":"enforced_spend_limit_reached"}}}`, 429, Quota},
		{`{"error":{"type":"exceeded_current_quota_error"}}`, 429, Quota},
		{`{"error":{"code":402,"message":"Insufficient credits"}}`, 402, Quota},
		{`{"error":{"code":402,"message":"You requested up to 65536 tokens, but can only afford 2500."}}`, 402, TooLarge},
		{`{"error":{"type":"tokens","code":"rate_limit_exceeded"}}`, 429, Throttled},
		{`{"error":{"type":"rate_limited","code":"1300"}}`, 429, Throttled},
		{`{"error":{"type":"tokens","code":"rate_limit_exceeded","message":"Request too large for gpt-4o"}}`, 429, TooLarge},
		{`{"error":{"type":"too_many_requests","code":"no_capacity"}}`, 429, Overloaded},
		{`{"error":{"type":"engine_overloaded_error"}}`, 429, Overloaded},
		{`{"error":{"type":"server_error","code":503}}`, 503, Overloaded},
		{`{"error":{"type":"server_error","code":null}}`, 500, Failed},
		{`{"error":{"code":"vector_store_timeout"}}`, 504, Failed},
		{`{"error":"broken"}`, 500, Failed},
		{`{"error":{"code":42}}`, 500, Failed},
		{`{"error":{"message":"This model's maximum context length is 8192 tokens"}}`, 400, TooLarge},
		{`{"error":{"type":"invalid_request_error","code":"unsupported_parameter"}}`, 400, ClientError},
		{`{"error":{"type":"invalid_request_error","code":"invalid_api_key"}}`, 401, Credential},
		{`{"error":{"type":"forbidden"}}`, 403, Credential},
		{`{"error":{"code":"PermissionDenied"}}`, 403, NotPermitted},
		{`{"error":{"type":"invalid_request_error","code":"model_not_found"}}`, 404, NoModel},
	} {
		status := Status([]byte(c.body))
		if class := Judge(Reply{Status: status, Body: []byte(c.body)}); status != c.status || class != c.class {
			t.Errorf("%s is a %d, %s, want a %d, %s", c.body, status, class, c.status, c.class)
		}
	}
}

func TestA429ThatNoWaitWouldHelp(t *testing.T) {
	for _, c := range []struct {
		name         string
		header, body string
		cost         int64
		want         Class
	}{
		{"more than the limit", "X-Ratelimit-Limit-Tokens: 60000", "", 60001, TooLarge},
		{"just the limit", "X-Ratelimit-Limit-Tokens: 60000", "", 60000, Throttled},
		{"an absurd cost", "X-Ratelimit-Limit-Tokens: 60000", "", math.MaxInt64, TooLarge},
		{"the other spelling", "X-Rate-Limit-Limit-Tokens: 60000", "", 60001, TooLarge},
		{"the other spelling where the first is not a number", "X-Ratelimit-Limit-Tokens: none\nX-Rate-Limit-Limit-Tokens: 60000", "", 60001, TooLarge},
		{"a fraction between spaces", "X-Ratelimit-Limit-Tokens:  59999.5 ", "", 60000, TooLarge},
		{"a limit that is not tracked", "X-Ratelimit-Limit-Tokens: -1", "", 60001, Throttled},
		{"no limit at all", "X-Ratelimit-Limit-Tokens: 0", "", 60001, Throttled},
		{"no number", "X-Ratelimit-Limit-Tokens: 60k", "", 60001, Throttled},
		{"NaN", "X-Ratelimit-Limit-Tokens: NaN", "", 60001, Throttled},
		{"infinite", "X-Ratelimit-Limit-Tokens: Inf", "", math.MaxInt64, Throttled},
		{"the limit of requests", "X-Ratelimit-Limit-Requests: 60", "", 60001, Throttled},
		{"an unknown cost", "X-Ratelimit-Limit-Tokens: 60000", "", 0, Throttled},
		{"no headers", "", "", 60001, Throttled},
		{"no budget, whatever it costs", "X-Ratelimit-Limit-Tokens: 60000", `{"error":{"code":"insufficient_quota"}}`, 60001, Quota},
		{"no capacity, but too much anyhow", "X-Ratelimit-Limit-Tokens: 60000", `{"error":{"code":"no_capacity"}}`, 60001, TooLarge},
		{"no capacity", "X-Ratelimit-Limit-Tokens: 60000", `{"error":{"code":"no_capacity"}}`, 100, Overloaded},
	} {
		t.Run(c.name, func(t *testing.T) {
			header := http.Header{}
			for line := range strings.Lines(c.header) {
				name, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ":")
				header.Add(name, value)
			}
			reply := Reply{Status: 429, Header: header, Body: []byte(c.body), Cost: c.cost}
			if got := Judge(reply); got != c.want {
				t.Errorf("it is %s, want %s", got, c.want)
			}
			reply.Status = 503
			if got := Judge(reply); got != Overloaded {
				t.Errorf("a 503 is %s, and its limits do not matter", got)
			}
		})
	}
}

func TestWhatAClassImplies(t *testing.T) {
	// The letters stand for: f, another backend may serve; p, a promise; b, the
	// backend is to blame; w, the whole backend; c, of the credential; r, the
	// request may be the cause.
	for class, want := range map[Class]string{
		Served:       "",
		ClientError:  "",
		Throttled:    "fpbc",
		Quota:        "fpbwc",
		TooLarge:     "fc",
		Overloaded:   "fb",
		Failed:       "fbr",
		Credential:   "fbwc",
		NotPermitted: "fbc",
		NoModel:      "fbcr",
		Loop:         "f",
		Unreachable:  "fbw",
		Timeout:      "fbr",
		Silent:       "f",
		BrokenStream: "b",
	} {
		got := ""
		for _, implied := range []struct {
			letter string
			is     bool
		}{
			{"f", class.Failover()},
			{"p", class.Promise()},
			{"b", class.Blames()},
			{"w", class.WholeBackend()},
			{"c", class.OfCredential()},
			{"r", class.MayBeOfRequest()},
		} {
			if implied.is {
				got += implied.letter
			}
		}
		if got != want {
			t.Errorf("%s: got %q, want %q", class, got, want)
		}
	}
}

func TestTheTwoKindsOfTooLarge(t *testing.T) {
	for _, c := range []struct {
		class  Class
		status int
		want   bool
	}{
		{TooLarge, 400, true},
		{TooLarge, 429, false},
		{TooLarge, 402, false},
		{ClientError, 400, false},
		{Throttled, 429, false},
	} {
		if got := c.class.ContextLength(c.status); got != c.want {
			t.Errorf("%s with %d: got %v, want %v", c.class, c.status, got, c.want)
		}
	}
}

func FuzzJudge(f *testing.F) {
	f.Add(429, []byte(`{"error":{"code":"insufficient_quota"}}`), "60000", int64(70000))
	f.Add(400, []byte(`{"error":{"message":"This model's maximum context length is 1"}}`), "-1", int64(0))
	f.Add(404, []byte(`{"error":"x"}`), "1e999", int64(-1))
	f.Add(403, []byte(`[`), "", int64(1))
	f.Fuzz(func(t *testing.T, status int, body []byte, limit string, cost int64) {
		class := Judge(Reply{Status: status, Header: http.Header{"X-Ratelimit-Limit-Tokens": {limit}}, Body: body, Cost: cost, Infers: cost%2 == 0})
		if (status >= 100 && status < 400) != (class == Served) {
			t.Errorf("%d %q is %s", status, body, class)
		}
		if class == TooLarge && status != 400 && status != 402 && status != 429 {
			t.Errorf("%d %q is too large", status, body)
		}
		if in200 := Status(body); in200 < 400 || in200 > 599 {
			t.Errorf("in a 200 %q stands for %d", body, in200)
		}
		if !NeedsBody(status) && class != Judge(Reply{Status: status}) {
			t.Errorf("%d does not need a body, but %q makes it %s", status, body, class)
		}
	})
}

func BenchmarkJudge(b *testing.B) {
	for _, bb := range []struct {
		name  string
		reply Reply
	}{
		{"a success", Reply{Status: 200}},
		{"a bare 429", Reply{Status: 429, Header: http.Header{"X-Ratelimit-Limit-Tokens": {"60000"}}, Cost: 1000}},
		{"Azure's 429", Reply{Status: 429, Body: []byte(`{"error":{"code":"RateLimitReached","message":"Your requests have exceeded the token rate limit. Please retry after 60 seconds."}}`)}},
		{"a bad request", Reply{Status: 400, Body: []byte(`{"error":{"message":"Invalid value","type":"invalid_request_error","param":null,"code":"invalid_value"}}`)}},
	} {
		b.Run(bb.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				Judge(bb.reply)
			}
		})
	}
}

func TestWhetherAnObjectIsMissing(t *testing.T) {
	for _, tt := range []struct {
		name   string
		status int
		body   string
		want   bool
	}{
		{"a response before", 400, `{"error":{"message":"Previous response with id 'resp_1' not found.","type":"invalid_request_error","param":"previous_response_id","code":"previous_response_not_found"}}`, true},
		{"an encrypted content", 400, `{"error":{"message":"The encrypted content gAAA could not be verified.","type":"invalid_request_error","param":null,"code":"invalid_encrypted_content"}}`, true},
		{"the same without a code", 400, `{"error":{"message":"The encrypted content gAAA could not be verified.","code":null}}`, true},
		{"an item", 404, `{"error":{"message":"Item with id 'rs_1' not found. Items are not persisted when store is set to false.","type":"invalid_request_error","param":"input","code":null}}`, true},
		{"an item behind a 400", 400, `{"error":{"message":"Item with id 'rs_1' not found.","code":null}}`, true},
		{"a file", 404, `{"error":{"message":"No such File object: file-1","type":"invalid_request_error","param":"id","code":null}}`, true},
		{"a file behind a 400", 400, `{"error":{"message":"No such File object: file-1","param":"file_id"}}`, true},
		{"files of a vector store", 404, `{"error":{"message":"Files [file-1] were not found","type":"invalid_request_error"}}`, true},
		{"anything without a word", 404, ``, true},
		{"a deployment", 404, `{"error":{"code":"DeploymentNotFound","message":"The API deployment for this resource does not exist."}}`, false},
		{"a model", 404, `{"error":{"code":"model_not_found","message":"The model 'm' does not exist"}}`, false},
		{"a model of a tool", 404, `{"error":{"code":"model_not_found","param":"tools[0].model","message":"The model 'm' does not exist"}}`, false},
		{"a model behind a 400", 400, `{"error":{"code":"model_not_found","message":"no"}}`, false},
		{"another error of the client's", 400, `{"error":{"message":"Unsupported parameter: 'x'.","code":"unsupported_parameter"}}`, false},
		{"a throttle", 429, `{"error":{"message":"not found"}}`, false},
		{"a failure", 500, `{"error":{"message":"not found"}}`, false},
	} {
		if got := Missing(tt.status, []byte(tt.body)); got != tt.want {
			t.Errorf("%s: %v", tt.name, got)
		}
	}
}

func TestWhetherARefusalMayBeAboutTheAudience(t *testing.T) {
	const azure = "Unauthorized. Access token is missing, invalid, audience is incorrect (https://ai.azure.com), or have expired."
	for _, tt := range []struct {
		name   string
		status int
		body   string
		want   string
	}{
		{"Azure's text", 401, `{ "statusCode": 401, "message": "` + azure + `" }`, azure},
		{"Azure's text in an error", 401, `{"error":{"code":"401","message":"` + azure + `"}}`, azure},
		{"another word", 401, `{"error":{"code":"InvalidAudience","message":"Invalid authorization token Audience."}}`, "Invalid authorization token Audience."},
		{"a missing role", 401, `{"error":{"code":"PermissionDenied","message":"` + azure + `"}}`, ""},
		{"a wrong key", 401, `{"error":{"code":"401","message":"Access denied due to invalid subscription key or wrong API endpoint."}}`, ""},
		{"another status", 403, `{"message":"` + azure + `"}`, ""},
		{"text", 401, azure, ""},
	} {
		if got := AboutAudience(tt.status, []byte(tt.body)); got != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}

func TestAMessageIsReadHoweverItIsWritten(t *testing.T) {
	for message, want := range map[string]string{
		`"as it is"`:                   "as it is",
		`"an \"escape\" and \u00e9\n"`: "an \"escape\" and é\n",
		`"` + "not UTF-8: \xff" + `"`:  "not UTF-8: \ufffd",
		`""`:                           "",
		`5`:                            "",
		`null`:                         "",
		`["text"]`:                     "",
		`{"error":"of another error"}`: "",
	} {
		for _, body := range []string{`{"error":{"message":` + message + `,"code":"a_code"}}`, `{"code":"a_code","message":` + message + `}`} {
			got := parseReport([]byte(body))
			if got.message != want || got.code != "a_code" {
				t.Errorf("%s says %q with the code %q, want %q", body, got.message, got.code, want)
			}
		}
	}
}

func TestAReportIsReadAsFarAsItIsThere(t *testing.T) {
	for body, want := range map[string]report{
		`{"error":{"Code":"a","TYPE":"b","param":"c","message":"d"}}`:     {code: "a", kind: "b", param: "c", message: "d"},
		`{"error":{"code":429.0,"type":5,"param":["c"]},"code":"other"}`:  {number: 429},
		`{"code":"429","error":null,"details":{"error_code":"X"}}`:        {code: "429", number: 429},
		`{"code":null,"details":{"error_code":"REQUEST_LIMIT_EXCEEDED"}}`: {code: "REQUEST_LIMIT_EXCEEDED"},
		`{"code":"a","error":"as text","message":"b"}`:                    {code: "a", message: "as text", unshaped: true},
		`{"error":{"code":"a","message":"cut off`:                         {code: "a"},
		`{"error":{"code":"a"`:                {code: "a"},
		`{"error"`:                            {},
		`[{"error":{"code":"a"}}]`:            {},
		`<html>{"error":{"code":"a"}}</html>`: {},
		``:                                    {},
	} {
		if got := parseReport([]byte(body)); got != want {
			t.Errorf("%s says %+v, want %+v", body, got, want)
		}
	}
}
