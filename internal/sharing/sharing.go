// Package sharing connects handlers with the engine of their option state.
// Handlers whose engines are the same share one replica, which outlives reloads
// of the config.
package sharing

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"sync"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/announce"
	"github.com/openai-lb/caddy-openai-lb/internal/replicas"
	"github.com/openai-lb/caddy-openai-lb/state"
)

// shares are the replicas of all configs that are loaded.
var shares = caddy.NewUsagePool()

// share is a replica in use by any number of handlers.
type share struct {
	replica *replicas.Replica
	store   state.Store

	mu   sync.Mutex
	stop func() // nil: it does not run yet
}

// run lets the replica share from now on, and log there.
func (s *share) run(logger *zap.Logger) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.replica.SetLogger(logger)
	if s.stop != nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.replica.Run(ctx)
	}()
	s.stop = func() {
		cancel()
		<-done
	}
}

// Destruct ends the share after its last use.
func (s *share) Destruct() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stop != nil {
		s.stop()
	}
	return s.store.Close()
}

// Membership is a handler's part in a share. A nil Membership does nothing.
type Membership struct {
	link *replicas.Link
	key  string
}

// State is the option that names the engine.
type State struct {
	// StateRaw is the engine by which replicas of the balancer tell each other
	// which backends are benched or drained, and which account has a stored
	// object. It is a module in the namespace http.openai_lb.state, such as
	// `redis`. Default: each replica has to find out by itself.
	StateRaw json.RawMessage `json:"state,omitempty" caddy:"namespace=http.openai_lb.state inline_key=engine"`
}

// Join makes a handler that is being provisioned part of the share of its
// engine, if it has one. The replica runs from when Caddy has started on: who
// only validates a config connects to nobody.
func (o *State) Join(ctx caddy.Context) (*Membership, error) {
	if o.StateRaw == nil {
		return nil, nil
	}
	loaded, err := ctx.LoadModule(o, "StateRaw")
	if err != nil {
		return nil, fmt.Errorf("state: %w", err)
	}
	engine, ok := loaded.(state.Engine)
	if !ok {
		return nil, fmt.Errorf("state: a module of type %T cannot be used here", loaded)
	}
	if err := replicas.Register(ctx.GetMetricsRegistry()); err != nil {
		return nil, err
	}
	name := loaded.(caddy.Module).CaddyModule().ID.Name()
	m := &Membership{key: fmt.Sprintf("%s %x", name, sha256.Sum256([]byte(engine.Identity())))}
	value, _, err := shares.LoadOrNew(m.key, func() (caddy.Destructor, error) {
		store, err := engine.Open()
		if err != nil {
			return nil, err
		}
		return &share{replica: replicas.New(store, zap.NewNop()), store: store}, nil
	})
	if err != nil {
		return nil, fmt.Errorf("state: %w", err)
	}
	s := value.(*share)
	m.link = s.replica.NewLink()
	logger := ctx.Logger().With(zap.String("engine", name))
	return m, announce.On(ctx, announce.Started, func() { s.run(logger) })
}

// Link connects a pool with the other replicas. It is nil without an engine.
func (m *Membership) Link() *replicas.Link {
	if m == nil {
		return nil
	}
	return m.link
}

// Leave ends the membership.
func (m *Membership) Leave() error {
	if m == nil {
		return nil
	}
	m.link.Close()
	_, err := shares.Delete(m.key)
	return err
}
