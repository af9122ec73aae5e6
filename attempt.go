package openailb

import (
	"net/http"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pulse"
	"github.com/openai-lb/caddy-openai-lb/internal/replay"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// attempt asks the backend that the search has chosen, and asks it once more if it refuses a credential of which the
// source has a newer one.
func (b *balancer) attempt(q *request, s *search, bill *bill) *attempt.Reply {
	ctx, a, credentials := q.incoming.Context(), s.last(), &s.current.backend.Credentials
	a.span = observe.StartSpan(ctx, func() observe.Attempt { return b.spanned(q, a) })
	var err error
	if a.credential, err = credentials.Credential(ctx); err != nil {
		return attempt.Unsent(err)
	}
	r := b.sender.Send(b.outgoing(q, s, bill))
	if r.Status == http.StatusUnauthorized && r.Class != verdict.NotPermitted {
		if renewed, ok := credentials.Renew(ctx, a.credential, r.AboutAudience); ok && r.Upload().Abandon() {
			r.Discard()
			if c := b.logger.Check(zap.InfoLevel, "credential renewed"); c != nil {
				c.Write(zap.String("backend", a.target.Name))
			}
			a.credential = renewed
			r = b.sender.Send(b.outgoing(q, s, bill))
		}
	}
	switch {
	case credentials.Passthrough && r.Class.OfCredential():
		r.Class = verdict.ClientError // the credential is the caller's
	case (r.Class == verdict.Credential || r.Class == verdict.NotPermitted) && credentials.HasReplaced(a.credential):
		r.Class = verdict.NoCredential // the refusal does not apply to the credential that there is now
	}
	return r
}

// outgoing is the request of an attempt: the client's, with the backend's address, its credential, its headers, its path
// and the model in its body. It also starts the watch for silence.
func (b *balancer) outgoing(q *request, s *search, bill *bill) *attempt.Request {
	a := s.last()
	to := a.target.backend
	leaveOut := observe.IsTraceContext
	if to.TraceContext {
		leaveOut = nil
	}
	out := &attempt.Request{
		Incoming: q.incoming, Address: a.target.address, URL: *q.incoming.URL, Host: q.incoming.Host,
		Header: q.credentials.Outgoing(q.incoming.Header, leaveOut), Body: &q.received, Change: replay.Options{Request: &q.Body},
		Asks: q.asks(a.flex), Secrets: to.Credentials.Secrets(a.credential, q.credentials), Fields: b.fields,
		CountsTokens: true, CountsContent: bill.CountsTokens(), CountsAll: q.readsUsage(bill, b.ledger), FindsID: q.Body.Background,
		Interims: &s.interims, Client: q.replyWriter(), Marks: a.target, Socket: q.socket,
	}
	out.URL.RawQuery, out.URL.Opaque = q.query, ""
	if q.socket.IsAccepted() {
		out.Body = new(replay.Body) // its first message is sent once the WebSocket is open
	}
	if openaiapi.IsHandshake(q.incoming) {
		openaiapi.SetUpgrade(out.Header, q.incoming.Header)
	}
	b.watchSilence(q, s, out)
	if to.TraceContext {
		a.span.Inject(out.Header)
	}
	to.Credentials.Authorize(out.Header, &out.URL, a.credential, q.credentials)
	// the body was read, so the client was told to continue already
	delete(out.Header, "Expect")
	if q.Body.Stream {
		// the beginning of a stream is read before it is passed on
		delete(out.Header, "Accept-Encoding")
	}
	openaiapi.AcceptReadable(out.Header)
	out.Host, out.Change.Changes = to.Direct(&out.URL, out.Header, &q.Request, q.Route)
	out.Change.AskUsage = bill.CountsTokens() && (to.StreamUsage == nil || *to.StreamUsage) && q.CanAskUsage()
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

// watchSilence lets the request move to another backend while this one is silent. A body that is not kept goes out as
// fast as the client sends it, so that the wait for its reply says nothing.
func (b *balancer) watchSilence(q *request, s *search, out *attempt.Request) {
	a := s.last()
	if !b.Pool.Watches || s.board.Once || a.flex || s.board.Kind == pulse.Unfollowed {
		return
	}
	if s.barred || a.target.backend.Credentials.Passthrough {
		s.bar(a.started) // this attempt counts, too, for where the request may move
	}
	s.silence.Begin(&s.board, a.target.Member, pool.Moves{May: !s.hasMoved && s.hasAttempts(), Until: q.deadline, GivesUp: s.throttled()})
	out.Watch = &s.silence
}

// spanned is what the span of an attempt says.
func (b *balancer) spanned(q *request, a *attemptRecord) observe.Attempt {
	t := a.target
	return observe.Attempt{
		Method: q.asked.Method, Operation: q.Route.Operation, Model: t.backend.NameOf(q.Model), Stream: q.Body.Stream,
		Pool: b.Name, Backend: t.Name, Azure: t.backend.Azure, Address: t.upstream.Dial,
	}
}
