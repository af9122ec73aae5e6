// Package steering tests that requests pass backends over whose limits have no
// room for them.
package steering

import (
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestMain(m *testing.M) { lbtest.Main(m) }
