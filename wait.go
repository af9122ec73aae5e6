package openailb

import (
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/callers"
	"github.com/openai-lb/caddy-openai-lb/internal/meter"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
	"github.com/openai-lb/caddy-openai-lb/internal/waiting"
)

// turn is the wait of a request for a backend, or for a limit of its caller. Both waits together last as long
// as one may.
type turn struct {
	// place is where it waits, or has waited, for a backend.
	place *waiting.Place
	// until is when the request waits no longer. Zero: it has not waited.
	until time.Time
	// waited is how long it has waited, and result is what came of it. Empty: it did not have to wait.
	waited time.Duration
	result waiting.Result
	// behind are the indexes of the backends that other requests wait for, which came before.
	behind []int
	// forgiven is how many attempts were made before the wait. A backend that refused one of them
	// because it throttles may be tried again.
	forgiven int
}

// wakes has the first of the requests that wait try again when something happens to a backend.
type wakes struct{ *waiting.Lists }

// Happened implements pool.Listener.
func (w wakes) Happened(pool.Event) { w.Wake(time.Now(), "") }

// waitingFor is the list in which the request waits for a backend.
func (ex *exchange) waitingFor() waiting.Key {
	if !ex.api.Kind.Infers() {
		return waiting.Key{}
	}
	return waiting.Key{Model: pool.ModelKey(ex.api.Model)}
}

// mayWait reports whether the request may wait for a backend. One for an object that one account stores may not.
func (ex *exchange) mayWait() bool {
	return ex.own.Response == nil && ex.api.placement.Anywhere()
}

// lineUp keeps a request without a place from the backends that others wait for right now.
func (ex *exchange) lineUp() {
	ex.stepOut()
	lists := ex.balancer.waiting
	if lists.Len() == 0 || !ex.mayWait() || ex.tries.turn != nil && ex.tries.turn.place != nil {
		return
	}
	if next, ok := lists.Next(ex.waitingFor(), ex.admission.Tier()); ok {
		ex.turn().behind = next.Reason.([]int)
	}
}

// stepOut lets the request go to backends that others wait for, too.
func (ex *exchange) stepOut() {
	if ex.tries.turn != nil {
		ex.tries.turn.behind = nil
	}
}

func (ex *exchange) turn() *turn {
	if ex.tries.turn == nil {
		ex.tries.turn = new(turn)
	}
	return ex.tries.turn
}

// isBehind reports whether other requests wait for the member, which came before this one.
func (ex *exchange) isBehind(m *pool.Member) bool {
	return ex.tries.turn != nil && slices.Contains(ex.tries.turn.behind, m.Index)
}

// isForgiven reports whether the backend of an attempt may be tried again, because the request has waited since.
func (ex *exchange) isForgiven(attempt int) bool {
	return ex.tries.turn != nil && attempt < ex.tries.turn.forgiven && ex.tries.attempts[attempt].class == verdict.Throttled
}

// forgiven is how many attempts do not count, because their backend may be tried again.
func (ex *exchange) forgiven() (n int) {
	if ex.tries.turn == nil {
		return 0
	}
	for i := range ex.tries.turn.forgiven {
		if ex.isForgiven(i) {
			n++
		}
	}
	return n
}

// wait waits until a backend accepts the request, which all refuse because they throttle. It returns nil if that
// takes too long.
func (ex *exchange) wait(now time.Time) (*pool.Member, time.Time) {
	if !ex.mayWait() {
		return nil, now
	}
	t := ex.turn()
	behind, forgiven := t.behind, t.forgiven
	t.behind, t.forgiven = nil, len(ex.tries.attempts)
	r, ok := ex.returns(now, behind)
	if !ok || !ex.mayGoOn(now) || !ex.waitsFor(r.At, now) {
		t.behind, t.forgiven = behind, forgiven
		if ok && t.place != nil {
			t.result = waiting.Over
		}
		return nil, now
	}
	t.until = ex.waitsUntil(now)
	if t.place == nil {
		if t.place, t.result = ex.balancer.waiting.Join(now, ex.waitingFor(), waiting.Who{Caller: ex.api.caller.Name, Tier: ex.admission.Tier()}, t.until, r); t.place == nil {
			t.behind = r.Reason.([]int)
			return nil, now
		}
	} else {
		t.place.Stay(now, r)
	}
	behind = r.Reason.([]int)
	var m *pool.Member
	ex.await(t.place, func(at time.Time) bool {
		now = at
		if m, r, ok = ex.pickOrWait(now); m != nil {
			t.place.Go(now)
			return false
		}
		behind, _ = r.Reason.([]int)
		if ok && ex.waitsFor(r.At, now) {
			t.place.Stay(now, r)
			return true
		}
		t.result = waiting.Over
		t.place.Leave(now)
		return false
	})
	if m == nil {
		now, t.behind = time.Now(), behind
	}
	return m, now
}

// pickOrWait returns the backend that gets the request now, or when the first one accepts it. It returns neither
// if one is left that does not throttle, but accepts no request.
func (ex *exchange) pickOrWait(now time.Time) (m *pool.Member, r waiting.Return, ok bool) {
	for range 2 { // after the pick, a bench may have ended
		if m = ex.balancer.Pool.Pick(ex, now); m != nil {
			return m, r, false
		}
		if r, ok = ex.returns(now, nil); ok {
			return nil, r, true
		}
	}
	return nil, waiting.Return{}, false
}

