package openailb_test

import (
	"bytes"
	"fmt"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

const (
	aliceKey = "client-key-of-alice"
	ownKey   = "own-key-of-the-caller"
)

// keyedNames are headers and query parameters that hold keys for gateways, and
// the like of them.
var keyedNames = []string{
	"X-Portkey-Api-Key", "X-Goog-Api-Key", "X-Litellm-Api-Key", "Helicone-Auth", "Cf-Aig-Authorization", "X-Auth-Token",
	"Api_Key", "X-ApiKey", "X_Access_Token", "X-Client-Secret", "X-Amz-Credential", "X-User-Password", "X-Session-Cookie",
	"x-ms-oai-auth-token", "X-Stainless-Key", "openai_key", "KEY",
}

// TestAKeyGoesToNoBackendWhateverItsHeaderOrParameterIsCalled sends keys as the
// SDKs of gateways do, and as they might.
func TestAKeyGoesToNoBackendWhateverItsHeaderOrParameterIsCalled(t *testing.T) {
	for _, auth := range []string{"api_key " + lbtest.BackendKey, "auth api_key\napi_key " + lbtest.BackendKey, "auth none", "auth passthrough"} {
		t.Run(auth, func(t *testing.T) {
			lbtest.InBubble(t, "openai_lb {\nclient_key alice "+aliceKey+"\nbackend http://a {\n"+auth+"\n}\n}", func(t *testing.T, w *lbtest.World) {
				send := func(header http.Header, query string) *http.Request {
					t.Helper()
					r := w.Request(http.MethodPost, "/v1/chat/completions"+query, strings.NewReader(`{}`))
					for name, values := range header {
						r.Header[name] = values
					}
					r.Header.Set("Api-Key", aliceKey)
					r.Header.Set("Authorization", "Bearer "+ownKey)
					w.Backends["a"].Forget()
					w.Send(r).WantServed(t, "a")
					return w.Backends["a"].Received()[0].Request
				}
				for _, name := range keyedNames {
					for _, value := range []string{aliceKey, "Bearer " + aliceKey, "another-key-of-the-caller"} {
						// with passthrough, a key that is not the balancer's is
						// the backend's
						passes := auth == "auth passthrough" && !strings.Contains(value, aliceKey)
						got := send(http.Header{name: {value}}, "")
						if has := got.Header.Get(name) != ""; has != passes {
							t.Errorf("%s: %s: a got %v", name, value, got.Header)
						}
						query := "a=1&" + escapedAll(name, "%%%02x") + "=" + strings.ReplaceAll(value, " ", "+") + "&b=%20"
						got = send(nil, "?"+query)
						want := "a=1&b=%20"
						if passes {
							want = query
						}
						if got.URL.RawQuery != want {
							t.Errorf("%s: %s: a got the query %s, want %s", name, value, got.URL.RawQuery, want)
						}
					}
				}
				// whatever the name is, the client's key is one
				for _, value := range []string{aliceKey, "Bearer " + aliceKey, "bearer\t" + aliceKey} {
					got := send(http.Header{"X-Team": {value}, "X-Kept": {"kept"}, "Sec-Websocket-Protocol": {"realtime, " + aliceKey}}, "?team="+escapedAll(value, "%%%02x")+"&a=1")
					if text := fmt.Sprint(got.Header, got.URL); strings.Contains(text, aliceKey) || got.URL.RawQuery != "a=1" || got.Header.Get("X-Kept") != "kept" {
						t.Errorf("%s: a got %s", value, text)
					}
					if protocols := got.Header.Values("Sec-WebSocket-Protocol"); !slices.Equal(protocols, []string{"realtime"}) {
						t.Errorf("a got the subprotocols %q", protocols)
					}
				}
				got := send(http.Header{"X-Team": {ownKey}}, "?team="+ownKey)
				if strings.Contains(fmt.Sprint(got.Header["X-Team"]), ownKey) || auth != "auth passthrough" && strings.Contains(got.URL.RawQuery, ownKey) {
					t.Errorf("a got %v %s", got.Header, got.URL)
				}
			})
		})
	}
}

// TestHeadersOfSDKsPass sends what SDKs send besides keys.
func TestHeadersOfSDKsPass(t *testing.T) {
	sdk := http.Header{
		"Accept": {"application/json"}, "User-Agent": {"OpenAI/Python 2.8.1"}, "Idempotency-Key": {"stainless-node-retry-1"},
		"X-Stainless-Async": {"false"}, "X-Stainless-Runtime": {"CPython"}, "X-Stainless-Retry-Count": {"0"}, "X-Stainless-Helper-Method": {"stream"},
		"Openai-Beta": {"assistants=v2"}, "Anthropic-Version": {"2023-06-01"}, "X-Ms-Client-Request-Id": {"1"}, "X-Ms-Useragent": {"openai"},
		"X-Client-Request-Id": {"2"}, "X-Max-Tokens": {"5"}, "X-Author": {"me"}, "X-Keyboard": {"qwerty"}, "X-Monkey": {"chimp"}, "Session_id": {"3"},
		"Originator": {"codex_cli_rs"}, "Chatgpt-Account-Id": {"4"}, "Accept-Language": {"*"}, "X-Zip": {"12345"}, "X-Short": {"EMPTY"},
	}
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
		const query = "?api-version=2024-10-21&after=x&metadata%5Bkey%5D=y&keys=1&short=EMPTY"
		r := w.Request(http.MethodPost, "/v1/chat/completions"+query, strings.NewReader(`{}`))
		for name, values := range sdk {
			r.Header[name] = values
		}
		r.Header.Set("Authorization", "Bearer EMPTY") // what callers without a key send
		w.Send(r).WantServed(t, "a")
		got := w.Backends["a"].Received()[0].Request
		for name, values := range sdk {
			if !slices.Equal(got.Header[name], values) {
				t.Errorf("a got %s: %q, want %q", name, got.Header[name], values)
			}
		}
		if "?"+got.URL.RawQuery != query {
			t.Errorf("a got the query %s", got.URL.RawQuery)
		}
	})
}

