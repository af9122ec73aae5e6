// Package callers limits the use of each caller.
//
// A caller is identified by a name. The block `caller <name>` has the caller's
// limits. A caller without a block has those of the block `caller *`. A limit
// that the block does not name comes from the caller's tier.
//
// [Callers] implements [seam.Admission]. Package limiter counts the use and
// admits requests; Callers configures its limiters by the options, answers the
// requests that they refuse, and saves the use. The use outlives reloads and
// restarts, even if several processes share a storage
// (TestProcessesWithOneStorageDoNotForgetWhatTheOthersUsed). Other replicas
// hear of it by [seam.Replication].
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

	"github.com/openai-lb/caddy-openai-lb/internal/quota"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

// Config has the options about callers.
type Config struct {
	// Callers are the limits of callers: keys with the same name share limits.
	// Default: no limits.
	//
	//	caller <name>|* deny
	//	caller <name>|* {
	Callers []Caller `json:"callers,omitempty"`

	// CallersFile is a file with blocks of `caller` that is read again when it
	// changes: limits, the tier and `deny`. Default: none.
	//
	//	callers_file <path>
	CallersFile *string `json:"callers_file,omitempty"`

	// Tiers are classes of callers, the most important one first; repeatable,
	// at most 8. Default: none.
	//
	//	tier <name> [default]
	//	tier <name> [default] {
	Tiers []Tier `json:"tiers,omitempty"`

	// Timezone is where days and months of limits begin: a name of the IANA
	// database, such as `Europe/Berlin`. Default: UTC.
	//
	//	timezone <name>
	Timezone string `json:"timezone,omitempty"`
}

// Caller is the block of options of one caller.
type Caller struct {
	// Name is the name of its client keys. `*` is each caller without its own
	// entry, counted separately. Required.
	Name string `json:"name"`

	// Allowance has the limits in the caller's block. A line of its tier that
	// its block does not have applies, too.
	Allowance

	// Tier is the tier of the caller's requests. Default: that of its line in
	// client_keys_file, or of its token, or the default tier.
	//
	//	tier <name>
	Tier string `json:"tier,omitempty"`

	// Deny refuses all requests of the caller with a 403, and excludes the
	// other options. With the name `*`, a client key is good only for callers
	// with their own entry. Default: false.
	Deny bool `json:"deny,omitempty"`
}

// Limit is how much a caller may use in a second, a minute, an hour, a day or a
// month.
type Limit struct {
	// Limit is a number and a unit, such as `200k/minute`. The number is a
	// whole number from 1 to 10^15, which may end in k, M or G. The unit is
	// second, minute, hour, day or month. Required.
	Limit string `json:"limit"`

	// Then is the tier of requests over the limit. Default: they are refused.
	Then string `json:"then,omitempty"`
}

// Tier is a class of callers.
type Tier struct {
	// Name is the tier's name. Required.
	Name string `json:"name"`

	// Reserve is the share of its backends that the tier keeps for its
	// requests, in percent, while they ask for the model. The shares of all
	// tiers are at most 100%. Default: none; the tier gets what others leave.
	//
	//	reserve <percent>%
	Reserve *int `json:"reserve,omitempty"`

	// Default makes it the tier of callers for which nothing else names one.
	// Default: the last tier is.
	Default bool `json:"default,omitempty"`

	// Allowance has the limits of each caller of the tier. A limit in the
	// caller's own block replaces the same limit here.
	Allowance
}

// everyOther is the name of the block for callers without their own block.
const everyOther = "*"

// maxTiers is the maximum number of tiers.
const maxTiers = 8

