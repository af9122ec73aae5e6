package openailb

import (
	"fmt"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
	"github.com/openai-lb/caddy-openai-lb/internal/waiting"
)

// setWait sets the option wait to its argument in a Caddyfile.
func setWait(into *caddy.Duration, args []string) error {
	duration, err := caddy.ParseDuration(args[0])
	if err != nil || duration <= 0 {
		return errWait(args[0])
	}
	*into = caddy.Duration(duration)
	return checkWait(*into)
}

// checkWait returns an error unless the option wait may be so. It is 0 if it is
// not set.
func checkWait(d caddy.Duration) error {
	if d < 0 || time.Duration(d) > waiting.Longest {
		return errWait(time.Duration(d).String())
	}
	return nil
}

func errWait(text string) error {
	return fmt.Errorf("wait '%s' is not a duration above 0, of at most %s", text, waiting.Longest)
}

// wait is the wait of a request for a limit of its caller, and then for a
// backend. Both together last as long as one may.
type wait struct {
	// queues have the requests that wait. It is nil if requests do not wait.
	queues *waiting.Queues
	// ticket is where the request waits, or has waited, for a backend.
	ticket *waiting.Ticket
	// until is when the wait ends. It is zero if the request has not waited.
	until time.Time
	// duration is how long the request has waited. result is how the wait
	// ended; it is empty if the request did not have to wait.
	duration time.Duration
	result   waiting.Result
}

// wakes wakes the first waiting request on each event of the pool.
type wakes struct{ *waiting.Queues }

// Happened implements pool.Listener.
func (w wakes) Happened(pool.Event) { w.Wake(time.Now(), "") }

// ends returns when the wait of the request ends.
func (w *wait) ends(q *request, now time.Time) time.Time {
	until := w.until
	if until.IsZero() {
		until = w.queues.Until(now)
	}
	if !q.deadline.IsZero() && q.deadline.Before(until) {
		return q.deadline
	}
	return until
}

// mayLast reports whether the request may wait until at.
func (w *wait) mayLast(q *request, at, now time.Time) bool {
	until := w.ends(q, now)
	return !at.After(until) && now.Before(until)
}

// mayLastUntil reports whether the request may wait until the limit that
// refuses it admits it.
func (w *wait) mayLastUntil(r *ratelimit.Refusal, q *request, now time.Time) bool {
	return w.queues != nil && mayPass(r) && w.mayLast(q, triedAt(r, now, w.ends(q, now)), now)
}

// firstByte reports the first byte of the reply to the queues, which then wake
// the next waiting request.
func (w *wait) firstByte(now time.Time) {
	if w.ticket != nil && w.result == waiting.Called {
		w.ticket.FirstByte(now)
	}
}

// joinForBackend takes a place among the requests that wait for backends, or
// keeps the one that the request has. It reports false if none is free.
func (w *wait) joinForBackend(q *request, tier int, now time.Time, returns []waiting.Return) bool {
	w.until = w.ends(q, now)
	if w.ticket != nil {
		w.ticket.Stay(now, returns...)
		return true
	}
	w.ticket, w.result = w.queues.Join(now, waiting.Waiter{Caller: q.caller.Name, Tier: tier}, w.until,
		len(q.received.Buffered()), returns...)
	return w.ticket != nil
}

// await waits with a ticket. Each time that it is the request's turn, it calls
// try, until that returns false.
func (w *wait) await(b *balancer, q *request, tier int, ticket *waiting.Ticket, try func(now time.Time) (goesOn bool)) {
	begun := time.Now()
	b.metrics.Waits(1)
	defer func() {
		b.metrics.Waits(-1)
		ticket.Leave(time.Now()) // a policy may panic, and the others must not wait for this request
	}()
	for goesOn := true; goesOn; {
		if w.result = ticket.Wait(q.asked.Context().Done()); w.result != waiting.Called {
			break
		}
		goesOn = try(time.Now())
	}
	waited := time.Since(begun)
	w.duration += waited
	if c := b.logger.Check(zap.DebugLevel, "request waited"); c != nil {
		c.Write(zap.String("result", string(w.result)), zap.Duration("duration", waited), q.callerField(),
			zap.String("model", pool.ModelKey(q.Model)), zap.Int("tier", tier))
	}
}

