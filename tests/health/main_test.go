// Package health tests the state of backends: which requests start a cooldown,
// how long it lasts, and which backends are called meanwhile.
package health

import (
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestMain(m *testing.M) { lbtest.Main(m) }
