// Package callers limits what each caller may use. It has the options of callers and tiers with their
// checks, and the answers to requests that a limit refuses. Package meter counts, and [Tally] adds up what
// callers use at all replicas.
package callers

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/meter"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// Config has the options about callers.
type Config struct {
	// Callers are what callers may use: keys with the same name share limits. Default: no limits.
	//
	//	caller <name>|* deny
	//	caller <name>|* {
	Callers []Caller `json:"callers,omitempty"`

	// Tiers are classes of callers, the most important one first, and how much of a backend each may use; repeatable, at most
	// 8. Default: none.
	//
	//	tier <name> [<percent>%]
	Tiers []Tier `json:"tiers,omitempty"`

	// Timezone is where days and months of limits begin: a name of the IANA database, such as `Europe/Berlin`. Default: UTC.
	//
	//	timezone <name>
	Timezone string `json:"timezone,omitempty"`
}

// Caller is what one caller may use.
type Caller struct {
	// Name is the name of its client keys. `*` is each caller without its own entry,
	// counted separately. Required.
	Name string `json:"name"`

	// Requests are limits of the number of requests, one for each unit. Default: none.
	//
	//	requests <n>/<unit> [then <tier>]
	Requests []Limit `json:"requests,omitempty"`

	// Tokens are limits of the number of tokens, one for each unit. Default: none.
	//
	//	tokens <n>/<unit> [then <tier>]
	Tokens []Limit `json:"tokens,omitempty"`

	// MaxRequests is how many requests the caller may have at a time. Default: no limit.
	//
	//	max_requests <n>
	MaxRequests *int `json:"max_requests,omitempty"`

	// Models are the models that the caller may use. Default: all.
	//
	//	models <name...>
	Models []string `json:"models,omitempty"`

	// Backends are the only backends that the caller's requests may use, by their names, in which `*` stands for any characters.
	// Default: all.
	//
	//	backends <name...>
	Backends []string `json:"backends,omitempty"`

	// ServiceTiers are the service tiers that the caller may name, also in `x-ms-service-tier`: flex, default, priority or
	// auto. Default: all in bodies.
	//
	//	service_tiers <tier...>
	ServiceTiers []string `json:"service_tiers,omitempty"`

	// Tier is the tier of the caller's requests. Default: the last one.
	//
	//	tier <name>
	Tier string `json:"tier,omitempty"`

	// Deny refuses all requests of the caller with a 403, and excludes the other options. With
	// the name `*`, a client key is good only for callers with their own entry. Default: false.
	Deny bool `json:"deny,omitempty"`
}

// Limit is how much a caller may use in a second, a minute, an hour, a day or a month.
type Limit struct {
	// Limit is a number and a unit, such as `200k/minute`. The number is a whole
	// number from 1 to 10^15, which may end in k, M or G. The unit is second, minute,
	// hour, day or month. Required.
	Limit string `json:"limit"`

	// Then is the tier of requests over the limit. Default: they are refused.
	Then string `json:"then,omitempty"`
}

// Tier is a class of callers.
type Tier struct {
	// Name is the tier's name. Required.
	Name string `json:"name"`

	// Ceiling is how much of a backend may be used for the tier's requests to go
	// there, in percent, while callers of a better tier use the model. It is below
	// that of the tier before. Only the first tier may be without one. Default: no ceiling.
	Ceiling *int `json:"ceiling,omitempty"`
}

// everyOther is the name of the entry for callers without their own.
const everyOther = "*"

// maxTiers is how many tiers there may be.
const maxTiers = 8

// Ceilings returns the ceiling of each tier, in percent.
func (c *Config) Ceilings() []int {
	var ceilings []int
	for _, t := range c.Tiers {
		ceilings = append(ceilings, t.ceiling())
	}
	return ceilings
}

func (t Tier) ceiling() int {
	if t.Ceiling == nil {
		return 100
	}
	return *t.Ceiling
}

