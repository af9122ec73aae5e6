package failover

import (
	"fmt"
	"net/http"
	"net/url"
	"path"
	"strings"
	"testing"

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
	for _, base := range []string{"/contoso/openai", "/openai", "/contoso", "/contoso/openai/v1", "/openai/v1", "/v1", "/a%2Fb/openai"} {
		for _, auth := range []string{"auth api_key\napi_key key-of-a", "api_key key-of-a"} {
			t.Run(base+" "+auth, func(t *testing.T) {
				lbtest.InBubble(t, "openai_lb {\nbackend http://a"+base+" {\n"+auth+"\n}\n}", func(t *testing.T, w *lbtest.World) {
					for _, asked := range []string{
						"/", "/admin", "/contoso/admin", "/openai", "/openai/", "/openaiadmin", "/openai-admin/x", "/v1", "/v1/", "/v1admin", "/v2/x", "/v1/files", "/openai/v1", "/openai/v1/files",
						"/openai/v1admin", "/openai/files?api-version=1", "/openai/deployments/x/chat/completions?api-version=1", "/openai/deployments/%2e%2e%2f%2e%2e/x", "/OPENAI/x", "//admin", "///",
						"/../admin", "/%2e%2e/admin", "/openai/../admin", "/openai/%2E%2e/%2e%2e/admin", "/openai/..%2f..%2fadmin", "/v1/..", "/v1/../../admin", `/..%5cadmin`, "/..;/admin", "/openai/..;x=1/..;/admin", "/.%2e/admin",
						"/%6fpenai/admin", "/openai%2fadmin", "/openai/deployments", "/openai/deployments/",
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
							for _, c := range calls {
								if got := leadsTo(c.Request.RequestURI); got != decoded && !strings.HasPrefix(got, decoded+"/") {
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

func TestPathsOfNoDialectAreJoinedToTheBasePath(t *testing.T) {
	for base, want := range map[string]string{"/contoso/openai": "/contoso/openai/admin", "/openai": "/openai/admin", "/contoso": "/contoso/admin", "": "/admin"} {
		lbtest.InBubble(t, "openai_lb {\nbackend http://a"+base+" {\nauth api_key\napi_key key-of-a\n}\n}", func(t *testing.T, w *lbtest.World) {
			w.Send(w.Request(http.MethodPost, "/admin", strings.NewReader(`{}`))).WantServed(t, "a")
			if got := w.Backends["a"].Received()[0].Request.RequestURI; got != want {
				t.Errorf("with base path %q, a was asked for %s, want %s", base, got, want)
			}
		})
	}
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
