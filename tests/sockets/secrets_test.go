package sockets

import (
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// TestARealtimeSessionGoesWhereItsModelIs under the name that the model has
// there.
func TestARealtimeSessionGoesWhereItsModelIs(t *testing.T) {
	lbtest.InBubble(t, keyed("backend http://a {\nmodel gpt-5\n}\nbackend http://b {\npriority 2\nmodel gpt-realtime realtime-in-b\n}"), func(t *testing.T, w *lbtest.World) {
		var got string
		w.AllReply(func(rw http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			got = string(body)
			lbtest.Says(200, "{}")(rw, r)
		})
		const form = "--x\r\nContent-Disposition: form-data; name=\"session\"\r\n\r\n{\"model\":\"gpt-realtime\"}\r\n--x--\r\n"
		for _, c := range []struct{ path, kind, body string }{
			{"/v1/realtime/client_secrets", "application/json", `{"session":{"type":"realtime","model":"gpt-realtime"}}`},
			{"/v1/realtime/translations/client_secrets", "application/json", `{"session":{"model":"gpt-realtime"}}`},
			{"/v1/realtime/calls", "multipart/form-data; boundary=x", form},
			{"/openai/v1/realtime/client_secrets", "application/json", `{"session":{"model":"gpt-realtime"}}`},
		} {
			r := w.Request("POST", c.path, strings.NewReader(c.body))
			r.Header.Set("Authorization", "Bearer "+aliceKey)
			r.Header.Set("Content-Type", c.kind)
			w.Send(r).WantServed(t, "b")
			if want := strings.Replace(c.body, `"gpt-realtime"`, `"realtime-in-b"`, 1); got != want {
				t.Errorf("%s: the backend got %s, want %s", c.path, got, want)
			}
			r = w.Request("POST", c.path, strings.NewReader(strings.Replace(c.body, "gpt-realtime", "gpt-unknown", 1)))
			r.Header.Set("Authorization", "Bearer "+aliceKey)
			r.Header.Set("Content-Type", c.kind)
			w.Send(r).WantError(t, 404, "model_not_found")
		}
	})
}

const ek = "ek_68f0c1d2e3f405162738495a6b7c8d9e"

// secretPool are two accounts, of which b makes the client secret of aliceKey,
// for ten minutes.
func secretPool(t *testing.T, config string, test func(t *testing.T, w *lbtest.World)) {
	t.Helper()
	lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Throttled("1"))
		w.Backends["b"].Replies(lbtest.Says(200, fmt.Sprintf(`{"value":"%s","expires_at":%d,"session":{"id":"sess_68f0c1d2","model":"gpt-realtime"}}`, ek, time.Now().Add(10*time.Minute).Unix())))
		made := post(w, "/v1/realtime/client_secrets", `{"session":{"type":"realtime","model":"gpt-realtime"}}`, aliceKey)
		if made.WantServed(t, "b"); !strings.Contains(made.Body, ek) {
			t.Fatalf("the client got %s", made.Body)
		}
		time.Sleep(2 * time.Second)
		for _, b := range w.Backends {
			b.Replies(func(rw http.ResponseWriter, r *http.Request) {
				if r.Method == http.MethodGet {
					speaks(realtime(70, 50))(rw, r)
					return
				}
				lbtest.Says(200, "{}")(rw, r)
			})
			b.Forget()
		}
		test(t, w)
		time.Sleep(time.Minute)
	})
}

const secretBackends = "backend http://a {\napi_key key-of-backend-a\n}\nbackend http://b {\npriority 2\napi_key key-of-backend-b\n}\n"

func post(w *lbtest.World, path, body, key string) lbtest.Reply {
	r := w.Request("POST", path, strings.NewReader(body))
	r.Header.Set("Authorization", "Bearer "+key)
	if strings.HasPrefix(body, "v=0") {
		r.Header.Set("Content-Type", "application/sdp")
	}
	return w.Send(r)
}

