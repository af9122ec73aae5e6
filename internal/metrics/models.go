package metrics

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// doubtful is how long a backend stays doubtful after a cooldown for a failure
// has ended. It is limited because an idle backend is not tried, so that
// nothing else would end the doubt.
const doubtful = time.Minute

var soundDesc = desc("model_backends_sound",
	"Backends of a model that are neither silent, unreachable nor failing, nor were so just before. Throttled ones are sound: they have said when they return.",
	"pool", "model")

// SoundBackends returns the number of sound backends of each model, by the
// clients' names. All models that the config does not name count as one. A
// backend counts as silent for them if it is silent for any.
func SoundBackends(states []pool.State, now time.Time) map[string]int {
	sound := make(map[string]int)
	for _, s := range states {
		for model := range s.Member.Names {
			sound[clean(model)] = 0
		}
		if s.Member.Names == nil {
			sound[Other] = 0
		}
	}
	names := slices.Collect(maps.Keys(sound))
	for _, s := range states {
		if s.Drained {
			continue
		}
		for _, model := range names {
			deployment, listed := s.Member.Names[model]
			if !listed && s.Member.Names != nil {
				continue
			}
			deployment = cmp.Or(deployment, s.Member.Deployment, model)
			isAny := model == Other && s.Member.Deployment == ""
			if isSound(s, now, func(name string) bool { return isAny || name == pool.ModelKey(deployment) }) {
				sound[model]++
			}
		}
	}
	return sound
}

// isSound reports whether a backend is sound for the models for which concerns
// returns true.
func isSound(s pool.State, now time.Time, concerns func(name string) bool) bool {
	if !s.Healthy {
		return false
	}
	for _, p := range s.Latencies {
		if !p.Since.IsZero() && concerns(p.Model) {
			return false
		}
	}
	for i, c := range slices.Concat(s.Cooldowns, s.Due) {
		switch due := i >= len(s.Cooldowns); {
		case c.Class == string(verdict.Throttled), s.Member.Spares(c), !c.Whole && !concerns(c.Model):
		case !c.Whole && c.Class == string(verdict.NoModel) && !s.Member.Knows(c.Model): // a client made it up
		case !due || now.Sub(c.Until) < doubtful:
			return false
		}
	}
	return true
}

func collectSound(pool string, states []pool.State, now time.Time, metrics chan<- prometheus.Metric) {
	for model, n := range SoundBackends(states, now) {
		metrics <- prometheus.MustNewConstMetric(soundDesc, prometheus.GaugeValue, float64(n), pool, model)
	}
}