// await waits in a place. Each time that it is the request's turn, it calls try, until that returns false.
func (ex *exchange) await(place *waiting.Place, try func(now time.Time) (again bool)) {
	begun, t := time.Now(), ex.tries.turn
	ex.balancer.metrics.Waits(1)
	defer func() {
		ex.balancer.metrics.Waits(-1)
		place.Leave(time.Now()) // a policy may panic, and the others must not wait for this request
	}()
	for again := true; again; {
		if t.result = place.Wait(ex.request.Context().Done()); t.result != waiting.Turn {
			break
		}
		again = try(time.Now())
	}
	waited := time.Since(begun)
	t.waited += waited
	if c := ex.balancer.logger.Check(zap.DebugLevel, "request waited"); c != nil {
		c.Write(zap.String("result", string(t.result)), zap.Duration("duration", waited), ex.api.callerField(),
			zap.String("model", pool.ModelKey(ex.api.Model)), zap.Int("tier", ex.admission.Tier()))
	}
}

// waitsFor reports whether the request may wait until then.
func (ex *exchange) waitsFor(at, now time.Time) bool {
	until := ex.waitsUntil(now)
	return !at.After(until) && now.Before(until)
}

// waitsUntil returns when the request waits no longer.
func (ex *exchange) waitsUntil(now time.Time) time.Time {
	until := ex.turn().until
	if until.IsZero() {
		until = ex.balancer.waiting.Until(now)
	}
	if deadline := ex.tries.deadline; !deadline.IsZero() && deadline.Before(until) {
		return deadline
	}
	return until
}

// returns returns when the first of the backends that are left accepts the request, and the indexes of all of
// them. ok reports whether all throttle. A backend that other requests wait for counts as one that does.
func (ex *exchange) returns(now time.Time, behind []int) (r waiting.Return, ok bool) {
	var awaited []int
	for _, t := range ex.balancer.targets {
		if _, takes := ex.ModelAt(t.Member); !takes || !ex.MayTry(t.Member) {
			continue
		}
		at, grace, throttles := t.Accepts(ex, now)
		if (!throttles || !at.After(now)) && !slices.Contains(behind, t.Index) {
			return waiting.Return{}, false // it has no room
		}
		if len(awaited) == 0 || at.Before(r.At) {
			r.At, r.Pause = at, grace
		}
		awaited = append(awaited, t.Index)
	}
	r.Reason = awaited
	return r, len(awaited) > 0
}

// admitCaller charges the request to its caller's limits, or returns why it does not. It may wait for a limit by
// the second or the minute.
func (ex *exchange) admitCaller(c *callers.Callers, name string, e meter.Estimate) (a callers.Admission, refusal *meter.Refusal) {
	now, lists, key := time.Now(), ex.balancer.waiting, waiting.Key{Caller: name}
	if lists == nil {
		return c.Admit(now, name, e)
	}
	next, behind := lists.Next(key, 0)
	if behind {
		refusal = c.Check(now, name, e)
	} else {
		a, refusal = c.Try(now, name, e)
	}
	switch {
	case refusal != nil:
		next = returnOf(refusal, now)
	case !behind:
		return a, nil
	default: // there is room, but others came first
		refusal = next.Reason.(*meter.Refusal)
	}
	if !mayPass(refusal) || !ex.waitsFor(next.At, now) {
		return c.Admit(now, name, e) // there may be room, too
	}
	t := ex.turn()
	t.until = ex.waitsUntil(now)
	var place *waiting.Place
	if place, t.result = lists.Join(now, key, waiting.Who{Caller: name}, t.until, next); place == nil {
		if a, refusal = c.Admit(now, name, e); refusal == nil {
			t.result = "" // it did not have to wait
		}
		return a, refusal
	}
	ex.await(place, func(now time.Time) bool {
		if a, refusal = c.Try(now, name, e); refusal == nil {
			place.Go(now)
			return false
		}
		if !mayPass(refusal) {
			t.result = waiting.Over
			place.Leave(now)
			return false
		}
		place.Stay(now, returnOf(refusal, now)) // until its time is over: others may give back what they did not use
		return true
	})
	if t.result != waiting.Turn && t.result != waiting.Left {
		if a, refusal = c.Admit(time.Now(), name, e); refusal == nil {
			t.result = waiting.Turn
		}
	}
	return a, refusal
}

// returnOf returns when a request may be tried again after a refusal. The wait may be rounded.
func returnOf(r *meter.Refusal, now time.Time) waiting.Return {
	return waiting.Return{At: now.Add(max(r.Wait, time.Millisecond)), Reason: r}
}

// mayWaitFor reports whether the request may wait until the limit that refuses it lets it through.
func (ex *exchange) mayWaitFor(r *meter.Refusal, now time.Time) bool {
	return ex.balancer.waiting != nil && mayPass(r) && ex.waitsFor(returnOf(r, now).At, now)
}

// mayPass reports whether the request is refused by a limit that requests wait for.
func mayPass(r *meter.Refusal) bool {
	return r.Reason == meter.OverPart || (r.Reason == meter.OverRate || r.Reason == meter.InFlight) && r.Limit.Unit <= meter.Minute
}

// hasLeft reports whether the client left while its request waited.
func (ex *exchange) hasLeft() bool {
	if ex.tries.turn == nil || ex.tries.turn.result != waiting.Left {
		return false
	}
	ex.own = apierror.Answer{Class: string(verdict.ClientLeftWaiting)}
	return true
}

// firstByte lets the next of the requests that wait go.
func (t *turn) firstByte() {
	if t != nil && t.place != nil && t.result == waiting.Turn {
		t.place.FirstByte(time.Now())
	}
}
