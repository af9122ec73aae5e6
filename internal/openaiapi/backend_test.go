package openaiapi

import (
	"net/url"
	"strings"
	"testing"
)

func TestAURLWithASecretIsNotEchoed(t *testing.T) {
	for _, raw := range []string{"https://h?api-key=SECRET", "admin:SECRET@h", "https://user:SEC/RET@h", "https://user:SECRET@h:x", "https://u:SEC?RET@h", "https://h?key=a@SECRET", "https://u:a@SECRET@h", "u:SECRET@h", "https://h#SECRET", "sk-SECRET0123456789", "SECRETSECRETSECRET.example", "sk.SECRET0123456789", "{env.X}?SECRET"} {
		if _, err := ParseBaseURL(raw); err == nil || strings.Contains(err.Error(), "SEC") {
			t.Errorf("%s gives %v", raw, err)
		}
	}
}

func TestWhatIsNoURLOfABackendIsRefused(t *testing.T) {
	for raw, want := range map[string]string{
		"":                               "url '' must begin with http:// or https://",
		"a.example":                      "url 'a.example' must begin with http:// or https://",
		"ftp://a":                        "url 'ftp://a' must begin with http:// or https://",
		"http://":                        "url 'http://' has no host",
		"http://a b":                     "url 'http://a b' is not a valid URL",
		"http://a\n":                     `url 'http://a\n' is not a valid URL`,
		"http://h:65536":                 "url 'http://h:65536' has an invalid port: expected 1 to 65535",
		"http://h:0":                     "url 'http://h:0' has an invalid port: expected 1 to 65535",
		"http://h?x":                     "url 'http://h?…' must not contain a query or a fragment",
		"http://h#x":                     "url 'http://h#…' must not contain a query or a fragment",
		"http://user@h":                  "url 'http://…@h' must not contain a user or a password: use api_key or header instead",
		"https://u:p@h:x/v1?k=v":         "url 'https://…@h:x/v1?…' must not contain a user",
		"contoso-east.openai.azure.com":  "url 'contoso-east.openai.azure.com' must begin with http:// or https://",
		"localhost:8080/some/base/path":  "url 'localhost:8080/some/base/path' must begin with",
		"eyJhbGciOiJIUzI1NiJ9.e30.abc":   "url '…' must begin with",
		"0123456789abcdef0123456789abc":  "url '…' must begin with",
		"https://h/openai/deployments/x": "url 'https://h/openai/deployments/x' must not contain /openai/deployments/",
	} {
		if _, err := ParseBaseURL(raw); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q gives %v, want %s", raw, err, want)
		}
	}
	for raw, want := range map[string]string{"http://h": "h:80", "https://h/v1": "h:443", "https://h:8443/openai": "h:8443", "http://[::1]": "[::1]:80"} {
		u, err := ParseBaseURL(raw)
		if err != nil || DialAddress(u) != want {
			t.Errorf("%s gives %v, %v, want the address %s", raw, u, err, want)
		}
	}
}

func TestTheHostTellsTheProvider(t *testing.T) {
	for host, want := range map[string][2]bool{
		"contoso.openai.azure.com":            {true, false},
		"Contoso.Cognitiveservices.azure.com": {true, false},
		"contoso.services.ai.azure.com":       {true, false},
		"contoso.openai.azure.us":             {true, false},
		"contoso.cognitiveservices.azure.us":  {true, false},
		"contoso.openai.azure.cn":             {true, false},
		"openai.azure.com":                    {false, false},
		"contoso-openai.azure.com":            {false, false},
		"openai.azure.com.example":            {false, false},
		"API.openai.com":                      {false, true},
		"eu.api.openai.com":                   {false, false},
	} {
		if got := [2]bool{IsAzure(host), IsOpenAI(host)}; got != want {
			t.Errorf("%s: Azure %t, OpenAI %t", host, got[0], got[1])
		}
	}
}

