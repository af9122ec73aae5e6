package simulator

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// provision makes the handler ready, as a config load would.
func provision(t testing.TB, h *Handler) *Handler {
	t.Helper()
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	t.Cleanup(cancel)
	if err := h.Provision(ctx); err != nil {
		t.Fatal(err)
	}
	if err := h.Validate(); err != nil {
		t.Fatal(err)
	}
	return h
}

// serve lets the handler answer as it does in Caddy's chain.
func serve(h *Handler, w http.ResponseWriter, r *http.Request) {
	r = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), w, nil)
	if err := h.ServeHTTP(w, r, nil); err != nil {
		panic(err)
	}
}

// listen puts the handler on a loopback address.
func listen(t testing.TB, h *Handler) *httptest.Server {
	t.Helper()
	provision(t, h)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { serve(h, w, r) }))
	t.Cleanup(srv.Close)
	return srv
}

const (
	chatBody = `{"model":"gpt-4o","messages":[{"role":"user","content":"Say hello."}]}`
	chatPath = "/openai/deployments/gpt-4o/chat/completions?api-version=2024-10-21"
)

// call sends one request and reads all of the reply.
func call(t testing.TB, srv *httptest.Server, method, path, body string, headers ...string) (*http.Response, string) {
	t.Helper()
	resp, err := roundTrip(srv, method, path, body, headers...)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(got)
}

func roundTrip(srv *httptest.Server, method, path, body string, headers ...string) (*http.Response, error) {
	req, err := http.NewRequest(method, srv.URL+path, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	return srv.Client().Do(req)
}

// status reads the status page, strictly.
func status(t testing.TB, srv *httptest.Server) Status {
	t.Helper()
	_, body := call(t, srv, http.MethodGet, "/_simulator/status", "")
	var s Status
	dec := json.NewDecoder(strings.NewReader(body))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&s); err != nil {
		t.Fatalf("%v in %s", err, body)
	}
	return s
}

func TestEveryDialectIsAnswered(t *testing.T) {
	srv := listen(t, &Handler{OutputTokens: 3})
	for name, tc := range map[string]struct{ method, path, body, want string }{
		"chat, classic":       {"POST", chatPath, `{"messages":[]}`, `"object":"chat.completion"`},
		"chat, Azure v1":      {"POST", "/openai/v1/chat/completions", chatBody, `"content":"This reply comes"`},
		"chat, OpenAI":        {"POST", "/v1/chat/completions", chatBody, `"finish_reason":"stop"`},
		"an escaped name":     {"POST", "/openai/deployments/gpt%2F35/chat/completions?api-version=1", `{}`, `"model":"gpt/35"`},
		"embeddings, classic": {"POST", "/openai/deployments/e/embeddings?api-version=1", `{"input":"x"}`, `"object":"embedding"`},
		"embeddings, OpenAI":  {"POST", "/v1/embeddings", `{"model":"e","input":["x","y"]}`, `"index":1`},
		"responses, Azure v1": {"POST", "/openai/v1/responses", `{"model":"m","input":"x"}`, `"status":"completed"`},
		"responses, OpenAI":   {"POST", "/v1/responses", `{"model":"m","input":"x"}`, `"text":"This reply comes"`},
		"models, Azure v1":    {"GET", "/openai/v1/models", "", `{"data":[],"object":"list"}`},
	} {
		t.Run(name, func(t *testing.T) {
			resp, body := call(t, srv, tc.method, tc.path, tc.body)
			if resp.StatusCode != http.StatusOK || !strings.Contains(body, tc.want) {
				t.Errorf("got %d %s, want %s", resp.StatusCode, body, tc.want)
			}
			if got := resp.Header.Get("Content-Type"); got != "application/json" {
				t.Errorf("got content-type %s", got)
			}
		})
	}
}

