package streams

import (
	"compress/gzip"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// TestRepliesPassThroughHandlersAsTheyAre compares replies that pass through
// Caddy's directives with those of a backend asked directly: interim replies
// (of which the balancer passes the status alone), trailers, replies without a
// body, and those that are cut.
func TestRepliesPassThroughHandlersAsTheyAre(t *testing.T) {
	long := `{"text":"` + lbtest.Noise(100<<10) + `"}`
	replies := map[string]struct {
		method string
		reply  http.HandlerFunc
	}{
		"a short reply": {http.MethodPost, lbtest.Says(200, `{"a":1}`)},
		"a long reply":  {http.MethodPost, lbtest.Says(200, long)},
		"an error":      {http.MethodPost, lbtest.Says(400, `{"error":{"message":"no"}}`)},
		"a reply without content": {http.MethodDelete, func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusNoContent)
		}},
		"the header alone": {http.MethodHead, lbtest.Says(200, `{"a":1}`, "Content-Length", "7")},
		"an interim reply": {http.MethodPost, func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(http.StatusEarlyHints)
			lbtest.Says(200, `{"a":1}`)(w, r)
		}},
		"a trailer": {http.MethodPost, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Trailer", "X-Digest")
			lbtest.Says(200, `{"a":1}`)(w, r)
			w.(http.Flusher).Flush()
			w.Header().Set("X-Digest", "sha-1")
		}},
		"a stream":             {http.MethodPost, lbtest.Streams(lbtest.StreamContent, lbtest.StreamContent, lbtest.StreamEnd)},
		"a stream that is cut": {http.MethodPost, lbtest.Streams(lbtest.StreamContent, lbtest.Abort)},
		"a reply that is cut": {http.MethodPost, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.Header().Set("Content-Length", "300000")
			io.WriteString(w, long)
			w.(http.Flusher).Flush()
			lbtest.Abort()
		}},
	}
	a, server := lbtest.Listen(t, "a")
	for directive, text := range map[string]string{
		"none":              "",
		"encode":            "encode {\ngzip\nminimum_length 1\n}\n",
		"intercept":         replacing,
		"encode, intercept": "encode {\ngzip\nminimum_length 1\n}\n" + replacing,
	} {
		address := lbtest.ServeAt(t, text+"openai_lb {\nbackend "+server.URL+"\n}")
		for name, c := range replies {
			t.Run(directive+", "+name, func(t *testing.T) {
				a.Replies(c.reply)
				direct := look(t, c.method, server.URL)
				for _, encoding := range []string{"identity", "gzip"} {
					if got := look(t, c.method, "http://"+address, "Accept-Encoding", encoding); got != direct {
						t.Errorf("with Accept-Encoding %s, the client got %+v, want %+v", encoding, got, direct)
					}
				}
			})
		}
	}
}

// whole is what a client sees of a reply.
type whole struct {
	status, interims int
	body, trailer    string
	isCut            bool
}

// look sends a request, and decodes the reply.
func look(t *testing.T, method, url string, header ...string) (seen whole) {
	t.Helper()
	var body io.Reader
	if method == http.MethodPost {
		body = strings.NewReader(`{"model":"gpt-4o"}`)
	}
	r := lbtest.NewRequest(t, method, url+"/v1/chat/completions", body)
	r = r.WithContext(httptrace.WithClientTrace(r.Context(), &httptrace.ClientTrace{
		Got1xxResponse: func(int, textproto.MIMEHeader) error {
			seen.interims++
			return nil
		},
	}))
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	transport := &http.Transport{DisableCompression: true}
	defer transport.CloseIdleConnections()
	res := lbtest.Do(t, &http.Client{Transport: transport}, r)
	var err error
	content := io.Reader(res.Body)
	if res.Header.Get("Content-Encoding") == "gzip" && method != http.MethodHead {
		if content, err = gzip.NewReader(res.Body); err != nil {
			t.Fatal(err)
		}
	}
	text, err := io.ReadAll(content)
	seen.status, seen.body, seen.isCut = res.StatusCode, string(text), err != nil
	if seen.isCut && strings.HasPrefix(string(text), "{") {
		seen.body = fmt.Sprint(len(text) > 0) // how much comes before a cut depends on the buffers on the way
	}
	seen.trailer = res.Trailer.Get("X-Digest")
	return seen
}
