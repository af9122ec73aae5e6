// Package silence tests what becomes of requests to a backend that accepts them
// and sends nothing.
package silence

import (
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestMain(m *testing.M) { lbtest.Main(m) }