// Check returns what is wrong with the options, if anything is. named reports whether callers have client
// keys, and backends are those of the pool. nil: they are not known yet.
func (c *Config) Check(named bool, backends []Backend) error {
	if len(c.Tiers) > maxTiers {
		return fmt.Errorf("tier '%s': expected at most %d tiers", c.Tiers[maxTiers].Name, maxTiers)
	}
	if _, err := c.Location(); err != nil {
		return err
	}
	for i, t := range c.Tiers {
		if err := c.checkTier(i, t); err != nil {
			return fmt.Errorf("tier '%s'%w", t.Name, err)
		}
	}
	for i, caller := range c.Callers {
		err := c.checkCaller(caller, backends)
		switch {
		case err != nil:
		case slices.ContainsFunc(c.Callers[:i], func(other Caller) bool { return other.Name == caller.Name }):
			err = errors.New(" is given twice: expected one block with all of its limits")
		case !named:
			err = errors.New(" requires client_key or client_keys_file, because callers need names")
		}
		if err != nil {
			return fmt.Errorf("caller '%s'%w", caller.Name, err)
		}
	}
	return nil
}

func (c *Config) checkTier(i int, t Tier) error {
	ceiling := t.ceiling()
	switch {
	case t.Name == "":
		return errors.New(" has no name")
	case slices.ContainsFunc(c.Tiers[:i], func(other Tier) bool { return other.Name == t.Name }):
		return errors.New(" is given twice")
	case i > 0 && t.Ceiling == nil:
		return fmt.Errorf(" has no ceiling, and only the first tier may be without one: expected 'tier %s <percent>%%', below the %d%% of the more important tier '%s'", t.Name, c.Tiers[i-1].ceiling(), c.Tiers[i-1].Name)
	case ceiling < 1 || ceiling > 100:
		return fmt.Errorf(": ceiling '%d%%' is not from 1%% to 100%%", ceiling)
	case i > 0 && ceiling >= c.Tiers[i-1].ceiling():
		return fmt.Errorf(": ceiling '%d%%' is not below that of the more important tier '%s', which is %d%%", ceiling, c.Tiers[i-1].Name, c.Tiers[i-1].ceiling())
	}
	return nil
}

func (c *Config) checkCaller(caller Caller, backends []Backend) error {
	if caller.Name == "" {
		return errors.New(" has no name: expected the name of a client key, or *")
	}
	limits, err := caller.limits()
	if err != nil {
		return err
	}
	if caller.Deny && !caller.withoutOptions() {
		return errors.New(": deny excludes all other options")
	}
	for _, l := range limits {
		if l.Then != "" && !c.hasTier(l.Then) {
			return fmt.Errorf(": %s %s: %s", l.Kind, l, c.noTier(l.Then))
		}
	}
	if caller.MaxRequests != nil && *caller.MaxRequests < 1 {
		return fmt.Errorf(": max_requests '%d' is not a whole number of 1 or more", *caller.MaxRequests)
	}
	if err := checkBackends(caller.Backends, backends); err != nil {
		return err
	}
	models := modelsOf(backends, caller.Backends)
	if caller.Models != nil && len(caller.Models) == 0 {
		return errors.New(": models is an empty list: expected at least one name")
	}
	for i, model := range caller.Models {
		switch {
		case model == "":
			return errors.New(": models has an empty name")
		case slices.Contains(caller.Models[:i], model):
			return fmt.Errorf(": model '%s' is given twice", model)
		case models != nil && !slices.Contains(models, model):
			return fmt.Errorf(": no backend %shas the model '%s': expected some of %s", ofThese(caller.Backends), model, strings.Join(models, ", "))
		}
	}
	if caller.ServiceTiers != nil && len(caller.ServiceTiers) == 0 {
		return errors.New(": service_tiers is an empty list: expected at least one name")
	}
	for i, tier := range caller.ServiceTiers {
		switch {
		case !openaiapi.IsServiceTier(tier):
			return fmt.Errorf(": service tier '%s' is not known: expected some of %s", tier, openaiapi.ServiceTierNames())
		case slices.Contains(caller.ServiceTiers[:i], tier):
			return fmt.Errorf(": service tier '%s' is given twice", tier)
		}
	}
	if caller.Tier != "" && !c.hasTier(caller.Tier) {
		return errors.New(": " + c.noTier(caller.Tier))
	}
	return nil
}