func TestWhatDoesNotExistIsRefusedInItsOwnShape(t *testing.T) {
	srv := listen(t, &Handler{Deployments: []string{"gpt-4o"}})
	const (
		notFound      = `{"error":{"code":"404","message":"Resource not found"}}`
		noDeployment  = `{"error":{"code":"DeploymentNotFound",`
		noModel       = `{"error":{"message":"The model 'other' does not exist or you do not have access to it.","type":"invalid_request_error","param":null,"code":"model_not_found"}}`
		invalidURL    = `{"error":{"message":"Invalid URL (%s)","type":"invalid_request_error","param":null,"code":null}}`
		unparsable    = `{"error":{"message":"We could not parse the JSON body of your request.","type":"invalid_request_error","param":null,"code":null}}`
		unknownStored = `{"error":{"message":"Response with id 'resp_1' not found.",`
	)
	for name, tc := range map[string]struct {
		method, path, body string
		status             int
		want               string
	}{
		"no api-version":         {"POST", "/openai/deployments/gpt-4o/chat/completions", chatBody, 404, notFound},
		"no classic responses":   {"POST", "/openai/deployments/gpt-4o/responses?api-version=1", chatBody, 404, notFound},
		"no classic GET":         {"GET", chatPath, "", 404, notFound},
		"no completions":         {"POST", "/v1/completions", `{"model":"gpt-4o"}`, 404, fmt.Sprintf(invalidURL, "POST /v1/completions")},
		"no list of objects":     {"GET", "/v1/files", "", 404, fmt.Sprintf(invalidURL, "GET /v1/files")},
		"deployment in the path": {"POST", "/openai/deployments/other/chat/completions?api-version=1", chatBody, 404, noDeployment},
		"model in the body":      {"POST", "/openai/v1/chat/completions", `{"model":"other"}`, 404, noDeployment},
		"model of OpenAI":        {"POST", "/v1/chat/completions", `{"model":"other"}`, 404, noModel},
		"no model":               {"POST", "/v1/chat/completions", `{}`, 400, `{"error":{"message":"you must provide a model parameter",`},
		"another path":           {"POST", "/v1/fine_tuning/jobs", `{}`, 404, fmt.Sprintf(invalidURL, "POST /v1/fine_tuning/jobs")},
		"another method":         {"PUT", "/v1/embeddings", `{}`, 404, fmt.Sprintf(invalidURL, "PUT /v1/embeddings")},
		"no JSON":                {"POST", "/v1/chat/completions", `hello`, 400, unparsable},
		"no body":                {"POST", "/v1/chat/completions", ``, 400, unparsable},
		"a wrong type":           {"POST", "/v1/chat/completions", `{"model":7}`, 400, `{"error":{"message":"Invalid type for 'model': got number instead.",`},
		"no form":                {"POST", "/v1/audio/transcriptions", `{}`, 400, `{"error":{"message":"Invalid Content-Type header`},
		"an unknown response":    {"GET", "/v1/responses/resp_1", ``, 404, unknownStored},
		"a response never made":  {"DELETE", "/openai/v1/responses/resp_1", ``, 404, unknownStored},
	} {
		t.Run(name, func(t *testing.T) {
			resp, body := call(t, srv, tc.method, tc.path, tc.body)
			if resp.StatusCode != tc.status || !strings.HasPrefix(body, tc.want) {
				t.Errorf("got %d %s, want %d %s", resp.StatusCode, body, tc.status, tc.want)
			}
			if resp.Header.Get("X-Request-Id") == "" {
				t.Error("no x-request-id")
			}
		})
	}
}

