package affinity

import (
	"sync"

	"github.com/openai-lb/caddy-openai-lb/internal/ownership"
)

// bounded bounds the ids of each caller that are of one kind. Without a bound,
// those of one caller would push out the ids of all others.
//
// So are the ids that replies of new APIs have taught: such an API may just
// answer, as a chat does, and then each reply has another id that nobody names
// again. And so are client secrets, of which each session may have another.
type bounded struct {
	most    int // of a caller
	mu      sync.Mutex
	callers map[ownership.Caller]*recentKeys
}

// recentKeys is a ring of the keys that were added last.
type recentKeys struct {
	keys []ownership.Key
	next int
}

const (
	// maxGuessed is how many ids of new APIs are remembered for a caller, and
	// maxSecrets how many client secrets.
	maxGuessed = 10_000
	maxSecrets = 1_000
	// maxBounded is of how many callers they are counted. If there are more,
	// some are counted anew.
	maxBounded = 1024
)

// add adds an id of a caller. It removes the caller's oldest one from the
// memory if there are too many.
func (g *bounded) add(m *ownership.Memory, c ownership.Caller, key ownership.Key) {
	g.mu.Lock()
	defer g.mu.Unlock()
	of := g.callers[c]
	if of == nil {
		if g.callers == nil {
			g.callers = make(map[ownership.Caller]*recentKeys)
		}
		for other := range g.callers {
			if len(g.callers) < maxBounded {
				break
			}
			delete(g.callers, other)
		}
		of = new(recentKeys)
		g.callers[c] = of
	}
	if len(of.keys) < g.most {
		of.keys = append(of.keys, key)
		return
	}
	m.Forget(of.keys[of.next])
	of.keys[of.next] = key
	of.next = (of.next + 1) % g.most
}
