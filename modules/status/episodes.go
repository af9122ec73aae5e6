package status

import (
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/latency"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// Episode is a series of cooldowns or silences of a backend for the same
// reason, each soon after the previous one, or a problem of a pool. A
// provisioned deployment under full load gets many cooldowns a second, and the
// page shows them as one episode.
type Episode struct {
	Pool string `json:"-"`
	// Backend is empty for a problem of the pool.
	Backend string `json:"backend"`
	Class   string `json:"class"`
	// Model, Deployment, Cause, Detail and Status are from the latest cooldown.
	// Different causes are different episodes if they have different remedies.
	Model      string `json:"model"`
	Deployment string `json:"deployment"`
	Cause      string `json:"cause"`
	Detail     string `json:"detail"`
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
	// Lasts reports whether a silence or a problem of the pool lasts. Until is
	// then without a meaning.
	Lasts bool `json:"lasts"`

	// silent are the uses for which the backend has not answered in time since.
	silent map[latency.Use]bool
}

// Over reports whether all cooldowns of the episode have ended.
func (e Episode) Over(now time.Time) bool {
	return !e.UntilReached && !e.Lasts && !now.Before(e.Until)
}

// continues reports whether an event that begins at since, for the same reason,
// belongs to the episode.
func (e *Episode) continues(since time.Time) bool {
	return e.UntilReached || e.Lasts || since.Sub(e.Until) < pause
}

// isAbout reports whether the episode is about this reason of the backend.
func (e *Episode) isAbout(pool, backend, class, cause string) bool {
	remedy := func(cause string) string { return verdict.RemedyOf(verdict.Class(class), cause).Cause }
	return e.Backend == backend && e.Pool == pool && e.Class == class && remedy(e.Cause) == remedy(cause)
}

const (
	// pause is the longest time between two cooldowns of the same episode.
	pause = time.Minute
	// maxEpisodes is how many episodes are kept. Clients cannot cause more than
	// there are backends, classes, and causes with remedies.
	maxEpisodes = 100
)

// episodes has the latest episodes of the process, the newest last.
var episodes struct {
	sync.Mutex
	all []Episode
}

func init() { caddy.RegisterModule(Recorders{}) }

// Recorders records the episodes of all pools, and has a Watch look for the
// problems that no event reports.
type Recorders struct{ leave func() }

// CaddyModule returns the Caddy module information.
func (Recorders) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  seam.EventsNamespace + ".status",
		New: func() caddy.Module { return new(Recorders) },
	}
}

// Listener implements seam.EventsModule.
func (r *Recorders) Listener(ctx caddy.Context, name string) (pool.Listener, error) {
	logger := ctx.Logger()
	return Recorder(name), observe.On(ctx, observe.Started, func() {
		watch.use(name, logger)
		r.leave = func() { watch.leave(name) }
	})
}

// Cleanup implements caddy.CleanerUpper.
func (r *Recorders) Cleanup() error {
	if r.leave != nil {
		r.leave()
	}
	return nil
}

// Recorder records the episodes of the pool of this name.
type Recorder string

// Happened implements pool.Listener.
func (r Recorder) Happened(e pool.Event) {
	episodes.Lock()
	defer episodes.Unlock()
	switch e.Happening {
	case pool.FellSilent:
		r.fellSilent(e)
	case pool.Answered: // in time. It is slow before that, if only for a moment
		r.answered(e)
	case pool.Began, pool.Grew, pool.Turned:
		if !e.Member.Spares(e.Cooldown) { // or else all other requests are served
			r.cooledDown(e)
		}
	case pool.Ended:
		if i := find(string(r), e.Member.Name, e.Cooldown.Class, e.Cooldown.Cause, e.Cooldown.Since); i >= 0 &&
			!e.Member.Spares(e.Cooldown) {
			episodes.all[i].end(time.Now())
		}
	}
}

// end ends the episode, unless it is over. The caller holds the lock.
func (e *Episode) end(now time.Time) {
	if !e.Over(now) {
		e.Until, e.UntilReached, e.Lasts, e.silent = now, false, false, nil
	}
}

