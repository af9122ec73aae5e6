package openaiapi

import "testing"

func TestParsePath(t *testing.T) {
	tests := []struct {
		name string
		path string
		want Route
	}{
		{"OpenAI", "/v1/chat/completions", Route{OpenAI, "", "/chat/completions"}},
		{"OpenAI, an item", "/v1/responses/resp_1/input_items", Route{OpenAI, "", "/responses/resp_1/input_items"}},
		{"OpenAI, nothing but the prefix", "/v1", Route{OpenAI, "", ""}},
		{"OpenAI, a trailing slash", "/v1/", Route{OpenAI, "", "/"}},
		{"OpenAI, a trailing slash after the operation", "/v1/models/", Route{OpenAI, "", "/models/"}},
		{"an escaped operation stays escaped", "/v1/models/a%2Fb", Route{OpenAI, "", "/models/a%2Fb"}},
		{"Azure v1", "/openai/v1/embeddings", Route{AzureV1, "", "/embeddings"}},
		{"Azure v1, nothing but the prefix", "/openai/v1", Route{AzureV1, "", ""}},
		{"Azure v1, a trailing slash", "/openai/v1/", Route{AzureV1, "", "/"}},
		{"Azure classic", "/openai/deployments/gpt-4o/chat/completions", Route{AzureClassic, "gpt-4o", "/chat/completions"}},
		{"Azure classic, nothing but the deployment", "/openai/deployments/gpt-4o", Route{AzureClassic, "gpt-4o", ""}},
		{"Azure classic, a trailing slash", "/openai/deployments/gpt-4o/", Route{AzureClassic, "gpt-4o", "/"}},
		{"a deployment named chat", "/openai/deployments/chat/chat/completions", Route{AzureClassic, "chat", "/chat/completions"}},
		{"a deployment named openai", "/openai/deployments/openai/embeddings", Route{AzureClassic, "openai", "/embeddings"}},
		{"a deployment named v1", "/openai/deployments/v1/embeddings", Route{AzureClassic, "v1", "/embeddings"}},
		{"a deployment named deployments", "/openai/deployments/deployments/embeddings", Route{AzureClassic, "deployments", "/embeddings"}},
		{"a slash within a deployment stays within it", "/openai/deployments/a%2Fb%20c/embeddings", Route{AzureClassic, "a%2Fb%20c", "/embeddings"}},
		{"a deployment with dots", "/openai/deployments/gpt-4.1/embeddings", Route{AzureClassic, "gpt-4.1", "/embeddings"}},
		{"escaped dots are a name", "/openai/deployments/%2E%2E/embeddings", Route{AzureClassic, "%2E%2E", "/embeddings"}},
		{"dots are a way out, not a deployment", "/openai/deployments/../v1/embeddings", Route{Other, "", "/openai/deployments/../v1/embeddings"}},
		{"one dot is none either", "/openai/deployments/./embeddings", Route{Other, "", "/openai/deployments/./embeddings"}},
		{"an empty deployment", "/openai/deployments//embeddings", Route{Other, "", "/openai/deployments//embeddings"}},
		{"the list of deployments", "/openai/deployments", Route{AzureClassic, "", "/deployments"}},
		{"the list of deployments, with a slash", "/openai/deployments/", Route{AzureClassic, "", "/deployments/"}},
		{"Azure without a deployment", "/openai/files", Route{AzureClassic, "", "/files"}},
		{"Azure without a deployment, an item", "/openai/files/file-1/content", Route{AzureClassic, "", "/files/file-1/content"}},
		{"Azure without a deployment, a thread", "/openai/threads/thread_1/messages", Route{AzureClassic, "", "/threads/thread_1/messages"}},
		{"Azure with the deployment in the query", "/openai/realtime", Route{AzureClassic, "", "/realtime"}},
		{"Azure with the model in the body", "/openai/responses", Route{AzureClassic, "", "/responses"}},
		{"Azure's models", "/openai/models", Route{AzureClassic, "", "/models"}},
		{"an operation that begins like deployments", "/openai/deploymentsets/a", Route{AzureClassic, "", "/deploymentsets/a"}},
		{"a doubled prefix is no prefix", "/openai/openai/deployments/x/y", Route{AzureClassic, "", "/openai/deployments/x/y"}},
		{"nor is a doubled v1", "/openai/openai/v1/models", Route{AzureClassic, "", "/openai/v1/models"}},
		{"openai alone", "/openai", Route{Other, "", "/openai"}},
		{"openai with a slash", "/openai/", Route{Other, "", "/openai/"}},
		{"openai with two slashes", "/openai//v1/models", Route{Other, "", "/openai//v1/models"}},
		{"dots are no operation", "/openai/../v1/models", Route{Other, "", "/openai/../v1/models"}},
		{"one dot is none either, as an operation", "/openai/./v1/models", Route{Other, "", "/openai/./v1/models"}},
		{"openai is a whole segment", "/openai-eu/files", Route{Other, "", "/openai-eu/files"}},
		{"v1beta is another segment", "/v1beta/models", Route{Other, "", "/v1beta/models"}},
		{"so is v1beta in Azure", "/openai/v1beta", Route{AzureClassic, "", "/v1beta"}},
		{"an escaped v is not a v", "/%761/models", Route{Other, "", "/%761/models"}},
		{"an empty segment counts", "//v1/models", Route{Other, "", "//v1/models"}},
		{"prefixes are at the beginning", "/team/v1/models", Route{Other, "", "/team/v1/models"}},
		{"the root", "/", Route{Other, "", "/"}},
		{"nothing", "", Route{Other, "", ""}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := ParsePath(tt.path); got != tt.want {
				t.Errorf("%s: got %+v, want %+v", tt.path, got, tt.want)
			}
		})
	}
}

