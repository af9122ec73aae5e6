package openailb

import (
	"errors"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
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
		reservation: s.deduct(s.current, now),
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
	if next == again { // a charge that was given back is settled already
		cost := s.charge().unserved()
		if j.unexecuted { // its account lacks an object
			cost = ratelimit.Cost{Requests: 1}
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
	if moving := s.silence.Moved(); moving != nil { // the client left just then
		moving.Undo()
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
// nil. If the reply arrived at that moment, or if the quota of the backend has
// no room, the request does not move, and the move is undone.
func (s *search) move() *pool.Member {
	moving, last := s.silence.Moved(), s.attempts.last()
	silent := last != nil && last.class == verdict.Silent
	if silent && !s.hasMoved {
		s.beforeSilence = s.attempts.number()
	}
	if moving == nil {
		s.gaveUp = s.gaveUp || silent
		return nil
	}
	s.hasMoved = true
	if !silent || !s.chargeQuotas(moving.To, time.Now()) {
		moving.Undo()
		return nil
	}
	last.target.metrics.Moved()
	return moving.To
}

// demand records that the request's tier and caller ask for the model.
func (s *search) demand(now time.Time) {
	if s.balancer.tiers != nil {
		s.balancer.Pool.Demand(&s.board, now) // other tiers leave its share for such requests
	}
	if s.mayShare(now) {
		s.balancer.Pool.DemandShare(&s.board, s.callerID(), now)
	}
}

// choose asks the pool for the backend that gets the request, and records the
// demand of the request's tier.
func (s *search) choose(now time.Time) *pool.Member {
	first := len(s.attempts) == 0
	s.lineUp(now)
	if s.update(now); first {
		s.demand(now)
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
		s.countOver(m, time.Now()) // a claim may have waited
	}
	return m
}

// ask asks the pool once, and counts the backends from which it steered away.
func (s *search) ask(now time.Time) *pool.Member {
	m := s.balancer.Pool.Pick(&s.board, now)
	for m != nil && !s.chargeQuotas(m, now) {
		m.Unpick(&s.board)
		s.update(now)
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

// forbidRetry tells the client's SDK not to retry a request that may have been
// executed. Official SDKs retry a 408 and a 5xx unless this header forbids it.
func (s *search) forbidRetry(header http.Header) {
	if s.executed {
		header["X-Should-Retry"] = []string{"false"}
	}
}
