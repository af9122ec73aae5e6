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
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
	"github.com/openai-lb/caddy-openai-lb/internal/waiting"
)

// reader reads requests: it finds the caller, the operation with its model, and
// the backends that may get the request.
type reader struct {
	// clientKeys identifies callers. It is nil if anyone may use the balancer.
	clientKeys *keys.Clients
	// replaced is done once another config is loaded.
	replaced context.Context
	// keyFiles reloads files with keys when they change.
	keyFiles *keys.Reloader
	// admission limits callers. It is nil without limits, when everything is
	// what each caller may use. entitlements are the lists of backends that
	// callers may use, by their numbers. The first one has all backends.
	admission    seam.Admission
	everything   *seam.Grant
	entitlements []*affinity.Entitlement
	affinity     *affinity.Affinity
	// promptCache is nil if it is off.
	promptCache *affinity.PromptCache
	rechecker   *backend.Rechecker
	// readyPath is the option ready_path, and buffers request_buffers.
	readyPath string
	buffers   int64
	// passesThrough reports whether a backend requires the callers' own
	// credentials.
	passesThrough bool
	// tellsModels reports whether a backend depends on the model: it lists its
	// models, or has its own name for one.
	tellsModels bool
}

// readers maps the name of a pool to its *reader in the loaded config.
var readers sync.Map

// latest returns the reader of the pool in the loaded config. A WebSocket can
// outlive the config that opened it; the loaded config decides whether its
// caller may continue.
func (d *reader) latest(pool string) *reader {
	if current, ok := readers.Load(pool); ok && d.replaced.Err() != nil {
		return current.(*reader)
	}
	return d
}

