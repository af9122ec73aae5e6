package openailb

import (
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// remember records what a reply means for the current backend, and logs the
// attempt.
func (ex *exchange) remember(r *attempt.Reply) {
	now, t, a := time.Now(), ex.tries.current, ex.attempted()
	a.class, a.status = r.Class, r.Status
	ex.observeAttempt(a, r)
	if c := ex.balancer.logger.Check(zap.DebugLevel, "attempt"); c != nil {
		c.Write(zap.String("backend", t.Name), ex.api.callerField(), zap.String("class", string(r.Class)), zap.Int("status", r.Status),
			zap.Duration("duration", now.Sub(a.started)), zap.String("hint", string(r.Source)), zap.String("affinity", ex.api.placement.Why(ex.api.affinity)), errorField(r.Err))
	}
	if !r.Class.Failover() {
		t.Served(ex.benchModel(t.backend), a.started)
		t.servedAt.Store(now.UnixNano())
		if ex.balancer.firstBytes && r.Class == verdict.Served && ex.api.Body.Stream {
			t.firstByte(ex).Took(now.Sub(a.started), now)
		}
	}
	ex.observeQuota(t, r, now)
	if r.Connected || r.Status > 0 {
		t.Reached()
	}
	if t.backend.Credentials.Outdated(a.credential) {
		return // it says nothing of the key that there is now
	}
	b, benches := ex.balancer.sender.Bench(r, t.servesOthers(a.started))
	if !benches || b.MayBeOfRequest && !ex.tries.bench.claim() || b.Counts && !ex.reaches(r.Class, now) {
		return
	}
	began := t.Bench(pool.Refusal{
		Reason:      r.Reason(),
		Throttle:    r.Class.Promise(),
		Whole:       ex.wholeBackend(r.Class),
		Unreachable: r.Class == verdict.Unreachable && ex.balancer.front.rechecks(),
		Model:       ex.benchModel(t.backend),
		Cost:        ex.api.Cost,
		Wait:        b.Wait,
		Longest:     b.Longest,
		Guess:       b.Guess,
		Started:     a.started,
	}, now)
	if began && r.Class.Promise() {
		a.benched = now
	}
}

// servesOthers reports whether the backend serves other requests, or has done so
// since then.
func (t *target) servesOthers(since time.Time) bool {
	return t.InFlight() > 1 || t.servedAt.Load() >= since.UnixNano()
}

// reaches reports whether a failure of the current backend reaches max_fails.
func (ex *exchange) reaches(class verdict.Class, now time.Time) bool {
	p := &ex.balancer.sender.PassiveHealth
	return ex.tries.current.CountFailure(class.WholeBackend(), ex.benchModel(ex.tries.current.backend), now, p.MaxFails, time.Duration(p.FailDuration))
}

// Broken implements attempt.Recipient. It records that a reply was cut, or contained
// an error, after its beginning went to the client.
func (ex *exchange) Broken(r *attempt.Reply, reason error) {
	if ex.request.Context().Err() != nil || ex.api.received.Failure() != nil || r.Upload().Stalled() {
		return // the client left, or did not send all of its body
	}
	now, t, a := time.Now(), ex.tries.current, ex.attempted()
	if r.GivenUp(reason) {
		a.class = verdict.ClientError
		if c := ex.balancer.logger.Check(zap.DebugLevel, "reply broken while the client paused"); c != nil {
			c.Write(zap.String("backend", t.Name), zap.Duration("duration", now.Sub(a.started)), errorField(reason))
		}
		return
	}
	ex.breaks(reason, true)
}

// BrokenTunnel implements attempt.Recipient. A backend that had sent data before is not
// benched.
func (ex *exchange) BrokenTunnel(r *attempt.Reply, reason error, begun bool) {
	if ex.request.Context().Err() == nil {
		ex.breaks(reason, !begun)
	}
}

// breaks makes the attempt a broken stream.
func (ex *exchange) breaks(reason error, benches bool) {
	now, t, a := time.Now(), ex.tries.current, ex.attempted()
	a.class = verdict.BrokenStream
	if c := ex.balancer.logger.Check(zap.WarnLevel, "reply broken"); c != nil {
		c.Write(zap.String("backend", t.Name), zap.String("deployment", pool.ModelKey(ex.model())),
			zap.Duration("duration", now.Sub(a.started)), errorField(reason))
	}
	if !benches || !ex.tries.bench.claim() {
		return
	}
	if ex.reaches(a.class, now) {
		t.Bench(pool.Refusal{
			Reason: pool.Reason{Class: string(a.class), Status: a.status, Cause: verdict.CauseOf(reason), Error: attempt.ErrorText(reason)},
			Model:  ex.benchModel(t.backend), Wait: ex.balancer.sender.Failure().Wait,
		}, now)
	}
}

// errorField is an error of an attempt for a log.
func errorField(err error) zap.Field {
	if err == nil {
		return zap.Skip()
	}
	return zap.String("error", attempt.ErrorText(err))
}
