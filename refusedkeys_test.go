package openailb

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap/zapcore"
)

const backendKey = "sk-key-of-the-backend"

// overBothVersions runs a test with a client of HTTP/1.1 and one of HTTP/2.
func overBothVersions(t *testing.T, config string, test func(*testing.T, *world)) {
	t.Helper()
	t.Run("HTTP/1.1", func(t *testing.T) { inBubble(t, config, test) })
	t.Run("HTTP/2", func(t *testing.T) {
		inBubble(t, config, func(t *testing.T, w *world) {
			w.useHTTP2()
			test(t, w)
		})
	})
}

func zipped(text string) []byte {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	io.WriteString(z, text)
	z.Close()
	return b.Bytes()
}

func TestAKeyOfStarsEndsNothing(t *testing.T) {
	inBubble(t, "openai_lb {\nbackend http://a {\nauth passthrough\n}\n}", func(t *testing.T, w *world) {
		w.backends["a"].replies(func(rw http.ResponseWriter, _ *http.Request) {
			rw.WriteHeader(401)
			io.WriteString(rw, `{"error":{"message":"Incorrect API key provided: sk-****************mnop."}}`)
		})
		if reply := w.send(w.requestWithKey("********")); reply.status != 401 || !strings.Contains(reply.body, "mnop") {
			t.Errorf("client got %d %s (%v)", reply.status, reply.body, reply.err)
		}
	})
}

func TestInterimRepliesAndTrailersGiveNoKeyAway(t *testing.T) {
	overBothVersions(t, "openai_lb {\nbackend http://a {\napi_key "+backendKey+"\n}\n}", func(t *testing.T, w *world) {
		w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) {
			rw.Header().Set("Link", "</x?key="+keyIn(r.Header.Get("Authorization"))+">")
			rw.Header().Set("Set-Cookie", "a=b")
			rw.WriteHeader(http.StatusEarlyHints)
			rw.Header().Del("Link")
			rw.Header().Set("Trailer", "X-Debug, X-Sum")
			rw.WriteHeader(400)
			io.WriteString(rw, `{"error":{"message":"no"}}`)
			rw.Header().Set("X-Debug", r.Header.Get("Authorization"))
			rw.Header().Set("X-Sum", "abc")
		})
		var interim []string
		r := w.request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{}`))
		r = r.WithContext(httptrace.WithClientTrace(r.Context(), &httptrace.ClientTrace{
			Got1xxResponse: func(code int, header textproto.MIMEHeader) error {
				interim = append(interim, fmt.Sprint(code, header))
				return nil
			},
		}))
		res, err := w.client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		io.Copy(io.Discard, res.Body)
		if len(interim) != 1 || interim[0] != "103 map[]" {
			t.Errorf("client got the interim replies %q", interim)
		}
		if got := fmt.Sprint(res.Trailer); strings.Contains(got, backendKey) || res.Trailer.Get("X-Sum") != "abc" {
			t.Errorf("client got the trailers %s", got)
		}
	})
}

func TestACompressedErrorGivesNoKeyAway(t *testing.T) {
	long := "<html>" + strings.Repeat("<p>a page of a gateway</p>", 3000) + "authorization: Bearer " + backendKey
	for name, c := range map[string]struct {
		coding string
		body   []byte
	}{
		"gzip":                     {"gzip", zipped("no good: " + backendKey)},
		"gzip, the key at its end": {"gzip", zipped(long)},
		"a coding not asked for":   {"br", []byte("no good: " + backendKey)},
		"two codings":              {"gzip, gzip", zipped(string(zipped(backendKey)))},
		"gzip that is none":        {"gzip", []byte(backendKey)},
	} {
		inBubble(t, "openai_lb {\nbackend http://a {\napi_key "+backendKey+"\n}\n}", func(t *testing.T, w *world) {
			w.backends["a"].replies(func(rw http.ResponseWriter, _ *http.Request) {
				rw.Header().Set("Content-Encoding", c.coding)
				rw.WriteHeader(400)
				rw.Write(c.body)
			})
			r := w.request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{}`))
			r.Header.Set("Accept-Encoding", "br;q=1.0, gzip;q=0.8, *;q=0.1, zstd")
			reply := w.send(r)
			if reply.status != 400 || !strings.Contains(reply.body, "upstream_error") || strings.Contains(reply.body, backendKey) {
				t.Errorf("%s: client got %d %q", name, reply.status, reply.body)
			}
			if got := w.backends["a"].received()[0].request.Header.Get("Accept-Encoding"); got != "gzip;q=0.8" {
				t.Errorf("a was told that %q is accepted", got)
			}
		})
	}
}

