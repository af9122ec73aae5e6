package openaiapi

import (
	"net/url"
	"slices"
	"strings"
	"testing"
)

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
		{"an operation alone", "/chat/completions", Route{Bare, "", "/chat/completions"}},
		{"an item alone", "/responses/resp_1/input_items", Route{Bare, "", "/responses/resp_1/input_items"}},
		{"an operation alone, with a slash", "/embeddings/", Route{Bare, "", "/embeddings/"}},
		{"models alone", "/models", Route{Bare, "", "/models"}},
		{"a model alone", "/models/meta-llama/Llama-3-8b", Route{Bare, "", "/models/meta-llama/Llama-3-8b"}},
		{"a model called chat", "/models/chat", Route{Bare, "", "/models/chat"}},
		{"Foundry", "/models/chat/completions", Route{Bare, "", "/chat/completions"}},
		{"Foundry's embeddings of images", "/models/images/embeddings", Route{Bare, "", "/images/embeddings"}},
		{"a word that only begins like an operation", "/chats/completions", Route{Other, "", "/chats/completions"}},
		{"an operation is a whole segment", "/chat%2Fcompletions", Route{Other, "", "/chat%2Fcompletions"}},
		{"an operation in capital letters", "/Chat/Completions", Route{Other, "", "/Chat/Completions"}},
		{"openai alone", "/openai", Route{Other, "", "/openai"}},
		{"openai with a slash", "/openai/", Route{Other, "", "/openai/"}},
		{"openai with two slashes", "/openai//v1/models", Route{Other, "", "/openai//v1/models"}},
		{"dots are no operation", "/openai/../v1/models", Route{Other, "", "/openai/../v1/models"}},
		{"one dot is none either, as an operation", "/openai/./v1/models", Route{Other, "", "/openai/./v1/models"}},
		{"openai is a whole segment", "/openai-eu/files", Route{Other, "", "/openai-eu/files"}},
		{"v1beta is another segment", "/v1beta/models", Route{Other, "", "/v1beta/models"}},
		{"so is v1beta in Azure", "/openai/v1beta", Route{AzureClassic, "", "/v1beta"}},
		{"an escaped v is a v", "/%761/models", Route{OpenAI, "", "/models"}},
		{"capital letters", "/V1/Models", Route{OpenAI, "", "/Models"}},
		{"Foundry's project", "/api/projects/p-1/openai/v1/responses", Route{AzureV1, "", "/responses"}},
		{"Foundry's project in capital letters", "/API/Projects/P/OpenAI/V1/responses/resp_1", Route{AzureV1, "", "/responses/resp_1"}},
		{"another API of Foundry's project", "/api/projects/p/agents", Route{Other, "", "/api/projects/p/agents"}},
		{"no project", "/api/projects/openai/v1/responses", Route{Other, "", "/api/projects/openai/v1/responses"}},
		{"a project that is no name", "/api/projects/../openai/v1/responses", Route{Other, "", "/api/projects/../openai/v1/responses"}},
		{"Foundry's Anthropic", "/anthropic/v1/messages", Route{Anthropic, "", "/messages"}},
		{"Foundry's Anthropic in capital letters", "/Anthropic/V1/messages/count_tokens", Route{Anthropic, "", "/messages/count_tokens"}},
		{"Anthropic alone", "/anthropic/messages", Route{Other, "", "/anthropic/messages"}},
		{"a decision alone", "/decisions", Route{Bare, "", "/decisions"}},
		{"capital letters, Azure v1", "/OpenAI/V1/Embeddings", Route{AzureV1, "", "/Embeddings"}},
		{"capital letters, Azure classic", "/OpenAI/Deployments/GPT-4o/Chat/Completions", Route{AzureClassic, "GPT-4o", "/Chat/Completions"}},
		{"escaped letters, Azure classic", "/%6fpenai/%64eployment%53/gpt%2d4o/ch%61t/completions", Route{AzureClassic, "gpt%2d4o", "/ch%61t/completions"}},
		{"a letter that is escaped twice", "/%25%37%36%31/models", Route{Other, "", "/%25%37%36%31/models"}},
		{"an escaped slash separates nothing", "/openai%2Fdeployments/gpt-4o/embeddings", Route{Other, "", "/openai%2Fdeployments/gpt-4o/embeddings"}},
		{"what is badly escaped", "/%zz/%v1", Route{Other, "", "/%zz/%v1"}},
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

