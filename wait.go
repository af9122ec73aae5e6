package openailb

import (
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
	// lists has the requests that wait. nil: none waits.
	lists *waiting.Lists
	// place is where it waits, or has waited, for a backend.
	place *waiting.Place
	// until is when the request waits no longer. Zero: it has not waited.
	until time.Time
	// waited is how long it has waited, and result is what came of it. Empty: it did not have to wait.
	waited time.Duration
	result waiting.Result
	// behind are the indexes of the backends that other requests wait for, which came before.
	behind []int
	// before is how many attempts were made before the wait. A backend that refused one of them
	// because it throttles may be tried again.
	before int
}

// wakes has the first of the requests that wait try again when something happens to a backend.
type wakes struct{ *waiting.Lists }

// Happened implements pool.Listener.
func (w wakes) Happened(pool.Event) { w.Wake(time.Now(), "") }

// ends returns when the request waits no longer.
func (w *turn) ends(in *intent, now time.Time) time.Time {
	until := w.until
	if until.IsZero() {
		until = w.lists.Until(now)
	}
	if !in.deadline.IsZero() && in.deadline.Before(until) {
		return in.deadline
	}
	return until
}

// mayLast reports whether the request may wait until then.
func (w *turn) mayLast(in *intent, at, now time.Time) bool {
	until := w.ends(in, now)
	return !at.After(until) && now.Before(until)
}

// mayLastUntil reports whether the request may wait until the limit that refuses it lets it through.
func (w *turn) mayLastUntil(r *meter.Refusal, in *intent, now time.Time) bool {
	return w.lists != nil && mayPass(r) && w.mayLast(in, returnOf(r, now).At, now)
}

// firstByte lets the next of the requests that wait go.
func (w *turn) firstByte(now time.Time) {
	if w.place != nil && w.result == waiting.Turn {
		w.place.FirstByte(now)
	}
}

// mayWait reports whether the request may wait for a backend. One for an object that one account stores may not.
func (ex *exchange) mayWait() bool {
	return ex.outcome.own.Response == nil && ex.intent.placement.Anywhere()
}

// lineUp keeps a request without a place from the backends that others wait for right now.
func (ex *exchange) lineUp() {
	w := &ex.tries.turn
	w.behind = nil
	if w.lists.Len() == 0 || !ex.mayWait() || w.place != nil {
		return
	}
	if next, ok := w.lists.Next(time.Now(), ex.intent.waitsIn(), ex.bill.Tier()); ok {
		w.behind = next.Reason.([]int)
	}
}

// waitForBackend waits until a backend accepts the request, which all refuse because they throttle. It returns nil if
// that takes too long.
func (ex *exchange) waitForBackend(now time.Time) (*pool.Member, time.Time) {
	if !ex.mayWait() {
		return nil, now
	}
	w := &ex.tries.turn
	behind, before := w.behind, w.before
	w.behind, w.before = nil, len(ex.tries.list)
	ex.update(now)
	r, ok := ex.Pool.Returns(&ex.tries.ask, behind, now)
	if !ok || !ex.mayGoOn(now) || !w.mayLast(&ex.intent, r.At, now) {
		w.behind, w.before = behind, before
		if ok && w.place != nil {
			w.result = waiting.Over
		}
		ex.update(now)
		return nil, now
	}
	w.until = w.ends(&ex.intent, now)
	if w.place == nil {
		who := waiting.Who{Caller: ex.intent.caller.Name, Tier: ex.bill.Tier()}
		if w.place, w.result = w.lists.Join(now, ex.intent.waitsIn(), who, w.until, returning(r)); w.place == nil {
			w.behind = r.Awaited
			ex.update(now)
			return nil, now
		}
	} else {
		w.place.Stay(now, returning(r))
	}
	var m *pool.Member
	w.await(ex.balancer, &ex.intent, ex.bill.Tier(), w.place, func(at time.Time) bool {
		now = at
		if m, r, ok = ex.pickOrWait(now); m != nil {
			w.place.Go(now)
			return false
		}
		if ok && w.mayLast(&ex.intent, r.At, now) {
			w.place.Stay(now, returning(r))
			return true
		}
		w.result = waiting.Over
		w.place.Leave(now)
		return false
	})
	if m == nil {
		now, w.behind = time.Now(), r.Awaited
		ex.update(now)
	}
	return m, now
}

