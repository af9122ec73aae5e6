package pool

import (
	"maps"
	"strings"
	"sync/atomic"

	"github.com/openai-lb/caddy-openai-lb/internal/latency"
)

// useOf returns a model and an operation in their canonical form.
func useOf(model, operation string) latency.Use {
	return latency.Use{Model: ModelKey(model), Operation: strings.TrimSuffix(operation, "/")}
}

// Ended records that the member has sent an end mark in a stream of the
// operation with the model. This is recorded for each model, because a gateway
// may serve models with different engines, only some of which send end marks.
func (m *Member) Ended(model, operation string) {
	if m.Ends(model, operation) {
		return
	}
	m.health.mu.Lock()
	defer m.health.mu.Unlock()
	u := useOf(model, operation)
	m.health.ended.add(latency.Use{Model: strings.Clone(u.Model), Operation: strings.Clone(u.Operation)})
}

// Ends reports whether the member has ever sent an end mark in a stream of the
// operation with the model. A stream without one is then incomplete.
func (m *Member) Ends(model, operation string) bool {
	return m.health.ended.has(useOf(model, operation))
}

// nameSet is a set of up to maxModels names. Its map is replaced and never
// changed, so that reading takes no lock.
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
