// Package faults tests what goes wrong between the balancer and a backend, by
// the wire: HTTP/1.1, HTTP/2 and TLS that break, stall or make no sense.
package faults

import (
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestMain(m *testing.M) { lbtest.Main(m) }
