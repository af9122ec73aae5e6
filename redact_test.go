package openailb_test

import (
	"compress/gzip"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// echo answers with the request's credentials in every place there is.
func echo(code int, encoding string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		key := r.Header.Get("Authorization")
		w.Header().Set("X-Debug", key)
		w.Header().Add("X-Many", "harmless")
		w.Header().Add("X-Many", key)
		w.Header().Set("Location", "https://elsewhere.example/?api-key="+keys.KeyIn(key))
		w.Header().Set("X-Request-Id", "req-1")
		w.Header().Set("Content-Type", "application/json")
		text := fmt.Sprintf(`{"error":{"message":"no good: %s","code":"x"}}`, key)
		if encoding == "" {
			w.Header().Set("Content-Length", fmt.Sprint(len(text)))
			w.WriteHeader(code)
			io.WriteString(w, text)
			return
		}
		w.Header().Set("Content-Encoding", encoding)
		w.WriteHeader(code)
		z := gzip.NewWriter(w)
		io.WriteString(z, text)
		z.Close()
	}
}

func TestABackendThatRepeatsItsKeyDoesNotGiveItAway(t *testing.T) {
	const key = "sk-key-of-the-backend"
	for _, code := range []int{200, 302, 307, 400, 401, 404, 418, 422, 429, 500, 503} {
		for _, encoding := range []string{"", "gzip"} {
			if code < 300 && encoding != "" {
				continue
			}
			lbtest.InBubble(t, "openai_lb {\nbackend http://a {\napi_key "+key+"\n}\n}", func(t *testing.T, w *lbtest.World) {
				w.Client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
				w.Backends["a"].Replies(echo(code, encoding))
				r := w.Request(http.MethodGet, "/v1/responses/1", http.NoBody)
				r.Header.Set("Accept-Encoding", "gzip")
				reply := w.Send(r)
				body := reply.Body
				if z, err := gzip.NewReader(strings.NewReader(body)); err == nil {
					text, _ := io.ReadAll(z)
					body = string(text)
				}
				if code >= 300 && strings.Contains(body, key) || strings.Contains(fmt.Sprint(reply.Header), key) {
					t.Errorf("%d %s: client got %v %s", code, encoding, reply.Header, body)
				}
				if reply.Err != nil || code != 401 && reply.Status != code {
					t.Errorf("%d %s: client got %d (%v)", code, encoding, reply.Status, reply.Err)
				}
				if code == 400 && encoding == "" && (reply.Header.Get("X-Request-Id") != "req-1" || !strings.Contains(body, `no good: Bearer *****`)) {
					t.Errorf("a 400 came as %v %s", reply.Header, body)
				}
				if text := fmt.Sprint(w.Logs.All()); strings.Contains(text, key) {
					t.Errorf("%d: the log holds the key: %s", code, text)
				}
			})
		}
	}
}

func TestABackendThatSpeaksNoHTTPDoesNotGetItsKeyIntoTheLog(t *testing.T) {
	const key = "sk-key-of-the-backend"
	lbtest.InBubble(t, "openai_lb {\nbackend http://a {\napi_key "+key+"\n}\n}", func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Raw("HTTP/1.1 " + key + "\r\n\r\n"))
		if reply := w.Post(`{}`); reply.Status != 502 || strings.Contains(reply.Body, key) {
			t.Errorf("client got %d %s", reply.Status, reply.Body)
		}
		attempts := w.Logged("attempt")
		if len(attempts) != 1 || !strings.HasSuffix(fmt.Sprint(attempts[0].ContextMap()["error"]), "malformed HTTP status code") {
			t.Errorf("logged %v, want the error", attempts)
		}
		if text := fmt.Sprint(w.Logs.All()); strings.Contains(text, key) {
			t.Errorf("the log holds the key: %s", text)
		}
	})
}