// TestAClientSecretBeginsASessionAtItsAccount and in the place of the backend's
// key. Without client keys, it does, too.
func TestAClientSecretBeginsASessionAtItsAccount(t *testing.T) {
	for name, config := range map[string]string{"with client keys": keyed(secretBackends), "without": "openai_lb {\npool " + lbtest.Unique("sockets") + "\n" + secretBackends + "}"} {
		t.Run(name, func(t *testing.T) {
			secretPool(t, config, func(t *testing.T, w *lbtest.World) {
				for range 2 {
					c := dial(t, w, "/v1/realtime", ek)
					c.say(`{"type":"response.create"}`)
					c.wantServed("a") // as the backend's function calls it
					c.Close()
					post(w, "/v1/realtime/calls", "v=0\r\n", ek).WantServed(t, "b")
				}
				r := w.Request("GET", "/v1/realtime?model=gpt-realtime", nil)
				r.Header = http.Header{"Connection": {"Upgrade"}, "Upgrade": {"websocket"}, "Sec-Websocket-Version": {"13"}, "Sec-Websocket-Key": {"dGhlIHNhbXBsZSBub25jZQ=="},
					"Sec-Websocket-Protocol": {"realtime, openai-insecure-api-key." + ek}}
				res, err := w.Client.Transport.RoundTrip(r)
				if err != nil || res.StatusCode != 101 {
					t.Fatalf("a browser gets %v %v", res, err)
				}
				res.Body.Close()
				w.WantCalls(map[string]int{"a": 0, "b": 5})
				for _, call := range w.Backends["b"].Received() {
					if got := call.Request.Header.Get("Authorization"); got != "Bearer "+ek || call.Request.Header.Get("Api-Key") != "" || strings.Contains(fmt.Sprint(call.Request.Header["Sec-Websocket-Protocol"]), ek) {
						t.Errorf("the backend got %v", call.Request.Header)
					}
				}
			})
		})
	}
}

// TestAClientSecretIsGoodForNothingElse and neither is one that was not made
// here.
func TestAClientSecretIsGoodForNothingElse(t *testing.T) {
	secretPool(t, keyed(secretBackends), func(t *testing.T, w *lbtest.World) {
		for _, path := range []string{"/v1/chat/completions", "/v1/responses", "/v1/files", "/v1/realtime/client_secrets", "/v1/realtime/calls/rtc_12345678/hangup", "/v1/realtime", "/v1/Realtime/calls", "/v1/agents"} {
			post(w, path, `{"model":"gpt-realtime"}`, ek).WantError(t, 401, "invalid_api_key")
		}
		for _, path := range []string{"/v1/responses", "/v1/realtime/calls", "/v1/live", "/v1/realtime/calls/rtc_12345678"} {
			if c, res := handshake(t, w, path, ek); c != nil || res.StatusCode != 401 {
				t.Errorf("a WebSocket of %s opens", path)
			}
		}
		other := ek[:len(ek)-1] + "f"
		post(w, "/v1/realtime/calls", "v=0\r\n", other).WantError(t, 401, "invalid_api_key")
		if c, res := handshake(t, w, "/v1/realtime", other); c != nil || res.StatusCode != 401 {
			t.Error("a WebSocket opens with a secret that nobody knows")
		}
		w.WantCalls(map[string]int{"a": 0, "b": 0})
		time.Sleep(10 * time.Minute) // it expires
		post(w, "/v1/realtime/calls", "v=0\r\n", ek).WantError(t, 401, "invalid_api_key")
		w.WantCalls(map[string]int{"a": 0, "b": 0})
	})
}

// TestAClientSecretIsItsCallers whose limits and models apply.
func TestAClientSecretIsItsCallers(t *testing.T) {
	options := "caller alice {\nrequests 3/hour\nmodels gpt-realtime\n}\n"
	secretPool(t, keyed(secretBackends+options), func(t *testing.T, w *lbtest.World) {
		post(w, "/v1/realtime/calls", "v=0\r\n", ek).WantServed(t, "b")
		if c, res := handshake(t, w, "/v1/realtime?model=gpt-5", ek); c != nil || res.StatusCode != 404 {
			t.Error("a session of another model opens")
		}
		post(w, "/v1/realtime/calls", `{"session":{"model":"gpt-5"}}`, ek).WantError(t, 404, "model_not_found")
		post(w, "/v1/realtime/calls", "v=0\r\n", ek).WantServed(t, "b")
		if got := post(w, "/v1/realtime/calls", "v=0\r\n", ek); got.Status != 429 {
			t.Errorf("the fourth request of alice gets %d %s", got.Status, got.Body)
		}
		if u := of(w, "bob"); u.Today != 0 {
			t.Errorf("bob has used %+v", u)
		}
	})
}

// TestAClientSecretEndsWithItsKey and not with another key of the same caller.
// So does a session that has begun with it.
func TestAClientSecretEndsWithItsKey(t *testing.T) {
	const otherKey = "sk-alice-another-one"
	for name, c := range map[string]struct {
		before, after string
		wait          time.Duration
		code          string
	}{
		"a revoked key":     {"alice " + aliceKey, "", time.Second, "invalid_api_key"},
		"a key that moves":  {"alice " + aliceKey, "carol " + aliceKey, time.Second, "invalid_api_key"},
		"a key of two":      {"alice " + aliceKey + "\nalice " + otherKey, "alice " + otherKey, time.Second, "invalid_api_key"},
		"an expired key":    {"alice " + aliceKey, "alice " + aliceKey + " expires=1999-01-01", time.Second, "invalid_api_key"},
		"a key that stays":  {"alice " + aliceKey, "alice " + aliceKey + "\nalice " + otherKey, time.Second, ""},
		"what has no limit": {"alice " + aliceKey, "alice " + aliceKey, 5 * time.Minute, ""},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "keys")
			write := func(lines string) { lbtest.WriteFile(t, file, "bob "+bobKey+"\n"+lines+"\n") }
			write(c.before)
			secretPool(t, "openai_lb {\npool "+lbtest.Unique("sockets")+"\nclient_keys_file "+file+"\n"+secretBackends+"}", func(t *testing.T, w *lbtest.World) {
				s := dial(t, w, "/v1/realtime", ek)
				s.say(`{"type":"response.create"}`)
				s.wantServed("a")
				write(c.after)
				time.Sleep(c.wait)
				s.say(`{"type":"response.create"}`)
				got := post(w, "/v1/realtime/calls", "v=0\r\n", ek)
				if c.code == "" {
					s.wantServed("a")
					got.WantServed(t, "b")
				} else {
					if e := s.hears(); e.Type != "error" {
						t.Errorf("the client got %s", e.raw)
					}
					got.WantError(t, 401, c.code)
				}
				s.Close()
			})
		})
	}
}

