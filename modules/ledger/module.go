package ledger

import (
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/spf13/cobra"

	"github.com/openai-lb/caddy-openai-lb/internal/admin"
	"github.com/openai-lb/caddy-openai-lb/internal/cli"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

func init() {
	caddy.RegisterModule(Module{})
	caddy.RegisterModule(API{})
	cli.Add(func() []*cobra.Command { return []*cobra.Command{usageCommand()} })
}

// Module opens the ledgers of pools. It has no options.
type Module struct{}

// CaddyModule returns the Caddy module information.
func (Module) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  seam.UsageNamespace + ".ledger",
		New: func() caddy.Module { return new(Module) },
	}
}

// OpenUsage implements seam.UsageModule.
func (Module) OpenUsage(ctx caddy.Context, pool string) seam.UsageRecorder {
	return Open(pool, ctx.Storage(), ctx.Logger())
}

// Record implements seam.UsageRecorder.
func (c *Config) Record(u seam.Usage) {
	key := Key{Caller: u.Caller, Model: u.Model, Backend: u.Backend, ServiceTier: u.ServiceTier}
	c.Add(u.Time, key, UseOf(u.Cost, u.Reported), u.LaterID)
}

// OfCaller implements seam.UsageRecorder.
func (c *Config) OfCaller(now time.Time, caller string) any { return c.Models(now, caller) }

// API adds a route to Caddy's admin API: `GET /openai_lb/usage` lists the pages
// of the ledger, of this month or of `?days=`, a month or a day.
type API struct{}

// usagePath is the path of the route.
const usagePath = "/openai_lb/usage"

// CaddyModule returns the Caddy module information.
func (API) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "admin.api.openai_lb_usage",
		New: func() caddy.Module { return new(API) },
	}
}

// Routes implements caddy.AdminRouter.
func (API) Routes() []caddy.AdminRoute {
	return []caddy.AdminRoute{admin.Shows(usagePath, showPages)}
}

// Interface guards
var (
	_ seam.UsageModule   = Module{}
	_ seam.UsageRecorder = (*Config)(nil)
	_ caddy.AdminRouter  = API{}
)
