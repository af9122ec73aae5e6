// Package observe tests what operators see: metrics, logs, events and traces.
package observe

import (
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestMain(m *testing.M) { lbtest.Main(m) }
