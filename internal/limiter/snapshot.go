package limiter

import (
	"maps"
	"slices"
	"time"
)

// Use is the use of a limit.
type Use struct {
	// Limit is the limit. If its Amount is 0, the use is only counted.
	Limit Limit
	// Allowed is how much this replica may use: all of it, or its share.
	Allowed, Used int64
	// Ends is when the current window ends. Reset is the time until nothing
	// counts as used.
	Ends  time.Time
	Reset time.Duration
	// Refused is how many requests this limit has refused. Demoted is how many
	// it has moved to another tier.
	Refused, Demoted uint64
}

// Ratio returns the used fraction of Allowed. It may be above 1.
func (u *Use) Ratio() float64 { return float64(u.Used) / float64(max(1, u.Allowed)) }

// Left returns how much of Allowed is not used.
func (u *Use) Left() int64 { return max(0, u.Allowed-u.Used) }

// Snapshot is the state of a caller.
type Snapshot struct {
	// Tier is the caller's tier. It is empty if the caller has none.
	Name, Tier string
	// Limits are the caller's limits, by kind and then by unit: those of all
	// models, and then those of each model.
	Limits []Use
	// Today and Month are the tokens used in the current day and month.
	Today, Month int64
	// InFlight is the number of requests in flight here. MaxRequests is their
	// maximum at all replicas, or this replica's part while it does not hear
	// the others. Busy is how many requests were refused because of it.
	InFlight, MaxRequests int
	Busy                  uint64
	// Reserved is the tokens that the requests in flight were charged with.
	Reserved int64
	// Ratio is the usual ratio of a prompt's tokens to its length. Output is
	// the usual output in tokens.
	Ratio, Output float64
	// Estimated is the average number of tokens that the last requests were
	// charged with. Reported is the average that backends counted for them.
	// Both are 0 without such requests.
	Estimated, Reported float64
	// Replicas is the number of replicas if they share the limits without
	// hearing each other. Otherwise it is 0.
	Replicas int
	Hour     LastHour
}

// Snapshot returns the state of the caller.
func (c *Caller) Snapshot(now time.Time) Snapshot {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.roll(now)
	c.confirm(at)
	s := Snapshot{Name: c.name, Tier: c.tier.name, InFlight: c.inFlight, MaxRequests: c.maxRequests, Busy: c.busy,
		Reserved: c.reserved,
		Ratio:    c.usual.ratio(), Output: c.usual.output, Estimated: c.usual.estimated, Reported: c.usual.reported,
		Hour: c.hour.snapshot(at)}
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
func (c *Caller) Tightest(now time.Time, model string) (tightest [kinds]Use) {
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

func part(u *Use) float64 { return float64(u.Left()) / float64(max(1, u.Allowed)) }

func (c *Caller) useOf(m *counter, at int64) Use {
	used := m.use(at)
	u := Use{Limit: m.limit, Allowed: c.shown(m, at, used), Used: used, Ends: time.Unix(0, m.end), Refused: m.refused,
		Demoted: m.demoted}
	if u.Used > 0 {
		u.Reset = m.wait(at, m.limit.Amount, Sharing{}) // until nothing is used, if nothing else is
	}
	return u
}
