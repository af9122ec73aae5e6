package openailb

import (
	"context"
	"errors"
	"math"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/backend"
	"github.com/openai-lb/caddy-openai-lb/internal/callers"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
	"github.com/openai-lb/caddy-openai-lb/internal/waiting"
	"github.com/openai-lb/caddy-openai-lb/internal/websocket"
)

// reader reads requests: it finds out who asks, for what, and which backends
// may get that.
type reader struct {
	// clientKeys knows the callers. If it is nil, everybody may use the
	// balancer.
	clientKeys *keys.Clients
	// replaced is done once another config is loaded.
	replaced context.Context
	// keyFiles are read again when they have changed.
	keyFiles *keys.Reloader
	// callers limits what callers may use. It is nil if none is limited.
	// entitlements are the backends that they may use, by the numbers of such
	// sets. The first one is that of all backends.
	callers      *callers.Callers
	entitlements []*affinity.Entitlement
	affinity     *affinity.Affinity
	// promptCache is nil if it is off.
	promptCache *affinity.PromptCache
	rechecker   *backend.Rechecker
	// readyPath is the option ready_path, and buffers request_buffers.
	readyPath string
	buffers   int64
	// passesThrough reports whether a backend wants the callers' own
	// credentials.
	passesThrough bool
	// models are all models that the backends have. It is nil unless every
	// backend lists its models.
	models []string
	// replicated reports whether replicas share state. Each has a ledger in its
	// own storage, which may be the same.
	replicated bool
	// tellsModels reports whether the model matters to a backend: it lists its
	// models, or has its own name for one.
	tellsModels bool
}

// readers are those of the pools, by their names, in the config that is loaded:
// string to *reader.
var readers sync.Map

// latest returns the reader of the pool in the config that is loaded. A
// WebSocket may stay open when the one that has opened it is replaced, but who
// may go on is decided by that one.
func (d *reader) latest(pool string) *reader {
	if current, ok := readers.Load(pool); ok && d.replaced.Err() != nil {
		return current.(*reader)
	}
	return d
}

// read finds out what the request asks for. It returns the answer if that needs
// no backend.
func (d *reader) read(b *balancer, t *transaction) (own apierror.Answer) {
	q, r := &t.request, t.request.incoming
	q.entitled = d.entitlements[0]
	if r.TLS != nil && !r.TLS.HandshakeComplete {
		// whoever has seen it may have sent it again (RFC 8470), and it would
		// be paid for twice
		return apierror.TooEarly.Answer(r)
	}
	if d.asksReady(r) {
		return d.answerReady(b, r)
	}
	if b.loops.has(r.Header) { // before who sent it, which is the balancer
		return apierror.Loop.Answer(r)
	}
	if refusal, refused := d.identify(q); refused {
		return refusal.Answer(r)
	}
	switch {
	case openaiapi.IsExtendedConnect(r):
		return apierror.NoExtendedConnect.Answer(r)
	case openaiapi.IsEchoOrTunnel(r):
		return apierror.MethodNotAllowed.Answer(r)
	}
	if q.credentials.HidesContent(r.Header) {
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
		return d.answerUsage(b, t)
	}
	if openaiapi.IsHandshake(r) && openaiapi.MayBeResponses(route.Operation) {
		own = d.enter(b, t)
	} else {
		own = d.receive(b, t, route)
	}
	if own.Response != nil {
		return own
	}
	q.parse(route, d.promptCache)
	q.trustSession()
	if q.Kind.IsHandshake() && !r.ProtoAtLeast(1, 1) {
		return apierror.OldWebSocket.Answer(r)
	}
	q.anonymous = d.passesThrough && q.credentials.None()
	if models := d.modelsOf(q.caller.Name); models != nil {
		if own = apierror.ModelList(r, route, models); own.Response != nil {
			return own
		}
	}
	if d.tellsModels && q.CutOff() && q.Model == "" && !q.IsUpload(r.Method) {
		return apierror.ModelBeyondBuffer(d.buffers).Answer(r)
	}
	if own = d.limit(b, t); own != (apierror.Answer{}) {
		return own
	}
	t.placement, own = d.findAccounts(q, b.targets)
	return own
}

