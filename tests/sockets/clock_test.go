package sockets

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// TestARefusedMessageThatHasWaitedDoesNotSetTheClockBack has messages of a
// WebSocket wait for their caller's limit, and then be refused, because they
// belong into another WebSocket. No 60 s may admit more than 104 % of the
// limit.
func TestARefusedMessageThatHasWaitedDoesNotSetTheClockBack(t *testing.T) {
	const limit = 120
	for _, refused := range []int{0, 6} {
		lbtest.InBubble(t, keyed("wait 10s\nbackend http://a {\nmodel gpt-5\n}\nbackend http://b {\nmodel o3\n}\ncaller alice {\nrequests 120/minute\n}"), func(t *testing.T, w *lbtest.World) {
			time.Sleep(time.Until(time.Now().Truncate(time.Hour).Add(time.Hour)))
			w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
				if r.Method == http.MethodGet {
					responds("a", 7, 5)(rw, r)
					return
				}
				lbtest.Says(200, `{"id":"resp_1","object":"response","usage":{"input_tokens":1,"output_tokens":1}}`)(rw, r)
			})
			var served []time.Time
			burst := func(n int) {
				for range n {
					r := w.Request(http.MethodPost, "/v1/responses", strings.NewReader(`{"model":"gpt-5","input":"x"}`))
					r.Header.Set("Authorization", "Bearer "+aliceKey)
					r.Header.Set("X-Stainless-Read-Timeout", "0.01") // it does not wait
					if w.Send(r).Status == 200 {
						served = append(served, time.Now())
					}
				}
			}
			begin := time.Now()
			var sockets []*client
			for range refused {
				c := dial(t, w, "/v1/responses", aliceKey)
				c.say(`{"type":"response.create","model":"gpt-5","input":"hi"}`)
				c.wantServed("a")
				served = append(served, time.Now())
				sockets = append(sockets, c)
			}
			burst(limit/2 - refused)
			time.Sleep(time.Until(begin.Add(50 * time.Second)))
			burst(limit / 2)
			time.Sleep(time.Until(begin.Add(53 * time.Second)))
			for _, c := range sockets {
				c.say(`{"type":"response.create","model":"o3","input":"hi"}`)
			}
			for _, c := range sockets {
				c.wantError(400, "websocket_connection_limit_reached")
			}
			time.Sleep(time.Until(begin.Add(84 * time.Second)))
			burst(limit)
			for i, from := range served {
				n := 0
				for _, at := range served[i:] {
					if at.Sub(from) < time.Minute {
						n++
					}
				}
				if n > limit*25/24 {
					t.Errorf("with %d refused messages, %d requests are admitted within 60 s, want %d at most", refused, n, limit*25/24)
					break
				}
			}
			for _, c := range sockets {
				c.Close()
			}
			time.Sleep(time.Minute)
		})
	}
}
