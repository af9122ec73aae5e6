// Package status shows operators the backends and callers of all pools, and
// executes their orders.
//
// [Pools] and [Backends] return the state of each backend, [Pool.Models] the
// state of each model, [Callers] what callers have used, and [Episodes] the
// recent cooldowns, all in the same words. [API] adds them to Caddy's admin API
// as JSON, with the orders. The subcommands of `caddy openai-lb`, such as
// status and drain, call this API. The status page, in package statuspage, is
// another view of the same state.
//
// The module reads what the core knows, at the moment when somebody looks:
// [pools.Default] has the pools. Only the episodes are recorded when they
// happen, by the seam EventsModule. With the option state, a view is the sum
// over all replicas.
package status

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/latency"
	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// The states of a backend. If several apply, the first of them counts.
const (
	// Drained means that an operator took the backend out of use, or that its
	// weight is 0.
	Drained = "drained"
	// CoolingDown means that a cooldown is active, for the whole backend or for
	// a model.
	CoolingDown = "cooling_down"
	// Silent means that requests for a model wait, and the backend sends
	// nothing.
	Silent = "silent"
	// Slow means that the backend was silent, and has since sent bytes, but
	// none in time.
	Slow = "slow"
	// Probing means that the time of a cooldown has passed, and no request has
	// shown yet that the backend has recovered.
	Probing = "probing"
	// Available means that the backend gets requests.
	Available = "available"
)

// Backend is the state of a backend of a pool.
type Backend struct {
	Pool     string `json:"pool"`
	Name     string `json:"name"`
	Priority int    `json:"priority"`
	Weight   int    `json:"weight"`
	// LearnedWeights are the weights that follow the backend's limits, by
	// model. They are omitted if there are none.
	LearnedWeights map[string]float64 `json:"learned_weights,omitempty"`
	State          string             `json:"state"`
	// States has how many replicas see it in each state. It is omitted without
	// `?replica=`.
	States map[string]int `json:"states,omitempty"`
	// DrainedAt has for each of these replicas, by its id, whether an
	// operator's order keeps it out of use there. It is omitted without
	// `?replica=`.
	DrainedAt map[string]bool `json:"drained_at,omitempty"`

	WorstCooldown

	InFlight    int64 `json:"in_flight"`
	MaxRequests int64 `json:"max_requests"`
	// Healthy is false if active health checks fail.
	Healthy bool `json:"healthy"`

	Counts

	// Quotas are the use of its own quotas. They are omitted if there are none.
	Quotas []Quota `json:"quotas,omitempty"`
	// Drain is the order by which an operator took it out of use, or nil.
	Drain *Drain `json:"drain"`
	// LastError is the latest failure that started a cooldown.
	LastError *Error `json:"last_error"`
	// Cooldowns are the cooldowns in force.
	Cooldowns []Cooldown `json:"cooldowns"`
	// Silences are the models for which requests wait at the backend while it
	// sends nothing.
	Silences []Silence `json:"silences"`
	// Untried are the models for which the backend was silent or slow when it
	// was last tried, which is long ago.
	Untried []Untried `json:"untried"`
	// Due are the cooldowns whose time has passed, while no request has shown
	// yet that the backend is back.
	Due []Cooldown `json:"due"`

	member *pool.Member
}

// Quota is the use of a quota of a backend, at all replicas.
type Quota struct {
	// Kind is requests or tokens, and Window second, minute, hour, day or
	// month.
	Kind   string `json:"kind"`
	Window string `json:"window"`
	// Limit is how much this replica may use: all of the quota, or its share.
	Limit int64 `json:"limit"`
	Used  int64 `json:"used"`
	Left  int64 `json:"left"`
	// PassedOver is how many requests went to another backend, or were refused,
	// because the quota had no room, since the process started.
	PassedOver uint64 `json:"passed_over"`
	// Ends is when the window ends.
	Ends time.Time `json:"ends"`
}

// UsedRatio returns the used fraction of the quota.
func (q Quota) UsedRatio() float64 { return float64(q.Used) / float64(max(1, q.Limit)) }

