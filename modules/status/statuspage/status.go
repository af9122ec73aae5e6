package statuspage

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/admin"
	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
	"github.com/openai-lb/caddy-openai-lb/modules/status"
)

// Status is everything that the page shows. As JSON, its fields have the same
// names as in the admin API and in metrics.
type Status struct {
	Version      string    `json:"version"`
	CaddyVersion string    `json:"caddy_version"`
	Time         time.Time `json:"time"`
	// WindowSeconds is the time of all counts: at most five minutes.
	WindowSeconds float64             `json:"window_seconds"`
	Pools         []poolStatus        `json:"pools"`
	States        []seam.EngineStatus `json:"states"`
	// SumsOver are the replicas that share state: those that are Included are
	// in all sums, of requests, backends, models and callers.
	SumsOver  []admin.Seen `json:"sums_over"`
	connected bool
	// asked is when they were asked, and cutOff reports whether this one has
	// lost its connection to some since.
	asked  time.Time
	cutOff bool
}

// poolStatus is what the page shows of a pool.
type poolStatus struct {
	Pool string `json:"pool"`
	requestCounts
	// SpilloverRatio is the share of the served requests that were not served
	// by the first priority of their model. It is nil if no model has another
	// one.
	SpilloverRatio *float64  `json:"spillover_ratio"`
	Failovers      int64     `json:"failovers"`
	Tokens         int64     `json:"tokens"`
	FirstByte      quantiles `json:"time_to_first_byte_seconds"`
	// Waiting are the requests that wait for their first byte now.
	Waiting metrics.Waiting `json:"waiting"`
	// Classes are the classes of the answers other than served, the most
	// frequent first.
	Classes []classStatus `json:"classes"`
	// Problems are sorted: problems that an operator has to solve come first.
	Problems  []status.Problem `json:"problems"`
	Backends  []backendStatus  `json:"backends"`
	Models    []modelStatus    `json:"models"`
	Cooldowns []status.Episode `json:"recent_cooldowns"`
	Spans     []status.Span    `json:"spans"`
	// replicas is how many have the pool.
	replicas int
	// Callers are the busiest of the callers that a view shows, if the pool
	// limits any, of so many that were Found, and MoreCallers is how many of
	// those there are. callers are all.
	Callers     []status.Caller `json:"callers"`
	MoreCallers int             `json:"more_callers"`
	Found       int             `json:"-"`
	callers     []status.Caller
	// Unlimited are the callers that have keys, but no limits, although the
	// pool limits others.
	Unlimited []string `json:"callers_without_limits"`
}

// requestCounts are the answered requests of a pool. Requests is the sum of the
// Served requests, those NotServed by a fault of the service, CallerErrors, and
// those whose client left while it waited. NotServedRatio leaves out the last
// two: mistakes of callers must not hide an outage.
type requestCounts struct {
	Requests       int64    `json:"requests"`
	Served         int64    `json:"served"`
	NotServed      int64    `json:"not_served"`
	CallerErrors   int64    `json:"caller_errors"`
	LeftWaiting    int64    `json:"left_waiting"`
	NotServedRatio *float64 `json:"not_served_ratio"`
}

// quantiles are estimates in seconds. Without requests, they are nil.
type quantiles struct {
	P50 *float64 `json:"p50"`
	P95 *float64 `json:"p95"`
}

func quantilesOf(h metrics.Histogram) quantiles {
	quantile := func(q float64) *float64 {
		if seconds, ok := h.Quantile(q); ok {
			return new(math.Round(seconds*1000) / 1000)
		}
		return nil
	}
	return quantiles{quantile(.5), quantile(.95)}
}

// classStatus is how many requests got an answer of a class.
type classStatus struct {
	Class      string        `json:"class"`
	Requests   int64         `json:"requests"`
	Fault      metrics.Fault `json:"at_fault"`
	RunbookURL string        `json:"runbook_url"`
}

// backendStatus is what the page shows of a backend.
type backendStatus struct {
	status.Backend
	// RequestsRatio is its part of the pool's requests that were answered by a
	// backend. It is nil if there were none.
	RequestsRatio *float64  `json:"requests_ratio"`
	FirstByte     quantiles `json:"time_to_first_byte_seconds"`
	// Utilization is the latest utilization of its provisioned deployments, by
	// their names. It is empty if no request was sent to the backend: it would
	// be too old.
	Utilization map[string]float64 `json:"deployment_utilization_ratio"`
}

