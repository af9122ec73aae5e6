package openailb

import (
	"errors"
	"hash/maphash"
	"math"
	"net/http"
	"os"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/backend"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/lacks"
	"github.com/openai-lb/caddy-openai-lb/internal/latency"
	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/replay"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
	"github.com/openai-lb/caddy-openai-lb/internal/waiting"
	"github.com/openai-lb/caddy-openai-lb/internal/websocket"
)

// request is what a client asks for, and who asks. It is read once, before a
// backend is chosen, and does not change afterwards. When no attempt can need
// them any more, its body and the caller's credentials are released.
type request struct {
	openaiapi.Request
	// incoming is the request as it came. Each attempt sends a copy of it.
	incoming *http.Request
	// asked is the request that is answered. That is incoming, except for the
	// message of an open WebSocket, which is read like a POST.
	asked *http.Request
	// query is that of incoming, without the caller's keys.
	query string
	// writer is the client's.
	writer http.ResponseWriter
	// started is when the request came.
	started time.Time
	// maxAttempts is how many backends the request may try. With 0, it may try
	// all of them.
	maxAttempts int
	// deadline is when the last attempt may begin. It is zero if any time will
	// do.
	deadline time.Time
	// gone is when the client will have given up. It is zero if that is not
	// known.
	gone time.Time
	// received is the body, as far as it is kept to be sent again.
	received replay.Body
	// socket is the client's end of a WebSocket that was opened before a
	// backend is chosen, and of which the request is a message. It is nil for
	// other requests.
	socket *websocket.Client
	// session is the key of the request's affinity in the pool.
	session uint64
	// prompt is the beginning of the prompt, which a backend may have cached.
	prompt openaiapi.Prompt

	// caller is who sent the request, if callers need a key.
	caller keys.Caller
	// entitled is which backends the request may use.
	entitled *affinity.Entitlement
	// credentials are the caller's own, for a backend with auth passthrough,
	// and anonymous reports whether such a backend could not get any.
	credentials keys.Presented
	anonymous   bool
	// inSession reports whether the request is a response in a realtime
	// session.
	inSession bool
	// secret is the client secret that the caller has sent in place of a key.
	// It is nil if there is none.
	secret *clientSecret
}

// parse finds out what the request asks for.
func (q *request) parse(route openaiapi.Route, cache *affinity.PromptCache) {
	var prompt *openaiapi.Prompt // nil: nothing is cached
	if cache != nil {
		prompt = &q.prompt
	}
	q.Request = openaiapi.Parse(q.asked, route, q.received.Received(), prompt)
	if q.Kind.Infers() && !q.Kind.IsHandshake() {
		if q.session = cache.Key(q.asked.Header, route.Operation, q.Model, prompt, q.PromptLength); q.session != 0 {
			q.session ^= q.entitled.Set
		}
	}
}

// asks returns the parts of the request that decide what the reply of a backend
// means. The attempt has one of the service tiers.
func (q *request) asks(to *backend.Backend, tiers pool.ServiceTiers) attempt.Asks {
	return attempt.Asks{Kind: q.Kind, Stream: q.Body.Stream, Operation: q.Route.Operation, Model: to.NameOf(q.Model), Cost: q.Cost, Tiers: tiers}
}

// digests makes the digests of requests.
var digests = maphash.MakeSeed()

// digestedEnd is how much of each end of a long body is in its digest.
const digestedEnd = 32 << 10

// digest tells the request from others: it is the same for one that a client
// sends again. Of a long body, it has the length and both ends, so that a
// prompt of many megabytes costs no more than a short one.
func (q *request) digest() uint64 {
	var h maphash.Hash
	h.SetSeed(digests)
	body := q.received.Buffered()
	maphash.WriteComparable(&h, len(body))
	for _, text := range [...]string{q.incoming.Method, " ", q.incoming.URL.Path} {
		_, _ = h.WriteString(text) // it never fails
	}
	if len(body) > 2*digestedEnd {
		_, _ = h.Write(body[:digestedEnd])
		body = body[len(body)-digestedEnd:]
	}
	_, _ = h.Write(body)
	return h.Sum64()
}

// weighedModel is the model of which backends' limits decide about weights. It
// is empty for operations other than inference, which have separate limits.
func (q *request) weighedModel() string {
	if !q.Kind.Infers() {
		return ""
	}
	return q.Model
}

// lackedModel is the name of the model that the backend has or not.
func (q *request) lackedModel(to *target) string { return pool.ModelKey(to.backend.NameOf(q.Model)) }

// use is the operation with the model that the backend is asked for. Its names
// are short, whatever the client has sent.
func (q *request) use(to *target) lacks.Use {
	return lacks.Use{Model: q.lackedModel(to), Operation: pool.ModelKey(q.Route.Operation)}
}

