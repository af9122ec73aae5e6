package statuspage

import (
	"bytes"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
	"github.com/openai-lb/caddy-openai-lb/modules/status"
)

// render returns the part of the page that changes.
func (v view) render(s Status) ([]byte, error) {
	var fragment bytes.Buffer
	template := "state"
	if v.callers {
		template = "view of callers"
	}
	err := templates.ExecuteTemplate(&fragment, template, v.of(s))
	return fragment.Bytes(), err
}

// The methods below are for the template.

// manyNotServed is the share of requests that are not served from which on the
// page shows it in red. The alert on it has the same limit.
const manyNotServed = .05

// Level returns how bad NotServedRatio is.
func (s poolStatus) Level() string {
	switch {
	case s.NotServedRatio == nil:
		return "none"
	case s.NotServed == 0:
		return "good"
	case *s.NotServedRatio > manyNotServed:
		return "bad"
	}
	return "warn"
}

// NumberOfProblems returns how many problems there are.
func (s poolStatus) NumberOfProblems() int { return len(s.Problems) }

// Judged returns how many requests NotServedRatio is a share of.
func (s poolStatus) Judged() int64 { return s.Served + s.NotServed }

// Oldest returns how long the oldest request has waited for its first byte.
func (s poolStatus) Oldest() string {
	if s.Waiting.OldestSeconds < 1 {
		return "2 s"
	}
	return seconds(&s.Waiting.OldestSeconds)
}

// ByFault returns the classes of answers that are a fault of the service, or of
// the caller.
func (s poolStatus) ByFault(fault string) []classStatus {
	return slices.DeleteFunc(slices.Clone(s.Classes), func(c classStatus) bool { return string(c.Fault) != fault })
}

// Utilized reports whether the utilization of a backend is known.
func (s poolStatus) Utilized() bool {
	return slices.ContainsFunc(s.Backends, func(b backendStatus) bool { return len(b.Utilization) > 0 })
}

// priorityView has the backends of a priority.
type priorityView struct {
	Priority int
	Backends []backendStatus
}

// ByPriority returns the backends in groups.
func (s poolStatus) ByPriority() (groups []priorityView) {
	for _, b := range s.Backends {
		if n := len(groups); n == 0 || groups[n-1].Priority != b.Priority {
			groups = append(groups, priorityView{Priority: b.Priority})
		}
		group := &groups[len(groups)-1]
		group.Backends = append(group.Backends, b)
	}
	return groups
}

// The conditions of a backend that are not states: failing if it fails active
// health checks, and coolingDownForSome if it cools down, but not for all
// models.
const (
	failing            = "failing health checks"
	coolingDownForSome = "cooling down for some models"
)

// Condition returns the state of a backend in words.
func (s poolStatus) Condition(b backendStatus) string {
	if b.State != status.CoolingDown {
		return words(b.State)
	}
	for _, m := range s.Models {
		usable := func(mb status.ModelBackend) bool { return mb.Backend == b.Name && mb.Usable() }
		if m.Model.Model != "" && slices.ContainsFunc(m.Backends, usable) {
			return coolingDownForSome
		}
	}
	return words(b.State)
}

// At returns at how many replicas the backend has its state, if not at all.
func (s poolStatus) At(b backendStatus) string { return at(b.States[b.State], s.replicas) }

// at returns at how many of several replicas something is so, if not at all.
func at(n, total int) string {
	if n == 0 || n >= total {
		return ""
	}
	return fmt.Sprintf(" at %d of %s", n, several(total, "replica"))
}

// NeedsOperator reports whether a cooldown of the backend needs an operator.
func (b backendStatus) NeedsOperator() bool {
	return slices.ContainsFunc(b.Cooldowns, func(cooldown status.Cooldown) bool { return cooldown.NeedsOperator })
}

// CurrentSilences and CurrentUntried return what is shown of silences: a
// backend that cannot be reached is not called silent, too.
func (b backendStatus) CurrentSilences() []status.Silence {
	silences, _ := b.Current()
	return silences
}

// CurrentUntried: see CurrentSilences.
func (b backendStatus) CurrentUntried() []status.Untried {
	_, untried := b.Current()
	return untried
}

// Summary returns the states of the backends as a sentence.
func (s poolStatus) Summary() string {
	in := make(map[string]int)
	for _, b := range s.Backends {
		if !b.Healthy && b.State != status.Drained {
			in[failing]++
		} else {
			in[s.Condition(b)]++
		}
	}
	sentence := fmt.Sprintf("%d of %s available", in[status.Available], several(len(s.Backends), "backend"))
	for _, state := range []string{words(status.CoolingDown), coolingDownForSome, status.Silent, status.Slow,
		status.Probing, status.Drained, failing} {
		if in[state] > 0 {
			sentence += fmt.Sprintf(", %d %s", in[state], state)
		}
	}
	return sentence + "."
}

