package limiter

import "time"

// Use is how much of a limit is used.
type Use struct {
	// Limit is the limit. Amount 0: there is none, and the use is only counted.
	Limit Limit
	// Allowed is how much this replica may use: all of it, or its share.
	Allowed, Used int64
	// Ends is when the current window ends, and Reset how long it takes until
	// nothing is used.
	Ends  time.Time
	Reset time.Duration
	// Refused and Demoted are how many requests this limit has refused or given
	// another tier.
	Refused, Demoted uint64
}

// Ratio returns which part is used, 0 to 1 and above.
func (u *Use) Ratio() float64 { return float64(u.Used) / float64(max(1, u.Allowed)) }

// Left returns how much is left.
func (u *Use) Left() int64 { return max(0, u.Allowed-u.Used) }

// Snapshot is the state of a caller.
type Snapshot struct {
	// Tier is the caller's own tier. Empty: it has none.
	Name, Tier string
	// Limits are the limits, by kind and then by unit.
	Limits []Use
	// Today and Month are the tokens of this day and this month.
	Today, Month int64
	// InFlight are the requests that are not over, MaxRequests how many there
	// may be, and Busy how many were refused for that.
	InFlight, MaxRequests int
	Busy                  uint64
	// Reserved are the tokens that requests in flight were charged with.
	Reserved int64
	// Ratio is that of a prompt's tokens to its length, and Output the usual
	// output.
	Ratio, Output float64
	// Estimated and Reported are the average tokens that the last requests were
	// charged with, and that backends reported in the end. They are 0 without
	// such requests.
	Estimated, Reported float64
	// Replicas is how many replicas share the limits without hearing each
	// other, or 0.
	Replicas int
	Hour     LastHour
}

// Snapshot returns the state of the caller.
func (c *Caller) Snapshot(now time.Time) Snapshot {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.roll(now)
	c.confirm(at)
	s := Snapshot{Name: c.name, Tier: c.tier.name, InFlight: c.inFlight, MaxRequests: c.maxRequests, Busy: c.busy, Reserved: c.reserved,
		Ratio: c.usual.ratio(), Output: c.usual.output, Estimated: c.usual.estimated, Reported: c.usual.reported, Hour: c.hour.snapshot(at)}
	for _, m := range c.all() {
		if m.limit.Amount > 0 {
			s.Limits = append(s.Limits, c.useOf(m, at))
		}
	}
	if c.sharing.Apart {
		s.Replicas = c.sharing.Replicas
	}
	s.Today = c.counters[counted[0]].use(at)
	s.Month = c.counters[counted[1]].use(at)
	return s
}

// Tightest returns, of the limits of each kind, the one of which the smallest
// part is left. Amount 0: there is none.
func (c *Caller) Tightest(now time.Time) (tightest [kinds]Use) {
	c.mu.Lock()
	defer c.mu.Unlock()
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
	u := Use{Limit: m.limit, Allowed: c.shown(m, at, used), Used: used, Ends: time.Unix(0, m.end), Refused: m.refused, Demoted: m.demoted}
	if u.Used > 0 {
		u.Reset = m.wait(at, m.limit.Amount, Sharing{}) // until nothing is used, if nothing else is
	}
	return u
}