// enter opens the WebSocket of a client, and reads its first message, which is
// the request: it names the model and what the response goes on from. It
// returns the answer if none comes.
func (d *reader) enter(b *balancer, t *transaction) (own apierror.Answer) {
	q := &t.request
	if q.socket == nil && !b.opensSocket(q) {
		return apierror.NoWebSocket.Answer(q.asked)
	}
	if q.socket == nil { // otherwise it is the next message, after the balancer's own answer
		if own = d.exceeded(b, t, limiter.Estimate{Prompt: 1}); own.Response != nil {
			return own
		}
		if d.callers != nil { // its first message may come slowly, and is in memory
			if refusal := t.bill.Upload(); refusal != nil {
				return d.exceededAnswer(b, t, refusal)
			}
			defer t.bill.Uploaded()
		}
		socket, err := websocket.Accept(q.writer, q.incoming, d.buffers, b.webSockets)
		if err != nil {
			return apierror.UnreadableBody(err).Answer(q.asked)
		}
		q.socket = socket
	}
	q.incoming = q.incoming.WithContext(q.socket.WithContext(q.incoming.Context()))
	q.asked = openaiapi.AsPost(q.incoming)
	text, err := q.socket.Next(websocket.FirstMessage)
	if err != nil {
		return apierror.UnreadableBody(err).Answer(q.asked)
	}
	if e := openaiapi.ParseClientEvent(text); !e.Clear || e.Type != "response.create" {
		return apierror.UnclearEvent.Answer(q.asked)
	}
	came := time.Since(q.started) // it begins now
	if q.started = q.started.Add(came); !q.deadline.IsZero() {
		q.deadline = q.deadline.Add(came)
	}
	q.received.Hold(text)
	return own
}

// opensSocket reports whether a backend that the request may use opens a
// WebSocket for responses, or may do so. Clients that are told at the handshake
// that none does use HTTP (Codex).
func (b *balancer) opensSocket(q *request) bool {
	now := time.Now()
	return slices.ContainsFunc(b.targets, func(t *target) bool { return q.entitled.May[t.Index] && !b.sender.RefusesSocket(t, now) })
}

// identify records who sent the request. It refuses a caller without a valid
// key or token.
func (d *reader) identify(q *request) (refusal apierror.Error, refused bool) {
	if d.clientKeys == nil {
		d.findSecret(q)
		return apierror.Error{}, false
	}
	who, err := d.clientKeys.Identify(q.asked.Context(), &q.credentials)
	if err != nil && d.findSecret(q) {
		who, err = d.holder(q.secret)
	}
	if err != nil {
		return refusalOf(err), true
	}
	d.callers.PlaceByToken(who.Token)
	q.caller, q.entitled = who, d.entitlements[d.callers.Set(who.Name)]
	addToLog(q.incoming, q.callerField)
	return apierror.Denied, d.callers.Deny(who.Name)
}

// refusalOf is the answer to a request whose key or token is not valid for this
// reason.
func refusalOf(err error) apierror.Error {
	switch {
	case errors.Is(err, keys.ErrNoKey):
		return apierror.MissingKey
	case errors.Is(err, keys.ErrExpired):
		return apierror.ExpiredKey
	case errors.Is(err, keys.ErrTwoCallers):
		return apierror.TwoCallers
	case errors.Is(err, keys.ErrIssuerUnavailable):
		return apierror.TokenUnchecked
	}
	return apierror.WrongKey
}

// modelsOf returns the models that a caller may use. It is nil if the caller
// may use any model.
func (d *reader) modelsOf(caller string) []string {
	if d.callers == nil {
		return d.models
	}
	return d.callers.Listed(caller)
}

// exceeded returns the answer to a request if its caller is over a limit before
// anything of it is read.
func (d *reader) exceeded(b *balancer, t *transaction, likely limiter.Estimate) (own apierror.Answer) {
	now, q := time.Now(), &t.request
	a, refusal := d.callers.Exceeded(now, q.caller.Name, likely)
	if t.bill.Admission = a; refusal == nil || t.wait.mayLastUntil(refusal, q, now) {
		return own
	}
	t.bill.Refused(refusal)
	return d.exceededAnswer(b, t, refusal)
}

// receive reads the body of the request, or returns the answer if that cannot
// be read, or if its caller is over a limit: otherwise a caller could fill the
// memory with uploads. For the same reason, a longer body is one of the
// requests that its caller has at a time while it comes.
func (d *reader) receive(b *balancer, t *transaction, route openaiapi.Route) (own apierror.Answer) {
	q := &t.request
	if length := q.incoming.ContentLength; d.callers != nil && length != 0 {
		if own = d.exceeded(b, t, callers.LikelyCost(q.incoming, route)); own.Response != nil {
			return own
		}
		if length < 0 || length > callers.ShortBody {
			if refusal := t.bill.Upload(); refusal != nil {
				return d.exceededAnswer(b, t, refusal)
			}
			defer t.bill.Uploaded()
		}
	}
	if err := q.received.Buffer(q.incoming, d.buffers); err != nil {
		return apierror.UnreadableBody(err).Answer(q.asked)
	}
	return own
}

