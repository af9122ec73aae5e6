// Package affinity tests that requests go to the account that has what they
// name, and to no other.
package affinity

import (
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestMain(m *testing.M) { lbtest.Main(m) }

// world is one whose backends can be accounts.
type world struct{ *lbtest.World }

func inBubble(t *testing.T, config string, test func(*testing.T, *world)) {
	t.Helper()
	lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) { test(t, &world{w}) })
}

// reply is what a client got.
type reply struct{ lbtest.Reply }
