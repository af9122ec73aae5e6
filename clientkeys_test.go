package openailb_test

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func hexDigest(key string) string {
	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:])
}

// waysToSend are where SDKs and browsers put a key.
var waysToSend = map[string]func(r *http.Request, key string){
	"Authorization":           func(r *http.Request, key string) { r.Header.Set("Authorization", "Bearer "+key) },
	"authorization, lower":    func(r *http.Request, key string) { r.Header.Set("Authorization", "bearer  "+key) },
	"api-key":                 func(r *http.Request, key string) { r.Header.Set("api-key", key) },
	"x-api-key":               func(r *http.Request, key string) { r.Header.Set("x-api-key", key) },
	"the subscription header": func(r *http.Request, key string) { r.Header.Set("Ocp-Apim-Subscription-Key", key) },
	"the query": func(r *http.Request, key string) {
		r.URL.RawQuery = "api-version=1&api-key=" + url.QueryEscape(key)
	},
	"the realtime subprotocol": func(r *http.Request, key string) {
		r.Header.Set("Sec-WebSocket-Protocol", "realtime, openai-insecure-api-key."+key+", openai-beta.realtime-v1")
	},
}

func TestOnlyCallersWithAKeyGetIn(t *testing.T) {
	t.Setenv("OPENAI_LB_TEST_KEY", " client-key-of-bob\n")
	file := filepath.Join(t.TempDir(), "keys")
	lbtest.WriteFile(t, file, "\xef\xbb\xbf# callers\n\n  carol\tclient-key-of-carol\r\ndave sha256:"+strings.ToUpper(hexDigest("client-key-of-dave"))+"\n")
	lbtest.InBubble(t, `openai_lb {
		backend http://a
		client_key alice client-key-of-alice
		client_key alice another-of-alice
		client_key bob {env.OPENAI_LB_TEST_KEY}
		client_key erin sha256:`+hexDigest("client-key-of-erin")+`
		client_keys_file `+file+`
	}`, func(t *testing.T, w *lbtest.World) {
		for _, caller := range []string{"alice", "bob", "carol", "dave", "erin"} {
			for way, send := range waysToSend {
				r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{}`))
				send(r, "client-key-of-"+caller)
				if reply := w.Send(r); reply.Status != 200 {
					t.Errorf("%s with the key in %s got %d %s", caller, way, reply.Status, reply.Body)
				}
			}
		}
		served := len(w.Backends["a"].Received())
		for way, send := range waysToSend {
			for _, key := range []string{"wrong", "client-key-of-alicf", "client-key-of-alice-and-more", "sha256:" + hexDigest("client-key-of-erin"), "client-key-of-", "alice"} {
				r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{}`))
				send(r, key)
				reply := w.Send(r)
				if reply.Status != 401 || !strings.Contains(reply.Body, `"code":"invalid_api_key"`) || !strings.Contains(reply.Body, "Incorrect API key") {
					t.Errorf("%s in %s got %d %s", key, way, reply.Status, reply.Body)
				}
				if strings.Contains(reply.Body, key) && key != "client-key-of-" {
					t.Errorf("the answer holds the key: %s", reply.Body)
				}
			}
		}
		reply := w.Post(`{}`)
		if reply.Status != 401 || !strings.Contains(reply.Body, "did not provide an API key") || reply.Header.Get("Www-Authenticate") != "Bearer" {
			t.Errorf("without a key: %d %v %s", reply.Status, reply.Header, reply.Body)
		}
		w.WantCalls(map[string]int{"a": served})
		for _, c := range w.Backends["a"].Received() {
			text := fmt.Sprint(c.Request.Header, c.Request.URL)
			if strings.Contains(text, "key-of") {
				t.Errorf("a got a client key: %s", text)
			}
		}
	})
}

// counted is how many requests metrics tell of.
func counted(t *testing.T, caller, backend, class string) float64 {
	t.Helper()
	return lbtest.SumOf(t, "requests_total", map[string]string{"caller": caller, "backend": backend, "class": class})
}

