package lbtest

import (
	"net/http"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/openai-lb/caddy-openai-lb/simulator"
)

// Simulate returns a backend that answers as a simulator with these options
// does.
func Simulate(t *testing.T, options simulator.Handler) http.Handler {
	t.Helper()
	ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
	t.Cleanup(cancel)
	if err := options.Provision(ctx); err != nil {
		t.Fatal(err)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), w, new(caddyhttp.Server))
		if err := options.ServeHTTP(w, r, nil); err != nil {
			t.Error(err)
		}
	})
}
