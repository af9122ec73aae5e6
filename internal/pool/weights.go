package pool

import (
	"cmp"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/quota"
)

// Weights that follow limits
//
// An operator who configures no weights wants each backend to get as many
// requests as it can serve. Backends name their limits in their replies, so the
// weight of a member without a configured weight follows its limit for the
// model. A member that may serve twice as many tokens per minute gets twice as
// many requests.
//
// Keys live at members by weight (see [Affinity]), so weights must change
// rarely and little. A limit is rounded to a power of the square root of 2, its
// step. A new step counts after it has stayed the same for ten seconds, and
// limits are compared at most once a second. The steps depend only on the
// limits, so replicas that see the same limits have the same weights.
//
// Only limits of the same kind can be compared. So the members of a priority
// have equal weights until all their limits of tokens are known, or all their
// limits of requests. If the operator gave one of them a weight, the other ones
// keep the weight 1.

const (
	// comparesEvery is the shortest time between two comparisons of limits.
	comparesEvery = time.Second
	// stepHolds is the time for which a new step must stay the same until it
	// counts.
	stepHolds = 10 * time.Second
	// stepsByTwo is the number of steps that double a weight. mostSteps is the
	// largest difference of steps within a priority, so that no weight is more
	// than 32 times another one. So a member with a tiny limit still gets
	// requests, whose replies show when the limit grows.
	stepsByTwo = 2
	mostSteps  = 5 * stepsByTwo
	// maxWeighed is the maximum number of models with learned weights.
	maxWeighed = 256
)

// Weights are the weights of members and of their accounts, by the members'
// indexes. They are immutable. The weight of an account is the sum of the
// weights of its members of the same priority. draws are the sums of the
// weights of the members: see sumsOf.
type Weights struct{ members, accounts, draws []float64 }

// learnedWeights holds the weights of a pool's members for each model. The zero
// learnedWeights is ready to use.
type learnedWeights struct {
	mu      sync.Mutex // guards writing of byModel
	byModel atomic.Pointer[map[string]*modelWeights]
}

// modelWeights are the learned weights for one model.
type modelWeights struct {
	// current are the weights in use. It is nil if those are the configured
	// ones.
	current atomic.Pointer[Weights]
	// next is the quota.Instant at which limits are compared again.
	next atomic.Int64
	mu   sync.Mutex // guards steps
	// steps are the steps of each member's limits.
	steps [][limitKinds]step
}

// limitKinds is the number of kinds of limits: of requests and of tokens.
const limitKinds = 2

// step is a rounded limit. A limit of 1 is step 1. Step 0 means that the limit
// is not known.
type step struct {
	// inUse is the step that counts. seen is the latest step, which the limit
	// has had since the time since.
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

// compares reports whether the weights of any members follow their limits. A
// member that is alone in its priority needs no weight.
func (p *Pool) compares() bool {
	for i, m := range p.Members[:max(0, len(p.Members)-1)] {
		if m.FollowsLimits && p.Members[i+1].Priority == m.Priority {
			return true
		}
	}
	return false
}

// Weights returns the weights for a model, by the clients' name. It returns nil
// if they are the configured ones, as for all operations other than inference,
// whose model is "" here.
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

// begin starts to compare limits for a model, if a member has a meter for it.
// Without one, it returns nil, because clients can make up models.
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

// compare updates the weights.
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
	next.draws = p.sumsOf(func(m *Member) float64 { return next.members[m.Index] })
	w.current.Store(&next)
}

// weigh sets the weights of the members of one priority. It reports whether
// they follow the limits. A drained member does not affect the other weights.
// It gets the weight of its own limit or, if that is not known, the lowest one.
func (w *modelWeights) weigh(members []*Member, model string, to []float64, steps [][limitKinds]step) bool {
	counts := func(m *Member) bool {
		_, takes := m.nameOf(model)
		return takes && !m.Drained()
	}
	for kind := limitKinds - 1; kind >= 0; kind-- { // tokens are scarcer than requests
		lowest, highest, alike := math.MaxInt, 0, true
		for i, m := range members {
			inUse := steps[i][kind].inUse
			switch {
			case m.Weight != 0 && !m.FollowsLimits:
				alike = false
			case counts(m):
				alike = alike && inUse > 0
				lowest, highest = min(lowest, inUse), max(highest, inUse)
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

// nameOf returns the member's name for a client's model. takes is false if the
// member does not take the model.
func (m *Member) nameOf(model string) (name string, takes bool) {
	name, listed := m.Names[model]
	return cmp.Or(name, m.Deployment, model), listed || m.Names == nil
}

// LearnedWeights returns the weights of a member that follow its limits, by the
// clients' names of models.
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

// configuredShare returns the member's configured weight. It is 1 for a drained
// member.
func (m *Member) configuredShare() float64 { return float64(max(m.Weight, 1)) }

// sumsOf returns, for each member of the first priority, the sum of its weight
// and of the weights of the members before it. draw finds a member in these.
func (p *Pool) sumsOf(weight func(*Member) float64) (sums []float64) {
	sum := 0.0
	for _, m := range p.Members {
		if m.Priority != p.Members[0].Priority {
			break
		}
		sum += weight(m)
		sums = append(sums, sum)
	}
	return sums
}

// draw returns a member of the first priority, each with a probability in
// proportion to its weight for the request.
func (p *Pool) draw(r *Ask) *Member {
	sums := p.draws
	if r.Weights != nil {
		sums = r.Weights.draws
	}
	at := Random() * sums[len(sums)-1]
	i, _ := slices.BinarySearchFunc(sums, at, func(sum, at float64) int {
		if sum <= at {
			return -1
		}
		return 1
	})
	return p.Members[min(i, len(sums)-1)]
}

// share returns the member's weight for the request.
func (r *Ask) share(m *Member) float64 {
	if r.Weights != nil {
		return r.Weights.members[m.Index]
	}
	return m.configuredShare()
}

// accountShare returns the weight of the member's account for the request.
func (r *Ask) accountShare(m *Member) float64 {
	if r.Weights != nil {
		return r.Weights.accounts[m.Index]
	}
	return m.account.weight
}

func (r *Ask) score(m *Member, key uint64) float64 { return m.digest.score(key, r.share(m)) }
