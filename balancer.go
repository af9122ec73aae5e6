package openailb

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/admin"
	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/backend"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
	"github.com/openai-lb/caddy-openai-lb/internal/replicas"
	"github.com/openai-lb/caddy-openai-lb/internal/waiting"
)

// balancer is what all requests of a handler, or of a plain reverse_proxy, have
// in common: a pool, and the backends that its members stand for.
type balancer struct {
	pools.Entry
	targets []*target // by the index of their members
	// sender makes the attempts. It is nil in a plain reverse_proxy with another transport.
	sender *attempt.Sender
	settings
	// front is how requests get here.
	front front
	// hidesHeader keeps the headers of requests from reverse_proxy after each attempt. Its debug
	// log shows them, if that is written.
	hidesHeader bool
	logger      *observe.Log
	events      *observe.Events
	// metrics are those of the pool, and ownMetrics those of what no backend
	// answers. models are the labels of what clients ask for.
	metrics    *metrics.Pool
	ownMetrics *metrics.Backend
	models     metrics.Models
}

// settings are what the options say of requests.
type settings struct {
	// forward sends a request that all backends throttle to the one that
	// returns soonest, instead of refusing it.
	forward bool
	// firstBytes reports whether the policy is first_byte.
	firstBytes bool
	// streamUsage asks for the usage of streams.
	streamUsage bool
	// tiers are the tiers by their numbers. nil: there are none.
	tiers []quota.Tier
	// rateLimits is the option ratelimit_headers. Empty: of the caller.
	rateLimits string
	// waiting has the requests that wait until a backend throttles no longer. nil: none waits.
	waiting *waiting.Lists
}

// front is where requests come from: the directive openai_lb, or a plain reverse_proxy
// with our policy and our transport.
type front interface {
	// Fields decides on the fields of replies.
	attempt.Fields
	// direct makes an outgoing request, which has the header, the host and the URL that
	// reverse_proxy gave it, one for the current backend.
	direct(ex *exchange, out *attempt.Request, credential keys.Credential)
	// rechecks reports whether backends that cannot be reached are checked in the background.
	rechecks() bool
	// finishes reports whether exchanges are finished, and so what they cost is counted.
	finishes() bool
}

// target is a backend as reverse_proxy and the pool see it.
type target struct {
	*pool.Member
	backend  *backend.Backend
	upstream *reverseproxy.Upstream
	// address is where an attempt of the directive is sent. That of a plain reverse_proxy is nil: it dials.
	address *address
	// allModels means that its account serves all models of the pool.
	allModels bool
	// servedAt is when it last served a request: Unix time in nanoseconds.
	servedAt atomic.Int64
	// firstBytes are the times to the first byte of streams, by model, for the
	// policy first_byte.
	firstBytes sync.Map
	metrics    *metrics.Backend
}

func newBalancer(name string, front front, targets []*target, events *observe.Events, listeners ...pool.Listener) *balancer {
	b := &balancer{front: front, targets: targets, logger: events.Log, events: events, metrics: metrics.Of(name)}
	b.ownMetrics = b.metrics.Backend("")
	members := make([]*pool.Member, len(targets))
	var models []string
	for i, t := range targets {
		if t.Checks == nil {
			t.Checks = t.upstream
		}
		t.metrics = b.metrics.Backend(t.Name)
		members[i] = t.Member
		models = append(models, t.Models...)
		for _, m := range t.backend.Model {
			models = append(models, m.Name)
		}
	}
	b.models = metrics.ModelsOf(models)
	b.Entry = pools.Entry{Name: name, Pool: pool.New(members, append(listeners, b.logger, b.metrics, b.events, admin.Recorder(name))...)}
	slices.SortFunc(targets, func(a, b *target) int { return a.Index - b.Index })
	return b
}

// useSender has the attempts made by a sender.
func (b *balancer) useSender(s *attempt.Sender) {
	b.sender = s
	b.Pool.Silence = float64(*s.Silence)
	b.Pool.Steers = s.QuotaSteering == nil || *s.QuotaSteering
}

// open puts the balancer's pool into use until close. Its upstreams must be set up:
// the admin API and the metrics read them.
func (b *balancer) open() { pools.Default.Add(&b.Entry) }

func (b *balancer) close() {
	b.waiting.Close()
	pools.Default.Remove(&b.Entry)
	b.Pool.Close()
}

// targetOf makes a backend a member of a pool. The caller gives its health
// back to pools.UnloadHealth.
func targetOf(b *backend.Backend) *target {
	m := pool.NewMember(b.Name, pools.LoadHealth(b.HealthKey))
	m.Priority, m.Weight, m.MaxRequests = b.Priority, *b.Weight, int64(b.MaxRequests)
	m.Account = b.AccountKey
	m.Models, m.AnyModel = b.Names(), b.Models == nil && b.Deployment == ""
	m.Names, m.Deployment = b.Models, b.Deployment
	upstream := &reverseproxy.Upstream{Dial: b.Dial()}
	return &target{Member: m, backend: b, upstream: upstream, address: addressOf(upstream)}
}

// startFresh forgets what was learned with another key, now and whenever the key
// changes. To other replicas it is then another backend.
func (t *target) startFresh(link *replicas.Link, logger *zap.Logger) {
	key := t.backend.Key()
	if key == nil {
		return
	}
	t.StartFresh(key.Digest())
	key.Changed = func(digest string) {
		t.StartFresh(digest)
		link.Name(t.Member, t.backend.NameForReplicas())
		logger.Info("api_key changed", zap.String("backend", t.Name))
	}
}
