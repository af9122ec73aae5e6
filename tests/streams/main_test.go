// Package streams tests bodies, streams and connections as they come and go:
// how they are held, cut and timed, and carried through a reload.
package streams

import (
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/modules/websocket"
)

// TestMain shortens the time that a side of a WebSocket or of another tunnel
// may stay open after the other: before any test, because a connection of one
// test may outlive it.
func TestMain(m *testing.M) {
	websocket.Grace, attempt.Grace = 200*time.Millisecond, 200*time.Millisecond
	lbtest.Main(m)
}

// listenBy serves a backend by plain HTTP/1.1, or by HTTP/2 and TLS, and
// returns its URL and the options that it takes.
func listenBy(t *testing.T, major int, name string) (b *lbtest.Backend, url, options string) {
	t.Helper()
	if major == 1 {
		b, server := lbtest.Listen(t, name)
		return b, server.URL, ""
	}
	b, server, options := lbtest.ListenTLS(t, name, true)
	return b, server.URL, options
}
