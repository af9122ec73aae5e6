package azure

import (
	"os"
	"testing"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// runsCaddy makes the program of the tests the command caddy.
const runsCaddy = "OPENAI_LB_TEST_RUNS_CADDY"

func TestMain(m *testing.M) {
	if os.Getenv(runsCaddy) != "" {
		caddycmd.Main()
		return
	}
	lbtest.Main(m)
}
