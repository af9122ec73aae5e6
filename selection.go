package openailb

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"hash/maphash"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/backend"
	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
	"github.com/openai-lb/caddy-openai-lb/internal/waiting"
)

// search finds the backends that get a request, one after the other.
//
// It keeps a board: for each backend of the pool, whether it takes the request
// and why it may not get it now. Next updates the board by the attempts made so
// far and asks the pool, which knows the cooldowns, for the backend that gets
// the request. Without one, it may wait until a backend accepts requests again.
// Tell records the outcome of the attempt at that backend, and decides whether
// the search goes on. When it has ended without a reply for the client, best is
// the reply that says most, and explain says why no backend is left.
//
// A search belongs to the goroutine that serves its request.
type search struct {
	balancer *balancer
	request  *request
	// wait is the request's wait for a limit of its caller and for a backend.
	wait *wait
	// placement is the transaction's.
	placement *affinity.Placement

	// quotas is what is known of the quotas of backends. It is nil without
	// quotas.
	quotas *quotaSearch

	// attempts are the attempts so far, including the one in progress.
	// firstAttempt is the storage of the first one.
	attempts     attemptList
	firstAttempt [1]attemptRecord
	// current is the backend of the attempt in progress. It is nil between
	// attempts.
	current *target
	// board describes the request and each backend to the pool. fewBackends is
	// the storage for up to four backends.
	board       pool.Ask
	fewBackends [4]pool.At
	// silence follows the wait for the first byte of the attempt in progress.
	// If the backend is silent for too long, it finds the backend to which the
	// request moves.
	silence pool.Wait
	// firstByte is the request's wait for the first byte of a reply from any
	// backend.
	firstByte metrics.FirstByte

	// awaited are the indexes of backends for which earlier requests wait.
	awaited []int
	// beforeWait is how many attempts were made before the request waited, and
	// beforeSilence how many before it left a silent backend. A backend that
	// throttled in one of these attempts may be tried again.
	beforeWait, beforeSilence int32
	// interims is how many interim responses the backends have sent.
	interims atomic.Int32
	// tier is the number of the caller's tier. It is 0 without a tier.
	tier int32
	// hasMoved reports whether the request has left a silent backend. mayReturn
	// reports whether it may go back to silent backends, because no other is
	// left.
	hasMoved, mayReturn bool
	// gaveUp reports whether the request has left a silent backend while all
	// others throttle, so that it moved to none. It does not wait at a second
	// silent backend then.
	gaveUp bool
	// barred reports whether there was ever a reason to bar the request from a
	// backend: an attempt, a waiting request, or an object that is made.
	barred bool
	// blamed reports whether a backend failed in a way that may be the
	// request's own fault.
	blamed bool
	// executed reports whether the latest attempt may have executed a request
	// that must not be executed twice.
	executed bool
	// left reports whether the client left during an attempt.
	left bool
	// final reports whether nothing can follow the attempt in progress, so that
	// the body is released while the attempt waits.
	final bool
	// tooShort are the names of models that refused the request as too long.
	tooShort []string
	// lackPath are the indexes of backends that said that they lack the
	// request's path.
	lackPath []int
	// digest is the request's digest, kept because the body of a final attempt
	// is gone. It is 0 if final is false.
	digest uint64

	// best is the reply that the client gets if no backend serves the request.
	best keptReply
	// answer is the balancer's own answer, if an attempt decided it. It has a
	// class and no response if the client left while the request waited.
	answer apierror.Answer
}

// keptReply is the latest reply that says more to the client than the
// balancer's own error would.
type keptReply struct {
	*http.Response // nil if there is none
	// attempt is the index of the attempt that got it.
	attempt int32
	// missing reports whether the reply says only that an object does not
	// exist.
	missing bool
}

// set keeps a reply instead of the previous one.
func (k *keptReply) set(res *http.Response, attempt int, missing bool) {
	k.drop()
	*k = keptReply{Response: res, attempt: int32(attempt), missing: missing} //nolint:gosec // there are few attempts
}

// drop closes the reply and forgets it.
func (k *keptReply) drop() {
	if k.Response != nil {
		k.Body.Close()
		*k = keptReply{}
	}
}

// take returns the reply for the client and forgets it. It returns nil if there
// is none.
func (k *keptReply) take() *http.Response {
	res := k.Response
	*k = keptReply{}
	return res
}

