package failover

import (
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// TestAProvidersFieldsDoNotPassAsTrailers sends what must not be in a header
// after the body, announced or not. Clients merge trailers into the header.
func TestAProvidersFieldsDoNotPassAsTrailers(t *testing.T) {
	kept := http.Header{"X-Announced": {"1"}, "X-Late": {"2"}}
	fields := []string{"Set-Cookie", "Alt-Svc", "Strict-Transport-Security", "Clear-Site-Data", "Proxy-Authenticate"}
	framing := []string{"Content-Length", "Transfer-Encoding", "Trailer", "Connection", "Host"} // net/http announces none of them
	for name, c := range map[string]struct {
		method, path string
		reply        http.HandlerFunc
	}{
		"a reply":                      {http.MethodPost, "/v1/chat/completions", lbtest.Says(200, "{}")},
		"an empty reply":               {http.MethodPost, "/v1/audio/transcriptions", lbtest.Says(200, "", "Content-Type", "text/plain")},
		"a stream":                     {http.MethodPost, "/v1/chat/completions", lbtest.Streams(lbtest.StreamContent, lbtest.StreamEnd)},
		"a stream that is held back":   {http.MethodPost, "/v1/chat/completions", lbtest.Streams(lbtest.StreamPreamble, 5*time.Second)},
		"a reply that is not read":     {http.MethodGet, "/v1/files/f/content", lbtest.Says(200, "text", "Content-Type", "text/plain")},
		"a client's error":             {http.MethodPost, "/v1/chat/completions", lbtest.Says(400, `{"error":{}}`)},
		"an error that is passed on":   {http.MethodPost, "/v1/chat/completions", lbtest.Says(500, `{"error":{}}`)},
		"a long error":                 {http.MethodPost, "/v1/chat/completions", lbtest.Says(500, strings.Repeat(" ", 100<<10))},
		"an answer that may have been": {http.MethodPost, "/v1/files", lbtest.Says(500, `{"error":{}}`)},
	} {
		t.Run(name, func(t *testing.T) {
			for _, announced := range [][]string{{"X-Announced"}, {"X-Announced", "Set-Cookie"}, append([]string{"X-Announced"}, fields...)} {
				lbtest.OverAllVersions(t, "", func(t *testing.T, w *lbtest.World) {
					w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
						rw.Header().Set("Trailer", strings.Join(announced, ", "))
						c.reply(rw, r)
						rw.(http.Flusher).Flush()
						rw.Header().Set("X-Announced", "1")
						rw.Header().Set(http.TrailerPrefix+"X-Late", "2")
						for _, field := range slices.Concat(fields, framing) {
							rw.Header().Set(http.TrailerPrefix+field, "theirs")
						}
					})
					res := lbtest.Do(t, w.Client, w.Request(c.method, c.path, http.NoBody))
					for name := range res.Trailer {
						if slices.Contains(fields, name) || slices.Contains(framing, name) {
							t.Errorf("%s is announced", name)
						}
					}
					if _, err := io.Copy(io.Discard, res.Body); err != nil {
						t.Error(err)
					}
					if !maps.EqualFunc(res.Trailer, kept, slices.Equal) {
						t.Errorf("client got the trailers %v, want %v", res.Trailer, kept)
					}
				})
			}
		})
	}
}

// A client gets the trailers of a reply that was read ahead as it gets those of
// a longer one.
func TestTrailersAreTheBackendsHoweverMuchOfAReplyIsHeldBack(t *testing.T) {
	for name, reply := range map[string]http.HandlerFunc{
		"held back":  lbtest.Says(200, "{}"),
		"passed on":  lbtest.Says(200, `"`+strings.Repeat("x", 100<<10)+`"`),
		"an error":   lbtest.Says(400, `{"error":{}}`),
		"a last one": lbtest.Says(500, `{"error":{}}`),
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.OverAllVersions(t, "", func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
					rw.Header().Set("X-Both", "of the header")
					rw.Header().Set("X-None", "of the header")
					reply(rw, r)
					rw.(http.Flusher).Flush()
					rw.Header()[http.TrailerPrefix+"X-Both"] = []string{"one", "two"}
					for _, field := range []string{"Cache-Control", "Content-Encoding", "Proxy-Connection", "Www-Authenticate", "Upgrade"} {
						rw.Header().Set(http.TrailerPrefix+field, "x")
					}
				})
				res := lbtest.Do(t, w.Client, w.Request(http.MethodPost, "/v1/chat/completions", http.NoBody))
				if _, err := io.Copy(io.Discard, res.Body); err != nil {
					t.Error(err)
				}
				if want := (http.Header{"X-Both": {"one", "two"}}); !maps.EqualFunc(res.Trailer, want, slices.Equal) {
					t.Errorf("client got the trailers %v, want %v", res.Trailer, want)
				}
			})
		})
	}
}
