package sockets

import (
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestTheFirstMessageOfAWebSocketDecidesOnItsBackend(t *testing.T) {
	lbtest.InBubble(t, keyed("backend http://a {\nmodel gpt-5\n}\nbackend http://b {\nmodel o3 o3-deployment\n}"), func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(responds("a", 7, 5))
		w.Backends["b"].Replies(responds("b", 7, 5))
		for range 3 {
			c := dial(t, w, "/v1/responses", aliceKey)
			c.say(`{"type":"response.create","model":"gpt-5","input":"hi"}`)
			c.wantServed("a")
			c.Close()
			c = dial(t, w, "/v1/responses", aliceKey)
			c.say(`{"type":"response.create","model":"o3","input":"hi"}`)
			c.wantServed("b")
			c.say(`{"type":"response.create","model":"o3","input":"hi"}`)
			c.wantServed("b")
			c.say(`{"type":"response.create","model":"gpt-5","input":"hi"}`)
			c.wantError(400, "websocket_connection_limit_reached")
			c.Close()
		}
		c := dial(t, w, "/v1/responses", aliceKey)
		c.say(`{"type":"response.create","model":"unknown","input":"hi"}`)
		c.wantError(404, "model_not_found")
		c.say(`{"type":"response.create","model":"o3","input":"hi"}`)
		c.wantServed("b")
		c.Close()
		time.Sleep(time.Second)
	})
}