func TestACallersNameGoesToLogsAndMetricsAndItsKeyNowhere(t *testing.T) {
	lbtest.InBubble(t, `openai_lb {
		backend http://a
		client_key alice client-key-of-alice
	}`, func(t *testing.T, w *lbtest.World) {
		before := counted(t, "alice", "a", "served")
		refused := counted(t, "", "", "unauthenticated")
		w.Send(w.RequestWithKey("client-key-of-alice")).WantServed(t, "a")
		w.Send(w.RequestWithKey("client-key-of-mallory"))
		if n := counted(t, "alice", "a", "served"); n != before+1 {
			t.Errorf("alice's requests went from %v to %v", before, n)
		}
		if n := counted(t, "", "", "unauthenticated"); n != refused+1 {
			t.Errorf("refused requests went from %v to %v", refused, n)
		}
		attempts := w.Logged("attempt")
		if len(attempts) != 1 || attempts[0].ContextMap()["caller"] != "alice" {
			t.Errorf("attempts are logged as %v", attempts)
		}
		for _, entry := range w.Logs.All() {
			if text := fmt.Sprint(entry.Message, entry.ContextMap()); strings.Contains(text, "client-key-of") {
				t.Errorf("a key is logged: %s", text)
			}
		}
		for _, call := range w.Backends["a"].Received() {
			if text := fmt.Sprint(call.Request.Header, call.Request.URL); strings.Contains(text, "client-key-of") {
				t.Errorf("a got the key: %s", text)
			}
		}
	})
}

