package openailb

import (
	"context"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/replay"
)

// ServeHTTP reads the request once and has reverse_proxy send it to the
// backends, one after the other, until one serves it. Requests that need no
// backend also pass through reverse_proxy, so that all replies look alike.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) (err error) {
	h.keyFiles.Refresh()
	ex := h.balancer.newExchange(w, r, h.maxAttempts(), h.tryDuration(r))
	aborted := false
	defer func() { ex.finish(err, aborted) }()
	ex.fillPlaceholders()
	proxied := h.proxied(ex)
	if ex.own = h.read(ex); ex.own.Response != nil && !ex.api.received.Begun() && r.ProtoMajor == 1 && r.Header["Expect"] != nil {
		// the client waits for the answer before it sends a body, but net/http's server, which cannot see that
		// through what Caddy puts around the body, would wait for the body first
		w.Header()["Connection"] = []string{"close"} // past reverse_proxy
	}
	aborted = true // unless reverse_proxy returns: it panics to abort a reply
	err = h.proxy.ServeHTTP(w, proxied, next)
	aborted = false
	return err
}

// finish gives back what the exchange holds and counts it. net/http's server ends
// the context of the reply that the client got.
func (ex *exchange) finish(err error, aborted bool) {
	ex.record.end(aborted)
	ex.dropBest()
	ex.api.received.Release()
	ex.release()
	if to := ex.tries.move.to; to != nil { // the client left just then
		to.Release()
	}
	ex.observe(err)
	ex.settle()
}

// proxied is the request as reverse_proxy gets it: with the exchange in its
// context, and without the caller's credentials and the body, which are the
// exchange's. Handlers in handle_response get this request, too, and so the body as
// far as it is there.
func (h *Handler) proxied(ex *exchange) *http.Request {
	ex.proxied = *ex.request.WithContext(context.WithValue(ex.request.Context(), exchangeCtxKey{}, ex))
	r := &ex.proxied
	if query := h.takeKeys(ex, r); query != r.URL.RawQuery || r.URL.Opaque != "" || h.proxy.HandleResponse != nil {
		url := *r.URL
		url.RawQuery, url.Opaque = query, ""
		r.URL = &url
	}
	r.Trailer = nil // no operation has any, and they may hold whatever headers may
	if r.Header["Upgrade"] != nil && !openaiapi.IsHandshake(ex.request) {
		// of all upgrades, these APIs have only this one; a client that offers
		// another, like h2c, must not make a request that no backend can take
		r.Header.Del("Upgrade")
	}
	if !openaiapi.IsExtendedConnect(r) && len(h.proxy.HandleResponse) == 0 {
		r.Body, r.ContentLength = nil, 0
	}
	return r
}

// buffer reads the body of the request. A handler in handle_response gets none of
// it, unless nothing was read, or answer restores it.
func (ex *exchange) buffer(limit int64) error {
	err := ex.api.received.Buffer(ex.request, limit)
	if r := &ex.proxied; r.Body != nil && r.Body != http.NoBody {
		r.Body, r.ContentLength = replay.Gone{}, -1
	}
	return err
}

// takeKeys takes the caller's keys out of the request, and returns the query
// without them. reverse_proxy copies the header again and again, so it gets only the
// fields that it reads, unless the config has a use for the others.
func (h *Handler) takeKeys(ex *exchange, r *http.Request) (query string) {
	take := keys.Take
	if h.splitsHeaders {
		take, ex.api.split = keys.Split, r.Header
	}
	ex.api.credentials, r.Header, query = take(r.Header, r.URL.RawQuery)
	return query
}

// isEchoOrTunnel reports whether a server may answer the request with a copy of it,
// which has the backend's key in it (RFC 9110 section 9.3.8; TRACK is an old name of
// TRACE), or with a connection to any address. No API has such requests.
func isEchoOrTunnel(r *http.Request) bool {
	return strings.EqualFold(r.Method, http.MethodTrace) || strings.EqualFold(r.Method, "TRACK") ||
		strings.EqualFold(r.Method, http.MethodConnect) && !openaiapi.IsExtendedConnect(r)
}

