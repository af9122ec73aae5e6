package observe

import (
	"context"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
)

// Caddy's own events of a config. Before Started, nothing that lasts may begin,
// because `caddy validate` sets up configs, too.
const (
	Started  = "started"
	Stopping = "stopping"
)

// On calls a function at an event of the config that is set up in ctx.
func On(ctx caddy.Context, event string, do func()) error {
	app, err := ctx.App("events")
	if err != nil {
		return err
	}
	return app.(*caddyevents.App).On(event, handler{do})
}

type handler struct{ do func() }

// Handle implements caddyevents.Handler.
func (h handler) Handle(context.Context, caddy.Event) error {
	h.do()
	return nil
}