// WorstCooldown is the most important cooldown of a backend. A cooldown of the
// whole backend comes before a cooldown of a model, and among equals the one
// that ends last counts. The fields are empty if no cooldown is active.
type WorstCooldown struct {
	Class       string     `json:"class"`
	Model       string     `json:"model"`
	Deployment  string     `json:"deployment"`
	Until       *time.Time `json:"until"`
	RemainingMs int64      `json:"remaining_ms"`
}

// Counts are the counts of a backend since the process started, and on the
// status page of the last five minutes.
type Counts struct {
	Requests  int64 `json:"requests"`
	Attempts  int64 `json:"attempts"`
	Throttles int64 `json:"throttles"`
	Failures  int64 `json:"failures"`
	Failovers int64 `json:"failovers"`
	Tokens    int64 `json:"tokens"`
}

// Drain is an order to take a backend out of use: since when it is in force,
// who gave it, and why. Unknown values are nil or empty.
type Drain struct {
	Since  *time.Time `json:"since"`
	By     string     `json:"by"`
	Reason string     `json:"reason"`
}

// The scopes of a cooldown: the whole backend, or one of its models.
const (
	BackendScope = "backend"
	ModelScope   = "model"
)

// Cooldown is a cooldown in force. Cause is more specific than the class: why a
// backend is unreachable, or the code of its error. Detail says in words what
// else is known of the cause, such as when a certificate expired.
type Cooldown struct {
	// Scope is BackendScope or ModelScope.
	Scope string `json:"scope"`
	// Model is the name that clients use, and Deployment the backend's name for
	// it. If clients have several names for a deployment, the cooldown appears
	// once for each. If they may use any name, Model is empty.
	Model      string `json:"model"`
	Deployment string `json:"deployment"`
	// ServiceTier is the tier of the requests that are refused, or empty if all
	// are. If it is set, the backend and its model count as available.
	ServiceTier string `json:"service_tier,omitempty"`
	// Operation is the only operation with the cooldown, or empty if all have
	// it. If it is set, the backend and its model count as available, too.
	Operation   string    `json:"operation,omitempty"`
	Class       string    `json:"class"`
	Status      int       `json:"status"`
	Hint        string    `json:"hint"`
	Cause       string    `json:"cause"`
	Detail      string    `json:"detail"`
	Since       time.Time `json:"since"`
	Until       time.Time `json:"until"`
	RemainingMs int64     `json:"remaining_ms"`
	// UntilReached reports whether the cooldown lasts until the backend is
	// reached. Until is then the time of the next attempt.
	UntilReached bool `json:"until_reached"`
	// NeedsOperator reports whether the cooldown lasts until an operator
	// changes something. It is false if the backend lacks a model that a client
	// may have made up.
	NeedsOperator bool `json:"needs_operator"`
}

// spares reports whether other requests for the model are served during the
// cooldown.
func (c *Cooldown) spares() bool { return c.ServiceTier != "" || c.Operation != "" }

// Silence is a model for which a backend accepts requests and sends nothing.
type Silence struct {
	// Model is the name that clients use, and Deployment the backend's name for
	// it.
	Model      string `json:"model"`
	Deployment string `json:"deployment"`
	// Slow reports whether it has sent something since, but nothing in time.
	Slow  bool      `json:"slow"`
	Since time.Time `json:"since"`
}

// Untried is a model for which it is not known whether a silence is over,
// because no request has tried since then.
type Untried struct {
	// Model is the name that clients use, and Deployment the backend's name for
	// it.
	Model      string    `json:"model"`
	Deployment string    `json:"deployment"`
	Since      time.Time `json:"since"`
}

// Class returns Silent or Slow.
func (s Silence) Class() string {
	if s.Slow {
		return Slow
	}
	return Silent
}

// Error is a failure that started a cooldown. Status is 0 if there was no
// reply.
type Error struct {
	Class  string `json:"class"`
	Status int    `json:"status"`
	Cause  string `json:"cause"`
	Detail string `json:"detail"`
	// Model is the name that clients use, and Deployment the backend's name for
	// it.
	Model      string    `json:"model"`
	Deployment string    `json:"deployment"`
	Time       time.Time `json:"time"`
}