func TestACompressedThrottleThatRepeatsItsKeyIsHeeded(t *testing.T) {
	inBubble(t, "openai_lb {\nbackend http://a {\napi_key "+backendKey+"\n}\nbackend http://b {\npriority 2\n}\n}", func(t *testing.T, w *world) {
		w.backends["a"].replies(func(rw http.ResponseWriter, _ *http.Request) {
			rw.Header().Set("Content-Encoding", "gzip")
			rw.Header().Set("Retry-After", "60")
			rw.WriteHeader(429)
			rw.Write(zipped("rate limit for " + backendKey))
		})
		w.post(`{}`).wantServed(t, "b")
		if got := w.logged("backend benched")[0].ContextMap()["seconds"]; got != 60.0 {
			t.Errorf("a rests %v s, want 60", got)
		}
	})
}

func TestAGatewaysKeyInAHeaderIsASecretToo(t *testing.T) {
	t.Setenv("OPENAI_LB_TEST_GATEWAY", "gateway-secret-123")
	inBubble(t, "openai_lb {\nbackend http://a {\nheader Cf-Aig-Authorization \"Bearer {env.OPENAI_LB_TEST_GATEWAY}\"\nheader X-Team harmless-name\n}\n}", func(t *testing.T, w *world) {
		w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) {
			rw.Header().Set("X-Echo", r.Header.Get("Cf-Aig-Authorization"))
			rw.WriteHeader(400)
			fmt.Fprintf(rw, "bad %s of %s", r.Header.Get("Cf-Aig-Authorization"), r.Header.Get("X-Team"))
		})
		reply := w.post(`{}`)
		if strings.Contains(fmt.Sprint(reply), "gateway-secret") || !strings.Contains(reply.body, "harmless-name") {
			t.Errorf("client got %v", reply)
		}
	})
}

func TestACallersKeysDoNotGetAroundTheirPlaces(t *testing.T) {
	config := "openai_lb {\nclient_key alice key-of-alice\nbackend http://a {\n%s\n}\n}"
	for _, auth := range []string{"auth passthrough", "api_key " + backendKey} {
		inBubble(t, fmt.Sprintf(config, auth), func(t *testing.T, w *world) {
			for query, protocols := range map[string]string{
				"api-key=own-key&api-key=key-of-alice":          "realtime",
				"api-key=&Api%2DKey=key-of-alice":               "realtime, OpenAI-Insecure-Api-Key.key-of-alice",
				"subscription-key=key-of-alice&x=1&api-key=own": "openai-insecure-api-key.own-key, openai-insecure-api-key.key-of-alice",
			} {
				r := w.request(http.MethodPost, "/v1/chat/completions?"+query, io.MultiReader(strings.NewReader(`{}`)))
				r.Header["Authorization"] = []string{"Bearer own-key", "bearer\tkey-of-alice", "Basic cGFzc3dvcmQ6b2YtY2FkZHk="}
				r.Header["Api-Key"] = []string{"key-of-alice", " key-of-alice "}
				r.Header.Set("Sec-WebSocket-Protocol", protocols)
				r.Trailer = http.Header{"Authorization": {"Bearer key-of-alice"}, "Api-Key": {"own-key"}, "Cookie": {"c=1"}}
				w.send(r).wantServed(t, "a")
			}
			for _, c := range w.backends["a"].received() {
				text := fmt.Sprint(c.request.Header, c.request.URL, c.request.Trailer)
				if strings.Contains(text, "key-of-alice") || strings.Contains(text, "Basic") || len(c.request.Trailer) > 0 {
					t.Errorf("with %s, a got %s", auth, text)
				}
				if auth != "auth passthrough" && strings.Contains(text, "own") {
					t.Errorf("with %s, a got %s", auth, text)
				}
			}
		})
	}
}

