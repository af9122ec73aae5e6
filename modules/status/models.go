package status

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// Model has the backends that serve a model.
type Model struct {
	// Model is the name that clients use, or metrics.Other for each model that
	// no config names. It is empty for requests that name none.
	Model    string         `json:"model"`
	Backends []ModelBackend `json:"backends"`
}

// ModelBackend is the state of a backend for one model.
type ModelBackend struct {
	Backend    string `json:"backend"`
	Deployment string `json:"deployment"`
	Priority   int    `json:"priority"`
	State      string `json:"state"`
	Healthy    bool   `json:"healthy"`
	// Class, Until and RemainingMs are from the cooldown that ends last.
	Class       string     `json:"class"`
	Until       *time.Time `json:"until"`
	RemainingMs int64      `json:"remaining_ms"`
}

// Usable reports whether the backend gets requests for the model.
func (b ModelBackend) Usable() bool {
	return b.State != CoolingDown && b.State != Drained && b.State != Silent && b.State != Slow && b.Healthy
}

// TakesAnyModel reports whether a backend accepts models that the config does
// not name.
func (p Pool) TakesAnyModel() bool {
	return slices.ContainsFunc(p.Backends, func(b Backend) bool { return b.member != nil && b.member.Names == nil })
}

// others returns a list with metrics.Other if the pool takes models that the
// config does not name, else nil.
func (p Pool) others() []string {
	if p.TakesAnyModel() {
		return []string{metrics.Other}
	}
	return nil
}

// Models returns the models that the config names, and these others.
func (p Pool) Models(others ...string) []Model {
	var names []string
	// The models of a backend that only other replicas have are not known.
	known := slices.DeleteFunc(slices.Clone(p.Backends), func(b Backend) bool { return b.member == nil })
	for _, b := range known {
		names = append(names, slices.Sorted(maps.Keys(b.member.Names))...)
	}
	names = append(names, others...)
	var models []Model
	named := make(map[string]bool, len(names))
	names = slices.DeleteFunc(names, func(name string) bool {
		again := named[name]
		named[name] = true
		return again
	})
	for _, name := range names {
		model := Model{Model: name, Backends: []ModelBackend{}}
		for _, b := range known {
			if deployment, ok := deploymentAt(b.member, name); ok {
				model.Backends = append(model.Backends, b.forModel(name, deployment, named))
			}
		}
		models = append(models, model)
	}
	return models
}

// forModel returns the state of the backend for a model. named are all models
// that are shown.
func (b Backend) forModel(model, deployment string, named map[string]bool) ModelBackend {
	backend := ModelBackend{Backend: b.Name, Deployment: deployment, Priority: b.Priority, State: b.State,
		Healthy: b.Healthy}
	if backend.State == CoolingDown || backend.State == Silent || backend.State == Slow {
		backend.State = Available
	}
	for _, s := range b.Silences {
		concerns := s.Deployment == pool.ModelKey(deployment) || model == metrics.Other && !named[s.Model]
		if backend.State == Available && concerns {
			backend.State = s.Class()
		}
	}
	for _, cooldown := range b.Cooldowns {
		concerns := cooldown.Scope == BackendScope || cooldown.Deployment == pool.ModelKey(deployment)
		if model == metrics.Other { // no backend has to have a model that a client made up
			concerns = concerns || !named[cooldown.Model] &&
				(cooldown.NeedsOperator || cooldown.Class != string(verdict.NoModel))
		}
		if !concerns || cooldown.spares() {
			continue
		}
		if backend.State != Drained && backend.State != Probing {
			backend.State = CoolingDown
		}
		if backend.Until == nil || backend.Until.Before(cooldown.Until) {
			backend.Class, backend.Until, backend.RemainingMs = cooldown.Class, &cooldown.Until, cooldown.RemainingMs
		}
	}
	return backend
}

// deploymentAt returns the member's name for a model as clients name it. It
// reports whether the member serves the model.
func deploymentAt(m *pool.Member, model string) (deployment string, ok bool) {
	if model == "" {
		return "", true
	}
	name, listed := m.Names[model]
	return cmp.Or(name, m.Deployment, model), listed || m.Names == nil
}

// modelsAt returns the clients' names for a deployment of a member. If the
// member uses the clients' names, this is the deployment itself. If all names,
// or none, lead to the deployment, it is an empty name.
func modelsAt(m *pool.Member, deployment string) (models []string) {
	for model, name := range m.Names {
		if pool.ModelKey(name) == deployment {
			models = append(models, model)
		}
	}
	switch {
	case models != nil:
		slices.Sort(models)
		return models
	case m.Names == nil && m.Deployment == "":
		return []string{deployment}
	}
	return []string{""}
}
