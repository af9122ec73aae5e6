package metrics

import (
	"maps"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// series keeps the series of a metric by their labels. Reading takes no lock
// and allocates nothing, once a series is known for a while.
//
// New series are collected in a map of their own, and move into the one that is
// read without a lock when that one was in vain as often as half of its length.
// So each of n series is copied a few times, and not n times.
type series[K comparable, M any] struct {
	find func(K) M
	// bound limits how many series there are. nil: configs do.
	bound *bound
	// coarser are keys with which a series can be counted together with others,
	// the coarsest one last.
	coarser []func(K) K

	known atomic.Pointer[map[K]M] // the map itself never changes
	mu    sync.Mutex
	fresh map[K]M // not in known yet
	// misses counts how often a key was not in known since that was replaced.
	misses int
	number int
}

// bound limits the series of a metric in all pools: those with all labels, and
// half as many for each coarser key. There is always room for the coarsest
// keys, which configs bound.
type bound struct {
	most, used atomic.Int64
	// merged counts what was counted with a coarser key.
	merged prometheus.Counter
}

func newBound(metric string, most int64) *bound {
	b := &bound{merged: mergedTotal.WithLabelValues(metric)}
	b.most.Store(most)
	return b
}

// hasRoom reports whether there may be another series, after the labels were
// made coarser so many times.
func (b *bound) hasRoom(coarser int) bool {
	most := b.most.Load()
	return b.used.Load() < most+most*int64(coarser)/2
}

// seen returns the series if it is known, and the zero value otherwise.
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

func (s *series[K, M]) of(key K) M {
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

// get returns a series that there is. The caller holds the lock.
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

// missed makes the fresh series known, once that has been missed often enough.
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

// free makes room for other series: these are removed from the metric.
func (s *series[K, M]) free() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.bound != nil {
		s.bound.used.Add(-int64(s.number))
	}
	s.number, s.fresh, s.misses = 0, nil, 0
	s.known.Store(nil)
}
