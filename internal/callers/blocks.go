package callers

import (
	"cmp"
	"slices"

	"github.com/openai-lb/caddy-openai-lb/internal/meter"
)

// block has the options of a config for one caller with its own block, or for all others.
type block struct {
	// fixed reports whether the caller's own block names the tier. Otherwise usual is good while nothing else does.
	fixed bool
	usual *entry
	// inTier are the callers by their tier.
	inTier map[string]*entry
}

// entry has the options of a config for a caller in a tier.
type entry struct {
	settings meter.Settings
	models   []string
	// listed are the models that the caller's backends have. nil: any.
	listed []string
	// set is the number of the list of backends.
	set    int
	tiers  []string // service tiers
	denied bool
	// empty reports whether nothing limits the caller.
	empty bool
	// limited reports whether there are limits, and tokens whether there are limits of tokens.
	limited, tokens bool
}

// blockOf returns the callers that have this block, in each tier.
func (c *Callers) blockOf(o *Options, caller Caller) *block {
	b := &block{fixed: caller.Tier != "" && caller.Name != everyOther, inTier: make(map[string]*entry)}
	for _, t := range o.Tiers {
		b.inTier[t.Name] = c.entryOf(o, caller, t)
	}
	if b.usual = b.inTier[cmp.Or(caller.Tier, o.defaultTier())]; b.usual == nil { // there are no tiers
		b.usual = c.entryOf(o, caller, Tier{})
	}
	return b
}

// entryOf returns the callers that have this block and this tier.
func (c *Callers) entryOf(o *Options, caller Caller, t Tier) *entry {
	a := caller.orOf(t.Allowance)
	limits, _ := a.limits() // they were checked
	e := &entry{set: c.setOf(a.Backends), tiers: a.ServiceTiers, denied: caller.Deny, empty: a.isEmpty(), limited: len(limits) > 0, settings: meter.Settings{
		Limits: limits, Tier: t.Name, Tiers: o.TierNames(), Location: c.location,
	}}
	e.models, e.listed = modelsAmong(a.Models, modelsOf(o.Backends, a.Backends))
	if a.MaxRequests != nil {
		e.settings.MaxRequests = *a.MaxRequests
	}
	e.tokens = slices.ContainsFunc(limits, func(l meter.Limit) bool { return l.Kind == meter.Tokens })
	return e
}

// Place places callers in tiers, by their names, until the next call. It changes nothing for one whose own block names a tier.
func (c *Callers) Place(tiers map[string]string) {
	if c == nil || len(tiers) == 0 && c.placed.Load() == nil {
		return
	}
	placed := make(map[string]*entry, len(tiers))
	for name, tier := range tiers {
		if b := c.block(name); !b.fixed {
			placed[name] = b.inTier[tier]
		}
	}
	c.placed.Store(&placed)
	if c.started.Load() { // what was used stays
		c.configure()
	}
}

func (c *Callers) of(name string) *entry {
	if placed := c.placed.Load(); placed != nil {
		if e := (*placed)[name]; e != nil {
			return e
		}
	}
	if tokens := c.byToken.Load(); tokens != nil {
		if e := tokens.of(name).entry; e != nil {
			return e
		}
	}
	return c.block(name).usual
}

func (c *Callers) block(name string) *block {
	if b, ok := c.byName[name]; ok {
		return b
	}
	return c.others
}

// setOf returns the number of a list.
func (c *Callers) setOf(names []string) int {
	i := slices.IndexFunc(c.sets, func(other []string) bool { return slices.Equal(other, names) })
	if i < 0 {
		i = len(c.sets)
		c.sets = append(c.sets, names)
	}
	return i
}
