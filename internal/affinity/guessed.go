package affinity

import (
	"sync"

	"github.com/openai-lb/caddy-openai-lb/internal/ownership"
)

// bounded limits the number of remembered ids of one kind for each caller.
// Without a limit, the ids of one caller could displace the ids of all others.
//
// It is used for ids from replies of new APIs, because each reply of such an
// API may have a new id that is never used again, as in a chat. It is also used
// for client secrets, because each session may have a new one.
type bounded struct {
	limit   int // of a caller
	mu      sync.Mutex
	callers map[ownership.CallerDigest]*recentKeys
}

// recentKeys is a ring of the latest keys.
type recentKeys struct {
	keys []ownership.Key
	next int
}

const (
	// maxGuessed is the maximum number of ids of new APIs for a caller, and
	// maxSecrets the maximum number of client secrets.
	maxGuessed = 10_000
	maxSecrets = 1_000
	// maxBounded is the maximum number of callers whose ids are counted. If
	// there are more, the counts of some start again.
	maxBounded = 1024
)

// add adds an id of a caller. If the caller has too many, add removes the
// oldest one from the memory.
func (g *bounded) add(m *ownership.Memory, c ownership.CallerDigest, key ownership.Key) {
	g.mu.Lock()
	defer g.mu.Unlock()
	recent := g.callers[c]
	if recent == nil {
		if g.callers == nil {
			g.callers = make(map[ownership.CallerDigest]*recentKeys)
		}
		for other := range g.callers {
			if len(g.callers) < maxBounded {
				break
			}
			delete(g.callers, other)
		}
		recent = new(recentKeys)
		g.callers[c] = recent
	}
	if len(recent.keys) < g.limit {
		recent.keys = append(recent.keys, key)
		return
	}
	m.Forget(recent.keys[recent.next])
	recent.keys[recent.next] = key
	recent.next = (recent.next + 1) % g.limit
}
