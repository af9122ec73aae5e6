// Package e2e has the official OpenAI SDKs call a real Caddy, over TLS, with
// simulated backends behind it.
package e2e

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// caddy is the binary under test.
var caddy = os.Getenv("E2E_CADDY")

// shared is a folder for what several tests need.
var shared string

func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == "systemctl" {
		os.Exit(systemctl(os.Args[1:]))
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	// the SDKs read these, and the container those
	for _, variable := range os.Environ() {
		name, _, _ := strings.Cut(variable, "=")
		if strings.HasPrefix(name, "OPENAI_") || strings.HasPrefix(name, "AZURE_OPENAI_") ||
			strings.HasPrefix(name, "BACKEND_") || name == "HTTP_TIMEOUT_SECONDS" {
			os.Unsetenv(name)
		}
	}
	os.Setenv("NO_PROXY", "localhost,127.0.0.1")
	os.Setenv("no_proxy", "localhost,127.0.0.1")
	var err error
	if shared, err = os.MkdirTemp("", "openai-lb-e2e-"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(shared)
	if caddy != "" {
		if caddy, err = filepath.Abs(caddy); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return m.Run()
	}
	caddy = filepath.Join(shared, "caddy")
	ctx, cancel := context.WithTimeout(context.Background(), 8*time.Minute)
	defer cancel()
	build := exec.CommandContext(ctx, "go", "build", "-o", caddy, "./cmd/caddy")
	build.Dir, build.Stdout, build.Stderr = "..", os.Stderr, os.Stderr
	if err := build.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "building caddy:", err)
		return 1
	}
	return m.Run()
}

// scenario is a fact about clients of the balancer, in whatever language.
type scenario struct {
	name string
	// clients are the kinds it holds for. Default: OpenAI and AzureOpenAI.
	clients  []string
	backends []backend
	// callers are options of the balancer's about who may use it.
	callers []string
	// retries tells that the client makes its SDK's retries.
	retries bool
	calls   []call
}

// call is something a client asks for, and what becomes of it: a backend
// serves it, or it fails.
type call struct {
	name  string
	model string // Default: gpt-4o
	from  string
	fails apiError
	lists string // of models, which the balancer answers itself
}

// Kinds of clients. OpenAIAtAzureV1 is an OpenAI client whose base URL is that
// of Azure's v1 API.
var (
	onlyV1    = []string{"OpenAI", "OpenAIAtAzureV1"}
	onlyAzure = []string{"AzureOpenAI"}
	everyKind = slices.Concat(onlyV1, onlyAzure)
	refused   = apiError{Class: "AuthenticationError", Status: 401, Code: "invalid_api_key", Type: "invalid_request_error", Message: "Incorrect API key provided."}
	throttled = apiError{Class: "RateLimitError", Status: 429, Code: "rate_limit_exceeded", Type: "rate_limit_error"}
)

var everyOperation = []call{
	{name: "chat", from: "first"},
	{name: "streamed chat", from: "first"},
	{name: "embeddings", from: "first"},
	{name: "responses", from: "first"},
	{name: "streamed responses", from: "first"},
}

