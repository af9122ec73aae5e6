package replicas

import (
	"slices"
	"sync"
	"time"
)

// LeastPatience and mostPatience bound how long a request waits for the owners
// of the ids that it names. Only tests on busy machines change the first.
var LeastPatience = 50 * time.Millisecond

const mostPatience = time.Second

// lookupPatience is how long a request waits for the owners of the ids that it
// names: three times the median of what the latest comparisons took, because a
// store may be in the same rack or in another region. Lookups themselves are
// not measured: one that is late has no result, so that the quick ones would
// hide that the others need longer.
type lookupPatience struct {
	mu    sync.Mutex
	trips [15]time.Duration
	count int
}

// took records how long the store took to answer a comparison.
func (p *lookupPatience) took(trip time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.trips[p.count%len(p.trips)] = trip
	p.count++
}

// now returns how long a lookup that begins now waits.
func (p *lookupPatience) now() time.Duration {
	p.mu.Lock()
	trips := slices.Clone(p.trips[:min(p.count, len(p.trips))])
	p.mu.Unlock()
	if len(trips) == 0 {
		return LeastPatience
	}
	slices.Sort(trips)
	return min(max(LeastPatience, 3*trips[len(trips)/2]), max(LeastPatience, mostPatience))
}
