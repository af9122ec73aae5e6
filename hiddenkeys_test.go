package openailb_test

import (
	"fmt"
	"net/http"
	"net/url"
	"path/filepath"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// escapedAll is a text with all of its bytes percent-encoded.
func escapedAll(text, format string) string {
	var b strings.Builder
	for i := range len(text) {
		fmt.Fprintf(&b, format, text[i])
	}
	return b.String()
}

func TestAnEncodedKeyInAReplyIsFound(t *testing.T) {
	const key = "sk/key+of=the&backend"
	for name, encoded := range map[string]string{
		"for a query":            url.QueryEscape(key),
		"for a path":             url.PathEscape(key),
		"in lower case":          strings.ToLower(url.QueryEscape("sk/key+of=the&backend")),
		"all of it":              escapedAll(key, "%%%02X"),
		"all of it in lowercase": escapedAll(key, "%%%02x"),
		"a letter of it":         strings.Replace(key, "k", "%6B", 1),
		"as it is":               key,
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, "openai_lb {\nbackend http://a {\napi_key "+key+"\n}\n}", func(t *testing.T, w *lbtest.World) {
				w.Client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
				for _, code := range []int{201, 302, 307, 400, 404, 422} {
					w.Backends["a"].Replies(func(rw http.ResponseWriter, _ *http.Request) {
						rw.Header().Set("Location", "https://elsewhere.example/?x=1&api-key="+encoded)
						rw.Header().Set("Operation-Location", "/openai/operations/"+encoded)
						rw.Header().Set("Link", "<https://elsewhere.example/"+encoded+">; rel=next")
						rw.Header().Set("X-Kept", "100% of it, a%2Fb")
						rw.WriteHeader(code)
						if code >= 300 {
							fmt.Fprintf(rw, `{"error":{"message":"see https://elsewhere.example/?api-key=%s for 100%% of it"}}`, encoded)
						}
					})
					reply := w.Send(w.Request(http.MethodPost, "/v1/files", strings.NewReader(`{}`)))
					text := fmt.Sprint(reply.Header, reply.Body)
					decoded, err := url.PathUnescape(strings.ReplaceAll(strings.ReplaceAll(text, "100% of it", ""), "%!", ""))
					if err != nil {
						decoded = text
					}
					if strings.Contains(decoded, key) || strings.Contains(strings.ToLower(text), strings.ToLower(encoded)) {
						t.Errorf("%d: client got %s", code, text)
					}
					if reply.Status != code || reply.Header.Get("X-Kept") != "100% of it, a%2Fb" {
						t.Errorf("client got %d %v, want %d with X-Kept", reply.Status, reply.Header, code)
					}
				}
			})
		})
	}
}

// TestAKeyBehindASemicolonIsFound puts keys where servers of other times find
// the parameters of a query.
func TestAKeyBehindASemicolonIsFound(t *testing.T) {
	for _, auth := range []string{"api_key " + lbtest.BackendKey, "auth api_key\napi_key " + lbtest.BackendKey, "auth none", "auth passthrough"} {
		lbtest.InBubble(t, "openai_lb {\nclient_key alice client-key-of-alice\nbackend http://a {\n"+auth+"\n}\n}", func(t *testing.T, w *lbtest.World) {
			for _, format := range []string{
				"x=1;api-key=%s", ";api-key=%s", "x=1&y=2;subscription-key=%s;z", "api-key=;api-key=%s", "x=1;API-Key=%s", "x=1;api%%2Dkey=%s", "x=1;;api-key=%s&y=2",
			} {
				for _, key := range []string{"client-key-of-alice", "own-key-of-hers"} {
					r := w.Request(http.MethodPost, "/v1/chat/completions?"+fmt.Sprintf(format, key), strings.NewReader(`{}`))
					r.Header.Set("Api-Key", "client-key-of-alice")
					r.Header.Set("Authorization", "Bearer the-callers-credential")
					w.Backends["a"].Forget()
					if reply := w.Send(r); reply.Status != 200 && reply.Status != 400 {
						t.Errorf("%s: client got %d %s", r.URL.RawQuery, reply.Status, reply.Body)
					}
					for _, c := range w.Backends["a"].Received() {
						query := c.Request.URL.RawQuery
						if strings.Contains(query, "client-key-of-alice") || auth != "auth passthrough" && strings.Contains(query, key) {
							t.Errorf("with %q, %s reached a as %s", auth, r.URL.RawQuery, query)
						}
					}
				}
			}
			r := w.RequestWithKey("client-key-of-alice")
			r.Header.Set("Api-Key", "the-callers-credential")
			r.URL.RawQuery = "x=a%3Bb&y=c"
			w.Send(r).WantServed(t, "a")
			calls := w.Backends["a"].Received()
			if got := calls[len(calls)-1].Request.URL.RawQuery; got != "x=a%3Bb&y=c" {
				t.Errorf("a query without a key reached a as %s", got)
			}
		})
	}
}