var scenarios = []scenario{
	{
		name:    "an OpenAI backend serves every operation",
		clients: onlyV1,
		backends: []backend{{
			options: openAIBackend,
			sees:    []int{200, 200, 200, 200, 200},
			paths:   []string{"/v1/chat/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses", "/v1/responses"},
		}},
		calls: everyOperation,
	},
	{
		name:     "a caller with a client key is served",
		callers:  []string{"client_key alice another-client-key", "client_key bob sha256:8eb943e7040b69a94bf39562088223755bff4c2e7c5fc257f1e08f870fe01d35"},
		backends: []backend{{sees: []int{200, 200}}},
		calls:    []call{{name: "chat", from: "first"}, {name: "streamed chat", from: "first"}},
	},
	{
		name:     "a caller with another key reaches no backend",
		callers:  []string{"client_key alice another-client-key"},
		backends: []backend{{sees: []int{}}},
		retries:  true,
		calls:    []call{{name: "chat", fails: refused}, {name: "streamed chat", fails: refused}, {name: "embeddings", fails: refused}},
	},
	{
		name:    "an Azure backend serves every operation under its own path",
		clients: onlyV1,
		backends: []backend{{
			options: azureBackend,
			sees:    []int{200, 200, 200, 200, 200},
			paths: []string{"/openai/v1/chat/completions", "/openai/v1/chat/completions", "/openai/v1/embeddings",
				"/openai/v1/responses", "/openai/v1/responses"},
		}},
		calls: everyOperation,
	},
	{
		name:    "a backend gets requests under its own deployment's name",
		clients: onlyAzure,
		backends: []backend{
			{
				simulator: "fault status:429:44 2",
				options:   azureBackend + "\n deployment gpt-4o-eu",
				sees:      []int{200, 429},
				paths:     []string{"/openai/deployments/gpt-4o-eu/chat/completions", "/openai/deployments/gpt-4o-eu/chat/completions"},
			},
			{
				sees:  []int{200, 200},
				paths: []string{"/openai/deployments/gpt-4o/chat/completions", "/openai/deployments/gpt-4o/embeddings"},
			},
		},
		calls: []call{
			{name: "chat", from: "first"},
			{name: "streamed chat", from: "second"},
			{name: "embeddings", from: "second"},
		},
	},
	{
		name: "while all backends throttle, clients learn when the first is back, and backends are left alone",
		backends: []backend{
			{simulator: "fault status:429:44", sees: []int{429}},
			{simulator: "fault status:429:14", sees: []int{429}},
			{simulator: "fault status:429:27", sees: []int{429}},
		},
		calls: []call{
			{name: "chat", fails: throttled.after("14")},
			{name: "chat", fails: throttled},
			{name: "streamed chat", fails: throttled},
		},
	},
	{
		name:    "an SDK's own retry finds the backend that is back first",
		retries: true,
		backends: []backend{
			{simulator: "fault status:429:44", sees: []int{429}},
			{simulator: "fault status:429:1 2", sees: []int{200, 429, 200}},
		},
		calls: []call{
			{name: "chat", from: "second"},
			{name: "streamed chat", from: "second"},
		},
	},
	{
		name: "keys that no backend accepts are not the client's fault",
		backends: []backend{
			{options: "auth api_key\n api_key wrong", sees: []int{401}},
			{options: "auth api_key\n api_key old", sees: []int{401}},
		},
		calls: []call{{name: "chat", fails: apiError{
			Class: "InternalServerError", Status: 502, Code: "upstream_credentials_rejected", Type: "server_error"}}},
	},
	{
		name: "a wrong key among right ones is not noticed",
		backends: []backend{
			{options: "auth api_key\n api_key wrong", sees: []int{401}},
			{sees: []int{200, 200}},
		},
		calls: []call{
			{name: "chat", from: "second"},
			{name: "streamed chat", from: "second"},
		},
	},
	{
		name:     "backends that cannot be reached are a bad gateway",
		backends: []backend{{down: true}, {down: true}},
		calls: []call{{name: "chat", fails: apiError{
			Class: "InternalServerError", Status: 502, Code: "upstream_unreachable", Type: "server_error"}}},
	},
	{
		name: "a prompt that is filtered is filtered once",
		backends: []backend{
			{simulator: "fault content_filter", sees: []int{400, 400}},
			{sees: []int{}},
		},
		calls: []call{
			{name: "chat", fails: apiError{Class: "BadRequestError", Status: 400, Code: "content_filter"}},
			{name: "streamed chat", fails: apiError{Class: "BadRequestError", Status: 400, Code: "content_filter"}},
		},
	},
	{
		name: "a model that no backend has is not found",
		backends: []backend{
			{simulator: "deployments another", sees: []int{404}},
			{simulator: "deployments another", sees: []int{404}},
		},
		calls: []call{{name: "chat", fails: apiError{Class: "NotFoundError", Status: 404, Code: "DeploymentNotFound"}}},
	},
	failover("a 429", "chat", backend{simulator: "fault status:429:44", sees: []int{429}}),
	failover("a 500", "chat", backend{simulator: "fault status:500", sees: []int{500}}),
	failover("a broken connection", "chat", backend{simulator: "fault reset", sees: []int{0}}),
	failover("a backend that is down", "chat", backend{down: true}),
	failover("all of these at once", "streamed chat",
		backend{simulator: "fault status:429:44", sees: []int{429}},
		backend{simulator: "fault status:500", sees: []int{500}},
		backend{simulator: "fault reset", sees: []int{0}},
	),
	onlyOnce("the connection breaks", "reset", 0),
	onlyOnce("the backend answers with a 502", "status:502", 502),
	onlyOnce("the answer is cut", "json_cut", 200),
	mixedPool(onlyV1, "/openai/v1", "/openai/v1"),
	mixedPool(onlyAzure, "/openai/deployments/gpt-4o-ptu", "/openai/deployments/whisper-eu"),
	{
		name:    "Azure is asked for responses by the name of the deployment",
		clients: onlyV1,
		backends: []backend{{
			simulator: "deployments gpt-4o-ptu",
			options:   azureBackend + "\n model gpt-4o gpt-4o-ptu",
			sees:      []int{200, 200},
			paths:     []string{"/openai/v1/responses", "/openai/v1/responses"},
		}},
		calls: []call{
			{name: "responses", from: "first"},
			{name: "streamed responses", from: "first"},
		},
	},
	{
		name:    "a model fails over from Azure to OpenAI",
		clients: everyKind,
		backends: []backend{
			{
				simulator: "deployments gpt-4o-ptu\n fault status:429:44",
				options:   azureBackend + "\n model gpt-4o gpt-4o-ptu",
				sees:      []int{429},
				models:    []string{"gpt-4o-ptu"},
			},
			{
				base:      "/v1",
				simulator: "deployments gpt-4o-2024-11-20",
				options:   openAIBackend + "\n model gpt-4o gpt-4o-2024-11-20",
				sees:      []int{200, 200},
				paths:     []string{"/v1/chat/completions", "/v1/chat/completions"},
			},
		},
		calls: []call{
			{name: "chat", from: "second"},
			{name: "streamed chat", from: "second"},
		},
	},
	{
		name:    "a model fails over from OpenAI to Azure",
		clients: everyKind,
		backends: []backend{
			{
				base:      "/team-a/v1",
				simulator: "deployments whisper-1\n fault status:429:44",
				options:   openAIBackend + "\n model whisper-1",
				sees:      []int{429},
				paths:     []string{"/v1/audio/transcriptions"},
			},
			{
				simulator: "deployments whisper-eu",
				options:   azureBackend + "\n model whisper-1 whisper-eu",
				sees:      []int{200},
			},
		},
		calls: []call{{name: "transcription", model: "whisper-1", from: "second"}},
	},
}

