package failover

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// TestHeadersReachTheClientAsReverseProxyPassesThemOn has the same replies come
// through a balancer whose reverse_proxy has no use for headers, and through one
// whose reverse_proxy changes them.
func TestHeadersReachTheClientAsReverseProxyPassesThemOn(t *testing.T) {
	a, server := lbtest.Listen(t, "a")
	const sites = `
	header ?X-Ours ours
	header +X-Both ours
	header >X-Id "{http.reverse_proxy.header.X-Request-Id} {http.reverse_proxy.header.X-None}"
	header >X-Upstream "{http.reverse_proxy.upstream.address} {http.reverse_proxy.upstream.hostport} {http.reverse_proxy.upstream.host} {http.reverse_proxy.upstream.port} {http.reverse_proxy.upstream.max_requests} {http.reverse_proxy.upstream.fails}"
	header >X-Status "{http.reverse_proxy.status_code} {http.reverse_proxy.status_text} {http.reverse_proxy.upstream.none}"
	handle /direct/* {
		uri strip_prefix /direct
		openai_lb {
			backend %[1]s
		}
	}
	handle /changed/* {
		uri strip_prefix /changed
		openai_lb {
			backend %[1]s
			reverse_proxy {
				header_down -X-Nobody-Sends
			}
		}
	}`
	address := lbtest.ServeAt(t, fmt.Sprintf(sites, server.URL))
	client := lbtest.NewClient(t)
	for _, c := range []struct {
		name  string
		reply http.HandlerFunc
	}{
		{"of OpenAI", lbtest.Says(200, "{}", "Content-Type", "application/json", "X-Request-Id", "req_1", "Openai-Processing-Ms", "12",
			"X-Ratelimit-Remaining-Tokens", "100", "Server", "cloudflare", "Set-Cookie", "_cfuvid=1", "Alt-Svc", `h3=":443"`, "Strict-Transport-Security", "max-age=1")},
		{"fields of ours", lbtest.Says(200, "{}", "X-Ours", "theirs", "X-Both", "theirs", "Via", "1.1 apim", "Server", "uvicorn")},
		{"a field twice", severalFields("X-Request-Id", "X-Both", "Vary")},
		{"a connection's fields", lbtest.Says(200, "{}", "Connection", "X-Hop", "X-Hop", "1", "Keep-Alive", "timeout=5")},
		{"keep-alive", lbtest.Says(200, "{}", "Connection", "keep-alive", "Keep-Alive", "timeout=5", "Proxy-Connection", "keep-alive")},
		{"an odd media type", lbtest.Says(200, "{}", "Content-Type", "Application/JSON; charset")},
		{"no media type", lbtest.Says(200, "{}", "Content-Type", "")},
		{"a stream", lbtest.Streams(lbtest.StreamContent, lbtest.StreamEnd)},
		{"a stream of known length", lbtest.Says(200, lbtest.StreamContent+lbtest.StreamEnd, "Content-Type", "Text/Event-Stream")},
		{"an incremental reply", lbtest.Says(200, "{}", "Incremental", "?1")},
		{"trailers", trailers},
		{"nothing", lbtest.Status(204)},
		{"a client's error", lbtest.Says(400, `{"error":{}}`, "X-Request-Id", "req_2", "Set-Cookie", "c=1")},
		// the last one, because the backend rests after it
		{"an error that is shown", lbtest.Says(500, `{"error":{}}`, "X-Request-Id", "req_3", "Retry-After", "7", "Set-Cookie", "c=1")},
	} {
		t.Run(c.name, func(t *testing.T) {
			a.Replies(c.reply)
			direct, changed := fetch(t, client, address, "direct"), fetch(t, client, address, "changed")
			if direct != changed {
				t.Errorf("the client gets\n%s\nwant\n%s", direct, changed)
			}
		})
	}
}

// fetch returns all of a reply but its date and what counts down.
func fetch(t *testing.T, client *http.Client, address, site string) string {
	t.Helper()
	res, err := client.Post("http://"+address+"/"+site+"/v1/chat/completions", "application/json", strings.NewReader(`{"model":"m"}`))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	if res.Header.Get("Date") == "" {
		t.Error("a reply has no date")
	}
	res.Header.Del("Date")
	res.Header.Del("Retry-After-Ms")
	text := fmt.Sprintf("%s %d %v\n%s\n", res.Status, res.ContentLength, res.TransferEncoding, body)
	for _, fields := range []http.Header{res.Header, res.Trailer} {
		for _, name := range slices.Sorted(maps.Keys(fields)) {
			text += fmt.Sprintf("%s: %q\n", name, fields[name])
		}
	}
	return text
}

// severalFields replies with fields that are there twice.
func severalFields(names ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		for _, name := range names {
			w.Header()[name] = []string{"one", "two"}
		}
		io.WriteString(w, "{}")
	}
}

func trailers(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Trailer", "X-Announced")
	io.WriteString(w, "{}")
	w.(http.Flusher).Flush()
	w.Header().Set("X-Announced", "1")
	w.Header().Set(http.TrailerPrefix+"X-Late", "2")
}

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
		"an empty reply":               {http.MethodPost, "/v1/chat/completions", lbtest.Says(200, "", "Content-Type", "text/plain")},
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

// A client gets the trailers of a reply that was read ahead as it gets those of a longer one.
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
