package openailb

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
)

func TestASecretInABodyIsStarredHoweverItArrives(t *testing.T) {
	const secret, other = "sk-secret-secret", "secret-of-another"
	for body, want := range map[string]string{
		"":                               "",
		"nothing in it":                  "nothing in it",
		secret:                           "****************",
		"a " + secret + " and " + secret: "a **************** and ****************",
		"sk-secret-" + secret + "!":      "sk-secret-****************!",
		"it ends with a part: sk-secret": "it ends with a part: sk-secret",
		other + secret[:5] + other:       "*****************sk-se*****************",
	} {
		for name, reader := range map[string]io.Reader{
			"at once":        strings.NewReader(body),
			"byte by byte":   iotest.OneByteReader(strings.NewReader(body)),
			"halves":         iotest.HalfReader(strings.NewReader(body)),
			"data with EOF":  iotest.DataErrReader(strings.NewReader(body)),
			"in two by five": io.MultiReader(strings.NewReader(body[:min(5, len(body))]), strings.NewReader(body[min(5, len(body)):])),
		} {
			got, err := io.ReadAll(&starredBody{ReadCloser: io.NopCloser(reader), secrets: secrets{secret, other}})
			if err != nil || string(got) != want {
				t.Errorf("%q, %s: got %q (%v), want %q", body, name, got, err, want)
			}
		}
	}
}

func TestABodyWithoutASecretIsNotHeldBack(t *testing.T) {
	r, w := io.Pipe()
	body := &starredBody{ReadCloser: r, secrets: secrets{"sk-secret-secret"}}
	defer body.Close()
	for _, piece := range []string{"one", "two", "three"} {
		go io.WriteString(w, piece)
		got := make([]byte, 10)
		if n, err := body.Read(got); err != nil || string(got[:n]) != piece {
			t.Errorf("got %q (%v), want %q", got[:n], err, piece)
		}
	}
}

func FuzzStarredBody(f *testing.F) {
	f.Add([]byte("a sk-secret-secret b"), "sk-secret-secret", 3)
	f.Add([]byte("aaaaaaaaaaaaaaaaaaab"), "aaaaaaaab", 1)
	f.Fuzz(func(t *testing.T, text []byte, secret string, size int) {
		if len(secret) < minSecret || size < 1 || strings.Trim(secret, "*") == "" {
			t.Skip()
		}
		body := &starredBody{ReadCloser: io.NopCloser(bytes.NewReader(text)), secrets: secrets{secret}}
		var got []byte
		buf := make([]byte, min(size, 1<<10))
		for {
			n, err := body.Read(buf)
			got = append(got, buf[:n]...)
			if err == io.EOF {
				break
			} else if err != nil {
				t.Fatal(err)
			}
		}
		want := text
		for bytes.Contains(want, []byte(secret)) {
			want = bytes.Replace(want, []byte(secret), bytes.Repeat([]byte("*"), len(secret)), 1)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	})
}

// echo answers with the request's credentials in every place there is.
func echo(code int, encoding string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		key := r.Header.Get("Authorization")
		w.Header().Set("X-Debug", key)
		w.Header().Add("X-Many", "harmless")
		w.Header().Add("X-Many", key)
		w.Header().Set("Location", "https://elsewhere.example/?api-key="+keyIn(key))
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
			inBubble(t, "openai_lb {\nbackend http://a {\napi_key "+key+"\n}\n}", func(t *testing.T, w *world) {
				w.client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
				w.backends["a"].replies(echo(code, encoding))
				r := w.request(http.MethodGet, "/v1/responses/1", http.NoBody)
				r.Header.Set("Accept-Encoding", "gzip")
				reply := w.send(r)
				body := reply.body
				if z, err := gzip.NewReader(strings.NewReader(body)); err == nil {
					text, _ := io.ReadAll(z)
					body = string(text)
				}
				if code >= 300 && strings.Contains(body, key) || strings.Contains(fmt.Sprint(reply.header), key) {
					t.Errorf("%d %s: client got %v %s", code, encoding, reply.header, body)
				}
				if reply.err != nil || code != 401 && reply.status != code {
					t.Errorf("%d %s: client got %d (%v)", code, encoding, reply.status, reply.err)
				}
				if code == 400 && encoding == "" && (reply.header.Get("X-Request-Id") != "req-1" || !strings.Contains(body, `no good: Bearer *****`)) {
					t.Errorf("a 400 came as %v %s", reply.header, body)
				}
				if text := fmt.Sprint(w.logs.All()); strings.Contains(text, key) {
					t.Errorf("%d: the log holds the key: %s", code, text)
				}
			})
		}
	}
}

func TestABackendThatSpeaksNoHTTPDoesNotGetItsKeyIntoTheLog(t *testing.T) {
	const key = "sk-key-of-the-backend"
	inBubble(t, "openai_lb {\nbackend http://a {\napi_key "+key+"\n}\n}", func(t *testing.T, w *world) {
		w.stop("a")
		l := &pipeListener{conns: make(chan net.Conn), closed: make(chan struct{}), server: new(http.Server)}
		w.mu.Lock()
		w.listeners["a:80"] = l
		w.mu.Unlock()
		go func() {
			conn := <-l.conns
			if r, err := http.ReadRequest(bufio.NewReader(conn)); err == nil {
				io.Copy(io.Discard, r.Body)
			}
			fmt.Fprintf(conn, "HTTP/1.1 %s\r\n\r\n", key)
		}()
		if reply := w.post(`{}`); reply.status != 502 || strings.Contains(reply.body, key) {
			t.Errorf("client got %d %s", reply.status, reply.body)
		}
		attempts := w.logged("attempt")
		if len(attempts) != 1 || !strings.Contains(fmt.Sprint(attempts[0].ContextMap()["error"]), redacted) {
			t.Errorf("logged %v, want the error with %s in it", attempts, redacted)
		}
		if text := fmt.Sprint(w.logs.All()); strings.Contains(text, key) {
			t.Errorf("the log holds the key: %s", text)
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
		config := "openai_lb {\nclient_key alice key-of-alice\n"
		for i, name := range order {
			config += fmt.Sprintf("backend http://%s {\npriority %d\n%s\n}\n", name, i+1, options[name])
		}
		inBubble(t, config+"}", func(t *testing.T, w *world) {
			for _, b := range w.backends {
				b.replies(status(503))
			}
			r := w.request(http.MethodPost, "/v1/chat/completions?x=1&api-key=key-of-caller&subscription-key=key-of-caller", strings.NewReader(`{}`))
			r.Header.Set("Authorization", "Bearer key-of-caller")
			r.Header.Set("Api-Key", "key-of-caller")
			r.Header.Set("X-Api-Key", "key-of-alice")
			r.Header.Set("Cookie", "key-of-caller")
			r.Header.Set("Sec-WebSocket-Protocol", "realtime, openai-insecure-api-key.key-of-caller")
			w.send(r)
			reached := order[:slices.Index(order, "passthrough")+1]
			for _, name := range order {
				calls := w.backends[name].received()
				if want := slices.Contains(reached, name); want != (len(calls) == 1) {
					t.Errorf("in the order %v, %s was called %d times", order, name, len(calls))
				}
				for _, c := range calls {
					wantOnly(t, name, own[name], c.request)
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
