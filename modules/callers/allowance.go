package callers

import (
	"fmt"
	"slices"
	"strings"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

// isEmpty reports whether no option of an allowance is set, so that there are
// no limits.
func isEmpty(a Allowance) bool {
	return len(a.Requests)+len(a.Tokens)+len(a.Models)+len(a.Backends)+len(a.ServiceTiers) == 0 && a.MaxRequests == nil
}

// orAllowance returns the allowance of a caller in a tier. An option that the
// caller's own allowance a does not set has the tier's value. Limits with
// different units or models are different options.
func orAllowance(a, tier Allowance) Allowance {
	a.Requests, a.Tokens = orLimits(ratelimit.Requests, a.Requests, tier.Requests),
		orLimits(ratelimit.Tokens, a.Tokens, tier.Tokens)
	if a.MaxRequests == nil {
		a.MaxRequests = tier.MaxRequests
	}
	for _, list := range []struct{ caller, tier *[]string }{
		{&a.Models, &tier.Models}, {&a.Backends, &tier.Backends}, {&a.ServiceTiers, &tier.ServiceTiers},
	} {
		if *list.caller == nil {
			*list.caller = *list.tier
		}
	}
	return a
}

// orLimits returns the caller's limits, and the tier's limits for other units
// and models. All of them must be valid.
func orLimits(kind ratelimit.Kind, caller, tier []Limit) []Limit {
	unit := func(l Limit) ratelimit.Unit {
		limit, _ := ratelimit.ParseLimit(kind, l.Limit)
		return limit.Unit
	}
	return slices.Concat(caller, slices.DeleteFunc(slices.Clone(tier), func(l Limit) bool {
		return slices.ContainsFunc(caller,
			func(other Limit) bool { return unit(other) == unit(l) && other.Model == l.Model })
	}))
}

// checkAllowance returns an error if an option of an allowance is not valid.
// holder names the caller or the tier in errors. backends are the pool's
// backends: see [Config.Check].
func (c *Config) checkAllowance(holder string, a Allowance, backends []seam.NamedBackend) error {
	limits, err := parseLimits(a, holder)
	if err != nil {
		return err
	}
	for _, l := range limits {
		if l.Then != "" && !c.hasTier(l.Then) {
			return fmt.Errorf("%s: %s %s: %s", holder, l.Kind, l, c.noTier(l.Then))
		}
	}
	if a.MaxRequests != nil && *a.MaxRequests < 1 {
		return fmt.Errorf("%s: max_requests '%d' is not a whole number of 1 or more", holder, *a.MaxRequests)
	}
	if err := checkBackends(holder, a.Backends, backends); err != nil {
		return err
	}
	if err := checkModels(holder, a, limits, backends); err != nil {
		return err
	}
	if a.ServiceTiers != nil && len(a.ServiceTiers) == 0 {
		return fmt.Errorf("%s: service_tiers is an empty list: expected at least one name", holder)
	}
	for i, tier := range a.ServiceTiers {
		switch {
		case !openaiapi.IsServiceTier(tier):
			return fmt.Errorf("%s: service tier '%s' is not known: expected some of %s",
				holder, tier, openaiapi.ServiceTierNames())
		case slices.Contains(a.ServiceTiers[:i], tier):
			return fmt.Errorf("%s: service tier '%s' is given twice", holder, tier)
		}
	}
	return nil
}

// checkModels returns an error if no backend has a model of an allowance.
func checkModels(holder string, a Allowance, limits []ratelimit.Limit, backends []seam.NamedBackend) error {
	if a.Models == nil && !slices.ContainsFunc(limits, func(l ratelimit.Limit) bool { return l.Model != "" }) {
		return nil
	}
	models := modelsOf(backends, a.Backends)
	known := setOf(models)
	check := func(model string) error {
		if models == nil || known[model] {
			return nil
		}
		may := ""
		if a.Backends != nil {
			may = "that it may use "
		}
		return fmt.Errorf("%s: no backend %shas the model '%s': expected some of %s",
			holder, may, model, strings.Join(models, ", "))
	}
	err := checkNames(holder, "model", a.Models, check)
	for _, l := range limits {
		if err == nil && l.Model != "" {
			err = check(l.Model)
		}
	}
	return err
}

// checkNames returns an error if a list of names is empty, has an empty name or
// a name twice, or if check returns one. holder names the caller or the tier in
// errors, and what is a word for one name, such as model.
func checkNames(holder, what string, names []string, check func(name string) error) error {
	if names != nil && len(names) == 0 {
		return fmt.Errorf("%s: %ss is an empty list: expected at least one name", holder, what)
	}
	given := make(map[string]bool, len(names))
	for _, name := range names {
		switch {
		case name == "":
			return fmt.Errorf("%s: %ss has an empty name", holder, what)
		case given[name]:
			return fmt.Errorf("%s: %s '%s' is given twice", holder, what, name)
		}
		if err := check(name); err != nil {
			return err
		}
		given[name] = true
	}
	return nil
}

// parseLimits parses the limits of an allowance. holder names the caller or the
// tier in errors.
func parseLimits(a Allowance, holder string) (limits []ratelimit.Limit, err error) {
	for _, of := range []struct {
		kind   ratelimit.Kind
		limits []Limit
	}{{ratelimit.Requests, a.Requests}, {ratelimit.Tokens, a.Tokens}} {
		for _, text := range of.limits {
			l, err := ratelimit.ParseLimit(of.kind, text.Limit)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", holder, err)
			}
			l.Model, l.Then = text.Model, text.Then
			if slices.ContainsFunc(limits,
				func(other ratelimit.Limit) bool { return other.ID() == l.ID() && other.Model == l.Model }) {
				return nil, fmt.Errorf("%s: %s per %s is given twice: '%s'",
					holder, l.Kind, ofModel(l.Unit.String(), l.Model), text.Limit)
			}
			limits = append(limits, l)
		}
	}
	return limits, nil
}

// ofModel adds the model of a limit to a text. It is empty if requests for all
// models count.
func ofModel(text, model string) string {
	if model == "" {
		return text
	}
	return text + " of " + model
}
