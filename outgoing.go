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

// attempt asks the current backend, and asks it once more if it
// refuses a credential of which the source has a newer one.
func (b *balancer) attempt(in *intent, t *tries, bill *bill, req *http.Request) *attempt.Reply {
	ctx, a, credentials := req.Context(), t.last(), &t.current.backend.Credentials
	a.span = observe.StartSpan(ctx, func() observe.Attempt { return b.spanned(in, a) })
	var err error
	if a.credential, err = credentials.Credential(ctx); err != nil {
		return attempt.Unsent(err)
	}
	r := b.sender.Send(b.outgoing(in, t, bill, req))
	if r.Status == http.StatusUnauthorized && r.Class != verdict.NotPermitted {
		if renewed, ok := credentials.Renew(ctx, a.credential, r.AboutAudience); ok && r.Upload().Abandon() {
			r.Discard()
			if c := b.logger.Check(zap.InfoLevel, "credential renewed"); c != nil {
				c.Write(zap.String("backend", a.target.Name))
			}
			a.credential = renewed
			r = b.sender.Send(b.outgoing(in, t, bill, req))
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

// outgoing is the request of an attempt: reverse_proxy's, with the backend's address, its credential, its headers, its
// path and the model in its body. It also starts the watch for silence.
func (b *balancer) outgoing(in *intent, t *tries, bill *bill, req *http.Request) *attempt.Request {
	a := t.last()
	to := a.target.backend
	leaveOut := observe.IsTraceContext
	if to.TraceContext {
		leaveOut = nil
	}
	out := &attempt.Request{
		Proxied: req, Dial: a.target.address.Info, URL: *req.URL, Host: req.Host, Header: in.credentials.Outgoing(req.Header, in.split, leaveOut),
		Body: &in.received, Change: replay.Options{Request: &in.Body}, Asks: in.asks(a), Secrets: to.Credentials.Secrets(a.credential, in.credentials),
		Fields: attempt.Public{}, CountsTokens: true, CountsContent: bill.CountsTokens(), CountsAll: in.readsUsage(bill, b.ledger),
		FindsID: in.Body.Background, Interims: &t.interims, Marks: a.target,
	}
	if out.Socket = in.socket; in.socket.IsAccepted() {
		out.Body = new(replay.Body) // its first message is sent once the WebSocket is open
	}
	if b.Pool.Watches && !t.ask.Once && !a.flex && t.ask.Kind != pulse.Unfollowed { // a body that is not kept goes out as fast as the client sends it
		if t.barred || to.Credentials.Passthrough {
			t.bar(b.targets, in, a.started) // this attempt counts, too, for where the request may move
		}
		t.watch.Begin(&t.ask, a.target.Member, pool.Moves{May: !t.hasMoved && t.isLeft(in), Until: in.deadline, GivesUp: t.throttled()})
		out.Watch = &t.watch
	}
	if to.TraceContext {
		a.span.Inject(out.Header)
	}
	to.Credentials.Authorize(out.Header, &out.URL, a.credential, in.credentials)
	// the body was read, so the client was told to continue already
	delete(out.Header, "Expect")
	if in.Body.Stream {
		// the beginning of a stream is read before it is passed on
		delete(out.Header, "Accept-Encoding")
	}
	openaiapi.AcceptReadable(out.Header)
	route := in.Route
	if out.URL.Path != in.request.URL.Path || out.URL.RawPath != in.request.URL.RawPath {
		route = openaiapi.ParsePath(out.URL.EscapedPath()) // reverse_proxy has the option rewrite
	}
	out.Host, out.Change.Changes = to.Direct(&out.URL, out.Header, &in.Request, route)
	out.Change.AskUsage = bill.CountsTokens() && (to.StreamUsage == nil || *to.StreamUsage) && in.CanAskUsage()
	if in.placement.Teaches() {
		out.IDs = func(res *http.Response) attempt.IDReader {
			if reader := in.placement.IDReader(to.AccountKey, res); reader != nil {
				return reader
			}
			return nil
		}
	}
	return out
}

// spanned is what the span of an attempt says.
func (b *balancer) spanned(in *intent, a *try) observe.Attempt {
	t := a.target
	return observe.Attempt{
		Method: openaiapi.MethodOf(in.request), Operation: in.Route.Operation, Model: t.backend.NameOf(in.Model), Stream: in.Body.Stream,
		Pool: b.Name, Backend: t.Name, Azure: t.backend.Azure, Address: t.upstream.Dial,
	}
}
