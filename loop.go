package openailb

import (
	"context"
	"net/http"
	"net/url"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// loop is the transport of the directive's reverse_proxy, which calls it once for each request.
type loop struct {
	sender *attempt.Sender
	// schemes are those of the backends by dial address, for active health checks.
	schemes map[string]string
}

// exchange is one request, with the values that its stages make: read makes the intent, the loop the tries, and commit or
// answer the outcome. Admission opens the bill before the first attempt, and it is settled when the request is over. What
// needs only some of them is no method of the exchange, but gets these.
type exchange struct {
	*balancer
	intent  intent
	tries   tries
	outcome outcome
	bill    bill

	writer http.ResponseWriter
	// proxied is the request as reverse_proxy gets it.
	proxied http.Request
	// cookies are set once a policy was asked, which may set more.
	cookies pools.Cookies
	// latest is the exchange of the request's last handler so far. Only that of the first handler has it.
	latest *exchange
}

// exchangeVar is the variable of a request in which its first handler leaves its exchange, for the loop and the placeholders.
// Later handlers do not set it: net/http may still dial for an earlier attempt and read the variables.
const exchangeVar = "openai_lb.exchange"

// held is the variable's value. It keeps the exchange's fields, such as keys, out of the placeholder of the variable.
type held struct{ *exchange }

// RoundTrip implements http.RoundTripper. It makes attempts, at one backend after another, until the client gets a
// reply, or the balancer's own answer because no backend is left.
func (l loop) RoundTrip(req *http.Request) (*http.Response, error) {
	first, ok := caddyhttp.GetVar(req.Context(), exchangeVar).(held)
	if !ok { // an active health check
		return l.sender.RoundTripper.RoundTrip(req)
	}
	ex := first.latest
	if ex.hidesHeader {
		defer attempt.HideHeader(req)
	}
	placeholders := req.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	for {
		t := ex.choose()
		if t == nil {
			attempt.Ourselves.Show(placeholders)
			if ex.leftWaiting() {
				return nil, context.Canceled
			}
			return ex.answer(req), nil
		}
		t.address.Show(placeholders)
		r := ex.attempt(&ex.intent, &ex.tries, &ex.bill, req)
		if err := ex.clientLeft(r, req); err != nil {
			return nil, err
		}
		if refusal, ok := r.ClientsFault(); ok {
			ex.refuse(r, refusal)
			return ex.answer(req), nil
		}
		now := time.Now()
		ex.learn(&ex.intent, &ex.tries, ex.bill.Tier(), r, now)
		switch ex.next(r) {
		case serve:
			return ex.commit(r, now), nil
		case give:
			return ex.answer(req), nil
		}
	}
}

// step is what follows an attempt.
type step int

const (
	// again: another backend is tried.
	again step = iota
	// serve: the client gets the reply.
	serve
	// give: it gets the answer.
	give
)

// next decides what follows a reply, which is set aside if the client may not get it.
func (ex *exchange) next(r *attempt.Reply) step {
	t := &ex.tries
	t.executed = !ex.intent.Kind.Repeatable() && r.PerhapsExecuted()
	switch {
	case ex.setAsideMissing(r):
		return again
	case !r.Class.Failover():
		return serve
	case ex.setAside(r):
		return again
	}
	return give
}

// choose moves on to the backend that is attempted next. It returns nil if there is none.
func (ex *exchange) choose() *target {
	t := &ex.tries
	t.release()
	ex.cookies.Drop(ex.writer)
	now := time.Now()
	m := t.moved()
	if m == nil && ex.mayGoOn(now) {
		m = ex.pick(now)
	}
	if m == nil && ex.tries.turn.lists != nil {
		m, now = ex.waitForBackend(now)
	}
	if m == nil {
		return nil
	}
	t.current = ex.targets[m.Index]
	if last := t.last(); last != nil && last.over && last.target != t.current {
		last.target.metrics.FailedOver(string(last.class))
	}
	at := &t.ask.At[t.current.Index]
	at.Tried, at.Bar = true, pool.Spent // so that the request does not move to where it is; bar finds out anew
	t.list = append(t.list, try{
		target: t.current, started: now, mark: ex.deduct(&ex.intent, t.current, ex.bill.Tier(), now), deployment: deploymentLabel(&ex.intent, t.current), flex: at.Flex,
	})
	return t.current
}

// pick asks the pool for the backend that gets the request.
func (ex *exchange) pick(now time.Time) *pool.Member {
	t, first := &ex.tries, len(ex.tries.list) == 0
	ex.lineUp()
	if ex.update(now); first && ex.tiers != nil {
		ex.Pool.Demand(&t.ask, now) // other tiers leave its share for such requests
	}
	ex.stayHome(now)
	m := ex.pickAgain(now)
	if m == nil && t.mayReturn() {
		ex.update(now)
		m = ex.pickAgain(now)
	}
	if first {
		ex.countReserved(&t.ask, m, now)
	}
	return m
}

// pickAgain asks the pool once.
func (ex *exchange) pickAgain(now time.Time) *pool.Member {
	m := ex.Pool.Pick(&ex.tries.ask, now)
	if m != nil {
		for _, other := range ex.tries.ask.Steered {
			t := ex.targets[other.Index]
			t.metrics.Steered(deploymentLabel(&ex.intent, t))
		}
	}
	return m
}

// update brings up to date what the pool has to know of the request.
func (ex *exchange) update(now time.Time) {
	if t := &ex.tries; t.ask.At == nil {
		t.fill(ex.balancer, &ex.intent, ex.bill.Tier())
		if ex.policy != nil {
			t.ask.Policy = policyOf(ex.policy, ex)
		}
	}
	ex.tries.bar(ex.targets, &ex.intent, now)
}

// stayHome keeps a request to the account where its caller's objects are, if that throttles for less than a minute:
// an object elsewhere could not be used with them. The client gets its 429, and retries.
func (ex *exchange) stayHome(now time.Time) {
	in, maker := &ex.intent, ex.tries.ask.Affinity.Maker
	if maker == nil || maker.Order == 0 || maker.Home == "" || !ex.Pool.IsSoonBack(&ex.tries.ask, maker.Home, now) {
		return
	}
	if in.Model != "" || in.entitled.HasAllModels(maker.Home) {
		in.placement.Settle(maker.Home)
		ex.update(now)
	}
}

// mayGoOn reports whether a further backend may be tried.
func (ex *exchange) mayGoOn(now time.Time) bool {
	if ex.outcome.own.Response != nil {
		return false
	}
	return len(ex.tries.list) == 0 || ex.tries.isLeft(&ex.intent) && (ex.intent.deadline.IsZero() || !now.After(ex.intent.deadline))
}

// clientLeft returns an error if the client has left. No backend is to blame then. A client that was too slow with its
// body is there: net/http's server cancels its request as if it had left.
func (ex *exchange) clientLeft(r *attempt.Reply, req *http.Request) error {
	err := r.Ended(req)
	if err == nil || ex.intent.isLate() {
		return nil
	}
	a := ex.tries.last()
	a.giveBack(r)
	r.Discard()
	a.class = verdict.ClientLeftWaiting
	if ex.intent.received.Failure() != nil {
		a.class = verdict.ClientLeft
	}
	a.end()
	return err
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