// begin prepares the search for its first attempt. The request has been read,
// and does not change afterwards.
func (s *search) begin(b *balancer, q *request, placement *affinity.Placement, w *wait, tier int) {
	s.balancer, s.request, s.placement, s.wait = b, q, placement, w
	s.tier = int32(tier) //nolint:gosec // there are at most quota.MaxTiers
	s.attempts = s.firstAttempt[:0]
}

// Next starts the next attempt and returns it. It returns nil if no backend is
// left, so that the client gets an answer.
func (s *search) Next() *attemptRecord {
	s.release()
	now := time.Now()
	m := s.move()
	if m == nil && s.mayGoOn(now) {
		m = s.choose(now)
	}
	if m == nil && s.wait.queues != nil {
		m, now = s.waitForBackend(now)
	}
	if m == nil {
		return nil
	}
	if s.quotas != nil {
		now = time.Now() // the search may have waited for other replicas
	}
	s.current = s.balancer.targets[m.Index]
	if last := s.attempts.last(); last != nil && last.class.Failover() && last.target != s.current {
		last.target.metrics.FailedOver(string(last.class))
	}
	at := &s.board.At[m.Index]
	at.Tried, at.Bar = true, pool.Spent // so that the request does not move to where it is; bar finds out anew
	s.attempts = append(s.attempts, attemptRecord{
		target: s.current, started: now, tiers: at.Tiers,
		reservation: s.balancer.deduct(s, at.Tiers, now),
		deployment:  s.current.deploymentLabel(s.request),
	})
	return s.attempts.last()
}

// step is the step that follows an attempt.
type step int

const (
	// again means that another backend is tried.
	again step = iota
	// serve means that the client gets the reply.
	serve
	// stop means that the client gets an answer.
	stop
)

// Tell records the result of the attempt in progress, and returns the next
// step. Unless the client gets the reply now, Tell keeps it if the client may
// get it later, and otherwise discards it.
func (s *search) Tell(r *attempt.Reply, j judgement) step {
	a := s.attempts.last()
	a.class, a.status, a.lacksSocket, s.executed = r.Class, r.Status, r.LacksSocket, j.executed
	next := s.decide(r, j)
	if next != serve { // a reply that goes to the client may still break off
		a.count()
	}
	if next == again { // the charge is settled if it was given back
		cost := s.charge().unserved()
		if j.unexecuted { // its account lacks an object
			cost = limiter.Cost{Requests: 1}
		}
		s.charge().settle(cost)
	}
	return next
}

func (s *search) decide(r *attempt.Reply, j judgement) step {
	switch {
	case j.left:
		r.Discard()
		s.left = true
		return stop
	case j.refusal != nil:
		s.answerRefusal(r, j.refusal)
		return stop
	case s.triesOtherAccount(r):
		return again
	case !r.Class.Failover():
		return serve
	case s.keepOrDiscard(r):
		return again
	}
	return stop
}

// answerRefusal sets the answer to a request that could not be sent because of
// the client.
func (s *search) answerRefusal(r *attempt.Reply, refusal *apierror.Error) {
	r.Discard()
	if r.Upload().Stalled() && !r.Upload().Ended() {
		answerUpload(s.request.writer, s.request.incoming)
	}
	s.answer = refusal.Answer(s.request.asked)
}

// keepOrDiscard keeps the reply in case that the client gets no better one, or
// discards it. It reports whether the request may be sent to another backend.
func (s *search) keepOrDiscard(r *attempt.Reply) bool {
	q := s.request
	sendable := r.Upload().Abandon()
	switch {
	case s.executed && !r.Presentable():
		r.Discard()
		s.answer.Response = apierror.Executed(r.Class).Response(q.asked)
	case !sendable && errors.Is(r.Err, attempt.ErrUnprocessed):
		r.Discard()
		s.answer.Response = apierror.NotProcessed.Response(q.asked)
	// The rest of a long error may be lost when its upload is ended.
	case r.SaysMore() && (r.Whole || !sendable || q.received.Whole()):
		s.best.set(r.Response, len(s.attempts)-1, false)
	default: // also a 429: our own answer says when the first backend returns
		r.Discard()
	}
	if r.Class.ContextLength(r.Status) {
		s.tooShort = append(s.tooShort, s.current.backend.NameOf(q.Model))
	}
	return sendable && !s.executed
}

