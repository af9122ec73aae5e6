package pool

import (
	"cmp"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/quota"
)

// Weights that follow limits
//
// An operator who gives no weights wants each backend to get as many requests
// as it can serve. Backends name their limits in their replies, so members
// without a configured weight weigh as their limits for the model do. One that
// may serve twice as many tokens a minute gets twice as many requests.
//
// Weights decide where the keys of an affinity live. So they change seldom and
// little: a limit counts in steps of the square root of 2, a new step must hold
// for ten seconds, and limits are compared once a second at most. As the steps
// depend on nothing but the limits, replicas that see the same limits have the
// same weights.
//
// Limits can be compared only if they are of one kind. The members of a
// priority therefore weigh alike until the limit of tokens is known for all of
// them, or the one of requests. If the operator gave one of them a weight, the
// others keep the weight 1.

const (
	// comparesEvery is the shortest time between two comparisons of limits.
	comparesEvery = time.Second
	// stepHolds is the time after which a new step of a limit counts.
	stepHolds = 10 * time.Second
	// stepsByTwo is the number of steps that double a weight. mostSteps is the
	// greatest number of steps between two weights of a priority, so that no
	// weight is more than 32 times another one. A member with a tiny limit
	// still gets requests, whose replies show when its limit grows.
	stepsByTwo = 2
	mostSteps  = 5 * stepsByTwo
	// maxWeighed is for how many models weights are learned.
	maxWeighed = 256
)

// Weights are the weights of members and of their accounts, by the members'
// indexes. They never change. The weight of an account is the sum of those of
// its members of one priority.
type Weights struct{ members, accounts []float64 }

// learnedWeights has the weights of a pool's members for each model. The zero
// learnedWeights knows none.
type learnedWeights struct {
	mu      sync.Mutex // guards writing of byModel
	byModel atomic.Pointer[map[string]*modelWeights]
}

// modelWeights are the weights for a model.
type modelWeights struct {
	// current are those in use. They are nil if they are the configured ones.
	current atomic.Pointer[Weights]
	// next is the quota.Instant at which limits are compared again.
	next atomic.Int64
	mu   sync.Mutex // guards steps
	// steps are those of the limits of each member.
	steps [][limitKinds]step
}

// limitKinds are the kinds of limits: of requests, and of tokens.
const limitKinds = 2

// step is the step of a limit. Steps are counted from 1, for a limit of 1. A
// step of 0 means that the limit is not known.
type step struct {
	// inUse is the step that counts, and seen the latest one, which the limit
	// has had since then.
	inUse, seen int
	since       time.Time
}

func (s *step) see(limit int64, now time.Time) {
	seen := 0
	if limit > 0 {
		seen = 1 + int(math.Round(stepsByTwo*math.Log2(float64(limit))))
	}
	if seen != s.seen {
		s.seen, s.since = seen, now
	}
	if now.Sub(s.since) >= stepHolds {
		s.inUse = seen
	}
}

// compares reports whether the weights of any members follow their limits. The
// only member of its priority needs none.
func (p *Pool) compares() bool {
	for i, m := range p.Members[:max(0, len(p.Members)-1)] {
		if m.FollowsLimits && p.Members[i+1].Priority == m.Priority {
			return true
		}
	}
	return false
}

// Weights returns the weights for a model of clients. They are nil if they are
// the configured ones, as they are for operations other than inference, which
// have no model here.
func (p *Pool) Weights(model string, now time.Time) *Weights {
	if !p.Steers || !p.follows || model == "" {
		return nil
	}
	model = ModelKey(model)
	var known *modelWeights
	if all := p.learned.byModel.Load(); all != nil {
		known = (*all)[model]
	}
	if known == nil {
		if known = p.learned.begin(p, model); known == nil {
			return nil
		}
	}
	at := int64(quota.At(now))
	if next := known.next.Load(); at >= next && known.next.CompareAndSwap(next, at+comparesEvery.Nanoseconds()) {
		known.compare(p, model, now)
	}
	return known.current.Load()
}