// modelStatus is what the page shows of a model.
type modelStatus struct {
	status.Model
	Requests   int64            `json:"requests"`
	Served     int64            `json:"served"`
	Priorities []priorityStatus `json:"priorities"`
	// NoneAt is at how many replicas no backend is available, and AwayAt at how
	// many each backend is not, if it is not at some.
	NoneAt   int            `json:"none_available_at"`
	AwayAt   map[string]int `json:"not_available_at"`
	replicas int
}

// priorityStatus has the requests that the backends of a priority served.
type priorityStatus struct {
	Priority int   `json:"priority"`
	Served   int64 `json:"served"`
	// ServedRatio is their part of all served requests. It is nil if there are
	// none.
	ServedRatio *float64 `json:"served_ratio"`
}

// maxEpisodes is how many episodes of cooldowns are shown of a pool.
const maxEpisodes = 10

// statusAt returns what the page shows now: of this replica and the others.
func statusAt(now time.Time, others status.Others) Status {
	spans := metrics.Recent.Spans()
	counts, length := metrics.Sum(spans)
	callers := others.With(now, func(string) bool { return true })
	s := Status{
		Version: metrics.Version(), CaddyVersion: metrics.CaddyVersion(), Time: now.UTC().Truncate(time.Millisecond),
		WindowSeconds: length.Seconds(), Pools: []poolStatus{}, States: seam.Statuses(),
		SumsOver: append([]admin.Seen{}, callers.Replicas...), connected: callers.Connected, asked: others.Asked,
	}
	s.cutOff = slices.ContainsFunc(s.States, func(s seam.EngineStatus) bool { return !s.InTouch })
	self := replica{}
	if i := slices.IndexFunc(s.SumsOver, func(r admin.Seen) bool { return r.Self }); i >= 0 {
		self = replica{s.SumsOver[i].ID, s.SumsOver[i].Name()}
	}
	for _, p := range status.Pools(now, counts) {
		local := status.View{
			Counts: counts, Episodes: status.Episodes(p.Name, maxEpisodes),
			Traffic: status.Traffic{
				Waiting: metrics.Of(p.Name).FirstBytes.At(now), Spans: status.SpansOf(p.Name, spans),
			},
		}
		s.Pools = append(s.Pools, poolStatusOf(now, p, self, local, others.Views[p.Name], s.States))
	}
	for i := range s.Pools {
		for _, c := range callers.Rows {
			if c.Pool == s.Pools[i].Pool {
				s.Pools[i].callers = append(s.Pools[i].callers, c)
			}
		}
	}
	return s
}

// replica is the id and the name of this replica. Both are empty without the
// option state.
type replica struct{ id, name string }

func poolStatusOf(now time.Time, p status.Pool, self replica, local status.View, others []*status.View,
	states []seam.EngineStatus) poolStatus {
	counts := maps.Clone(local.Counts)
	maps.DeleteFunc(counts, func(key metrics.Key, _ metrics.Counts) bool { return key.Pool != p.Name })
	traffic := local.Traffic
	for _, v := range others {
		for key, c := range v.Counts {
			counts[key] = counts[key].Plus(c)
		}
		traffic.Add(v.Traffic)
	}
	total := metrics.By(counts, func(metrics.Key) string { return "" })[""]
	together := p.Together(now, self.id, others, counts)
	s := poolStatus{
		Pool: p.Name, Failovers: int64(total.Failovers), Tokens: int64(total.Tokens),
		FirstByte: quantilesOf(total.FirstByte),
		Waiting:   traffic.Waiting,
		Backends:  backendStatuses(together, counts, others),
		Models:    modelStatuses(together, counts),
		Cooldowns: append([]status.Episode{}, status.EpisodesOf(local.Episodes, others, maxEpisodes)...),
		Spans:     traffic.Spans, Unlimited: append([]string{}, p.Unlimited...), replicas: 1 + len(others),
	}
	s.countClasses(counts)
	s.countSpillover()
	var names []string
	for _, m := range s.Models {
		names = append(names, m.Model.Model)
	}
	seen := [][]status.Model{p.Models(names...)}
	s.Problems = status.ProblemsOf(self.name, p.Problems(now, seen[0], states), others)
	for _, v := range others {
		seen = append(seen, p.SeenBy(now, v).Models(names...))
	}
	for i := range s.Models {
		s.Models[i].countAway(seen)
	}
	return s
}

// countAway counts at how many replicas no backend is available, and each
// backend is not. seen are the models as each replica sees them.
func (m *modelStatus) countAway(seen [][]status.Model) {
	m.replicas = len(seen)
	for _, models := range seen {
		for _, model := range models {
			if model.Model != m.Model.Model {
				continue
			}
			if status.WhyNone(model) != "" {
				m.NoneAt++
			}
			for _, b := range model.Backends {
				if !b.Usable() {
					m.AwayAt[b.Backend]++
				}
			}
		}
	}
}

