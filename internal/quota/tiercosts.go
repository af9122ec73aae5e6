package quota

import (
	"sync"
	"sync/atomic"
	"time"
)

// TierCosts is the cost of the requests that a backend recently got for a
// model, with each of the spans and by the numbers of the requests' tiers.
type TierCosts [len(spans)][MaxTiers + 1]int64

// span is the time in which the use of a tier is compared, in parts. A cost
// counts fully until it is full parts old, and then less and less, until it is
// end parts old.
type span struct{ full, end int64 }

// spans are 10 and 30 s for backends that work off requests continuously, and a
// minute for limits per minute. With a shorter one, a tier that asks for less
// than its share at random times would often be above it. With a longer one, a
// tier that was silent would have an advantage over the others for longer.
//
// If costs of the former did not fade, tiers would share a backend in waves:
// when the cost of a burst stopped counting, its tier would be below its share
// again, and get the next burst. Limits per minute are used in waves anyway. At
// the end of a window, all that was used in it must count, so their span is
// longer by a part, in which the oldest part stops counting.
var spans = [...]span{{4, 12}, {25, 25}}

const (
	// part is the length of a part in milliseconds.
	part = 2500
	// parts is the number of parts that are kept: those of the longest span,
	// the current one, and one that is being replaced.
	parts = 27
)

// costCounter counts the cost that each tier has got, in a ring of parts. The
// sum of the parts that are over is computed once, when the next part begins.
type costCounter struct {
	parts [parts]atomic.Pointer[costs] // nil: nothing was added
	past  atomic.Pointer[past]         // nil: it is not summed up
	// changes counts changes of parts that may already be in the sum. If it has
	// changed, the sum is computed again.
	changes atomic.Int64
}

// costs are the costs of a part, by tier.
type costs struct {
	number int64
	tiers  [MaxTiers + 1]atomic.Int64
}

// past is what the cost in the parts before a part counts when the part begins
// and when it ends.
type past struct {
	number     int64 // of the part
	changes    int64 // how many it has
	begin, end TierCosts
}

// outdated is never the number of changes.
const outdated = -1

// indexOf returns the index of a part. Its number may be negative if a clock is
// far off.
func indexOf(number int64) int { return int(uint64(number) % parts) } //nolint:gosec // any index will do

// add adds the cost of a request. A new part gets new counters instead of
// cleared ones, because concurrent additions to cleared counters would be lost.
// A part whose number is far in the future comes from a clock that was wrong,
// and is replaced.
func (g *costCounter) add(tier int, cost, at int64) {
	place, number := &g.parts[indexOf(at/part)], at/part
	p := place.Load()
	for p == nil || p.number < number || p.number > number+parts {
		if begun := (&costs{number: number}); place.CompareAndSwap(p, begun) {
			p = begun
			break
		}
		p = place.Load()
	}
	p.tiers[tier].Add(cost)
	g.outdate(number)
}

// outdate makes the sum be computed again after a change of a part that may be
// in it. A request may end just as the next part begins.
func (g *costCounter) outdate(number int64) {
	if known := g.past.Load(); known == nil || known.number != number {
		g.changes.Add(1)
	}
}

// takeBack subtracts a cost that was added at then, unless its part is no
// longer kept.
func (g *costCounter) takeBack(tier int, cost, then int64) {
	p := g.parts[indexOf(then/part)].Load()
	if p == nil || p.number != then/part {
		return
	}
	p.tiers[tier].Add(-cost)
	g.outdate(p.number)
}

// addTo adds the cost that each tier has got in a span.
func (g *costCounter) addTo(all *[MaxTiers + 1]int64, span int, at int64) {
	now := at / part
	known := g.past.Load()
	if known == nil || known.number != now || known.changes != g.changes.Load() {
		// While the sum is computed, an outdated one says that it will be of
		// this part: so outdate counts what is added to the parts before. If
		// another goroutine begins a sum meanwhile, this one is not kept.
		begun := &past{number: now, changes: outdated}
		g.past.Store(begun)
		known = g.sumUp(now)
		g.past.CompareAndSwap(begun, known)
	}
	current, passed := g.parts[indexOf(now)].Load(), float64(at%part)/part
	begun := current != nil && current.number == now
	for tier, cost := range known.begin[span] {
		if lost := cost - known.end[span][tier]; lost != 0 {
			cost -= int64(float64(lost) * passed)
		}
		if begun {
			cost += current.tiers[tier].Load()
		}
		all[tier] += cost
	}
}

