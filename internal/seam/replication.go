package seam

import (
	"context"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/ownership"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/state"
)

// ReplicationNamespace is the namespace of Caddy modules that implement
// ReplicationModule.
const ReplicationNamespace = "http.openai_lb.replication"

// ReplicationModule connects the pools of this process with those of other
// processes that have the same configuration: the replicas of the balancer. It
// reaches them by an engine of the option state. Without such a module, that
// option is an error, and each process works by itself.
//
// Join is called while a config is set up. The other methods are for operators.
// They answer for all engines of the process.
type ReplicationModule interface {
	caddy.Module
	// Join connects a pool with the other replicas. Pools with the same engine
	// share one connection, which outlives reloads. Join makes no request and
	// starts no goroutine, because `caddy validate` calls it, too.
	Join(ctx caddy.Context, engine state.Engine) (Replication, error)
	// Statuses returns the status of each engine in use.
	Statuses() []EngineStatus
	// Ask sends a question to other replicas. choose gets one PeerAnswer
	// without a text for each replica of all engines, and returns those to ask.
	// Ask returns them, with the texts that come before the context is done.
	Ask(ctx context.Context, question string,
		choose func([]PeerAnswer) ([]PeerAnswer, error)) ([]PeerAnswer, error)
	// LastHours returns the last hour of callers, by pool, at the replicas that
	// have not answered, because they have ended or cannot be heard. answers
	// are the ids of the replicas that have answered.
	LastHours(ctx context.Context, answers []string) map[string]map[ratelimit.CallerID]ratelimit.LastHour
}

// Replication connects one pool of a config with the other replicas. It tells
// them what is learned here, and applies what they have learned as if that had
// happened here. While the others cannot be reached, this replica goes on
// alone: information is lost, but never a request.
//
// Nothing is sent before Start. Happened, Name and the methods of Owners are
// called during requests. Of these, only a lookup of owners waits for other
// replicas, for a short time.
type Replication interface {
	// Listener hears what is learned about the backends of the pool, and tells
	// the other replicas. For a cooldown, it also claims the right to the
	// probe, so that one replica sends it.
	pool.Listener
	// Name sets the name of a member's backend, which must be the same at all
	// replicas. If the member had another backend before, that backend's state
	// must be cleared first.
	Name(m *pool.Member, name string)
	// Configured sets the digest of the configuration of the pool with this
	// name, so that operators see replicas that differ. It is called before
	// Open.
	Configured(pool, digest string)
	// Open starts applying what other replicas tell to the members of the pool.
	Open(p *pool.Pool)
	// Share makes the limits of the pool with this name share their use with
	// those of the other replicas.
	Share(pool string, limits Limits)
	// Owners returns the owners of stored objects that the other replicas of
	// the pool with this name know. Only owners in one of these accounts are
	// known by the name of their account. Owners returns nil if there are no
	// other replicas to ask.
	Owners(pool string, accounts []string) ownership.Others
	// Replicas returns how many replicas there are, this one included.
	Replicas() int
	// Secrets calls add for each secret of the engine that is in a file. read
	// reloads the secret.
	Secrets(add func(name string, read func() error))
	// Start is called when the config is in use.
	Start()
	// Close is called when the config is no longer in use, or has not been set
	// up.
	Close() error
}

// Alone is the Replication of a pool without the option state. There are no
// other replicas.
type Alone struct{}

// Happened implements pool.Listener. It does nothing.
func (Alone) Happened(pool.Event) {}

// Name does nothing.
func (Alone) Name(*pool.Member, string) {}

// Configured does nothing.
func (Alone) Configured(string, string) {}

// Open does nothing.
func (Alone) Open(*pool.Pool) {}

// Share does nothing: the callers have all of their limits here.
func (Alone) Share(string, Limits) {}

// Owners returns nil.
func (Alone) Owners(string, []string) ownership.Others { return nil }

// Replicas returns 1.
func (Alone) Replicas() int { return 1 }

// Secrets does nothing.
func (Alone) Secrets(func(string, func() error)) {}

// Start does nothing.
func (Alone) Start() {}

// Close does nothing.
func (Alone) Close() error { return nil }

// JoinReplicas connects a pool with the other replicas that use an engine.
// Without an engine, the pool is alone.
func JoinReplicas(ctx caddy.Context, engine state.Engine) (Replication, error) {
	if engine == nil {
		return Alone{}, nil
	}
	module := replication()
	if module == nil {
		return Alone{}, Missing("state", "replicas")
	}
	joined, err := module.Join(ctx, engine)
	if err != nil {
		return Alone{}, err
	}
	return joined, nil
}

// Statuses returns the status of each engine in use. In JSON, none is an empty
// list.
func Statuses() []EngineStatus {
	if module := replication(); module != nil {
		return module.Statuses()
	}
	return []EngineStatus{}
}

// AskReplicas asks other replicas as ReplicationModule says. Without the
// module, choose gets no replica.
func AskReplicas(ctx context.Context, question string,
	choose func([]PeerAnswer) ([]PeerAnswer, error)) ([]PeerAnswer, error) {
	if module := replication(); module != nil {
		return module.Ask(ctx, question, choose)
	}
	return choose(nil)
}

// LastHours returns the last hour of callers at replicas that have not
// answered, as ReplicationModule says.
func LastHours(ctx context.Context, answers []string) map[string]map[ratelimit.CallerID]ratelimit.LastHour {
	if module := replication(); module != nil {
		return module.LastHours(ctx, answers)
	}
	return nil
}

// replication returns the first module that connects replicas, or nil if there
// is none. It has no options, so it need not be set up.
func replication() ReplicationModule {
	modules := caddy.GetModules(ReplicationNamespace)
	if len(modules) == 0 {
		return nil
	}
	return modules[0].New().(ReplicationModule)
}
