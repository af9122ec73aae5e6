package lbtest

import (
	"sync"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/state"
	"github.com/openai-lb/caddy-openai-lb/state/statetest"
)

// engine is one of state, in memory: `state hub <name>`.
type engine struct {
	Hub string `json:"hub"`
}

func init() { caddy.RegisterModule(engine{}) }

// hubs are the hubs of engines, by their names.
var hubs sync.Map

func (engine) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.openai_lb.state.hub", New: func() caddy.Module { return new(engine) }}
}

func (e *engine) Identity() string { return e.Hub }

func (e *engine) Open() (state.Store, error) { return HubOf(e.Hub).Store(), nil }

func (e *engine) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	d.AllArgs(&e.Hub)
	return nil
}

// HubOf returns the hub that the engines of a name share.
func HubOf(name string) *statetest.Hub {
	hub, _ := hubs.LoadOrStore(name, statetest.NewHub())
	return hub.(*statetest.Hub)
}

// Connect makes a World with this hub exchange with other replicas, which a
// balancer does in Caddy once its config is in use.
func Connect(t *testing.T, hub string) {
	t.Helper()
	link, err := seam.JoinReplicas(Context(t), &engine{Hub: hub})
	if err != nil {
		t.Fatal(err)
	}
	link.Start()
	t.Cleanup(func() { link.Close() })
}
