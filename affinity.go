package openailb

import (
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// checkAffinity checks what depends on other options: whether the pool shares state, and its callers are named.
func (h *Handler) checkAffinity(shares, named bool) error {
	switch {
	case h.Affinity == nil:
	case h.Affinity.LookupTimeout != 0 && !shares:
		return errors.New("affinity: lookup_timeout is not used without state")
	case h.Affinity.Callers == affinity.Strict && !named:
		return errors.New("affinity: callers strict requires client_key or client_keys_file, because callers need names")
	}
	return nil
}

func (h *Handler) provisionAffinity(ctx caddy.Context) (err error) {
	if err := h.checkAffinity(h.link != nil, h.clientKeys != nil); err != nil {
		return err
	}
	config := affinity.Config{Options: h.Affinity, Pool: h.Pool, Link: h.link, Logger: h.logger}
	findAllModels(h.balancer.targets)
	for _, t := range h.balancer.targets {
		config.Accounts = append(config.Accounts, t.backend.AccountKey)
	}
	if h.affinity, err = affinity.New(ctx, config); h.affinity == nil {
		return err
	}
	return observe.On(ctx, observe.Started, h.affinity.Start)
}

// place finds out which accounts may get the request. It returns the answer if none
// may. A list is that of the first account.
func (ex *exchange) place(a *affinity.Affinity) (none apierror.Answer) {
	api := &ex.api
	if a != nil && api.Body.TooManyIDs() {
		return apierror.TooManyIDs(openaiapi.MaxIDs).Answer(ex.request)
	}
	r := affinity.Request{
		Method: openaiapi.MethodOf(ex.request), Operation: api.Route.Operation, RawQuery: ex.request.URL.RawQuery,
		Body: &api.Body, Text: api.received.Buffered(), Caller: api.caller.Name,
		Upgrade: api.Kind.IsHandshake(), Compressed: api.Clarity == openaiapi.Opaque, Disputed: openaiapi.DisputedType(ex.request.Header),
	}
	if !api.received.Whole() {
		r.CutAt = ex.balancer.sender.RequestBuffers
	}
	placement, refusal, refused := a.Place(r)
	if refused {
		answer := refusal.Answer(ex.request)
		if refusal == apierror.OwnersUnknown {
			answer.Header.Set("Retry-After", "1")
		}
		return answer
	}
	if api.placement = placement; placement.IsList() {
		ex.settleList()
	}
	api.affinity.Maker = api.placement.Maker()
	return none
}

// hasAllModels reports whether an account serves all models of the pool, or none does.
func (b *balancer) hasAllModels(account string) bool {
	some := false
	for _, t := range b.targets {
		if t.allModels && t.backend.AccountKey == account {
			return true
		}
		some = some || t.allModels
	}
	return !some
}

// stayHome has a request wait for the account where its caller's objects are, if that throttles for less than a minute:
// an object elsewhere could not be used with them. Clients retry then.
func stayHome(ex *exchange, now time.Time) {
	k := ex.api.affinity.Maker
	if k == nil || k.Order == 0 || k.Home == "" || !ex.balancer.Pool.IsSoonBack(ex, k.Home, now) {
		return
	}
	if ex.api.Model != "" || ex.balancer.hasAllModels(k.Home) {
		ex.api.placement.Settle(k.Home)
	}
}

// settleList has a list come from the first account by priority, or from the
// account where objects without a model are made.
func (ex *exchange) settleList() {
	var first *target
	for _, t := range ex.balancer.targets {
		if t.backend.Takes(&ex.api.Request, ex.api.anonymous) && (first == nil || t.allModels && !first.allModels) {
			first = t
		}
	}
	if first != nil {
		ex.api.placement.Settle(first.backend.AccountKey)
	}
}

// findAllModels finds the backends of accounts that serve all models of the pool.
// A backend that serves any model adds models that no list has.
func findAllModels(targets []*target) {
	lists := make(map[string][]string) // by account
	serveAny := make(map[string]bool)
	var models []string
	for _, t := range targets {
		account := t.backend.AccountKey
		serveAny[account] = serveAny[account] || t.backend.Models == nil
		lists[account] = slices.AppendSeq(lists[account], maps.Keys(t.backend.Models))
		models = slices.AppendSeq(models, maps.Keys(t.backend.Models))
	}
	listed := !slices.Contains(slices.Collect(maps.Values(serveAny)), true)
	for _, t := range targets {
		account := t.backend.AccountKey
		t.allModels = serveAny[account] ||
			listed && !slices.ContainsFunc(models, func(model string) bool { return !slices.Contains(lists[account], model) })
	}
}
