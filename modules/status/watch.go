package status

import (
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// A cooldown or a silence is an event, which the log reports when it happens.
// Some problems of a pool are none: that no backend is left for a model is the
// sum of events of several backends, and that requests wait is known only
// because time passes. A watch looks for these from time to time, and logs the
// beginning and the end of each: at the level error if a person must act.
//
// There is one timer for all pools of the process. Each replica logs what it
// sees itself.

const (
	// lookInterval is the time between two looks.
	lookInterval = 5 * time.Second
	// beginsAfter is how long a problem must last before it is logged. A
	// cooldown of some seconds needs no action.
	beginsAfter = 15 * time.Second
	// endsAfter is how long a problem must be away before its end is logged.
	// When a cooldown is over, a backend counts as available until the next
	// request fails.
	endsAfter = 30 * time.Second
)

// watched looks for the problems of all pools.
type watched struct {
	mu     sync.Mutex
	timer  *time.Timer
	pools  map[string]poolLog
	spells map[incident]*spell
}

// poolLog is where the problems of a pool are logged. users is how many configs
// use it: the current one and, during a reload, the old one.
type poolLog struct {
	users  int
	logger *zap.Logger
}

// watch is that of the process.
var watch watched

// incident identifies a problem that is watched, for one of its models.
type incident struct{ pool, class, model string }

// spell is the time for which there has been a problem.
type spell struct {
	// since is when it was first seen, and last when it was seen for the last
	// time.
	since, last time.Time
	// logged reports whether the log has its beginning.
	logged bool
}

// use begins to log the problems of a pool, until leave was called for each
// use. A new config calls use before the old one calls leave, so what is known
// of problems survives a reload.
func (w *watched) use(pool string, logger *zap.Logger) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.pools) == 0 {
		w.pools, w.spells = make(map[string]poolLog), make(map[incident]*spell)
		w.timer = time.AfterFunc(lookInterval, w.tick)
	}
	w.pools[pool] = poolLog{w.pools[pool].users + 1, logger}
}

// leave ends a use of a pool.
func (w *watched) leave(pool string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := w.pools[pool]
	if p.users--; p.users > 0 {
		w.pools[pool] = p
		return
	}
	if delete(w.pools, pool); len(w.pools) == 0 {
		w.timer.Stop()
	}
}

func (w *watched) tick() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.pools) == 0 {
		return
	}
	w.look(time.Now())
	w.timer.Reset(lookInterval)
}

// look looks for problems, and logs those that have begun or ended. The caller
// holds the lock.
func (w *watched) look(now time.Time) {
	states, configured := seam.Statuses(), make(map[string]bool)
	for _, p := range Pools(now, nil) {
		logger := w.pools[p.Name].logger
		if configured[p.Name] = true; logger == nil {
			continue
		}
		w.see(p.Name, p.Problems(now, p.Models(p.others()...), states), now)
		w.report(p.Name, logger, now)
		endSilences(p, now)
	}
	for i := range w.spells {
		if !configured[i.pool] { // the pool is in no config any more
			delete(w.spells, i)
		}
	}
}

// see records which problems there are.
func (w *watched) see(pool string, problems []Problem, now time.Time) {
	for _, p := range problems {
		if verdict.RemedyOf(verdict.Class(p.Class), p.Cause).Over == "" {
			continue
		}
		models := p.Models
		if len(models) == 0 {
			models = []string{""}
		}
		for _, model := range models {
			i := incident{pool, p.Class, model}
			if w.spells[i] == nil {
				w.spells[i] = &spell{since: now}
			}
			w.spells[i].last = now
		}
	}
}

// report logs what has begun or ended, with one line for all models.
func (w *watched) report(pool string, logger *zap.Logger, now time.Time) {
	for _, remedy := range verdict.PoolRemedies {
		if remedy.Over == "" {
			continue
		}
		begun, ended, stays, since, last := []string{}, []string{}, false, now, time.Time{}
		for i, s := range w.spells {
			if i.pool != pool || i.class != string(remedy.Class) {
				continue
			}
			switch {
			case s.last.Equal(now) && !s.logged && now.Sub(s.since) >= beginsAfter:
				s.logged = true
				begun, since = append(begun, i.model), earlier(since, s.since)
			case !s.last.Equal(now) && now.Sub(s.last) >= endsAfter:
				if delete(w.spells, i); s.logged {
					ended, since, last = append(ended, i.model), earlier(since, s.since), later(last, s.last)
				}
			}
			stays = stays || s.logged && now.Sub(s.last) < endsAfter
		}
		if len(begun) > 0 {
			slices.Sort(begun)
			level := zap.WarnLevel
			if remedy.NeedsOperator {
				level = zap.ErrorLevel
			}
			logger.Log(level, remedy.Log, zap.String("pool", pool), modelsField(begun), zap.String("next", remedy.Next))
			recordProblem(pool, string(remedy.Class), begun, since)
		}
		if len(ended) > 0 {
			slices.Sort(ended)
			logger.Info(remedy.Over, zap.String("pool", pool), modelsField(ended),
				zap.Float64("seconds", last.Sub(since).Round(time.Second).Seconds()))
			if !stays {
				recordEnd(pool, string(remedy.Class), last)
			}
		}
	}
}

// modelsField returns the field that names models, unless the problem is about
// no model.
func modelsField(models []string) zap.Field {
	if text := strings.Join(models, ", "); text != "" {
		return zap.String("models", text)
	}
	return zap.Skip()
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}
