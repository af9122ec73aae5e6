package overview

import (
	"slices"
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// Episode is a series of benches of a backend for the same reason, each soon
// after the one before: a provisioned deployment under full load is benched many
// times a second, which is one thing for who looks at it.
type Episode struct {
	Pool, Backend, Class string
	// Model, Cause and Status are those of the latest bench.
	Model, Cause string
	Status       int
	// Times is how many benches there were.
	Times int
	// Since is when the first one began, and Until when the latest one ends.
	Since, Until time.Time
}

const (
	// pause is how long after a bench another one belongs to the same episode.
	pause = time.Minute
	// maxEpisodes is how many are remembered. No client can make more of them
	// than there are backends and classes.
	maxEpisodes = 100
)

// episodes are the latest ones of the process, the newest last.
var episodes struct {
	sync.Mutex
	all []Episode
}

// Recorder listens to the pool of this name, for Episodes.
type Recorder string

// Happened implements pool.Listener.
func (r Recorder) Happened(e pool.Event) {
	episodes.Lock()
	defer episodes.Unlock()
	its := slices.IndexFunc(episodes.all, func(known Episode) bool {
		return known.Pool == string(r) && known.Backend == e.Member.Name && known.Class == e.Bench.Class && e.Bench.Since.Sub(known.Until) < pause
	})
	switch {
	case e.Happening == pool.Ended && its >= 0:
		if now := time.Now(); now.Before(episodes.all[its].Until) {
			episodes.all[its].Until = now
		}
	case e.Happening == pool.Began || e.Happening == pool.Grew || e.Happening == pool.Turned:
		episode := Episode{Pool: string(r), Backend: e.Member.Name, Class: e.Bench.Class, Since: e.Bench.Since}
		if its >= 0 {
			episode = episodes.all[its]
			episodes.all = slices.Delete(episodes.all, its, its+1)
		}
		if e.Happening != pool.Grew {
			episode.Times++
		}
		episode.Model, episode.Cause, episode.Status, episode.Until = e.Bench.Model, e.Bench.Cause, e.Bench.Status, e.Bench.Until
		episodes.all = append(episodes.all, episode)
		if surplus := len(episodes.all) - maxEpisodes; surplus > 0 {
			episodes.all = slices.Delete(episodes.all, 0, surplus)
		}
	}
}

// Episodes returns the latest ones of a pool, the newest first.
func Episodes(pool string, limit int) (latest []Episode) {
	episodes.Lock()
	defer episodes.Unlock()
	for _, e := range slices.Backward(episodes.all) {
		if e.Pool == pool && len(latest) < limit {
			latest = append(latest, e)
		}
	}
	return latest
}
