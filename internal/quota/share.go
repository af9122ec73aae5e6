package quota

import (
	"math/bits"
	"time"
)

// Shares are the fractions of their backends that tiers keep for their
// requests, from 0 to 1, by the tiers' numbers.
type Shares [MaxTiers + 1]float64

// KeepsShare reports whether the tier keeps a share.
func (t Tier) KeepsShare() bool { return t.Shares != nil && t.Shares[t.Number] > 0 }

// Group identifies a group of backends that tiers share together. It consists
// of the tiers that are active there, with one bit for each number, and a bit
// for backends with windows of a minute.
type Group uint16

const byMinute Group = 1 << (MaxTiers + 1)

// Group returns the backend's group.
func (m *Meter) Group(t Tier, now Instant) Group {
	g := m.askers(t.Shares, now.millis())
	if int64(now) < m.allowances[tokens].until.Load() || m.current(now).isLong() {
		g |= byMinute
	}
	return g
}

// askers returns the tiers with a share that are active, because their requests
// have asked for the model lately, here or at other replicas.
func (m *Meter) askers(shares *Shares, at int64) (g Group) {
	elsewhere := m.elsewhere(at)
	for i, share := range shares {
		if share > 0 && (at < m.askedAt[i].Load()+activeFor.Milliseconds() || elsewhere != nil && elsewhere[1][i] > 0) {
			g |= 1 << i
		}
	}
	return g
}

// kept returns the sum of the shares of the other active tiers.
func (g Group) kept(t Tier) (part float64) {
	others := g &^ (1 << t.Number)
	for i, share := range t.Shares {
		if others&(1<<i) != 0 {
			part += share
		}
	}
	return min(part, 1)
}

// leaves reports whether, after a request of that cost, this part of the
// backend is left.
func (m *Meter) leaves(part float64, cost, at int64, now Instant) bool {
	wait, known := m.predict(part, cost, now)
	if wait >= time.Millisecond {
		return false
	}
	for k := range m.readings {
		if kind(k) == throttle && known {
			continue
		}
		if reading(m.readings[k].Load()).above(mostUsed(part), fades[k], at) {
			return false
		}
	}
	costs := [limits]int64{requests: 1, tokens: cost}
	for i := range m.allowances {
		if !m.allowances[i].leaves(part, costs[i], now) {
			return false
		}
	}
	return true
}

// mostUsed returns how much may be used by a reading while a part is kept for
// other tiers. It is a tenth at least: what a provisioned deployment is working
// on is never less for long, and would otherwise refuse the other tiers.
func mostUsed(kept float64) float64 { return max(.1, 1-kept) }

// predict returns the time until a request of that cost leaves this part of the
// backend, by what throttles have taught, and by the pace of a limit of which
// it is not known when its windows end. known reports whether more is known
// than that the backend has throttled, so that the reading of the latest
// throttle does not count.
//
// While the backend's own replies say what is left until when, and explain its
// latest throttle, predict returns 0. If both estimates counted, more would be
// kept for other tiers than their shares. But a limit that is named to this
// replica says nothing of the requests that other replicas have sent since.
func (m *Meter) predict(part float64, cost int64, now Instant) (wait time.Duration, known bool) {
	at := now.millis()
	isUtilized := reading(m.readings[utilization].Load()).isFresh(fades[utilization], at)
	if isUtilized && !m.unexplained.Load() {
		return 0, false
	}
	if m.allowances[tokens].isInWindow(now) && m.elsewhere(at) == nil && !m.unexplained.Load() {
		_, end := reading(m.readings[throttle].Load()).unpack()
		return 0, at >= end
	}
	if !isUtilized {
		wait, known = m.drain.wait(part, cost, now, m.allowances[tokens].estimated.Load())
	}
	return max(wait, m.current(now).wait(part, cost, now), m.pace(part, cost, now)), known
}

// fastest is how fast a limit per minute may be used while it is not known when
// its windows end, as a multiple of the limit. It is more than 1, because some
// of the limit would not be used otherwise.
const fastest = 1.05

// pace returns the time until the requests so far have used the limit of tokens
// no faster than it comes back, if it is not known when its windows end. If
// they slide, a burst would come back as a burst, with nothing left in between.
// While more remains than the part, or than a half, nothing is paced.
func (m *Meter) pace(part float64, cost int64, now Instant) time.Duration {
	a, at := &m.allowances[tokens], now.millis()
	if int64(now) >= a.until.Load() || a.most.Load() == 0 || a.window.Load() > 0 {
		return 0
	}
	if float64(a.left(now)-cost) >= min(part, .5)*float64(a.most.Load()) {
		return 0
	}
	const shorter = 0
	var costs [MaxTiers + 1]int64
	m.addCosts(&costs, shorter, at)
	sum := int64(0)
	for _, cost := range costs {
		sum += cost
	}
	rate := fastest * float64(a.limit.Load()) / float64(time.Minute)
	all, whole := spans[shorter].lengths()
	return time.Duration(max(0, min(float64(sum)/rate-float64(whole), float64(all))))
}

// Got is the cost that each tier has got lately of the model, from all replicas
// and at all backends of a group, counted with the group's span.
type Got struct {
	Group Group
	costs [MaxTiers + 1]int64
}

// span returns the index of the group's span in spans.
func (g Group) span() int {
	if g&byMinute != 0 {
		return 1
	}
	return 0
}

// Add adds the cost that tiers have got at a backend, if the backend is in the
// group.
func (g *Got) Add(m *Meter, t Tier, now Instant) {
	if m.Group(t, now) != g.Group {
		return
	}
	m.addCosts(&g.costs, g.Group.span(), now.millis())
}

// IsWithinShare reports whether the tier has got at most its share of the
// total. Capacity that no active tier keeps is added to the share of the most
// important active tier. So the shares add up to the whole, and at any time
// some active tier is within its share. Without that, all active tiers could be
// above their shares, and none would use a full backend until its readings
// fade.
func (g *Got) IsWithinShare(t Tier) bool {
	all, share := int64(0), t.Shares[t.Number]
	for _, cost := range g.costs {
		all += max(0, cost)
	}
	if bits.TrailingZeros16(uint16(g.Group)) == t.Number {
		share = 1 - g.Group.kept(t)
	}
	return float64(g.costs[t.Number]) <= share*float64(all)
}
