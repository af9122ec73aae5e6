package callers

import (
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// view shows the callers of a pool to operators. It implements pools.Callers.
type view struct {
	*Callers
	keys *keys.Clients
}

// names returns the callers that the config names.
func (v view) names() []string { return append(v.keys.Names(), v.Callers.Names()...) }

// Snapshots implements pools.Callers.
func (v view) Snapshots(now time.Time) (all []ratelimit.Snapshot) {
	for _, c := range v.kept.limiters.All() {
		all = append(all, c.Snapshot(now))
	}
	return all
}

// Include implements pools.Callers.
func (v view) Include(now time.Time, known func(ratelimit.CallerID) bool) {
	names := v.names()
	v.kept.limiters.Name(now, names)
	for _, name := range names {
		if known != nil && known(ratelimit.IDOf(name)) {
			v.kept.limiters.Get(now, name)
		}
	}
}

// Unlimited implements pools.Callers.
func (v view) Unlimited() []string { return v.Callers.Unlimited(v.keys.Names()) }

// Forgotten implements pools.Callers.
func (v view) Forgotten() int64 { return v.kept.limiters.Evicted() }

// Reset implements pools.Callers.
func (v view) Reset(name string, order pool.Order) (known bool) {
	return v.kept.reset(name, order)
}