// maxShown is how many cooldowns of a backend are shown, and how many models of
// a problem.
const maxShown = 3

// Shown returns the cooldowns that are shown.
func (b backendStatus) Shown() []status.Cooldown {
	return b.Cooldowns[:min(maxShown, len(b.Cooldowns))]
}

// Hidden returns how many cooldowns are not shown.
func (b backendStatus) Hidden() int { return len(b.Cooldowns) - len(b.Shown()) }

// utilizationView is what the page shows of the utilization of a deployment.
type utilizationView struct {
	Deployment, Percent string
	Width               float64
	Full                bool
}

// Utilizations returns the utilization of the backend's deployments, with their
// names if there are several.
func (b backendStatus) Utilizations() (views []utilizationView) {
	for _, deployment := range slices.Sorted(maps.Keys(b.Utilization)) {
		ratio, name := b.Utilization[deployment], ""
		if len(b.Utilization) > 1 {
			name = deployment
		}
		views = append(views, utilizationView{name, percent(&ratio), math.Round(100 * min(1, ratio)), ratio >= 1})
	}
	return views
}

// Named returns the first models as they are shown.
func (s poolStatus) Named(models []string) string {
	return firstOf(maxShown, models, s.NameOf)
}

// NameOf returns a model as it is shown.
func (s poolStatus) NameOf(model string) string {
	listed := func(m modelStatus) bool { return m.Model.Model != "" && m.Model.Model != metrics.Other }
	switch {
	case model == "":
		return "no model named"
	case model != metrics.Other:
		return cut(model)
	case slices.ContainsFunc(s.Models, listed):
		return "other models"
	}
	return "all models"
}

// Condition returns how many backends of the model are usable.
func (m modelStatus) Condition() string {
	usable := len(m.Backends) - len(m.Away())
	switch {
	case len(m.Backends) == 0:
		return "No backend has it"
	case usable == len(m.Backends):
		return "Available"
	case usable == 0, m.NoneAt > 0:
		return "None available" + at(m.NoneAt, m.replicas)
	}
	return fmt.Sprintf("%d of %d available", usable, len(m.Backends))
}

// State returns the state of the model as a whole: unhealthy if an operator has
// to act because no backend can serve it, cooling down if a backend is away
// that is not drained, or available.
func (m modelStatus) State() string {
	notDrained := func(b status.ModelBackend) bool { return b.State != status.Drained }
	switch {
	case m.NoneAt > 0 && status.WhyNone(m.Model) == status.Unavailable:
		return status.Unhealthy
	case slices.ContainsFunc(m.Away(), notDrained):
		return status.CoolingDown
	}
	return status.Available
}

// Away returns the backends that are not usable for the model.
func (m modelStatus) Away() []status.ModelBackend {
	return slices.DeleteFunc(slices.Clone(m.Backends), status.ModelBackend.Usable)
}

// Why returns why a backend is not usable for the model.
func (m modelStatus) Why(b status.ModelBackend) string {
	reason := b.State
	switch {
	case !b.Healthy:
		reason = failing
	case b.Class != "":
		reason = words(b.Class)
	}
	return words(reason) + at(m.AwayAt[b.Backend], m.replicas)
}

// episodeText returns what a row of the recent cooldowns and silences is about.
func episodeText(e status.Episode) string {
	if e.Backend == "" { // a problem of the pool
		return verdict.RemedyOf(verdict.Class(e.Class), e.Cause).Meaning
	}
	return words(e.Class) + detail(e.Status, e.Cause, e.Detail)
}

// episodeEnd returns when something recent ends that is not over.
func episodeEnd(e status.Episode) string {
	switch {
	case e.UntilReached:
		return "until it is reached"
	case e.Lasts && e.Backend == "":
		return "not over"
	case e.Lasts:
		return "until it answers in time"
	}
	return "until " + e.Until.UTC().Format(time.TimeOnly)
}

// where names the replicas that have the problem, if not all do.
func where(p status.Problem) string {
	if len(p.Replicas) == 0 {
		return ""
	}
	return "at " + firstOf(maxShown, p.Replicas, cut)
}

// part is the part of a priority in a bar of served requests.
type part struct {
	Priority, Number int
	Percent          string
	X, Width         float64
}

// Parts returns the parts of the priorities.
func (m modelStatus) Parts() (parts []part) {
	x := 0.0
	for i, p := range m.Priorities {
		width := 0.0
		if p.ServedRatio != nil {
			width = 100 * *p.ServedRatio
		}
		parts = append(parts, part{p.Priority, min(i, 3), percent(p.ServedRatio), x, width})
		x += width
	}
	return parts
}
