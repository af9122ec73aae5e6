package quota

import "time"

// Shares are the parts of a backend that tiers keep for their requests, from 0 to 1, by the tiers' numbers.
type Shares [MaxTiers + 1]float64

// Askers are the tiers with a share of which requests have asked for a model at a backend lately, here or at other replicas: a bit
// for each number.
type Askers uint16

// Askers returns those of the tiers of which one is given.
func (m *Meter) Askers(t Tier, now time.Time) Askers { return m.askers(t.Shares, instant(now)) }

func (m *Meter) askers(of *Shares, at int64) (a Askers) {
	elsewhere := m.elsewhere(at)
	for i, share := range of {
		if share > 0 && (at < m.asks[i].Load()+memory.Milliseconds() || elsewhere != nil && elsewhere[1][i] > 0) {
			a |= 1 << i
		}
	}
	return a
}

// kept returns which part of the backend the tier leaves for others: the sum of the shares of those that ask.
func (m *Meter) kept(t Tier, at int64) (part float64) {
	others := m.askers(t.Shares, at) &^ (1 << t.Number)
	for i, share := range t.Shares {
		if others&(1<<i) != 0 {
			part += share
		}
	}
	return min(part, 1)
}

// leaves reports whether that part of the backend is left.
func (m *Meter) leaves(part float64, at int64, now Instant) bool {
	for k := range kinds {
		if r := m.reading(k); r.above(1-part, fades[k], m.faded(k, r, at)) {
			return false
		}
	}
	for i := range m.allowances {
		if !m.allowances[i].leaves(part, windows[i], now) {
			return false
		}
	}
	return true
}

// Got is what each tier has got lately of the model at some backends, at all replicas.
type Got struct {
	given Given
	// byMinute reports whether one of them has a limit of tokens by the minute.
	byMinute bool
}

// Add adds what tiers have got at a backend.
func (g *Got) Add(m *Meter, now time.Time) {
	at := instant(now)
	g.byMinute = g.byMinute || int64(At(now)) < m.allowances[tokens].until.Load()
	m.given.addTo(&g.given, at)
	if elsewhere := m.elsewhere(at); elsewhere != nil {
		for i := range elsewhere {
			for tier, cost := range elsewhere[i] {
				g.given[i][tier] += cost
			}
		}
	}
}

// IsWithinShare reports whether the tier keeps a share, and has got no more than that part of all.
func (g *Got) IsWithinShare(t Tier) bool {
	i := 0
	if g.byMinute {
		i = 1
	}
	return t.Shares[t.Number] > 0 && float64(g.given[i][t.Number]) <= t.Shares[t.Number]*float64(g.given.sum(i))
}
