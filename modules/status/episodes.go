package status

import (
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

// Episode is a series of cooldowns of a backend for the same reason, each soon
// after the previous one. A provisioned deployment under full load gets many
// cooldowns a second, and the page shows them as one episode.
type Episode struct {
	Pool    string `json:"-"`
	Backend string `json:"backend"`
	Class   string `json:"class"`
	// Model, Deployment, Cause and Status are from the latest cooldown.
	Model      string `json:"model"`
	Deployment string `json:"deployment"`
	Cause      string `json:"cause"`
	Status     int    `json:"status"`
	// Times is how many cooldowns there were.
	Times int `json:"times"`
	// Since is when the first cooldown began, and Latest when the latest one
	// began. Until is when the latest one ends.
	Since  time.Time `json:"since"`
	Latest time.Time `json:"latest"`
	Until  time.Time `json:"until"`
	// UntilReached reports whether the latest one lasts until the backend is
	// reached. Until is then the time of the next attempt.
	UntilReached bool `json:"until_reached"`
}

// Over reports whether all cooldowns of the episode have ended.
func (e Episode) Over(now time.Time) bool { return !e.UntilReached && !now.Before(e.Until) }

const (
	// pause is the longest time between two cooldowns of the same episode.
	pause = time.Minute
	// maxEpisodes is how many episodes are kept. Clients cannot cause more than
	// there are backends and classes.
	maxEpisodes = 100
)

// episodes has the latest episodes of the process, the newest last.
var episodes struct {
	sync.Mutex
	all []Episode
}

func init() { caddy.RegisterModule(Recorders{}) }

// Recorders records the episodes of all pools.
type Recorders struct{}

// CaddyModule returns the Caddy module information.
func (Recorders) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  seam.EventsNamespace + ".status",
		New: func() caddy.Module { return new(Recorders) },
	}
}

// Listener implements seam.EventsModule.
func (Recorders) Listener(name string) pool.Listener { return Recorder(name) }

// Recorder records the episodes of the pool of this name.
type Recorder string

// Happened implements pool.Listener.
func (r Recorder) Happened(e pool.Event) {
	if e.Member.Spares(e.Cooldown) {
		return // all other requests are served
	}
	episodes.Lock()
	defer episodes.Unlock()
	its := r.episodeOf(e)
	switch {
	case e.Happening == pool.Ended && its >= 0:
		ended := &episodes.all[its]
		if now := time.Now(); ended.UntilReached || now.Before(ended.Until) {
			ended.Until, ended.UntilReached = now, false
		}
	case e.Happening == pool.Began || e.Happening == pool.Grew || e.Happening == pool.Turned:
		episode := Episode{Pool: string(r), Backend: e.Member.Name, Class: e.Cooldown.Class, Since: e.Cooldown.Since}
		if its >= 0 {
			episode = episodes.all[its]
			episodes.all = slices.Delete(episodes.all, its, its+1)
		}
		if e.Happening != pool.Grew {
			episode.Times++
			episode.Latest = time.Now()
		}
		episode.Model, episode.Deployment = strings.Join(modelsAt(e.Member, e.Cooldown.Model), ", "), e.Cooldown.Model
		episode.Cause, episode.Status = e.Cooldown.Cause, e.Cooldown.Status
		episode.Until, episode.UntilReached = e.Cooldown.Until, e.Cooldown.Unreachable
		episodes.all = append(episodes.all, episode)
		if surplus := len(episodes.all) - maxEpisodes; surplus > 0 {
			episodes.all = slices.Delete(episodes.all, 0, surplus)
		}
	}
}

// episodeOf returns the index of the episode that an event continues, or -1.
// The caller holds the lock.
func (r Recorder) episodeOf(e pool.Event) int {
	for i := range episodes.all {
		known := &episodes.all[i] // it is large, and slices.IndexFunc would copy each one
		if known.Backend == e.Member.Name && known.Pool == string(r) && known.Class == e.Cooldown.Class && (known.UntilReached || e.Cooldown.Since.Sub(known.Until) < pause) {
			return i
		}
	}
	return -1
}

// Episodes returns the latest episodes of a pool, ordered by their latest
// cooldown, the newest first.
func Episodes(pool string, limit int) (latest []Episode) {
	episodes.Lock()
	defer episodes.Unlock()
	for _, e := range slices.Backward(episodes.all) {
		if e.Pool == pool {
			latest = append(latest, e)
		}
	}
	slices.SortStableFunc(latest, func(a, b Episode) int { return b.Latest.Compare(a.Latest) })
	return latest[:min(limit, len(latest))]
}