// TestTheVariableOfATransactionHoldsNoKey has a config write the variable in
// which a request carries what the balancer knows of it, keys included.
func TestTheVariableOfATransactionHoldsNoKey(t *testing.T) {
	_, server := lbtest.Listen(t, "a")
	address := lbtest.ServeAt(t, "header >X-Variable {http.vars.openai_lb.transaction}\nopenai_lb {\nclient_key alice client-key-of-alice\nbackend "+server.URL+" {\napi_key "+lbtest.BackendKey+"\n}\n}")
	reply := lbtest.Post(lbtest.NewClient(t), "http://"+address+"/v1/chat/completions", `{"model":"m"}`, "Api-Key", "client-key-of-alice")
	if got := reply.Header.Get("X-Variable"); reply.Status != 200 || got == "" || strings.Contains(got, lbtest.BackendKey) {
		t.Errorf("client got %d with %q", reply.Status, got)
	}
}

// TestALiteralKeyIsNotInTheLogOfItsConfig looks at the line in which Caddy
// tells, at level DEBUG, of a config that automatic HTTPS has changed.
func TestALiteralKeyIsNotInTheLogOfItsConfig(t *testing.T) {
	t.Setenv("OPENAI_LB_TEST_PREFIX", "of-the-test-")
	for name, format := range map[string]string{"alone": "openai_lb", "around json": "openai_lb {\nwrap json\n}", "around console": "openai_lb {\nwrap console\n}"} {
		t.Run(name, func(t *testing.T) {
			logs := filepath.Join(t.TempDir(), "log")
			_, server := lbtest.Listen(t, "a")
			lbtest.Run(t, fmt.Sprintf(`{
				admin off
				debug
				log {
					output file %s
					format %s
				}
			}
			http://127.0.0.1:%d {
				bind 127.0.0.1
				route /simulated/* {
					openai_simulator {
						api_key sk-literal-key sk-literal-key-of-a-simulator
					}
				}
				openai_lb {
					client_key alice sk-literal-key-of-alice
					client_key bob {env.OPENAI_LB_TEST_PREFIX}sk-literal-key-of-bob
					backend %s {
						name backend-of-the-test
						api_key sk-literal-key-of-a
						header X-Secret-Token sk-literal-token
						header Cf-Aig-Authorization "Bearer sk-literal-bearer"
					}
				}
			}`, logs, format, lbtest.FreePort(t), server.URL))
			if err := caddy.Stop(); err != nil {
				t.Fatal(err)
			}
			text := lbtest.ReadFile(t, logs)
			if !strings.Contains(string(text), "adjusted config") || !strings.Contains(string(text), "backend-of-the-test") {
				t.Error("Caddy does not log the config: the test looks at the wrong thing")
			}
			for line := range strings.Lines(string(text)) {
				if strings.Contains(line, "sk-literal") {
					t.Errorf("the log holds a key: %.2000s", line)
				}
			}
		})
	}
}