// exceededAnswer counts and returns the answer to a request that a limit
// refuses.
func (d *reader) exceededAnswer(b *balancer, t *transaction, refusal *limiter.Refusal) apierror.Answer {
	b.metrics.Limited(t.request.caller.Label, refusal)
	return d.callers.Refuse(t.request.asked, time.Now(), t.request.caller.Name, refusal)
}

// answerUsage says what the caller has used, and may use. The answer is charged
// to no limit.
func (d *reader) answerUsage(b *balancer, t *transaction) apierror.Answer {
	r := t.request.asked
	if d.callers == nil {
		return apierror.NoUsage.Answer(r)
	}
	now, name := time.Now(), t.request.caller.Name
	use := callers.OwnUseOf(callers.ReportOf(now, b.Name, d.callers.Use(now, name)), b.usage.OfCaller(now, name))
	if d.replicated {
		use.ModelsOf = callers.StorageModels
	}
	answer := apierror.Answer{Response: apierror.JSONResponse(r, http.StatusOK, use), Class: apierror.Usage}
	answer.Header.Set("Cache-Control", "no-store")
	return answer
}

// limit charges the request to its caller, or returns the answer if the caller
// may not send it.
func (d *reader) limit(b *balancer, t *transaction) (own apierror.Answer) {
	if d.callers == nil {
		return own
	}
	q := &t.request
	if d.callers.ServiceTiers(q.caller.Name) != nil {
		q.ReadHeaderTier(q.asked.Header)
	}
	if e, refused := d.callers.MayUse(q.caller.Name, &q.Request, q.received.Buffered(), d.buffers); refused {
		return e.Answer(q.asked)
	}
	if q.Clarity == openaiapi.Opaque && q.NeedsModel && d.callers.SeesEach(q.caller.Name) {
		return apierror.CompressedBody.Answer(q.asked)
	}
	estimate := q.estimate()
	if estimate.Prompt > 0 && q.hasUnknownLength() && d.callers.LimitsTokens(q.caller.Name) {
		return apierror.UnknownLength(d.buffers).Answer(q.asked)
	}
	var refusal *limiter.Refusal
	if t.bill.Admission, refusal = t.wait.admit(b, q, d.callers, estimate); refusal != nil {
		if t.wait.result == waiting.Left {
			return apierror.Answer{Class: string(verdict.ClientLeftWaiting)}
		}
		return d.exceededAnswer(b, t, refusal)
	}
	for id := range t.bill.Demoted {
		b.metrics.Demoted(q.caller.Label, id)
	}
	return own
}

// findAccounts returns which accounts may get the request, or the answer if
// none may. A list is the first account's.
func (d *reader) findAccounts(q *request, targets []*target) (accounts *affinity.Placement, own apierror.Answer) {
	if q.Body.TooManyIDs() {
		return affinity.Anywhere, apierror.TooManyIDs(openaiapi.MaxIDs).Answer(q.asked)
	}
	r := &affinity.Request{
		Method: q.asked.Method, Operation: q.Route.Operation, RawQuery: q.asked.URL.RawQuery,
		Body: &q.Body, Text: q.received.Buffered(), Caller: q.caller.Name, KeyID: q.caller.KeyID, Account: q.secret.account(),
		Upgrade: q.Kind.IsHandshake(), Compressed: q.Clarity == openaiapi.Opaque, Disputed: openaiapi.DisputedType(q.asked.Header),
	}
	if !q.received.Whole() {
		r.CutAt = d.buffers
	}
	accounts, refusal, refused := q.entitled.Affinity.Place(r)
	if refused {
		return affinity.Anywhere, refusal.Answer(q.asked)
	}
	if accounts.IsList() {
		settleList(accounts, q, targets)
	}
	return accounts, own
}

// settleList routes a list to the first account by priority, or to the account
// where objects without a model are made.
func settleList(accounts *affinity.Placement, q *request, targets []*target) {
	var first *target
	for _, t := range targets {
		if !q.entitled.May[t.Index] || !t.backend.Takes(&q.Request, q.anonymous) {
			continue
		}
		if all := q.entitled.AllModels; first == nil || all[t.Index] && !all[first.Index] {
			first = t
		}
	}
	if first != nil {
		accounts.Settle(first.backend.AccountKey)
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