func TestABackendIsNotToldTheCallersAddressOrAnotherMethod(t *testing.T) {
	names := []string{
		"X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Prefix", "X-Original-Forwarded-For", "X-Vercel-Forwarded-For", "Forwarded", "Via",
		"X-Real-Ip", "True-Client-Ip", "Cf-Connecting-Ip", "Cf-Connecting-Ipv6", "X-Client-Ip", "Client-Ip", "X-Cluster-Client-Ip", "Fastly-Client-Ip",
		"X-Azure-Clientip", "X-Azure-Socketip", "X-Remote-Addr", "X-Envoy-External-Address",
		"X-Http-Method-Override", "X-Http-Method", "X-Method-Override", "X-Original-Url", "X-Rewrite-Url", "X-Original-Host", "X-Host",
	}
	for _, auth := range []string{"auth none", "auth passthrough"} {
		lbtest.InBubble(t, "openai_lb {\nbackend http://a {\n"+auth+"\n}\n}", func(t *testing.T, w *lbtest.World) {
			r := w.RequestWithKey(ownKey)
			for _, name := range names {
				r.Header.Set(name, "192.0.2.1")
			}
			w.Send(r).WantServed(t, "a")
			for name, values := range w.Backends["a"].Received()[0].Request.Header {
				if slices.Contains(values, "192.0.2.1") {
					t.Errorf("with %s, a got %s %q", auth, name, values)
				}
			}
		})
	}
}

func TestAnOperatorsOwnHeadersPassWhateverTheirNames(t *testing.T) {
	lbtest.InBubble(t, `openai_lb {
		backend http://a {
			header Cf-Aig-Authorization "Bearer gateway"
			header X-Client-Ip 192.0.2.1
			header Cookie a=b
			header X-Gateway-Token gateway
		}
	}`, func(t *testing.T, w *lbtest.World) {
		r := w.RequestWithKey(ownKey)
		r.Header.Set("Cf-Aig-Authorization", "Bearer callers")
		r.Header.Set("X-Gateway-Token", "callers")
		w.Send(r).WantServed(t, "a")
		got := w.Backends["a"].Received()[0].Request.Header
		for name, want := range map[string]string{"Cf-Aig-Authorization": "Bearer gateway", "X-Client-Ip": "192.0.2.1", "Cookie": "a=b", "X-Gateway-Token": "gateway"} {
			if values := got.Values(name); !slices.Equal(values, []string{want}) {
				t.Errorf("a got %s %q, want %q", name, values, want)
			}
		}
	})
}

func TestAnOperatorsOwnKeyIsNotLoggedWithAReplyThatBreaksOff(t *testing.T) {
	_, server := lbtest.Listen(t, "a")
	server.Config.Handler = http.HandlerFunc(breaksOff)
	logs := filepath.Join(t.TempDir(), "log")
	site := "http://" + lbtest.ServeAt(t, `openai_lb {
		backend `+server.URL+` {
			header X-Gateway-Token secret-of-the-gateway
		}
	}`, "log {\noutput file "+logs+"\n}")
	client := lbtest.NewClient(t)
	for _, headers := range [][]string{nil, {"Connection", "Upgrade", "Upgrade", "websocket", "Sec-WebSocket-Version", "13", "Sec-WebSocket-Key", "AAAAAAAAAAAAAAAAAAAAAA=="}} {
		if reply := lbtest.Get(client, site+"/v1/other", headers...); reply.Err == nil {
			t.Errorf("the reply is %+v, although it broke off", reply)
		}
	}
	if err := caddy.Stop(); err != nil {
		t.Fatal(err)
	}
	text := lbtest.ReadFile(t, logs)
	if lines := bytes.Count(text, []byte("reply broken")); lines != 2 {
		t.Errorf("%d replies broke off in the log, want 2", lines)
	}
	if bytes.Contains(text, []byte("secret-")) {
		t.Errorf("the key is logged:\n%s", text)
	}
}
