package upstreams

import (
	"errors"
	"maps"
	"net/http"
	"net/url"
	"os"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/headers"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

func init() {
	caddy.RegisterModule(new(Transport))
}

// Transport makes one attempt at an upstream of a plain reverse_proxy, classifies
// the reply and records what it means. If another upstream may do better, the client
// does not get the reply: reverse_proxy asks the selection policy openai_lb again,
// which chooses the next upstream. Without that policy, the transport has no effect.
//
// The options silence and quota_steering are not allowed: the handler openai_lb has
// them.
type Transport struct {
	attempt.PassiveHealth
	attempt.Options

	// HTTP configures the connections to the upstreams, as reverse_proxy's http
	// transport does. Default: that transport's defaults, but no added
	// compression, a larger write buffer, more idle connections, which are
	// closed before providers close theirs, and pings that find dead HTTP/2
	// connections.
	HTTP *reverseproxy.HTTPTransport `json:"http,omitempty"`

	sender *attempt.Sender
}

// CaddyModule returns the Caddy module information.
func (*Transport) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.reverse_proxy.transport.openai_lb",
		New: func() caddy.Module { return new(Transport) },
	}
}

// UnmarshalJSON implements json.Unmarshaler.
func (t *Transport) UnmarshalJSON(data []byte) error {
	type options Transport
	return directive.UnmarshalJSON(data, (*options)(t))
}

// UnmarshalCaddyfile sets up the transport from Caddyfile tokens. Syntax:
//
//	transport openai_lb {
//	    <fail_duration, retry_after_max, request_buffers and the timeouts of openai_lb...>
//
//	    http {
//	        <options of the http transport...>
//	    }
//	}
func (t *Transport) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	return directive.Unmarshal(d, t.PassiveHealth.Directives(), t.Options.Directives(), directive.Options{
		"http": directive.Func(func(d *caddyfile.Dispenser) error {
			t.HTTP = new(reverseproxy.HTTPTransport)
			return t.HTTP.UnmarshalCaddyfile(d.NewFromNextSegment())
		}).Check(func() error { return attempt.CheckConnections(t.HTTP) }),
	}.Check(t.check))
}

// check refuses the options that have no effect here.
func (t *Transport) check() error {
	const elsewhere = " has no effect in a plain reverse_proxy: use the directive openai_lb"
	switch {
	case t.Silence != nil:
		return errors.New("silence" + elsewhere)
	case t.QuotaSteering != nil:
		return errors.New("quota_steering" + elsewhere)
	}
	return nil
}

// Provision sets up the transport.
func (t *Transport) Provision(ctx caddy.Context) error {
	if err := t.check(); err != nil {
		return err
	}
	proxy := proxyAround(ctx.Modules())
	if proxy != nil && !hasSelection(proxy) {
		ctx.Logger().Warn("transport openai_lb has no effect without lb_policy openai_lb")
	}
	t.sender = &attempt.Sender{PassiveHealth: t.PassiveHealth, Options: t.Options, HTTP: t.HTTP}
	err := t.sender.Provision(ctx, proxy)
	t.HTTP = t.sender.HTTP
	return err
}

// Cleanup closes idle connections, and stops unused timers.
func (t *Transport) Cleanup() error {
	if t.sender == nil {
		return nil
	}
	return t.sender.Cleanup()
}

// errNext makes reverse_proxy ask the policy again.
var errNext = reverseproxy.NewDialError(errors.New("trying the next backend"))

