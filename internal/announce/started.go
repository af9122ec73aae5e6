package announce

import (
	"context"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
)

// WhenStarted calls a function when the config that is set up in ctx has started.
// Until then nothing may last, because `caddy validate` sets up configs, too.
func WhenStarted(ctx caddy.Context, do func()) error {
	app, err := ctx.App("events")
	if err != nil {
		return err
	}
	return app.(*caddyevents.App).On("started", starter{do})
}

type starter struct{ do func() }

// Handle implements caddyevents.Handler.
func (s starter) Handle(context.Context, caddy.Event) error {
	s.do()
	return nil
}
