package openailb

import (
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

// grantOf returns what a caller may use.
func (d *reader) grantOf(caller keys.Caller) *seam.Grant {
	if d.admission == nil {
		return d.everything
	}
	return d.admission.Grant(caller)
}

// isDenied reports whether all requests of a caller are refused. If so, it
// counts the request.
func (d *reader) isDenied(g *seam.Grant, name string) bool {
	if g.Denied {
		d.countRefusal(name, ratelimit.ByDeny)
	}
	return g.Denied
}

// countRefusal counts a request that was refused for a reason other than a
// limit.
func (d *reader) countRefusal(name string, reason int) {
	now := time.Now()
	d.admission.Caller(now, name).RefusedBy(now, reason)
}

// mayUse checks the model and the service tier of a request. If it is not
// certain that the caller may use both, mayUse counts the refusal and returns
// the error. received is the part of the body that was received so far.
func (d *reader) mayUse(g *seam.Grant, name string, q *openaiapi.Request,
	received []byte) (e apierror.Error, refused bool) {
	if g.Models != nil || g.LimitedModels != nil {
		if e, refused = mayUseModel(g.Models, q, received, d.buffers); refused {
			d.countRefusal(name, ratelimit.ByModel)
			return e, true
		}
	}
	if g.ServiceTiers != nil {
		if e, refused = mayUseTier(g.ServiceTiers, q, received, d.buffers); refused {
			d.countRefusal(name, ratelimit.ByServiceTier)
		}
	}
	return e, refused
}

// mayUseModel returns the error for a request that is not certain to be for one
// of the models or, if models is nil, for the model that it seems to name. Such
// a request might evade the limit of a model.
func mayUseModel(models []string, q *openaiapi.Request, received []byte,
	buffers int64) (e apierror.Error, refused bool) {
	needsModel := q.NeedsModel || q.MayInfer
	if needsModel && !q.Whole && !q.Body.Whole && q.Body.HasModel {
		return apierror.PerhapsAnotherModel(buffers), true
	}
	if needsModel && !q.ModelInPath() {
		switch {
		case q.Clarity == openaiapi.Opaque:
			return apierror.CompressedBody, true
		case q.CutOff():
			return apierror.ModelBeyondBuffer(buffers), true
		case q.Clarity == openaiapi.Unclear, q.HidesModel(received), q.Body.NamesSeveral(),
			models != nil && !q.NamesModel():
			return apierror.MissingModel(models), true
		}
	}
	if models == nil {
		return apierror.Error{}, false
	}
	if q.Model != "" && !slices.Contains(models, q.Model) {
		return apierror.UnknownModel(q.Model, models), true
	}
	if model, found := q.Unlisted(received, models); found {
		return apierror.UnknownModel(model, models), true
	}
	return apierror.Error{}, false
}

// mayUseTier returns the error for a request that is not certain to have either
// no service tier or one of the tiers.
func mayUseTier(tiers []string, q *openaiapi.Request, received []byte, buffers int64) (e apierror.Error, refused bool) {
	if !q.MayTakeServiceTier() {
		return apierror.Error{}, false
	}
	switch {
	case q.Clarity == openaiapi.Opaque:
		return apierror.CompressedBody, true
	case q.HidesServiceTier(received):
		return apierror.ServiceTierHidden(buffers), true
	}
	for _, tier := range []string{q.HeaderTier, q.Body.ServiceTier} {
		if tier != "" && !slices.Contains(tiers, tier) && !slices.Contains(tiers, openaiapi.SynonymOf(tier)) {
			return apierror.ServiceTierRefused(tier, tiers), true
		}
	}
	return apierror.Error{}, false
}
