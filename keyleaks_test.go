package openailb_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// repeats answers with all credentials of a request, wherever they may stand.
func repeats(code int) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		for _, name := range keys.CallerHeaders {
			w.Header().Add("X-Repeated", r.Header.Get(name))
		}
		w.Header().Set("Location", "https://elsewhere.example/?api-key="+keys.KeyIn(r.Header.Get("Authorization"))+r.Header.Get("Api-Key"))
		w.WriteHeader(code)
		fmt.Fprintf(w, `{"error":{"message":"not for %v"}}`, r.Header)
	}
}

// breaksOff begins a reply and resets the connection.
func breaksOff(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/event-stream")
	io.WriteString(w, lbtest.StreamContent)
	w.(http.Flusher).Flush()
	panic(http.ErrAbortHandler)
}

// TestNoKeyIsEverShown runs a balancer with every kind of credential and has
// everything happen to it that makes noise. What anybody gets to see, at the
// most talkative log level, holds none of them.
func TestNoKeyIsEverShown(t *testing.T) {
	for _, name := range []string{"A", "B", "D", "E", "ALICE"} {
		t.Setenv("OPENAI_LB_TEST_KEY_"+name, "secret-key-of-"+strings.ToLower(name))
	}
	t.Setenv("OPENAI_LB_ENV_1_PRIORITY", "5")
	t.Setenv("OPENAI_LB_ENV_1_APIKEY", "secret-key-of-f")
	dir := t.TempDir()
	keyFile, callersFile, logs := filepath.Join(dir, "key"), filepath.Join(dir, "callers"), filepath.Join(dir, "log")
	lbtest.WriteFile(t, keyFile, "secret-key-of-c\n")
	lbtest.WriteFile(t, callersFile, "bob secret-key-of-bob\n")
	names := []string{"a", "b", "c", "d", "e", "p", "f"}
	backends := make(map[string]*lbtest.Backend)
	var urls []any
	for _, name := range names {
		backend, server := lbtest.Listen(t, name)
		backends[name] = backend
		urls = append(urls, server.URL)
	}
	t.Setenv("OPENAI_LB_ENV_1_URL", urls[6].(string))
	port, admin := lbtest.FreePort(t), lbtest.FreePort(t)
	lbtest.Run(t, fmt.Sprintf(`{
		admin 127.0.0.1:%d
		default_bind 127.0.0.1
		debug
		metrics
		log {
			output file %s
			format openai_lb
		}
	}
	http://127.0.0.1:%d {
		log
		openai_lb {
			client_key alice {env.OPENAI_LB_TEST_KEY_ALICE}
			client_keys_file %s
			fail_duration 1ms
			retry_after_max 60ms
			backend %s {
				name a
				auth api_key
				api_key {env.OPENAI_LB_TEST_KEY_A}
			}
			backend %s {
				name b
				priority 2
				api_key {env.OPENAI_LB_TEST_KEY_B}
			}
			backend %s {
				name c
				priority 3
				api_key {file.%s}
			}
			backend %s {
				name d
				priority 4
				auth test {
					start {env.OPENAI_LB_TEST_KEY_D}
				}
			}
			backend %s {
				name e
				priority 5
				header Ocp-Apim-Subscription-Key {env.OPENAI_LB_TEST_KEY_E}
			}
			backend %s {
				name p
				priority 6
				auth passthrough
			}
			backends_from_env OPENAI_LB_ENV
		}
	}`, append([]any{admin, logs, port, callersFile, urls[0], urls[1], urls[2], keyFile}, urls[3:6]...)...))

	var shown bytes.Buffer
	client := lbtest.NewClient(t)
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	request := func(key string) {
		reply := lbtest.Ask(client, fmt.Sprintf("http://127.0.0.1:%d/v1/chat/completions?api-key=secret-own&x=1", port),
			"Api-Key", "secret-key-of-"+key, "Authorization", "Bearer secret-own", "Ocp-Apim-Subscription-Key", "secret-own",
			"Sec-WebSocket-Protocol", "realtime, openai-insecure-api-key.secret-own", "Referer", "https://x/?api-key=secret-own")
		fmt.Fprintln(&shown, reply.Status, reply.Header, reply.Body, reply.Err)
	}
	for _, caller := range []string{"alice", "bob", "nobody"} {
		request(caller)
	}
	for _, reply := range []http.HandlerFunc{repeats(302), repeats(400), repeats(401), repeats(403), repeats(429), repeats(500), repeats(404), breaksOff} {
		for _, b := range backends {
			b.Replies(reply)
		}
		request("alice")
		// those that are left, one after the other
		for _, name := range names {
			backends[name].Recovers()
			request("bob")
		}
	}
	// a client leaves while it waits for a backend
	impatient, leave := context.WithCancel(t.Context())
	defer leave()
	for _, b := range backends {
		b.Replies(func(_ http.ResponseWriter, r *http.Request) {
			leave()
			<-r.Context().Done()
		})
	}
	r, err := http.NewRequestWithContext(impatient, http.MethodPost, fmt.Sprintf("http://127.0.0.1:%d/v1/chat/completions?api-key=secret-own", port), strings.NewReader(`{}`))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("X-Api-Key", "secret-key-of-alice")
	r.Header.Set("Authorization", "Bearer secret-own")
	if _, err := client.Do(r); err == nil {
		t.Error("the client did not leave")
	}
	for _, path := range []string{"/config/", "/metrics", "/openai_lb/backends", "/openai_lb/callers", "/openai_lb/usage", "/openai_lb/replicas", "/openai_lb/problems"} {
		res, err := client.Get(fmt.Sprintf("http://127.0.0.1:%d%s", admin, path))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintln(&shown, path, res.StatusCode)
		io.Copy(&shown, res.Body)
		res.Body.Close()
	}
	if err := caddy.Stop(); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{logs, caddy.ConfigAutosavePath} {
		text := lbtest.ReadFile(t, file)
		shown.Write(text)
	}
	for _, want := range []string{
		"{env.OPENAI_LB_TEST_KEY_A}", "OPENAI_LB_ENV", `caddy_openai_lb_requests_total{backend="a",caller="alice",class="served",code="200",model="other",pool="openai_lb"}`, `class="unauthenticated"`,
		"not for map[", "****", "invalid_api_key", `"attempt"`, "handled request", `"caller":"bob"`,
		"cooldown started", "reply broken", "x=1", "openai-insecure-api-key.REDACTED", "credential", "499",
	} {
		if !bytes.Contains(shown.Bytes(), []byte(want)) {
			t.Errorf("%s was not shown: the test looks at the wrong things", want)
		}
	}
	for line := range strings.Lines(shown.String()) {
		if strings.Contains(line, "secret-") {
			t.Errorf("a secret is shown: %s", line)
		}
	}
	for _, name := range names {
		if len(backends[name].Received()) == 0 {
			t.Errorf("%s was never called", name)
		}
		for _, c := range backends[name].Received() {
			own := map[string]string{"a": "secret-key-of-a", "b": "Bearer secret-key-of-b", "c": "Bearer secret-key-of-c",
				"d": "Bearer secret-key-of-d", "e": "secret-key-of-e", "p": "Bearer secret-own", "f": "secret-key-of-f"}[name]
			got := c.Request.Header.Get("Api-Key") + c.Request.Header.Get("Authorization")
			if name == "e" {
				got += c.Request.Header.Get("Ocp-Apim-Subscription-Key")
			}
			if got != own && (name != "d" || got != "Bearer fresh") {
				t.Errorf("%s got %q, want %q", name, got, own)
			}
		}
	}
}