func TestOnlyItsOwnKeysAreAccepted(t *testing.T) {
	t.Setenv("SIMULATOR_TEST_KEY", "from-env\n")
	srv := listen(t, &Handler{APIKey: []string{"key-1", "{env.SIMULATOR_TEST_KEY}"}})
	for name, tc := range map[string]struct {
		headers []string
		want    int
	}{
		"none":                  {nil, 401},
		"api-key":               {[]string{"api-key", "key-1"}, 200},
		"bearer":                {[]string{"Authorization", "Bearer key-1"}, 200},
		"bearer in lower case":  {[]string{"Authorization", "bearer key-1"}, 200},
		"resolved":              {[]string{"api-key", "from-env"}, 200},
		"unresolved":            {[]string{"api-key", "{env.SIMULATOR_TEST_KEY}"}, 401},
		"wrong":                 {[]string{"api-key", "key-2"}, 401},
		"another scheme":        {[]string{"Authorization", "Basic key-1"}, 401},
		"an empty bearer":       {[]string{"Authorization", "Bearer "}, 401},
		"one of two is enough":  {[]string{"api-key", "key-1", "Authorization", "Bearer other"}, 200},
		"Anthropic's is no key": {[]string{"x-api-key", "key-1"}, 401},
	} {
		t.Run(name, func(t *testing.T) {
			resp, body := call(t, srv, "POST", chatPath, chatBody, tc.headers...)
			if resp.StatusCode != tc.want {
				t.Errorf("got %d %s, want %d", resp.StatusCode, body, tc.want)
			}
			if tc.want == 401 && !strings.HasPrefix(body, `{"error":{"code":"401","message":"Access denied due to invalid subscription key`) {
				t.Errorf("not Azure's 401: %s", body)
			}
		})
	}
	if got := status(t, srv); got.Unauthorized != 6 || got.Admitted != 5 {
		t.Errorf("got %d unauthorized and %d admitted, want 6 and 5", got.Unauthorized, got.Admitted)
	}
}

func TestAnErrorHasTheShapeOfTheAPIThatIsCalled(t *testing.T) {
	srv := listen(t, &Handler{APIKey: []string{"key-1"}, AllowFaultHeader: true})
	const (
		openai = `{"error":{"message":%q,"type":%q,"param":null,"code":%s}}`
		azure  = `{"error":{"code":`
	)
	for _, tc := range []struct {
		headers []string
		status  int
		message string // of OpenAI
		kind    string
		code    string
	}{
		{[]string{"Authorization", "Bearer sk-wrong"}, 401, "Incorrect API key provided. You can find your API key at https://platform.openai.com/account/api-keys.", "invalid_request_error", `"invalid_api_key"`},
		{[]string{"Authorization", "Bearer key-1", "X-Simulator-Fault", "status:404"}, 404, "The model 'gpt-4o' does not exist or you do not have access to it.", "invalid_request_error", `"model_not_found"`},
		{[]string{"Authorization", "Bearer key-1", "X-Simulator-Fault", "status:503"}, 503, "The server is currently overloaded. Please try again later.", "service_unavailable_error", `"server_is_overloaded"`},
	} {
		resp, body := call(t, srv, "POST", "/v1/chat/completions", chatBody, tc.headers...)
		if want := fmt.Sprintf(openai, tc.message, tc.kind, tc.code); resp.StatusCode != tc.status || body != want {
			t.Errorf("OpenAI: got %d %s, want %d %s", resp.StatusCode, body, tc.status, want)
		}
		for _, path := range []string{"/openai/v1/chat/completions", chatPath} {
			if resp, body := call(t, srv, "POST", path, chatBody, tc.headers...); resp.StatusCode != tc.status || !strings.HasPrefix(body, azure) {
				t.Errorf("%s: got %d %s", path, resp.StatusCode, body)
			}
		}
	}
}

func TestAReplyCarriesWhatADeploymentsDoes(t *testing.T) {
	srv := listen(t, &Handler{Name: "eus", RequestsPerMinute: 60, TokensPerMinute: 1000})
	resp, _ := call(t, srv, "POST", chatPath, chatBody)
	sum := sha256.Sum256([]byte(chatBody))
	for name, want := range map[string]string{
		"x-simulator":                         "eus",
		"x-simulator-body-sha256":             hex.EncodeToString(sum[:]),
		"x-ms-region":                         "Simulated",
		"x-ms-deployment-name":                "gpt-4o",
		"x-ratelimit-limit-requests":          "60",
		"x-ratelimit-remaining-requests":      "9",
		"x-ratelimit-reset-requests":          "10",
		"x-ratelimit-limit-tokens":            "1000",
		"x-ratelimit-remaining-tokens":        "981", // 10 characters and 16 tokens
		"x-ratelimit-reset-tokens":            "60",
		"alt-svc":                             `h3=":443"; ma=86400`,
		"set-cookie":                          "simulator=1; Path=/; HttpOnly; SameSite=Lax",
		"strict-transport-security":           "max-age=31536000; includeSubDomains; preload",
		"azure-openai-deployment-utilization": "",
		"retry-after":                         "",
	} {
		if got := resp.Header.Get(name); got != want {
			t.Errorf("%s: got %q, want %q", name, got, want)
		}
	}
	random := regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)
	for _, name := range []string{"x-request-id", "apim-request-id"} {
		if got := resp.Header.Get(name); !random.MatchString(got) {
			t.Errorf("%s: got %q, want a UUID", name, got)
		}
	}
}