func TestAPathAndAQueryBecomeTheBackends(t *testing.T) {
	openAI, azure := PathsAt("", false), PathsAt("", true)
	for _, c := range []struct {
		name  string
		paths Paths
		asked string
		model string
		want  string
		place ModelPlace
	}{
		{"v1 to OpenAI", openAI, "/v1/responses", "m", "/v1/responses", ModelAsNamed},
		{"v1 to Azure", azure, "/v1/responses", "m", "/openai/v1/responses", ModelAsNamed},
		{"v1 to a base path", PathsAt("/gateway", false), "/v1/responses", "m", "/gateway/responses", ModelAsNamed},
		{"v1 to Azure's v1", PathsAt("/openai/v1", true), "/v1/responses", "m", "/openai/v1/responses", ModelAsNamed},
		{"v1 to Azure's /openai", PathsAt("/x/openai", true), "/v1/responses", "m", "/x/openai/v1/responses", ModelAsNamed},
		{"Azure's v1 to OpenAI", openAI, "/openai/v1/responses", "m", "/v1/responses", ModelAsNamed},
		{"classic to Azure", azure, "/openai/deployments/m/embeddings?api-version=1", "m", "/openai/deployments/m/embeddings?api-version=1", ModelInPath},
		{"classic to another deployment", azure, "/openai/deployments/m/embeddings?api-version=1", "a/b", "/openai/deployments/a%2Fb/embeddings?api-version=1", ModelInPath},
		{"classic to Azure's base path", PathsAt("/gateway", true), "/openai/deployments/m/embeddings", "m", "/gateway/openai/deployments/m/embeddings", ModelInPath},
		{"classic to OpenAI", openAI, "/openai/deployments/m/embeddings?api-version=1&x=2", "m", "/v1/embeddings?x=2", ModelInBody},
		{"classic without a deployment", azure, "/openai/files?api-version=1", "", "/openai/files?api-version=1", ModelAsNamed},
		{"classic without a deployment to OpenAI", openAI, "/openai/files?api-version=1", "", "/v1/files", ModelAsNamed},
		{"an operation alone", PathsAt("/gateway", false), "/chat/completions?api-version=1&x=2", "m", "/gateway/chat/completions?x=2", ModelAsNamed},
		{"an operation alone to Azure", azure, "/chat/completions", "m", "/openai/v1/chat/completions", ModelAsNamed},
		{"Foundry to Azure", azure, "/models/chat/completions?api-version=1", "m", "/openai/v1/chat/completions", ModelAsNamed},
		{"Foundry to Foundry", PathsAt("/models", true), "/models/chat/completions?api-version=1", "m", "/models/chat/completions?api-version=1", ModelAsNamed},
		{"Anthropic's to Anthropic", openAI, "/anthropic/v1/messages?beta=true", "m", "/v1/messages?beta=true", ModelAsNamed},
		{"Anthropic's to Azure", azure, "/anthropic/v1/messages?beta=true", "m", "/anthropic/v1/messages?beta=true", ModelAsNamed},
		{"messages to Azure", azure, "/v1/messages/count_tokens", "m", "/anthropic/v1/messages/count_tokens", ModelAsNamed},
		{"messages to Azure's v1", PathsAt("/openai/v1", true), "/v1/messages", "m", "/anthropic/v1/messages", ModelAsNamed},
		{"messages to Azure's /openai", PathsAt("/x/openai", true), "/v1/messages", "m", "/x/anthropic/v1/messages", ModelAsNamed},
		{"messages alone to Foundry", PathsAt("/models", true), "/messages", "m", "/anthropic/v1/messages", ModelAsNamed},
		{"messages to the URL of Anthropic's docs", PathsAt("/anthropic", true), "/v1/messages", "m", "/anthropic/v1/messages", ModelAsNamed},
		{"a chat to the URL of Anthropic's docs", PathsAt("/anthropic/v1", true), "/v1/chat/completions", "m", "/openai/v1/chat/completions", ModelAsNamed},
		{"messages of a thread to Azure", azure, "/v1/threads/thread_1/messages", "m", "/openai/v1/threads/thread_1/messages", ModelAsNamed},
		{"messages to a gateway", PathsAt("/team", true), "/v1/messages", "m", "/team/messages", ModelAsNamed},
		{"a project to OpenAI", openAI, "/api/projects/p/openai/v1/responses?api-version=v1", "m", "/v1/responses?api-version=v1", ModelAsNamed},
		{"a project to Azure", azure, "/api/projects/p/openai/v1/responses", "m", "/openai/v1/responses", ModelAsNamed},
		{"a project to another", PathsAt("/api/projects/q", true), "/api/projects/p/openai/v1/responses", "m", "/api/projects/q/openai/v1/responses", ModelAsNamed},
		{"v1 to a project", PathsAt("/api/projects/q/openai/v1", true), "/v1/responses", "m", "/api/projects/q/openai/v1/responses", ModelAsNamed},
		{"v1 to a project behind a gateway", PathsAt("/team/api/projects/q/openai", false), "/v1/responses", "m", "/team/api/projects/q/openai/v1/responses", ModelAsNamed},
		{"messages to a project", PathsAt("/api/projects/q", true), "/v1/messages", "m", "/anthropic/v1/messages", ModelAsNamed},
		{"classic to a project", PathsAt("/api/projects/q", true), "/openai/deployments/m/embeddings?api-version=1", "m", "/api/projects/q/openai/v1/embeddings", ModelInBody},
		{"realtime to another model", openAI, "/v1/realtime?model=m", "n", "/v1/realtime?model=n", ModelAsNamed},
		{"classic realtime to OpenAI", openAI, "/openai/realtime?api-version=1&deployment=m", "m", "/v1/realtime?model=m", ModelAsNamed},
	} {
		t.Run(c.name, func(t *testing.T) {
			u, err := url.Parse("http://h" + c.asked)
			if err != nil {
				t.Fatal(err)
			}
			place := c.paths.Rewrite(u, ParsePath(u.EscapedPath()), "m", c.model)
			if got := u.RequestURI(); got != c.want || place != c.place {
				t.Errorf("got %s (%d), want %s (%d)", got, place, c.want, c.place)
			}
		})
	}
}
