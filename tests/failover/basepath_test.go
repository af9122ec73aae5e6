package failover

import (
	"fmt"
	"net/http"
	"net/url"
	"path"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// leadsTo is the path that the most careless server may take a request for:
// without parameters of segments, with backslashes for slashes, and with dot
// segments resolved.
func leadsTo(requestURI string) string {
	escaped, _, _ := strings.Cut(requestURI, "?")
	decoded, err := url.PathUnescape(escaped)
	if err != nil {
		return escaped
	}
	var segments []string
	for segment := range strings.SplitSeq(strings.ReplaceAll(decoded, `\`, "/"), "/") {
		segment, _, _ = strings.Cut(segment, ";")
		segments = append(segments, segment)
	}
	return path.Clean("/" + strings.Join(segments, "/"))
}

func TestABasePathHoldsForEveryPath(t *testing.T) {
	for _, base := range []string{"/contoso/openai", "/openai", "/contoso", "/contoso/openai/v1", "/openai/v1", "/v1", "/a%2Fb/openai", "/api/projects/p/openai/v1"} {
		for _, auth := range []string{"auth api_key\napi_key key-of-a", "api_key key-of-a"} {
			t.Run(base+" "+auth, func(t *testing.T) {
				lbtest.InBubble(t, "openai_lb {\nbackend http://a"+base+" {\n"+auth+"\n}\n}", func(t *testing.T, w *lbtest.World) {
					for _, asked := range []string{
						"/", "/admin", "/contoso/admin", "/openai", "/openai/", "/openaiadmin", "/openai-admin/x", "/v1", "/v1/", "/v1admin", "/v2/x", "/v1/files", "/openai/v1", "/openai/v1/files",
						"/openai/v1admin", "/openai/files?api-version=1", "/openai/deployments/x/chat/completions?api-version=1", "/openai/deployments/%2e%2e%2f%2e%2e/x", "/OPENAI/x", "//admin", "///",
						"/../admin", "/%2e%2e/admin", "/openai/../admin", "/openai/%2E%2e/%2e%2e/admin", "/openai/..%2f..%2fadmin", "/v1/..", "/v1/../../admin", `/..%5cadmin`, "/..;/admin", "/openai/..;x=1/..;/admin", "/.%2e/admin",
						"/%6fpenai/admin", "/openai%2fadmin", "/openai/deployments", "/openai/deployments/",
						"/v1/messages", "/anthropic/v1/messages", "/anthropic/v1/../../admin", "/anthropic/v1/x", "/anthropic/admin", "/v1/messages/..%2f..%2fadmin",
						"/api/projects/p/openai/v1/files", "/api/projects/../openai/v1/files", "/api/projects/a%2fb/openai/v1/files", "/api/projects/p/admin",
					} {
						for _, method := range []string{http.MethodPost, http.MethodGet} {
							w.Backends["a"].Forget()
							r := w.Request(method, "/", strings.NewReader(`{}`))
							r.URL.Opaque = "//lb" + asked
							reply := w.Send(r)
							calls := w.Backends["a"].Received()
							if reply.Err != nil || len(calls) == 0 && (reply.Status < 400 || reply.Status >= 500) {
								t.Errorf("%s %s is answered with %d (%v), and reached nobody", method, asked, reply.Status, reply.Err)
							}
							decoded, _ := url.PathUnescape(base)
							anthropic := decoded // which is beside Azure's prefixes
							if resource := strings.TrimSuffix(strings.TrimSuffix(strings.TrimSuffix(decoded, "/v1"), "/openai"), "/api/projects/p"); strings.HasPrefix(auth, "auth api_key") {
								anthropic = resource + "/anthropic/v1"
							}
							for _, c := range calls {
								if got := leadsTo(c.Request.RequestURI); got != decoded && !strings.HasPrefix(got, decoded+"/") && !strings.HasPrefix(got, anthropic+"/") {
									t.Errorf("%s %s reached %s, which leads to %s, out of %s", method, asked, c.Request.RequestURI, got, base)
								}
							}
						}
					}
				})
			})
		}
	}
}

func TestAPathOfNoDialectReachesNoBackend(t *testing.T) {
	for _, backend := range []string{"http://a", "http://a/contoso/v1", "http://a {\nauth api_key\napi_key k\n}"} {
		lbtest.InBubble(t, "openai_lb {\nbackend "+backend+"\n}", func(t *testing.T, w *lbtest.World) {
			for _, asked := range []string{"/", "/admin", "/v1beta/models/x:generateContent", "/v2/chat", "/api/chat", "/anthropic/messages", "/claude/v1/messages", "/api/projects/p/agents", "/api/projects/openai/v1/responses",
				"/openai", "/openai/", "/chats", "/Chat/Completions", "/model/chat/completions", "/x/v1/chat/completions"} {
				for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodOptions} {
					reply := w.Send(w.Request(method, asked, strings.NewReader(`{"model":"m"}`)))
					reply.WantError(t, 404, "unknown_url")
					if !strings.Contains(reply.Body, "/v1") {
						t.Errorf("%s says %s, and not which base URL to use", asked, reply.Body)
					}
				}
			}
			w.WantCalls(map[string]int{"a": 0})
		})
	}
}

// azure-ai-inference sends /chat/completions and /models/chat/completions with
// an api-version, and OpenAI's SDKs send what follows the base URL, whatever
// that is.
func TestAKnownOperationNeedsNoPrefix(t *testing.T) {
	const config = `openai_lb {
		backend http://azure {
			account one
			auth api_key
			api_key k
			model m deployed
		}
		backend http://openai {
			account one
			priority 2
			model m
		}
		backend http://gateway/team-a/v1 {
			account one
			priority 3
			model m
		}
		backend http://foundry/models {
			account one
			auth api_key
			api_key k
			priority 4
			model m
		}
	}`
	lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
		ask := func(method, path, model string) lbtest.Reply {
			for _, b := range w.Backends {
				b.Forget()
			}
			return w.Send(w.Request(method, path, strings.NewReader(fmt.Sprintf(`{"model":%q}`, model))))
		}
		for _, c := range []struct{ method, asked, operation string }{
			{"POST", "/chat/completions", "/chat/completions"},
			{"POST", "/chat/completions?api-version=2024-05-01-preview&x=1", "/chat/completions?x=1"},
			{"POST", "/models/chat/completions?api-version=2024-05-01-preview", "/chat/completions"},
			{"POST", "/models/embeddings?api-version=2024-05-01-preview", "/embeddings"},
			{"POST", "/models/images/embeddings?api-version=2024-05-01-preview", "/images/embeddings"},
			{"POST", "/embeddings", "/embeddings"},
			{"POST", "/responses", "/responses"},
			{"GET", "/responses/resp_1", "/responses/resp_1"},
			{"POST", "/images/generations", "/images/generations"},
			{"POST", "/audio/transcriptions", "/audio/transcriptions"},
			{"POST", "/messages", "/messages"},
			{"POST", "/anthropic/v1/messages", "/messages"},
			{"POST", "/api/projects/p/openai/v1/responses", "/responses"},
			{"POST", "/decisions", "/decisions"},
			{"POST", "/files", "/files"},
			{"POST", "/fine_tuning/jobs", "/fine_tuning/jobs"},
		} {
			for i, at := range []struct{ backend, prefix string }{{"azure", "/openai/v1"}, {"openai", "/v1"}, {"gateway", "/team-a/v1"}, {"foundry", "/models"}} {
				w.AllReply(lbtest.Throttled("1"))
				w.Backends[at.backend].Recovers()
				ask(c.method, c.asked, "m").WantServed(t, at.backend)
				want := at.prefix + c.operation
				if c.operation == "/messages" && (at.backend == "azure" || at.backend == "foundry") {
					want = "/anthropic/v1/messages" // where Foundry has Anthropic's API
				}
				if _, query, _ := strings.Cut(c.asked, "?"); at.backend == "foundry" && query != "" {
					path, _, _ := strings.Cut(c.operation, "?")
					want = at.prefix + path + "?" + query // which has no dialect without it
				}
				if got := w.Backends[at.backend].Received()[0].Request.RequestURI; got != want {
					t.Errorf("%d: %s %s reached %s, want %s", i, c.method, c.asked, got, want)
				}
				time.Sleep(time.Minute)
			}
		}
		w.AllReply(nil)
		for _, path := range []string{"/chat/completions", "/models/chat/completions?api-version=1", "/embeddings"} {
			ask("POST", path, "forbidden").WantError(t, 404, "model_not_found")
		}
		for _, path := range []string{"/models", "/models/", "/models/m"} {
			if reply := ask("GET", path, ""); reply.Status != 200 || !strings.Contains(reply.Body, `"id":"m"`) || w.TotalCalls() > 0 {
				t.Errorf("GET %s gives %d %s", path, reply.Status, reply.Body)
			}
		}
		ask("GET", "/models/chat", "").WantError(t, 404, "model_not_found")
	})
}

// TestNoSpellingOfAPathGetsPastTheModels asks for a model that no backend
// has, in ways that a backend may read as the path that names it.
func TestNoSpellingOfAPathGetsPastTheModels(t *testing.T) {
	for _, auth := range []string{"auth api_key\napi_key k", "auth none"} {
		config := fmt.Sprintf("openai_lb {\nbackend http://a {\n%s\nmodel gpt-4o\n}\nbackend http://b/base {\n%s\nmodel gpt-4o-mini\n}\n}", auth, auth)
		lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
			for _, asked := range []string{
				"/openai/deployments/forbidden/chat/completions", "/OpenAI/Deployments/forbidden/chat/completions", "/openai/Deployments/forbidden/chat/completions",
				"//openai/deployments/forbidden/chat/completions", "/openai//deployments/forbidden/chat/completions", "/openai/deployments//forbidden/chat/completions",
				"/openai/deployments/forbidden//chat/completions", "///openai///deployments///forbidden/chat/completions", "/openai/deployments%2Fforbidden/chat/completions",
				"/openai%2Fdeployments%2Fforbidden%2Fchat%2Fcompletions", "/%6fpenai/deployments/forbidden/chat/completions", "/openai/%64eployments/forbidden/chat/completions",
				"/openai;x/deployments/forbidden/chat/completions", "/openai/deployments;x/forbidden/chat/completions", "/openai/./deployments/forbidden/chat/completions",
				"/openai/%2e/deployments/forbidden/chat/completions", "/x/../openai/deployments/forbidden/chat/completions", `/openai%5Cdeployments%5Cforbidden/chat/completions`,
				"/openai/deployments/forbidden", "/openai/deployments/gpt-4o/../forbidden/chat/completions", "/openai/deployments/%66orbidden/chat/completions",
			} {
				for _, body := range []string{`{}`, `{"model":"gpt-4o"}`} {
					for _, b := range w.Backends {
						b.Forget()
					}
					r := w.Request(http.MethodPost, "/", strings.NewReader(body))
					r.URL.Opaque = "//lb" + asked + "?api-version=2024-10-21"
					reply := w.Send(r)
					for name, b := range w.Backends {
						for _, c := range b.Received() {
							if strings.Contains(leadsTo(c.Request.RequestURI), "forbidden") {
								t.Errorf("%s %s reached %s as %s", asked, body, name, c.Request.RequestURI)
							}
						}
					}
					if w.TotalCalls() == 0 && reply.Status != 400 && reply.Status != 404 {
						t.Errorf("%s %s: client got %d %s (%v)", asked, body, reply.Status, reply.Body, reply.Err)
					}
				}
			}
			// and what SDKs send is served
			for asked, backend := range map[string]string{"gpt-4o": "a", "gpt-4o-mini": "b", "gpt%2D4o": "a"} {
				w.Send(w.Request(http.MethodPost, "/openai/deployments/"+asked+"/chat/completions?api-version=2024-10-21", strings.NewReader(`{}`))).WantServed(t, backend)
			}
		})
	}
}

func TestADotSegmentIsAnInvalidPath(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
		for _, asked := range []string{"/v1/../admin", "/v1/%2e%2e/admin", "/v1/.", "/v1/..%2fx"} {
			r := w.Request(http.MethodPost, "/", strings.NewReader(`{}`))
			r.URL.Opaque = "//lb" + asked
			w.Send(r).WantError(t, 400, "invalid_path")
		}
		w.WantCalls(map[string]int{"a": 0})
	})
}
