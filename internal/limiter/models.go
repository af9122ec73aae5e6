package limiter

import (
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// A caller may have limits of single models besides those of all models. Each
// of these models has a Limiter of its own, which counts the caller's requests
// for the model, and shares and saves this use as that of a caller does. A
// request is charged to both or to none. The lock of a caller's Limiter may be
// held while that of a model's is taken, but not the other way round.
//
// There are limiters only of the models in the config, so that names which
// clients make up need no memory. They are forgotten together with the caller.

// idOfModel returns the id of the limiter of a caller's model. No caller has
// this id, because the name of a caller has only printable characters.
func idOfModel(caller, model string) ratelimit.CallerID {
	return ratelimit.IDOf(caller + "\x00" + model)
}

// change applies the settings of the config to a caller and to the limiters of
// its models. A limiter that has no limits any more counts nothing, and is
// forgotten when its use does not count any more. cs.mu must be held.
func (cs *Limiters) change(now time.Time, c *Limiter) {
	s, limits := cs.settings(c.name), make(map[string][]ratelimit.Limit)
	for _, l := range s.Limits {
		limits[l.Model] = append(limits[l.Model], l)
	}
	models := make(map[string]*Limiter)
	for model, m := range c.models {
		if limits[model] == nil {
			m.Change(now, Settings{Location: s.Location})
			m.see(now)
			m.mu.Lock()
			m.isModel = false
			m.mu.Unlock()
		}
	}
	for model, modelLimits := range limits {
		if model == "" {
			continue
		}
		m := cs.ofID(now, idOfModel(c.name, model))
		if m.number == 0 {
			cs.add(m, c.name)
		}
		m.mu.Lock()
		m.isModel, m.resetReported = true, c.resetReported
		m.mu.Unlock()
		m.Change(now, Settings{Limits: modelLimits, Tier: s.Tier, Tiers: s.Tiers, Location: s.Location})
		models[model] = m
	}
	s.Limits = limits[""]
	c.Change(now, s)
	c.mu.Lock()
	c.models = models
	c.mu.Unlock()
}
