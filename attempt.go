package openailb

import (
	"cmp"
	"net/http"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/latency"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
	"github.com/openai-lb/caddy-openai-lb/internal/replay"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// attemptRecord is an attempt in the memory of the search.
type attemptRecord struct {
	target  *target
	started time.Time
	// class and status are the reply's. They are empty while the attempt is in
	// progress.
	class  verdict.Class
	status int
	// end is how the reply ended, if it was cut after its beginning went to the
	// client.
	end attempt.End
	// credential is the credential of the backend with which the request was
	// sent.
	credential keys.Credential
	// reservation is the deduction from the backend's limits when the request
	// was sent. Return undoes it.
	reservation quota.Mark
	// cooldown is the throttle that this attempt began, if any.
	cooldown cooldown
	// deployment is the metrics label of the backend's name for the model.
	deployment string
	// tiers is the group of service tiers to which the attempt's tier belongs.
	tiers pool.ServiceTiers
	// lacksSocket reports whether the backend opened no WebSocket, but may
	// serve the request over HTTP.
	lacksSocket bool
	// counted reports whether the attempt is in the metrics and its span has
	// ended.
	counted bool
	span    *observe.Span
}

// cooldown is a throttle that an attempt began: its start, and the service
// tiers that it covers.
type cooldown struct {
	began time.Time
	tiers pool.ServiceTiers
}

// attemptList lists the attempts that were made for a request, in order.
type attemptList []attemptRecord

// last returns the latest attempt. It returns nil if there is none.
func (l attemptList) last() *attemptRecord {
	if len(l) == 0 {
		return nil
	}
	return &l[len(l)-1]
}

// number returns how many attempts there are.
func (l attemptList) number() int32 { return int32(len(l)) } //nolint:gosec // there are few

// anyIs reports whether one of the attempts has the class.
func (l attemptList) anyIs(class verdict.Class) bool {
	return slices.ContainsFunc(l, func(a attemptRecord) bool { return a.class == class })
}

// throttled reports whether a backend refused an attempt because it throttles.
func (l attemptList) throttled() bool {
	return l.throttles(len(l)) > 0
}

// throttles counts those of the first n attempts that a backend refused because
// it throttles.
func (l attemptList) throttles(n int) (throttles int) {
	for i := range min(n, len(l)) {
		if l[i].class == verdict.Throttled {
			throttles++
		}
	}
	return throttles
}

// spent reports whether a backend got an attempt, and must not get another. A
// backend that was silent or throttled may get another.
func (l attemptList) spent(at *target) bool {
	return slices.ContainsFunc(l, func(a attemptRecord) bool {
		return a.target == at && a.class != verdict.Silent && a.class != verdict.Throttled
	})
}

// failedByItself reports whether a request that no backend served seems to be
// the cause of its failure: a backend said that it is too large, or two
// different backends failed.
func (l attemptList) failedByItself() bool {
	var at *target
	for i := range l {
		switch a := &l[i]; {
		case a.class == verdict.TooLarge:
			return true
		case !a.class.MayBeOfRequest():
		case at == nil:
			at = a.target
		case at != a.target:
			return true
		}
	}
	return false
}

// doubtCooldowns puts the cooldowns that the request began in doubt if every
// attempt was refused for a limit: perhaps only this request was too large.
func (l attemptList) doubtCooldowns(q *request) {
	for i := range l {
		if a := &l[i]; !a.class.Promise() && a.class != verdict.TooLarge {
			return
		}
	}
	for i := range l {
		if a := &l[i]; !a.cooldown.began.IsZero() {
			covers := pool.Scope{Model: q.cooldownModel(a.target.backend), Tiers: a.cooldown.tiers}
			a.target.Doubt(q.wholeBackend(a.class), covers, a.cooldown.began)
		}
	}
}

// outcome returns the class of a finished attempt. It is the class of the
// reply, unless the reply was cut on its way to the client.
func (a *attemptRecord) outcome() verdict.Class {
	switch {
	case a.end.Broken == nil:
		return a.class
	case a.end.Paused:
		return verdict.ClientError
	}
	return verdict.BrokenStream
}

// count counts a finished attempt in the metrics, once, and ends its span.
func (a *attemptRecord) count() {
	if a.counted || a.class == "" {
		return
	}
	a.counted = true
	class := a.outcome()
	a.span.End(a.status, string(class), class == verdict.Served)
	a.target.metrics.Attempted(a.deployment, string(class))
}

// attempt sends the request to the backend that the search has chosen. If the
// backend refuses the credential and its source has a newer one, attempt sends
// the request once more with that.
func (b *balancer) attempt(q *request, s *search, bill *bill) *attempt.Reply {
	ctx, a, credentials := q.incoming.Context(), s.attempts.last(), &s.current.backend.Credentials
	a.span = observe.StartSpan(ctx, func() observe.Attempt { return b.spanned(q, a) })
	var err error
	if q.secret != nil {
		a.credential = keys.Bearer(q.secret.text)
	} else if a.credential, err = credentials.Credential(ctx); err != nil {
		return attempt.Unsent(err)
	}
	r := b.send(q, s, bill)
	if r.Status == http.StatusUnauthorized && q.secret == nil && r.Class != verdict.NotPermitted {
		if renewed, ok := credentials.Renew(ctx, a.credential, r.AboutAudience); ok && r.Upload().Abandon() {
			r.Discard()
			if c := b.logger.Check(zap.InfoLevel, "credential renewed"); c != nil {
				c.Write(zap.String("backend", a.target.Name))
			}
			a.credential = renewed
			r = b.send(q, s, bill)
		}
	}
	return r
}

// send sends the request of an attempt, and watches how long the backend is
// silent.
func (b *balancer) send(q *request, s *search, bill *bill) *attempt.Reply {
	out := b.outgoing(q, s, bill)
	if a := s.attempts.last(); q.Kind.Infers() && a.tiers == pool.UsualTiers && !s.firstByte.Waits() {
		s.firstByte = b.metrics.FirstBytes.Begin(a.started, b.Pool.TooLong(&s.board, a.target.Member, a.started))
	}
	b.watchSilence(q, s, out)
	return b.sender.Send(out)
}

// compare changes the class of a reply whose meaning depends on other attempts
// or requests. A firewall that blocks several different requests in a row
// counts as a failure of the backend. An unclear error that two backends send
// counts as the client's.
func (s *search) compare(r *attempt.Reply) {
	to, q := s.current, s.request
	switch {
	case r.Class == verdict.Blocked && !q.Kind.IsHandshake() && q.socket == nil:
		if to.blocked.Refused(q.use(to), cmp.Or(s.digest, q.digest())) {
			r.Class = verdict.Failed // it is not one request that the firewall does not like
		}
	case r.Class != verdict.Blocked && r.Status > 0 && to.blocked.Any():
		to.blocked.Passed(q.use(to))
	}
	if r.Class == verdict.Unclear && s.attempts.anyIs(verdict.Unclear) {
		r.Class = verdict.ClientError // two backends have said so: a third one would
	}
}

// outgoing returns the request of an attempt: the client's request with the
// backend's address, credential, headers, path and model.
func (b *balancer) outgoing(q *request, s *search, bill *bill) *attempt.Outgoing {
	a := s.attempts.last()
	to := a.target.backend
	leaveOut := observe.IsTraceContext
	if to.TraceContext {
		leaveOut = nil
	}
	out := &attempt.Outgoing{
		Incoming: q.incoming, Address: a.target.address, URL: *q.incoming.URL, Host: q.incoming.Host,
		Header: q.credentials.Outgoing(q.incoming.Header, leaveOut), Body: &q.received,
		Change: replay.Options{Request: &q.Body},
		Traits: q.traits(to, a.tiers), Secrets: to.Credentials.Secrets(a.credential, q.credentials), Fields: b.fields,
		CountsTokens: true, CountsContent: s.needsTokens(), CountsAll: q.readsUsage(b, bill),
		FindsID:  q.Body.Background,
		Interims: &s.interims, Client: q.writer, Marks: a.target, Socket: q.socket,
	}
	if out.Last = !s.mayFollow(a); !out.Last && !q.gone.IsZero() && a.tiers != pool.Flex {
		out.Patience = max(1, time.Until(q.gone)/2) // the other half is for the next attempt
	}
	out.URL.RawQuery, out.URL.Opaque = q.query, ""
	out.Final = s.settle(a)
	if q.socket != nil {
		out.Body = new(replay.Body) // its first message is sent once the WebSocket is open
		out.Interims, out.Client = nil, nil
	}
	if openaiapi.IsHandshake(q.incoming) {
		openaiapi.SetUpgrade(out.Header, "websocket")
	}
	if to.TraceContext {
		a.span.Inject(out.Header)
	}
	to.Credentials.Authorize(out.Header, &out.URL, a.credential, q.credentials)
	// The body was read, so the client was already told to continue.
	delete(out.Header, "Expect")
	openaiapi.AcceptReadable(out.Header, q.Body.Stream)
	out.Host, out.Change.Changes = to.Direct(&out.URL, out.Header, &q.Request, q.Route)
	if to.Provider {
		delete(out.Header, loopHeader)
	} else {
		b.loops.add(out.Header)
	}
	out.Change.AskUsage = s.needsTokens() && (to.StreamUsage == nil || *to.StreamUsage) && q.CanAskUsage() &&
		openaiapi.KnowsStreamOptions(&out.URL)
	if s.placement.Teaches() {
		out.IDs = func(res *http.Response) attempt.IDReader {
			if reader := s.placement.IDReader(to.AccountKey, res); reader != nil {
				return reader
			}
			return nil
		}
	}
	return out
}

// needsTokens reports whether a caller or a quota is charged for the tokens of
// the reply.
func (s *search) needsTokens() bool { return s.request.caller.Name != "" || s.charge() != nil }

// watchSilence sets up the move of the request to another backend while this
// one is silent. It does nothing for a body that is not kept: the backend gets
// such a body at the client's pace, so the wait for its reply says nothing
// about the backend.
func (b *balancer) watchSilence(q *request, s *search, out *attempt.Outgoing) {
	a := s.attempts.last()
	if !b.Pool.Watches || s.board.Once || a.tiers != pool.UsualTiers || s.board.Kind == latency.Unfollowed {
		return
	}
	if s.barred || a.target.backend.Credentials.Passthrough {
		s.bar(a.started) // this attempt counts, too, for where the request may move
	}
	s.silence.Begin(&s.board, a.target.Member,
		pool.Moves{May: !s.hasMoved && s.hasAttempts(), Until: q.deadline, GivesUp: s.attempts.throttled()})
	out.Watch = &s.silence
}

// spanned returns the attributes of an attempt's span.
func (b *balancer) spanned(q *request, a *attemptRecord) observe.Attempt {
	t := a.target
	return observe.Attempt{
		Method: q.asked.Method, Operation: q.Route.Operation, Model: t.backend.NameOf(q.Model), Stream: q.Body.Stream,
		Pool: b.Name, Backend: t.Name, Azure: t.backend.Azure, Address: t.upstream.Dial,
	}
}
