package openailb

import (
	"slices"
	"sync/atomic"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/backend"
	"github.com/openai-lb/caddy-openai-lb/internal/lacks"
	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/internal/waiting"
)

// balancer is the state that all requests of a handler share: a pool, and the
// backends that are its members.
type balancer struct {
	pools.Entry
	targets []*target // by the index of their members
	sender  *attempt.Sender
	settings
	logger *observe.Log
	events *observe.Events
	// metrics are the pool's metrics. ownMetrics counts the balancer's own
	// answers. models maps the models that clients ask for to labels.
	metrics    *metrics.Pool
	ownMetrics *metrics.Backend
	models     metrics.Models
	// admission limits callers. It is nil without limits.
	admission seam.Admission
	// quotas limits what backends get. It is nil without quotas.
	quotas seam.Limits
	// usage lists the modules that record the usage of requests.
	usage seam.UsageRecorders
}

// settings are the options that apply to every request.
type settings struct {
	// policy is the option lb_policy.
	policy reverseproxy.Selector
	// tiers are the tiers, indexed by number. It is nil without tiers.
	tiers []quota.Tier
	// rateLimits is the option ratelimit_headers. Empty means the caller's
	// limits.
	rateLimits string
	// waiting are the queues of requests that wait for the end of a throttle or
	// for a limit of their caller. It is nil without the option wait.
	waiting *waiting.Queues
	// fields decides which fields of a reply the client gets.
	fields attempt.Fields
	// webSockets relays open WebSockets. It is nil in a build without such a
	// module. webSocketOptions are the options of all WebSockets.
	webSockets       seam.WebSocketModule
	webSocketOptions seam.WebSocketOptions
	// loops recognizes requests that this handler has sent and that came back.
	loops loopMark
}

// target is a backend as the pool, a policy and Caddy's transport see it.
type target struct {
	*pool.Member
	backend  *backend.Backend
	upstream *reverseproxy.Upstream
	// address is where an attempt is sent.
	address *attempt.Address
	// answeredAt is the time of the backend's latest reply that was not a
	// failure, in Unix nanoseconds.
	answeredAt atomic.Int64
	metrics    *metrics.Backend
	// models and paths are the models and paths that the backend said it lacks,
	// within the last minute. blocked counts requests in a row that a firewall
	// in front of the backend refused.
	models, paths lacks.Set
	blocked       lacks.Streaks
}

func newBalancer(name string, targets []*target, sender *attempt.Sender, events *observe.Events,
	listeners ...pool.Listener) *balancer {
	b := &balancer{targets: targets, sender: sender, logger: events.Log, events: events, metrics: metrics.Of(name)}
	b.ownMetrics = b.metrics.Backend("")
	members := make([]*pool.Member, len(targets))
	var models []string
	for i, t := range targets {
		t.metrics = b.metrics.Backend(t.Name)
		members[i] = t.Member
		models = append(models, t.Models...)
		for _, m := range t.backend.Model {
			models = append(models, m.Name)
		}
	}
	b.models = metrics.ModelsOf(models)
	b.Entry = pools.Entry{
		Name: name, Pool: pool.New(members, append(listeners, b.logger, b.metrics, b.events, resetter(targets))...),
	}
	slices.SortFunc(targets, func(a, b *target) int { return a.Index - b.Index })
	return b
}

// resetter is a pool listener that clears the lacking models and paths of a
// backend when an operator resets it.
type resetter []*target

// Happened implements pool.Listener.
func (targets resetter) Happened(e pool.Event) {
	if e.Happening != pool.WasReset {
		return
	}
	for _, t := range targets {
		if t.Member == e.Member {
			t.forgetLacks()
		}
	}
}

// forgetLacks forgets which models and paths the backend lacks, and which
// requests its firewall refused.
func (t *target) forgetLacks() {
	t.models.Clear()
	t.paths.Clear()
	t.blocked.Clear()
}

// targetOf returns a backend as a member of a pool. The caller must release its
// health with pools.UnloadHealth.
func targetOf(b *backend.Backend) *target {
	m := pool.NewMember(b.Name, pools.LoadHealth(b.HealthKey))
	m.Priority, m.Weight, m.MaxRequests = b.Priority, *b.Weight, int64(b.MaxRequests)
	m.Account, m.FollowsLimits = b.AccountKey, b.FollowsLimits()
	m.Models, m.AnyModel = b.Names(), b.Models == nil && b.Deployment == ""
	m.Names, m.Deployment, m.ServiceTier = b.Models, b.Deployment, b.ServiceTier
	m.SharedLimits = b.SharedLimits
	upstream := &reverseproxy.Upstream{Host: new(reverseproxy.Host), Dial: b.Dial()}
	return &target{Member: m, backend: b, upstream: upstream, address: attempt.AddressOf(upstream)}
}

// startFresh clears the backend's state if it was learned with another key, now
// and whenever the key changes. For other replicas, a backend with another key
// is another backend.
func (t *target) startFresh(replication seam.Replication, trail *observe.Trail) {
	key := t.backend.Key()
	if key == nil {
		return
	}
	t.StartFresh(key.Digest())
	key.Changed = func(digest string) {
		t.StartFresh(digest)
		t.forgetLacks()
		replication.Name(t.Member, t.backend.NameForReplicas())
		trail.APIKey(t.Name, digest)
	}
}
