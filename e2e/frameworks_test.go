package e2e

import (
	"slices"
	"sync"
	"testing"
)

// frameworks are clients that people build applications with. Each has its own
// way to write requests, read streams and name errors.
var frameworks = []struct {
	client, path string
	run          func(t *testing.T, s *site, o order) []outcome
	// classic means that it uses only paths with a deployment, below which
	// Azure has no responses.
	classic bool
	// completed is why a response ends, in its words, and throttled and refused
	// are its errors.
	completed          string
	throttled, refused string
}{
	{"ChatOpenAI", "/v1", runFrameworkInPython, false, "completed", "OpenAIRateLimitError", "OpenAIAuthenticationError"},
	{"AzureChatOpenAI", "", runFrameworkInPython, false, "completed", "OpenAIRateLimitError", "OpenAIAuthenticationError"},
	{"LiteLLM", "/v1", runFrameworkInPython, false, "completed", "RateLimitError", "AuthenticationError"},
	{"LiteLLM for Azure", "", runFrameworkInPython, false, "completed", "RateLimitError", "AuthenticationError"},
	{"AI SDK", "/v1", runFrameworkInNode, false, "stop", "AI_APICallError", "AI_APICallError"},
	{"AI SDK for Azure", "", runFrameworkInNode, false, "stop", "AI_APICallError", "AI_APICallError"},
	{"AI SDK by deployment", "", runFrameworkInNode, true, "stop", "AI_APICallError", "AI_APICallError"},
}

func runFrameworkInNode(t *testing.T, s *site, o order) []outcome {
	node := lookPath(t, "node")
	if err := installFrameworksOfNode(); err != nil {
		t.Fatal(err)
	}
	return runScript(t, o, "NODE_EXTRA_CA_CERTS="+s.root, node, "frameworks/node/client.mjs")
}

func runFrameworkInPython(t *testing.T, s *site, o order) []outcome {
	lookPath(t, "python3")
	if err := installFrameworksOfPython(); err != nil {
		t.Fatal(err)
	}
	return runScript(t, o, "SSL_CERT_FILE="+s.root, "frameworks/python/.venv/bin/python", "frameworks/python/client.py")
}

var (
	installFrameworksOfNode = sync.OnceValue(func() error {
		return install("frameworks/node", "package-lock.json", "node_modules", "npm ci --no-audit --no-fund")
	})
	// The list is complete. Most of what it installs is never used, so only the
	// rest is compiled, by the imports at the end.
	installFrameworksOfPython = sync.OnceValue(func() error {
		return install("frameworks/python", "requirements.txt", ".venv",
			"python3 -m venv --clear .venv && .venv/bin/pip install --disable-pip-version-check --no-deps --no-compile -r requirements.txt && "+
				"LITELLM_LOCAL_MODEL_COST_MAP=True .venv/bin/python -c 'import langchain_openai, litellm'")
	})
)

func TestFrameworks(t *testing.T) {
	const afterTools = "weather in simulated: " + text
	for _, f := range frameworks {
		t.Run(f.client, func(t *testing.T) {
			t.Parallel()
			s := start(t, []backend{
				{options: azureBackend + "\n model gpt-4o\n model embedder"},
				{options: azureBackend + "\n model busy", simulator: "fault status:429:44 1"},
				{options: openAIBackend + "\n model elsewhere"},
			}, "client_key alice client-key-of-alice")
			calls := []struct {
				name string
				want outcome
			}{
				{"chat", outcome{Text: text, Finish: "stop", Tokens: 5}},
				{"streamed chat", outcome{Text: text, Deltas: 5, Finish: "stop", Tokens: 5}},
				{"tools", outcome{Text: afterTools, Finish: "stop"}},
				{"streamed tools", outcome{Text: afterTools, Finish: "stop"}},
				{"responses", outcome{Text: text, Finish: f.completed, Tokens: 5}},
				{"streamed responses", outcome{Text: text, Deltas: 5, Finish: f.completed, Tokens: 5}},
				{"streamed tools in responses", outcome{Text: afterTools, Finish: f.completed}},
				{"embeddings", outcome{Dimensions: 64}},
				{"other dialect", outcome{Text: text, Finish: "stop", Tokens: 5}},
				{"throttled", outcome{Error: apiError{Class: f.throttled, Status: 429}}},
				{"wrong key", outcome{Error: apiError{Class: f.refused, Status: 401}}},
			}
			if f.classic {
				calls = slices.Concat(calls[:4], calls[7:])
			}
			o := order{Client: f.client, URL: s.url + f.path, APIVersion: "2025-03-01-preview"}
			for _, c := range calls {
				o.Calls = append(o.Calls, orderedCall{Name: c.name})
			}
			got := f.run(t, s, o)
			if len(got) != len(calls) {
				t.Fatalf("got %d outcomes of %d calls", len(got), len(calls))
			}
			for i, c := range calls {
				if got[i].Error.Message = ""; got[i] != c.want {
					t.Errorf("%s:\n got %+v\nwant %+v", c.name, got[i], c.want)
				}
			}
		})
	}
}
