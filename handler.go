package openailb

import (
	"net/http"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// ServeHTTP reads the request once and has reverse_proxy call the loop, which sends it to the backends, one after the other,
// until one serves it. Requests that need no backend also pass through reverse_proxy, so that all replies look alike.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	ex := &exchange{balancer: h.balancer, writer: w}
	err := h.serve(ex, w, r, next)
	socket := ex.intent.socket
	for socket.Again() {
		again := &exchange{balancer: h.balancer, writer: w}
		again.intent.socket = socket
		err = h.serve(again, w, r, next)
	}
	if socket.IsAccepted() {
		socket.Close()
		return nil // its client got all errors as events
	}
	return err
}

// serve serves a request. In a WebSocket that is open before a backend is chosen, that is the client's next message.
func (h *Handler) serve(ex *exchange, w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) (err error) {
	h.keyFiles.Refresh()
	ex.intent.request, ex.intent.started, ex.intent.placement = r, time.Now(), affinity.Anywhere
	ex.tries.list, ex.tries.turn.lists = ex.tries.first[:0], h.balancer.waiting
	h.limitAttempts(&ex.intent)
	aborted := false
	defer func() { finish(ex, err, aborted) }()
	showPlaceholders(ex)
	proxied := h.proxied(ex) // also takes the caller's keys, by which read knows the caller
	if ex.outcome.own = h.reader.read(ex); ex.outcome.own.Response != nil && !ex.intent.received.Begun() && r.ProtoMajor == 1 && r.Header["Expect"] != nil {
		// the client waits for the answer before it sends a body, but net/http's server, which cannot see that
		// through what Caddy puts around the body, would wait for the body first
		w.Header()["Connection"] = []string{"close"} // past reverse_proxy
	}
	if ex.intent.socket != nil {
		w = ex.intent.socket
	}
	aborted = true                            // unless reverse_proxy returns: it panics to abort a reply
	err = h.proxy.ServeHTTP(w, proxied, next) // its transport is loop
	aborted = false
	return err
}

// limitAttempts sets how many backends may be tried for a request, and until when: no
// later than lb_try_duration allows, nor than its caller waits.
func (h *Handler) limitAttempts(in *intent) {
	if h.LBRetries != nil {
		in.maxAttempts = *h.LBRetries + 1
	}
	duration := time.Duration(h.LBTryDuration)
	if patience, ok := openaiapi.Patience(in.request.Header); ok && (duration == 0 || patience < duration) {
		duration = patience
	}
	if duration > 0 {
		in.deadline = in.started.Add(duration)
	}
}

// finish gives back what the exchange holds, and has everything know what came of it. The request's context is not
// cancelled here: net/http's server does it. err is the error with which reverse_proxy ended, if it did.
func finish(ex *exchange, err error, aborted bool) {
	in, t, o := &ex.intent, &ex.tries, &ex.outcome
	if aborted {
		in.socket.Close()
	}
	in.socket.EndConversation()
	o.end(in, aborted)
	t.dropBest()
	in.received.Release()
	t.release()
	if to := t.watch.Moved(); to != nil { // the client left just then
		to.Release()
	}
	if o.reply != nil {
		ex.learnEnd(in, t, o.reply.End())
	}
	if o.status == 0 {
		o.unanswered(in, t, err)
	}
	addToLog(in.request, func() zap.Field { return zap.Object("openai_lb", ex.summary(in, t, o, ex.bill.Tier())) })
	ex.report(in, t, o)
	ex.bill.settle(ex.balancer, in, t, o)
}

// proxied is the request as reverse_proxy gets it: without the caller's credentials and the body, which are the
// exchange's. Handlers in handle_response get this request, too, and so the body as far as it is there.
func (h *Handler) proxied(ex *exchange) *http.Request {
	whole := ex.intent.request
	ex.proxied = *whole
	r := &ex.proxied
	if query := h.takeKeys(ex, r); query != r.URL.RawQuery || r.URL.Opaque != "" || h.proxy.HandleResponse != nil {
		url := *r.URL
		url.RawQuery, url.Opaque = query, ""
		r.URL = &url
	}
	r.Trailer = nil // no operation has any, and they may hold whatever headers may
	if r.Header["Upgrade"] != nil && !openaiapi.IsHandshake(whole) {
		// of all upgrades, these APIs have only this one; a client that offers
		// another, like h2c, must not make a request that no backend can take
		r.Header.Del("Upgrade")
	}
	if !openaiapi.IsExtendedConnect(r) && len(h.proxy.HandleResponse) == 0 {
		r.Body, r.ContentLength = nil, 0
	}
	return r
}

// takeKeys takes the caller's keys out of the request, and returns the query
// without them. reverse_proxy copies the header again and again, so it gets only the
// fields that it reads, unless the config has a use for the others.
func (h *Handler) takeKeys(ex *exchange, r *http.Request) (query string) {
	take := keys.Take
	if h.splitsHeaders {
		take, ex.intent.split = keys.Split, r.Header
	}
	ex.intent.credentials, r.Header, query = take(r.Header, r.URL.RawQuery)
	return query
}

// showPlaceholders makes the placeholders of the request those of the exchange.
// A request may pass several handlers, of which the last one counts.
func showPlaceholders(ex *exchange) {
	ctx := ex.intent.request.Context()
	if first, ok := caddyhttp.GetVar(ctx, exchangeVar).(held); ok {
		first.latest = ex
		return
	}
	ex.latest = ex
	caddyhttp.SetVar(ctx, exchangeVar, held{ex})
	ctx.Value(caddy.ReplacerCtxKey).(*caddy.Replacer).Map(func(key string) (any, bool) {
		if !strings.HasPrefix(key, observe.PlaceholderPrefix) {
			return nil, false
		}
		shown := ex.latest
		return shown.summary(&shown.intent, &shown.tries, &shown.outcome, shown.bill.Tier()).Placeholder(key)
	})
}
