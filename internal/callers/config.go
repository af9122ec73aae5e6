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
)

// Config has the options about callers.
type Config struct {
	// Callers are what callers may use: keys with the same name share limits. Default: no limits.
	//
	//	caller <name>|* deny
	//	caller <name>|* {
	Callers []Caller `json:"callers,omitempty"`

	// Tiers are classes of callers, the most important one first; repeatable, at most 8. Default: none.
	//
	//	tier <name> [default]
	//	tier <name> [default] {
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

	// Allowance is what its block says. A line of its tier that its block does not have applies, too.
	Allowance

	// Tier is the tier of the caller's requests. Default: that of its line in client_keys_file, or of its token, or the default tier.
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

	// Reserve is the share of its backends that the tier keeps for its requests, in percent, while they ask for the
	// model. The shares of all tiers are at most 100%. Default: none; the tier gets what others leave.
	//
	//	reserve <percent>%
	Reserve *int `json:"reserve,omitempty"`

	// Default makes it the tier of callers for which nothing else names one. Default: the last tier is.
	Default bool `json:"default,omitempty"`

	// Allowance is what each caller of the tier may use, unless the caller's block says otherwise.
	Allowance
}

// everyOther is the name of the entry for callers without their own.
const everyOther = "*"

// maxTiers is how many tiers there may be.
const maxTiers = 8

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
		err := c.checkTier(i, t)
		if err == nil {
			err = c.checkAllowance(t.Allowance, backends)
		}
		if err == nil && !named && (t.Reserve != nil || !t.isEmpty()) {
			err = errUnnamed
		}
		if err != nil {
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
			err = errUnnamed
		}
		if err != nil {
			return fmt.Errorf("caller '%s'%w", caller.Name, err)
		}
	}
	return nil
}

var errUnnamed = errors.New(" requires client_key, client_keys_file or caller_identity, because callers need names")

func (c *Config) checkTier(i int, t Tier) error {
	switch {
	case t.Name == "":
		return errors.New(" has no name")
	case slices.ContainsFunc(c.Tiers[:i], func(other Tier) bool { return other.Name == t.Name }):
		return errors.New(" is given twice")
	case t.Reserve != nil && (*t.Reserve < 1 || *t.Reserve > 100):
		return fmt.Errorf(": reserve '%d%%' is not from 1%% to 100%%", *t.Reserve)
	}
	all := 0
	for _, t := range c.Tiers[:i+1] {
		if t.Reserve != nil {
			all += *t.Reserve
		}
	}
	if t.Reserve != nil && all > 100 {
		return fmt.Errorf(": reserve '%d%%' makes the shares of all tiers %d%%, expected at most 100%%", *t.Reserve, all)
	}
	if first := slices.IndexFunc(c.Tiers, func(other Tier) bool { return other.Default }); t.Default && first < i {
		return fmt.Errorf(": default is given twice: also for tier '%s'", c.Tiers[first].Name)
	}
	return nil
}

func (c *Config) checkCaller(caller Caller, backends []Backend) error {
	switch {
	case caller.Name == "":
		return errors.New(" has no name: expected the name of a client key, or *")
	case caller.Deny && !caller.withoutOptions():
		return errors.New(": deny excludes all other options")
	case caller.Tier != "" && !c.hasTier(caller.Tier):
		return errors.New(": " + c.noTier(caller.Tier))
	}
	return c.checkAllowance(caller.Allowance, backends)
}

// withoutOptions reports whether nothing but deny is set.
func (c Caller) withoutOptions() bool { return c.isEmpty() && c.Tier == "" }

func (c *Config) hasTier(name string) bool { return slices.Contains(c.TierNames(), name) }

// TierNames returns the names of the tiers, in order of importance.
func (c *Config) TierNames() (names []string) {
	for _, t := range c.Tiers {
		names = append(names, t.Name)
	}
	return names
}

// defaultTier is the name of the tier of callers for which nothing names one. It is empty if there are no tiers.
func (c *Config) defaultTier() (name string) {
	for _, t := range c.Tiers {
		if name = t.Name; t.Default {
			break
		}
	}
	return name
}

// CheckTiers returns an error if one of the tiers that tokens may name is not declared.
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

// parsePercent reads a percentage such as 80%.
func parsePercent(text string) (percent int, err error) {
	digits, isPercent := strings.CutSuffix(text, "%")
	percent, err = strconv.Atoi(digits)
	if err != nil || !isPercent || percent < 1 || percent > 100 {
		return 0, fmt.Errorf("'%s' is not a percentage from 1%% to 100%%, such as 80%%", text)
	}
	return percent, nil
}
