package openailb

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
)

// proxiedRequest is a request to a plain reverse_proxy, from its first attempt
// to its reply. reverse_proxy runs the loop: in turns, it asks the policy for
// an upstream and the transport for a reply. The policy passes the request to
// the transport in a request variable, so that both work on the same search.
// Models, accounts and callers play no part here.
type proxiedRequest struct {
	transaction
	group     *upstreamGroup
	selection *Selection
	// answer is the answer to a request that needs no upstream.
	answer apierror.Answer
}

// proxiedRequestVar is the request variable in which the policy passes the
// proxiedRequest to the transport. A policy cannot change the request's
// context.
const proxiedRequestVar = "openai_lb.request"

// answering is the upstream of a request that has no upstream left, so that the
// transport answers it.
var answering = &reverseproxy.Upstream{Dial: "openai_lb:0", Host: new(reverseproxy.Host)}

// requestOf returns the proxiedRequest of r. On the first attempt, it makes one
// and reads the body. The body is read before an upstream is chosen because it
// may take long to arrive.
func (s *Selection) requestOf(upstreams reverseproxy.UpstreamPool, r *http.Request,
	w http.ResponseWriter) *proxiedRequest {
	if p, ok := caddyhttp.GetVar(r.Context(), proxiedRequestVar).(*proxiedRequest); ok && p.request.incoming == r {
		return p
	}
	p := &proxiedRequest{group: s.groupOf(upstreams), selection: s}
	q := &p.request
	q.incoming, q.asked, q.writer, q.started = r, r, w, time.Now()
	q.entitled, q.maxAttempts = p.group.entitled, s.maxAttempts
	if s.tryDuration > 0 {
		q.deadline = q.started.Add(s.tryDuration)
	}
	// This is set once, before the first attempt: while a later attempt begins,
	// net/http may still dial for an earlier one and read the variables.
	caddyhttp.SetVar(r.Context(), proxiedRequestVar, p)
	if s.transport != nil {
		p.read()
	}
	p.search.begin(p.group.balancer, q, affinity.Anywhere, &p.wait, 0)
	return p
}

// read reads and parses the request, as far as a reply's meaning depends on it.
// It sets answer if the request needs no upstream.
func (p *proxiedRequest) read() {
	q := &p.request
	if openaiapi.IsExtendedConnect(q.incoming) {
		p.answer = apierror.NoExtendedConnect.Answer(q.incoming)
	} else if openaiapi.IsEchoOrTunnel(q.incoming) {
		p.answer = apierror.MethodNotAllowed.Answer(q.incoming)
	} else if err := q.received.Buffer(q.incoming, p.selection.transport.sender.RequestBuffers); err != nil {
		p.answer = apierror.UnreadableBody(err).Answer(q.incoming)
	}
	asked := openaiapi.Parse(q.incoming, openaiapi.ParsePath(q.incoming.URL.EscapedPath()), q.received.Received(), nil)
	q.Kind, q.Route, q.Cost, q.Whole, q.Body.Stream = asked.Kind, asked.Route, asked.Cost, true, asked.Body.Stream
}

// next starts the next attempt and returns it. It returns nil if no upstream is
// left.
func (p *proxiedRequest) next() *attemptRecord {
	if p.answer != (apierror.Answer{}) {
		return nil
	}
	a := p.search.Next()
	if p.selection.transport == nil {
		p.search.release() // reverse_proxy does not tell when the attempt is over
	}
	return a
}

func (p *proxiedRequest) send(sender *attempt.Sender, req *http.Request) *attempt.Reply {
	q, a := &p.request, p.search.attempts.last()
	a.span = observe.StartSpan(req.Context(), func() observe.Attempt { return p.group.spanned(q, a) })
	return sender.Send(&attempt.Outgoing{
		// reverse_proxy decides what follows
		Last: true,
		// the values of the header are not changed in place
		Incoming: req, URL: *req.URL, Host: req.Host, Header: maps.Clone(req.Header),
		Body: &q.received, Traits: q.traits(a.target.backend, pool.UsualTiers), Fields: p.group.fields,
		Interims: &p.search.interims, Marks: a.target,
	})
}

// responseTo returns an answer as the response that reverse_proxy gets.
func responseTo(req *http.Request, a answer) *http.Response {
	a.Response.Request = req
	return a.Response
}

// proxyAround returns the innermost reverse_proxy that the last of the modules
// is part of, or nil.
func proxyAround(modules []caddy.Module) *reverseproxy.Handler {
	for _, module := range slices.Backward(modules) {
		if proxy, ok := module.(*reverseproxy.Handler); ok {
			return proxy
		}
	}
	return nil
}

// checkUpstream returns an error if the proxy has no upstream with this dial
// address. A proxy with dynamic upstreams may have any.
func checkUpstream(proxy *reverseproxy.Handler, dial string) error {
	if proxy == nil || proxy.DynamicUpstreamsRaw != nil || proxy.DynamicUpstreams != nil {
		return nil
	}
	var dials []string
	for _, u := range proxy.Upstreams {
		dials = append(dials, u.Dial)
	}
	if slices.Contains(dials, dial) {
		return nil
	}
	return fmt.Errorf("upstream '%s' is not one of reverse_proxy's upstreams: %s", dial, strings.Join(dials, ", "))
}

// hasSelection reports whether the proxy, which is being set up, uses the
// policy openai_lb.
func hasSelection(proxy *reverseproxy.Handler) bool {
	if proxy == nil || proxy.LoadBalancing == nil {
		return false
	}
	return pools.PolicyName(proxy.LoadBalancing.SelectionPolicyRaw) == "openai_lb"
}

// checkRetries rejects options with which the proxy would classify replies,
// too.
func checkRetries(proxy *reverseproxy.Handler) error {
	if proxy.LoadBalancing.RetryMatchRaw != nil {
		return errors.New("lb_retry_match is not allowed with the openai_lb transport, which classifies replies itself")
	}
	if option := passiveOption(proxy); option != "" {
		return fmt.Errorf("%s of reverse_proxy is not allowed with the openai_lb transport, because it would count each throttle as a failure: use the transport's own options",
			option)
	}
	return nil
}

// passiveOption returns the name of an option with which the proxy counts
// failures of its upstreams, or an empty string. unhealthy_request_count does
// not count failures.
func passiveOption(proxy *reverseproxy.Handler) string {
	if proxy.HealthChecks == nil || proxy.HealthChecks.Passive == nil {
		return ""
	}
	switch passive := proxy.HealthChecks.Passive; {
	case passive.FailDuration != 0:
		return "fail_duration"
	case passive.MaxFails != 0:
		return "max_fails"
	case passive.UnhealthyStatus != nil:
		return "unhealthy_status"
	case passive.UnhealthyLatency != 0:
		return "unhealthy_latency"
	}
	return ""
}
