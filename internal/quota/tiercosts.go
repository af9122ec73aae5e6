package quota

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// TierCosts is the cost of the requests that a backend recently got for a
// model, with each of the half-lives and by the numbers of the requests' tiers.
//
// A cost counts less the older it is. If costs counted fully for some time and
// then not at all, tiers would share the backend in waves: when the cost of a
// burst stops counting, its tier is below its share again, and gets the next
// burst.
type TierCosts [len(halfLives)][MaxTiers + 1]int64

// halfLives are the times in which a cost fades to a half, in milliseconds. The
// first one is for backends that work off requests continuously, and the other
// one for limits per minute. With a shorter one, a tier that asks for less than
// its share at random times would often be above it. With a longer one, a tier
// that was silent would have an advantage over the others for longer.
var halfLives = [...]int64{10_000, 30_000}

// costCounter counts the cost that each tier has got.
type costCounter [len(halfLives)][MaxTiers + 1]fading

// add adds the cost of a request. A negative one takes back what was added for
// the same instant.
func (c *costCounter) add(tier int, cost, at int64) {
	for i, half := range halfLives {
		c[i][tier].add(cost, at, half)
	}
}

// addTo adds what the cost that each tier has got counts at an instant.
func (c *costCounter) addTo(all *[MaxTiers + 1]int64, halfLife int, at int64) {
	for tier := range all {
		all[tier] += int64(math.Round(min(c[halfLife][tier].sum(at, halfLives[halfLife]), highestHeard)))
	}
}

// TierCosts returns the cost that each tier has got from this replica. It is 0
// for tiers that are not active, so that they are not at other replicas either.
func (m *Meter) TierCosts(now time.Time) (all TierCosts) {
	at := instant(now)
	for i := range all {
		m.counter.addTo(&all[i], i, at)
		for tier := range all[i] {
			if at >= m.askedAt[tier].Load()+activeFor.Milliseconds() {
				all[i][tier] = 0
			}
		}
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
