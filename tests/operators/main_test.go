// Package operators tests what operators see of backends, and what they can
// have done to them.
package operators

import (
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestMain(m *testing.M) { lbtest.Main(m) }