// TestABackendsRefusalOfAClientSecretSaysNothingOfItsKey checks that the
// refusal starts no cooldown, and is passed on to the client.
func TestABackendsRefusalOfAClientSecretSaysNothingOfItsKey(t *testing.T) {
	secretPool(t, keyed(secretBackends), func(t *testing.T, w *lbtest.World) {
		w.AllReply(lbtest.Says(401, `{"error":{"message":"The client secret `+ek+` has expired.","code":"invalid_api_key"}}`))
		before := len(w.Logged("cooldown started"))
		got := post(w, "/v1/realtime/calls", "v=0\r\n", ek)
		if got.Status != 401 || strings.Contains(got.Body, ek) || len(w.Logged("cooldown started")) != before {
			t.Errorf("the client got %d %s", got.Status, got.Body)
		}
		if c, res := handshake(t, w, "/v1/realtime", ek); c != nil || res.StatusCode != 401 {
			t.Errorf("the handshake gives %d", res.StatusCode)
		}
		w.WantCalls(map[string]int{"a": 0, "b": 2})
		if len(w.Logged("cooldown started")) != before {
			t.Error("the refusal started a cooldown")
		}
	})
}

// TestNoLogHasAClientSecret whether it is used well, refused, or shown by a
// backend.
func TestNoLogHasAClientSecret(t *testing.T) {
	secretPool(t, keyed(secretBackends), func(t *testing.T, w *lbtest.World) {
		dial(t, w, "/v1/realtime", ek).Close()
		post(w, "/v1/files", "{}", ek).WantError(t, 401, "invalid_api_key")
		w.AllReply(lbtest.Says(500, `{"error":{"message":"no `+ek+`","code":"`+ek+`"}}`))
		post(w, "/v1/realtime/calls", "v=0\r\n", ek)
		time.Sleep(time.Second)
		synctest.Wait()
		for _, entry := range w.Logs.All() {
			if text := fmt.Sprint(entry.Message, entry.ContextMap()); strings.Contains(text, ek) {
				t.Errorf("the log says %s", text)
			}
		}
	})
}

// TestAClientSecretOutlivesAReload unless the new config denies its caller, or
// has another key.
func TestAClientSecretOutlivesAReload(t *testing.T) {
	a, server := lbtest.Listen(t, "a")
	a.Replies(lbtest.Says(200, fmt.Sprintf(`{"value":"%s","expires_at":%d}`, ek, time.Now().Add(time.Hour).Unix())))
	address := fmt.Sprintf("127.0.0.1:%d", lbtest.FreePort(t))
	pool := lbtest.Unique("sockets")
	config := func(key, caller string) string {
		return "{\nadmin off\ndefault_bind 127.0.0.1\n}\nhttp://" + address + " {\nopenai_lb {\npool " + pool + "\nclient_key alice " + key +
			"\nbackend " + server.URL + "\n" + caller + "\n}\n}"
	}
	lbtest.Run(t, config(aliceKey, ""))
	client := lbtest.NewClient(t)
	url := "http://" + address + "/v1/realtime/"
	lbtest.Post(client, url+"client_secrets", "{}", "Authorization", "Bearer "+aliceKey).WantServed(t, "a")
	calls := func() lbtest.Reply {
		// a reload closes the connections of clients, perhaps just now
		return lbtest.Post(lbtest.NewClient(t), url+"calls", "v=0\r\n", "Authorization", "Bearer "+ek, "Content-Type", "application/sdp")
	}
	calls().WantServed(t, "a")
	lbtest.Reload(t, config(aliceKey, "timezone Europe/Berlin"))
	calls().WantServed(t, "a")
	lbtest.Reload(t, config(aliceKey, "caller alice deny"))
	calls().WantError(t, 403, "permission_denied")
	lbtest.Reload(t, config("sk-alice-another-one", ""))
	calls().WantError(t, 401, "invalid_api_key")
}
