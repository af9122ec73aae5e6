package openailb

import (
	"errors"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/admin"
	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/backend"
	"github.com/openai-lb/caddy-openai-lb/internal/callers"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/meter"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/replay"
)

// reader reads requests: it finds out who asks, for what, and which backends may get that.
type reader struct {
	// clientKeys knows the callers. If it is nil, everybody may use the
	// balancer.
	clientKeys *keys.Clients
	// callers limits what callers may use. It is nil if none is limited. entitlements are the backends that they may
	// use, by the numbers of such sets. The first one is that of all backends.
	callers      *callers.Callers
	entitlements []*affinity.Entitlement
	affinity     *affinity.Affinity
	// promptCache is nil if it is off.
	promptCache *affinity.PromptCache
	rechecker   backend.Rechecker
	// readyPath is the option ready_path, and buffers request_buffers.
	readyPath string
	buffers   int64
	// passesThrough reports whether a backend wants the callers' own credentials.
	passesThrough bool
	// models are all models that the backends have. It is nil unless every backend lists its models.
	models []string
	// tellsModels reports whether the model matters to a backend: it lists its models, or has its own name for one.
	tellsModels bool
}

// read finds out what the request asks for. It returns the answer if that needs no
// backend.
func (d *reader) read(ex *exchange) (own apierror.Answer) {
	in, r := &ex.intent, ex.intent.request
	in.entitled = d.entitlements[0]
	if d.asksReady(r) {
		return d.answerReady(ex.balancer, r)
	}
	if refusal, refused := d.identify(in); refused {
		return refusal.Answer(r)
	}
	if openaiapi.IsEchoOrTunnel(r) {
		return apierror.MethodNotAllowed.Answer(r)
	}
	if in.credentials.HidesContent(r.Header) {
		return apierror.HiddenContent.Answer(r)
	}
	path := r.URL.EscapedPath()
	if problem := openaiapi.CheckPath(path); problem != "" {
		return apierror.InvalidPath(problem).Answer(r)
	}
	route := openaiapi.ParsePath(path)
	if route.Dialect == openaiapi.Other {
		return apierror.UnknownPath.Answer(r)
	}
	if openaiapi.OddlySpelled(route.Operation) {
		return apierror.InvalidPath("The path must be spelled as in the API's documentation.").Answer(r)
	}
	if openaiapi.IsUsage(r.Method, route) {
		return d.answerUsage(ex)
	}
	switch {
	case openaiapi.IsHandshake(r) && openaiapi.MayBeResponses(route.Operation):
		own = d.enter(ex)
	case !openaiapi.IsExtendedConnect(r):
		own = d.receive(ex, route)
	}
	if own.Response != nil {
		return own
	}
	in.parse(route, d.promptCache)
	if in.Kind == openaiapi.InferenceWebSocket {
		in.socket = attempt.NewSocket(ex.writer, r)
		if openaiapi.IsExtendedConnect(r) {
			ex.proxied.Body = in.socket.Body()
		}
	}
	in.anonymous = d.passesThrough && in.credentials.None()
	if models := d.modelsOf(in.caller.Name); models != nil {
		if own = apierror.ModelList(r, route, models); own.Response != nil {
			return own
		}
	}
	if d.tellsModels && in.CutOff() && in.Model == "" && !in.IsUpload(openaiapi.MethodOf(r)) {
		return apierror.ModelBeyondBuffer(d.buffers).Answer(r)
	}
	if own = d.limit(ex); own.Response != nil {
		return own
	}
	return d.findAccounts(in, ex.targets)
}

