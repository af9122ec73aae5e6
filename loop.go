package openailb

import (
	"context"
	"net/http"
	"net/url"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// loop is the transport of the directive's reverse_proxy, which calls it once for each request. It makes attempts, at
// one backend after another, until the client gets a reply, or the balancer's own answer because no backend is left.
type loop struct {
	sender *attempt.Sender
	// schemes are those of the backends by dial address, for active health checks.
	schemes map[string]string
}

// exchangeCtxKey is the key of a request's exchange in its context.
type exchangeCtxKey struct{}

// RoundTrip implements http.RoundTripper.
func (l loop) RoundTrip(req *http.Request) (*http.Response, error) {
	ex, ok := req.Context().Value(exchangeCtxKey{}).(*exchange)
	if !ok { // an active health check
		return l.sender.RoundTripper.RoundTrip(req)
	}
	if ex.balancer.hidesHeader {
		defer hideHeader(req)
	}
	placeholders := req.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	for {
		t := ex.choose()
		if t == nil {
			ourselves.show(placeholders)
			return ex.answerUnlessLeft(req)
		}
		t.address.show(placeholders)
		r := ex.attempt(req)
		if res, err := ex.next(req, r); res != nil || err != nil {
			return res, err
		}
	}
}

// choose moves on to the backend that is attempted next. It returns nil if there is none.
func (ex *exchange) choose() *target {
	ex.release()
	ex.dropCookies()
	now := time.Now()
	m := ex.moved()
	if m == nil && ex.own.Response == nil && ex.mayGoOn(now) {
		ex.ask(now)
		ex.lineUp()
		stayHome(ex, now)
		if m = ex.balancer.Pool.Pick(ex, now); m == nil && ex.mayReturn() {
			m = ex.balancer.Pool.Pick(ex, now)
		}
		ex.observeCeiling(m, now)
	}
	if m == nil && ex.balancer.waiting != nil {
		m, now = ex.wait(now)
	}
	if m == nil && ex.own.Response == nil && ex.mayGoOn(now) && ex.balancer.forward && !ex.tries.forwarded && ex.allThrottle(now) {
		ex.stepOut()
		m = ex.balancer.Pool.PickThrottled(ex, now)
		ex.tries.forwarded = m != nil
	}
	if m == nil {
		return nil
	}
	ex.observeFailover(m)
	ex.tries.current = ex.balancer.targets[m.Index]
	ex.tries.attempts = append(ex.tries.attempts, try{target: ex.tries.current, started: now, mark: ex.deduct(ex.tries.current), deployment: ex.deploymentLabel(ex.tries.current)})
	return ex.tries.current
}

// next decides what follows an attempt: the client gets the reply, or an answer, or has left. If it returns neither,
// another backend is tried.
func (ex *exchange) next(req *http.Request, r *attempt.Reply) (*http.Response, error) {
	if err := r.Ended(req); err != nil && !ex.bodyLate() {
		ex.returnQuota(r)
		r.Discard()
		class := verdict.ClientLeftWaiting
		if ex.api.received.Failure() != nil {
			class = verdict.ClientLeft
		}
		ex.endAttemptAs(class)
		return nil, err // no backend is to blame
	}
	if refusal, ok := ex.clientsFault(r); ok {
		ex.refuse(r, refusal)
		return ex.answer(req), nil
	}
	ex.remember(r)
	ex.tries.executed = !ex.api.Kind.Repeatable() && r.PerhapsExecuted()
	switch {
	case ex.mayBeElsewhere(r):
		return nil, nil
	case !r.Class.Failover() || ex.tries.forwarded && r.Presentable():
		return ex.commit(r), nil
	case ex.mayRepeat(r):
		return nil, nil
	}
	return ex.answer(req), nil
}

// answerUnlessLeft returns the answer, or an error if the client left while its request waited.
func (ex *exchange) answerUnlessLeft(req *http.Request) (*http.Response, error) {
	if ex.hasLeft() {
		return nil, context.Canceled
	}
	return ex.answer(req), nil
}

// OverrideHealthCheckScheme makes active health checks use the scheme of the backend that they check.
func (l loop) OverrideHealthCheckScheme(base *url.URL, port string) {
	if scheme, ok := l.schemes[base.Host]; ok {
		base.Scheme = scheme
		return
	}
	l.sender.HTTP.OverrideHealthCheckScheme(base, port)
}

// Interface guards
var (
	_ http.RoundTripper                                = loop{}
	_ reverseproxy.HealthCheckSchemeOverriderTransport = loop{}
)
