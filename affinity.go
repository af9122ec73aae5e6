package openailb

import (
	"errors"
	"net/http"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

func (h *Handler) provisionAffinity(ctx caddy.Context) (err error) {
	if h.Affinity != nil && h.Affinity.LookupTimeout != 0 && h.StateRaw == nil {
		return errors.New("affinity: lookup_timeout is not used without state")
	}
	config := affinity.Config{Options: h.Affinity, Pool: h.Pool, Link: h.shared.Link(), Logger: h.logger}
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
	home, refusal, refused := a.Home(affinity.Request{
		Method: ex.request.Method, Operation: ex.asked.operation, RawQuery: ex.request.URL.RawQuery,
		Body: &ex.asked.body, Text: ex.body.Buffered(), Caller: ex.caller.Name,
	})
	if refused {
		return refusal.Answer(ex.request)
	}
	ex.home = home
	for _, t := range ex.balancer.targets {
		if home.IsList() && t.backend.takes(&ex.asked) {
			ex.home.Settle(t.backend.account)
			break
		}
	}
	return nil, ""
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