// triesOtherAccount reports whether the request must try another account: the
// current one lacks an object that the request names, and its owner is not
// known. If so, it excludes the current account, and keeps or discards the
// reply.
func (s *search) triesOtherAccount(r *attempt.Reply) bool {
	if r.Class.Failover() || !r.Missing || !s.placement.Asks() || !r.Whole && !s.request.received.Whole() ||
		!r.Upload().Abandon() {
		return false
	}
	s.placement.Exclude(s.current.backend.AccountKey)
	if s.best.Response != nil && !s.best.missing {
		r.Discard() // a failure says more: its backend may have the object
	} else {
		s.best.set(r.Response, len(s.attempts)-1, true)
	}
	return true
}

// decided ends the search. It puts cooldowns in doubt if only limits refused
// the request, and releases the data that only another attempt would need.
func (s *search) decided() {
	s.attempts.doubtCooldowns(s.request)
	s.best.drop()
	s.request.release()
}

// close releases the backend of the last attempt, and the backend to which the
// request was about to move.
func (s *search) close() {
	s.firstByte.End()
	s.best.drop()
	s.release()
	if its := s.silence.Moved(); its != nil { // the client left just then
		its.To.Unpick(&s.board, its.At)
	}
}

// explain updates the board, and returns the reasons why the backends refuse
// the request.
func (s *search) explain(now time.Time) refusals {
	s.update(now)
	r := refusals{Why: s.balancer.Pool.Why(&s.board, now)}
	if r.Elsewhere {
		r.object = s.placement.Stored()
		r.Others = r.Others || r.object == "" // accounts that lack the object were asked
	}
	r.all = r.All()
	return r
}

// release stops counting the request as one in flight at the current backend.
func (s *search) release() {
	if s.current != nil {
		s.current.Release()
		s.current = nil
	}
}

// move returns the backend to which the request moves from a silent one, or
// nil. If the reply arrived at that moment, the request does not move and the
// backend is released.
func (s *search) move() *pool.Member {
	its, last := s.silence.Moved(), s.attempts.last()
	silent := last != nil && last.class == verdict.Silent
	if silent && !s.hasMoved {
		s.beforeSilence = s.attempts.number()
	}
	if its == nil {
		s.gaveUp = s.gaveUp || silent
		return nil
	}
	s.hasMoved = true
	if !silent || !s.chargeQuotas(its.To, time.Now()) {
		its.To.Unpick(&s.board, its.At)
		return nil
	}
	last.target.metrics.Moved()
	return its.To
}

// choose asks the pool for the backend that gets the request, and records the
// demand of the request's tier.
func (s *search) choose(now time.Time) *pool.Member {
	first := len(s.attempts) == 0
	s.lineUp(now)
	if s.update(now); first && s.balancer.tiers != nil {
		s.balancer.Pool.Demand(&s.board, now) // other tiers leave its share for such requests
	}
	if first && s.mayShare(now) {
		s.balancer.Pool.DemandShare(&s.board, s.callerID(), now)
	}
	s.stayHome(now)
	m := s.ask(now)
	if m == nil && s.allowReturn(now) {
		s.update(now)
		m = s.ask(now)
	}
	if m == nil && s.claimQuotas() {
		s.update(now)
		m = s.ask(now)
	}
	if first {
		s.balancer.countReserved(&s.board, m, now)
		s.countOver(m, now)
	}
	return m
}

// ask asks the pool once, and counts the backends from which it steered away.
func (s *search) ask(now time.Time) *pool.Member {
	m := s.balancer.Pool.Pick(&s.board, now)
	for m != nil && !s.chargeQuotas(m, now) {
		m.Unpick(&s.board, now)
		s.readQuotas(now)
		m = s.balancer.Pool.Pick(&s.board, now)
	}
	if m != nil {
		for _, other := range s.board.Steered {
			to := s.balancer.targets[other.Index]
			to.metrics.Steered(to.deploymentLabel(s.request))
		}
	}
	return m
}

// mayFollow reports whether another attempt may follow if the one in progress
// fails: the limit allows one more, and another backend would accept the
// request now.
func (s *search) mayFollow(a *attemptRecord) bool {
	return !s.board.Once && s.hasAttempts() && slices.ContainsFunc(s.balancer.targets, func(to *target) bool {
		return to != a.target && s.accepts(to, a.started)
	})
}