// returning is what a request that waits has found out about backends.
func returning(r pool.Return) waiting.Return {
	return waiting.Return{At: r.At, Pause: r.Grace, Reason: r.Awaited, Yields: r.Yields}
}

// pickOrWait returns the backend that gets the request now, or when the first one accepts it. It returns neither
// if one is left that does not throttle, but accepts no request.
func (ex *exchange) pickOrWait(now time.Time) (m *pool.Member, r pool.Return, ok bool) {
	for range 2 { // after the pick, a bench may have ended
		ex.update(now)
		if m = ex.pickAgain(now); m != nil {
			return m, r, false
		}
		if r, ok = ex.Pool.Returns(&ex.tries.ask, nil, now); ok {
			return nil, r, true
		}
	}
	return nil, r, false
}

// await waits in a place. Each time that it is the request's turn, it calls again, until that returns false.
func (w *turn) await(b *balancer, in *intent, tier int, place *waiting.Place, again func(now time.Time) bool) {
	begun := time.Now()
	b.metrics.Waits(1)
	defer func() {
		b.metrics.Waits(-1)
		place.Leave(time.Now()) // a policy may panic, and the others must not wait for this request
	}()
	for goesOn := true; goesOn; {
		if w.result = place.Wait(in.request.Context().Done()); w.result != waiting.Turn {
			break
		}
		goesOn = again(time.Now())
	}
	waited := time.Since(begun)
	w.waited += waited
	if c := b.logger.Check(zap.DebugLevel, "request waited"); c != nil {
		c.Write(zap.String("result", string(w.result)), zap.Duration("duration", waited), in.callerField(),
			zap.String("model", pool.ModelKey(in.Model)), zap.Int("tier", tier))
	}
}

// admit charges the request to its caller's limits, or returns why it does not. It may wait for a limit by
// the second or the minute.
func (ex *exchange) admit(c *callers.Callers, name string, e meter.Estimate) (a callers.Admission, refusal *meter.Refusal) {
	w, now, key := &ex.tries.turn, time.Now(), waiting.Key{Caller: name}
	if w.lists == nil {
		return c.Admit(now, name, e)
	}
	next, behind := w.lists.Next(now, key, 0)
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
	if !mayPass(refusal) || !w.mayLast(&ex.intent, next.At, now) {
		return c.Admit(now, name, e) // it may not wait: it is charged now if there is room
	}
	w.until = w.ends(&ex.intent, now)
	var place *waiting.Place
	if place, w.result = w.lists.Join(now, key, waiting.Who{Caller: name}, w.until, next); place == nil {
		if a, refusal = c.Admit(now, name, e); refusal == nil {
			w.result = "" // it did not have to wait
		}
		return a, refusal
	}
	w.await(ex.balancer, &ex.intent, 0, place, func(now time.Time) bool {
		if a, refusal = c.Try(now, name, e); refusal == nil {
			place.Go(now)
			return false
		}
		if !mayPass(refusal) {
			w.result = waiting.Over
			place.Leave(now)
			return false
		}
		place.Stay(now, returnOf(refusal, now)) // until its time is over: others may give back what they did not use
		return true
	})
	if w.result != waiting.Turn && w.result != waiting.Left {
		if a, refusal = c.Admit(time.Now(), name, e); refusal == nil {
			w.result = waiting.Turn
		}
	}
	return a, refusal
}

// returnOf returns when a request may be tried again after a refusal. The wait may be rounded.
func returnOf(r *meter.Refusal, now time.Time) waiting.Return {
	return waiting.Return{At: now.Add(max(r.Wait, time.Millisecond)), Reason: r}
}

// mayPass reports whether the request is refused by a limit that requests wait for.
func mayPass(r *meter.Refusal) bool {
	return r.Reason == meter.OverPart || (r.Reason == meter.OverRate || r.Reason == meter.InFlight) && r.Limit.Unit <= meter.Minute
}

// leftWaiting reports whether the client left while its request waited.
func (ex *exchange) leftWaiting() bool {
	if ex.tries.turn.result != waiting.Left {
		return false
	}
	ex.outcome.own = apierror.Answer{Class: string(verdict.ClientLeftWaiting)}
	return true
}
