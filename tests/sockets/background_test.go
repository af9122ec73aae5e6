package sockets

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/websocket"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// TestAResponseInTheBackgroundOfAWebSocketIsSettledByALaterReply when the
// WebSocket has ended before the response.
func TestAResponseInTheBackgroundOfAWebSocketIsSettledByALaterReply(t *testing.T) {
	for _, earlier := range []int{0, 1} {
		lbtest.InBubble(t, keyed("backend http://a {\nname a\ntokens 1M/hour\n}\ncaller alice {\ntokens 1M/hour\n}"), func(t *testing.T, w *lbtest.World) {
			n := 0
			w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
				if r.Header.Get("Upgrade") == "" {
					lbtest.Says(200, `{"id":"resp_a_1234567890","object":"response","status":"completed","usage":{"input_tokens":70,"output_tokens":30}}`)(rw, r)
					return
				}
				speaks(func(s *websocket.Conn, _ string) {
					text := `{"type":"response.created","response":{"id":"resp_a_1234567890","status":"queued","usage":null}}`
					if n++; n <= earlier {
						text = `{"type":"response.completed","response":{"id":"resp_a_0000000001","usage":{"input_tokens":7,"output_tokens":5}}}`
					}
					websocket.Message.Send(s, text)
				})(rw, r)
			})
			c := dial(t, w, "/v1/responses", aliceKey)
			for range earlier + 1 {
				c.say(`{"type":"response.create","model":"gpt-5","background":true,"max_output_tokens":4000,"input":"hi"}`)
				c.hears()
			}
			c.Close()
			time.Sleep(time.Minute)
			used := int64(12 * earlier)
			if u := of(w, "alice"); u.Today < used+4000 || u.InFlight != 0 || u.Reserved != 0 {
				t.Errorf("after %d other responses, alice has used %+v while the response goes on", earlier, u)
			}
			r := w.Request(http.MethodGet, "/v1/responses/resp_a_1234567890", nil)
			r.Header.Set("Authorization", "Bearer "+aliceKey)
			w.Send(r).WantStatus(t, 200)
			wantUsed(t, w, used+100)
			if u := of(w, "alice"); u.Today != used+100 {
				t.Errorf("after %d other responses, alice has used %+v once the response is over", earlier, u)
			}
		})
	}
}

// TestAResponseThatTheSessionBeginsIsNotInTheBackground although the first
// response of the WebSocket is: it ends with the WebSocket.
func TestAResponseThatTheSessionBeginsIsNotInTheBackground(t *testing.T) {
	inPool(t, "caller alice {\ntokens 100k/day\n}", func(t *testing.T, w *lbtest.World) {
		n := 0
		w.Backends["a"].Replies(speaks(func(s *websocket.Conn, _ string) {
			n++
			websocket.Message.Send(s, fmt.Sprintf(`{"type":"response.created","response":{"id":"resp_a_%010d","usage":null}}`, n))
			if n == 1 {
				websocket.Message.Send(s, `{"type":"response.incomplete","response":{"id":"resp_a_0000000001","usage":{"input_tokens":7,"output_tokens":5}}}`)
			}
			websocket.Message.Send(s, `{"type":"response.output_text.delta","delta":"hello"}`)
		}))
		c := dial(t, w, "/v1/responses", aliceKey)
		c.say(`{"type":"response.create","model":"gpt-5","background":true,"input":"` + strings.Repeat("x", 400) + `"}`)
		c.hears()
		c.hears()
		c.hears()
		c.say(`{"type":"response.steer","previous_response_id":"resp_a_0000000001","input":"louder"}`)
		c.hears()
		c.hears()
		c.Close()
		time.Sleep(time.Minute)
		if u := of(w, "alice"); u.Today < 12+100 || u.InFlight != 0 || u.Reserved != 0 {
			t.Errorf("alice has used %+v", u)
		}
	})
}