// settle reports whether the attempt in progress is final. An attempt is final
// if no backend could get the request later, not even one that throttles now,
// and this backend has no other credential. The body of a final attempt may be
// released, so settle computes the digest, which needs it.
func (s *search) settle(a *attemptRecord) bool {
	q := s.request
	s.final = q.socket == nil && q.received.Whole() && s.wait.queues == nil && !s.canRenew(a) && !s.mayFollowLater(a)
	if s.final {
		s.digest = q.digest()
	}
	return s.final
}

// canRenew reports whether the attempt may be repeated with another credential.
func (s *search) canRenew(a *attemptRecord) bool {
	return s.request.secret == nil && a.target.backend.Credentials.CanRenew()
}

// mayFollowLater reports whether another attempt may follow at any time. A
// backend that was silent or throttled may be tried again.
func (s *search) mayFollowLater(a *attemptRecord) bool {
	if !s.hasAttempts() && !s.placement.Asks() {
		return false
	}
	return slices.ContainsFunc(s.balancer.targets, func(to *target) bool {
		at := &s.board.At[to.Index]
		return to != a.target && at.Takes && !at.Elsewhere && !s.attempts.spent(to)
	})
}

// accepts reports whether the backend may get the request and would accept it
// now.
func (s *search) accepts(to *target, now time.Time) bool {
	at := &s.board.At[to.Index]
	return at.Takes && !at.Elsewhere && at.Bar == pool.Free && !to.Drained() && !to.Unreachable() && !to.Full() &&
		!to.Throttles(&s.board, now)
}

// mayGoOn reports whether another backend may be tried.
func (s *search) mayGoOn(now time.Time) bool {
	q := s.request
	return len(s.attempts) == 0 || s.hasAttempts() && (q.deadline.IsZero() || !now.After(q.deadline)) &&
		!s.isKnownLacking(now)
}

// hasAttempts reports whether the request may make another attempt. If it has
// waited, throttles before the wait do not count, and their backends may be
// tried again.
func (s *search) hasAttempts() bool {
	if s.final {
		return false
	}
	most := s.request.maxAttempts
	return most == 0 || len(s.attempts)-s.placement.Misses()-s.attempts.throttles(int(s.beforeWait)) < most
}

// allowReturn allows the request to go back to silent backends, if it has
// moved, no other backend is left, and no backend has said when it is ready
// again. If the request had not moved, it would still wait there. allowReturn
// reports whether this is new.
func (s *search) allowReturn(now time.Time) bool {
	first := s.hasMoved && !s.mayReturn && !s.attempts.throttled() && !s.balancer.Pool.CanWait(&s.board, now)
	s.mayReturn = s.mayReturn || first
	return first
}

// takeBlame reports true once: the first fault that may be the request's own
// may make its backend a suspect. A request that fails everywhere is the cause
// itself, so each request makes at most one backend a suspect in this way.
func (s *search) takeBlame() bool {
	first := !s.blamed
	s.blamed = true
	return first
}

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
		s.board.Caller.Withdraw(s.request.Cost, time.Now())
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

// mayWait reports whether the request may wait for a backend. A request for an
// object that one account stores may not.
func (s *search) mayWait() bool { return s.placement.Anywhere() }

// lineUp keeps a request from the backends for which others wait that go
// first.
func (s *search) lineUp(now time.Time) {
	s.awaited = nil
	if s.wait.queues.Len() == 0 || !s.mayWait() {
		return
	}
	if s.board.At == nil {
		s.fill(now)
	}
	waiter := waiting.Waiter{Caller: s.request.caller.Name, Tier: int(s.tier)}
	for i := range s.board.At {
		if _, ok := s.wait.queues.Ahead(now, s.queueOf(i), waiter, s.wait.ticket); ok {
			s.awaited = append(s.awaited, i)
		}
	}
}

// queueOf returns the queue in which the request waits for a backend.
func (s *search) queueOf(i int) waiting.Key {
	at := &s.board.At[i]
	return waiting.Key{Backend: i, Model: at.Model, Tiers: at.Tiers.String()}
}

// returns returns which backends accept the request again before its wait ends.
func (s *search) returns(now time.Time) (all []waiting.Return) {
	awaited := s.awaited
	s.awaited = nil
	s.update(now)
	for _, r := range s.balancer.Pool.Returns(&s.board, awaited, now, s.wait.ends(s.request, now)) {
		all = append(all, waiting.Return{Key: s.queueOf(r.Index), At: r.At, Places: r.Places, Pause: r.Grace,
			Every: r.Every, Yields: r.Yields})
	}
	return all
}

