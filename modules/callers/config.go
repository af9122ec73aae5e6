package callers

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/calleroptions"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

// These are the options, by short names.
type (
	// Caller is the block of options of one caller.
	Caller = calleroptions.Caller
	// Tier is a class of callers.
	Tier = calleroptions.Tier
	// Limit is how much a caller may use in a unit of time.
	Limit = calleroptions.Limit
	// Allowance limits one caller, or each caller of a tier.
	Allowance = calleroptions.Allowance
)

// Config has the options about callers. Its methods read and check them.
type Config calleroptions.Config

// everyOther is the name of the block for callers without their own block.
const everyOther = "*"

// maxTiers is the maximum number of tiers.
const maxTiers = 8

// Check returns an error if an option is not valid. named reports whether
// callers have names. backends are those of the pool, or nil if they are not
// known yet.
func (c *Config) Check(named bool, backends []seam.NamedBackend) error {
	if len(c.Tiers) > maxTiers {
		return fmt.Errorf("tier '%s': expected at most %d tiers", c.Tiers[maxTiers].Name, maxTiers)
	}
	if _, err := c.Location(); err != nil {
		return err
	}
	for i, t := range c.Tiers {
		if err := c.checkTier(i, t); err != nil {
			return err
		}
		if err := c.checkAllowance(tierNamed(t.Name), t.Allowance, backends); err != nil {
			return err
		}
		if !named && (t.Reserve != nil || !isEmpty(t.Allowance)) {
			return errUnnamed(tierNamed(t.Name))
		}
	}
	if c.CallersFile != nil && !named {
		return errUnnamed("callers_file")
	}
	given := make(map[string]bool, len(c.Callers))
	for _, caller := range c.Callers {
		switch err := c.checkCaller(caller, backends); {
		case err != nil:
			return err
		case given[caller.Name]:
			return fmt.Errorf("%s is given twice: expected one block with all of its limits", callerNamed(caller.Name))
		case !named:
			return errUnnamed(callerNamed(caller.Name))
		}
		given[caller.Name] = true
	}
	return nil
}

// errUnnamed is the error of an option that needs the names of callers, in a
// pool where callers have no names. option is the option and its argument.
func errUnnamed(option string) error {
	return fmt.Errorf("%s requires client_key, client_keys_file or caller_identity, because callers need names", option)
}

// tierNamed names a tier in errors and warnings.
func tierNamed(name string) string { return "tier '" + name + "'" }

// callerNamed names a caller in errors and warnings.
func callerNamed(name string) string { return "caller '" + name + "'" }

// checkTier returns an error if an option of the i-th tier is not valid by
// itself or next to the tiers before it. It does not check the allowance.
func (c *Config) checkTier(i int, t Tier) error {
	switch {
	case t.Name == "":
		return fmt.Errorf("%s has no name", tierNamed(t.Name))
	case slices.ContainsFunc(c.Tiers[:i], func(other Tier) bool { return other.Name == t.Name }):
		return fmt.Errorf("%s is given twice", tierNamed(t.Name))
	case t.Reserve != nil && (*t.Reserve < 1 || *t.Reserve > 100):
		return fmt.Errorf("%s: reserve '%d%%' is not from 1%% to 100%%", tierNamed(t.Name), *t.Reserve)
	}
	all := 0
	for _, t := range c.Tiers[:i+1] {
		if t.Reserve != nil {
			all += *t.Reserve
		}
	}
	if t.Reserve != nil && all > 100 {
		return fmt.Errorf("%s: reserve '%d%%' makes the shares of all tiers %d%%, expected at most 100%%",
			tierNamed(t.Name), *t.Reserve, all)
	}
	if first := slices.IndexFunc(c.Tiers, func(other Tier) bool { return other.Default }); t.Default && first < i {
		return fmt.Errorf("%s: default is given twice: also for %s", tierNamed(t.Name), tierNamed(c.Tiers[first].Name))
	}
	return nil
}

func (c *Config) checkCaller(caller Caller, backends []seam.NamedBackend) error {
	switch {
	case caller.Name == "":
		return fmt.Errorf("%s has no name: expected the name of a client key, or *", callerNamed(caller.Name))
	case caller.Deny && !withoutOptions(caller):
		return fmt.Errorf("%s: deny excludes all other options", callerNamed(caller.Name))
	case caller.Tier != "" && !c.hasTier(caller.Tier):
		return fmt.Errorf("%s: %s", callerNamed(caller.Name), c.noTier(caller.Tier))
	}
	return c.checkAllowance(callerNamed(caller.Name), caller.Allowance, backends)
}

// withoutOptions reports whether a caller's block has no options besides deny.
func withoutOptions(c Caller) bool { return isEmpty(c.Allowance) && c.Tier == "" }

func (c *Config) hasTier(name string) bool { return slices.Contains(c.TierNames(), name) }

// TierNames returns the names of the tiers, in order of importance.
func (c *Config) TierNames() (names []string) {
	for _, t := range c.Tiers {
		names = append(names, t.Name)
	}
	return names
}

// QuotaTiers returns the tiers by their numbers. The first one, with number 0,
// is that of requests without a tier. QuotaTiers returns nil if no tier keeps a
// share.
func (c *Config) QuotaTiers() []quota.Tier {
	tiers, shares, kept := make([]quota.Tier, 1+len(c.Tiers)), new(quota.Shares), false
	for i, t := range c.Tiers {
		tiers[1+i] = quota.Tier{Number: 1 + i, Name: t.Name, Shares: shares}
		if t.Reserve != nil {
			shares[1+i], kept = float64(*t.Reserve)/100, true
		}
	}
	if !kept {
		return nil
	}
	return tiers
}

