package callers

import (
	"cmp"
	"maps"
	"slices"

	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

// blocks are the options of all callers in the current config.
type blocks struct {
	// byName are the blocks of callers with their own block, and others is the
	// block of all other callers. named reports whether the config has a block
	// for these, and limits whether it limits any caller.
	byName        map[string]*block
	others        *block
	named, limits bool
}

// use applies the blocks of the options.
func (c *Callers) use(o *Options) {
	made := &blocks{byName: make(map[string]*block), others: c.blockOf(o, Caller{Name: everyOther})}
	for _, caller := range o.Callers {
		if b := c.blockOf(o, caller); caller.Name == everyOther {
			made.others, made.named = b, true
		} else {
			made.byName[caller.Name] = b
		}
	}
	made.limits = len(o.Callers) > 0 || slices.ContainsFunc(o.Tiers, func(t Tier) bool { return !isEmpty(t.Allowance) })
	c.blocks.Store(made)
}

// block holds the options of one caller with its own block, or of all other
// callers, in each tier.
type block struct {
	// fixed reports whether the caller's own block names its tier. If it does
	// not, usual is the entry of a caller that nothing else places in a tier.
	fixed bool
	usual *entry
	// inTier are the entries by tier.
	inTier map[string]*entry
}

// entry holds the options of a caller in one tier.
type entry struct {
	seam.Grant
	settings limiter.Settings
	// empty reports whether no option limits the caller.
	empty bool
}

// blockOf returns the options of a caller in each tier.
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

// entryOf returns the options of a caller in tier t.
func (c *Callers) entryOf(o *Options, caller Caller, t Tier) *entry {
	a := orAllowance(caller.Allowance, t.Allowance)
	limits, _ := parseLimits(a, "") // they were checked
	e := &entry{empty: isEmpty(a), settings: limiter.Settings{
		Limits: limits, Tier: t.Name, Tiers: o.TierNames(), Location: c.location,
	}}
	e.Denied, e.Backends, e.ServiceTiers, e.Limited = caller.Deny, c.setOf(a.Backends), a.ServiceTiers, len(limits) > 0
	e.Models, e.Listed = modelsAmong(a.Models, modelsOf(o.Backends, a.Backends))
	if a.MaxRequests != nil {
		e.settings.MaxRequests = *a.MaxRequests
	}
	for _, l := range limits {
		e.LimitsTokens = e.LimitsTokens || l.Kind == ratelimit.Tokens
		if l.Model != "" && !slices.Contains(e.LimitedModels, l.Model) {
			e.LimitedModels = append(e.LimitedModels, l.Model)
		}
	}
	return e
}

// Place places callers in tiers, by name, until the next call. It has no effect
// for a caller whose own block names a tier.
func (c *Callers) Place(tiers map[string]string) {
	if len(tiers) == 0 && c.placed.Load() == nil {
		return
	}
	c.placed.Store(new(maps.Clone(tiers)))
	if c.started.Load() { // what was used stays
		c.configure()
	}
}

func (c *Callers) of(name string) *entry {
	b := c.block(name)
	if b.fixed {
		return b.usual
	}
	if placed := c.placed.Load(); placed != nil {
		if e := b.inTier[(*placed)[name]]; e != nil {
			return e
		}
	}
	if tokens := c.byToken.Load(); tokens != nil {
		if e := b.inTier[tokens.of(name).tier]; e != nil {
			return e
		}
	}
	return b.usual
}

func (c *Callers) block(name string) *block {
	all := c.blocks.Load()
	if b, ok := all.byName[name]; ok {
		return b
	}
	return all.others
}

// setOf returns the number of a list of backends.
func (c *Callers) setOf(names []string) int {
	i := slices.IndexFunc(c.sets, func(other []string) bool { return slices.Equal(other, names) })
	if i < 0 {
		i = len(c.sets)
		c.sets = append(c.sets, names)
	}
	return i
}