// RoundTrip implements http.RoundTripper. It makes one attempt at the upstream
// that the policy chose for the request, or answers if there is none.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	// a request may pass several reverse_proxies
	q, ok := caddyhttp.GetVar(req.Context(), requestVar).(*request)
	switch {
	case !ok || q.selection.transport != t:
		return t.sender.RoundTripper.RoundTrip(req)
	case q.current == nil:
		return q.answer(req), nil
	}
	r := q.send(t.sender, req)
	failure := q.body.Failure()
	if err := r.Ended(req); err != nil && !errors.Is(failure, os.ErrDeadlineExceeded) {
		r.Discard()
		class := verdict.ClientLeftWaiting
		if failure != nil {
			class = verdict.ClientLeft
		}
		q.end(class, 0)
		return nil, err // no upstream is to blame
	}
	if refusal, ok := r.ClientsFault(); ok {
		q.refuse(r, refusal)
		return q.answer(req), nil
	}
	q.learn(t.sender, r)
	q.executed = !q.asks.Kind.Repeatable() && r.PerhapsExecuted()
	switch {
	case !r.Class.Failover():
		return q.commit(r), nil
	case q.mayRepeat(r):
		return nil, errNext
	}
	return q.answer(req), nil
}

func (q *request) send(s *attempt.Sender, req *http.Request) *attempt.Reply {
	q.last().span = observe.StartSpan(req.Context(), func() observe.Attempt {
		return observe.Attempt{Method: openaiapi.MethodOf(q.client), Operation: q.asks.Operation, Stream: q.asks.Stream,
			Pool: q.Name, Backend: q.current.Name, Address: q.current.upstream.Dial}
	})
	header := maps.Clone(req.Header) // its values are not changed in place
	return s.Send(&attempt.Request{Proxied: req, URL: *req.URL, Host: req.Host, Header: header, Body: &q.body, Asks: q.asks,
		Fields: attempt.All{}, Interims: &q.interims, Marks: q.current})
}

func (q *request) last() *try { return &q.tries[len(q.tries)-1] }

func (q *request) end(class verdict.Class, status int) {
	t := q.last()
	t.class, t.status = class, status
	t.span.End(status, string(class), class == verdict.Served)
	t.member.metrics.Attempted("", string(class))
}

// refuse makes the answer an error of the client's.
func (q *request) refuse(r *attempt.Reply, refusal apierror.Error) {
	r.Discard()
	if r.Upload().Stalled() {
		// net/http's server sends no answer while the body is being read
		_ = http.NewResponseController(q.writer).SetReadDeadline(time.Now()) // not all writers have one
	}
	q.own = refusal.Response(q.client)
	q.end(verdict.ClientError, 0)
}

// learn records what a reply means for the upstream, and logs the attempt.
func (q *request) learn(s *attempt.Sender, r *attempt.Reply) {
	now, m, t := time.Now(), q.current, q.last()
	q.end(r.Class, r.Status)
	if r.Class == verdict.Throttled {
		m.metrics.Throttled(string(r.Source))
	}
	if r.Response != nil {
		m.metrics.Saw("", verdict.ReadRates(r.Response.Header))
	}
	if c := q.selection.events.Check(zap.DebugLevel, "attempt"); c != nil {
		c.Write(zap.String("backend", m.Name), zap.String("class", string(r.Class)), zap.Int("status", r.Status),
			zap.Duration("duration", now.Sub(t.started)), zap.String("hint", string(r.Source)), attempt.ErrorField(r.Err))
	}
	if !r.Class.Failover() {
		m.Served(pool.Scope{}, t.started)
		m.servedAt.Store(now.UnixNano())
	}
	if r.Connected || r.Status > 0 {
		m.Reached()
	}
	busy := m.InFlight() > 1 || m.servedAt.Load() >= t.started.UnixNano()
	if b, benches := s.Bench(r, busy); benches && q.mayBench(b) {
		began := m.Bench(pool.Refusal{
			Reason: r.Reason(), Throttle: r.Class.Promise(), Whole: q.wholeUpstream(r.Class), Cost: q.asks.Cost,
			Wait: b.Wait, Longest: b.Longest, Guess: b.Guess, Started: t.started,
		}, now)
		if began && r.Class.Promise() {
			t.benched = now
		}
	}
}