// enter opens the WebSocket of a client, and reads its first message, which is the request: it names the model and what
// the response goes on from. It returns the answer if none comes.
func (d *reader) enter(ex *exchange) (own apierror.Answer) {
	in := &ex.intent
	if in.socket == nil && ex.sender.OpensNone(len(ex.targets)) {
		return apierror.NoWebSocket.Answer(in.request)
	}
	if in.socket == nil { // otherwise it is the next message, after the balancer's own answer
		if own = d.exceeded(ex, meter.Estimate{Prompt: 1}); own.Response != nil {
			return own
		}
		if d.callers != nil { // its first message may come slowly, and is in memory
			if refusal := ex.bill.Upload(); refusal != nil {
				return d.refuse(ex, refusal)
			}
			defer ex.bill.Uploaded()
		}
		in.socket = attempt.NewSocket(ex.writer, in.request)
		if err := ex.sender.Accept(in.socket, d.buffers); err != nil {
			in.socket = nil
			return apierror.UnreadableBody(err).Answer(in.request)
		}
	}
	ex.proxied = *ex.proxied.WithContext(in.socket.Until(ex.proxied.Context()))
	if openaiapi.IsExtendedConnect(in.request) {
		ex.proxied.Body = in.socket.Body()
	}
	in.request = openaiapi.AsPost(in.request.WithContext(ex.proxied.Context()))
	text, err := in.socket.Next()
	if err != nil {
		return apierror.UnreadableBody(err).Answer(in.request)
	}
	if e := openaiapi.ParseClientEvent(text); !e.Clear || e.Type != "response.create" {
		return apierror.UnclearEvent.Answer(in.request)
	}
	came := time.Since(in.started) // it begins now
	if in.started = in.started.Add(came); !in.deadline.IsZero() {
		in.deadline = in.deadline.Add(came)
	}
	in.received.Hold(text)
	return own
}

// identify records who sent the request. It refuses a caller without a valid key or token.
func (d *reader) identify(in *intent) (refusal apierror.Error, refused bool) {
	if d.clientKeys == nil {
		return apierror.Error{}, false
	}
	who, err := d.clientKeys.Identify(in.request.Context(), &in.credentials)
	switch {
	case errors.Is(err, keys.ErrNoKey):
		return apierror.MissingKey, true
	case errors.Is(err, keys.ErrExpired):
		return apierror.ExpiredKey, true
	case errors.Is(err, keys.ErrTwoCallers):
		return apierror.TwoCallers, true
	case errors.Is(err, keys.ErrIssuerUnavailable):
		return apierror.TokenUnchecked, true
	case err != nil:
		return apierror.WrongKey, true
	}
	d.callers.PlaceByToken(who.Token)
	in.caller, in.entitled = who, d.entitlements[d.callers.Set(who.Name)]
	addToLog(in.request, in.callerField)
	return apierror.Denied, d.callers.Deny(who.Name)
}

// modelsOf returns the models that a caller may use. nil: any.
func (d *reader) modelsOf(caller string) []string {
	if d.callers == nil {
		return d.models
	}
	return d.callers.Listed(caller)
}

// exceeded returns the answer to a request if its caller is over a limit before anything of it is read.
func (d *reader) exceeded(ex *exchange, likely meter.Estimate) (own apierror.Answer) {
	now, in := time.Now(), &ex.intent
	a, refusal := d.callers.Exceeded(now, in.caller.Name, likely)
	if ex.bill.Admission = a; refusal == nil || ex.tries.turn.mayLastUntil(refusal, in, now) {
		return own
	}
	ex.bill.Refused(refusal)
	return d.refuse(ex, refusal)
}

// receive reads the body of the request, or returns the answer if that cannot be read, or if its caller is over a
// limit: otherwise a caller could fill the memory with uploads. For the same reason, a longer body is one of the requests
// that its caller has at a time while it comes. A handler in handle_response gets none of the body, unless nothing was
// read, or answer restores it.
func (d *reader) receive(ex *exchange, route openaiapi.Route) (own apierror.Answer) {
	in := &ex.intent
	if length := in.request.ContentLength; d.callers != nil && length != 0 {
		if own = d.exceeded(ex, callers.LikelyCost(in.request, route)); own.Response != nil {
			return own
		}
		if length < 0 || length > callers.ShortBody {
			if refusal := ex.bill.Upload(); refusal != nil {
				return d.refuse(ex, refusal)
			}
			defer ex.bill.Uploaded()
		}
	}
	err := in.received.Buffer(in.request, d.buffers)
	if r := &ex.proxied; r.Body != nil && r.Body != http.NoBody {
		r.Body, r.ContentLength = replay.Gone{}, -1
	}
	if err != nil {
		return apierror.UnreadableBody(err).Answer(in.request)
	}
	return own
}

// refuse returns the answer to a request that a limit refuses.
func (d *reader) refuse(ex *exchange, refusal *meter.Refusal) apierror.Answer {
	ex.metrics.Limited(ex.intent.caller.Label, refusal)
	return d.callers.Refuse(ex.intent.request, time.Now(), ex.intent.caller.Name, refusal)
}

