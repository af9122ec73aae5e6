package status

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/admin"
	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

// The status page shows sums over all replicas. Each replica answers one
// question with all data of its own page, as rows: a backend, a problem, the
// counts of the last five minutes by their keys, and so on. The asking replica
// adds up the numbers. States cannot be added, so it shows the worst state of a
// backend, and at how many replicas the backend has it.

// viewQuestion is the first word of the question, which has no further words.
const viewQuestion = "view"

func init() {
	admin.Answer(viewQuestion, answers(pageRows))
}

// View is a pool as one replica sees it. All counts are of the last five
// minutes.
type View struct {
	// Replica is the replica's name for operators.
	Replica  string
	Backends []Backend
	// Utilization has the utilization of deployments, by backend and
	// deployment.
	Utilization map[string]map[string]float64
	Problems    []Problem
	Episodes    []Episode
	Counts      map[metrics.Key]metrics.Counts
	Traffic
}

// Traffic is the part of a View that is about the whole pool.
type Traffic struct {
	Waiting metrics.Waiting `json:"waiting"`
	// Spans are the latest spans, the newest last.
	Spans []Span `json:"spans"`
}

// Span has the counts of a period of time.
type Span struct {
	Seconds   float64 `json:"seconds"`
	Requests  float64 `json:"requests"`
	Failovers float64 `json:"failovers"`
	Tokens    float64 `json:"tokens"`
}

// pageRow is a caller, or a part of a View of a pool.
type pageRow struct {
	Pool        string             `json:"pool"`
	Caller      *Caller            `json:"caller,omitempty"`
	Backend     *Backend           `json:"backend,omitempty"`
	Utilization map[string]float64 `json:"utilization,omitempty"`
	Problem     *Problem           `json:"problem,omitempty"`
	Episode     *Episode           `json:"episode,omitempty"`
	Key         *metrics.Key       `json:"key,omitempty"`
	Counts      *metrics.Counts    `json:"counts,omitempty"`
	Traffic     *Traffic           `json:"traffic,omitempty"`
}

// pageRows returns this replica's rows for these pools.
func pageRows(now time.Time, inPool func(string) bool) []pageRow {
	rows := []pageRow{}
	for _, c := range callersIn(now, inPool) {
		rows = append(rows, pageRow{Pool: c.Pool, Caller: &c})
	}
	spans, states := metrics.Recent.Spans(), seam.Statuses()
	counts, _ := metrics.Sum(spans)
	for key, c := range counts {
		if inPool(key.Pool) {
			rows = append(rows, pageRow{Pool: key.Pool, Key: &key, Counts: &c})
		}
	}
	for _, p := range Pools(now, nil) {
		if !inPool(p.Name) {
			continue
		}
		for _, b := range p.Backends {
			row := pageRow{Pool: p.Name, Backend: &b}
			if counts[metrics.Key{Pool: p.Name, Backend: b.Name}].Attempts > 0 {
				row.Utilization = b.Utilization()
			}
			rows = append(rows, row)
		}
		for _, problem := range p.Problems(now, p.Models(p.others()...), states) {
			rows = append(rows, pageRow{Pool: p.Name, Problem: &problem})
		}
		for _, e := range Episodes(p.Name, maxEpisodes) {
			rows = append(rows, pageRow{Pool: p.Name, Episode: &e})
		}
		rows = append(rows,
			pageRow{Pool: p.Name, Traffic: &Traffic{metrics.Of(p.Name).FirstBytes.At(now), SpansOf(p.Name, spans)}})
	}
	return rows
}

// SpansOf returns the counts of a pool in each span.
func SpansOf(pool string, spans []metrics.Span) []Span {
	all := []Span{}
	for _, span := range spans {
		total := metrics.By(span.Counts, func(k metrics.Key) string { return k.Pool })[pool]
		all = append(all, Span{span.Length.Seconds(), total.Requests, total.Failovers, total.Tokens})
	}
	return all
}

// Others has the sum of the callers of other replicas, and their views of the
// pools.
type Others struct {
	OtherCallers
	// Views has the views of each pool by its name.
	Views map[string][]*View
}

// AskOthers asks all other replicas for the data of their pages.
func AskOthers(ctx context.Context) (o Others) {
	o = newOthers(time.Now())
	// there is no name that could be wrong
	o.read, _ = admin.AskAll(ctx, admin.EveryReplica, viewQuestion, askPatience, admin.MaxRow, o.take)
	for pool, views := range o.Views { // without those that were cut off
		o.Views[pool] = slices.DeleteFunc(views, func(v *View) bool {
			return !slices.ContainsFunc(o.read.Replicas,
				func(s admin.Seen) bool { return s.Included && s.Name() == v.Replica })
		})
	}
	o.askHours(ctx)
	return o
}