// countClasses adds up the classes of the answers.
func (s *poolStatus) countClasses(counts map[metrics.Key]metrics.Counts) {
	s.Classes = []classStatus{}
	for class, c := range metrics.By(counts, func(k metrics.Key) string { return k.Class }) {
		n, fault := int64(c.Requests), metrics.FaultOf(class)
		switch fault {
		case metrics.CallersFault:
			s.CallerErrors += n
		case metrics.ServiceFault:
			s.NotServed += n
		case metrics.PerhapsOurs:
			s.LeftWaiting += n
		case metrics.NoFault:
			if class == string(verdict.Served) { // and not a probe, or a list of models
				s.Served += n
			}
			continue
		}
		if n > 0 {
			s.Classes = append(s.Classes, classStatus{class, n, fault, status.RunbookURL(class)})
		}
	}
	slices.SortFunc(s.Classes, func(a, b classStatus) int {
		return cmp.Or(cmp.Compare(b.Requests, a.Requests), cmp.Compare(a.Class, b.Class))
	})
	s.Requests = s.Served + s.NotServed + s.CallerErrors + s.LeftWaiting
	s.NotServedRatio = ratio(s.NotServed, s.NotServed+s.Served)
}

func (s *poolStatus) countSpillover() {
	var spilled, served int64
	several := false
	for _, m := range s.Models {
		for i, p := range m.Priorities {
			served += p.Served
			if i > 0 {
				several = true
				spilled += p.Served
			}
		}
	}
	if several {
		s.SpilloverRatio = ratio(spilled, served)
	}
}

// ratio returns a part of a whole, or nil if the whole is 0.
func ratio(part, whole int64) *float64 {
	if whole == 0 {
		return nil
	}
	return new(float64(part) / float64(whole))
}

func backendStatuses(p status.Pool, counts map[metrics.Key]metrics.Counts, others []*status.View) []backendStatus {
	var answered int64
	for _, b := range p.Backends {
		answered += b.Requests
	}
	byBackend := metrics.By(counts, func(k metrics.Key) string { return k.Backend })
	backends := []backendStatus{}
	for _, b := range p.Backends {
		s := backendStatus{Backend: b, RequestsRatio: ratio(b.Requests, answered),
			FirstByte: quantilesOf(byBackend[b.Name].FirstByte), Utilization: map[string]float64{}}
		if b.Attempts > 0 {
			maps.Copy(s.Utilization, b.Utilization())
		}
		for _, v := range others {
			for deployment, ratio := range v.Utilization[b.Name] {
				s.Utilization[deployment] = max(s.Utilization[deployment], ratio)
			}
		}
		backends = append(backends, s)
	}
	return backends
}

func modelStatuses(p status.Pool, counts map[metrics.Key]metrics.Counts) []modelStatus {
	type key struct{ model, backend string }
	requests, served := make(map[string]int64), make(map[key]int64)
	for k, c := range counts {
		switch n := int64(c.Requests); {
		case n == 0 || metrics.FaultOf(k.Class) == metrics.NoFault && k.Class != string(verdict.Served):
		case k.Class == apierror.Unauthenticated: // it was refused before its model was known
		case k.Class == string(verdict.Served):
			served[key{k.Model, k.Backend}] += n
			fallthrough
		default:
			requests[k.Model] += n
		}
	}
	models := []modelStatus{}
	others := slices.Sorted(maps.Keys(requests))
	if p.TakesAnyModel() {
		others = append(others, metrics.Other)
	}
	for _, m := range p.Models(others...) {
		s := modelStatus{Model: m, Requests: requests[m.Model], Priorities: []priorityStatus{},
			AwayAt: map[string]int{}}
		for _, b := range p.Backends { // by priority
			n := served[key{m.Model, b.Name}]
			serves := slices.ContainsFunc(m.Backends,
				func(mb status.ModelBackend) bool { return mb.Backend == b.Name })
			if n == 0 && !serves {
				continue
			}
			if last := len(s.Priorities) - 1; last < 0 || s.Priorities[last].Priority != b.Priority {
				s.Priorities = append(s.Priorities, priorityStatus{Priority: b.Priority})
			}
			s.Priorities[len(s.Priorities)-1].Served += n
			s.Served += n
		}
		for i := range s.Priorities {
			s.Priorities[i].ServedRatio = ratio(s.Priorities[i].Served, s.Served)
		}
		models = append(models, s)
	}
	return models
}