func TestWhatIsNotPermittedBenchesForInferenceOnly(t *testing.T) {
	for _, code := range []int{401, 403} {
		for _, body := range []string{
			`{"error":{"message":"You have insufficient permissions for this operation. Missing scopes: api.fine_tuning.jobs.read.","type":"invalid_request_error","param":null,"code":"missing_scope"}}`,
			`{"error":{"code":"PermissionDenied","message":"The principal lacks the required data action Microsoft.CognitiveServices/accounts/OpenAI/fine-tunes/write to perform this operation."}}`,
			`{"error":{"message":"You have insufficient permissions for this operation.","type":"invalid_request_error","param":null,"code":null}}`,
		} {
			inBubble(t, "openai_lb {\nbackend http://a\nbackend http://b {\npriority 2\n}\n}", func(t *testing.T, w *world) {
				for _, b := range w.backends {
					b.replies(func(rw http.ResponseWriter, _ *http.Request) {
						rw.WriteHeader(code)
						io.WriteString(rw, body)
					})
				}
				jobs := func() clientReply {
					return w.send(w.request(http.MethodPost, "/v1/fine_tuning/jobs", strings.NewReader(`{"model":"gpt-4o"}`)))
				}
				jobs().wantError(t, 502, "upstream_credentials_rejected")
				w.wantCalls(map[string]int{"a": 1, "b": 1})
				if n := len(w.logged("backend benched")); n > 0 {
					t.Errorf("%d %s: %d benches for an operation of its own", code, body, n)
				}
				w.backends["b"].recovers()
				jobs().wantServed(t, "b")
				w.wantCalls(map[string]int{"a": 2, "b": 2})

				// a role that lacks inference is for a person to mend
				for range 5 {
					w.post(`{"model":"gpt-4o"}`).wantServed(t, "b")
				}
				w.wantCalls(map[string]int{"a": 3, "b": 7})
				benches := w.logged("backend benched")
				if len(benches) != 1 || benches[0].Level != zapcore.ErrorLevel || benches[0].ContextMap()["model"] != "gpt-4o" {
					t.Errorf("%d %s: benches %v", code, body, benches)
				}
			})
		}
	}
}

func TestAnEmptyCompressedReplyPasses(t *testing.T) {
	for code, method := range map[int]string{304: http.MethodGet, 307: http.MethodPost, 404: http.MethodHead, 400: http.MethodPost} {
		overBothVersions(t, "openai_lb {\nbackend http://a {\napi_key "+backendKey+"\n}\n}", func(t *testing.T, w *world) {
			w.client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
			w.backends["a"].replies(func(rw http.ResponseWriter, _ *http.Request) {
				rw.Header().Set("Content-Encoding", "gzip")
				rw.Header().Set("Location", "/elsewhere")
				rw.Header().Set("Etag", `"1"`)
				rw.WriteHeader(code)
			})
			r := w.request(method, "/v1/files/f/content", http.NoBody)
			r.Header.Set("Accept-Encoding", "gzip")
			reply := w.send(r)
			if reply.err != nil || reply.status != code || reply.body != "" || reply.header.Get("Etag") != `"1"` || reply.header.Get("Location") != "/elsewhere" {
				t.Errorf("a %d to %s came as %+v", code, method, reply)
			}
		})
	}
}

// TestAnEarlyRefusalThatIsTheCallersComesWhole has a backend refuse a body that
// it goes on to read. Over HTTP/1.1, the server would take no more of it.
func TestAnEarlyRefusalThatIsTheCallersComesWhole(t *testing.T) {
	for _, config := range []string{
		"openai_lb {\nrequest_buffers 100k\nbackend http://a {\nauth passthrough\n}\n}",
		"openai_lb {\nrequest_buffers 100k\nunhealthy_status 429\nbackend http://a {\napi_key " + backendKey + "\n}\n}",
	} {
		inBubble(t, config, func(t *testing.T, w *world) {
			w.useHTTP2()
			w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) {
				control := http.NewResponseController(rw)
				if err := control.EnableFullDuplex(); err != nil {
					t.Error(err)
				}
				rw.WriteHeader(401)
				io.WriteString(rw, strings.Repeat("x", 70_000))
				control.Flush()
				time.Sleep(time.Second)
				n, err := io.Copy(io.Discard, r.Body)
				fmt.Fprintf(rw, "got %d %v", n, err)
			})
			r := w.request(http.MethodPost, "/v1/files", io.MultiReader(strings.NewReader(strings.Repeat("y", 200_000))))
			r.Header.Set("X-Early", "a")
			r.Header.Set("Authorization", "Bearer callers")
			reply := w.send(r)
			if got := strings.TrimLeft(reply.body, "x"); reply.err != nil || reply.status != 401 || got != "got 200000 <nil>" {
				t.Errorf("client got %d with %d bytes that end with %q (%v)", reply.status, len(reply.body), got, reply.err)
			}
		})
	}
}