func TestABackendSeesItsOwnCredentialAndNoOther(t *testing.T) {
	lbtest.InBubble(t, `openai_lb {
		backend http://a {
			auth api_key
			api_key key-of-a
		}
		backend http://b {
			priority 2
			api_key key-of-b
			header OpenAI-Organization org-of-b
		}
		backend http://d {
			priority 3
		}
		backend http://c {
			priority 4
			auth passthrough
		}
	}`, func(t *testing.T, w *lbtest.World) {
		for _, b := range w.Backends {
			b.Replies(lbtest.Throttled("9"))
		}
		r := w.Request(http.MethodPost, "/v1/chat/completions?api-key=callers&x=%2F1&subscription-key=callers&API-KEY=callers", strings.NewReader(`{}`))
		for name, value := range map[string]string{
			"Authorization": "Bearer callers", "Api-Key": "callers", "X-Api-Key": "callers",
			"Ocp-Apim-Subscription-Key": "callers", "Cookie": "session=callers",
			"OpenAI-Organization": "callers", "OpenAI-Project": "callers",
			"X-Ms-Spillover-Deployment": "callers", "X-Ms-Service-Tier": "callers", "X-Forwarded-For": "callers", "X-Forwarded-Host": "callers",
			"Forwarded": "for=callers", "Via": "1.1 callers", "X-Real-Ip": "callers", "Referer": "callers",
			"Sec-Websocket-Protocol":  "realtime, openai-insecure-api-key.callers, openai-beta.realtime-v1",
			"X-Stainless-Retry-Count": "1",
		} {
			r.Header.Set(name, value)
		}
		if reply := w.Send(r); reply.Status != 429 || reply.Backend != "c" {
			t.Errorf("client got %d of %q, want c's 429: it is about the caller's own key", reply.Status, reply.Backend)
		}

		want := map[string]http.Header{
			"a": {"Api-Key": {"key-of-a"}},
			"b": {"Authorization": {"Bearer key-of-b"}, "Openai-Organization": {"org-of-b"}},
			"c": {"Authorization": {"Bearer callers"}, "Api-Key": {"callers"}, "X-Api-Key": {"callers"},
				"Ocp-Apim-Subscription-Key": {"callers"}, "Openai-Organization": {"callers"}, "Openai-Project": {"callers"}},
			"d": {},
		}
		for name, credentials := range want {
			got := w.Backends[name].Received()[0].Request
			for _, header := range append([]string{"Openai-Organization", "Openai-Project"}, keys.CallerHeaders...) {
				if g, w := got.Header.Get(header), credentials.Get(header); g != w {
					t.Errorf("%s got %s %q, want %q", name, header, g, w)
				}
			}
			for _, header := range []string{"X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Forwarded-Port",
				"Cookie", "Referer", "X-Ms-Spillover-Deployment", "X-Ms-Service-Tier", "X-Real-Ip", "Forwarded", "Via"} {
				if values := got.Header.Values(header); len(values) > 0 {
					t.Errorf("%s got %s %q", name, header, values)
				}
			}
			if name != "c" {
				if got.URL.RawQuery != "x=%2F1" {
					t.Errorf("%s got the query %q, want x=%%2F1", name, got.URL.RawQuery)
				}
				if p := got.Header.Get("Sec-WebSocket-Protocol"); p != "realtime, openai-beta.realtime-v1" {
					t.Errorf("%s got the subprotocols %q", name, p)
				}
			}
			if got.Header.Get("X-Stainless-Retry-Count") != "1" {
				t.Errorf("%s did not get the SDK's own headers", name)
			}
			if got.Host != name {
				t.Errorf("%s was addressed as %q", name, got.Host)
			}
		}
		if got := w.Backends["c"].Received()[0].Request.URL.Query().Get("api-key"); got != "callers" {
			t.Errorf("c got the caller's api-key parameter as %q", got)
		}
	})
}