func newOthers(now time.Time) Others {
	return Others{OtherCallers{Asked: now, sum: newCallers()}, make(map[string][]*View)}
}

// take adds a row of another replica's answer, after checking it.
func (o *Others) take(a seam.PeerAnswer, row pageRow) (pool string, full bool) {
	if !slices.Contains(a.Pools, row.Pool) {
		return "", false
	}
	if row.Caller != nil {
		if row.Caller.Pool != row.Pool {
			return "", false
		}
		return o.OtherCallers.take(func(string) bool { return true })(a, *row.Caller)
	}
	if o.Number++; o.Number > admin.MaxSum {
		return "", true
	}
	name, views := admin.Seen{ID: a.ID, Host: a.Host}.Name(), o.Views[row.Pool]
	i := slices.IndexFunc(views, func(v *View) bool { return v.Replica == name })
	if i < 0 {
		i = len(views)
		o.Views[row.Pool] = append(views,
			&View{Replica: name, Counts: make(map[metrics.Key]metrics.Counts),
				Utilization: make(map[string]map[string]float64)})
	}
	if !o.Views[row.Pool][i].add(a.ID, row) {
		return "", false
	}
	return row.Pool, false
}

// Any client of the store can make up answers: these bound a View.
const maxUtilizations, maxProblems, maxModels, maxSpans = 256, 1000, 256, 60

func (v *View) add(id string, row pageRow) (ok bool) {
	switch {
	case row.Backend != nil:
		b := *row.Backend
		if b.Pool != row.Pool || !b.isSound() || len(row.Utilization) > maxUtilizations ||
			!areWords(slices.Collect(maps.Keys(row.Utilization))...) {
			return false
		}
		b.seenBy(id)
		v.Backends = append(v.Backends, b)
		v.Utilization[b.Name] = row.Utilization
	case row.Problem != nil:
		p := *row.Problem
		p.Models = p.Models[:min(len(p.Models), maxModels)]
		if !areWords(append(p.Models, p.Backend, p.Class, p.Cause, p.Detail)...) || len(v.Problems) >= maxProblems {
			return false
		}
		p.Replicas = []string{v.Replica}
		v.Problems = append(v.Problems, p)
	case row.Episode != nil:
		e := *row.Episode
		if !areWords(e.Backend, e.Class, e.Model, e.Deployment, e.Cause, e.Detail) || len(v.Episodes) >= maxEpisodes {
			return false
		}
		v.Episodes = append(v.Episodes, e)
	case row.Key != nil && row.Counts != nil:
		key := *row.Key
		key.Pool = row.Pool
		if !areWords(key.Backend, key.Model, key.Class) || !row.Counts.IsPossible() {
			return false
		}
		v.Counts[key] = *row.Counts
	case row.Traffic != nil:
		spans := row.Traffic.Spans
		if len(spans) > maxSpans || slices.ContainsFunc(spans, func(s Span) bool {
			return s.Seconds <= 0 || !metrics.IsPossible(s.Seconds, s.Requests, s.Failovers, s.Tokens)
		}) {
			return false
		}
		v.Traffic = *row.Traffic
	}
	return true
}

// isSound reports whether a backend from another replica is small enough to be
// shown.
func (b *Backend) isSound() bool {
	rows := len(b.Cooldowns) + len(b.Due) + len(b.Silences) + len(b.Untried) + len(b.Quotas)
	return areWords(b.Name, b.State) && rows <= maxCooldowns
}

// Together returns the pool with its backends as all replicas see them: this
// replica, with this id, and the replicas of the views. counts are the counts
// of the backends at all of them.
func (p Pool) Together(now time.Time, id string, views []*View, counts map[metrics.Key]metrics.Counts) Pool {
	all := newBackends()
	for _, b := range p.Backends {
		b.seenBy(id)
		all.add(b.clone())
	}
	for _, v := range views {
		for _, b := range v.Backends {
			b.age(now)
			all.add(b.clone())
		}
	}
	byBackend := metrics.By(counts, metrics.Key.OfBackend)
	for i := range all.rows {
		b := &all.rows[i]
		b.MaxRequests *= int64(1 + len(views))
		b.Counts = countsOf(byBackend[metrics.Key{Pool: p.Name, Backend: b.Name}])
	}
	slices.SortStableFunc(all.rows, func(a, b Backend) int { return cmp.Compare(a.Priority, b.Priority) })
	p.Backends = all.rows
	return p
}