// pathName is the path of the request as backends have it or not: its
// operation, for each version of the API.
func (q *request) pathName() string {
	version := ""
	if q.incoming.URL.RawQuery != "" {
		version = q.incoming.URL.Query().Get("api-version")
	}
	return pool.ModelKey(q.Route.Operation + "?" + version)
}

// isOnce reports whether the request can be sent only once. One that may have
// been executed after a failure is not retried either.
func (q *request) isOnce() bool { return !q.received.Whole() || !q.Kind.Repeatable() }

// cooldownModel returns the backend's name for the model whose cooldowns count
// for the request. A cooldown that the request starts is for this model, too.
// An operation other than inference has separate limits, such as a number of
// jobs. So it counts as a request without a model.
func (q *request) cooldownModel(b *backend.Backend) string {
	if !q.Kind.Infers() {
		return ""
	}
	return b.NameOf(q.Model)
}

// wholeBackend reports whether a class is about all of the backend. A quota
// that an operation other than inference has met may be one of these.
func (q *request) wholeBackend(c verdict.Class) bool {
	return c.WholeBackend() && (c != verdict.Quota || q.Kind.Infers())
}

// latencyKind returns the kind of request whose waits count for this one.
func (q *request) latencyKind() latency.Kind {
	if !q.Kind.Infers() || q.Kind.IsHandshake() || q.socket != nil {
		return latency.Unfollowed
	}
	output, ok := q.OutputLimit()
	if !ok {
		output = math.MaxInt64
	}
	return latency.KindOf(q.Body.Stream, q.PromptLength, output)
}

// hasQuota reports whether the request counts for the backend's limits, as far
// as they are known: those of inference. With the caller's own credential, the
// limits would be the caller's.
func (q *request) hasQuota(t *target) bool {
	return q.Kind.Infers() && !t.backend.Credentials.Passthrough
}

// waitsIn is the list in which the request waits for a backend.
func (q *request) waitsIn() waiting.Key {
	if !q.Kind.Infers() {
		return waiting.Key{Set: q.entitled.Set}
	}
	return waiting.Key{Set: q.entitled.Set, Model: pool.ModelKey(q.Model), Tiers: pool.TiersOf(q.ServiceTier()).String()}
}

// isAzure reports whether the client speaks Azure's dialect.
func (q *request) isAzure() bool {
	return q.Route.Dialect == openaiapi.AzureV1 || q.Route.Dialect == openaiapi.AzureClassic
}

// callerField names the caller in a log. It is empty if callers need no key.
func (q *request) callerField() zap.Field {
	if q.caller.Name == "" {
		return zap.Skip()
	}
	return zap.String("caller", q.caller.Name)
}

// isLate reports whether the client was too slow with its body. net/http's
// server then cancels the request, as if the client had left.
func (q *request) isLate() bool {
	return errors.Is(q.received.Failure(), os.ErrDeadlineExceeded)
}

// estimate is what the request is likely to cost its caller.
func (q *request) estimate() limiter.Estimate {
	if q.Kind.IsHandshake() {
		return limiter.Estimate{} // each response in it has its own
	}
	e := limiter.Estimate{Prompt: q.PromptTokens(q.received.Buffered()), Model: q.Model, Replies: q.Body.N, Within: q.inSession}
	if limit, ok := q.OutputLimit(); ok {
		e.Output = limit
	} else {
		e.Output = limiter.Undeclared
	}
	return e
}

// hasUnknownLength reports whether the prompt may have any length: its body is
// not kept as a whole, and does not say how long it is. The estimate for a form
// does not depend on that.
func (q *request) hasUnknownLength() bool {
	return q.PromptLength > 0 && !q.received.Whole() && q.received.Length() < 0
}

// readsUsage reports whether the reply to a request that is not known as
// inference may say what that, or a response in the background, has cost.
func (q *request) readsUsage(bill *bill, recorders seam.UsageRecorders) bool {
	if q.Kind.Infers() {
		return false
	}
	id := q.ResponseID()
	return bill.CountsTokens() && !q.showsStored() || bill.Awaits(id) || recorders.Awaits(id)
}

// showsStored reports whether the reply shows what was answered before.
func (q *request) showsStored() bool {
	return openaiapi.ShowsStored(q.asked.Method, q.Route.Operation)
}

// release frees what only another attempt would need. A reply may stream for
// minutes, and must not hold the prompt for so long.
func (q *request) release() {
	q.received.Release()
	q.credentials = keys.Presented{}
	if q.secret != nil {
		q.secret.text = ""
	}
}
