package streams

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// filled is a JSON object of about this size that is full of one word.
func filled(word string, size int) string {
	return `{"model":"m","word":"` + word + `","text":"` + strings.Repeat(word, size/len(word)) + `"}`
}

// isFilled reports whether a body is such an object, of any model. Of one that
// was cut off, it looks at what there is.
func isFilled(body []byte, whole bool) bool {
	_, rest, _ := bytes.Cut(body, []byte(`"word":"`))
	word, rest, found := bytes.Cut(rest, []byte(`","text":"`))
	text, ends := bytes.CutSuffix(rest, []byte(`"}`))
	if !found || whole != ends {
		return !whole && !ends
	}
	left := bytes.ReplaceAll(text, word, nil)
	return len(left) == 0 || !whole && bytes.HasPrefix(word, left)
}

// A buffer that is used again while somebody still reads it would show one
// request's prompt or reply to another. So there is traffic of all kinds at
// once: backends that answer before they have read the request, clients that
// leave, models that are replaced, and replies of every size.
func TestNoRequestGetsBytesOfAnother(t *testing.T) {
	for _, wire := range lbtest.Wires[:2] {
		t.Run(fmt.Sprintf("HTTP/%d", wire.Backend), func(t *testing.T) {
			var mixed sync.Map
			check := func(what string, body []byte, whole bool) {
				if !isFilled(body, whole) {
					mixed.Store(string(body[:min(80, len(body))]), what)
				}
			}
			early := func(w http.ResponseWriter, r *http.Request) {
				_ = http.NewResponseController(w).EnableFullDuplex()
				http.Error(w, `{"error":{"message":"Request too large for m"}}`, http.StatusTooManyRequests) // which benches it for no other
				w.(http.Flusher).Flush()
				time.Sleep(time.Millisecond) // another backend serves it in the meantime
				body, err := io.ReadAll(r.Body)
				check("a request that another backend got as well", body, err == nil)
			}
			serving := func(w http.ResponseWriter, r *http.Request) {
				body, err := io.ReadAll(r.Body)
				if err != nil {
					return // the client left
				}
				check("a request", body, true)
				w.Header().Set("Content-Type", "application/json")
				w.Header().Set("Content-Length", fmt.Sprint(len(body)))
				w.Write(body)
			}
			a, b := httptest.NewUnstartedServer(http.HandlerFunc(early)), httptest.NewUnstartedServer(http.HandlerFunc(serving))
			insecure := ""
			for _, server := range []*httptest.Server{a, b} {
				defer server.Close()
				if wire.Backend == 1 {
					server.Listener = smallReads{server.Listener}
					server.Start()
					continue
				}
				server.EnableHTTP2 = true
				server.StartTLS()
				insecure = "reverse_proxy {\ntransport http {\ntls_insecure_skip_verify\n}\n}"
			}
			address := fmt.Sprintf("http://127.0.0.1:%d", lbtest.FreePort(t))
			lbtest.Run(t, fmt.Sprintf("{\nadmin off\ndefault_bind 127.0.0.1\nlog {\noutput discard\n}\n}\n%s {\nopenai_lb {\nbackend %s\n"+
				"backend %s {\npriority 2\ndeployment of-b\n}\nbackend %s {\npriority 2\nname as-it-is\n}\n%s\n}\n}",
				address, a.URL, b.URL, b.URL, insecure))
			client := lbtest.NewClient(t)
			var all sync.WaitGroup
			for worker := range 8 {
				all.Go(func() {
					for i := range 18 {
						size := []int{100, 3000, 9000, 60_000, 200_000, 500_000}[(worker+i)%6] + i
						ctx, cancel := context.WithCancel(t.Context())
						if i%10 == 9 {
							time.AfterFunc(time.Duration(i)*20*time.Microsecond, cancel)
						}
						r, _ := http.NewRequestWithContext(ctx, http.MethodPost, address+"/v1/chat/completions",
							strings.NewReader(filled(fmt.Sprintf("%c%03d-", 'a'+worker, i), size)))
						if res, err := client.Do(r); err == nil {
							body, err := io.ReadAll(res.Body)
							if res.Body.Close(); err == nil {
								check("a reply", body, true)
							}
						}
						cancel()
					}
				})
			}
			all.Wait()
			mixed.Range(func(body, what any) bool {
				t.Errorf("%s begins with %q", what, body)
				return true
			})
		})
	}
}

