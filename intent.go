package openailb

import (
	"errors"
	"math"
	"net/http"
	"os"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/backend"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/ledger"
	"github.com/openai-lb/caddy-openai-lb/internal/meter"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pulse"
	"github.com/openai-lb/caddy-openai-lb/internal/replay"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
	"github.com/openai-lb/caddy-openai-lb/internal/waiting"
)

// intent is what a client asks for. It is read once, before a backend is chosen; only its placement changes later.
// forget drops what only another attempt would need.
type intent struct {
	openaiapi.Request
	request *http.Request
	// started is when the request came.
	started time.Time
	// maxAttempts is how many backends the request may try. 0: all of them.
	maxAttempts int
	// deadline is when the last attempt may begin. Zero: any time.
	deadline time.Time
	// received is the body, as far as it is kept to be sent again.
	received replay.Body
	// socket is the client's side of a WebSocket whose messages are read.
	socket *attempt.Socket
	// placement is which accounts may get the request, and session the key of its affinity in the pool.
	placement *affinity.Placement
	session   uint64
	// prompt is the beginning of the prompt, which a backend may have cached.
	prompt openaiapi.Prompt

	// caller is who sent the request, if callers need a key.
	caller keys.Caller
	// entitled is which backends the request may use.
	entitled *affinity.Entitlement
	// credentials are what the caller identified itself with, for a backend
	// with auth passthrough. anonymous reports whether such a backend could not get any.
	credentials keys.Presented
	anonymous   bool
	// within reports whether the request is a part of another one.
	within bool
	// split is the client's header, if reverse_proxy got only a part of it.
	split http.Header
}

// parse finds out what the request asks for.
func (in *intent) parse(route openaiapi.Route, cache *affinity.PromptCache) {
	var prompt *openaiapi.Prompt // nil: nothing is cached
	if cache != nil {
		prompt = &in.prompt
	}
	in.Request = openaiapi.Parse(in.request, route, openaiapi.Received{Bytes: in.received.Buffered(), Whole: in.received.Whole(), Length: in.received.Length()}, prompt)
	if in.Kind.Infers() && !in.Kind.IsHandshake() {
		if in.session = cache.Key(in.request.Header, route.Operation, in.Model, prompt, in.PromptLength); in.session != 0 {
			in.session ^= in.entitled.Set
		}
	}
}

// asks is what an attempt has to know of the request.
func (in *intent) asks(a *try) attempt.Asks {
	return attempt.Asks{Kind: in.Kind, Stream: in.Body.Stream, Operation: in.Route.Operation, Cost: in.Cost, Slow: a.flex}
}

// isOnce reports whether the request can be sent only once. One that may have been executed after a failure is not
// retried either.
func (in *intent) isOnce() bool { return !in.received.Whole() || !in.Kind.Repeatable() }

// makesObject reports whether the request makes an object without a model, which may be
// used with any.
func (in *intent) makesObject() bool { return in.Model == "" && in.placement.Makes() }

// benchModel is what the backend calls the model whose benches count for the request,
// and which the request may bench. An operation other than inference has separate
// limits, such as a number of jobs. So it counts as a request without a model.
func (in *intent) benchModel(b *backend.Backend) string {
	if !in.Kind.Infers() {
		return ""
	}
	return b.NameOf(in.Model)
}

// wholeBackend reports whether a class is about all of the backend. A quota that an
// operation other than inference has met may be one of these.
func (in *intent) wholeBackend(c verdict.Class) bool {
	return c.WholeBackend() && (c != verdict.Quota || in.Kind.Infers())
}

// pulseKind is the kind of request whose waits count for it.
func (in *intent) pulseKind() pulse.Kind {
	if !in.Kind.Infers() || in.socket != nil {
		return pulse.Unfollowed
	}
	output, ok := in.OutputLimit()
	if !ok {
		output = math.MaxInt64
	}
	return pulse.KindOf(in.Body.Stream, in.PromptLength, output)
}

// hasQuota reports whether the request counts for the backend's limits, as far as they are known: those of
// inference. With the caller's own credential, the limits would be the caller's.
func (in *intent) hasQuota(t *target) bool {
	return in.Kind.Infers() && !t.backend.Credentials.Passthrough
}

// waitsIn is the list in which the request waits for a backend.
func (in *intent) waitsIn() waiting.Key {
	if !in.Kind.Infers() {
		return waiting.Key{Set: in.entitled.Set}
	}
	return waiting.Key{Set: in.entitled.Set, Model: pool.ModelKey(in.Model), Flex: in.ServiceTier() == openaiapi.Flex}
}

// isAzure reports whether the client speaks Azure's dialect.
func (in *intent) isAzure() bool {
	return in.Route.Dialect == openaiapi.AzureV1 || in.Route.Dialect == openaiapi.AzureClassic
}

// callerField names the caller in a log. It is empty if callers need no key.
func (in *intent) callerField() zap.Field {
	if in.caller.Name == "" {
		return zap.Skip()
	}
	return zap.String("caller", in.caller.Name)
}

// isLate reports whether the client was too slow with its body. net/http's
// server then cancels the request, as if the client had left.
func (in *intent) isLate() bool {
	return errors.Is(in.received.Failure(), os.ErrDeadlineExceeded)
}

// estimate is what the request is likely to cost its caller.
func (in *intent) estimate() meter.Estimate {
	if in.Kind.IsHandshake() {
		return meter.Estimate{} // each response in it has its own
	}
	e := meter.Estimate{Prompt: in.PromptTokens(in.received.Buffered()), Model: in.Model, Replies: in.Body.N, Within: in.within}
	if limit, ok := in.OutputLimit(); ok {
		e.Output = limit
	} else {
		e.Output = meter.Undeclared
	}
	return e
}

// hasUnknownLength reports whether the prompt may have any length: its body is not kept as a whole, and does not
// say how long it is. The estimate for a form does not depend on that.
func (in *intent) hasUnknownLength() bool {
	return in.PromptLength > 0 && !in.received.Whole() && in.received.Length() < 0
}

// readsUsage reports whether the reply to a request that is not known as inference may say what that, or a response in
// the background, has cost.
func (in *intent) readsUsage(bill *bill, pages *ledger.Config) bool {
	if in.Kind.Infers() {
		return false
	}
	id := in.ResponseID()
	return bill.CountsTokens() && !in.showsStored() || bill.Awaits(id) || pages.Awaits(id)
}

// showsStored reports whether the reply shows what was answered before.
func (in *intent) showsStored() bool {
	return openaiapi.ShowsStored(openaiapi.MethodOf(in.request), in.Route.Operation)
}

// forget releases what only another attempt would need. A reply may
// stream for minutes, and must not hold the prompt for so long.
func (in *intent) forget() {
	in.received.Release()
	in.credentials, in.split = keys.Presented{}, nil
}