// TestSurplusOfABackendDoesNotGetItsKeyIntoTheLog has backends send more than
// their reply: with it, and later.
func TestSurplusOfABackendDoesNotGetItsKeyIntoTheLog(t *testing.T) {
	const reply = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
	for _, pause := range []time.Duration{0, time.Second} {
		var logged strings.Builder
		before := log.Writer()
		lbtest.InBubble(t, "openai_lb {\nbackend http://a {\napi_key "+lbtest.BackendKey+"\n}\n}", func(t *testing.T, w *lbtest.World) {
			log.SetOutput(&logged) // as Caddy does at any load
			w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
				conn, _, err := http.NewResponseController(rw).Hijack()
				if err != nil {
					t.Error(err)
					return
				}
				defer conn.Close()
				io.WriteString(conn, reply)
				time.Sleep(pause)
				io.WriteString(conn, "Authorization: "+r.Header.Get("Authorization"))
				time.Sleep(time.Second)
			})
			if reply := w.Post(`{}`); reply.Status != 200 || reply.Body != "{}" {
				t.Errorf("client got %d %s (%v)", reply.Status, reply.Body, reply.Err)
			}
			time.Sleep(3 * time.Second)
		})
		log.SetOutput(before) // nothing is written any more
		if text := logged.String(); strings.Contains(text, lbtest.BackendKey) || !strings.Contains(text, "Unsolicited") {
			t.Errorf("the surplus comes after %s, and Go logs %q", pause, text)
		}
	}
}

// TestAnEchoIsHiddenAsItsReaderDecodesIt has backends repeat their key as
// encoders of JSON and HTML write it.
func TestAnEchoIsHiddenAsItsReaderDecodesIt(t *testing.T) {
	const key = "sk-key/of+the&backend"
	for name, encoded := range map[string]string{
		"PHP": `sk-key\/of+the&backend`, ".NET": `sk-key/of\u002Bthe\u0026backend`, "HTML": `sk-key/of&#43;the&amp;backend`, "HTML in .NET": `sk-key/of\u0026#x2B;the\u0026amp;backend`,
		"all of it": `\u0073\u006b\u002d\u006b\u0065\u0079\u002f\u006f\u0066\u002b\u0074\u0068\u0065\u0026\u0062\u0061\u0063\u006b\u0065\u006e\u0064`,
	} {
		failure := `{"error":{"message":"no good: ` + encoded + `","code":"` + encoded + `"}}`
		event := "data: " + failure + "\n\n"
		half := strings.Index(event, encoded) + 8
		for kind, reply := range map[string]http.HandlerFunc{
			"an error":             lbtest.Says(400, failure),
			"a failure":            lbtest.Says(500, failure),
			"a compressed error":   lbtest.Says(400, lbtest.Gzipped(failure), "Content-Encoding", "gzip"),
			"an error in a 200":    lbtest.Says(200, failure, "Content-Type", "application/json"),
			"a header":             lbtest.Says(400, "{}", "X-Debug", encoded),
			"an error of a stream": lbtest.Streams(lbtest.StreamContent, event[:half], time.Second, event[half:], lbtest.StreamEnd),
			"a stream's beginning": lbtest.Streams(event[:half], time.Second, event[half:], lbtest.StreamEnd),
		} {
			lbtest.InBubble(t, "openai_lb {\nbackend http://a {\napi_key "+key+"\n}\n}", func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(reply)
				r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{"stream":true}`))
				r.Header.Set("Accept-Encoding", "gzip")
				got := w.Send(r)
				if text := fmt.Sprint(got.Header, got.Body, w.Logs.All()); strings.Contains(text, encoded) || strings.Contains(text, key) {
					t.Errorf("%s in %s: client got %v %s", name, kind, got.Header, got.Body)
				}
			})
		}
	}
}

func TestAKeyOfStarsEndsNothing(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a {\nauth passthrough\n}\n}", func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(func(rw http.ResponseWriter, _ *http.Request) {
			rw.WriteHeader(401)
			io.WriteString(rw, `{"error":{"message":"Incorrect API key provided: sk-****************mnop."}}`)
		})
		if reply := w.Send(w.RequestWithKey("********")); reply.Status != 401 || !strings.Contains(reply.Body, "mnop") {
			t.Errorf("client got %d %s (%v)", reply.Status, reply.Body, reply.Err)
		}
	})
}

func TestInterimRepliesAndTrailersGiveNoKeyAway(t *testing.T) {
	for _, status := range []int{400, 500} { // of which the last one is kept until no other backend is left
		testInterimRepliesAndTrailers(t, status)
	}
}

func testInterimRepliesAndTrailers(t *testing.T, status int) {
	lbtest.OverBothVersions(t, "openai_lb {\nbackend http://a {\napi_key "+lbtest.BackendKey+"\n}\n}", func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			rw.Header().Set("Link", "</x?key="+keys.KeyIn(r.Header.Get("Authorization"))+">")
			rw.Header().Set("Set-Cookie", "a=b")
			rw.WriteHeader(http.StatusEarlyHints)
			rw.Header().Del("Link")
			rw.Header().Set("Trailer", "X-Debug, X-Sum")
			rw.Header().Set("Content-Type", "application/json")
			rw.WriteHeader(status)
			io.WriteString(rw, `{"error":{"message":"no"}}`)
			rw.Header().Set("X-Debug", r.Header.Get("Authorization"))
			rw.Header().Set("X-Sum", "abc")
		})
		var interim []string
		r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{}`))
		r = r.WithContext(httptrace.WithClientTrace(r.Context(), &httptrace.ClientTrace{
			Got1xxResponse: func(code int, header textproto.MIMEHeader) error {
				interim = append(interim, fmt.Sprint(code, header))
				return nil
			},
		}))
		res := lbtest.Do(t, w.Client, r)
		io.Copy(io.Discard, res.Body)
		if len(interim) != 1 || interim[0] != "103 map[]" {
			t.Errorf("client got the interim replies %q", interim)
		}
		if got := fmt.Sprint(res.Trailer); strings.Contains(got, lbtest.BackendKey) || res.Trailer.Get("X-Sum") != "abc" {
			t.Errorf("client got the trailers %s", got)
		}
	})
}

