//go:build openai_lb_core && !openai_lb_replicas

package openailb_test

import (
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestStateIsAnErrorThatNamesTheModuleReplicas(t *testing.T) {
	err := lbtest.ValidateCaddyfile(t, ":80 {\n\topenai_lb {\n\t\tbackend http://a\n\t\tstate hub alone\n\t}\n}")
	if err == nil || !strings.Contains(err.Error(), "state is not available: this binary was built without the module replicas (build tag openai_lb_replicas)") {
		t.Errorf("got %v", err)
	}
}
