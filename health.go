package openailb

import (
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// learn tells the pool, quotas, metrics and the log what came of the current attempt.
func (b *balancer) learn(in *intent, t *tries, tier int, r *attempt.Reply, now time.Time) {
	a := t.last()
	to, model := a.target, in.benchModel(a.target.backend)
	if a.class, a.status = r.Class, r.Status; r.Class.Failover() { // any other reply may still break off
		a.end()
	}
	if r.Class == verdict.Throttled {
		to.metrics.Throttled(string(r.Source))
	}
	var rates verdict.Rates
	if r.Response != nil && !to.backend.Credentials.Passthrough { // the limits would be the caller's
		rates = verdict.ReadRates(r.Response.Header)
		to.metrics.Saw(a.deployment, rates)
		to.metrics.Spilled(a.deployment, r.Response)
	}
	if c := b.logger.Check(zap.DebugLevel, "attempt"); c != nil {
		c.Write(zap.String("backend", to.Name), in.callerField(), zap.String("class", string(r.Class)), zap.Int("status", r.Status),
			zap.Duration("duration", now.Sub(a.started)), zap.String("hint", string(r.Source)), zap.String("affinity", in.placement.Why(t.ask.Affinity)), attempt.ErrorField(r.Err))
	}
	if !r.Class.Failover() {
		to.Served(pool.Scope{Model: model, Flex: a.flex}, a.started)
		to.servedAt.Store(now.UnixNano())
	}
	b.learnQuota(in, a, tier, r, rates, now)
	a.giveBack(r)
	if r.Connected || r.Status > 0 {
		to.Reached()
	}
	if to.backend.Credentials.Outdated(a.credential) {
		return // it says nothing of the key that there is now
	}
	its, benches := b.sender.Bench(r, to.servesOthers(a.started))
	if !benches || its.MayBeOfRequest && !t.claim() {
		return
	}
	covers := pool.Scope{Model: model, Flex: a.flex && r.AboutFlex()}
	began := to.Bench(pool.Refusal{
		Reason:      r.Reason(),
		Throttle:    r.Class.Promise(),
		Whole:       in.wholeBackend(r.Class),
		Unreachable: r.Class == verdict.Unreachable,
		Model:       model,
		Flex:        covers.Flex,
		Cost:        in.Cost,
		Wait:        its.Wait,
		Longest:     its.Longest,
		Guess:       its.Guess,
		Started:     a.started,
	}, now)
	if began && r.Class.Promise() {
		a.benched, a.benches = now, covers
	}
}

// servesOthers reports whether the backend serves other requests, or has done so
// since then.
func (t *target) servesOthers(since time.Time) bool {
	return t.InFlight() > 1 || t.servedAt.Load() >= since.UnixNano()
}

// learnEnd learns that a reply was cut, or contained an error, after its beginning went to the client. A backend that
// had sent data in a WebSocket is not benched.
func (b *balancer) learnEnd(in *intent, t *tries, end attempt.End) {
	if end.Broken == nil {
		return
	}
	now, a := time.Now(), t.last()
	duration := zap.Duration("duration", now.Sub(a.started))
	if end.Paused {
		a.class = verdict.ClientError
		if c := b.logger.Check(zap.DebugLevel, "reply broken while the client paused"); c != nil {
			c.Write(zap.String("backend", a.target.Name), duration, attempt.ErrorField(end.Broken))
		}
		return
	}
	a.class = verdict.BrokenStream
	if c := b.logger.Check(zap.WarnLevel, "reply broken"); c != nil {
		c.Write(zap.String("backend", a.target.Name), zap.String("deployment", pool.ModelKey(a.target.backend.NameOf(in.Model))), duration, attempt.ErrorField(end.Broken))
	}
	model := in.benchModel(a.target.backend)
	if !end.Begun && t.claim() {
		a.target.Bench(pool.Refusal{
			Reason: pool.Reason{Class: string(a.class), Status: a.status, Cause: verdict.CauseOf(end.Broken), Error: attempt.ErrorText(end.Broken)},
			Model:  model, Flex: a.flex, Wait: b.sender.Failure().Wait,
		}, now)
	}
}

// knowsQuota reports whether anything depends on what is left of the backends' limits.
func (b *balancer) knowsQuota() bool { return b.Pool.Steers || b.rateLimits == rateLimitsOfPool }

// deduct deducts the request from what is left of the backend's limits.
func (b *balancer) deduct(in *intent, to *target, tier int, now time.Time) quota.Mark {
	switch {
	case !in.hasQuota(to):
		return quota.Mark{}
	case b.tiers != nil:
		return to.Give(in.benchModel(to.backend), in.Cost, tier, now)
	case !b.knowsQuota():
		return quota.Mark{}
	}
	return to.Deduct(in.benchModel(to.backend), in.Cost)
}

// learnQuota learns what a reply says about the backend's quota. The model may have become known by this
// reply, so the tier's demand is recorded again.
func (b *balancer) learnQuota(in *intent, a *try, tier int, r *attempt.Reply, rates verdict.Rates, now time.Time) {
	if r.Response == nil || !in.hasQuota(a.target) || b.tiers == nil && !b.knowsQuota() || a.flex && r.Class == verdict.Throttled && r.AboutFlex() {
		return
	}
	model := in.benchModel(a.target.backend)
	meter := a.target.Quota(model)
	if meter == nil {
		return
	}
	if b.tiers != nil {
		meter.Ask(tier, a.started)
	}
	meter.See(quota.Reply{Rates: rates, Throttles: r.Class.Promise(), Served: r.Class == verdict.Served, Cost: in.Cost, Mark: a.mark, Sent: a.started}, model, now)
}

// callerTierOf is the tier of a request. Shares do not apply to a request for an object that one account stores,
// because no other backend can serve it, nor to operations other than inference, which have separate limits.
// While a reload goes on, callers may still have, or have already, the tiers of the other config.
func (b *balancer) callerTierOf(in *intent, n int) quota.Tier {
	if n == 0 || n >= len(b.tiers) || !in.Kind.Infers() || !in.placement.Anywhere() {
		return quota.Tier{Number: n}
	}
	return b.tiers[n]
}
