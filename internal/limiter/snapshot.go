package limiter

import (
	"maps"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// Snapshot returns the state of the caller.
func (c *Limiter) Snapshot(now time.Time) ratelimit.Snapshot {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.roll(now)
	c.confirm(at)
	s := ratelimit.Snapshot{Name: c.name, Tier: c.tier.name, InFlight: c.inFlight, MaxRequests: c.maxRequests,
		Busy: c.busy, Reserved: c.reserved, Ratio: c.usual.ratio(), Output: c.usual.output,
		Estimated: c.usual.estimated, Reported: c.usual.reported, Hour: c.hour.snapshot(at)}
	for _, m := range c.all() {
		if m.limit.Amount > 0 {
			s.Limits = append(s.Limits, c.useOf(m, at))
		}
	}
	for _, model := range slices.Sorted(maps.Keys(c.models)) {
		s.Limits = append(s.Limits, c.models[model].Snapshot(now).Limits...)
	}
	if c.sharing.Apart {
		if c.maxRequests > 0 {
			s.MaxRequests = int(c.slots(at))
		}
		s.Replicas = c.sharing.Replicas
	}
	s.Today = c.counters[counted[0]].use(at)
	s.Month = c.counters[counted[1]].use(at)
	return s
}

// Tightest returns, for each kind, the limit of a request for the model with
// the smallest fraction left. The Amount of its Limit is 0 if there is no limit
// of that kind.
func (c *Limiter) Tightest(now time.Time, model string) (tightest [ratelimit.Kinds]ratelimit.Use) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if m := c.models[model]; m != nil {
		tightest = m.Tightest(now, "")
	}
	at := c.roll(now)
	c.confirm(at)
	for id, m := range c.all() {
		if m.limit.Amount == 0 {
			continue
		}
		u, t := c.useOf(m, at), &tightest[id.Kind()]
		if t.Limit.Amount == 0 || part(&u) < part(t) {
			*t = u
		}
	}
	return tightest
}

func part(u *ratelimit.Use) float64 { return float64(u.Left()) / float64(max(1, u.Allowed)) }

func (c *Limiter) useOf(m *counter, at int64) ratelimit.Use {
	used := m.use(at)
	u := ratelimit.Use{Limit: m.limit, Allowed: c.shown(m, at, used), Used: used, Ends: time.Unix(0, m.end),
		Refused: m.refused, Demoted: m.demoted}
	if u.Used > 0 {
		u.Reset = m.wait(at, m.limit.Amount, Sharing{}) // until nothing is used, if nothing else is
	}
	return u
}
