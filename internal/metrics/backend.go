package metrics

import (
	"cmp"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/usage"
)

// Pool has the metrics of a pool.
type Pool struct {
	name         string
	allThrottled prometheus.Counter
	attempts     prometheus.Observer
	// FirstBytes tracks the requests that wait for the first byte of a reply.
	FirstBytes FirstBytes

	callerTokens series[bill, tokenCounters]

	mu       sync.Mutex
	backends map[string]*Backend
	labels   labels
}

var (
	byNameMu sync.Mutex
	byName   = make(map[string]*Pool)
	// poolLabels limits how many pools have their own label at a time.
	poolLabels labels
)

// Of returns the metrics of the pool of this name. All configs with that pool
// share them.
func Of(pool string) *Pool {
	byNameMu.Lock()
	defer byNameMu.Unlock()
	name := poolLabels.labelOf(clean(pool))
	p, ok := byName[name]
	if !ok {
		p = &Pool{
			name:         name,
			allThrottled: allThrottledTotal.WithLabelValues(name),
			attempts:     attemptsPerRequest.WithLabelValues(name),
			backends:     make(map[string]*Backend),
		}
		callerTokens := callerTokensTotal.MustCurryWith(prometheus.Labels{"pool": name})
		p.callerTokens.find = func(b bill) tokenCounters {
			return countersOf(callerTokens.MustCurryWith(prometheus.Labels{
				"caller": b.caller, "model": b.model, "tier_served": b.tier,
			}))
		}
		p.callerTokens.bound, p.callerTokens.coarser = callerTokensBound, []func(bill) bill{
			func(b bill) bill { b.model = Other; return b },
			func(b bill) bill { b.demand = demand{Other, Other}; return b },
		}
		byName[name] = p
	}
	return p
}

// AllThrottled counts a request that was refused because every backend
// throttles.
func (p *Pool) AllThrottled() { p.allThrottled.Inc() }

// Waits counts n requests that begin to wait. A negative n ends waits.
func (p *Pool) Waits(n float64) { waitingGauge.WithLabelValues(p.name).Add(n) }

// Waited counts a request that had to wait, and the time. The time is 0 if the
// request found no place.
func (p *Pool) Waited(result string, waited time.Duration) {
	waitedTotal.WithLabelValues(p.name, result).Inc()
	if waited > 0 {
		waitedSeconds.WithLabelValues(p.name).Observe(waited.Seconds())
	}
}

// OwnerThrottled counts a request that was refused because the account that
// stores its objects throttles.
func (b *Backend) OwnerThrottled() { ownerThrottledTotal.WithLabelValues(b.pool.name, b.name).Inc() }

// Moved counts a request that left this silent backend for another.
func (b *Backend) Moved() { movedTotal.WithLabelValues(b.pool.name, b.name).Inc() }

// Steered counts a request that skipped this backend because the backend's
// limits have no room.
func (b *Backend) Steered(deployment string) { b.steered.getOrAdd(deployment).Inc() }

// PassedOver counts a request that skipped this backend because only shares of
// other tiers or callers are left there.
func (b *Backend) PassedOver(tier string) {
	b.passedOver.getOrAdd(clean(tier)).Inc()
}

// OverQuota counts a request, or a response in a WebSocket, that this backend
// does not get because its quota has no room.
func (b *Backend) OverQuota() { overQuotaTotal.WithLabelValues(b.pool.name, b.name).Inc() }

// Affinity counts a request with this kind of affinity, by its result. Without
// a result, it counts nothing.
func (p *Pool) Affinity(kind, result string) {
	if result != "" {
		affinityTotal.WithLabelValues(p.name, kind, result).Inc()
	}
}

// Attempts records how many backends were tried for a request.
func (p *Pool) Attempts(n int) { p.attempts.Observe(float64(n)) }