func TestAHeaderOfNoSecretIsNoSecret(t *testing.T) {
	t.Setenv("OPENAI_LB_TEST_HOST", "contoso.openai.azure.com")
	inBubble(t, "openai_lb {\nbackend http://a {\nheader Host {env.OPENAI_LB_TEST_HOST}\n}\n}", func(t *testing.T, w *world) {
		const location = "https://contoso.openai.azure.com/openai/operations/1"
		w.backends["a"].replies(func(rw http.ResponseWriter, _ *http.Request) {
			rw.Header().Set("Operation-Location", location)
			rw.WriteHeader(202)
		})
		if got := w.post(`{}`).header.Get("Operation-Location"); got != location {
			t.Errorf("client got Operation-Location %q", got)
		}
	})
}

func TestARequestRefusedEverywhereBenchesOneBackend(t *testing.T) {
	inBubble(t, "openai_lb {\nbackend http://a\nbackend http://b {\npriority 2\n}\nbackend http://c {\npriority 3\n}\n}", func(t *testing.T, w *world) {
		for _, b := range w.backends {
			b.replies(status(401))
		}
		w.post(`{}`).wantError(t, 502, "upstream_credentials_rejected")
		if n := len(w.logged("backend benched")); n != 1 {
			t.Errorf("%d benches, want 1", n)
		}
		if usable, _ := w.handler.pool.usable(time.Now()); !usable {
			t.Error("no backend is usable any more")
		}
	})
}

func TestALateRefusalOfAnOldKeySaysNothingOfTheNew(t *testing.T) {
	for _, code := range []int{401, 402, 403, 429, 500} {
		file := filepath.Join(t.TempDir(), "key")
		writeFile(t, file, "first-key")
		inBubble(t, "openai_lb {\nbackend http://a {\napi_key {file."+file+"}\n}\n}", func(t *testing.T, w *world) {
			release := make(chan struct{})
			w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) {
				if r.Header.Get("Authorization") == "Bearer first-key" {
					<-release
					status(code)(rw, r)
					return
				}
				wantsKey("second-key")(rw, r)
			})
			done := make(chan clientReply)
			go func() { done <- w.post(`{}`) }()
			time.Sleep(2 * secretFilesInterval)
			writeFile(t, file, "second-key")
			w.post(`{}`).wantServed(t, "a")
			close(release)
			<-done
			if n := len(w.logged("backend benched")); n > 0 {
				t.Errorf("a late %d for the old key benched the new one", code)
			}
			w.post(`{}`).wantServed(t, "a")
		})
	}
}

func TestAKeyIsRenewedWhateverUnhealthyStatusSays(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	writeFile(t, file, "first-key")
	inBubble(t, "openai_lb {\nunhealthy_status 429 5xx\nbackend http://a {\napi_key {file."+file+"}\n}\n}", func(t *testing.T, w *world) {
		w.backends["a"].replies(wantsKey("first-key"))
		w.post(`{}`).wantServed(t, "a")
		writeFile(t, file, "second-key")
		w.backends["a"].replies(wantsKey("second-key"))
		w.post(`{}`).wantServed(t, "a")
	})
}

func TestAPlainReverseProxyPassesInterimRepliesAsTheyAre(t *testing.T) {
	a, backend := listen(t, "a")
	a.replies(func(rw http.ResponseWriter, _ *http.Request) {
		rw.Header().Set("Link", "</style.css>; rel=preload")
		rw.WriteHeader(http.StatusEarlyHints)
	})
	address := serveAt(t, "reverse_proxy "+backend.Listener.Addr().String()+" {\nlb_policy openai_lb\ntransport openai_lb\n}")
	var links []string
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{
		Got1xxResponse: func(_ int, header textproto.MIMEHeader) error {
			links = append(links, header.Get("Link"))
			return nil
		},
	})
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	res, err := newClient(t).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if len(links) != 1 || links[0] != "</style.css>; rel=preload" {
		t.Errorf("client got the links %q", links)
	}
}
