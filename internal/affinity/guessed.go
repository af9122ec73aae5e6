package affinity

import (
	"sync"

	"github.com/openai-lb/caddy-openai-lb/internal/owners"
)

// guessed bounds the ids of each caller that replies of new APIs have taught. Such an API may just answer, as a chat does,
// and then each reply has another id that nobody names again. Without a bound, one caller's would push out the ids of
// all others.
type guessed struct {
	mu      sync.Mutex
	callers map[owners.Caller]*recentKeys
}

// recentKeys is a ring of the keys that were added last.
type recentKeys struct {
	keys []owners.Key
	next int
}

const (
	// maxGuessed is how many such ids of a caller are remembered.
	maxGuessed = 10_000
	// maxGuessing is of how many callers they are counted. If there are more, some are counted anew.
	maxGuessing = 1024
)

// add adds an id of a caller. It removes the caller's oldest one from the memory if there are too many.
func (g *guessed) add(m *owners.Memory, c owners.Caller, key owners.Key) {
	g.mu.Lock()
	defer g.mu.Unlock()
	of := g.callers[c]
	if of == nil {
		if g.callers == nil {
			g.callers = make(map[owners.Caller]*recentKeys)
		}
		for other := range g.callers {
			if len(g.callers) < maxGuessing {
				break
			}
			delete(g.callers, other)
		}
		of = new(recentKeys)
		g.callers[c] = of
	}
	if len(of.keys) < maxGuessed {
		of.keys = append(of.keys, key)
		return
	}
	m.Forget(of.keys[of.next])
	of.keys[of.next] = key
	of.next = (of.next + 1) % maxGuessed
}
