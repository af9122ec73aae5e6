package sockets

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/websocket"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// grows sends the events of a response of 40,000 tokens, which pauses for half
// a minute before its end.
func grows(send func(text string)) {
	send(`{"type":"response.created","sequence_number":0,"response":{"id":"resp_a_0000000001","object":"response","status":"in_progress","error":null,"usage":null}}`)
	for i := range 40 {
		send(fmt.Sprintf(`{"type":"response.output_text.delta","sequence_number":%d,"delta":"%s"}`, i+1, strings.Repeat("x", 4000)))
	}
	time.Sleep(30 * time.Second)
	send(`{"type":"response.completed","sequence_number":42,"response":{"id":"resp_a_0000000001","object":"response","status":"completed","error":null,"usage":{"input_tokens":10,"output_tokens":40000,"total_tokens":40010}}}`)
}

// TestALongResponseInAWebSocketIsChargedWhileItGrows as a stream over HTTP is,
// to its caller and to the quota of its backend.
func TestALongResponseInAWebSocketIsChargedWhileItGrows(t *testing.T) {
	config := keyed("backend http://a {\nname a\ntokens 200k/minute\n}\ncaller * {\ntokens 100k/minute\n}")
	// wantCharged checks the state of the response before its end, and then
	// after it.
	wantCharged := func(t *testing.T, w *lbtest.World, end func()) {
		t.Helper()
		time.Sleep(10 * time.Second)
		entry := lbtest.EntryOf(w.Handler.Pool)
		caller, quota := of(w, "alice").Limits[0].Used, entry.Quota(entry.Pool.Members[0], time.Now())[0].Used
		if caller < 39_000 || quota < 39_000 {
			t.Errorf("after 40,000 tokens, %d tokens are charged to the caller, and %d to the quota of the backend", caller, quota)
		}
		end()
		if u := of(w, "alice"); u.Today != 40_010 || u.Reserved != 0 || u.InFlight != 0 {
			t.Errorf("alice has used %+v", u)
		}
	}
	t.Run("HTTP", func(t *testing.T) {
		lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
			w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
				io.Copy(io.Discard, r.Body)
				rw.Header().Set("Content-Type", "text/event-stream")
				grows(func(text string) {
					fmt.Fprintf(rw, "data: %s\n\n", text)
					rw.(http.Flusher).Flush()
				})
			})
			r := w.Request(http.MethodPost, "/v1/responses", strings.NewReader(`{"model":"m","stream":true,"input":"x"}`))
			r.Header.Set("Authorization", "Bearer "+aliceKey)
			done := make(chan lbtest.Reply)
			go func() { done <- w.Send(r) }()
			wantCharged(t, w, func() { <-done; time.Sleep(time.Second) })
		})
	})
	for path, message := range map[string]string{
		"/v1/responses": `{"type":"response.create","model":"m","input":"x"}`,
		session:         `{"type":"input_audio_buffer.commit"}`, // the session begins the response by itself
	} {
		t.Run(path, func(t *testing.T) {
			lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(speaks(func(socket *websocket.Conn, _ string) {
					grows(func(text string) {
						if path == session {
							text = strings.Replace(text, "response.completed", "response.done", 1)
						}
						websocket.Message.Send(socket, text)
					})
				}))
				c := dial(t, w, path, aliceKey)
				c.say(message)
				wantCharged(t, w, func() { c.wantServed("a"); c.Close(); time.Sleep(time.Minute) })
			})
		})
	}
}