func TestAClientKeyIsNotTheCallersOwnCredential(t *testing.T) {
	lbtest.InBubble(t, `openai_lb {
		backend http://a {
			auth passthrough
		}
		backend http://b {
			priority 2
		}
		client_key alice client-key-of-alice
	}`, func(t *testing.T, w *lbtest.World) {
		for way, send := range waysToSend {
			r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{}`))
			send(r, "client-key-of-alice")
			if reply := w.Send(r); reply.Backend != "b" {
				t.Errorf("with no more than a client key in %s: served by %q", way, reply.Backend)
			}
		}
		r := w.RequestWithKey("alices-own")
		r.Header.Set("api-key", "client-key-of-alice")
		r.Header.Set("Sec-WebSocket-Protocol", "realtime, openai-insecure-api-key.client-key-of-alice")
		r.Header.Set("OpenAI-Organization", "client-key-of-alice")
		r.Header.Set("OpenAI-Project", "proj_of_alice")
		w.Send(r).WantServed(t, "a")
		got := w.Backends["a"].Received()[0].Request
		if text := fmt.Sprint(got.Header, got.URL); strings.Contains(text, "client-key-of-alice") || got.Header.Get("Authorization") != "Bearer alices-own" || got.Header.Get("OpenAI-Project") != "proj_of_alice" {
			t.Errorf("a got %s", text)
		}
		if p := got.Header.Get("Sec-WebSocket-Protocol"); p != "realtime" {
			t.Errorf("a got the subprotocols %q", p)
		}
	})
}

func TestACallersKeysDoNotGetAroundTheirPlaces(t *testing.T) {
	config := "openai_lb {\nclient_key alice client-key-of-alice\nbackend http://a {\n%s\n}\n}"
	for _, auth := range []string{"auth passthrough", "api_key " + lbtest.BackendKey} {
		lbtest.InBubble(t, fmt.Sprintf(config, auth), func(t *testing.T, w *lbtest.World) {
			for query, protocols := range map[string]string{
				"api-key=own-key&api-key=client-key-of-alice":          "realtime",
				"api-key=&Api%2DKey=client-key-of-alice":               "realtime, OpenAI-Insecure-Api-Key.client-key-of-alice",
				"subscription-key=client-key-of-alice&x=1&api-key=own": "openai-insecure-api-key.own-key, openai-insecure-api-key.client-key-of-alice",
			} {
				r := w.Request(http.MethodPost, "/v1/chat/completions?"+query, io.MultiReader(strings.NewReader(`{}`)))
				r.Header["Authorization"] = []string{"Bearer own-key", "bearer\tclient-key-of-alice", "Basic cGFzc3dvcmQ6b2YtY2FkZHk="}
				r.Header["Api-Key"] = []string{"client-key-of-alice", " client-key-of-alice "}
				r.Header.Set("Sec-WebSocket-Protocol", protocols)
				r.Trailer = http.Header{"Authorization": {"Bearer client-key-of-alice"}, "Api-Key": {"own-key"}, "Cookie": {"c=1"}}
				w.Send(r).WantServed(t, "a")
			}
			for _, c := range w.Backends["a"].Received() {
				text := fmt.Sprint(c.Request.Header, c.Request.URL, c.Request.Trailer)
				if strings.Contains(text, "client-key-of-alice") || strings.Contains(text, "Basic") || len(c.Request.Trailer) > 0 {
					t.Errorf("with %s, a got %s", auth, text)
				}
				if auth != "auth passthrough" && strings.Contains(text, "own") {
					t.Errorf("with %s, a got %s", auth, text)
				}
			}
		})
	}
}

func TestAClientKeysFileIsReadAgainWhenItChanges(t *testing.T) {
	file := filepath.Join(t.TempDir(), "keys")
	lbtest.WriteFile(t, file, "alice first-key-of-a-caller\n")
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\nclient_keys_file "+file+"\n}", func(t *testing.T, w *lbtest.World) {
		w.Send(w.RequestWithKey("first-key-of-a-caller")).WantServed(t, "a")
		for _, c := range []struct{ text, key, out string }{
			{"alice first-key-of-a-caller\nbob second-key-of-a-caller\n", "second-key-of-a-caller", "third-key-of-a-caller"},
			{"bob third-key-of-a-caller\n", "third-key-of-a-caller", "second-key-of-a-caller"},
			{"bob third-key-of-a-caller\na line-that-is-broken now\n", "third-key-of-a-caller", "line-that-is-broken"},
			{"josé\xe9 fourth-key-of-a-caller\nbob third-key-of-a-caller\n", "third-key-of-a-caller", "fourth-key-of-a-caller"},
			{"bob fourth-key-of-a-caller\n", "fourth-key-of-a-caller", "third-key-of-a-caller"},
		} {
			lbtest.WriteFile(t, file, c.text)
			time.Sleep(keys.ReloadInterval)
			w.Send(w.RequestWithKey(c.key)).WantServed(t, "a")
			w.Send(w.RequestWithKey(c.out)).WantError(t, 401, "invalid_api_key")
		}
		for _, emptied := range []string{"# bob fourth-key-of-a-caller\n", ""} {
			lbtest.WriteFile(t, file, "bob fourth-key-of-a-caller\n")
			time.Sleep(keys.ReloadInterval)
			w.Send(w.RequestWithKey("fourth-key-of-a-caller")).WantServed(t, "a")
			lbtest.WriteFile(t, file, emptied)
			time.Sleep(keys.ReloadInterval)
			w.Send(w.RequestWithKey("fourth-key-of-a-caller")) // an empty file counts once it has not changed for a second
			time.Sleep(keys.ReloadInterval)
			if reply := w.Send(w.RequestWithKey("fourth-key-of-a-caller")); reply.Status != 401 {
				t.Errorf("with the file %q, a key that was there got %d", emptied, reply.Status)
			}
		}
	})
}

func TestWrongClientKeysAreRefusedWithoutTheKey(t *testing.T) {
	dir := t.TempDir()
	file := func(text string) string {
		path := filepath.Join(dir, hexDigest(text))
		lbtest.WriteFile(t, path, text)
		return path
	}
	t.Setenv("OPENAI_LB_TEST_SECRET", "sk-secret\nand more")
	for _, c := range []struct {
		name, line string
		want       []string
	}{
		{"no key", "client_key sk-secret", []string{"Caddyfile:4", "a name and a key", "1 argument"}},
		{"something more", "client_key x sk-secret y", []string{"Caddyfile:4", "3 arguments"}},
		{"an empty name", "client_key \"\" sk-secret", []string{"1 to 64 bytes"}},
		{"a long name", "client_key " + strings.Repeat("x", 65) + " sk-secret", []string{"1 to 64 bytes, found 65"}},
		{"a key of two lines", "client_key x {env.OPENAI_LB_TEST_SECRET}", []string{`client_key "x"`, "white space"}},
		{"a key from nowhere", "client_key x {env.OPENAI_LB_TEST_UNSET}", []string{`client_key "x"`, "OPENAI_LB_TEST_UNSET"}},
		{"a digest that is none", "client_key x sha256:sk-secret", []string{`client_key "x"`, "64 hexadecimal digits"}},
		{"a key of two callers", "client_key x sk-secret-of-both\nclient_key y sha256:" + hexDigest("sk-secret-of-both"), []string{`client_key "y"`, `also the key of "x"`}},
		{"no such file", "client_keys_file /nowhere", []string{"client_keys_file", "/nowhere"}},
		{"a name that cannot be printed", "client_keys_file " + file("x\x07 sk-secret\n"), []string{"line 1", "printable"}},
		{"a placeholder without its end", "client_key x {env.OPENAI_LB_TEST_SECRET", []string{`client_key "x"`, "unpaired brace"}},
		{"a key from no file", "client_key x {file./nowhere}", []string{`client_key "x"`, "/nowhere: no such file"}},
		{"a line with a key alone", "client_keys_file " + file("x y\n\nsk-secret\n"), []string{"line 3", "expected a name, a key and at most tier=<name> and a date like expires=2027-01-31"}},
		{"a date that is none", "client_keys_file " + file("x sk-secret-of-bobs expires=2027-02-30\n"), []string{"line 1", "a date like expires=2027-01-31"}},
		{"a tier of a line where there are none", "client_keys_file " + file("x sk-secret-of-bobs-key expires=2099-01-01 tier=gold\n"), []string{"line 1: its tier is not declared: expected 'tier <name>' in openai_lb"}},
		{"another word after a key", "client_keys_file " + file("x sk-secret-of-bobs sk-secret\n"), []string{"line 1", "a date like expires=2027-01-31"}},
		{"a file given twice", "client_keys_file a\nclient_keys_file b", []string{"Caddyfile:5", "given twice"}},
	} {
		err := lbtest.ValidateCaddyfile(t, ":0 {\nopenai_lb {\nbackend http://a\n"+c.line+"\n}\n}\n")
		if err == nil {
			t.Errorf("%s: it was accepted", c.name)
			continue
		}
		for _, want := range c.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: the error is %q, want it to say %q", c.name, err, want)
			}
		}
		if strings.Contains(err.Error(), "sk-secret") {
			t.Errorf("%s: the error holds the key: %v", c.name, err)
		}
	}
}

func TestKeysOfDifferentCallersInOneRequestAreRefused(t *testing.T) {
	lbtest.InBubble(t, `openai_lb {
		backend http://a
		client_key bob key-of-bob-0123456789
		client_key bob another-of-bob-0123456789
		client_key eve key-of-eve-0123456789
	}`, func(t *testing.T, w *lbtest.World) {
		type place struct {
			name string
			put  func(r *http.Request, key string)
		}
		places := []place{
			{"a second line", func(r *http.Request, key string) { r.Header.Add("X-Api-Key", key) }},
			{"the query again", func(r *http.Request, key string) { r.URL.RawQuery += "&api-key=" + key }},
		}
		for name, send := range waysToSend {
			places = append(places, place{name, send})
		}
		for _, first := range places {
			for _, second := range places {
				ask := func(of, also string) lbtest.Reply {
					r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{}`))
					first.put(r, of)
					second.put(r, also)
					if !strings.Contains(fmt.Sprint(r.Header, r.URL), of) {
						return lbtest.Reply{} // the second one took its place
					}
					return w.Send(r)
				}
				if reply := ask("key-of-bob-0123456789", "key-of-eve-0123456789"); reply.Status != 0 {
					reply.WantError(t, 401, "invalid_api_key")
					if !strings.Contains(reply.Body, "different callers") || strings.Contains(reply.Body, "bob") || strings.Contains(reply.Body, "eve") {
						t.Errorf("in %s and %s: %s", first.name, second.name, reply.Body)
					}
				}
				if reply := ask("key-of-bob-0123456789", "another-of-bob-0123456789"); reply.Status != 0 {
					reply.WantServed(t, "a")
				}
				if reply := ask("key-of-bob-0123456789", "unknown-key-0123456789"); reply.Status != 0 {
					reply.WantServed(t, "a")
				}
			}
		}
	})
}

