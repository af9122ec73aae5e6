// Package streams tests bodies, streams and connections as they come and go: how
// they are held, cut and timed, and carried through a reload.
package streams

import (
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestMain(m *testing.M) { lbtest.Main(m) }

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