// mixedPool is the scenario that backends of either dialect, each with other
// models, serve such clients as one, and that these are the paths under which
// the one of Azure has its chat and its transcriptions.
func mixedPool(clients []string, chat, transcription string) scenario {
	const union = "gpt-4o, whisper-1, o3, gpt-4o-transcribe, llama-3.3-70b, text-embedding-3-small"
	return scenario{
		name:    "a mixed pool serves every model by the name it has where it is",
		clients: clients,
		backends: []backend{
			{
				simulator: "deployments gpt-4o-ptu whisper-eu",
				options:   azureBackend + "\n model gpt-4o gpt-4o-ptu\n model whisper-1 whisper-eu",
				sees:      []int{200, 200, 200},
				paths:     []string{chat + "/chat/completions", chat + "/chat/completions", transcription + "/audio/transcriptions"},
				models:    []string{"gpt-4o-ptu", "gpt-4o-ptu", "whisper-eu"},
			},
			{
				base:      "/v1",
				simulator: "deployments o3-2025-04-16 gpt-4o-transcribe",
				options:   openAIBackend + "\n model o3 o3-2025-04-16\n model gpt-4o-transcribe",
				sees:      []int{200, 200, 200, 200, 200},
				paths: []string{"/v1/chat/completions", "/v1/chat/completions", "/v1/responses", "/v1/responses",
					"/v1/audio/transcriptions"},
				models: []string{"o3-2025-04-16", "o3-2025-04-16", "o3-2025-04-16", "o3-2025-04-16", "gpt-4o-transcribe"},
			},
			{
				base:      "/team-a/v1",
				simulator: "deployments llama-3.3-70b bge-large",
				options:   openAIBackend + "\n model llama-3.3-70b\n model text-embedding-3-small bge-large",
				sees:      []int{200, 200},
				paths:     []string{"/v1/chat/completions", "/v1/embeddings"},
				models:    []string{"llama-3.3-70b", "bge-large"},
			},
		},
		calls: []call{
			{name: "models", lists: union},
			{name: "chat", from: "first"},
			{name: "streamed chat", from: "first"},
			{name: "transcription", model: "whisper-1", from: "first"},
			{name: "chat", model: "o3", from: "second"},
			{name: "streamed chat", model: "o3", from: "second"},
			{name: "responses", model: "o3", from: "second"},
			{name: "streamed responses", model: "o3", from: "second"},
			{name: "transcription", model: "gpt-4o-transcribe", from: "second"},
			{name: "chat", model: "llama-3.3-70b", from: "third"},
			{name: "embeddings", model: "text-embedding-3-small", from: "third"},
			{name: "chat", model: "gpt-9", fails: apiError{Class: "NotFoundError", Status: 404, Code: "model_not_found",
				Type: "invalid_request_error", Message: "'gpt-9' is not available. Available models: " + union + "."}},
		},
	}
}

