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
				http.Error(w, `{"error":{"message":"Request too large for m"}}`, http.StatusTooManyRequests) // which starts no cooldown
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
				insecure = "transport http {\ntls_insecure_skip_verify\n}"
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
