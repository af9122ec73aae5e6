package pool

import (
	"maps"
	"strings"
	"sync/atomic"

	"github.com/openai-lb/caddy-openai-lb/internal/latency"
)

// useOf returns an operation with a model as they are usually written.
func useOf(model, operation string) latency.Use {
	return latency.Use{Model: ModelKey(model), Operation: strings.TrimSuffix(operation, "/")}
}

// Ended records that the member has sent a stream of an operation with a model,
// with its end mark. A gateway may send the streams of one engine with end
// marks, and those of another one without.
func (m *Member) Ended(model, operation string) {
	if m.Ends(model, operation) {
		return
	}
	m.health.mu.Lock()
	defer m.health.mu.Unlock()
	u := useOf(model, operation)
	m.health.ended.add(latency.Use{Model: strings.Clone(u.Model), Operation: strings.Clone(u.Operation)})
}

// Ends reports whether the member sends an end mark in streams of the operation
// with the model: it has done so before.
func (m *Member) Ends(model, operation string) bool {
	return m.health.ended.has(useOf(model, operation))
}

// nameSet is a set of up to maxModels names. Its map never changes, so that
// reading it takes no lock.
type nameSet[K comparable] struct {
	atomic.Pointer[map[K]bool]
}

func (s *nameSet[K]) has(name K) bool {
	names := s.Load()
	return names != nil && (*names)[name]
}

// add adds a name. The caller holds the lock of the health.
func (s *nameSet[K]) add(name K) {
	names := make(map[K]bool)
	if before := s.Load(); before != nil {
		if len(*before) >= maxModels {
			return
		}
		maps.Copy(names, *before)
	}
	names[name] = true
	s.Store(&names)
}
