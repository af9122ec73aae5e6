// Package streams tests bodies, streams and connections as they come and go: how
// they are held, cut and timed, and carried through a reload.
package streams

import (
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestMain(m *testing.M) { lbtest.Main(m) }
