package replicas

import (
	"slices"
	"sync"
	"time"
)

// LeastPatience is the shortest time after which a request gives up waiting for
// the owners of the ids that it names. The longest one is a second. Only tests
// on busy machines change LeastPatience.
var LeastPatience = 50 * time.Millisecond

// mostPatience is the longest such time.
const mostPatience = time.Second

// lookupPatience determines how long a request waits for the owners of the ids
// that it names: three times the median of the latest comparisons' times,
// because a store may be in the same rack or in another region. Lookups are not
// measured, because a late one has no time: only the quick ones would count.
type lookupPatience struct {
	mu    sync.Mutex
	trips [15]time.Duration
	count int
}

// took records the time of the store's answer to a comparison.
func (p *lookupPatience) took(trip time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.trips[p.count%len(p.trips)] = trip
	p.count++
}

// now returns how long a lookup that starts now may take.
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
