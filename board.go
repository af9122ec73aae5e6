package openailb

import (
	"hash/maphash"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// The board of a search describes the request and each backend to the pool.
// fill sets it up from what does not change during the search: whether a
// backend takes the request, and by which name it knows the model. Before each
// choice, bar marks the backends that must not get the request now, because of
// the attempts so far, of requests that wait, or of the caller's objects. What
// the pool knows, such as cooldowns, is not on the board.

// update brings the board up to date.
func (s *search) update(now time.Time) {
	if s.board.At == nil {
		s.fill(now)
	}
	s.bar(now)
}

// fill sets up the board.
func (s *search) fill(now time.Time) {
	b, q := s.balancer, s.request
	s.board = pool.Ask{
		At: s.fewBackends[:], Weights: b.Pool.Weights(q.weighedModel(), now),
		Affinity: pool.Affinity{Key: q.session, Maker: s.placement.Maker()}, Cost: q.Cost,
		Once: q.isOnce(), Streamed: !q.received.Whole(), Kind: q.latencyKind(),
		Operation: strings.TrimSuffix(q.Route.Operation, "/"), Tier: s.callerTier(),
	}
	if len(b.targets) > len(s.fewBackends) {
		s.board.At = make([]pool.At, len(b.targets))
	}
	s.board.At = s.board.At[:len(b.targets)]
	var name, key string // of the model at the latest backend: most backends have the same
	tiers := pool.TiersOf(q.ServiceTier())
	for i, to := range b.targets {
		if model := q.cooldownModel(to.backend); model != name {
			name, key = model, pool.ModelKey(model)
		}
		at := &s.board.At[i]
		at.Model, at.Takes = key, q.entitled.May[i] && to.backend.Takes(&q.Request, q.anonymous)
		if at.Tiers = tiers; to.backend.ServiceTier != "" {
			at.Tiers = pool.TiersOf(to.backend.TierOf(&q.Request))
		}
	}
	if b.policy != nil {
		s.board.Policy = pools.Policy(b.policy, s.askPolicy)
	}
	s.findLackingPath(now)
	s.beginQuotas()
}

// findLackingPath finds the backends that lack the path, or open no WebSocket
// for it.
func (s *search) findLackingPath(now time.Time) {
	if !s.request.Kind.Infers() {
		return
	}
	for _, to := range s.balancer.targets {
		if to.paths.Any() && to.paths.Has(s.request.pathName(), now) ||
			s.request.socket != nil && s.balancer.sender.RefusesSocket(to, now) {
			s.lackPath = append(s.lackPath, to.Index)
		}
	}
}

// askPolicy asks the policy of lb_policy to choose among members of one
// priority.
func (s *search) askPolicy(members []*pool.Member) *pool.Member {
	upstreams := make(reverseproxy.UpstreamPool, len(members))
	for i, m := range members {
		upstreams[i] = s.balancer.targets[m.Index].upstream
	}
	chosen := s.balancer.policy.Select(upstreams, s.request.incoming, s.request.writer)
	if i := slices.Index(upstreams, chosen); chosen != nil && i >= 0 {
		return members[i]
	}
	return nil
}

// callerTier returns the request's tier. The tier has no shares for a request
// for an object that one account stores, because no other backend can serve it,
// nor for operations other than inference, which have separate limits. During a
// reload, a tier's number may be from the other config and so out of range.
func (s *search) callerTier() quota.Tier {
	if s.tier == 0 || int(s.tier) >= len(s.balancer.tiers) || !s.request.Kind.Infers() || !s.placement.Anywhere() {
		return quota.Tier{Number: int(s.tier)}
	}
	return s.balancer.tiers[s.tier]
}

// mayShare reports whether backends are shared among callers, and the request's
// caller gets a share. As for tiers, no share covers stored objects and
// operations other than inference.
func (s *search) mayShare(now time.Time) bool {
	p := s.balancer.Pool
	return p.Callers != nil && p.Callers.AreShort(now) && p.Steers && s.request.caller.Name != "" &&
		s.request.Kind.Infers() && s.placement.Anywhere()
}

// withdraw takes back the demand for the caller's share of a request that was
// refused, but not for a limit: others would leave free what it cannot use.
func (s *search) withdraw() {
	if last := s.attempts.last(); last != nil && last.class != verdict.Throttled {
		s.board.Demand.Withdraw(s.request.Cost, time.Now())
	}
}

// callerID identifies the request's caller, for its share.
func (s *search) callerID() quota.CallerID {
	q := s.request
	return quota.CallerID{Caller: maphash.String(digests, q.caller.Name), Model: maphash.String(digests, q.Model),
		Tier: int(s.tier)}
}

// isUnusual reports whether every backend that takes the request gets it with a
// service tier that the backend may refuse while it serves other tiers.
func (s *search) isUnusual() bool {
	return !slices.ContainsFunc(s.board.At, func(at pool.At) bool { return at.Takes && at.Tiers == pool.UsualTiers })
}

// makesObject reports whether the request makes an object without a model,
// which can then be used with any model.
func (s *search) makesObject() bool { return s.request.Model == "" && s.placement.Makes() }

// bar marks the backends that must not get the request now. Each backend may
// get it once. After a backend that took the caller's own credential, only
// backends of this kind may get it: otherwise the operator would pay for a
// request that the caller's account refused.
func (s *search) bar(now time.Time) {
	if s.placement != affinity.Anywhere {
		for i, to := range s.balancer.targets {
			s.board.At[i].Elsewhere = !s.placement.Allows(to.backend.AccountKey)
		}
	}
	s.barred = s.barred || len(s.attempts) > 0 || s.awaited != nil || s.lackPath != nil || s.makesObject()
	ownCredential := s.barred && s.barAttempted()
	s.readQuotas(now) // before anything depends on whether a backend accepts the request
	if !s.barred {
		return // all others are free
	}
	s.barLackingPath(now)
	for i, to := range s.balancer.targets {
		if at := &s.board.At[i]; ownCredential && !to.backend.Credentials.Passthrough {
			at.Bar = pool.Unfit
		}
	}
	if s.gaveUp {
		for i, to := range s.balancer.targets {
			if at := &s.board.At[i]; to.IsSilent(&s.board) {
				at.Bar = pool.Unfit
			}
		}
	}
	allModels := s.makesObject() && s.mayHaveAllModels(now)
	if !allModels && s.tooShort == nil && s.awaited == nil {
		return
	}
	for i, to := range s.balancer.targets {
		switch at := &s.board.At[i]; {
		case slices.Contains(s.tooShort, to.backend.NameOf(s.request.Model)),
			allModels && !s.request.entitled.AllModels[i]:
			// Either the context is as short there, or an object without a
			// model could not be used with all models.
			at.Bar = pool.Unfit
		case at.Bar == pool.Free && slices.Contains(s.awaited, to.Index):
			at.Bar = pool.Behind
		}
	}
}

// barAttempted bars the backends that the request has tried. It reports whether
// one of them took the caller's own credential.
func (s *search) barAttempted() (ownCredential bool) {
	for i := range s.board.At {
		at := &s.board.At[i]
		at.Bar, at.Tried, at.Refused = pool.Free, false, false
	}
	for i := range s.attempts {
		a := &s.attempts[i]
		at := &s.board.At[a.target.Index]
		at.Tried, at.Refused = true, a.class.Promise()
		at.Takes = at.Takes && a.class != verdict.NotHere // it does not offer what the request asks for
		switch {
		case a.class == verdict.Throttled && i < int(max(s.beforeWait, s.beforeSilence)),
			a.class == verdict.Silent && s.mayReturn:
			// it may be tried again
		case a.class == verdict.Throttled:
			at.Bar = pool.Throttled
		default:
			at.Bar = pool.Spent
		}
		ownCredential = ownCredential || a.target.backend.Credentials.Passthrough
	}
	return ownCredential
}

// accepts reports whether the backend may get the request and would accept it
// now.
func (s *search) accepts(to *target, now time.Time) bool {
	at := &s.board.At[to.Index]
	return at.Takes && !at.Elsewhere && at.Bar == pool.Free && !to.Drained() && !to.Unreachable() && !to.Full() &&
		!to.Throttles(&s.board, now)
}

// barLackingPath bars the backends that lack the request's path, if another
// backend accepts the request, or if one of them has said again that it lacks
// the path.
func (s *search) barLackingPath(now time.Time) {
	if s.lackPath == nil {
		return
	}
	others := slices.ContainsFunc(s.balancer.targets, func(to *target) bool {
		return !slices.Contains(s.lackPath, to.Index) && s.accepts(to, now)
	})
	if !others && !s.attempts.anyIs(verdict.NotHere) {
		return
	}
	for _, i := range s.lackPath {
		s.board.At[i].Bar = pool.Unfit
	}
}

// isKnownLacking reports whether every backend that the request may go to has
// said within the last minute that it lacks the model, and one of them said so
// to this request. No further backend is tried then, because clients can make
// up any name.
func (s *search) isKnownLacking(now time.Time) bool {
	last := s.attempts.last()
	if last == nil || last.class != verdict.NoModel {
		return false
	}
	return !slices.ContainsFunc(s.balancer.targets, func(to *target) bool {
		at := &s.board.At[to.Index]
		return at.Takes && !at.Elsewhere && !to.models.Has(s.request.lackedModel(to), now)
	})
}

// mayHaveAllModels reports whether the request may go to a backend whose
// account serves every model that the caller may use. A suspect counts, because
// a later request that names the object goes there even then. A drained backend
// does not, because it gets no new objects.
func (s *search) mayHaveAllModels(now time.Time) bool {
	return slices.ContainsFunc(s.balancer.targets, func(to *target) bool {
		at := &s.board.At[to.Index]
		return s.request.entitled.AllModels[to.Index] && !to.Drained() && !to.Unreachable() && !to.Full() &&
			at.Bar == pool.Free &&
			at.Takes && !to.Throttles(&s.board, now)
	})
}

// stayHome keeps a request at the account that has its caller's objects if that
// account throttles for less than a minute, because an object made elsewhere
// could not be used with the others. The client gets the account's 429, and
// retries.
func (s *search) stayHome(now time.Time) {
	q, maker := s.request, s.board.Affinity.Maker
	if maker == nil || maker.Order == 0 || maker.Home == "" || !s.balancer.Pool.IsSoonBack(&s.board, maker.Home, now) {
		return
	}
	if q.Model != "" || q.entitled.HasAllModels(maker.Home) {
		s.placement.Settle(maker.Home)
		s.update(now)
	}
}