// defaultTier returns the name of the tier of callers that nothing else places.
// It returns "" if there are no tiers.
func (c *Config) defaultTier() (name string) {
	for _, t := range c.Tiers {
		if name = t.Name; t.Default {
			break
		}
	}
	return name
}

// CheckTiers returns an error if a tier that tokens may name is not declared.
func (c *Config) CheckTiers(ofTokens []string) error {
	for _, name := range ofTokens {
		if !c.hasTier(name) {
			return errors.New("caller_identity: " + c.noTier(name))
		}
	}
	return nil
}

func (c *Config) noTier(name string) string {
	if len(c.Tiers) == 0 {
		return "tier '" + name + "' is not declared: expected 'tier " + name + "' in openai_lb"
	}
	return "tier '" + name + "' is not declared: expected one of " + strings.Join(c.TierNames(), ", ")
}

// Location returns the time zone in which days and months begin.
func (c *Config) Location() (*time.Location, error) {
	if c.Timezone == "" {
		return time.UTC, nil
	}
	location, err := time.LoadLocation(c.Timezone)
	if err != nil || c.Timezone == "Local" { // replicas may be in several places
		return nil, fmt.Errorf("timezone '%s' is not known: expected a name of the IANA database, such as UTC or Europe/Berlin",
			c.Timezone)
	}
	return location, nil
}

// parsePercent parses a percentage such as 80%.
func parsePercent(text string) (percent int, err error) {
	digits, isPercent := strings.CutSuffix(text, "%")
	percent, err = strconv.Atoi(digits)
	if err != nil || !isPercent || percent < 1 || percent > 100 {
		return 0, fmt.Errorf("'%s' is not a percentage from 1%% to 100%%, such as 80%%", text)
	}
	return percent, nil
}

// Unused returns warnings about options that have no effect. names are the
// callers that have a client key. tiers are the tiers in which client_keys_file
// places callers. ofTokens are the tiers that tokens may name. It is nil if
// there are no tokens. With tokens, callers may have any name.
func (c *Config) Unused(names []string, tiers map[string]string, ofTokens []string) (warnings []string) {
	known := setOf(names)
	others := slices.ContainsFunc(c.Callers, func(caller Caller) bool { return caller.Name == everyOther })
	used, order := map[string]bool{c.defaultTier(): !others &&
		(ofTokens != nil || len(c.Callers)+len(names) > 0)}, c.TierNames()
	if len(c.Tiers) == 1 && isEmpty(c.Tiers[0].Allowance) {
		warnings = append(warnings, "tier '"+order[0]+"' is the only one, so it has no effect: all callers are in it")
	}
	ends := func(holder, prefix, tier string, a Allowance) {
		warnings = append(warnings, mistakes(a, holder)...)
		models := a.Models
		if in := slices.Index(order, tier); models == nil && in >= 0 {
			models = c.Tiers[in].Models
		}
		for _, l := range slices.Concat(a.Requests, a.Tokens) {
			if l.Model != "" && models != nil && !slices.Contains(models, l.Model) {
				warnings = append(warnings,
					holder+": '"+l.Limit+" "+l.Model+"' has no effect, because models does not include '"+l.Model+"'")
			}
			if used[l.Then] = true; l.Then != "" && slices.Index(order, l.Then) <= slices.Index(order, tier) {
				warnings = append(warnings,
					holder+": '"+l.Limit+" then "+l.Then+"' changes no tier, because '"+l.Then+
						"' is not less important than "+prefix+"'"+tier+"'")
			}
		}
	}
	for _, caller := range c.Callers {
		holder, tier := callerNamed(caller.Name), cmp.Or(caller.Tier, tiers[caller.Name], c.defaultTier())
		in := slices.IndexFunc(c.Tiers, func(t Tier) bool { return t.Name == tier })
		if withoutOptions(caller) && !caller.Deny && (in < 0 || isEmpty(c.Tiers[in].Allowance)) {
			warnings = append(warnings, holder+" has no options, so nothing limits it")
		}
		if caller.Name != everyOther && ofTokens == nil && !known[caller.Name] {
			warnings = append(warnings, holder+" has no client key, so its limits have no effect")
		}
		used[tier] = true
		ends(holder, "the caller's tier ", tier, caller.Allowance)
	}
	for _, tier := range slices.AppendSeq(slices.Clone(ofTokens), maps.Values(tiers)) {
		used[tier] = true
	}
	for _, t := range c.Tiers {
		ends(tierNamed(t.Name), "", t.Name, t.Allowance)
	}
	for _, t := range c.Tiers {
		if !used[t.Name] {
			warnings = append(warnings, tierNamed(t.Name)+" has no caller, so it has no effect")
		}
	}
	return warnings
}

// mistakes returns warnings about limits that have no effect.
func mistakes(a Allowance, holder string) (warnings []string) {
	limits, _ := parseLimits(a, holder) // they were checked
	for _, shorter := range limits {
		for _, longer := range limits {
			applies := longer.Model == "" || longer.Model == shorter.Model
			if shorter.Kind == longer.Kind && applies && longer.Amount < shorter.Amount && longer.Then == "" &&
				shorter.Unit <= longer.Unit {
				warnings = append(warnings,
					holder+": '"+shorter.Kind.String()+" "+shorter.String()+"' has no effect, because "+
						longer.String()+" is less")
			}
		}
	}
	return warnings
}
