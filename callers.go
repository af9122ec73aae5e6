package openailb

import (
	"net/http"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/callers"
	"github.com/openai-lb/caddy-openai-lb/internal/meter"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// provisionCallers sets up the limits of callers, if there are any.
func (h *Handler) provisionCallers(ctx caddy.Context) error {
	if err := h.Config.Check(h.clientKeys != nil, h.models); err != nil {
		return err
	}
	names := h.clientKeys.Names()
	for _, warning := range h.Unused(func(name string) bool { return slices.Contains(names, name) }) {
		h.logger.Warn(warning)
	}
	var storage certmagic.Storage
	if h.link == nil { // otherwise other replicas remember what was used
		storage = ctx.Storage()
	}
	if h.callers = callers.New(callers.Options{Config: h.Config, Pool: h.Pool, Storage: storage, Logger: h.logger, Crossed: h.balancer.events.Crossed}); h.callers == nil {
		return nil
	}
	h.balancer.Callers, h.balancer.tiers = callers.MetersOf(h.Pool), h.QuotaTiers()
	h.balancer.Unlimited = func() []string { return h.callers.Unlimited(h.clientKeys.Names()) }
	h.clientKeys.Watch(h.warnOfUnlimited)
	h.link.Share(h.Pool, h.balancer.Callers)
	return observe.On(ctx, observe.Started, h.callers.Start)
}

// warnOfUnlimited warns of the callers with these names that have no limits.
func (h *Handler) warnOfUnlimited(names []string) {
	if unlimited := h.callers.Unlimited(names); unlimited != nil {
		h.logger.Warn("client keys without a caller block have no limits: 'caller *' limits or refuses them", zap.String("pool", h.Pool), zap.Strings("callers", unlimited))
	}
}

// modelsOf returns the models that the caller of a request may use. nil: any.
func (h *Handler) modelsOf(ex *exchange) []string {
	if models := h.callers.Models(ex.api.caller.Name); models != nil {
		return models
	}
	return h.models
}

// shortBody is the size of bodies that are usually there as soon as the request is.
const shortBody = 64 << 10

// receive reads the body of the request, or returns the answer if that cannot be read, or if its caller is over a
// limit: otherwise a caller could fill the memory with uploads. For the same reason, a longer body is one of the requests
// that its caller has at a time while it comes.
func (h *Handler) receive(ex *exchange, route openaiapi.Route) (none apierror.Answer) {
	if length := ex.request.ContentLength; h.callers != nil && length != 0 {
		now, name := time.Now(), ex.api.caller.Name
		var refusal *meter.Refusal
		ex.admission, refusal = h.callers.Exceeded(now, name, likelyCost(ex.request, route))
		if refusal != nil && !ex.mayWaitFor(refusal, now) {
			ex.admission.Refused(refusal)
			return h.refused(ex, refusal)
		}
		if length < 0 || length > shortBody {
			if refusal = ex.admission.Upload(); refusal != nil {
				return h.refused(ex, refusal)
			}
			defer ex.admission.Uploaded()
		}
	}
	if err := ex.buffer(h.Sender.RequestBuffers); err != nil {
		return apierror.UnreadableBody(err).Answer(ex.request)
	}
	return none
}

// likelyCost estimates the cost of a request before its body is read, without the output. Of a long body, most may be
// pictures.
func likelyCost(r *http.Request, route openaiapi.Route) (e meter.Estimate) {
	if openaiapi.CostsTokens(r, route) {
		e.Prompt = max(1, openaiapi.PromptCost(min(r.ContentLength, shortBody)))
	}
	return e
}

// refused returns the answer to a request that a limit refuses.
func (h *Handler) refused(ex *exchange, refusal *meter.Refusal) apierror.Answer {
	h.balancer.metrics.Limited(ex.api.caller.Label, refusal)
	return h.callers.Refuse(ex.request, time.Now(), ex.api.caller.Name, refusal)
}

// limit charges the request to its caller, or returns the answer if the caller may not send it.
func (h *Handler) limit(ex *exchange) (none apierror.Answer) {
	if h.callers == nil {
		return none
	}
	api, name := &ex.api, ex.api.caller.Name
	if models := h.callers.Models(name); models != nil {
		if e, refused := api.mayNotUse(models, h.Sender.RequestBuffers); refused {
			return e.Answer(ex.request)
		}
	}
	if api.Clarity == openaiapi.Opaque && api.NeedsModel && h.callers.SeesEach(name) {
		return apierror.CompressedBody.Answer(ex.request)
	}
	estimate := meter.Estimate{Prompt: api.PromptTokens(api.received.Buffered()), Model: api.Model, Replies: api.Body.N}
	if estimate.Prompt > 0 && api.hasUnknownLength() && h.callers.LimitsTokens(name) {
		return apierror.UnknownLength(h.Sender.RequestBuffers).Answer(ex.request)
	}
	if limit, ok := api.OutputLimit(); ok {
		estimate.Output = limit
	} else if !api.Kind.IsHandshake() { // the tokens of a WebSocket cannot be seen
		estimate.Output = meter.Undeclared
	}
	var refusal *meter.Refusal
	if ex.admission, refusal = ex.admitCaller(h.callers, name, estimate); refusal != nil {
		if ex.hasLeft() {
			return h.callers.Refuse(ex.request, time.Now(), name, refusal)
		}
		return h.refused(ex, refusal)
	}
	for id := range ex.admission.Demoted {
		h.balancer.metrics.Demoted(api.caller.Label, id)
	}
	return none
}

// mayNotUse returns the error if the request is not certain to be for one of these models.
func (a *apiRequest) mayNotUse(models []string, buffers int64) (e apierror.Error, refused bool) {
	needsModel := a.NeedsModel || a.MayInfer
	if needsModel && !a.Whole && !a.Body.Whole && a.Body.HasModel {
		return apierror.PerhapsAnotherModel(buffers), true
	}
	if needsModel && !a.ModelInPath() {
		switch {
		case a.Clarity == openaiapi.Opaque:
			return apierror.CompressedBody, true
		case a.CutOff():
			return apierror.ModelBeyondBuffer(buffers), true
		case a.Clarity == openaiapi.Unclear, a.HidesModel(a.received.Buffered()), !a.NamesModel(), a.Body.NamesSeveral():
			return apierror.MissingModel(models), true
		}
	}
	if a.Model != "" && !slices.Contains(models, a.Model) {
		return apierror.UnknownModel(a.Model, models), true
	}
	if model, found := a.Unlisted(a.received.Buffered(), models); found {
		return apierror.UnknownModel(model, models), true
	}
	return apierror.Error{}, false
}

// readsUsage reports whether the reply to a request that is not known as inference may say what that, or a response in
// the background, has cost.
func (ex *exchange) readsUsage() bool {
	return !ex.api.Kind.Infers() && (ex.admission.CountsTokens() && !ex.showsStored() || ex.admission.Awaits(ex.api.ResponseID()))
}

func (ex *exchange) showsStored() bool {
	return openaiapi.ShowsStored(openaiapi.MethodOf(ex.request), ex.api.Route.Operation)
}

// settle replaces the estimate by what the request has cost. It is over.
func (ex *exchange) settle() {
	if !ex.admission.Open() {
		return
	}
	now, cost, tokens := time.Now(), ex.cost(), ex.record.tokens
	if ex.api.Body.Background && cost.Prompt > 0 && !tokens.Known() {
		ex.admission.Leave(now, ex.record.usage.ID())
	} else {
		ex.admission.Settle(now, cost)
	}
	if id := ex.api.ResponseID(); id != "" && tokens.Known() {
		ex.admission.SettleLeft(now, id, meter.Cost{Requests: 1, Prompt: tokens.Input, Output: tokens.Output})
	}
	ex.balancer.waiting.Wake(now, ex.api.caller.Name)
}

// cost returns what the request has cost its caller. What the balancer refuses costs nothing, and neither does a
// failure of the backends. An error of the client's own costs a request, and so does a failure because of the request.
func (ex *exchange) cost() meter.Cost {
	if len(ex.tries.attempts) == 0 {
		return meter.Cost{}
	}
	a := ex.attempted()
	if ex.record.from != nil {
		a = ex.record.from
	}
	status := ex.record.status
	failed := status >= 500 || status == http.StatusTooManyRequests
	switch a.class {
	case verdict.Served, verdict.BrokenStream, verdict.ClientLeft, verdict.ClientLeftWaiting:
		if !failed && (status < 400 || a.class != verdict.Served) {
			return ex.tokensCost(a.class)
		}
	case verdict.ClientError:
		failed = false
	default:
		failed = true
	}
	if failed && !failedByItself(ex.tries.attempts) {
		return meter.Cost{}
	}
	return meter.Cost{Requests: 1}
}

// failedByItself reports whether a request that no backend served failed because of itself: it is too large, or
// two backends failed.
func failedByItself(attempts []try) bool {
	var at *target
	for i := range attempts {
		switch a := &attempts[i]; {
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

// tokensCost returns what the reply has cost: the tokens that it reports. Without a report, these are the estimate of the
// prompt and what the content has at least. A reply that was cut would have more: it costs the request's estimate at
// least.
func (ex *exchange) tokensCost(class verdict.Class) meter.Cost {
	tokens, estimated := ex.record.tokens, false
	if ex.admission.Prompt() == 0 && (!tokens.Known() || ex.showsStored()) {
		return meter.Cost{Requests: 1} // no model has answered
	}
	cut := ex.record.aborted || class == verdict.BrokenStream
	if cut || !tokens.Known() {
		tokens, estimated = ex.record.usage.Estimate(ex.admission.Prompt())
	}
	if !tokens.Known() {
		tokens.Input, estimated = ex.admission.Prompt(), true
	}
	if limit, ok := ex.api.OutputLimit(); estimated && ok && limit == 0 {
		tokens.Output = 0 // some repeat what they were asked
	} else if estimated && cut {
		tokens.Output = max(tokens.Output, ex.admission.Output())
	}
	return meter.Cost{Requests: 1, Prompt: tokens.Input, Output: tokens.Output, Counted: !estimated && !cut, Model: ex.api.Model}
}
