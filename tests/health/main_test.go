// Package health tests what is known of backends: who is cooling down for what, for
// how long, and who is called then.
package health

import (
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestMain(m *testing.M) { lbtest.Main(m) }