// withoutOptions reports whether nothing but deny is set.
func (c Caller) withoutOptions() bool {
	return len(c.Requests)+len(c.Tokens)+len(c.Models)+len(c.Backends)+len(c.ServiceTiers) == 0 && c.MaxRequests == nil && c.Tier == ""
}

// limits reads the limits.
func (c Caller) limits() (limits []meter.Limit, err error) {
	for _, of := range []struct {
		kind   meter.Kind
		limits []Limit
	}{{meter.Requests, c.Requests}, {meter.Tokens, c.Tokens}} {
		for _, text := range of.limits {
			l, err := meter.ParseLimit(of.kind, text.Limit)
			if err != nil {
				return nil, fmt.Errorf(": %w", err)
			}
			l.Then = text.Then
			if slices.ContainsFunc(limits, func(other meter.Limit) bool { return other.ID() == l.ID() }) {
				return nil, fmt.Errorf(": %s per %s is given twice: '%s'", l.Kind, l.Unit, text.Limit)
			}
			limits = append(limits, l)
		}
	}
	return limits, nil
}

func (c *Config) hasTier(name string) bool { return slices.Contains(c.tierNames(), name) }

func (c *Config) tierNames() (names []string) {
	for _, t := range c.Tiers {
		names = append(names, t.Name)
	}
	return names
}

// tierOf returns the tier of a caller with this option.
func (c *Config) tierOf(option string) string {
	if option == "" && len(c.Tiers) > 0 {
		return c.Tiers[len(c.Tiers)-1].Name
	}
	return option
}

func (c *Config) noTier(name string) string {
	if len(c.Tiers) == 0 {
		return "tier '" + name + "' is not declared: expected 'tier " + name + " [<percent>%]' in openai_lb"
	}
	return "tier '" + name + "' is not declared: expected one of " + strings.Join(c.tierNames(), ", ")
}

// Location returns where days and months begin.
func (c *Config) Location() (*time.Location, error) {
	if c.Timezone == "" {
		return time.UTC, nil
	}
	location, err := time.LoadLocation(c.Timezone)
	if err != nil || c.Timezone == "Local" { // replicas may be in several places
		return nil, fmt.Errorf("timezone '%s' is not known: expected a name of the IANA database, such as UTC or Europe/Berlin", c.Timezone)
	}
	return location, nil
}

// Unused returns warnings about entries that have no effect. known reports whether a client key has that
// name.
func (c *Config) Unused(known func(name string) bool) (warnings []string) {
	others := slices.ContainsFunc(c.Callers, func(caller Caller) bool { return caller.Name == everyOther })
	used, tiers := map[string]bool{c.tierOf(""): !others && len(c.Callers) > 0}, c.tierNames()
	if len(tiers) == 1 {
		warnings = append(warnings, "tier '"+tiers[0]+"' is the only one, so it has no effect: all callers are in it")
	}
	for _, caller := range c.Callers {
		own := c.tierOf(caller.Tier)
		warnings = append(warnings, caller.mistakes()...)
		if caller.Name != everyOther && !known(caller.Name) {
			warnings = append(warnings, "caller '"+caller.Name+"' has no client key, so its limits have no effect")
		}
		used[own] = true
		for _, l := range slices.Concat(caller.Requests, caller.Tokens) {
			if used[l.Then] = true; l.Then != "" && slices.Index(tiers, l.Then) <= slices.Index(tiers, own) {
				warnings = append(warnings, "caller '"+caller.Name+"': '"+l.Limit+" then "+l.Then+"' changes no tier, because '"+l.Then+"' is not less important than the caller's tier '"+own+"'")
			}
		}
	}
	for _, t := range c.Tiers {
		if !used[t.Name] {
			warnings = append(warnings, "tier '"+t.Name+"' has no caller, so it has no effect")
		}
	}
	return warnings
}

// ParseCeiling reads a ceiling such as 80%.
func ParseCeiling(text string) (percent int, err error) {
	digits, isPercent := strings.CutSuffix(text, "%")
	percent, err = strconv.Atoi(digits)
	if err != nil || !isPercent || percent < 1 || percent > 100 {
		return 0, fmt.Errorf("ceiling '%s' is not a percentage from 1%% to 100%%, such as 80%%", text)
	}
	return percent, nil
}
