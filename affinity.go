package openailb

import (
	"errors"
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/mediatype"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/tunnel"
)

func (h *Handler) checkAffinity(shares bool) error {
	if h.Affinity != nil && h.Affinity.LookupTimeout != 0 && !shares {
		return errors.New("affinity: lookup_timeout is not used without state")
	}
	return nil
}

func (h *Handler) provisionAffinity(ctx caddy.Context) (err error) {
	if err := h.checkAffinity(h.shared != nil); err != nil {
		return err
	}
	config := affinity.Config{Options: h.Affinity, Pool: h.Pool, Named: h.clientKeys != nil, Link: h.shared.Link(), Logger: h.logger}
	findAllModels(h.balancer.targets)
	for _, t := range h.balancer.targets {
		config.Accounts = append(config.Accounts, t.backend.account)
	}
	h.affinity, err = affinity.New(ctx, config)
	return err
}

// findHome finds out which accounts may get the request. It returns the answer
// and its class if none may. A list is that of the first account.
func (ex *exchange) findHome(a *affinity.Affinity) (own *http.Response, class string) {
	if a != nil && ex.asked.body.TooManyIDs() {
		return apierror.TooManyIDs(openaiapi.MaxIDs).Answer(ex.request)
	}
	r := affinity.Request{
		Method: tunnel.MethodOf(ex.request), Operation: ex.asked.operation, RawQuery: ex.request.URL.RawQuery,
		Body: &ex.asked.body, Text: ex.body.Buffered(), Caller: ex.caller.Name,
		Upgrade: tunnel.IsHandshake(ex.request), Compressed: ex.asked.opaque, Disputed: mediatype.Disputed(ex.request.Header),
	}
	if !ex.body.Whole() {
		r.CutAt = ex.balancer.transport.RequestBuffers
	}
	home, refusal, refused := a.Home(r)
	if refused {
		if own, class = refusal.Answer(ex.request); refusal == apierror.OwnersUnknown {
			own.Header.Set("Retry-After", "1")
		}
		return own, class
	}
	ex.home = home
	ex.wantsAllModels = home.Makes() && ex.asked.model == ""
	if home.IsList() {
		ex.settleList()
	}
	return nil, ""
}

// settleList has a list come from the first account by priority, or from the
// account where objects without a model are made.
func (ex *exchange) settleList() {
	var first *target
	for _, t := range ex.balancer.targets {
		if t.backend.takes(&ex.asked) && (first == nil || t.allModels && !first.allModels) {
			first = t
		}
	}
	if first != nil {
		ex.home.Settle(first.backend.account)
	}
}

// findAllModels finds the backends of accounts that serve all models of the pool.
// A backend that serves any model adds models that no list has.
func findAllModels(targets []*target) {
	lists := make(map[string][]string) // by account
	serveAny := make(map[string]bool)
	var models []string
	for _, t := range targets {
		account := t.backend.account
		serveAny[account] = serveAny[account] || t.backend.models == nil
		lists[account] = slices.AppendSeq(lists[account], maps.Keys(t.backend.models))
		models = slices.AppendSeq(models, maps.Keys(t.backend.models))
	}
	listed := !slices.Contains(slices.Collect(maps.Values(serveAny)), true)
	for _, t := range targets {
		account := t.backend.account
		t.allModels = serveAny[account] ||
			listed && !slices.ContainsFunc(models, func(model string) bool { return !slices.Contains(lists[account], model) })
	}
}

// mayHaveAllModels reports whether the request may go to a backend whose account
// serves all models of the pool. One that failed is tried, because a request that
// names the object goes there even then. New objects do not go to a drained one.
func (ex *exchange) mayHaveAllModels() bool {
	now := time.Now()
	return slices.ContainsFunc(ex.balancer.targets, func(t *target) bool {
		return t.allModels && !t.Drained() && !t.Lost() && !t.Full() && ex.isLeft(t) && t.backend.takes(&ex.asked) && !t.Throttles(ex, now)
	})
}

// mayBeElsewhere reports whether the request goes on to another account,
// because the current one does not have what the request names, and nobody
// knows who does.
func (ex *exchange) mayBeElsewhere(r *reply) bool {
	if r.class.Failover() || !r.missing || !ex.home.Asks() || !r.whole && !ex.body.Whole() || !r.upload().Abandon() {
		return false
	}
	ex.home.Missing(ex.current.backend.account)
	if ex.last != nil && !ex.lastMissing {
		r.discard() // a failure tells more: its backend may have the object
		return true
	}
	ex.keep(r.res)
	ex.lastMissing = true
	return true
}

// undecided reports whether the last reply says that an account does not have
// what the request names, while another account may have it, which could not be
// asked now.
func (ex *exchange) undecided() bool {
	if ex.last == nil || !ex.lastMissing {
		return false
	}
	_, nobody := ex.whyNobodyTakes()
	return !nobody
}

// learnFrom has the reply teach which objects the current account has.
func (ex *exchange) learnFrom(r *reply) {
	if r.body != nil {
		r.body.Lesson = ex.home.Lesson(ex.current.backend.account, r.res)
	}
}
