package quota

import (
	"sync"
	"sync/atomic"
	"time"
)

// Given is what each tier has got of a model at a backend lately: the cost of
// its requests, by the tiers' numbers, in each of the spans.
type Given [len(spans)][MaxTiers + 1]int64

// spans are for how many parts it counts what a tier has got: 10 s at backends
// that work off what is used all the time, and a minute within limits by the
// minute. A tier that was silent is not ahead of the others for longer than
// that.
var spans = [...]int64{2, 12}

const (
	// part is how long a part lasts, in milliseconds.
	part = 5000
	// parts is how many are kept: those of the longest span, of which the first
	// is over in part only, and the current one.
	parts = 14
)

// given counts what each tier has got, in the latest parts of time. What it has
// got in those that are over is summed up once, when the next one begins.
type given struct {
	parts [parts]atomic.Pointer[costs] // nil: nothing was added
	past  atomic.Pointer[past]         // nil: it is not summed up
	// changes counts what was added to parts that may be summed up, which a sum
	// of before does not have.
	changes atomic.Int64
}

// costs are those of a part.
type costs struct {
	number int64
	tiers  [MaxTiers + 1]atomic.Int64
}

// past is what each tier had got in each of the spans when a part began: in
// those parts that are of it as a whole, and in the oldest one, of which less
// and less is.
type past struct {
	number        int64 // of the part that began
	changes       int64 // how many it has
	whole, oldest Given
}

// indexOf returns the index of a part, which may have a negative number where a
// clock is far off.
func indexOf(number int64) int { return int(uint64(number) % parts) } //nolint:gosec // any index will do

// add adds the cost of a request. A part begins with new counters: if old ones
// were cleared, what others add meanwhile would be lost. A part that is far in
// the future is of a clock that was wrong.
func (g *given) add(tier int, cost, at int64) {
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

// outdate has the past summed up again after a change of a part, if it may be
// one of the past: a request may end just as the next part begins.
func (g *given) outdate(number int64) {
	if known := g.past.Load(); known == nil || known.number != number {
		g.changes.Add(1)
	}
}

// takeBack takes back what was added then, unless its part is over and
// forgotten.
func (g *given) takeBack(tier int, cost, then int64) {
	p := g.parts[indexOf(then/part)].Load()
	if p == nil || p.number != then/part {
		return
	}
	p.tiers[tier].Add(-cost)
	g.outdate(p.number)
}

// addTo adds what each tier has got in a span.
func (g *given) addTo(all *[MaxTiers + 1]int64, span int, at int64) {
	now := at / part
	known := g.past.Load()
	if known == nil || known.number != now || known.changes != g.changes.Load() {
		known = g.sumUp(now)
		g.past.Store(known)
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

// sumUp returns what tiers had got when a part began.
func (g *given) sumUp(number int64) *past {
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

// Given returns what each tier has got at this replica.
func (m *Meter) Given(now time.Time) (all Given) {
	for span := range all {
		m.given.addTo(&all[span], span, instant(now))
	}
	return all
}

// IsZero reports whether no tier has got anything.
func (g *Given) IsZero() bool { return *g == Given{} }

// others is what tiers have got at other replicas.
type others struct {
	mu sync.Mutex // guards replicas
	// replicas is what each of them has said.
	replicas map[string]heard
	sum      atomic.Pointer[heard]
}

// heard counts until a time.
type heard struct {
	given Given
	until int64
}

const (
	// OthersLast is for how long it counts what another replica has said, which
	// each says again within 3 s.
	OthersLast = 5 * time.Second
	maxOthers  = 1024
	// highestGiven keeps sums from an overflow.
	highestGiven = 1 << 40
)

// Hear records what tiers have got at another replica.
func (m *Meter) Hear(replica string, given Given, now time.Time) {
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
	o.replicas[replica] = heard{given, until}
	sum := new(heard)
	for name, other := range o.replicas {
		if at >= other.until {
			delete(o.replicas, name)
			continue
		}
		sum.until = max(sum.until, other.until)
		for i := range sum.given {
			for tier := range sum.given[i] {
				sum.given[i][tier] += max(0, min(other.given[i][tier], highestGiven))
			}
		}
	}
	o.sum.Store(sum)
}

// elsewhere returns what tiers have got at other replicas. nil: nothing that is
// known.
func (m *Meter) elsewhere(at int64) *Given {
	if sum := m.others.sum.Load(); sum != nil && at < sum.until {
		return &sum.given
	}
	return nil
}
