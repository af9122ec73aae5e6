package metrics

import (
	"maps"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// series keeps the series of a metric by their labels. Once a series has been
// known for a while, reading it takes no lock and allocates nothing.
//
// New series go to the map fresh, which needs a lock. They move to the map
// known, which is read without one, when lookups have missed known half as
// often as it has entries. So each of n series is copied a few times, and not n
// times.
type series[K comparable, M any] struct {
	find func(K) M
	// bound limits the number of series. It is nil if the configs limit it.
	bound *bound
	// coarser are functions that make a key coarser, so that several series are
	// counted together. The coarsest is the last.
	coarser []func(K) K

	known atomic.Pointer[map[K]M] // the map itself never changes
	mu    sync.Mutex
	fresh map[K]M // not in known yet
	// misses counts how often a key was missing in known since known was
	// replaced.
	misses int
	number int
}

// bound limits the series of a metric in all pools. The limit is the number of
// series with all labels. Half as many more are allowed for each step to
// coarser keys. There is always room for the coarsest keys, whose number the
// configs limit.
type bound struct {
	limit, used atomic.Int64
	// merged counts how often a coarser key was used.
	merged prometheus.Counter
}

func newBound(metric string, limit int64) *bound {
	b := &bound{merged: mergedTotal.WithLabelValues(metric)}
	b.limit.Store(limit)
	return b
}

// hasRoom reports whether another series may be added, after the key was made
// coarser that many times.
func (b *bound) hasRoom(coarser int) bool {
	limit := b.limit.Load()
	return b.used.Load() < limit+limit*int64(coarser)/2
}

// seen returns the series if it exists, else the zero value.
func (s *series[K, M]) seen(key K) (m M) {
	if known := s.known.Load(); known != nil {
		if m, ok := (*known)[key]; ok {
			return m
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	m, _ = s.get(key)
	return m
}

func (s *series[K, M]) getOrAdd(key K) M {
	if known := s.known.Load(); known != nil {
		if m, ok := (*known)[key]; ok {
			return m
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.missed()
	for level := 0; ; level++ {
		m, ok := s.get(key)
		switch {
		case ok:
			return m
		case s.bound == nil || level == len(s.coarser) || s.bound.hasRoom(level):
			return s.add(key)
		case level == 0:
			s.bound.merged.Inc()
		}
		key = s.coarser[level](key)
	}
}

// get returns an existing series. The caller holds the lock.
func (s *series[K, M]) get(key K) (m M, ok bool) {
	if known := s.known.Load(); known != nil {
		if m, ok = (*known)[key]; ok {
			return m, true
		}
	}
	m, ok = s.fresh[key]
	return m, ok
}

// add adds a series. The caller holds the lock.
func (s *series[K, M]) add(key K) M {
	m := s.find(key)
	if s.fresh == nil {
		s.fresh = make(map[K]M)
	}
	s.fresh[key] = m
	if s.number++; s.bound != nil {
		s.bound.used.Add(1)
	}
	return m
}

// missed moves the fresh series to known if lookups have missed often enough.
// The caller holds the lock.
func (s *series[K, M]) missed() {
	known := 0
	if before := s.known.Load(); before != nil {
		known = len(*before)
	}
	if s.misses++; s.misses <= known/2 || len(s.fresh) == 0 {
		return
	}
	all := make(map[K]M, known+len(s.fresh))
	if before := s.known.Load(); before != nil {
		maps.Copy(all, *before)
	}
	maps.Copy(all, s.fresh)
	s.known.Store(&all)
	s.fresh, s.misses = nil, 0
}

// free removes all series, and releases their part of the limit.
func (s *series[K, M]) free() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.bound != nil {
		s.bound.used.Add(-int64(s.number))
	}
	s.number, s.fresh, s.misses = 0, nil, 0
	s.known.Store(nil)
}
