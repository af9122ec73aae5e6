package sockets

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// TestARealtimeSessionGoesWhereItsModelIs under the name that the model has there.
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