// Check returns an error if an option is not valid. named reports whether
// callers have names. backends are those of the pool, or nil if they are not
// known yet.
func (c *Config) Check(named bool, backends []seam.Backend) error {
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
		if err := c.checkAllowance(t.who(), t.Allowance, backends); err != nil {
			return err
		}
		if !named && (t.Reserve != nil || !t.isEmpty()) {
			return errUnnamed(t.who())
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
			return fmt.Errorf("%s is given twice: expected one block with all of its limits", caller.who())
		case !named:
			return errUnnamed(caller.who())
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

// who names the tier in errors and warnings.
func (t Tier) who() string { return "tier '" + t.Name + "'" }

// who names the caller in errors and warnings.
func (c Caller) who() string { return "caller '" + c.Name + "'" }

// checkTier returns an error if an option of the i-th tier is not valid by
// itself or next to the tiers before it. It does not check the allowance.
func (c *Config) checkTier(i int, t Tier) error {
	switch {
	case t.Name == "":
		return fmt.Errorf("%s has no name", t.who())
	case slices.ContainsFunc(c.Tiers[:i], func(other Tier) bool { return other.Name == t.Name }):
		return fmt.Errorf("%s is given twice", t.who())
	case t.Reserve != nil && (*t.Reserve < 1 || *t.Reserve > 100):
		return fmt.Errorf("%s: reserve '%d%%' is not from 1%% to 100%%", t.who(), *t.Reserve)
	}
	all := 0
	for _, t := range c.Tiers[:i+1] {
		if t.Reserve != nil {
			all += *t.Reserve
		}
	}
	if t.Reserve != nil && all > 100 {
		return fmt.Errorf("%s: reserve '%d%%' makes the shares of all tiers %d%%, expected at most 100%%",
			t.who(), *t.Reserve, all)
	}
	if first := slices.IndexFunc(c.Tiers, func(other Tier) bool { return other.Default }); t.Default && first < i {
		return fmt.Errorf("%s: default is given twice: also for %s", t.who(), c.Tiers[first].who())
	}
	return nil
}

func (c *Config) checkCaller(caller Caller, backends []seam.Backend) error {
	switch {
	case caller.Name == "":
		return fmt.Errorf("%s has no name: expected the name of a client key, or *", caller.who())
	case caller.Deny && !caller.withoutOptions():
		return fmt.Errorf("%s: deny excludes all other options", caller.who())
	case caller.Tier != "" && !c.hasTier(caller.Tier):
		return fmt.Errorf("%s: %s", caller.who(), c.noTier(caller.Tier))
	}
	return c.checkAllowance(caller.who(), caller.Allowance, backends)
}

// withoutOptions reports whether the block has no options besides deny.
func (c Caller) withoutOptions() bool { return c.isEmpty() && c.Tier == "" }

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
	if len(c.Tiers) == 1 && c.Tiers[0].isEmpty() {
		warnings = append(warnings, "tier '"+order[0]+"' is the only one, so it has no effect: all callers are in it")
	}
	ends := func(who, whose, tier string, a Allowance) {
		warnings = append(warnings, a.mistakes(who)...)
		for _, l := range slices.Concat(a.Requests, a.Tokens) {
			if used[l.Then] = true; l.Then != "" && slices.Index(order, l.Then) <= slices.Index(order, tier) {
				warnings = append(warnings,
					who+": '"+l.Limit+" then "+l.Then+"' changes no tier, because '"+l.Then+
						"' is not less important than "+whose+"'"+tier+"'")
			}
		}
	}
	for _, caller := range c.Callers {
		who, tier := caller.who(), cmp.Or(caller.Tier, tiers[caller.Name], c.defaultTier())
		in := slices.IndexFunc(c.Tiers, func(t Tier) bool { return t.Name == tier })
		if caller.withoutOptions() && !caller.Deny && (in < 0 || c.Tiers[in].isEmpty()) {
			warnings = append(warnings, who+" has no options, so nothing limits it")
		}
		if caller.Name != everyOther && ofTokens == nil && !known[caller.Name] {
			warnings = append(warnings, who+" has no client key, so its limits have no effect")
		}
		used[tier] = true
		ends(who, "the caller's tier ", tier, caller.Allowance)
	}
	for _, tier := range slices.AppendSeq(slices.Clone(ofTokens), maps.Values(tiers)) {
		used[tier] = true
	}
	for _, t := range c.Tiers {
		ends(t.who(), "", t.Name, t.Allowance)
	}
	for _, t := range c.Tiers {
		if !used[t.Name] {
			warnings = append(warnings, t.who()+" has no caller, so it has no effect")
		}
	}
	return warnings
}

// mistakes returns warnings about limits that have no effect.
func (a Allowance) mistakes(who string) (warnings []string) {
	limits, _ := a.limits(who) // they were checked
	for _, shorter := range limits {
		for _, longer := range limits {
			if shorter.Kind == longer.Kind && shorter.Unit < longer.Unit && longer.Amount < shorter.Amount &&
				longer.Then == "" {
				warnings = append(warnings,
					who+": '"+shorter.Kind.String()+" "+shorter.String()+"' has no effect, because "+longer.String()+" is less")
			}
		}
	}
	return warnings
}