// answerUsage says what the caller has used, and may use. The answer is charged to no limit.
func (d *reader) answerUsage(ex *exchange) apierror.Answer {
	r := ex.intent.request
	if d.callers == nil {
		return apierror.NoUsage.Answer(r)
	}
	now, name := time.Now(), ex.intent.caller.Name
	use := admin.OwnUse{Caller: admin.CallerOf(now, ex.Name, d.callers.Use(now, name)), Models: ex.ledger.Models(now, name)}
	answer := apierror.Answer{Response: apierror.JSONResponse(r, http.StatusOK, use), Class: apierror.Usage}
	answer.Header.Set("Cache-Control", "no-store")
	return answer
}

// limit charges the request to its caller, or returns the answer if the caller may not send it.
func (d *reader) limit(ex *exchange) (own apierror.Answer) {
	if d.callers == nil {
		return own
	}
	in := &ex.intent
	if d.callers.ServiceTiers(in.caller.Name) != nil {
		in.ReadHeaderTier(in.request.Header)
	}
	if e, refused := d.callers.MayUse(in.caller.Name, &in.Request, in.received.Buffered(), d.buffers); refused {
		return e.Answer(in.request)
	}
	if in.Clarity == openaiapi.Opaque && in.NeedsModel && d.callers.SeesEach(in.caller.Name) {
		return apierror.CompressedBody.Answer(in.request)
	}
	estimate := in.estimate()
	if estimate.Prompt > 0 && in.hasUnknownLength() && d.callers.LimitsTokens(in.caller.Name) {
		return apierror.UnknownLength(d.buffers).Answer(in.request)
	}
	var refusal *meter.Refusal
	if ex.bill.Admission, refusal = ex.admit(d.callers, in.caller.Name, estimate); refusal != nil {
		if ex.leftWaiting() {
			return d.callers.Refuse(in.request, time.Now(), in.caller.Name, refusal)
		}
		return d.refuse(ex, refusal)
	}
	for id := range ex.bill.Demoted {
		ex.metrics.Demoted(in.caller.Label, id)
	}
	return own
}

// findAccounts finds out which accounts may get the request. It returns the answer if none may. A list is the first account's.
func (d *reader) findAccounts(in *intent, targets []*target) (own apierror.Answer) {
	if in.Body.TooManyIDs() {
		return apierror.TooManyIDs(openaiapi.MaxIDs).Answer(in.request)
	}
	r := &affinity.Request{
		Method: openaiapi.MethodOf(in.request), Operation: in.Route.Operation, RawQuery: in.request.URL.RawQuery,
		Body: &in.Body, Text: in.received.Buffered(), Caller: in.caller.Name,
		Upgrade: in.Kind.IsHandshake(), Compressed: in.Clarity == openaiapi.Opaque, Disputed: openaiapi.DisputedType(in.request.Header),
	}
	if !in.received.Whole() {
		r.CutAt = d.buffers
	}
	placement, refusal, refused := in.entitled.Affinity.Place(r)
	if refused {
		return refusal.Answer(in.request)
	}
	if in.placement = placement; placement.IsList() {
		settleList(in, targets)
	}
	return own
}

// settleList has a list come from the first account by priority, or from the
// account where objects without a model are made.
func settleList(in *intent, targets []*target) {
	var first *target
	for _, t := range targets {
		if !in.entitled.May[t.Index] || !t.backend.Takes(&in.Request, in.anonymous) {
			continue
		}
		if all := in.entitled.AllModels; first == nil || all[t.Index] && !all[first.Index] {
			first = t
		}
	}
	if first != nil {
		in.placement.Settle(first.backend.AccountKey)
	}
}

// asksReady reports whether the request asks whether there is a backend to use.
func (d *reader) asksReady(r *http.Request) bool {
	return d.readyPath != "" && r.URL.Path == d.readyPath &&
		(r.Method == http.MethodGet || r.Method == http.MethodHead)
}

// answerReady says whether there is a backend to use, and if not, when the
// first one may be. It calls none, but rechecks the unreachable ones.
func (d *reader) answerReady(b *balancer, r *http.Request) (answer apierror.Answer) {
	now := time.Now()
	usable, wait := b.Pool.Usable(now)
	if usable {
		answer = apierror.Answer{Response: apierror.JSONResponse(r, http.StatusOK, map[string]string{"status": "ready"}), Class: apierror.Ready}
	} else {
		d.rechecker.RecheckAll(b.Pool, now)
		answer = apierror.NotReady.Answer(r)
		if wait > 0 {
			answer.Header.Set("Retry-After", strconv.Itoa(int(math.Ceil(wait.Seconds()))))
		}
	}
	answer.Header.Set("Cache-Control", "no-store")
	return answer
}