func TestAPublicSiteWithoutClientKeysIsWarnedOf(t *testing.T) {
	const lb = "openai_lb {\nbackend http://127.0.0.1:1 {\napi_key k\n}\n}\n"
	for name, c := range map[string]struct {
		addresses, directives string
		want                  bool
	}{
		"a public name":                 {"llm.example.com", lb, true},
		"one with a log and limits":     {"llm.example.com", "log\nencode gzip\n@large not path */files\nrequest_body @large {\nmax_size 1MB\n}\n" + lb, true},
		"one in a handle":               {"llm.example.com", "handle /v1/* {\n" + lb + "}\nhandle {\nrespond 404\n}\n", true},
		"one with a page beside it":     {"llm.example.com", "respond /healthz OK\nreverse_proxy /app/* 127.0.0.1:1\nopenai_lb_status /status\n" + lb, true},
		"one that closes connections":   {"llm.example.com", "@stopping vars {http.shutting_down} true\nheader @stopping Connection close\n" + lb, true},
		"one with a local name":         {"localhost, llm.example.com", lb, true},
		"one of any name":               {"*.example.com", lb, true},
		"a name that is not public":     {"llm.internal, localhost, 10.0.0.1", lb, false},
		"names of an own network":       {"llm, llm.lan, llm.corp, llm.test", lb, false},
		"a public name in capitals":     {"LLM.Example.COM", lb, true},
		"no name":                       {"", lb, false},
		"a listener that is not public": {"llm.example.com", "bind 127.0.0.1\n" + lb, false},
		"client keys":                   {"llm.example.com", strings.Replace(lb, "backend", "client_key alice client-key-of-alice\nbackend", 1), false},
		"keys of the callers' own":      {"llm.example.com", strings.Replace(lb, "api_key k", "auth passthrough", 1), false},
		"no key of a backend":           {"llm.example.com", strings.Replace(lb, "api_key k", "", 1), false},
		"a key in a header":             {"llm.example.com", strings.Replace(lb, "api_key k", "header X-Token k", 1), true},
		"passwords":                     {"llm.example.com", "basic_auth {\nbob $2a$14$Zkx19XLiW6VYouLHR5NmfOFU0z2GTNmpkT/5qqR7hx4IjWJPDhjvG\n}\n" + lb, false},
		"another service that checks":   {"llm.example.com", "forward_auth 127.0.0.1:1 {\nuri /check\n}\n" + lb, false},
		"networks that are refused":     {"llm.example.com", "@outside not client_ip 203.0.113.0/24\nrespond @outside 403\n" + lb, false},
		"networks that are let in":      {"llm.example.com", "@inside remote_ip 203.0.113.0/24\nhandle @inside {\n" + lb + "}\n", false},
		"a header that is checked":      {"llm.example.com", "@wrong not header X-Secret {env.SECRET}\nhandle @wrong {\nrespond 401\n}\n" + lb, false},
		"paths of one network":          {"llm.example.com", "@inside {\npath /v1/*\nremote_ip private_ranges\n}\n" + strings.Replace(lb, "openai_lb", "openai_lb @inside", 1), false},
		"passwords of another site":     {"other.example.com:PORT {\nbasic_auth {\nbob $2a$14$Zkx19XLiW6VYouLHR5NmfOFU0z2GTNmpkT/5qqR7hx4IjWJPDhjvG\n}\n}\nhttp://llm.example.com", lb, true},
	} {
		log := filepath.Join(t.TempDir(), "log")
		const port = "0"
		addresses := "http://" + strings.ReplaceAll(c.addresses, ", ", ":"+port+", http://")
		addresses = strings.ReplaceAll(strings.Replace(addresses, "http://http://", "http://", 1), "PORT", port)
		lbtest.Run(t, "{\nadmin off\nauto_https off\nlog {\noutput file "+log+"\n}\n}\n"+addresses+":"+port+" {\n"+c.directives+"}\n")
		text, err := os.ReadFile(log)
		if got := strings.Contains(string(text), "anyone who can reach the site can spend your budget"); err != nil || got != c.want {
			t.Errorf("%s: a warning: %v, want %v, %v\n%s", name, got, c.want, err, text)
		}
		if c.want && !strings.Contains(string(text), `"sites":["`) {
			t.Errorf("%s: no site is named", name)
		}
	}
}
