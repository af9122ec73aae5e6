package metrics

import (
	"maps"
	"sync"
	"sync/atomic"
)

// series keeps the series of a metric that were used, by their labels. Reading takes
// no lock and allocates nothing.
type series[K comparable, M any] struct {
	find func(K) M

	known atomic.Pointer[map[K]M] // the map itself never changes
	mu    sync.Mutex              // guards the writing
}

// maxSeries is how many series are kept. The others have to be found each time.
const maxSeries = 2048

// seen returns the series if it is kept, and the zero value otherwise.
func (s *series[K, M]) seen(key K) (m M) {
	if known := s.known.Load(); known != nil {
		m = (*known)[key]
	}
	return m
}

func (s *series[K, M]) of(key K) M {
	known := s.known.Load()
	if known != nil {
		if m, ok := (*known)[key]; ok {
			return m
		}
		if len(*known) >= maxSeries {
			return s.find(key)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	more := make(map[K]M, 1)
	if known = s.known.Load(); known != nil {
		if m, ok := (*known)[key]; ok {
			return m
		}
		more = maps.Clone(*known)
	}
	m := s.find(key)
	more[key] = m
	s.known.Store(&more)
	return m
}