// waitForBackend waits until a backend accepts the request, which all refuse
// because they throttle. It returns nil if none does in time, or if there is no
// place. A request that a backend has refused goes back there only from its
// place in the queue.
func (s *search) waitForBackend(now time.Time) (*pool.Member, time.Time) {
	w := s.wait
	if !s.mayWait() {
		return nil, now
	}
	before := s.beforeWait
	s.beforeWait = s.attempts.number()
	s.lineUp(now)
	for i := range s.attempts {
		if a := &s.attempts[i]; a.class == verdict.Throttled {
			s.awaited = append(s.awaited, a.target.Index)
		}
	}
	returns := s.returns(now)
	if len(returns) == 0 || !s.mayGoOn(now) || !now.Before(w.ends(s.request, now)) {
		s.beforeWait = before
		if w.ticket != nil {
			w.result = waiting.Over
		}
		s.leaveTo(returns, now)
		return nil, now
	}
	if !w.joinForBackend(s.request, int(s.tier), now, returns) {
		s.leaveTo(returns, now)
		return nil, now
	}
	var m *pool.Member
	w.await(s.balancer, s.request, int(s.tier), w.ticket, func(at time.Time) (goesOn bool) {
		now = at
		if m, returns = s.pickOrWait(now); m != nil {
			w.ticket.Go(now, s.queueOf(m.Index))
			return false
		}
		if len(returns) > 0 {
			w.ticket.Stay(now, returns...)
			return true
		}
		w.result = waiting.Over
		w.ticket.Leave(now)
		return false
	})
	if m == nil {
		now = time.Now()
		s.leaveTo(returns, now)
		if w.result == waiting.Left {
			s.answer = apierror.Answer{Class: string(verdict.ClientLeftWaiting)}
		}
	}
	return m, now
}

// leaveTo leaves the backends for which the request would wait to others.
func (s *search) leaveTo(returns []waiting.Return, now time.Time) {
	s.awaited = nil
	for _, r := range returns {
		s.awaited = append(s.awaited, r.Key.Backend)
	}
	s.update(now)
}

// pickOrWait returns the backend that gets the request now, or when backends
// accept it.
func (s *search) pickOrWait(now time.Time) (m *pool.Member, returns []waiting.Return) {
	for range 2 { // after the pick, a cooldown may have ended
		s.lineUp(now)
		s.update(now)
		if m = s.ask(now); m != nil {
			return m, nil
		}
		if returns = s.returns(now); len(returns) > 0 {
			return nil, returns
		}
	}
	return nil, nil
}

// forbidRetry tells the client's SDK not to retry a request that may have been
// executed. Official SDKs retry a 408 and a 5xx unless this header forbids it.
func (s *search) forbidRetry(header http.Header) {
	if s.executed {
		header["X-Should-Retry"] = []string{"false"}
	}
}

// Selection is a selection policy for a plain reverse_proxy. It chooses among
// the upstreams by priority and weight.
//
// Together with the openai_lb transport, it skips upstreams that throttle for
// as long as they asked. A throttled request fails over to another upstream.
// lb_retries and lb_try_duration limit that. Without them, a request may try
// every upstream.
type Selection struct {
	// Pool names the pool of upstreams in logs, metrics and the admin API. Two
	// pools may have the same name only if all of their options are the same.
	// Default: reverse_proxy.
	Pool string `json:"pool,omitempty"`

	// Upstreams sets the priority and the weight of upstreams, by dial address.
	// Default: priority 1 and weight 1 for all.
	Upstreams []SelectionUpstream `json:"upstreams,omitempty"`

	// LBPolicyRaw chooses among the upstreams of a priority. Default: at
	// random, by weight.
	LBPolicyRaw json.RawMessage `json:"lb_policy,omitempty" caddy:"namespace=http.reverse_proxy.selection_policies inline_key=policy"`

	policy      reverseproxy.Selector
	events      *observe.Events
	maxAttempts int
	tryDuration time.Duration
	// transport is the openai_lb transport of the same reverse_proxy. It is nil
	// if the proxy has another transport.
	transport *Transport

	// current is the group of the upstreams that were seen last.
	current atomic.Pointer[upstreamGroup]

	mu        sync.Mutex
	closed    bool
	addresses pools.Addresses
}