// onlyOnce is the scenario that an SDK with its default retries sends a batch
// once if this happens to it, because it may have been executed. The file comes
// before it.
func onlyOnce(what, fault string, status int) scenario {
	fails := apiError{Class: "InternalServerError", Status: 502, Code: "upstream_unreachable", Type: "server_error", Message: "may have been executed"}
	if status == 502 {
		fails = apiError{Class: "InternalServerError", Status: 502, Type: "server_error"}
	}
	return scenario{
		name:     "a batch is sent once if " + what,
		clients:  onlyV1,
		backends: []backend{{simulator: "fault " + fault + " 2", sees: []int{200, status}}, {sees: []int{}}},
		retries:  true,
		calls:    []call{{name: "batch", fails: fails}},
	}
}

// failover is the scenario that the next backend serves what these do not.
func failover(what, name string, failing ...backend) scenario {
	return scenario{
		name:     what + " on the way is not noticed in a " + name,
		backends: append(failing, backend{sees: []int{200}}),
		calls:    []call{{name: name, from: names[len(failing)]}},
	}
}

// after is the error with the retry-after header it brings.
func (e apiError) after(seconds string) apiError {
	e.RetryAfter = seconds
	return e
}

// text is what a simulator says in the five tokens it is set to.
const text = "This reply comes from a"

// want is what the SDK should tell of the call.
func (c call) want() outcome {
	if c.from == "" {
		return outcome{Error: c.fails, Models: c.lists}
	}
	want := outcome{Backend: c.from}
	switch c.name {
	case "embeddings":
		want.Dimensions = 8
		return want
	case "streamed chat", "streamed responses":
		want.Deltas = 5
	}
	want.Text = text
	if c.name == "transcription" {
		return want
	}
	want.Tokens, want.Finish = 5, "stop"
	if strings.HasSuffix(c.name, "responses") {
		want.Finish = "completed"
	}
	return want
}

func TestOfficialSDKs(t *testing.T) {
	for _, sc := range scenarios {
		clients := sc.clients
		if clients == nil {
			clients = []string{"OpenAI", "AzureOpenAI"}
		}
		for _, client := range clients {
			for _, language := range languages {
				t.Run(sc.name+"/"+client+"/"+language.name, func(t *testing.T) {
					t.Parallel()
					s := start(t, sc.backends, sc.callers...)
					got := language.run(t, s, sc.order(s.url, client))
					sc.checkClient(t, got)
					sc.checkBackends(t, s)
				})
			}
		}
	}
}

func (sc scenario) order(url, client string) order {
	o := order{Client: client, URL: url, APIVersion: "2024-10-21"}
	switch client {
	case "OpenAI":
		o.URL += "/v1"
	case "OpenAIAtAzureV1":
		o.Client = "OpenAI"
		o.URL += "/openai/v1"
	}
	for _, c := range sc.calls {
		o.Calls = append(o.Calls, orderedCall{c.name, cmp.Or(c.model, "gpt-4o")})
	}
	if !sc.retries {
		o.Retries = new(int)
	}
	return o
}

