package quota

import (
	"sync"
	"sync/atomic"
	"time"
)

// TierCosts is the cost of the requests that a backend recently got for a
// model, in each of the spans and by the numbers of the requests' tiers.
type TierCosts [len(spans)][MaxTiers + 1]int64

// spans are the lengths of the periods in which the use of a tier is compared,
// in parts: 20 s for backends that work off requests continuously, and a minute
// for limits per minute. A tier that was silent has no advantage over the
// others for longer than that. In a shorter span, a tier that asks for less
// than its share at random times would often be above it.
var spans = [...]int64{4, 12}

const (
	// part is the length of a part in milliseconds.
	part = 5000
	// parts is the number of parts that are kept: those of the longest span,
	// including the oldest one, which is only partly in the span, and the
	// current one.
	parts = 14
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

// past is the sum, for each span, when a part began: whole is the cost in parts
// that are completely in the span, and oldest the cost in the oldest part, of
// which less and less is in the span.
type past struct {
	number        int64 // of the part that began
	changes       int64 // how many it has
	whole, oldest TierCosts
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
	current, left := g.parts[indexOf(now)].Load(), float64(part-at%part)/part
	begun := current != nil && current.number == now
	for tier, cost := range known.whole[span] {
		if oldest := known.oldest[span][tier]; oldest != 0 {
			cost += int64(float64(oldest) * left)
		}
		if begun {
			cost += current.tiers[tier].Load()
		}
		all[tier] += cost
	}
}

// sumUp returns the sum of the parts before the part with this number.
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
				switch {
				case age+1 < span:
					sum.whole[i][tier] += cost
				case age+1 == span:
					sum.oldest[i][tier] = cost
				}
			}
		}
	}
	return sum
}

// TierCosts returns the cost that each tier has got from this replica.
func (m *Meter) TierCosts(now time.Time) (all TierCosts) {
	for span := range all {
		m.counter.addTo(&all[span], span, instant(now))
	}
	return all
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