// Backend has the metrics of one backend of a pool.
type Backend struct {
	pool         *Pool
	name         string
	requests     series[answer, prometheus.Counter]
	attempts     series[attempt, prometheus.Counter]
	failovers    series[string, prometheus.Counter]
	hints        series[string, prometheus.Counter]
	tokens       series[served, tokenCounters]
	unknown      series[string, prometheus.Counter]
	serviceTiers series[[2]string, prometheus.Counter]
	spilled      series[spill, prometheus.Counter]
	steered      series[string, prometheus.Counter]
	passedOver   series[string, prometheus.Counter]
	duration     prometheus.Observer
	firstByte    prometheus.Observer
	last         series[string, *lastSeen]
}

// answer has the labels of an answer of a backend.
type answer struct {
	demand
	class string
	code  int
}

// demand is a caller and a model, as the client named it.
type demand struct{ caller, model string }

// bill has the labels of a caller's tokens: the model, as the client named it,
// and the service tier.
type bill struct {
	demand
	tier string
}

// served is a model, as the client named it, and the deployment and the service
// tier that served it.
type served struct{ model, deployment, tier string }

// attempt has the labels of an attempt at a backend.
type attempt struct{ deployment, class string }

// Backend returns the metrics of the backend of this name. The backend without
// a name counts the balancer's own answers.
func (p *Pool) Backend(backend string) *Backend {
	p.mu.Lock()
	defer p.mu.Unlock()
	name := p.labels.labelOf(clean(backend))
	b, ok := p.backends[name]
	if !ok {
		b = newBackend(p, name)
		p.backends[name] = b
	}
	return b
}

// Forget removes the counts of the backend of this name, unless it is in use.
func Forget(pool, backend string) {
	p, name := Of(pool), clean(backend)
	if membersInUse()[[2]string{p.name, backend}] {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.backends[name].free()
	delete(p.backends, name)
	p.labels.forget(name)
	forgetSeries(prometheus.Labels{"pool": p.name, "backend": name})
	cooldowns.forget(func(labels cooldownLabels) bool { return labels.pool == p.name && labels.backend == name })
}

// forgetPools removes the counts of pools that no config has any more, and
// releases their labels. The label that pools share stays.
func forgetPools() {
	byNameMu.Lock()
	defer byNameMu.Unlock()
	used := map[string]bool{Other: true}
	for _, name := range pools.Default.Names() {
		used[clean(name)] = true
	}
	for name, p := range byName {
		if used[name] {
			continue
		}
		p.free()
		delete(byName, name)
		poolLabels.forget(name)
		forgetSeries(prometheus.Labels{"pool": name})
		cooldowns.forget(func(labels cooldownLabels) bool { return labels.pool == name })
		Recent.forget(name)
	}
}

// free releases the pool's part of the limits of series.
func (p *Pool) free() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, b := range p.backends {
		b.free()
	}
	p.callerTokens.free()
}

// free releases the backend's part of the limits of series. b may be nil.
func (b *Backend) free() {
	if b != nil {
		b.requests.free()
		b.attempts.free()
		b.tokens.free()
	}
}

func forgetSeries(labels prometheus.Labels) {
	for _, c := range collectors {
		if c, ok := c.(interface{ DeletePartialMatch(prometheus.Labels) int }); ok {
			c.DeletePartialMatch(labels)
		}
	}
}