func TestARouteHasThePathOfTheDocumentation(t *testing.T) {
	for path, want := range map[string]string{
		"/v1/chat/completions":   "/v1/chat/completions",
		"/V1/models/a%2Fb/":      "/v1/models/a%2Fb/",
		"/v1":                    "/v1",
		"/OPENAI/%561/responses": "/openai/v1/responses",
		"/OpenAI/Deployments/GPT%2D4o/Embeddings": "/openai/deployments/GPT%2D4o/Embeddings",
		"/openai/deployments/gpt-4o":              "/openai/deployments/gpt-4o",
		"/OpenAI/files/file-1":                    "/openai/files/file-1",
		"/OpenAI/deployments":                     "/openai/deployments",
		"/Anthropic/v1/messages":                  "/anthropic/v1/messages",
		"":                                        "",
		"/openai/deployments/deployments/completions": "/openai/deployments/deployments/completions",
	} {
		if got := ParsePath(path).Path(); got != want {
			t.Errorf("%s: got %s, want %s", path, got, want)
		}
	}
}

func TestPathsThatServersReadDifferently(t *testing.T) {
	const (
		dots    = "The path must not contain '.' or '..' segments."
		empty   = "The path must not contain empty segments."
		blanks  = "The path must not contain white space or control characters."
		slashes = "The path must not contain an encoded slash or a semicolon before the operation or the deployment."
	)
	for path, want := range map[string]string{
		"":                            "",
		"/":                           "",
		"*":                           "",
		"/v1":                         "",
		"/v1/chat/completions":        "",
		"/v1/chat/completions/":       "",
		"/v1/models/a%2Fb":            "",
		"/v1/models/a%2F%2Fb+c/":      "",
		"/v1/files/...":               "",
		"/v1/files/.well-known/a.b..": "",
		"/openai/":                    "",
		"/openai/deployments/gpt-4.1/chat/completions": "",
		"/openai/deployments/a%2Fb+c/chat/completions": "",
		"/openai/deployments/a%5Cb/chat/completions":   "",
		"/OpenAI/Deployments/gpt-4o/chat/completions":  "",
		"/team%2Fa/models": "",
		"/100%/models":     "",

		"/v1/../admin":                           dots,
		"/v1/./models":                           dots,
		"/v1/models/..":                          dots,
		"/v1/%2e%2E/admin":                       dots,
		"/v1/.%2e/admin":                         dots,
		"/v1/a%2F..%2Fb":                         dots,
		"/v1/a%5C..%5Cb":                         dots,
		`/v1/a\..\b`:                             dots,
		"..":                                     dots,
		"/openai/deployments/%2E%2E/embeddings":  dots,
		"/openai/deployments/x%2f.%2fy/messages": dots,

		"/v1/models/a%20b":                                  blanks,
		"/v1/responses/%09resp_1234":                        blanks,
		"/v1/responses/resp_1234%00":                        blanks,
		"/v1/responses/resp_1234%E2%80%8B":                  blanks,
		"/openai/deployments/gpt-4o%C2%A0/chat/completions": blanks,

		"//":                             empty,
		"//v1/models":                    empty,
		"/v1//models":                    empty,
		"/v1/models//":                   empty,
		"//openai/deployments/x/y":       empty,
		"/openai//deployments/x/y":       empty,
		"/openai/deployments//x/y":       empty,
		"/openai/deployments/x//y":       empty,
		"/openai/deployments/x/chat//a/": empty,

		"/openai%2Fdeployments/x/chat/completions":     slashes,
		"/openai/deployments%2fx/chat/completions":     slashes,
		"/openai%2Fdeployments%2Fx/chat/completions":   slashes,
		"/OpenAI%5Cdeployments/x/chat/completions":     slashes,
		`/openai\deployments\x\chat\completions`:       slashes,
		"/%2Fopenai/deployments/x/chat/completions":    slashes,
		"/openai/%2Fdeployments/x/chat/completions":    slashes,
		"/openai/deployments/%2F":                      slashes,
		"/openai/v1%2Fchat/completions":                slashes,
		"/v1%2Fchat/completions":                       slashes,
		"/%2fv1/chat/completions":                      slashes,
		"/%4fpenai%2f%64eployments/x/chat/completions": slashes,
	} {
		if got := CheckPath(path); got != want {
			t.Errorf("%s: got %q, want %q", path, got, want)
		}
	}
}