// clone returns a copy that add can modify.
func (b Backend) clone() Backend {
	b.States, b.DrainedAt = maps.Clone(b.States), maps.Clone(b.DrainedAt)
	b.Cooldowns, b.Due, b.Silences, b.Untried = slices.Clone(b.Cooldowns), slices.Clone(b.Due),
		slices.Clone(b.Silences), slices.Clone(b.Untried)
	return b
}

// SeenBy returns the pool as the replica of a view sees it.
func (p Pool) SeenBy(now time.Time, v *View) Pool {
	backends := make([]Backend, 0, len(v.Backends))
	for _, b := range v.Backends {
		i := slices.IndexFunc(p.Backends, func(known Backend) bool { return known.Name == b.Name })
		if i < 0 {
			continue // its models are not known here
		}
		b.member = p.Backends[i].member
		b.age(now)
		backends = append(backends, b)
	}
	p.Backends = backends
	return p
}

// age removes cooldowns whose time has passed since the answer.
func (b *Backend) age(now time.Time) {
	ended := func(cooldown Cooldown) bool { return !cooldown.UntilReached && !now.Before(cooldown.Until) }
	if !slices.ContainsFunc(b.Cooldowns, ended) {
		return
	}
	b.Cooldowns = slices.DeleteFunc(slices.Clone(b.Cooldowns), ended)
	if b.State == CoolingDown && !slices.ContainsFunc(b.Cooldowns,
		func(cooldown Cooldown) bool { return !cooldown.spares() }) {
		b.State, b.WorstCooldown = Probing, WorstCooldown{}
		b.States = map[string]int{Probing: 1}
	}
}

// ProblemsOf merges the problems of this replica, whose name is given, with
// those of other replicas. Each problem lists the replicas that have it, unless
// all do.
func ProblemsOf(name string, local []Problem, views []*View) []Problem {
	list := problemList{}
	for _, p := range local {
		p.Replicas = []string{name}
		list.merge(p)
	}
	for _, v := range views {
		for _, p := range v.Problems {
			list.merge(p)
		}
	}
	for i := range list {
		p := &list[i]
		slices.Sort(p.Replicas)
		if p.Replicas = slices.Compact(p.Replicas); len(p.Replicas) > len(views) {
			p.Replicas = nil
		}
		p.Models = unique(p.Models)
	}
	list.sort()
	return list
}

func unique(names []string) []string {
	once, seen := []string{}, make(map[string]bool, len(names)) // an empty list in JSON
	for _, name := range names {
		if !seen[name] {
			seen[name] = true
			once = append(once, name)
		}
	}
	return once
}

// EpisodesOf merges the episodes of this replica with those of other replicas,
// because several replicas know of the same cooldown.
func EpisodesOf(local []Episode, views []*View, limit int) []Episode {
	all := slices.Clone(local)
	for _, v := range views {
		for _, e := range v.Episodes {
			i := slices.IndexFunc(all, func(other Episode) bool {
				return e.isAbout(e.Pool, other.Backend, other.Class, other.Cause) && e.continues(other.Since) &&
					other.continues(e.Since)
			})
			if i < 0 {
				all = append(all, e)
				continue
			}
			same := &all[i]
			times, since, lasts := max(same.Times, e.Times), same.Since, same.Lasts || e.Lasts
			if e.Since.Before(since) {
				since = e.Since
			}
			if e.Latest.After(same.Latest) {
				*same = e
			}
			same.Times, same.Since, same.Lasts = times, since, lasts
		}
	}
	slices.SortStableFunc(all, func(a, b Episode) int { return b.Latest.Compare(a.Latest) })
	return all[:min(limit, len(all))]
}

// Add adds the traffic of another replica. The replicas' last spans end at
// about the same time.
func (t *Traffic) Add(other Traffic) {
	t.Waiting.Requests += max(0, other.Waiting.Requests)
	t.Waiting.Overdue += max(0, other.Waiting.Overdue)
	t.Waiting.OldestSeconds = max(t.Waiting.OldestSeconds, other.Waiting.OldestSeconds)
	longer, shorter := slices.Clone(t.Spans), other.Spans
	if len(shorter) > len(longer) {
		longer, shorter = slices.Clone(shorter), longer
	}
	for i, span := range shorter {
		sum := &longer[len(longer)-len(shorter)+i]
		sum.Requests += span.Requests
		sum.Failovers += span.Failovers
		sum.Tokens += span.Tokens
	}
	t.Spans = longer
}