// begin begins to compare limits for a model, if it is one of which a member's
// limits may be known: clients can make up models.
func (l *learnedWeights) begin(p *Pool, model string) *modelWeights {
	isKnown := false
	for _, m := range p.Members {
		name, takes := m.nameOf(model)
		isKnown = isKnown || takes && m.quotaOf(name) != nil
	}
	if !isKnown {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	all := make(map[string]*modelWeights)
	if before := l.byModel.Load(); before != nil {
		if known := (*before)[model]; known != nil || len(*before) >= maxWeighed {
			return known
		}
		for name, known := range *before {
			all[name] = known
		}
	}
	known := &modelWeights{steps: make([][limitKinds]step, len(p.Members))}
	all[model] = known
	l.byModel.Store(&all)
	return known
}

// compare brings the weights up to date.
func (w *modelWeights) compare(p *Pool, model string, now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i, m := range p.Members {
		name, takes := m.nameOf(model)
		q := m.quotaOf(name)
		for kind := range w.steps[i] {
			limit := int64(0)
			if takes && q != nil {
				limit = q.Limit(kind)
			}
			w.steps[i][kind].see(limit, now)
		}
	}
	next := Weights{members: make([]float64, len(p.Members)), accounts: make([]float64, len(p.Members))}
	learned := false
	for begin := 0; begin < len(p.Members); {
		end := begin + 1
		for end < len(p.Members) && p.Members[end].Priority == p.Members[begin].Priority {
			end++
		}
		learned = w.weigh(p.Members[begin:end], model, next.members[begin:end], w.steps[begin:end]) || learned
		begin = end
	}
	if !learned {
		w.current.Store(nil)
		return
	}
	type ranked struct {
		account  string
		priority int
	}
	sums := make(map[ranked]float64)
	for i, m := range p.Members {
		sums[ranked{m.Account, m.Priority}] += next.members[i]
	}
	for i, m := range p.Members {
		next.accounts[i] = sums[ranked{m.Account, m.Priority}]
	}
	w.current.Store(&next)
}

// weigh sets the weights of the members of one priority. It reports whether
// they follow the limits. A drained member does not count: it has the weight of
// its limit if that is known, and else the lowest one.
func (w *modelWeights) weigh(members []*Member, model string, to []float64, steps [][limitKinds]step) bool {
	counts := func(m *Member) bool {
		_, takes := m.nameOf(model)
		return takes && !m.Drained()
	}
	for kind := limitKinds - 1; kind >= 0; kind-- { // tokens are scarcer than requests
		lowest, highest, alike := math.MaxInt, 0, true
		for i, m := range members {
			its := steps[i][kind].inUse
			switch {
			case m.Weight != 0 && !m.FollowsLimits:
				alike = false
			case counts(m):
				alike = alike && its > 0
				lowest, highest = min(lowest, its), max(highest, its)
			}
		}
		if !alike || highest == 0 {
			continue
		}
		lowest = max(lowest, highest-mostSteps)
		for i := range members {
			above := min(max(steps[i][kind].inUse, lowest), highest) - lowest
			to[i] = math.Exp2(float64(above) / stepsByTwo)
		}
		return true
	}
	for i, m := range members {
		to[i] = m.configuredShare()
	}
	return false
}

// nameOf returns the member's name for a model of clients. It returns false if
// the member does not take the model.
func (m *Member) nameOf(model string) (name string, takes bool) {
	name, listed := m.Names[model]
	return cmp.Or(name, m.Deployment, model), listed || m.Names == nil
}

// LearnedWeights returns the weights of a member that follow its limits, by the
// models of clients.
func (m *Member) LearnedWeights() map[string]float64 {
	known := m.pool.learned.byModel.Load()
	if known == nil {
		return nil
	}
	all := make(map[string]float64)
	for model, w := range *known {
		if _, takes := m.nameOf(model); !takes || !m.FollowsLimits {
			continue
		}
		if current := w.current.Load(); current != nil {
			all[model] = current.members[m.Index]
		}
	}
	return all
}

// configuredShare returns the member's configured weight. Drained members share
// alike.
func (m *Member) configuredShare() float64 { return float64(max(m.Weight, 1)) }

// share returns the weight of a member for the request.
func (r *Ask) share(m *Member) float64 {
	if r.Weights != nil {
		return r.Weights.members[m.Index]
	}
	return m.configuredShare()
}

// accountShare returns the weight of a member's account for the request.
func (r *Ask) accountShare(m *Member) float64 {
	if r.Weights != nil {
		return r.Weights.accounts[m.Index]
	}
	return m.account.weight
}

func (r *Ask) score(m *Member, key uint64) float64 { return m.digest.score(key, r.share(m)) }
