package replicas

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/state"
)

// inUse are the replicas of all loaded configs.
var inUse = caddy.NewUsagePool()

// State is the option that names the engine.
type State struct {
	// StateRaw is the engine by which replicas share what they know, such as
	// `redis`. Default: each replica finds out by itself.
	//
	//	state <engine> [{...}]
	StateRaw json.RawMessage `json:"state,omitempty" caddy:"namespace=http.openai_lb.state inline_key=engine"`
}

// Join returns a link to the replica of the engine. It returns nil if there is
// no engine. Handlers with the same engine share one replica, which outlives
// reloads of the config. The replica runs only after Start, because `caddy
// validate` must not connect to anything.
func (o *State) Join(ctx caddy.Context) (*Link, error) {
	engine, err := directive.Load[state.Engine](ctx, o, "StateRaw", o.StateRaw)
	if engine == nil || err != nil {
		return nil, err
	}
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