// permutations calls yield with every order of the items.
func permutations(items []string, yield func([]string)) {
	var next func(n int)
	next = func(n int) {
		if n == len(items) {
			yield(items)
			return
		}
		for i := n; i < len(items); i++ {
			items[n], items[i] = items[i], items[n]
			next(n + 1)
			items[n], items[i] = items[i], items[n]
		}
	}
	next(0)
}

// TestInNoOrderDoesABackendSeeAnothersCredential sends one request through
// backends of every kind, in every order. From one that takes the caller's own
// credential, it goes on to no other.
func TestInNoOrderDoesABackendSeeAnothersCredential(t *testing.T) {
	options := map[string]string{
		"api-key":     "auth api_key\napi_key key-of-api-key",
		"bearer":      "auth bearer\napi_key key-of-bearer",
		"identity":    "auth test {\nstart key-of-identity\n}",
		"passthrough": "auth passthrough",
		"none":        "auth none",
	}
	own := map[string]http.Header{
		"api-key":     {"Api-Key": {"key-of-api-key"}},
		"bearer":      {"Authorization": {"Bearer key-of-bearer"}},
		"identity":    {"Authorization": {"Bearer key-of-identity"}},
		"passthrough": {"Authorization": {"Bearer key-of-caller"}, "Api-Key": {"key-of-caller"}},
		"none":        {},
	}
	orders := 0
	permutations([]string{"api-key", "bearer", "identity", "passthrough", "none"}, func(order []string) {
		orders++
		config := "openai_lb {\nclient_key alice client-key-of-alice\n"
		for i, name := range order {
			config += fmt.Sprintf("backend http://%s {\npriority %d\n%s\n}\n", name, i+1, options[name])
		}
		lbtest.InBubble(t, config+"}", func(t *testing.T, w *lbtest.World) {
			for _, b := range w.Backends {
				b.Replies(lbtest.Status(503))
			}
			r := w.Request(http.MethodPost, "/v1/chat/completions?x=1&api-key=key-of-caller&subscription-key=key-of-caller", strings.NewReader(`{}`))
			r.Header.Set("Authorization", "Bearer key-of-caller")
			r.Header.Set("Api-Key", "key-of-caller")
			r.Header.Set("X-Api-Key", "client-key-of-alice")
			r.Header.Set("Cookie", "key-of-caller")
			r.Header.Set("Sec-WebSocket-Protocol", "realtime, openai-insecure-api-key.key-of-caller")
			w.Send(r)
			reached := order[:slices.Index(order, "passthrough")+1]
			for _, name := range order {
				calls := w.Backends[name].Received()
				if want := slices.Contains(reached, name); want != (len(calls) == 1) {
					t.Errorf("in the order %v, %s was called %d times", order, name, len(calls))
				}
				for _, c := range calls {
					wantOnly(t, name, own[name], c.Request)
				}
			}
		})
	})
	if orders != 120 {
		t.Errorf("%d orders, want 120", orders)
	}
}

// wantOnly checks that a request has these credentials and no others, in
// headers, query and subprotocols.
func wantOnly(t *testing.T, name string, own http.Header, got *http.Request) {
	t.Helper()
	for header, values := range got.Header {
		if strings.Contains(fmt.Sprint(values), "key-of") && header != "Sec-Websocket-Protocol" && !slices.Equal(values, own[header]) {
			t.Errorf("%s got %s %q", name, header, values)
		}
	}
	for header, values := range own {
		if !slices.Equal(got.Header[header], values) {
			t.Errorf("%s got %s %q, want %q", name, header, got.Header[header], values)
		}
	}
	query, protocols := "x=1", "realtime"
	if name == "passthrough" {
		query += "&api-key=key-of-caller&subscription-key=key-of-caller"
		protocols += ", openai-insecure-api-key.key-of-caller"
	}
	if got.URL.RawQuery != query {
		t.Errorf("%s got the query %q, want %q", name, got.URL.RawQuery, query)
	}
	if p := got.Header.Values("Sec-WebSocket-Protocol"); !slices.Equal(p, []string{protocols}) {
		t.Errorf("%s got the subprotocols %q, want %q", name, p, protocols)
	}
}