func TestADeploymentIsAModelsName(t *testing.T) {
	for path, want := range map[string]string{
		"/openai/deployments/gpt-4o/chat/completions": "gpt-4o",
		"/openai/deployments/a%2Fb%20c+d/embeddings":  "a/b c+d",
		"/openai/deployments/%2E%2E":                  "..",
		"/openai/deployments/100%/embeddings":         "100%",
		"/openai/realtime":                            "",
		"/v1/chat/completions":                        "",
	} {
		if got := ParsePath(path).Name(); got != want {
			t.Errorf("%s: got %q, want %q", path, got, want)
		}
	}
}

func TestClassicPath(t *testing.T) {
	tests := []struct{ name, deployment, operation, want string }{
		{"a plain name", "gpt-4o", "/chat/completions", "/openai/deployments/gpt-4o/chat/completions"},
		{"no operation", "gpt-4o", "", "/openai/deployments/gpt-4o"},
		{"a slash", "a/b", "/embeddings", "/openai/deployments/a%2Fb/embeddings"},
		{"a percent sign is escaped as well", "a%2Fb", "/embeddings", "/openai/deployments/a%252Fb/embeddings"},
		{"a question mark and a space", "what now?", "/embeddings", "/openai/deployments/what%20now%3F/embeddings"},
		{"umlauts", "für", "/embeddings", "/openai/deployments/f%C3%BCr/embeddings"},
		{"dots in a name", "gpt-4.1", "/embeddings", "/openai/deployments/gpt-4.1/embeddings"},
		{"one dot", ".", "/embeddings", "/openai/deployments/%2E/embeddings"},
		{"two dots", "..", "/embeddings", "/openai/deployments/%2E%2E/embeddings"},
		{"three dots are harmless", "...", "/embeddings", "/openai/deployments/.../embeddings"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := ClassicPath(tt.deployment, tt.operation); got != tt.want {
				t.Errorf("got %s, want %s", got, tt.want)
			}
		})
	}
}

func FuzzClassicPathIsReadBack(f *testing.F) {
	for _, name := range []string{"gpt-4o", "a/b", "..", "%2e", "v1", "\x00\xff", "?#;"} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		if name == "" {
			return
		}
		route := ParsePath(ClassicPath(name, "/chat/completions"))
		if route.Dialect != AzureClassic || route.Operation != "/chat/completions" || route.Name() != name {
			t.Errorf("%q: got %+v, %q", name, route, route.Name())
		}
	})
}