func newBackend(p *Pool, name string) *Backend {
	labels := prometheus.Labels{"pool": p.name, "backend": name}
	b := &Backend{pool: p, name: name, duration: requestDuration.With(labels)}
	word := func(label string) []string { return []string{label} }
	b.requests.find = counters(requestsTotal, labels,
		func(a answer) []string { return []string{a.caller, a.model, a.class, strconv.Itoa(a.code)} })
	b.attempts.find = counters(attemptsTotal, labels,
		func(a attempt) []string { return []string{a.deployment, a.class} })
	b.failovers.find = counters(failoversTotal, labels, word)
	b.hints.find = counters(hintsTotal, labels, word)
	b.unknown.find = counters(tokensUnknownTotal, labels, word)
	b.steered.find = counters(steeredTotal, labels, word)
	b.passedOver.find = counters(tierPassedOverTotal, labels, word)
	b.serviceTiers.find = counters(serviceTierRequestsTotal, labels, func(tiers [2]string) []string { return tiers[:] })
	b.spilled.find = counters(spilloverTotal, labels,
		func(s spill) []string { return []string{s.deployment, s.status, s.result} })
	b.requests.bound, b.requests.coarser = requestsBound, []func(answer) answer{
		func(a answer) answer { a.model = Other; return a },
		func(a answer) answer { a.demand = demand{Other, Other}; return a },
	}
	b.attempts.bound, b.attempts.coarser = attemptsBound, []func(attempt) attempt{
		func(a attempt) attempt { a.deployment = Other; return a },
	}
	tokens := tokensTotal.MustCurryWith(labels)
	b.tokens.find = func(s served) tokenCounters {
		return countersOf(tokens.MustCurryWith(prometheus.Labels{
			"model": s.model, "deployment": s.deployment, "tier_served": s.tier,
		}))
	}
	b.tokens.bound, b.tokens.coarser = tokensBound, []func(served) served{
		func(s served) served { s.model, s.deployment = Other, Other; return s },
	}
	b.last.find = func(string) *lastSeen { return new(lastSeen) }
	if name != "" {
		b.firstByte = timeToFirstByte.With(labels)
	}
	return b
}

// counters returns the function that finds a backend's counter by its other
// labels.
func counters[K any](all *prometheus.CounterVec, backend prometheus.Labels,
	labels func(K) []string) func(K) prometheus.Counter {
	vec := all.MustCurryWith(backend)
	return func(key K) prometheus.Counter { return vec.WithLabelValues(labels(key)...) }
}

// Attempted counts an attempt. The deployment is a label, see Deployment.
func (b *Backend) Attempted(deployment, class string) {
	b.attempts.getOrAdd(attempt{deployment, class}).Inc()
}

// FailedOver counts a request that failed over to another backend.
func (b *Backend) FailedOver(class string) { b.failovers.getOrAdd(class).Inc() }

// Throttled counts a throttle by the source of its hint.
func (b *Backend) Throttled(source string) {
	b.hints.getOrAdd(cmp.Or(source, "none")).Inc()
}

// Answered counts a request that got this backend's reply. Caller and model are
// labels, see Caller and Models. firstByte is 0 if there was no first byte.
func (b *Backend) Answered(caller, model, class string, code int, duration, firstByte time.Duration) {
	b.requests.getOrAdd(answer{demand{caller, model}, class, code}).Inc()
	b.duration.Observe(duration.Seconds())
	if firstByte > 0 && b.firstByte != nil {
		b.firstByte.Observe(firstByte.Seconds())
	}
}

// tokenCounters are the counters of the fields of usage.Tokens.
type tokenCounters [4]prometheus.Counter

func countersOf(vec *prometheus.CounterVec) (c tokenCounters) {
	for i, kind := range [...]string{"input", "cached", "output", "reasoning"} {
		c[i] = vec.WithLabelValues(kind)
	}
	return c
}

func (c *tokenCounters) add(t usage.Tokens) {
	for i, n := range [...]int64{t.Input, t.Cached, t.Output, t.Reasoning} {
		c[i].Add(float64(max(0, n)))
	}
}

// Used counts the tokens that a reply reported, by the service tier that served
// it.
func (b *Backend) Used(caller, model, deployment, tier string, t usage.Tokens) {
	counters := b.tokens.getOrAdd(served{model, deployment, tier})
	counters.add(t)
	if caller != "" {
		counters = b.pool.callerTokens.getOrAdd(bill{demand{caller, model}, tier})
		counters.add(t)
	}
}

// ServiceTier counts a request for a service tier, by the tier that the reply
// names, if any.
func (b *Backend) ServiceTier(asked, served string) {
	b.serviceTiers.getOrAdd([2]string{asked, cmp.Or(served, "unknown")}).Inc()
}

// UsedUnknown counts a reply that did not report its tokens.
func (b *Backend) UsedUnknown(deployment string) { b.unknown.getOrAdd(deployment).Inc() }