func (sc scenario) checkClient(t *testing.T, got []outcome) {
	if len(got) != len(sc.calls) {
		t.Fatalf("got %d outcomes of %d calls", len(got), len(sc.calls))
	}
	for i, c := range sc.calls {
		got, want := got[i], c.want()
		if (got.Error.Status != 0) != (got.Error.RequestID != "") {
			t.Errorf("%s: error %+v: expected a request id", c.name, got.Error)
		}
		got.Error.RequestID = ""
		if got.Error.Class == "" {
			want.Error.Class = ""
		}
		if want.Error.RetryAfter == "" {
			got.Error.RetryAfter = ""
		}
		// SDKs put something before it
		if strings.Contains(got.Error.Message, want.Error.Message) {
			got.Error.Message = want.Error.Message
		}
		if got != want {
			t.Errorf("%s %s:\n got %+v\nwant %+v", c.name, c.model, got, want)
		}
	}
}

func (sc scenario) checkBackends(t *testing.T, s *site) {
	for i, b := range sc.backends {
		if b.down {
			continue
		}
		st := s.status(t, i)
		statuses, paths, models := []int{}, []string{}, []string{}
		for _, request := range st.Last {
			statuses = append(statuses, request.Status)
			paths = append(paths, request.Path)
			models = append(models, request.Deployment)
		}
		if !slices.Equal(statuses, b.sees) {
			t.Errorf("the %s backend answered %v, want %v", names[i], statuses, b.sees)
		}
		if b.paths != nil && !slices.Equal(paths, b.paths) {
			t.Errorf("the %s backend was asked for %q, want %q", names[i], paths, b.paths)
		}
		if b.models != nil && !slices.Equal(models, b.models) {
			t.Errorf("the %s backend was asked for the models %q, want %q", names[i], models, b.models)
		}
		if st.Early > 0 {
			t.Errorf("the %s backend got %d requests before its time", names[i], st.Early)
		}
	}
}

// post asks for a chat without any SDK.
func (s *site) post(t *testing.T, url string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/v1/chat/completions",
		strings.NewReader(`{"model":"gpt-4o","messages":[{"role":"user","content":"Hello?"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer right")
	res, err := s.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res, string(body)
}

func TestARefusalHasTheShapeOfOpenAIs(t *testing.T) {
	t.Parallel()
	s := start(t, []backend{
		{simulator: "fault status:429:44"},
		{simulator: "fault status:429:14"},
		{simulator: "fault status:429:27"},
	})
	for range 2 {
		res, body := s.post(t, s.url)
		if res.StatusCode != http.StatusTooManyRequests || res.Header.Get("Content-Type") != "application/json" {
			t.Errorf("got %s, %s", res.Status, res.Header.Get("Content-Type"))
		}
		for name, most := range map[string]int{"Retry-After": 14, "Retry-After-Ms": 14000} {
			if n, err := strconv.Atoi(res.Header.Get(name)); err != nil || n < 1 || n > most {
				t.Errorf("%s is %q, want 1 to %d", name, res.Header.Get(name), most)
			}
		}
		var got map[string]map[string]any
		if err := json.Unmarshal([]byte(body), &got); err != nil {
			t.Fatalf("%v: %s", err, body)
		}
		if message, _ := got["error"]["message"].(string); message == "" {
			t.Errorf("no message in %s", body)
		}
		delete(got["error"], "message")
		want := map[string]map[string]any{"error": {"type": "rate_limit_error", "param": nil, "code": "rate_limit_exceeded"}}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
	}
	for i := range s.simulators {
		if n := len(s.status(t, i).Last); n != 1 {
			t.Errorf("the %s backend got %d requests, want 1", names[i], n)
		}
	}
}

func TestAModelsErrorPassesUnchanged(t *testing.T) {
	t.Parallel()
	s := start(t, []backend{{simulator: "fault content_filter"}})
	direct, want := s.post(t, s.simulators[0])
	balanced, got := s.post(t, s.url)
	if got != want || balanced.StatusCode != direct.StatusCode {
		t.Errorf("got %d %s, want %d %s", balanced.StatusCode, got, direct.StatusCode, want)
	}
	for _, name := range []string{"Set-Cookie", "Alt-Svc", "Strict-Transport-Security"} {
		if value := balanced.Header.Get(name); value != "" {
			t.Errorf("the backend's %s came through: %s", name, value)
		}
	}
}
