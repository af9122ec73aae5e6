package callers

import (
	"slices"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// MayUse returns the error if the request, of whose body that much was
// received, is not certain to be for a model and a service tier that the caller
// may use, and counts it then. buffers is the option request_buffers.
func (c *Callers) MayUse(name string, q *openaiapi.Request, received []byte, buffers int64) (e apierror.Error, refused bool) {
	if models := c.Models(name); models != nil {
		if e, refused = mayUseModel(models, q, received, buffers); refused {
			c.refusedBy(name, limiter.ByModel)
			return e, true
		}
	}
	if tiers := c.ServiceTiers(name); tiers != nil {
		if e, refused = mayUseTier(tiers, q, received, buffers); refused {
			c.refusedBy(name, limiter.ByServiceTier)
		}
	}
	return e, refused
}

// mayUseModel returns the error if the request is not certain to be for one of
// these models.
func mayUseModel(models []string, q *openaiapi.Request, received []byte, buffers int64) (e apierror.Error, refused bool) {
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
		case q.Clarity == openaiapi.Unclear, q.HidesModel(received), !q.NamesModel(), q.Body.NamesSeveral():
			return apierror.MissingModel(models), true
		}
	}
	if q.Model != "" && !slices.Contains(models, q.Model) {
		return apierror.UnknownModel(q.Model, models), true
	}
	if model, found := q.Unlisted(received, models); found {
		return apierror.UnknownModel(model, models), true
	}
	return apierror.Error{}, false
}

// mayUseTier returns the error if the request is not certain to have one of
// these service tiers, or none.
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
