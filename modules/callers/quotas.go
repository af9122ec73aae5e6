package callers

import (
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/certmagic"

	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

// quotas limits what the backends of a pool get, by the options requests and
// tokens of a backend. For the limiters, a backend is a caller whose name is
// the backend's health key.
type quotas struct {
	keptUse
	seam.QuotaConfig
	storage certmagic.Storage
}

// OpenQuotas implements seam.AdmissionModule.
func (Module) OpenQuotas(ctx caddy.Context, o seam.QuotaConfig) (seam.Limits, error) {
	return openQuotas(o, ctx.Storage()), nil
}

func openQuotas(o seam.QuotaConfig, storage certmagic.Storage) *quotas {
	u, again := keep(subjectBackends, o.Pool)
	q := &quotas{u, o, storage}
	if !again {
		q.Start()
	}
	return q
}

// Start implements seam.Limits.
func (q *quotas) Start() {
	q.kept.configure(q.storage, q.Logger, nil)
	q.kept.limiters.Configure(time.Now(), func(backend string) limiter.Settings {
		return limiter.Settings{Limits: q.Quotas[backend], Location: q.Location}
	})
}
