// Package failover tests what becomes of a request: which backend it goes to,
// what goes on to another one, and what the client is told in the end.
package failover

import (
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestMain(m *testing.M) { lbtest.Main(m) }