// SelectionUpstream is the priority and the weight of an upstream.
type SelectionUpstream struct {
	// Dial is the upstream's address, as in reverse_proxy. Required.
	Dial string `json:"dial"`

	// Priority ranks the upstream. Requests go to the upstreams with the lowest
	// number among those that can serve. It is 1 or more. Default: 1.
	Priority int `json:"priority,omitempty"`

	// Weight is the upstream's share of the requests within its priority. With
	// 0 the upstream is drained: it is used only when no other upstream is
	// left. Default: 1.
	Weight *int `json:"weight,omitempty"`
}

// CaddyModule returns the Caddy module information.
func (*Selection) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.reverse_proxy.selection_policies.openai_lb",
		New: func() caddy.Module { return new(Selection) },
	}
}

// UnmarshalCaddyfile sets up the policy from Caddyfile tokens. Syntax:
//
//	lb_policy openai_lb {
//	    pool <name>
//	    upstream <dial> {
//	        priority <n>
//	        weight   <n>
//	    }
//	    lb_policy <name> [<args...>]
//	}
func (s *Selection) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	return directive.Unmarshal(d, directive.Options{
		"pool": directive.String(&s.Pool),
		"upstream": directive.Func(func(d *caddyfile.Dispenser) error {
			var u SelectionUpstream
			if err := directive.Argument(d, &u.Dial); err != nil {
				return err
			}
			if slices.ContainsFunc(s.Upstreams, func(other SelectionUpstream) bool { return other.Dial == u.Dial }) {
				return d.WrapErr(errUpstreamTwice(u.Dial))
			}
			err := directive.Block(d, directive.Options{
				"priority": directive.Int(&u.Priority, 1, directive.MaxInt),
				"weight":   directive.IntPointer(&u.Weight, backend.MaxWeight),
			})
			s.Upstreams = append(s.Upstreams, u)
			return err
		}).Repeatable(),
		"lb_policy": pools.PolicyOption(&s.LBPolicyRaw),
	})
}

func errUpstreamTwice(dial string) error { return fmt.Errorf("upstream %s is given twice", dial) }

// Provision sets up the policy.
func (s *Selection) Provision(ctx caddy.Context) error {
	proxy := proxyAround(ctx.Modules())
	if err := s.provisionUpstreams(proxy); err != nil {
		return err
	}
	s.Pool = cmp.Or(s.Pool, "reverse_proxy")
	s.addresses.Forgotten = func(dial string) { metrics.Forget(s.Pool, dial) }
	err := pools.Default.Claim(ctx, s.Pool, s, proxy)
	if err != nil {
		return err
	}
	if s.events, err = observe.NewEvents(ctx, s.Pool); err != nil {
		return err
	}
	if err := metrics.Register(ctx.GetMetricsRegistry()); err != nil {
		return err
	}
	if s.policy, err = pools.LoadPolicy(ctx, s, s.LBPolicyRaw); err != nil {
		return err
	}
	if s.policy != nil && slices.ContainsFunc(s.Upstreams, func(u SelectionUpstream) bool { return *u.Weight > 1 }) {
		ctx.Logger().Warn(pools.WeightIgnored)
	}
	return s.takeOver(proxy)
}

// provisionUpstreams checks the options of upstreams and sets their defaults.
func (s *Selection) provisionUpstreams(proxy *reverseproxy.Handler) error {
	seen := make(map[string]bool)
	for i := range s.Upstreams {
		u := &s.Upstreams[i]
		u.Priority = cmp.Or(u.Priority, 1)
		if u.Weight == nil {
			u.Weight = new(1)
		}
		switch {
		case u.Dial == "":
			return fmt.Errorf("upstream %d has no dial address", i+1)
		case seen[u.Dial]:
			return errUpstreamTwice(u.Dial)
		}
		seen[u.Dial] = true
		if err := backend.CheckRank(u.Priority, *u.Weight); err != nil {
			return fmt.Errorf("upstream %s: %w", u.Dial, err)
		}
		if err := checkUpstream(proxy, u.Dial); err != nil {
			return err
		}
	}
	return nil
}

// maxDynamicAttempts limits the attempts if upstreams are dynamic, so that
// their number is not known.
const maxDynamicAttempts = 64