// read reads and checks the request: who sent it, which operation and model it
// asks for, its limits, and the accounts that may get it. It returns the answer
// if the request needs no backend.
func (d *reader) read(b *balancer, t *transaction) (answer apierror.Answer) {
	q, r := &t.request, t.request.incoming
	q.grant, q.entitled = d.everything, d.entitlements[0]
	if r.TLS != nil && !r.TLS.HandshakeComplete {
		// Anyone who has seen the request may have replayed it (RFC 8470), and
		// it would be paid for twice.
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
	if openaiapi.IsHandshake(r) && b.webSockets == nil {
		return apierror.NoWebSockets.Answer(r)
	}
	if openaiapi.IsHandshake(r) && openaiapi.MayBeResponses(route.Operation) {
		answer = d.enter(b, t)
	} else {
		answer = d.receive(b, t, route)
	}
	if answer.Response != nil {
		return answer
	}
	q.parse(route, d.promptCache)
	q.trustSession()
	if q.Kind.IsHandshake() && !r.ProtoAtLeast(1, 1) {
		return apierror.OldWebSocket.Answer(r)
	}
	q.anonymous = d.passesThrough && q.credentials.None()
	if q.grant.Listed != nil {
		if answer = apierror.ModelList(r, route, q.grant.Listed); answer.Response != nil {
			return answer
		}
	}
	if d.tellsModels && q.CutOff() && q.Model == "" && !q.IsUpload(r.Method) {
		return apierror.ModelBeyondBuffer(d.buffers).Answer(r)
	}
	if answer = d.limit(b, t); answer != (apierror.Answer{}) {
		return answer
	}
	t.placement, answer = d.findAccounts(q, b.targets)
	return answer
}

// enter opens the WebSocket of a client, and reads its first message, which is
// the request: it names the model and the response to continue from. It returns
// the answer if no such message arrives.
func (d *reader) enter(b *balancer, t *transaction) (answer apierror.Answer) {
	q := &t.request
	if q.socket == nil && !b.opensSocket(q) {
		return apierror.NoWebSocket.Answer(q.asked)
	}
	if q.socket == nil { // otherwise it is the next message, after the balancer's own answer
		if answer = d.exceeded(b, t, ratelimit.Estimate{Prompt: 1}); answer.Response != nil {
			return answer
		}
		if d.admission != nil { // its first message may come slowly, and is in memory
			if refusal := t.bill.upload(); refusal != nil {
				return d.exceededAnswer(b, t, refusal)
			}
			defer t.bill.caller.Uploaded()
		}
		socket, err := b.webSockets.Accept(q.writer, q.incoming, d.buffers, b.webSocketOptions)
		if err != nil {
			return apierror.UnreadableBody(err).Answer(q.asked)
		}
		q.socket = socket
	}
	q.incoming = q.incoming.WithContext(q.socket.WithContext(q.incoming.Context()))
	q.asked = openaiapi.AsPost(q.incoming)
	text, err := q.socket.Next()
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
	return answer
}

// opensSocket reports whether a backend that the request may use opens a
// WebSocket for responses, or might. If none does, the answer to the handshake
// says so, and clients such as Codex use HTTP.
func (b *balancer) opensSocket(q *request) bool {
	now := time.Now()
	return slices.ContainsFunc(b.targets,
		func(t *target) bool { return q.entitled.May[t.Index] && !b.sender.RefusesSocket(t, now) })
}

// identify records the caller of the request. It returns a refusal if the
// caller has no valid key or token, or is denied.
func (d *reader) identify(q *request) (refusal apierror.Error, refused bool) {
	if d.clientKeys == nil {
		d.findSecret(q)
		return apierror.Error{}, false
	}
	caller, err := d.clientKeys.Identify(q.asked.Context(), &q.credentials)
	if err != nil && d.findSecret(q) {
		caller, err = d.holder(q.secret)
	}
	if err != nil {
		return refusalOf(err), true
	}
	q.caller, q.grant = caller, d.grantOf(caller)
	q.entitled = d.entitlements[q.grant.Backends]
	addToLog(q.incoming, q.callerField)
	return apierror.Denied, d.isDenied(q.grant, caller.Name)
}

// refusalOf returns the answer to a request whose key or token is not valid for
// the reason err.
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

// exceeded returns the answer to a request if its caller is over a limit before
// the body is read. It returns none if the request may wait for that limit.
func (d *reader) exceeded(b *balancer, t *transaction, likely ratelimit.Estimate) (answer apierror.Answer) {
	if d.admission == nil {
		return answer
	}
	now, q := time.Now(), &t.request
	t.bill = d.billOf(q, now)
	refusal := t.bill.caller.Refuses(now, ratelimit.Estimate{Prompt: min(1, likely.Prompt), Model: likely.Model})
	if refusal == nil {
		return answer
	}
	// the client waits for as long as the likely cost needs
	if more := t.bill.caller.Refuses(now, likely); more != nil && more.Reason == refusal.Reason {
		refusal = more
	}
	if t.wait.mayLastUntil(refusal, q, now) {
		return answer
	}
	t.bill.refused(refusal)
	return d.exceededAnswer(b, t, refusal)
}

// shortBody is the size up to which bodies usually arrive together with the
// headers.
const shortBody = 64 << 10

// likelyCost estimates the cost of a request before its body is read, without
// the output. Of a long body, only the first part counts, because most of it
// may be pictures.
func likelyCost(r *http.Request, route openaiapi.Route) (e ratelimit.Estimate) {
	e.Model = route.Name()
	if openaiapi.CostsTokens(r, route) {
		e.Prompt = max(1, openaiapi.PromptCost(min(r.ContentLength, shortBody)))
	}
	return e
}

// receive reads the body of the request. It returns the answer if the body
// cannot be read, or if the caller is over a limit: otherwise a caller could
// fill the memory with uploads. For the same reason, a longer body counts as
// one of its caller's open requests while it arrives.
func (d *reader) receive(b *balancer, t *transaction, route openaiapi.Route) (answer apierror.Answer) {
	q := &t.request
	if length := q.incoming.ContentLength; d.admission != nil && length != 0 {
		if answer = d.exceeded(b, t, likelyCost(q.incoming, route)); answer.Response != nil {
			return answer
		}
		if length < 0 || length > shortBody {
			if refusal := t.bill.upload(); refusal != nil {
				return d.exceededAnswer(b, t, refusal)
			}
			defer t.bill.caller.Uploaded()
		}
	}
	if err := q.received.Buffer(q.incoming, d.buffers); err != nil {
		return apierror.UnreadableBody(err).Answer(q.asked)
	}
	return answer
}

// exceededAnswer counts a request that a limit refuses, and returns its answer.
func (d *reader) exceededAnswer(b *balancer, t *transaction, refusal *ratelimit.Refusal) apierror.Answer {
	b.metrics.Limited(t.request.caller.Label, refusal)
	return d.admission.Refuse(t.request.asked, time.Now(), t.request.caller.Name, refusal)
}

// answerUsage returns the caller's use and limits. It is charged to no limit.
func (d *reader) answerUsage(b *balancer, t *transaction) apierror.Answer {
	r := t.request.asked
	if d.admission == nil {
		return apierror.NoUsage.Answer(r)
	}
	now, name := time.Now(), t.request.caller.Name
	use := d.admission.Use(now, name, b.usage.OfCaller(now, name))
	answer := apierror.Answer{Response: apierror.JSONResponse(r, http.StatusOK, use), Class: apierror.Usage}
	answer.Header.Set("Cache-Control", "no-store")
	return answer
}

// limit charges the request to its caller. It returns the answer if the caller
// may not send it.
func (d *reader) limit(b *balancer, t *transaction) (answer apierror.Answer) {
	if d.admission == nil {
		return answer
	}
	q := &t.request
	if q.grant.ServiceTiers != nil {
		q.ReadHeaderTier(q.asked.Header)
	}
	if e, refused := d.mayUse(q.grant, q.caller.Name, &q.Request, q.received.Buffered()); refused {
		return e.Answer(q.asked)
	}
	if q.Clarity == openaiapi.Opaque && q.NeedsModel && q.grant.SeesEach() {
		return apierror.CompressedBody.Answer(q.asked)
	}
	estimate := q.estimate()
	if estimate.Prompt > 0 && q.hasUnknownLength() && q.grant.LimitsTokens {
		return apierror.UnknownLength(d.buffers).Answer(q.asked)
	}
	var refusal *ratelimit.Refusal
	t.bill = d.billOf(q, time.Now())
	if t.bill.Reservation, refusal = t.wait.admit(b, q, d.admission, estimate); refusal != nil {
		if t.wait.result == waiting.Left {
			return apierror.Answer{Class: string(verdict.ClientLeftWaiting)}
		}
		return d.exceededAnswer(b, t, refusal)
	}
	for limit := range t.bill.Demoted {
		b.metrics.Demoted(q.caller.Label, limit)
	}
	return answer
}

// findAccounts returns the accounts that may get the request, or the answer if
// no account may. A list goes to the first account.
func (d *reader) findAccounts(q *request, targets []*target) (accounts *affinity.Placement, answer apierror.Answer) {
	if q.Body.TooManyIDs() {
		return affinity.Anywhere, apierror.TooManyIDs(openaiapi.MaxIDs).Answer(q.asked)
	}
	r := &affinity.Query{
		Method: q.asked.Method, Operation: q.Route.Operation, RawQuery: q.asked.URL.RawQuery,
		Body: &q.Body, Text: q.received.Buffered(), Caller: q.caller.Name, KeyID: q.caller.KeyID,
		Account: q.secret.account(),
		Upgrade: q.Kind.IsHandshake(), Compressed: q.Clarity == openaiapi.Opaque,
		Disputed: openaiapi.DisputedType(q.asked.Header),
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
	return accounts, answer
}

// settleList routes a list request to the first account by priority. An account
// that serves all of the caller's models comes first, because objects without a
// model are made there.
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

// asksReady reports whether the request is a readiness probe.
func (d *reader) asksReady(r *http.Request) bool {
	return d.readyPath != "" && r.URL.Path == d.readyPath &&
		(r.Method == http.MethodGet || r.Method == http.MethodHead)
}

// answerReady answers a readiness probe: whether a backend is usable, and if
// not, when the first one may be. It calls no backend, but starts rechecks of
// those that are unreachable.
func (d *reader) answerReady(b *balancer, r *http.Request) (answer apierror.Answer) {
	now := time.Now()
	usable, wait := b.Pool.Usable(now)
	if usable {
		answer = apierror.Answer{
			Response: apierror.JSONResponse(r, http.StatusOK, map[string]string{"status": "ready"}),
			Class:    apierror.Ready,
		}
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