// Pool has the backends of a pool, in the order of their priorities, and its
// secrets in files.
type Pool struct {
	Name     string
	Backends []Backend
	// Unlimited are the callers that have keys, but no limits, although others
	// have some.
	Unlimited []string
	Secrets   []keys.Secret
	// Records are the states of what it keeps on disk.
	Records []pools.State
}

// Pools returns the pools in use, with these counts of their backends.
func Pools(now time.Time, counts map[metrics.Key]metrics.Counts) (all []Pool) {
	counts = metrics.By(counts, metrics.Key.OfBackend)
	for _, entry := range pools.Default.Entries() {
		p := Pool{Name: entry.Name, Secrets: entry.Secrets.Secrets(), Records: entry.States()}
		if entry.Callers != nil {
			p.Unlimited = entry.Callers.Unlimited()
		}
		for _, s := range entry.Pool.Snapshot(now) {
			b := backendOf(s, now)
			b.Pool = p.Name
			if entry.Quota != nil {
				for _, u := range entry.Quota(s.Member, now) {
					b.Quotas = append(b.Quotas, Quota{u.Limit.Kind.String(), u.Limit.Unit.String(), u.Allowed, u.Used,
						u.Left(), u.Refused, moment(u.Ends)})
				}
			}
			b.Counts = countsOf(counts[metrics.Key{Pool: p.Name, Backend: b.Name}])
			p.Backends = append(p.Backends, b)
		}
		all = append(all, p)
	}
	return all
}

// Backends returns the backends of the pools for which inPool returns true.
func Backends(now time.Time, inPool func(string) bool) []Backend {
	backends := []Backend{} // in JSON, none is an empty list
	for _, p := range Pools(now, metrics.Totals()) {
		if inPool(p.Name) {
			backends = append(backends, p.Backends...)
		}
	}
	return backends
}

func backendOf(s pool.State, now time.Time) Backend {
	m := s.Member
	b := Backend{
		Name: m.Name, Priority: m.Priority, Weight: m.Weight, LearnedWeights: m.LearnedWeights(),
		MaxRequests: m.MaxRequests, State: stateOf(s), InFlight: s.InFlight, Healthy: s.Healthy,
		Cooldowns: []Cooldown{}, Due: []Cooldown{},
		Silences: silencesOf(s), Untried: untriedOf(s), member: m,
	}
	for _, cooldown := range s.Cooldowns {
		b.Cooldowns = append(b.Cooldowns, cooldownsOf(m, cooldown, now)...)
	}
	for _, cooldown := range s.Due {
		b.Due = append(b.Due, cooldownsOf(m, cooldown, now)...)
	}
	b.sortCooldowns()
	if o := m.TakenOut(); o != nil {
		b.Drain = &Drain{By: o.By, Reason: o.Reason}
		if !o.Time.IsZero() {
			b.Drain.Since = new(moment(o.Time))
		}
	}
	if last := s.Last; last != nil {
		b.LastError = &Error{last.Class, last.Status, last.Cause, verdict.DetailOf(last.Cause, last.Error),
			strings.Join(modelsAt(m, last.Model), ", "), last.Model, moment(last.Since)}
	}
	return b
}

// WeightText returns the weight in use. If models have different weights, it
// returns the lowest and the highest.
func (b *Backend) WeightText() string {
	if len(b.LearnedWeights) == 0 {
		return strconv.Itoa(b.Weight)
	}
	all := slices.Sorted(maps.Values(b.LearnedWeights))
	lowest, highest := fmt.Sprintf("%.3g", all[0]), fmt.Sprintf("%.3g", all[len(all)-1])
	if lowest == highest {
		return lowest
	}
	return lowest + "–" + highest
}

// sortCooldowns sorts the cooldowns by importance, and sets WorstCooldown.
func (b *Backend) sortCooldowns() {
	slices.SortFunc(b.Cooldowns, func(x, y Cooldown) int {
		// backend comes before model
		return cmp.Or(cmp.Compare(x.Scope, y.Scope), cmp.Compare(x.ServiceTier, y.ServiceTier),
			cmp.Compare(x.Operation, y.Operation), y.Until.Compare(x.Until), cmp.Compare(x.Model, y.Model),
			cmp.Compare(x.Class, y.Class))
	})
	if len(b.Cooldowns) > 0 && !b.Cooldowns[0].spares() {
		worst := b.Cooldowns[0]
		b.WorstCooldown = WorstCooldown{worst.Class, worst.Model, worst.Deployment, &worst.Until, worst.RemainingMs}
	}
}

