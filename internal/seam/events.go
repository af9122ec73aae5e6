package seam

import (
	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// EventsNamespace is the namespace of Caddy modules that implement
// EventsModule.
const EventsNamespace = "http.openai_lb.event_listeners"

// EventsModule listens to the events of each pool, such as that the cooldown of
// a backend starts, or that an operator drains it. These events are rare: none
// of them occurs for each request.
type EventsModule interface {
	caddy.Module
	// Listener returns the listener for a pool of this name. It is used until
	// the config of ctx, which has the pool, is no longer in use.
	Listener(ctx caddy.Context, name string) (pool.Listener, error)
}

// Listeners returns the listeners for a pool, one of each module.
func Listeners(ctx caddy.Context, name string) (all []pool.Listener, err error) {
	for _, info := range caddy.GetModules(EventsNamespace) {
		module, err := ctx.LoadModuleByID(string(info.ID), nil)
		if err != nil {
			return nil, err
		}
		listener, err := module.(EventsModule).Listener(ctx, name)
		if err != nil {
			return nil, err
		}
		all = append(all, listener)
	}
	return all, nil
}
