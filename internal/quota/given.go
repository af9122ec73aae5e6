package quota

import (
	"sync"
	"sync/atomic"
	"time"
)

// Given is what each tier has got of a model at a backend lately: the cost of its requests, by the tiers' numbers, in each of the
// spans.
type Given [len(spans)][MaxTiers + 1]int64

// spans are for how many parts it counts what a tier has got: 10 s at backends that work off what is used all the time, and a
// minute within limits by the minute. A tier that was silent is not ahead of the others for longer than that.
var spans = [...]int64{2, 12}

const (
	// part is how long a part lasts, in milliseconds.
	part = 5000
	// parts is how many are kept: those of the longest span, of which the first is over in part only, and the current one.
	parts = 14
)

// given counts what each tier has got, in the latest parts of time.
type given [parts]struct {
	number atomic.Int64
	costs  [MaxTiers + 1]atomic.Int64
}

// indexOf returns the index of a part, which may have a negative number where a clock is far off.
func indexOf(number int64) int { return int(uint64(number) % parts) } //nolint:gosec // any index will do

// add adds the cost of a request. One of the moment at which a part begins may be lost. A part that is far in the future is of a
// clock that was wrong.
func (g *given) add(tier int, cost, at int64) {
	p := &g[indexOf(at/part)]
	number := p.number.Load()
	if ahead := number - at/part; (ahead < 0 || ahead > parts) && p.number.CompareAndSwap(number, at/part) {
		for i := range p.costs {
			p.costs[i].Store(0)
		}
	}
	p.costs[tier].Add(cost)
}

// takeBack takes back what was added then, unless its part is over.
func (g *given) takeBack(tier int, cost, then int64) {
	if p := &g[indexOf(then/part)]; p.number.Load() == then/part {
		p.costs[tier].Add(-cost)
	}
}

// addTo adds what each tier has got in each of the spans.
func (g *given) addTo(all *Given, at int64) {
	now := at / part
	for age := range int64(parts) {
		p := &g[indexOf(now-age)]
		if p.number.Load() != now-age {
			continue
		}
		for tier := range p.costs {
			cost := p.costs[tier].Load()
			for i, span := range spans {
				switch {
				case age < span:
					all[i][tier] += cost
				case age == span:
					all[i][tier] += int64(float64(cost) * float64(part-at%part) / part)
				}
			}
		}
	}
}

// Given returns what each tier has got at this replica.
func (m *Meter) Given(now time.Time) (all Given) {
	m.given.addTo(&all, instant(now))
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
	// OthersLast is for how long it counts what another replica has said, which each says again within 3 s.
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

// elsewhere returns what tiers have got at other replicas. nil: nothing that is known.
func (m *Meter) elsewhere(at int64) *Given {
	if sum := m.others.sum.Load(); sum != nil && at < sum.until {
		return &sum.given
	}
	return nil
}
