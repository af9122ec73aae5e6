package openailb

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// exchange is the state of one request: what it asks for, its body, and which
// members it tried. It belongs to the goroutine that serves the request.
type exchange struct {
	pool      *pool
	transport *Transport // the one whose attempts these are, if it is ours
	request   *http.Request
	writer    http.ResponseWriter

	// maxAttempts is how many members the request may try. 0: all of them.
	maxAttempts int
	// deadline is when the last attempt may begin. Zero: any time.
	deadline time.Time

	asked asked
	body  body
	// bodyPending tells that body has not been read yet.
	bodyPending bool
	// caller is who sent the request, if callers need a key.
	caller caller
	// refused tells that it came with no such key.
	refused bool
	// credentials are what the caller identified itself with, for a backend
	// with auth passthrough.
	credentials credentials

	// current is the member that is attempted next or right now.
	current *member
	// chosen tells that current was not yet handed out to reverse_proxy.
	chosen bool
	// done tells that the client has its reply.
	done     bool
	attempts []attempt

	// last is the latest reply that says more than that a backend throttles.
	last *http.Response
	// suspected tells that a backend was benched for a fault that may be the
	// request's, so that it benches no other.
	suspected bool
	// refusedOnce tells that a backend was benched for refusing its credential.
	refusedOnce bool
	// forwarded tells that the request went to a member that throttles.
	forwarded bool

	cancels []context.CancelCauseFunc
}

// attempt is one member's answer to an exchange.
type attempt struct {
	member  *member
	class   verdict.Class
	status  int
	started time.Time
}

func newExchange(p *pool, w http.ResponseWriter, r *http.Request, maxAttempts int, tryDuration time.Duration) *exchange {
	ex := &exchange{pool: p, request: r, writer: w, maxAttempts: maxAttempts}
	if tryDuration > 0 {
		ex.deadline = time.Now().Add(tryDuration)
	}
	return ex
}

type exchangeCtxKey struct{}

// exchangeVar is where a plain reverse_proxy's selection leaves the exchange
// for the transport: a selection policy cannot change the request's context.
const exchangeVar = "openai_lb.exchange"

// exchangeOf returns the exchange that t makes attempts for. A request may
// pass several handlers, each with an exchange of its own.
func exchangeOf(ctx context.Context, t *Transport) *exchange {
	if ex, ok := ctx.Value(exchangeCtxKey{}).(*exchange); ok && ex.transport == t {
		return ex
	}
	if ex, ok := caddyhttp.GetVar(ctx, exchangeVar).(*exchange); ok && ex.transport == t {
		return ex
	}
	return nil
}

// proxied is the request as reverse_proxy gets it: with the exchange, and
// without the caller's credentials, which the exchange takes.
func (ex *exchange) proxied() *http.Request {
	r := ex.request.WithContext(context.WithValue(ex.request.Context(), exchangeCtxKey{}, ex))
	r.URL = cloneURL(r.URL)
	r.URL.Opaque = ""
	r.Header = r.Header.Clone()
	r.Trailer = nil // no operation has any, and they may hold whatever headers may
	if !strings.EqualFold(r.Header.Get("Upgrade"), "websocket") {
		// of all upgrades, these APIs have only this one; a client that offers
		// another, like h2c, must not make a request that no backend can take
		r.Header.Del("Upgrade")
	}
	ex.credentials = takeCredentials(r)
	return r
}

// readBody takes in the request's body, of which up to limit bytes are kept.
func (ex *exchange) readBody(r *http.Request, limit int64) error {
	if !ex.bodyPending {
		return nil
	}
	ex.bodyPending = false
	return ex.body.read(r, limit)
}

// model is what m calls the model that is asked for.
func (ex *exchange) model(m *member) string {
	if m.backend == nil {
		return ""
	}
	return m.backend.nameOf(ex.asked.model)
}

// mayTry reports whether the exchange may send its request to m: once, and
// after a backend that took the caller's own credential only to another such
// one, for what the caller's account is refused is not for ours to pay.
func (ex *exchange) mayTry(m *member) bool {
	return m.takes(&ex.asked) && !m.full() && !slices.ContainsFunc(ex.attempts, func(a attempt) bool {
		return a.member == m || a.member.passesThrough() && !m.passesThrough()
	})
}

// next moves on to another member, or returns nil if there is none, or none
// may be tried any more.
func (ex *exchange) next() *member {
	if ex.current != nil {
		ex.current.release()
		ex.current = nil
	}
	if ex.maxAttempts > 0 && len(ex.attempts) >= ex.maxAttempts ||
		!ex.deadline.IsZero() && len(ex.attempts) > 0 && time.Now().After(ex.deadline) {
		return nil
	}
	ex.current = ex.pool.pick(ex)
	ex.chosen = true
	return ex.current
}

// take hands out the member to attempt. If reverse_proxy comes again of its
// own accord, as it does with another transport, that is a further one.
func (ex *exchange) take() *member {
	if ex.done {
		return nil
	}
	if !ex.chosen {
		if ex.current != nil {
			ex.attempts = append(ex.attempts, attempt{member: ex.current})
		}
		if ex.next() == nil && ex.transport == nil {
			// without our transport, whether to go on is for reverse_proxy to say
			ex.attempts = ex.attempts[:0]
			ex.next()
		}
	}
	ex.chosen = false
	return ex.current
}

// keep holds on to a reply, in case nobody has a better one.
func (ex *exchange) keep(res *http.Response) {
	ex.dropLast()
	ex.last = res
}

func (ex *exchange) dropLast() {
	if ex.last != nil {
		ex.last.Body.Close()
		ex.last = nil
	}
}

// committed lets go of what only another attempt would need. A reply may
// stream for minutes, and must not hold the prompt for so long.
func (ex *exchange) committed() {
	ex.done = true
	ex.dropLast()
	ex.body.release()
	ex.credentials = credentials{}
}

// finish ends every attempt and gives back what the exchange holds.
func (ex *exchange) finish() {
	ex.dropLast()
	for _, cancel := range ex.cancels {
		cancel(context.Canceled)
	}
	if ex.current != nil {
		ex.current.release()
		ex.current = nil
	}
}

// report leaves what became of the exchange for logs, headers and metrics.
func (ex *exchange) report() {
	var backend, class string
	if len(ex.attempts) > 0 {
		last := ex.attempts[len(ex.attempts)-1]
		backend, class = last.member.name, string(last.class)
	} else if ex.refused {
		class = "unauthenticated"
	}
	requestsTotal.WithLabelValues(ex.caller.label, backend, class).Inc()
	if repl, ok := ex.request.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer); ok {
		repl.Set("http.openai_lb.caller", ex.caller.name)
		repl.Set("http.openai_lb.attempts", len(ex.attempts))
		repl.Set("http.openai_lb.model", modelKey(ex.asked.model))
		repl.Set("http.openai_lb.backend", backend)
		repl.Set("http.openai_lb.class", class)
	}
}
