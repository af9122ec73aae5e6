package callers

import "github.com/openai-lb/caddy-openai-lb/internal/quota"

// QuotaTiers returns the tiers by their numbers. The first is that of requests without a caller. It returns
// nil if there are none.
func (c *Config) QuotaTiers() []quota.Tier {
	if len(c.Tiers) == 0 {
		return nil
	}
	tiers := make([]quota.Tier, 1+len(c.Tiers))
	for i, t := range c.Tiers {
		tiers[1+i].Number, tiers[1+i].Name = 1+i, t.Name
		if t.Ceiling != nil {
			tiers[1+i].Ceiling = float64(*t.Ceiling) / 100
		}
	}
	return tiers
}
