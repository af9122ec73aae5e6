package failover

import (
	"crypto/tls"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// TestARequestBeforeTheEndOfItsHandshakeIsRefused has a client send a request
// in TLS early data, which whoever has seen it may have sent again.
func TestARequestBeforeTheEndOfItsHandshakeIsRefused(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
		complete := false
		w.Prepares = func(r *http.Request) *http.Request {
			r.TLS = &tls.ConnectionState{HandshakeComplete: complete}
			return r
		}
		early := w.Post(`{"model":"m"}`)
		early.WantError(t, 425, "too_early")
		if early.Header.Get("X-Should-Retry") != "true" {
			t.Error("SDKs do not send it again")
		}
		complete = true
		w.Post(`{"model":"m"}`).WantServed(t, "a")
		w.WantCalls(map[string]int{"a": 1})
	})
}

// TestNoBackendGetsATraceOrATunnel sends what a server answers by repeating the
// request (RFC 9110 section 9.3.8), with the backend's key in it, or by
// connecting to any address.
func TestNoBackendGetsATraceOrATunnel(t *testing.T) {
	for _, auth := range []string{"api_key " + lbtest.BackendKey, "auth passthrough", "auth none"} {
		lbtest.OverBothVersions(t, "openai_lb {\nbackend http://a {\n"+auth+"\n}\n}", func(t *testing.T, w *lbtest.World) {
			w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
				fmt.Fprintf(rw, "%s %s\n%v", r.Method, r.URL, r.Header)
			})
			for _, c := range []struct{ method, name, value string }{
				{"TRACE", "", ""},
				{"TRACE", "Upgrade", "websocket"},
				{"Trace", "", ""},
				{"TRACK", "", ""},
				{"CONNECT", "", ""},
				{"CONNECT", ":protocol", "connect-udp"},
				{"CONNECT", "Upgrade", "websocket"},
				{"CONNECT", "Upgrade", "h2c"},
			} {
				w.Prepares = func(r *http.Request) *http.Request {
					if c.name != "" {
						r.Header[c.name] = []string{c.value}
						r.Header["Connection"] = []string{"Upgrade"}
					}
					return r
				}
				r := w.Request(c.method, "/v1/chat/completions", http.NoBody)
				r.Header.Set("Authorization", "Bearer key-of-the-caller")
				reply := w.Send(r)
				reply.WantError(t, http.StatusMethodNotAllowed, "method_not_supported")
				if got := reply.Header.Get("Allow"); !strings.Contains(got, "POST") || strings.Contains(got, "TRACE") {
					t.Errorf("%s %s: Allow is %q", c.method, c.value, got)
				}
			}
			w.WantCalls(map[string]int{"a": 0})
			w.Prepares = nil
			for _, method := range []string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"} {
				r := w.Request(method, "/v1/files/x", nil)
				r.Header.Set("Authorization", "Bearer key-of-the-caller")
				w.Send(r).WantStatus(t, 200)
			}
		})
	}
}
