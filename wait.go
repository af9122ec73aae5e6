package openailb

import (
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/callers"
	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/waiting"
)

// wait is the wait of a request for a limit of its caller, and then for a
// backend. Both together last as long as one may.
type wait struct {
	// queues have the requests that wait. It is nil if requests do not wait.
	queues *waiting.Lists
	// place is where the request waits, or has waited, for a backend.
	place *waiting.Place
	// until is when the wait ends. It is zero if the request has not waited.
	until time.Time
	// duration is how long the request has waited. result is how the wait
	// ended; it is empty if the request did not have to wait.
	duration time.Duration
	result   waiting.Result
}

// wakes wakes the first waiting request on each event of the pool.
type wakes struct{ *waiting.Lists }

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
func (w *wait) mayLastUntil(r *limiter.Refusal, q *request, now time.Time) bool {
	return w.queues != nil && mayPass(r) && w.mayLast(q, returnOf(r, now).At, now)
}

// firstByte reports the first byte of the reply to the queues, which then wake
// the next waiting request.
func (w *wait) firstByte(now time.Time) {
	if w.place != nil && w.result == waiting.Turn {
		w.place.FirstByte(now)
	}
}

// joinForBackend takes a place among the requests that wait for a backend, or
// keeps the one that the request has. It reports false if none is free.
func (w *wait) joinForBackend(q *request, tier int, now time.Time, r waiting.Return) bool {
	w.until = w.ends(q, now)
	if w.place != nil {
		w.place.Stay(now, r)
		return true
	}
	who := waiting.Who{Caller: q.caller.Name, Tier: tier}
	w.place, w.result = w.queues.Join(now, q.waitsIn(), who, w.until, r)
	return w.place != nil
}

// returning is what a request that waits has found out about backends.
func returning(r pool.Return) waiting.Return {
	return waiting.Return{At: r.At, Pause: r.Grace, Reason: r.Awaited, Yields: r.Yields}
}

// await waits in a place. Each time that it is the request's turn, it calls
// try, until that returns false.
func (w *wait) await(b *balancer, q *request, tier int, place *waiting.Place, try func(now time.Time) (goesOn bool)) {
	begun := time.Now()
	b.metrics.Waits(1)
	defer func() {
		b.metrics.Waits(-1)
		place.Leave(time.Now()) // a policy may panic, and the others must not wait for this request
	}()
	for goesOn := true; goesOn; {
		if w.result = place.Wait(q.asked.Context().Done()); w.result != waiting.Turn {
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
func (w *wait) admit(b *balancer, q *request, c *callers.Callers, e limiter.Estimate) (a callers.Admission, refusal *limiter.Refusal) {
	name, now := q.caller.Name, time.Now()
	key := waiting.Key{Caller: name}
	if w.queues == nil {
		return c.Admit(now, name, e)
	}
	next, behind := w.queues.Next(now, key, 0)
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
		refusal = next.Reason.(*limiter.Refusal)
	}
	if !mayPass(refusal) || !w.mayLast(q, next.At, now) {
		return c.Admit(now, name, e) // it may not wait: it is charged now if there is room
	}
	w.until = w.ends(q, now)
	var place *waiting.Place
	if place, w.result = w.queues.Join(now, key, waiting.Who{Caller: name}, w.until, next); place == nil {
		if a, refusal = c.Admit(now, name, e); refusal == nil {
			w.result = "" // it did not have to wait
		}
		return a, refusal
	}
	w.await(b, q, 0, place, func(now time.Time) bool {
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

// returnOf returns when a request may be tried again after a refusal. The wait
// may be rounded.
func returnOf(r *limiter.Refusal, now time.Time) waiting.Return {
	return waiting.Return{At: now.Add(max(r.Wait, time.Millisecond)), Reason: r}
}

// mayPass reports whether the limit that refuses a request is one for which
// requests wait.
func mayPass(r *limiter.Refusal) bool {
	return r.Reason == limiter.OverPart || (r.Reason == limiter.OverRate || r.Reason == limiter.InFlight) && r.Limit.Unit <= limiter.Minute
}