// read finds out what the request asks for. It returns the answer if that needs no
// backend.
func (h *Handler) read(ex *exchange) (own apierror.Answer) {
	r := ex.request
	if h.asksReady(r) {
		return h.answerReady(r)
	}
	if refusal, refused := h.admit(ex); refused {
		return refusal.Answer(r)
	}
	if isEchoOrTunnel(r) {
		return apierror.MethodNotAllowed.Answer(r)
	}
	if ex.api.credentials.HidesContent(r.Header) {
		return apierror.HiddenContent.Answer(r)
	}
	if problem := openaiapi.CheckPath(r.URL.EscapedPath()); problem != "" {
		return apierror.InvalidPath(problem).Answer(r)
	}
	route := openaiapi.ParsePath(r.URL.EscapedPath())
	if route.Dialect == openaiapi.Other {
		return apierror.UnknownPath.Answer(r)
	}
	if openaiapi.OddlySpelled(route.Operation) {
		return apierror.InvalidPath("The path must be spelled as in the API's documentation.").Answer(r)
	}
	if openaiapi.IsHandshake(r) && openaiapi.MayBeResponses(route.Operation) &&
		(h.tellsModels || h.tellsAccounts || h.affinity.IsStrict() || h.callers.SeesEach(ex.api.caller.Name)) {
		if r.ProtoMajor == 1 { // past reverse_proxy, which lets neither header through
			ex.writer.Header()["Upgrade"], ex.writer.Header()["Connection"] = []string{"HTTP/1.1"}, []string{"Upgrade"}
		}
		return apierror.NoWebSocket.Answer(r)
	}
	if !openaiapi.IsExtendedConnect(r) {
		if own = h.receive(ex, route); own.Response != nil {
			return own
		}
	}
	ex.api.parse(r, route, h.promptCache)
	ex.api.anonymous = h.passesThrough && ex.api.credentials.None()
	if models := h.modelsOf(ex); models != nil {
		if own = apierror.ModelList(r, route, models); own.Response != nil {
			return own
		}
	}
	if h.tellsModels && ex.api.CutOff() && ex.api.Model == "" && !ex.api.IsUpload(openaiapi.MethodOf(r)) {
		return apierror.ModelBeyondBuffer(h.Sender.RequestBuffers).Answer(r)
	}
	if own = h.limit(ex); own.Response != nil {
		return own
	}
	return ex.place(h.affinity)
}

func (h *Handler) maxAttempts() int {
	if h.LBRetries == nil {
		return 0
	}
	return *h.LBRetries + 1
}

// tryDuration is how long further backends may be tried for a request: no
// longer than lb_try_duration, nor than its caller waits.
func (h *Handler) tryDuration(r *http.Request) time.Duration {
	duration := time.Duration(h.LBTryDuration)
	if patience, ok := openaiapi.Patience(r.Header); ok && (duration == 0 || patience < duration) {
		return patience
	}
	return duration
}

// asksReady reports whether the request asks whether there is a backend to use.
func (h *Handler) asksReady(r *http.Request) bool {
	return h.ReadyPath != "" && r.URL.Path == h.ReadyPath &&
		(r.Method == http.MethodGet || r.Method == http.MethodHead)
}

// answerReady says whether there is a backend to use, and if not, when the
// first one may be. It calls none, but rechecks the unreachable ones.
func (h *Handler) answerReady(r *http.Request) (answer apierror.Answer) {
	now := time.Now()
	usable, wait := h.balancer.Pool.Usable(now)
	if usable {
		answer = apierror.Answer{Response: apierror.JSONResponse(r, http.StatusOK, map[string]string{"status": "ready"}), Class: apierror.Ready}
	} else {
		h.rechecker.RecheckAll(h.balancer.Pool, now)
		answer = apierror.NotReady.Answer(r)
		if wait > 0 {
			answer.Header.Set("Retry-After", strconv.Itoa(int(math.Ceil(wait.Seconds()))))
		}
	}
	answer.Header.Set("Cache-Control", "no-store")
	return answer
}

// shownVar is the variable in which the request's first handler leaves its
// exchange, which decides whose placeholders are shown.
const shownVar = "openai_lb.shown"

// fillPlaceholders makes the placeholders of the request those of the exchange.
// A request may pass several handlers, of which the last one counts.
func (ex *exchange) fillPlaceholders() {
	ctx := ex.request.Context()
	if first, ok := caddyhttp.GetVar(ctx, shownVar).(*exchange); ok {
		first.shown = ex
		return
	}
	ex.shown = ex
	caddyhttp.SetVar(ctx, shownVar, ex)
	ctx.Value(caddy.ReplacerCtxKey).(*caddy.Replacer).Map(ex.shownPlaceholder)
}

// shownPlaceholder is a caddy.ReplacerFunc.
func (ex *exchange) shownPlaceholder(key string) (any, bool) {
	if !strings.HasPrefix(key, observe.PlaceholderPrefix) {
		return nil, false
	}
	return ex.shown.summary().Placeholder(key)
}