func TestAProvisionedReplyTellsTheUtilization(t *testing.T) {
	// A bucket of 41,666,667 tokens, so that what leaks during the test is not
	// seen: 1,666,664 characters and 16 outputs are estimated as 416,730.
	srv := listen(t, &Handler{PTU: 1, BucketSeconds: 1e6, OutputTokens: 16})
	body := `{"messages":[{"content":"` + strings.Repeat("x", 1_666_664) + `"}]}`
	resp, _ := call(t, srv, "POST", chatPath, body)
	if got := resp.Header.Get("azure-openai-deployment-utilization"); got != "1.0%" {
		t.Errorf("got %q, want 1.0%%", got)
	}
	if got := resp.Header.Get("x-ratelimit-limit-tokens"); got != "" {
		t.Errorf("a provisioned reply has x-ratelimit-limit-tokens: %s", got)
	}
	if got := status(t, srv).Utilization; got < 1 || got > 1.01 {
		t.Errorf("got %v in the status, want about 1", got)
	}
}

func TestALimitIsKeptForEachDeployment(t *testing.T) {
	srv := listen(t, &Handler{RequestsPerMinute: 6})
	for _, tc := range []struct {
		path, body string
		want       int
	}{
		{chatPath, chatBody, 200},
		{chatPath, chatBody, 429},
		{"/v1/chat/completions", `{"model":"gpt-4o"}`, 429}, // the same one by its other address
		{"/v1/chat/completions", `{"model":"other"}`, 200},
		{"/openai/deployments/other/embeddings?api-version=1", `{"model":"gpt-4o"}`, 429}, // the path counts, not the body
		{"/v1/models", ``, 404},
	} {
		if resp, body := call(t, srv, "POST", tc.path, tc.body); resp.StatusCode != tc.want {
			t.Errorf("%s %s: got %d %s, want %d", tc.path, tc.body, resp.StatusCode, body, tc.want)
		}
	}
	got := status(t, srv)
	if got.Throttled != (Throttled{Requests: 3}) || got.Admitted != 2 || got.Early != 1 {
		t.Errorf("got %+v throttled, %d admitted, %d early; want 3, 2, 1", got.Throttled, got.Admitted, got.Early)
	}
}

func TestAConfigThatCannotBeSimulatedIsRefused(t *testing.T) {
	for want, h := range map[string]*Handler{
		"ptu replaces requests_per_minute and tokens_per_minute":  {PTU: 1, TokensPerMinute: 1},
		"bucket_seconds must be from 0.000001 to 1000000, got -1": {BucketSeconds: -1},
		"hints 'x' is not one of azure_ms":                        {Hints: "x"},
		"error_body 'x' is not one of azure_cl":                   {ErrorBody: "x"},
		"fault 'x' is not one of status":                          {Fault: []Fault{{Action: "x"}}},
		"fault 'reset': every must be 1 or more, got -1":          {Fault: []Fault{{Action: "reset", Every: -1}}},
		"api_key 2: ": {APIKey: []string{"a", "{env.SIMULATOR_TEST_UNSET}"}},
	} {
		ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
		err := h.Provision(ctx)
		if err == nil {
			err = h.Validate()
		}
		cancel()
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}
