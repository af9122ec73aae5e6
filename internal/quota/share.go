package quota

// Shares are the parts of a backend that tiers keep for their requests, from 0 to 1, by the tiers' numbers.
type Shares [MaxTiers + 1]float64

// kept returns which part of the backend the tier leaves for others: the sum of the shares of those that have asked for the
// model lately, here or at other replicas.
func (m *Meter) kept(t Tier, at int64) (part float64) {
	elsewhere := m.elsewhere(at)
	for i, share := range t.Shares {
		if i == t.Number || share == 0 {
			continue
		}
		if at < m.asks[i].Load()+memory.Milliseconds() || elsewhere != nil && elsewhere[1][i] > 0 {
			part += share
		}
	}
	return min(part, 1)
}

// leaves reports whether that part of the backend is left.
func (m *Meter) leaves(part float64, at int64, now Instant) bool {
	for k := range m.readings {
		if reading(m.readings[k].Load()).above(1-part, fades[k], at) {
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

// within reports whether the tier keeps a share, and has got no more than that lately, at all replicas.
func (m *Meter) within(t Tier, at int64, now Instant) bool {
	if t.Shares[t.Number] == 0 {
		return false
	}
	i := 0
	if int64(now) < m.allowances[tokens].until.Load() {
		i = 1
	}
	var sums [MaxTiers + 1]int64
	if elsewhere := m.elsewhere(at); elsewhere != nil {
		sums = elsewhere[i]
	}
	m.given.sum(&sums, spans[i], at)
	all := int64(0)
	for _, cost := range sums {
		all += max(0, cost)
	}
	return float64(sums[t.Number]) <= t.Shares[t.Number]*float64(all)
}