// sumUp returns what the cost in the parts before the part with this number
// counts.
func (g *costCounter) sumUp(number int64) *past {
	sum := &past{number: number, changes: g.changes.Load()}
	for age := range int64(parts - 1) {
		p := g.parts[indexOf(number-age-1)].Load()
		if p == nil || p.number != number-age-1 {
			continue
		}
		for tier := range p.tiers {
			cost := p.tiers[tier].Load()
			for i, span := range spans {
				sum.begin[i][tier] += span.fade(cost, age)
				sum.end[i][tier] += span.fade(cost, age+1)
			}
		}
	}
	return sum
}

// lengths returns for how long a cost counts until it does not count at all,
// and for how long it would if it did not fade and counted as much in total.
func (s span) lengths() (all, whole time.Duration) {
	return time.Duration(s.end) * part * time.Millisecond, time.Duration(s.full+s.end) * part * time.Millisecond / 2
}

// fade returns what a cost counts that is so many parts old, and up to one part
// older.
func (s span) fade(cost, age int64) int64 {
	switch {
	case age < s.full:
		return cost
	case age >= s.end:
		return 0
	}
	return cost * (2*(s.end-age) - 1) / (2 * (s.end - s.full)) // by the middle of the part
}

// TierCosts returns the cost that each tier has got from this replica. It is 0
// for tiers that are not active, so that they are not at other replicas either.
func (m *Meter) TierCosts(now time.Time) (all TierCosts) {
	at := instant(now)
	for span := range all {
		m.counter.addTo(&all[span], span, at)
		for tier := range all[span] {
			if at >= m.askedAt[tier].Load()+activeFor.Milliseconds() {
				all[span][tier] = 0
			}
		}
	}
	return all
}

// addCosts adds the cost that each tier has got from all replicas.
func (m *Meter) addCosts(all *[MaxTiers + 1]int64, span int, at int64) {
	m.counter.addTo(all, span, at)
	if elsewhere := m.elsewhere(at); elsewhere != nil {
		for tier, cost := range elsewhere[span] {
			all[tier] += cost
		}
	}
}

// IsZero reports whether all costs are 0.
func (g *TierCosts) IsZero() bool { return *g == TierCosts{} }

// others holds the costs that tiers have got from other replicas.
type others struct {
	mu sync.Mutex // guards replicas
	// replicas are the latest reports, by replica.
	replicas map[string]heard
	sum      atomic.Pointer[heard]
}

// heard is a report, or a sum of reports, that counts until a time.
type heard struct {
	costs TierCosts
	until int64
}

const (
	// OthersLast is how long a replica's report counts. Each replica reports
	// again within 3 s.
	OthersLast = 5 * time.Second
	maxOthers  = 1024
	// highestHeard keeps sums from overflowing.
	highestHeard = 1 << 40
)

// Hear records a report of the costs that tiers have got from another replica.
func (m *Meter) Hear(replica string, costs TierCosts, now time.Time) {
	o, at := &m.others, instant(now)
	o.mu.Lock()
	defer o.mu.Unlock()
	until := at + OthersLast.Milliseconds()
	if known, ok := o.replicas[replica]; !ok && len(o.replicas) >= maxOthers || until < known.until {
		return
	}
	if o.replicas == nil {
		o.replicas = make(map[string]heard)
	}
	o.replicas[replica] = heard{costs, until}
	sum := new(heard)
	for name, other := range o.replicas {
		if at >= other.until {
			delete(o.replicas, name)
			continue
		}
		sum.until = max(sum.until, other.until)
		for i := range sum.costs {
			for tier := range sum.costs[i] {
				sum.costs[i][tier] += max(0, min(other.costs[i][tier], highestHeard))
			}
		}
	}
	o.sum.Store(sum)
}

// elsewhere returns the costs that tiers have got from other replicas. It
// returns nil if none are known.
func (m *Meter) elsewhere(at int64) *TierCosts {
	if sum := m.others.sum.Load(); sum != nil && at < sum.until {
		return &sum.costs
	}
	return nil
}
