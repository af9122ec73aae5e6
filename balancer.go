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
	"github.com/openai-lb/caddy-openai-lb/internal/replicas"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/internal/waiting"
	"github.com/openai-lb/caddy-openai-lb/internal/websocket"
)

// balancer is what all requests of a handler have in common: a pool, and the
// backends that its members stand for.
type balancer struct {
	pools.Entry
	targets []*target // by the index of their members
	sender  *attempt.Sender
	settings
	logger *observe.Log
	events *observe.Events
	// metrics are those of the pool. ownMetrics counts the balancer's own
	// answers. models are the labels of the models that clients ask for.
	metrics    *metrics.Pool
	ownMetrics *metrics.Backend
	models     metrics.Models
	// usage has the modules that record what requests have used.
	usage seam.UsageRecorders
}

// settings are what the options say of requests.
type settings struct {
	// policy is the option lb_policy.
	policy reverseproxy.Selector
	// tiers are the tiers by their numbers. nil: there are none.
	tiers []quota.Tier
	// rateLimits is the option ratelimit_headers. Empty: of the caller.
	rateLimits string
	// waiting are the queues of requests that wait for the end of a throttle.
	// It is nil without the option wait.
	waiting *waiting.Lists
	// fields decides which fields of a reply the client gets.
	fields attempt.Fields
	// webSockets apply to all WebSockets.
	webSockets websocket.Options
	// loops recognizes the requests that come back.
	loops loopMark
}

// target is a backend as the pool, a policy and Caddy's transport see it.
type target struct {
	*pool.Member
	backend  *backend.Backend
	upstream *reverseproxy.Upstream
	// address is where an attempt is sent.
	address *attempt.Address
	// answeredAt is when it last answered a request without a failure: Unix
	// time in nanoseconds.
	answeredAt atomic.Int64
	metrics    *metrics.Backend
	// models and paths are what it lacks, as it has said within the last
	// minute. blocked are the requests in a row that were refused by a server
	// in front of it.
	models, paths lacks.Set
	blocked       lacks.Streaks
}

func newBalancer(name string, targets []*target, sender *attempt.Sender, events *observe.Events, listeners ...pool.Listener) *balancer {
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
	b.Entry = pools.Entry{Name: name, Pool: pool.New(members, append(listeners, b.logger, b.metrics, b.events, resetter(targets))...)}
	slices.SortFunc(targets, func(a, b *target) int { return a.Index - b.Index })
	return b
}

// resetter makes targets forget what they lack when an operator resets them.
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

// forgetLacks forgets what the backend has said it lacks.
func (t *target) forgetLacks() {
	t.models.Clear()
	t.paths.Clear()
	t.blocked.Clear()
}

// targetOf makes a backend a member of a pool. The caller gives its health
// back to pools.UnloadHealth.
func targetOf(b *backend.Backend) *target {
	m := pool.NewMember(b.Name, pools.LoadHealth(b.HealthKey))
	m.Priority, m.Weight, m.MaxRequests = b.Priority, *b.Weight, int64(b.MaxRequests)
	m.Account, m.FollowsLimits = b.AccountKey, b.FollowsLimits()
	m.Models, m.AnyModel = b.Names(), b.Models == nil && b.Deployment == ""
	m.Names, m.Deployment, m.ServiceTier = b.Models, b.Deployment, b.ServiceTier
	upstream := &reverseproxy.Upstream{Host: new(reverseproxy.Host), Dial: b.Dial()}
	return &target{Member: m, backend: b, upstream: upstream, address: attempt.AddressOf(upstream)}
}

// startFresh forgets what was learned with another key, now and whenever the
// key changes. To other replicas it is then another backend.
func (t *target) startFresh(link *replicas.Link, trail *observe.Trail) {
	key := t.backend.Key()
	if key == nil {
		return
	}
	t.StartFresh(key.Digest())
	key.Changed = func(digest string) {
		t.StartFresh(digest)
		t.forgetLacks()
		link.Name(t.Member, t.backend.NameForReplicas())
		trail.APIKey(t.Name, digest)
	}
}