func TestAnOperationOnStoredObjectsHasOneSpelling(t *testing.T) {
	for _, operation := range []string{
		"", "/", "/responses", "/responses/", "/responses/resp_1234", "/responses/%72esp_1234", "/responses/resp_1234/", "/responses/Resp_1234/input_items",
		"/files/file%2D1234/content", "/fine_tuning/checkpoints/ft:gpt-4o:a::b%3Ac/permissions", "/chat/completions", "/chat/completions/chatcmpl-1234", "/chat/x",
		"/realtime", "/realtime/calls/rtc_1234", "/models/a%2Fb", "/models/A;b", "/Embeddings", "/responsesx/a;b", "/x%2Fresponses",
	} {
		if OddlySpelled(operation) {
			t.Errorf("%s is oddly spelled", operation)
		}
	}
	for _, operation := range []string{
		"/Responses", "/%72esponses/resp_1234", "/responses%2Fresp_1234", "/responses%5Cresp_1234", "/responses;x/resp_1234", "/%2Fresponses/resp_1234",
		"/responses/resp_1234;x", "/responses/resp_1234%3Bx", "/responses/resp_1234%2F", "/responses/resp_1234%2Finput_items", "/responses/%5Cresp_1234", "/responses/%2Fresp_1234", "/responses%2F",
		"/Chat/completions", "/chat/Completions", "/ch%61t/completions", "/chat/%63ompletions/chatcmpl-1234", "/chat%2Fcompletions", "/chat/completions;x",
		"/fine_tuning/Jobs/ftjob-1234", "/VECTOR_STORES/vs_1234/files", "/Realtime",
	} {
		if !OddlySpelled(operation) {
			t.Errorf("%s is not oddly spelled", operation)
		}
	}
}

// FuzzCheckPath holds ParsePath against a server that takes letters of any
// case, decodes first and splits then, and knows no empty segments.
func FuzzCheckPath(f *testing.F) {
	for _, path := range []string{"/v1/models", "/OpenAI/%64eployments/x/y", "/openai/deployments%2Fx/y", "//openai/v1/a", `/openai\v1`, "/v1/a%2F..%2Fb", "/openai/deployments/%2Fa/b"} {
		f.Add(path)
	}
	f.Fuzz(func(t *testing.T, path string) {
		u := url.URL{Path: path}
		if decoded, err := url.PathUnescape(path); err == nil {
			u.Path, u.RawPath = decoded, path
		}
		escaped := u.EscapedPath()
		route := ParsePath(escaped)
		if again := ParsePath(route.Path()); again != route {
			t.Errorf("%q: got %+v, and of its path %+v", escaped, route, again)
		}
		if CheckPath(escaped) != "" || !strings.HasPrefix(escaped, "/") {
			return
		}
		segments := strings.FieldsFunc(strings.ToLower(u.Path), isSlash)
		if slices.Contains(segments, "..") || slices.Contains(segments, ".") {
			t.Errorf("%q has dot segments", escaped)
		}
		classic := len(segments) > 2 && segments[0] == "openai" && segments[1] == "deployments"
		if classic != (route.Deployment != "") {
			t.Errorf("%q: got %+v", escaped, route)
		}
	})
}

func BenchmarkParsePath(b *testing.B) {
	for _, path := range []string{"/v1/chat/completions", "/openai/deployments/gpt-4o/chat/completions", "/openai/deployments/a%2Fb/chat/completions"} {
		b.Run(path[1:], func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if CheckPath(path) != "" || ParsePath(path).Dialect == Other {
					b.Fatal("not understood")
				}
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

func TestANameIsOneSegmentOfAPath(t *testing.T) {
	for name, want := range map[string]string{"ptu": "ptu", "team/a b": "team%2Fa%20b", ".": "%2E", "..": "%2E%2E", "a.b": "a.b", "100%": "100%25"} {
		if got := EscapeSegment(name); got != want {
			t.Errorf("%s became %s, want %s", name, got, want)
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

// BenchmarkOddlySpelled shows what isPlain saves: each request is asked.
func BenchmarkOddlySpelled(b *testing.B) {
	for _, operation := range []string{"/chat/completions", "/Chat/completions"} {
		b.Run(operation, func(b *testing.B) {
			for b.Loop() {
				OddlySpelled(operation)
			}
		})
	}
}

// Path returns the escaped path of the route, with the segments of the dialect
// spelled as in the API's documentation.
func (r Route) Path() string {
	switch {
	case r.Dialect == OpenAI:
		return openAIPrefix + r.Operation
	case r.Dialect == AzureV1:
		return azureV1Prefix + r.Operation
	case r.Dialect == Anthropic:
		return anthropicPrefix + r.Operation
	case r.Dialect == AzureClassic && r.Deployment != "":
		return classicPrefix + deployments + "/" + r.Deployment + r.Operation
	case r.Dialect == AzureClassic:
		return classicPrefix + r.Operation
	}
	return r.Operation
}

// ClassicPath returns the escaped path of an operation, which is written as in
// Route, on a deployment, whose name is escaped here.
func ClassicPath(deployment, operation string) string {
	return classicPrefix + deployments + "/" + EscapeSegment(deployment) + operation
}