// takeOver makes the policy count the retries instead of its reverse_proxy, if
// that has an openai_lb transport. reverse_proxy would end the retries with its
// own error although the policy has kept an upstream's reply, and would not
// retry without lb_retries.
func (s *Selection) takeOver(proxy *reverseproxy.Handler) error {
	if !hasSelection(proxy) {
		return nil // this one is part of another policy
	}
	var ok bool
	if s.transport, ok = proxy.Transport.(*Transport); !ok {
		return nil
	}
	if err := checkRetries(proxy); err != nil {
		return err
	}
	lb := proxy.LoadBalancing
	if s.maxAttempts = lb.Retries + 1; lb.Retries <= 0 {
		s.maxAttempts = max(len(proxy.Upstreams), maxDynamicAttempts)
	}
	s.tryDuration = time.Duration(lb.TryDuration)
	lb.Retries, lb.TryDuration = s.maxAttempts, 0
	return nil
}

// Cleanup releases the health of the upstreams.
func (s *Selection) Cleanup() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if current := s.current.Load(); current != nil {
		current.close()
	}
	metrics.Left()
	s.closed = true
	return s.addresses.Close()
}

// Select implements reverseproxy.Selector.
func (s *Selection) Select(upstreams reverseproxy.UpstreamPool, r *http.Request,
	w http.ResponseWriter) *reverseproxy.Upstream {
	if len(upstreams) == 0 {
		return nil
	}
	p := s.requestOf(upstreams, r, w)
	next := p.next()
	if next == nil && s.transport == nil { // reverse_proxy decides whether to go on
		p.search.attempts = p.search.attempts[:0]
		next = p.next()
	}
	switch {
	case next != nil:
		return next.target.upstream
	case s.transport != nil:
		return answering
	}
	return nil
}

// upstreamGroup is a list of upstreams that reverse_proxy passes to the policy,
// and their pool.
type upstreamGroup struct {
	*balancer
	upstreams reverseproxy.UpstreamPool
	entitled  *affinity.Entitlement // to all of them
}

// countedUpstream is an upstream whose open requests reverse_proxy counts.
type countedUpstream struct{ *reverseproxy.Upstream }

// InFlight returns the number of requests that the upstream serves.
func (u countedUpstream) InFlight() int64 { return int64(u.Host.NumRequests()) }

// groupOf returns the group of the upstreams. reverse_proxy passes the same
// slice every time, unless the upstreams are dynamic.
func (s *Selection) groupOf(upstreams reverseproxy.UpstreamPool) *upstreamGroup {
	current := s.current.Load()
	if current != nil && len(current.upstreams) == len(upstreams) && &current.upstreams[0] == &upstreams[0] {
		return current
	}
	var targets []*target
	var backends []*backend.Backend
	for i, health := range s.addresses.Use(upstreams) {
		upstream := upstreams[i]
		m := pool.NewMember(upstream.Dial, health)
		m.Checks = countedUpstream{upstream}
		for _, u := range s.Upstreams {
			if u.Dial == upstream.Dial {
				m.Priority, m.Weight = u.Priority, *u.Weight
			}
		}
		b := &backend.Backend{Name: upstream.Dial} // that takes any request
		targets = append(targets, &target{Member: m, upstream: upstream, backend: b})
		backends = append(backends, b)
	}
	b := newBalancer(s.Pool, targets, nil, s.events)
	b.settings = settings{policy: s.policy, fields: attempt.All{}}
	if s.transport != nil {
		b.sender = s.transport.sender
	}
	g := &upstreamGroup{balancer: b, upstreams: upstreams, entitled: affinity.Entitle(nil, backends, nil)}
	s.replace(g)
	return g
}

func (g *upstreamGroup) close() {
	pools.Default.Remove(&g.Entry)
	g.Pool.Close()
}

// replace makes the group the current one. A group that is made after Cleanup
// serves only the request that it was made for.
func (s *Selection) replace(by *upstreamGroup) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		by.close()
		return
	}
	pools.Default.Add(&by.Entry)
	if current := s.current.Swap(by); current != nil {
		current.close()
	}
}

// Interface guards
var (
	_ caddyfile.Unmarshaler = (*Selection)(nil)
	_ caddy.Provisioner     = (*Selection)(nil)
	_ caddy.CleanerUpper    = (*Selection)(nil)
	_ reverseproxy.Selector = (*Selection)(nil)
)
