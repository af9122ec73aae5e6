package pool

import (
	"maps"
	"strings"
	"sync/atomic"
)

// Ended records that the member has sent a stream of an operation for inference, with its end mark.
func (m *Member) Ended(operation string) {
	if m.Ends(operation) {
		return
	}
	m.health.mu.Lock()
	defer m.health.mu.Unlock()
	m.health.ended.add(strings.Clone(usual(operation)))
}

// Ends reports whether the member sends an end mark in streams of the operation: it has done so before.
func (m *Member) Ends(operation string) bool { return m.health.ended.has(usual(operation)) }

// usual returns the operation as it is usually written.
func usual(operation string) string { return strings.TrimSuffix(operation, "/") }

// nameSet is a set of up to maxModels names. Its map never changes, so that reading it takes no lock.
type nameSet struct {
	atomic.Pointer[map[string]bool]
}

func (s *nameSet) has(name string) bool {
	names := s.Load()
	return names != nil && (*names)[name]
}

// add adds a name. The caller holds the lock of the health.
func (s *nameSet) add(name string) {
	names := make(map[string]bool)
	if before := s.Load(); before != nil {
		if len(*before) >= maxModels {
			return
		}
		maps.Copy(names, *before)
	}
	names[name] = true
	s.Store(&names)
}