func TestACompressedErrorGivesNoKeyAway(t *testing.T) {
	long := "<html>" + strings.Repeat("<p>a page of a gateway</p>", 3000) + "authorization: Bearer " + lbtest.BackendKey
	for name, c := range map[string]struct {
		coding string
		body   string
	}{
		"gzip":                     {"gzip", lbtest.Gzipped("no good: " + lbtest.BackendKey)},
		"gzip, the key at its end": {"gzip", lbtest.Gzipped(long)},
		"a coding not asked for":   {"br", "no good: " + lbtest.BackendKey},
		"two codings":              {"gzip, gzip", lbtest.Gzipped(lbtest.Gzipped(lbtest.BackendKey))},
		"gzip that is none":        {"gzip", lbtest.BackendKey},
	} {
		lbtest.InBubble(t, "openai_lb {\nbackend http://a {\napi_key "+lbtest.BackendKey+"\n}\n}", func(t *testing.T, w *lbtest.World) {
			w.Backends["a"].Replies(func(rw http.ResponseWriter, _ *http.Request) {
				rw.Header().Set("Content-Encoding", c.coding)
				rw.WriteHeader(400)
				io.WriteString(rw, c.body)
			})
			r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{}`))
			r.Header.Set("Accept-Encoding", "br;q=1.0, gzip;q=0.8, *;q=0.1, zstd")
			reply := w.Send(r)
			if reply.Status != 400 || !strings.Contains(reply.Body, "upstream_error") || strings.Contains(reply.Body, lbtest.BackendKey) {
				t.Errorf("%s: client got %d %q", name, reply.Status, reply.Body)
			}
			if got := w.Backends["a"].Received()[0].Request.Header.Get("Accept-Encoding"); got != "gzip;q=0.8" {
				t.Errorf("a was told that %q is accepted", got)
			}
		})
	}
}

func TestACompressedThrottleThatRepeatsItsKeyIsHeeded(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a {\napi_key "+lbtest.BackendKey+"\n}\nbackend http://b {\npriority 2\n}\n}", func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(func(rw http.ResponseWriter, _ *http.Request) {
			rw.Header().Set("Content-Encoding", "gzip")
			rw.Header().Set("Retry-After", "60")
			rw.WriteHeader(429)
			io.WriteString(rw, lbtest.Gzipped("rate limit for "+lbtest.BackendKey))
		})
		w.Post(`{}`).WantServed(t, "b")
		if got := w.Logged("cooldown started")[0].ContextMap()["seconds"]; got != 60.0 {
			t.Errorf("the cooldown lasts %v s, want 60", got)
		}
	})
}

func TestAGatewaysKeyInAHeaderIsASecretToo(t *testing.T) {
	t.Setenv("OPENAI_LB_TEST_GATEWAY", "gateway-secret-123")
	lbtest.InBubble(t, "openai_lb {\nbackend http://a {\nheader Cf-Aig-Authorization \"Bearer {env.OPENAI_LB_TEST_GATEWAY}\"\nheader X-Team harmless-name\n}\n}", func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			rw.Header().Set("X-Echo", r.Header.Get("Cf-Aig-Authorization"))
			rw.WriteHeader(400)
			fmt.Fprintf(rw, "bad %s of %s", r.Header.Get("Cf-Aig-Authorization"), r.Header.Get("X-Team"))
		})
		reply := w.Post(`{}`)
		if strings.Contains(fmt.Sprint(reply), "gateway-secret") || !strings.Contains(reply.Body, "harmless-name") {
			t.Errorf("client got %v", reply)
		}
	})
}

func TestAnEmptyCompressedReplyPasses(t *testing.T) {
	for code, method := range map[int]string{304: http.MethodGet, 307: http.MethodPost, 404: http.MethodHead, 400: http.MethodPost} {
		lbtest.OverBothVersions(t, "openai_lb {\nbackend http://a {\napi_key "+lbtest.BackendKey+"\n}\n}", func(t *testing.T, w *lbtest.World) {
			w.Client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
			w.Backends["a"].Replies(func(rw http.ResponseWriter, _ *http.Request) {
				rw.Header().Set("Content-Encoding", "gzip")
				rw.Header().Set("Location", "/elsewhere")
				rw.Header().Set("Etag", `"1"`)
				rw.WriteHeader(code)
			})
			r := w.Request(method, "/v1/files/f/content", http.NoBody)
			r.Header.Set("Accept-Encoding", "gzip")
			reply := w.Send(r)
			if reply.Err != nil || reply.Status != code || reply.Body != "" || reply.Header.Get("Etag") != `"1"` || reply.Header.Get("Location") != "/elsewhere" {
				t.Errorf("a %d to %s came as %+v", code, method, reply)
			}
		})
	}
}

func TestAHeaderOfNoSecretIsNoSecret(t *testing.T) {
	t.Setenv("OPENAI_LB_TEST_HOST", "contoso.openai.azure.com")
	lbtest.InBubble(t, "openai_lb {\nbackend http://a {\nheader Host {env.OPENAI_LB_TEST_HOST}\n}\n}", func(t *testing.T, w *lbtest.World) {
		const location = "https://contoso.openai.azure.com/openai/operations/1"
		w.Backends["a"].Replies(func(rw http.ResponseWriter, _ *http.Request) {
			rw.Header().Set("Operation-Location", location)
			rw.WriteHeader(202)
		})
		if got := w.Post(`{}`).Header.Get("Operation-Location"); got != location {
			t.Errorf("client got Operation-Location %q", got)
		}
	})
}

func TestAnErrorInA200GivesNoKeyAway(t *testing.T) {
	const key = "sk-key-of-the-backend"
	const stars = "*********************"
	failure := func(code string) string {
		return `{"error":{"message":"not for ` + key + `","type":"x","code":"` + code + `"}}`
	}
	event := func(code string) string { return "data: " + failure(code) + "\n\n" }
	failed := `{"type":"response.failed","response":{"object":"response","error":{"code":"invalid_prompt","message":"` + key + `"}}}`
	type row struct {
		config string
		reply  http.HandlerFunc
	}
	rows := map[string]row{
		"whole, the client's":  {"", lbtest.Says(200, failure("invalid_prompt"))},
		"whole, the backend's": {"", lbtest.Says(200, failure("server_error"))},
		"whole, of unknown length": {"", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.(http.Flusher).Flush()
			io.WriteString(w, failure("invalid_prompt"))
		}},
		"whole, compressed, the client's":           {"", lbtest.Says(200, lbtest.Gzipped(failure("invalid_prompt")), "Content-Type", "application/json", "Content-Encoding", "gzip")},
		"whole, compressed, the backend's":          {"", lbtest.Says(200, lbtest.Gzipped(failure("server_error")), "Content-Type", "application/json", "Content-Encoding", "gzip")},
		"first in a stream, the client's":           {"", lbtest.Streams(event("invalid_prompt"))},
		"first in a stream, the backend's":          {"", lbtest.Streams(event("server_error"))},
		"after a preamble":                          {"", lbtest.Streams(lbtest.StreamPreamble, event("invalid_prompt"))},
		"after a preamble that took long":           {"", lbtest.Streams(lbtest.StreamPreamble, 5*time.Second, event("invalid_prompt"))},
		"with content":                              {"", lbtest.Streams(lbtest.StreamContent + event("server_error") + lbtest.StreamEnd)},
		"after content":                             {"", lbtest.Streams(lbtest.StreamContent, time.Second, event("server_error"), lbtest.StreamEnd)},
		"after content, the client's":               {"", lbtest.Streams(lbtest.StreamContent, time.Second, event("invalid_prompt"))},
		"after content, without an empty line":      {"", lbtest.Streams(lbtest.StreamContent, time.Second, strings.TrimSpace(event("server_error")))},
		"a failed response":                         {"", lbtest.Streams("event: response.failed\ndata: " + failed + "\n\n")},
		"a failed response after content":           {"", lbtest.Streams(lbtest.StreamContent, "event: response.failed\ndata: "+failed+"\n\n")},
		"a failed response that its data names":     {"", lbtest.Streams(lbtest.StreamContent, "data: "+failed+"\n\n")},
		"after content, cut in the event after it":  {"", lbtest.Streams(lbtest.StreamContent, time.Second, event("server_error"), time.Second, `data: {"key":"`+key[:7], time.Second, key[7:]+"\"}\n\n")},
		"with content, cut in the event after it":   {"", lbtest.Streams(lbtest.StreamContent+event("server_error")+`data: {"key":"`+key[:7], time.Second, key[7:]+"\"}\n\n")},
		"an error event with its fields at the top": {"", lbtest.Streams(lbtest.StreamContent, "event: error\ndata: {\"type\":\"error\",\"message\":\""+key+"\"}\n\n")},
	}
	for _, whole := range []string{event("server_error"), "event: response.failed\ndata: " + failed + "\n\n"} {
		for cut := range strings.Index(whole, key) + len(key) + 1 {
			rows[fmt.Sprintf("cut after %d bytes of %.20s", cut, whole)] = row{"", lbtest.Streams(lbtest.StreamContent, time.Second, whole[:cut], time.Second, whole[cut:])}
			rows[fmt.Sprintf("read ahead, cut for long after %d bytes of %.20s", cut, whole)] = row{"", lbtest.Streams(lbtest.StreamContent+whole[:cut], 5*time.Second, whole[cut:])}
			rows[fmt.Sprintf("read ahead, cut twice after %d bytes of %.20s", cut, whole)] = row{"", lbtest.Streams(lbtest.StreamContent+whole[:cut], 5*time.Second, whole[cut:cut+1], time.Second, whole[cut+1:])}
			rows[fmt.Sprintf("read ahead, cut after %d bytes of %.20s", cut, whole)] = row{"", lbtest.Streams(lbtest.StreamContent+whole[:cut], time.Second, whole[cut:])}
		}
	}
	const read = 32 << 10 // reverse_proxy's
	for length := read - 100; length < read; length += len(key) / 2 {
		long := strings.Replace(event("server_error"), "not", strings.Repeat("n", length), 1)
		rows[fmt.Sprintf("after content, with %d bytes before the key", length)] = row{"", lbtest.Streams(lbtest.StreamContent, time.Second, long)}
	}
	for name, c := range rows {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, "openai_lb {\nbackend http://a {\napi_key "+key+"\n}\n"+c.config+"\n}", func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(c.reply)
				reply := w.PostStream()
				if reply.Err != nil || strings.Contains(reply.Body, key) || !strings.Contains(reply.Body, stars) {
					t.Errorf("client got %d %s (%v), want the error with stars", reply.Status, reply.Body, reply.Err)
				}
				if strings.Contains(name, "content") && !strings.Contains(reply.Body, `"content":"Hello"`) {
					t.Errorf("client got %s, want the content too", reply.Body)
				}
			})
		})
	}
}