func silencesOf(s pool.State) []Silence {
	silences := []Silence{}
	for _, l := range s.Latencies {
		if !l.Since.IsZero() {
			silences = append(silences,
				Silence{strings.Join(modelsAt(s.Member, l.Model), ", "), l.Model, l.Slow, moment(l.Since)})
		}
	}
	slices.SortFunc(silences, func(x, y Silence) int {
		return cmp.Or(cmp.Compare(x.Deployment, y.Deployment), x.Since.Compare(y.Since))
	})
	// A row is for a model. If several operations of the model are silent, the
	// silence that began first is shown.
	return slices.CompactFunc(silences, func(x, y Silence) bool { return x.Deployment == y.Deployment })
}

func untriedOf(s pool.State) []Untried {
	untried := []Untried{}
	for _, l := range s.Latencies {
		if !l.Untried.IsZero() {
			untried = append(untried,
				Untried{strings.Join(modelsAt(s.Member, l.Model), ", "), l.Model, moment(l.Untried)})
		}
	}
	slices.SortFunc(untried, func(x, y Untried) int { return cmp.Compare(x.Deployment, y.Deployment) })
	return slices.CompactFunc(untried, func(x, y Untried) bool { return x.Deployment == y.Deployment })
}

func stateOf(s pool.State) string {
	is := func(slow bool) bool {
		return slices.ContainsFunc(s.Latencies,
			func(l latency.State) bool { return !l.Since.IsZero() && l.Slow == slow })
	}
	switch {
	case s.Drained:
		return Drained
	case slices.ContainsFunc(s.Cooldowns, func(c pool.Cooldown) bool { return !s.Member.Spares(c) }):
		return CoolingDown
	case is(false):
		return Silent
	case is(true):
		return Slow
	case s.Probing, slices.ContainsFunc(s.Latencies, func(l latency.State) bool { return !l.Untried.IsZero() }):
		return Probing
	}
	return Available
}

// cooldownsOf returns the cooldown in the form that is shown, once for each of
// the clients' models that it covers.
func cooldownsOf(m *pool.Member, c pool.Cooldown, now time.Time) (shown []Cooldown) {
	scope, models := BackendScope, []string{""}
	if !c.Whole {
		scope, models = ModelScope, modelsAt(m, c.Model)
	}
	class := verdict.Class(c.Class)
	needs := verdict.RemedyOf(class, c.Cause).NeedsOperator && (class != verdict.NoModel || m.Knows(c.Model))
	// An active cooldown has some time left.
	left := max(0, (c.Until.Sub(now) + time.Millisecond - 1).Milliseconds())
	for _, model := range models {
		shown = append(shown, Cooldown{scope, model, c.Model, c.Tiers.String(), c.Operation, c.Class, c.Status, c.Hint,
			c.Cause, verdict.DetailOf(c.Cause, c.Error), moment(c.Since), moment(c.Until), left, c.Unreachable, needs})
	}
	return shown
}

// moment returns a time in the form that is shown.
func moment(t time.Time) time.Time { return t.UTC().Truncate(time.Millisecond) }

func countsOf(c metrics.Counts) Counts {
	return Counts{int64(c.Requests), int64(c.Attempts), int64(c.Throttles), int64(c.Failures), int64(c.Failovers),
		int64(c.Tokens)}
}

// Utilization returns the latest utilization of the backend's provisioned
// deployments, by their names at the backend.
func (b *Backend) Utilization() map[string]float64 {
	if b.member == nil {
		return nil // only other replicas have the backend
	}
	return metrics.Of(b.Pool).Backend(b.Name).Utilization(b.member)
}

// orders maps the names of operators' orders for a backend to functions that
// execute them.
var orders = map[string]func(Backend, pool.Order){
	"drain":  func(b Backend, o pool.Order) { b.member.Drain(o) },
	"resume": func(b Backend, o pool.Order) { b.member.Resume(o) },
	"reset":  func(b Backend, o pool.Order) { b.member.Reset(o) },
}
