package callers

import "github.com/openai-lb/caddy-openai-lb/internal/quota"

// QuotaTiers returns the tiers by their numbers. The first is that of requests without a caller. It returns
// nil if no tier keeps a share.
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