// mayBench reports whether the current upstream may be benched: what may be the request's own fault benches no second
// one.
func (q *request) mayBench(b attempt.Bench) bool {
	first := !q.blamed
	q.blamed = q.blamed || b.MayBeOfRequest
	return first || !b.MayBeOfRequest
}

// mayRepeat reports whether the request may be sent to another upstream. It also keeps what the client gets if no other
// upstream has a better reply. A context that is too short is so everywhere, as far as we know.
func (q *request) mayRepeat(r *attempt.Reply) bool {
	sendable := r.Upload().Abandon()
	switch {
	case q.executed && !r.Presentable():
		r.Discard()
		q.own = apierror.Executed(r.Class).Response(q.client)
	case !sendable && errors.Is(r.Err, attempt.ErrUnprocessed):
		r.Discard()
		q.own = apierror.NotProcessed.Response(q.client)
	// an upload that is ended takes the rest of a long error with it
	case r.SaysMore() && (r.Whole || !sendable || q.body.Whole()):
		q.keep(r.Response, r.Class)
	default:
		r.Discard()
	}
	return sendable && !q.executed && !r.Class.ContextLength(r.Status)
}

func (q *request) commit(r *attempt.Reply) *http.Response {
	q.committed()
	res, _ := r.Commit(q.writer, time.Now(), q.ended)
	q.forbidRetry(res)
	return res
}

// ended learns how a reply has ended that the client gets. An upstream that had sent data in a WebSocket is not benched.
func (q *request) ended(end attempt.End) {
	if end.Paused {
		q.log(zap.DebugLevel, "reply broken while the client paused", end.Broken)
	} else {
		q.breaks(end.Broken, !end.Begun)
	}
}

// breaks makes the attempt a broken stream.
func (q *request) breaks(reason error, benches bool) {
	q.log(zap.WarnLevel, "reply broken", reason)
	now, failure := time.Now(), q.selection.transport.sender.Failure()
	if benches && q.mayBench(failure) {
		q.current.Bench(pool.Refusal{
			Reason: pool.Reason{Class: string(verdict.BrokenStream), Status: q.last().status, Cause: verdict.CauseOf(reason), Error: attempt.ErrorText(reason)},
			Wait:   failure.Wait,
		}, now)
	}
}

func (q *request) log(level zapcore.Level, message string, reason error) {
	if c := q.selection.events.Check(level, message); c != nil {
		c.Write(zap.String("backend", q.current.Name), zap.Duration("duration", time.Since(q.last().started)), attempt.ErrorField(reason))
	}
}

// RequestHeaderOps sets the Host of the requests.
func (t *Transport) RequestHeaderOps() *headers.HeaderOps {
	return t.HTTP.RequestHeaderOps()
}

// TLSEnabled reports whether the upstreams are reached by TLS.
func (t *Transport) TLSEnabled() bool { return t.HTTP != nil && t.HTTP.TLSEnabled() }

// EnableTLS has the upstreams reached by TLS.
func (t *Transport) EnableTLS(base *reverseproxy.TLSConfig) error {
	if t.HTTP == nil {
		t.HTTP = new(reverseproxy.HTTPTransport)
	}
	return t.HTTP.EnableTLS(base)
}

// OverrideHealthCheckScheme makes active health checks use the scheme of the upstreams.
func (t *Transport) OverrideHealthCheckScheme(base *url.URL, port string) {
	t.HTTP.OverrideHealthCheckScheme(base, port)
}

// Interface guards
var (
	_ caddyfile.Unmarshaler                            = (*Transport)(nil)
	_ caddy.Provisioner                                = (*Transport)(nil)
	_ caddy.CleanerUpper                               = (*Transport)(nil)
	_ http.RoundTripper                                = (*Transport)(nil)
	_ reverseproxy.TLSTransport                        = (*Transport)(nil)
	_ reverseproxy.RequestHeaderOpsTransport           = (*Transport)(nil)
	_ reverseproxy.HealthCheckSchemeOverriderTransport = (*Transport)(nil)
)
