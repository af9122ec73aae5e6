package openailb

import (
	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/replicas"
)

func init() { caddy.RegisterModule(adminMetrics{}) }

// adminMetrics keeps the metrics in Caddy's admin API while a config is loaded.
// It has no routes.
type adminMetrics struct{}

// CaddyModule returns the Caddy module information.
func (adminMetrics) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "admin.api.openai_lb_metrics",
		New: func() caddy.Module { return new(adminMetrics) },
	}
}

// Provision registers the metrics of the pools in use with the registry of a
// config that is being loaded: the admin API has that registry before the
// config's own pools are set up, and keeps it if that fails.
func (adminMetrics) Provision(ctx caddy.Context) error {
	if len(pools.Default.Entries()) == 0 {
		return nil
	}
	if err := metrics.Register(ctx.GetMetricsRegistry()); err != nil || len(replicas.Statuses()) == 0 {
		return err
	}
	return replicas.Register(ctx.GetMetricsRegistry())
}

// Routes implements caddy.AdminRouter.
func (adminMetrics) Routes() []caddy.AdminRoute { return nil }

// Interface guards
var (
	_ caddy.Provisioner = adminMetrics{}
	_ caddy.AdminRouter = adminMetrics{}
)
