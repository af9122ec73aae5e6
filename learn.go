package openailb

import (
	"errors"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// judgement is the meaning of the reply to an attempt for its request, besides
// the reply's class. It is made once; the search, the pool and the log all use
// it.
type judgement struct {
	// left reports whether the client has left, for which no backend is to
	// blame.
	left bool
	// refusal is the error for a request that could not be sent because of the
	// client. It is nil if there was no such problem.
	refusal *apierror.Error
	// executed reports whether the backend may have executed a request that
	// must not be executed twice.
	executed bool
	// unexecuted reports whether the backend has certainly not executed the
	// request.
	unexecuted bool
	// ofCaller reports whether the backend refused the caller's own credential,
	// which says nothing about the backend.
	ofCaller bool
}

// judge returns the meaning of the reply to the attempt in progress. The reply
// comes with the class that follows from the reply alone. judge replaces that
// class where the client, the credential or other attempts give the reply
// another meaning. The class does not change afterwards.
func judge(q *request, s *search, r *attempt.Reply) judgement {
	var j judgement
	a := s.attempts.last()
	credentials := &a.target.backend.Credentials
	switch {
	case q.secret != nil:
		if r.Class == verdict.Credential || r.Class == verdict.NotPermitted { // which says nothing of the backend's key
			r.Class, j.ofCaller = verdict.ClientError, true
		}
	case credentials.Passthrough && r.Class.OfCredential():
		r.Class, j.ofCaller = verdict.ClientError, true
	case (r.Class == verdict.Credential || r.Class == verdict.NotPermitted) && credentials.HasReplaced(a.credential):
		r.Class = verdict.NoCredential // the refusal does not apply to the credential that there is now
	}
	s.compare(r)
	j.executed, j.unexecuted = !q.Kind.Repeatable() && r.PerhapsExecuted(), r.Unexecuted()
	// A client that was too slow with its body is still connected, although
	// net/http's server cancels its request as if it had left.
	if r.Ended(q.incoming) != nil && !q.isLate() {
		j.left, r.Class = true, verdict.ClientLeftWaiting
		if q.received.Failure() != nil {
			r.Class = verdict.ClientLeft
		}
	} else if refusal, refused := r.ClientsFault(); refused {
		j.refusal, r.Class = &refusal, verdict.ClientError
	}
	return j
}

// learn passes the result of the current attempt to the pool, the quotas, the
// metrics and the log.
func (b *balancer) learn(q *request, s *search, r *attempt.Reply, j judgement) {
	a, now := s.attempts.last(), time.Now()
	switch {
	case j.left:
		if j.unexecuted {
			s.undeduct(now)
			s.returnCharge(r.Class)
		}
		return
	case j.refusal != nil:
		s.undeduct(now) // no backend got all of it
		s.charge().settle(ratelimit.Cost{})
		return
	}
	to, model := a.target, q.cooldownModel(a.target.backend)
	switch r.Class {
	case verdict.Throttled:
		to.metrics.Throttled(string(r.Source))
	case verdict.Loop:
		b.logger.Looped(to.Name, now)
	}
	var rates verdict.Rates
	if r.Response != nil && !to.backend.Credentials.Passthrough { // the limits would be the caller's
		rates = verdict.ReadRates(r.Response.Header)
		if a.tiers.ShareLimits() {
			to.metrics.Saw(a.deployment, rates)
		}
		to.metrics.Spilled(a.deployment, r.Response)
	}
	if c := b.logger.Check(zap.DebugLevel, "attempt"); c != nil {
		c.Write(zap.String("backend", to.Name), q.callerField(), zap.String("class", string(r.Class)),
			zap.Int("status", r.Status),
			zap.Duration("duration", now.Sub(a.started)), zap.String("hint", string(r.Source)),
			zap.String("affinity", s.placement.Why(s.board.Affinity)), attempt.ErrorField(r.Err))
	}
	if !r.Class.Failover() && !j.ofCaller {
		if scope := (pool.Scope{Model: model, Tiers: a.tiers,
			Operation: s.board.Operation}); r.Class == verdict.Served {
			to.Served(scope, a.started)
		} else {
			to.Answered(scope, a.started)
		}
		to.answeredAt.Store(now.UnixNano())
	}
	b.learnQuota(q, a, int(s.tier), r, rates, now)
	q.learnLacks(to, r, now)
	if j.unexecuted {
		s.undeduct(now)
	}
	if r.Connected || r.Status > 0 {
		to.Reached()
	}
	// the refusal of an outdated key says nothing about the current one
	if q.secret != nil || !to.backend.Credentials.Outdated(a.credential) {
		b.coolDown(q, s, r, now)
	}
	if j.unexecuted {
		s.returnCharge(r.Class) // last, because it wakes requests that wait for the backend
	}
}

// learnLacks records whether the backend has the model and the path of a
// request for inference.
func (q *request) learnLacks(to *target, r *attempt.Reply, now time.Time) {
	if !q.Kind.Infers() {
		return
	}
	switch {
	case r.LacksPath:
		to.paths.Add(q.pathName(), now)
	case r.Class == verdict.NoModel && q.Model != "" && r.AboutTiers() == pool.UsualTiers:
		to.models.Add(q.lackedModel(to), now)
	case r.Class == verdict.Served:
		to.models.Remove(q.lackedModel(to))
	}
}

// coolDown starts the cooldown that a reply asks for, or that a failure causes.
func (b *balancer) coolDown(q *request, s *search, r *attempt.Reply, now time.Time) {
	a := s.attempts.last()
	to, model := a.target, q.cooldownModel(a.target.backend)
	asked, coolsDown := b.sender.CooldownFor(r, to.servesOthers(a.started))
	if !coolsDown || asked.OncePerRequest && !s.takeBlame() {
		return
	}
	tiers, operation := r.AboutTiers(), ""
	if r.Class == verdict.NotPermitted {
		operation = s.board.Operation // the key may be permitted to do others
	}
	began := to.CoolDown(pool.Refusal{
		Reason:      r.Reason(),
		Throttle:    r.Class.Promise(),
		Whole:       q.wholeBackend(r.Class),
		Unreachable: r.Class == verdict.Unreachable,
		Model:       model,
		Tiers:       tiers,
		Operation:   operation,
		Cost:        q.Cost,
		Wait:        asked.Wait,
		Longest:     asked.Longest,
		Guess:       asked.Guess,
		Started:     a.started,
	}, now)
	if began && r.Class.Promise() {
		a.cooldown = cooldown{now, tiers}
	}
}

// returnCharge returns the charge of the latest attempt to the quotas of its
// backend, which has not executed the request. A request that is its client's
// mistake is charged nevertheless.
func (s *search) returnCharge(class verdict.Class) {
	if class != verdict.ClientError {
		s.charge().settle(ratelimit.Cost{})
	}
}

// undeduct returns the deduction of the latest attempt to the backend's limits
// and to the request's caller.
func (s *search) undeduct(now time.Time) {
	s.attempts.last().reservation.Return()
	s.board.Demand.Get(-s.request.Cost, now)
}

// learnEnd records that a reply was cut, or contained an error, after its
// beginning went to the client. A backend that had sent data in a WebSocket
// gets no cooldown.
func (b *balancer) learnEnd(q *request, s *search, end attempt.End) {
	if end.Broken == nil {
		return
	}
	now, a := time.Now(), s.attempts.last()
	a.end = end
	duration := zap.Duration("duration", now.Sub(a.started))
	if end.Paused {
		if c := b.logger.Check(zap.DebugLevel, "reply broken while the client paused"); c != nil {
			c.Write(zap.String("backend", a.target.Name), duration, attempt.ErrorField(end.Broken))
		}
		return
	}
	if c := b.logger.Check(zap.WarnLevel, "reply broken"); c != nil {
		c.Write(zap.String("backend", a.target.Name),
			zap.String("deployment", pool.ModelKey(a.target.backend.NameOf(q.Model))), duration,
			attempt.ErrorField(end.Broken))
	}
	credentials, model := &a.target.backend.Credentials, q.cooldownModel(a.target.backend)
	if errors.Is(end.Broken, attempt.ErrIdle) {
		return // a model may think for long, and the connection is alive
	}
	if errors.Is(end.Broken, attempt.ErrInStream) && (credentials.Passthrough || credentials.Outdated(a.credential)) {
		return // it is about an account that other requests do not use
	}
	if !end.Begun && s.takeBlame() {
		reason := pool.Reason{Class: string(verdict.BrokenStream), Status: a.status, Cause: verdict.CauseOf(end.Broken),
			Error: attempt.ErrorText(end.Broken)}
		a.target.CoolDown(pool.Refusal{
			Reason: reason, Model: model, Tiers: a.tiers, Wait: b.sender.Failure().Wait,
		}, now)
	}
}

// servesOthers reports whether the backend serves other requests now, or has
// answered one since then. Their model and operation do not matter: the result
// only decides the meaning of two connections that accepted no further stream,
// and all requests share connections.
func (t *target) servesOthers(since time.Time) bool {
	return t.InFlight() > 1 || t.answeredAt.Load() >= since.UnixNano()
}

// knowsQuota reports whether anything depends on the backends' limits.
func (b *balancer) knowsQuota() bool {
	return b.Pool.Steers || b.rateLimits == rateLimitsOfPool || b.waiting != nil
}

// deduct deducts a request from the remaining limits of the backend to which it
// is sent, for its caller and the caller's tier.
func (s *search) deduct(to *target, now time.Time) quota.Mark {
	b, q := s.balancer, s.request
	s.board.Demand.Get(q.Cost, now)
	switch {
	case !q.hasQuota(to), s.board.At[to.Index].Tiers.HaveOwnLimits():
		return quota.Mark{}
	case b.tiers != nil || s.board.Demand != nil:
		return to.DeductFor(q.cooldownModel(to.backend), q.Cost, int(s.tier), now)
	case !b.knowsQuota():
		return quota.Mark{}
	}
	return to.Deduct(q.cooldownModel(to.backend), q.Cost)
}

// learnQuota records the limits that a reply reports. It also records the
// tier's demand again, because the backend's limits for the model may be known
// only since this reply.
func (b *balancer) learnQuota(q *request, a *attemptRecord, tier int, r *attempt.Reply, rates verdict.Rates,
	now time.Time) {
	lacksTier := r.Class == verdict.Throttled && r.AboutTiers() != pool.UsualTiers
	if r.Response == nil || !q.hasQuota(a.target) || b.tiers == nil && !b.knowsQuota() ||
		!a.tiers.ShareLimits() || lacksTier {
		return
	}
	model := q.cooldownModel(a.target.backend)
	meter := a.target.Quota(model)
	if meter == nil {
		return
	}
	if b.tiers != nil {
		meter.Ask(tier, a.started)
	}
	meter.See(quota.Reply{
		Rates: rates, Throttles: r.Class.Promise(), Served: r.Class == verdict.Served, Cost: q.Cost,
		Mark: a.reservation, Sent: a.started,
	}, model, now)
}
