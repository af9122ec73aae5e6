package callers

import (
	"cmp"
	"maps"
	"slices"
)

// Unused returns warnings about options that have no effect. names are those of the callers that have a client key, tiers
// are the tiers that client_keys_file names for callers, and ofTokens those that tokens may name. If these are nil, there are
// no tokens, and otherwise callers may have any name.
func (c *Config) Unused(names []string, tiers map[string]string, ofTokens []string) (warnings []string) {
	others := slices.ContainsFunc(c.Callers, func(caller Caller) bool { return caller.Name == everyOther })
	used, order := map[string]bool{c.defaultTier(): !others && (ofTokens != nil || len(c.Callers)+len(names) > 0)}, c.TierNames()
	if len(c.Tiers) == 1 && c.Tiers[0].isEmpty() {
		warnings = append(warnings, "tier '"+order[0]+"' is the only one, so it has no effect: all callers are in it")
	}
	ends := func(who, whose, tier string, a Allowance) {
		warnings = append(warnings, a.mistakes(who)...)
		for _, l := range slices.Concat(a.Requests, a.Tokens) {
			if used[l.Then] = true; l.Then != "" && slices.Index(order, l.Then) <= slices.Index(order, tier) {
				warnings = append(warnings, who+": '"+l.Limit+" then "+l.Then+"' changes no tier, because '"+l.Then+"' is not less important than "+whose+"'"+tier+"'")
			}
		}
	}
	for _, caller := range c.Callers {
		who, tier := "caller '"+caller.Name+"'", cmp.Or(caller.Tier, tiers[caller.Name], c.defaultTier())
		in := slices.IndexFunc(c.Tiers, func(t Tier) bool { return t.Name == tier })
		if caller.withoutOptions() && !caller.Deny && (in < 0 || c.Tiers[in].isEmpty()) {
			warnings = append(warnings, who+" has no options, so nothing limits it")
		}
		if caller.Name != everyOther && ofTokens == nil && !slices.Contains(names, caller.Name) {
			warnings = append(warnings, who+" has no client key, so its limits have no effect")
		}
		used[tier] = true
		ends(who, "the caller's tier ", tier, caller.Allowance)
	}
	for _, tier := range slices.AppendSeq(slices.Clone(ofTokens), maps.Values(tiers)) {
		used[tier] = true
	}
	for _, t := range c.Tiers {
		ends("tier '"+t.Name+"'", "", t.Name, t.Allowance)
	}
	for _, t := range c.Tiers {
		if !used[t.Name] {
			warnings = append(warnings, "tier '"+t.Name+"' has no caller, so it has no effect")
		}
	}
	return warnings
}

// mistakes returns warnings about limits that have no effect.
func (a Allowance) mistakes(who string) (warnings []string) {
	limits, _ := a.limits() // they were checked
	for _, shorter := range limits {
		for _, longer := range limits {
			if shorter.Kind == longer.Kind && shorter.Unit < longer.Unit && longer.Amount < shorter.Amount && longer.Then == "" {
				warnings = append(warnings, who+": '"+shorter.Kind.String()+" "+shorter.String()+"' has no effect, because "+longer.String()+" is less")
			}
		}
	}
	return warnings
}
