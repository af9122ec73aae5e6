package redis

import (
	"os"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestMain(m *testing.M) {
	if config := os.Getenv(replicaVariable); config != "" {
		runReplica(config)
		return
	}
	if part := os.Getenv(fleetVariable); part != "" {
		runFleetPart(part)
		return
	}
	lbtest.Main(m)
}
