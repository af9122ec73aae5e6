package replicas

import (
	"crypto/sha256"
	"fmt"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/ownership"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/state"
)

// inUse are the replicas of all loaded configs.
var inUse = caddy.NewUsagePool()

func init() { caddy.RegisterModule(Module{}) }

// Module connects pools with other replicas. It has no options.
type Module struct{}

// CaddyModule returns the Caddy module information.
func (Module) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  seam.ReplicationNamespace + ".replicas",
		New: func() caddy.Module { return new(Module) },
	}
}

// Join implements seam.ReplicationModule. Pools with the same engine share one
// Replica, which outlives reloads of the config. The Replica runs only after
// Start.
func (Module) Join(ctx caddy.Context, engine state.Engine) (seam.Replication, error) {
	if err := Register(ctx.GetMetricsRegistry()); err != nil {
		return nil, err
	}
	name := engine.(caddy.Module).CaddyModule().ID.Name()
	key := fmt.Sprintf("%s %x", name, sha256.Sum256([]byte(engine.Identity())))
	value, _, err := inUse.LoadOrNew(key, func() (caddy.Destructor, error) {
		store, err := engine.Open()
		if err != nil {
			return nil, err
		}
		return New(store, zap.NewNop()), nil
	})
	if err != nil {
		return nil, fmt.Errorf("state: %w", err)
	}
	l := value.(*Replica).NewLink()
	l.storage, l.engine = ctx.Storage(), name
	l.key, l.logger = key, ctx.Logger().With(zap.String("engine", name))
	if reader, ok := engine.(state.SecretReader); ok {
		l.secrets = reader.Secrets()
	}
	return l, nil
}

// Interface guards
var (
	_ seam.ReplicationModule = Module{}
	_ seam.Replication       = (*Link)(nil)
	_ ownership.Others       = (*Owners)(nil)
	_ caddy.Provisioner      = adminMetrics{}
	_ caddy.AdminRouter      = adminMetrics{}
)
