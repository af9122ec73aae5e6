package openailb

import (
	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
)

func init() { caddy.RegisterModule(adminMetrics{}) }

// adminMetrics is an admin API module that keeps the metrics registered while a
// config is loaded. It has no routes.
type adminMetrics struct{}

// CaddyModule returns the Caddy module information.
func (adminMetrics) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "admin.api.openai_lb_metrics",
		New: func() caddy.Module { return new(adminMetrics) },
	}
}

// Provision registers the metrics of the pools in use with the registry of the
// config that is being loaded. The admin API serves that registry before the
// config's own pools are set up, and goes on serving it if that setup fails.
func (adminMetrics) Provision(ctx caddy.Context) error {
	if len(pools.Default.Entries()) == 0 {
		return nil
	}
	return metrics.Register(ctx.GetMetricsRegistry())
}

// Routes implements caddy.AdminRouter.
func (adminMetrics) Routes() []caddy.AdminRoute { return nil }

// Interface guards
var (
	_ caddy.Provisioner = adminMetrics{}
	_ caddy.AdminRouter = adminMetrics{}
)
