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
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/internal/replay"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// request is a client's request and its caller. It is read once, before a
// backend is chosen, and does not change afterwards. Its body and the caller's
// credentials are released when no further attempt can need them.
type request struct {
	openaiapi.Request
	// incoming is the request as it arrived. Each attempt sends a copy of it.
	incoming *http.Request
	// asked is the request as the balancer reads and answers it. It is the same
	// as incoming, except for a message of an open WebSocket, which is read
	// like a POST.
	asked *http.Request
	// query is incoming's query without the caller's keys.
	query string
	// writer writes the response to the client.
	writer http.ResponseWriter
	// started is when the request arrived.
	started time.Time
	// maxAttempts is how many backends the request may try. With 0, it may try
	// all of them.
	maxAttempts int
	// deadline is the latest start of an attempt. It is zero without a limit.
	deadline time.Time
	// gone is when the client is expected to give up. It is zero if that is not
	// known.
	gone time.Time
	// received is the body, as far as it is kept for retries.
	received replay.Body
	// socket is the client's end of a WebSocket that was opened before a
	// backend is chosen; the request is a message of it. It is nil for other
	// requests.
	socket seam.WebSocket
	// session is the key of the request's affinity in the pool.
	session uint64
	// prompt is the beginning of the prompt, which a backend may have cached.
	prompt openaiapi.Prompt

	// caller is the sender of the request. It is empty if callers need no key.
	caller keys.Caller
	// grant is what the caller may use, and entitled the set of backends in it.
	grant    *seam.Grant
	entitled *affinity.Entitlement
	// credentials are the caller's own, for a backend with auth passthrough.
	// anonymous reports whether the caller sent none for such a backend.
	credentials keys.Presented
	anonymous   bool
	// inSession reports whether the request is a response in a realtime
	// session.
	inSession bool
	// secret is the client secret that the caller sent instead of a key. It is
	// nil if there is none.
	secret *clientSecret
}

// parse parses the request, and computes the key of its session.
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

// traits returns the parts of the request that decide the meaning of a
// backend's reply. tiers is the group of the attempt's service tier.
func (q *request) traits(to *backend.Backend, tiers pool.ServiceTiers) attempt.Traits {
	return attempt.Traits{Kind: q.Kind, Stream: q.Body.Stream, Operation: q.Route.Operation, Model: to.NameOf(q.Model),
		Cost: q.Cost, Tiers: tiers}
}

// digests is the seed of all digests of requests.
var digests = maphash.MakeSeed()

// digestedEnd is how much of each end of a long body is in its digest.
const digestedEnd = 32 << 10

// digest returns a hash of the method, the path and the body. A request that a
// client repeats has the same digest. The hash of a long body covers its length
// and both ends, so that a prompt of many megabytes costs no more than a short
// one.
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

// weighedModel returns the model whose limits at the backends adjust their
// weights. It is empty for operations other than inference, which have separate
// limits.
func (q *request) weighedModel() string {
	if !q.Kind.Infers() {
		return ""
	}
	return q.Model
}

// lackedModel returns the backend's name for the model, as the key of the
// models that the backend lacks.
func (q *request) lackedModel(to *target) string { return pool.ModelKey(to.backend.NameOf(q.Model)) }

// use returns the operation and the model that the backend is asked for. Both
// names are shortened if a client sent long ones.
func (q *request) use(to *target) lacks.Use {
	return lacks.Use{Model: q.lackedModel(to), Operation: pool.ModelKey(q.Route.Operation)}
}

// pathName returns the key of the request's path in the paths that a backend
// lacks: the operation and the version of the API.
func (q *request) pathName() string {
	version := ""
	if q.incoming.URL.RawQuery != "" {
		version = q.incoming.URL.Query().Get("api-version")
	}
	return pool.ModelKey(q.Route.Operation + "?" + version)
}

// isOnce reports whether the request can be sent only once: its body is not
// kept, or it must not be executed twice.
func (q *request) isOnce() bool { return !q.received.Whole() || !q.Kind.Repeatable() }

// cooldownModel returns the backend's name for the model whose cooldowns apply
// to the request. Cooldowns that the request starts are for this model, too. It
// is empty for operations other than inference, which have separate limits,
// such as a number of jobs.
func (q *request) cooldownModel(b *backend.Backend) string {
	if !q.Kind.Infers() {
		return ""
	}
	return b.NameOf(q.Model)
}

// wholeBackend reports whether a class concerns the whole backend. An exhausted
// quota does so only for inference: another operation may have met a separate
// quota.
func (q *request) wholeBackend(c verdict.Class) bool {
	return c.WholeBackend() && (c != verdict.Quota || q.Kind.Infers())
}

// latencyKind returns the kind of request whose latencies are comparable with
// this one's.
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

// hasQuota reports whether the request counts toward the backend's known
// limits, which are those of inference. It does not with the caller's own
// credential, because the limits would be the caller's.
func (q *request) hasQuota(t *target) bool {
	return q.Kind.Infers() && !t.backend.Credentials.Passthrough
}

// isAzure reports whether the client speaks Azure's dialect.
func (q *request) isAzure() bool {
	return q.Route.Dialect == openaiapi.AzureV1 || q.Route.Dialect == openaiapi.AzureClassic
}

// callerField returns the log field with the caller's name. It is empty if
// callers need no key.
func (q *request) callerField() zap.Field {
	if q.caller.Name == "" {
		return zap.Skip()
	}
	return zap.String("caller", q.caller.Name)
}

// isLate reports whether the client was too slow with its body. In that case,
// net/http's server cancels the request as if the client had left.
func (q *request) isLate() bool {
	return errors.Is(q.received.Failure(), os.ErrDeadlineExceeded)
}

// estimate returns the likely cost of the request to its caller.
func (q *request) estimate() ratelimit.Estimate {
	if q.Kind.IsHandshake() {
		return ratelimit.Estimate{Model: q.Model} // each response in it has its own
	}
	e := ratelimit.Estimate{Prompt: q.PromptTokens(q.received.Buffered()), Model: q.Model, Replies: q.Body.N,
		IsPart: q.inSession}
	if limit, ok := q.OutputLimit(); ok {
		e.Output = limit
	} else {
		e.Output = ratelimit.Undeclared
	}
	return e
}

// hasUnknownLength reports whether the prompt may have any length, because the
// body is not kept as a whole and its length is not declared. The estimate for
// a form does not depend on that.
func (q *request) hasUnknownLength() bool {
	return q.PromptLength > 0 && !q.received.Whole() && q.received.Length() < 0
}

// readsUsage reports whether to read usage from the reply to a request that is
// not known as inference. Its reply may report its own cost, or that of a
// background response.
func (q *request) readsUsage(b *balancer, bill *bill) bool {
	if q.Kind.Infers() {
		return false
	}
	id := q.ResponseID()
	return bill.countsTokens() && !q.showsStored() || b.usage.Awaits(id) ||
		b.admission != nil && b.admission.Awaits(id) || b.quotas != nil && b.quotas.Awaits(id)
}

// showsStored reports whether the reply shows a stored answer.
func (q *request) showsStored() bool {
	return openaiapi.ShowsStored(q.asked.Method, q.Route.Operation)
}

// release frees the data that only another attempt would need. A reply may
// stream for minutes, and must not hold the prompt that long.
func (q *request) release() {
	q.received.Release()
	q.credentials = keys.Presented{}
	if q.secret != nil {
		q.secret.text = ""
	}
}