// admit charges the request to its caller's limits, or returns the refusal of a
// limit. It may first wait for a limit per second or per minute.
func (w *wait) admit(b *balancer, q *request, all seam.Admission,
	e ratelimit.Estimate) (r ratelimit.Reservation, refusal *ratelimit.Refusal) {
	name, now := q.caller.Name, time.Now()
	c := all.Caller(now, name)
	if w.queues == nil {
		return c.Admit(now, e)
	}
	until, waiter := w.ends(q, now), waiting.Waiter{Caller: name}
	key := waiting.Key{Caller: name, Tokenless: e.Prompt == 0}
	next, isBehind := w.queues.Ahead(now, key, waiter, nil)
	if !isBehind && slices.Contains(q.grant.LimitedModels, q.Model) {
		key.Model = q.Model
		next, isBehind = w.queues.Ahead(now, key, waiter, nil)
	}
	if isBehind {
		refusal = c.Refuses(now, e)
	} else {
		r, refusal = c.Try(now, e)
	}
	switch {
	case refusal != nil:
		next = limitReturns(b, key, refusal, refusal.Requested, now, until)
	case !isBehind:
		return r, nil
	default: // there is room, but others came first
		refusal = next.Reason.(*ratelimit.Refusal)
		next.Places = limitReturns(b, key, refusal, e.Prompt+max(0, e.Output), now, until).Places
	}
	if !mayPass(refusal) || !w.mayLast(q, next.At, now) {
		return c.Admit(now, e) // it may not wait: it is charged now if there is room
	}
	w.until = until
	var ticket *waiting.Ticket
	if ticket, w.result = w.queues.Join(now, waiter, until, len(q.received.Buffered()), next); ticket == nil {
		if r, refusal = c.Admit(now, e); refusal == nil {
			w.result = "" // it did not have to wait
		}
		return r, refusal
	}
	w.await(b, q, 0, ticket, func(now time.Time) bool {
		if r, refusal = all.Caller(now, name).Try(now, e); refusal == nil {
			ticket.Go(now, next.Key)
			return false
		}
		if !mayPass(refusal) {
			w.result = waiting.Over
			ticket.Leave(now)
			return false
		}
		// until its time is over: others may give back what they did not use
		next = limitReturns(b, key, refusal, refusal.Requested, now, until)
		ticket.Stay(now, next)
		return true
	})
	if w.result != waiting.Called && w.result != waiting.Left {
		if r, refusal = all.Caller(time.Now(), name).Admit(time.Now(), e); refusal == nil {
			w.result = waiting.Called
		}
	}
	return r, refusal
}

// returnOf returns when a request may be tried again after a refusal. The wait
// may be rounded.
func returnOf(r *ratelimit.Refusal, now time.Time) time.Time {
	return now.Add(max(r.Wait, time.Millisecond))
}

// triedAt returns when a request is tried again after a refusal, which waits
// until a time at most. It is not known when the requests in flight end, so the
// request may wait for them for as long as it may wait at all.
func triedAt(r *ratelimit.Refusal, now, until time.Time) time.Time {
	at := returnOf(r, now)
	if r.Reason == ratelimit.InFlight && at.After(until) && now.Before(until) {
		return until
	}
	return at
}

// limitReturns returns when a request that needs so much of a limit may be
// tried again, which refuses it or another one. key is a queue of requests like
// it: those of the limits of all models wait apart from those of the limits of
// one. There are places for as much as the limit grants until the wait ends,
// divided by the number of replicas.
func limitReturns(b *balancer, key waiting.Key, r *ratelimit.Refusal, needs int64,
	now, until time.Time) waiting.Return {
	key.Model = r.Limit.Model
	_, perSecond := b.granted(r, needs) // no request waits for the next day or month
	places := perSecond * until.Sub(now).Seconds()
	return waiting.Return{Key: key, At: triedAt(r, now, until), Places: places, Reason: r}
}

// granted returns how many requests that need so much of a limit it grants when
// the wait of the refusal is over, and how many in each second. Both are
// divided by the number of replicas. The next day or month begins with all of
// its limit, but for a debt, which is left out here.
func (b *balancer) granted(r *ratelimit.Refusal, needs int64) (atOnce, perSecond float64) {
	if r.Limit.Kind == ratelimit.Requests {
		needs = 1
	}
	each := float64(max(1, min(needs, r.Limit.Amount)) * int64(max(1, b.Pool.Replicas())))
	whole := float64(r.Limit.Amount) / each
	if r.Reason == ratelimit.OverQuota {
		return whole, 0
	}
	return 0, whole / r.Limit.Unit.Length().Seconds()
}

// mayPass reports whether the limit that refuses a request is one for which
// requests wait.
func mayPass(r *ratelimit.Refusal) bool {
	return r.Reason == ratelimit.OverPart ||
		(r.Reason == ratelimit.OverRate || r.Reason == ratelimit.InFlight) && r.Limit.Unit <= ratelimit.Minute
}

// The rest is the wait of a search for backends.

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