// smallReads are connections on which little is on its way, so that who sends
// much has to wait.
type smallReads struct{ net.Listener }

func (l smallReads) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err == nil {
		err = conn.(*net.TCPConn).SetReadBuffer(64 << 10)
	}
	return conn, err
}

// reverse_proxy gets the headers only if it has something to do with them.
func TestABackendGetsTheSameHeadersEitherWay(t *testing.T) {
	got := make(chan http.Header, 1)
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { got <- r.Header }))
	defer server.Close()
	var addresses []string
	caddyfile := "{\nadmin off\ndefault_bind 127.0.0.1\nlog {\noutput discard\n}\n}\n"
	for _, options := range []string{"", "reverse_proxy {\nheader_up -X-None\n}"} {
		address := fmt.Sprintf("http://127.0.0.1:%d", lbtest.FreePort(t))
		caddyfile += address + " {\nopenai_lb {\nbackend " + server.URL + " {\napi_key key\nheader X-Own own\n}\n" + options + "\n}\n}\n"
		addresses = append(addresses, address)
	}
	lbtest.Run(t, caddyfile)
	client := lbtest.NewClient(t)
	for name, header := range map[string]http.Header{
		"a plain one":          {"Content-Type": {"application/json"}, "X-Stainless-Lang": {"js"}, "Accept": {"a", "b"}},
		"no name":              {"User-Agent": {""}},
		"keys":                 {"Api-Key": {"k"}, "Authorization": {"Bearer k"}, "Openai-Project": {"p"}, "Cookie": {"a=b"}},
		"forwarded":            {"X-Forwarded-For": {"192.0.2.1"}, "Via": {"1.1 x"}, "Forwarded": {"for=x"}, "X-Real-Ip": {"192.0.2.1"}},
		"a connection":         {"Connection": {"keep-alive"}, "X-A": {"b"}},
		"a connection's own":   {"Connection": {"X-A, keep-alive"}, "X-A": {"b"}, "Keep-Alive": {"5"}},
		"two connections":      {"Connection": {"keep-alive", "X-A"}, "X-A": {"b"}},
		"hop by hop":           {"Proxy-Connection": {"x"}, "Proxy-Authorization": {"x"}, "Alt-Svc": {"x"}, "Te": {"trailers"}},
		"an upgrade":           {"Connection": {"Upgrade"}, "Upgrade": {"h2c"}},
		"idempotence, own":     {"Idempotency-Key": {"1"}, "X-Own": {"client's"}, "Early-Data": {"1"}},
		"codings":              {"Accept-Encoding": {"br, gzip;q=1"}},
		"a secret subprotocol": {"Sec-Websocket-Protocol": {"a, openai-insecure-api-key.k"}},
	} {
		var headers [2]http.Header
		for i, address := range addresses {
			r, _ := http.NewRequest(http.MethodPost, address+"/v1/chat/completions?api-key=k&a=1", strings.NewReader(`{"model":"m"}`))
			r.Header = header.Clone()
			res, err := client.Do(r)
			if err != nil {
				t.Fatal(name, err)
			}
			res.Body.Close()
			headers[i] = <-got
		}
		if fmt.Sprint(headers[0]) != fmt.Sprint(headers[1]) {
			t.Errorf("%s: the backend gets\n%v without a use for headers, and\n%v with one", name, headers[0], headers[1])
		}
		if headers[0].Get("Authorization") != "Bearer key" || headers[0].Get("X-Own") != "own" || headers[0]["Via"] != nil {
			t.Errorf("%s: the backend gets %v", name, headers[0])
		}
	}
}
