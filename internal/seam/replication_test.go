package seam_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/state"
)

// engine is an engine of state that nothing opens.
type engine struct{ state.Engine }

// TestWithoutTheModuleReplicasThereIsOneReplica as this test has no modules.
func TestWithoutTheModuleReplicasThereIsOneReplica(t *testing.T) {
	alone, err := seam.JoinReplicas(caddy.Context{}, nil)
	if err != nil || alone.Replicas() != 1 || alone.Owners("a pool", []string{"a"}) != nil || alone.Close() != nil {
		t.Errorf("without an engine, there are %d replicas: %v", alone.Replicas(), err)
	}
	if text, _ := json.Marshal(seam.Statuses()); string(text) != "[]" {
		t.Errorf("the engines in use are %s", text)
	}
	var chosen []seam.PeerAnswer
	answers, err := seam.AskReplicas(context.Background(), "status", func(all []seam.PeerAnswer) ([]seam.PeerAnswer, error) {
		chosen = append(all, seam.PeerAnswer{})
		return all, nil
	})
	if err != nil || len(answers) != 0 || len(chosen) != 1 || seam.LastHours(context.Background(), nil) != nil {
		t.Errorf("%d replicas answer, of %d: %v", len(answers), len(chosen)-1, err)
	}
	_, err = seam.JoinReplicas(caddy.Context{}, engine{})
	if err == nil || !strings.Contains(err.Error(), "built without the module replicas (build tag openai_lb_replicas)") {
		t.Errorf("with an engine, got %v", err)
	}
}