// cooledDown records a cooldown that has begun, or changed. The caller holds
// the lock.
func (r Recorder) cooledDown(e pool.Event) {
	c, now := e.Cooldown, time.Now()
	for i := range episodes.all {
		// it is unreachable for one reason at a time, and not silent meanwhile
		if other := &episodes.all[i]; c.Unreachable && (other.UntilReached || other.Lasts) && other.Pool == string(r) &&
			other.Backend == e.Member.Name && !other.isAbout(string(r), e.Member.Name, c.Class, c.Cause) {
			other.end(now)
		}
	}
	episode := take(string(r), e.Member.Name, c.Class, c.Cause, c.Since)
	if isNew := episode.Times == 0; isNew || e.Happening != pool.Grew {
		if isNew && e.Happening != pool.Began {
			episode.Since = now // the cooldown began for another reason
		}
		episode.Times++
		episode.Latest = now
	}
	episode.Model, episode.Deployment = strings.Join(modelsAt(e.Member, c.Model), ", "), c.Model
	episode.Cause, episode.Detail, episode.Status = c.Cause, verdict.DetailOf(c.Cause, c.Error), c.Status
	episode.Until, episode.UntilReached = c.Until, c.Unreachable
	put(episode)
}

// fellSilent records that a silence has begun. The caller holds the lock.
func (r Recorder) fellSilent(e pool.Event) {
	now := time.Now()
	episode := take(string(r), e.Member.Name, Silent, "", now)
	episode.Times++
	episode.Latest = now
	if episode.silent == nil {
		episode.silent = make(map[latency.Use]bool)
	}
	episode.silent[e.Silence.Use] = true
	episode.Model, episode.Deployment = strings.Join(modelsAt(e.Member, e.Silence.Model), ", "), e.Silence.Model
	episode.Until, episode.Lasts = now, true
	put(episode)
}

// answered records that a silence is over. The caller holds the lock.
func (r Recorder) answered(e pool.Event) {
	now := time.Now()
	i := find(string(r), e.Member.Name, Silent, "", now)
	if i < 0 || !episodes.all[i].Lasts {
		return
	}
	episode := &episodes.all[i]
	if delete(episode.silent, e.Silence.Use); len(episode.silent) == 0 {
		episode.end(now)
	}
}

// find returns the index of the episode that an event of this time continues,
// or -1. The caller holds the lock.
func find(pool, backend, class, cause string, since time.Time) int {
	for i := range episodes.all {
		known := &episodes.all[i] // it is large, and slices.IndexFunc would copy each one
		if known.isAbout(pool, backend, class, cause) && known.continues(since) {
			return i
		}
	}
	return -1
}

// take removes the episode that an event of this time continues, and returns
// it, or else a new one. The caller holds the lock, and puts it back.
func take(pool, backend, class, cause string, since time.Time) (episode Episode) {
	i := find(pool, backend, class, cause, since)
	if i < 0 {
		return Episode{Pool: pool, Backend: backend, Class: class, Since: since}
	}
	episode = episodes.all[i]
	episodes.all = slices.Delete(episodes.all, i, i+1)
	return episode
}

// put adds an episode as the newest one. The caller holds the lock.
func put(e Episode) {
	episodes.all = append(episodes.all, e)
	if surplus := len(episodes.all) - maxEpisodes; surplus > 0 {
		episodes.all = slices.Delete(episodes.all, 0, surplus)
	}
}

// endSilences ends the silences of backends that are no longer silent, although
// no request has shown that: their credentials have changed, or they are gone.
func endSilences(p Pool, now time.Time) {
	episodes.Lock()
	defer episodes.Unlock()
	for i := range episodes.all {
		e := &episodes.all[i]
		silent := func(b Backend) bool { return b.Name == e.Backend && len(b.Silences)+len(b.Untried) > 0 }
		if e.Pool == p.Name && e.silent != nil && !slices.ContainsFunc(p.Backends, silent) {
			e.end(now)
		}
	}
}

// recordProblem records that a problem of a pool has begun.
func recordProblem(pool, class string, models []string, since time.Time) {
	episodes.Lock()
	defer episodes.Unlock()
	e := take(pool, "", class, "", since)
	e.Times++
	e.Latest, e.Until, e.Lasts, e.Model = since, since, true, firstOf(models)
	put(e)
}

// recordEnd records that a problem of a pool is over since then.
func recordEnd(pool, class string, until time.Time) {
	episodes.Lock()
	defer episodes.Unlock()
	if i := find(pool, "", class, "", until); i >= 0 {
		episodes.all[i].end(until)
	}
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
