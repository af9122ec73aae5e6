//go:build openai_lb_core && !openai_lb_websocket

package openailb_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// TestAHandshakeIsRefusedWithoutTheModuleWebSocket before any backend is asked,
// so that clients use HTTP.
func TestAHandshakeIsRefusedWithoutTheModuleWebSocket(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
		for _, path := range []string{"/v1/responses", "/v1/realtime?model=gpt-realtime", "/v1/other"} {
			r := w.Request(http.MethodGet, path, nil)
			for name, value := range map[string]string{
				"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
			} {
				r.Header.Set(name, value)
			}
			reply := w.Send(r)
			reply.WantError(t, http.StatusUpgradeRequired, "websocket_not_supported")
			if !strings.Contains(reply.Body, "built without the module websocket") {
				t.Errorf("%s: the error does not say why: %s", path, reply.Body)
			}
		}
		w.WantCalls(map[string]int{"a": 0})
		w.Post(`{"model":"gpt-4o"}`).WantStatus(t, 200)
	})
}
