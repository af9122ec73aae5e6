package openailb

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
)

// repeats answers with all credentials of a request, wherever they may stand.
func repeats(code int) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		for _, name := range keyHeaders {
			w.Header().Add("X-Repeated", r.Header.Get(name))
		}
		w.Header().Set("Location", "https://elsewhere.example/?api-key="+keyIn(r.Header.Get("Authorization"))+r.Header.Get("Api-Key"))
		w.WriteHeader(code)
		fmt.Fprintf(w, `{"error":{"message":"not for %v"}}`, r.Header)
	}
}

// breaksOff begins a reply and resets the connection.
func breaksOff(w http.ResponseWriter, _ *http.Request) {
	io.WriteString(w, `{"id":`)
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
	writeFile(t, keyFile, "secret-key-of-c\n")
	writeFile(t, callersFile, "bob secret-key-of-bob\n")
	names := []string{"a", "b", "c", "d", "e", "p", "f"}
	backends := make(map[string]*fakeBackend)
	var urls []any
	for _, name := range names {
		backend, server := listen(t, name)
		backends[name] = backend
		urls = append(urls, server.URL)
	}
	t.Setenv("OPENAI_LB_ENV_1_URL", urls[6].(string))
	port, admin := freePort(t), freePort(t)
	run(t, fmt.Sprintf(`{
		admin 127.0.0.1:%d
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
			retry_after_default 60ms
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
	client := newClient(t)
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	request := func(key string) {
		reply := ask(client, fmt.Sprintf("http://127.0.0.1:%d/v1/chat/completions?api-key=secret-own&x=1", port),
			"Api-Key", "secret-key-of-"+key, "Authorization", "Bearer secret-own", "Ocp-Apim-Subscription-Key", "secret-own",
			"Sec-WebSocket-Protocol", "realtime, openai-insecure-api-key.secret-own", "Referer", "https://x/?api-key=secret-own")
		fmt.Fprintln(&shown, reply.status, reply.header, reply.body, reply.err)
	}
	for _, caller := range []string{"alice", "bob", "nobody"} {
		request(caller)
	}
	for _, reply := range []http.HandlerFunc{repeats(302), repeats(400), repeats(401), repeats(403), repeats(429), repeats(500), repeats(404), breaksOff} {
		for _, b := range backends {
			b.replies(reply)
		}
		request("alice")
		// those that are left, one after the other
		for _, name := range names {
			backends[name].recovers()
			request("bob")
		}
	}
	backends["a"].replies(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	for _, name := range names[1:] {
		backends[name].replies(backends["a"].reply)
	}
	impatient, leave := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer leave()
	r, err := http.NewRequestWithContext(impatient, http.MethodPost, fmt.Sprintf("http://127.0.0.1:%d/?api-key=secret-own", port), strings.NewReader(`{}`))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("X-Api-Key", "secret-key-of-alice")
	r.Header.Set("Authorization", "Bearer secret-own")
	if _, err := client.Do(r); err == nil {
		t.Error("the client did not leave")
	}
	for _, path := range []string{"/config/", "/metrics", "/reverse_proxy/upstreams"} {
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
		text, err := os.ReadFile(file)
		if err != nil && file == logs {
			t.Fatal(err)
		}
		shown.Write(text)
	}
	for _, want := range []string{
		"{env.OPENAI_LB_TEST_KEY_A}", "OPENAI_LB_ENV", `caddy_openai_lb_requests_total{backend="a",caller="alice",class="served"}`, `class="unauthenticated"`,
		"not for map[", "****", "invalid_api_key", `"attempt"`, "upstream roundtrip", "handled request", `"caller":"bob"`,
		"backend benched", "reply broken", "x=1", "openai-insecure-api-key.REDACTED", "credential", "499",
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
		if len(backends[name].received()) == 0 {
			t.Errorf("%s was never called", name)
		}
		for _, c := range backends[name].received() {
			own := map[string]string{"a": "secret-key-of-a", "b": "Bearer secret-key-of-b", "c": "Bearer secret-key-of-c",
				"d": "Bearer secret-key-of-d", "e": "secret-key-of-e", "p": "Bearer secret-own", "f": "secret-key-of-f"}[name]
			got := c.request.Header.Get("Api-Key") + c.request.Header.Get("Authorization")
			if name == "e" {
				got += c.request.Header.Get("Ocp-Apim-Subscription-Key")
			}
			if got != own && (name != "d" || got != "Bearer fresh") {
				t.Errorf("%s got %q, want %q", name, got, own)
			}
		}
	}
}
