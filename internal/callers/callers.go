package callers

import (
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
	"github.com/openai-lb/caddy-openai-lb/internal/usage"
)

// Callers limits what the callers of a pool may use, by the options of one
// config. What they have used outlives the config.
type Callers struct {
	// blocks are those of the config and of its file, which may change.
	blocks  atomic.Pointer[blocks]
	watched watched
	// placed are the tiers in which client_keys_file has placed callers. nil:
	// it has placed none.
	placed atomic.Pointer[map[string]string]
	// byToken are the callers that a token has put into a tier. It is nil until
	// the first of them.
	byToken atomic.Pointer[byToken]
	// started reports whether the options apply: since Start, until Close.
	started atomic.Bool
	// sets are the lists of backends that callers may use. The first is nil:
	// all.
	sets [][]string
	kept *kept
	name string
	log  *zap.Logger
	// crossed gets the marks that the use of limits has reached.
	crossed func(limiter.Crossing)
	storage certmagic.Storage
	// location is where days and months begin.
	location *time.Location
}

// Options are what New needs.
type Options struct {
	// Config has the callers of its file, too, and Written is what the
	// Caddyfile says. It may be nil without a file.
	Config
	Written *Config
	// Pool is the name of the pool, and Backends are its backends.
	Pool     string
	Backends []Backend
	// Storage is where the use of long windows is saved. nil: nowhere.
	Storage certmagic.Storage
	Logger  *zap.Logger
	// Crossed gets the marks that the use of limits has reached. It may be nil.
	Crossed func(limiter.Crossing)
}

// inUse keeps the limiters through config reloads.
var inUse = caddy.NewUsagePool()

// New returns the callers of a pool, or nil if the config has none, nor tiers.
// It was checked. The caller closes it.
func New(o Options) *Callers {
	if len(o.Callers)+len(o.Tiers) == 0 && o.CallersFile == nil {
		return nil
	}
	c := &Callers{sets: [][]string{nil}, name: o.Pool, log: o.Logger, crossed: o.Crossed, storage: o.Storage}
	c.location, _ = o.Location() // it was checked
	c.use(&o)
	c.watched.options, c.watched.applied = o, o.Callers
	if o.Written != nil {
		c.watched.options.Config = *o.Written
	}
	value, again, _ := inUse.LoadOrNew(c.name, func() (caddy.Destructor, error) { return newKept(c.name), nil })
	if c.kept = value.(*kept); !again {
		c.Start()
	}
	return c
}

// Start applies the options. Those of the config before apply until the new one
// is in use, because it may fail.
func (c *Callers) Start() {
	c.kept.configure(c.storage, c.log, c.crossed)
	c.started.Store(true)
	c.configure()
}

func (c *Callers) configure() {
	c.kept.limiters.Configure(time.Now(), func(name string) limiter.Settings { return c.of(name).settings })
}

// Close releases what New acquired, and saves what was used.
func (c *Callers) Close() error {
	if c == nil {
		return nil
	}
	c.started.Store(false)
	if !c.kept.saver.Unread() { // otherwise it was not used, as when a config is only checked
		c.kept.saver.Changed() // what other replicas have used may have
	}
	pools.SaveLast(c.kept.saver.Save)
	_, err := inUse.Delete(c.name)
	return err
}

// Record returns when the use of limits was saved. It is nil if there are none.
func (c *Callers) Record() *pools.Record {
	if c == nil {
		return nil
	}
	return &c.kept.saver.Record
}

// LimitersOf returns the limiters of a pool in use, or nil if it does not limit
// callers.
func LimitersOf(pool string) *limiter.Callers {
	if k := keptOf(pool); k != nil {
		return k.limiters
	}
	return nil
}

func keptOf(pool string) (k *kept) {
	inUse.Range(func(key, value any) bool {
		if key == pool {
			k = value.(*kept)
		}
		return k == nil
	})
	return k
}

// Reset gives a caller of a pool its use back, at all replicas, and saves that.
// It reports whether there is such a caller, of which a request is known.
func Reset(of, name string, order pool.Order) (known bool) {
	k := keptOf(of)
	if k == nil {
		return false
	}
	k.saver.Await()
	if !k.limiters.Reset(order.Time, name) {
		return false
	}
	k.logger.Load().Named("audit").Info("caller reset", zap.String("pool", of), zap.String("caller", name), zap.String("by", order.By), zap.String("reason", order.Reason))
	k.saver.Changed()
	k.saver.Save()
	return true
}

// Models returns the models that a caller may use. nil: all of them.
func (c *Callers) Models(name string) []string {
	if c == nil {
		return nil
	}
	return c.of(name).models
}

// Listed returns the models that a caller may use and its backends have. nil:
// any.
func (c *Callers) Listed(name string) []string { return c.of(name).listed }

// Sets returns the lists of backends that callers may use, by their numbers.
// nil: all.
func (c *Callers) Sets() [][]string {
	if c == nil {
		return [][]string{nil}
	}
	return c.sets
}

// Set returns the number of the list of backends that a caller may use.
func (c *Callers) Set(name string) int {
	if c == nil {
		return 0
	}
	return c.of(name).set
}

// ServiceTiers returns the service tiers that a caller may use. nil: those of
// the body, and none of the header.
func (c *Callers) ServiceTiers(name string) []string { return c.of(name).tiers }

// Deny reports whether all requests of a caller are refused, and counts the
// request if so.
func (c *Callers) Deny(name string) bool {
	denied := c != nil && c.of(name).denied
	if denied {
		c.refusedBy(name, limiter.ByDeny)
	}
	return denied
}

// refusedBy counts a request that something else than a limit has refused.
func (c *Callers) refusedBy(name string, by int) {
	now := time.Now()
	c.kept.limiters.Get(now, name).RefusedBy(now, by)
}

// Names returns the callers that have a block.
func (c *Callers) Names() []string { return slices.Collect(maps.Keys(c.blocks.Load().byName)) }

// Unlimited returns those of the names for which the config has neither a block
// nor a tier with limits, although it has some.
func (c *Callers) Unlimited(names []string) (unlimited []string) {
	if c == nil {
		return nil
	}
	b := c.blocks.Load()
	if b.named || !b.limits {
		return nil
	}
	for _, name := range names {
		if b.byName[name] == nil && c.of(name).empty {
			unlimited = append(unlimited, name)
		}
	}
	return unlimited
}

// LimitsTokens reports whether a caller has a limit of tokens.
func (c *Callers) LimitsTokens(name string) bool { return c != nil && c.of(name).tokens }

// SeesEach reports whether each request of a caller has to be seen, because of
// its model, its service tier or its tokens.
func (c *Callers) SeesEach(name string) bool {
	return c != nil && (c.Models(name) != nil || c.ServiceTiers(name) != nil || c.LimitsTokens(name))
}

// Admission is what a request of a caller was admitted with, until it is
// settled. The zero Admission is that of a request without one.
type Admission struct {
	reservation limiter.Reservation
	caller      *limiter.Caller
	entry       *entry
	kept        *kept
}

// Admit charges the caller's limits with the estimate, or returns why it does
// not. In that case the Admission is good for Limits only.
func (c *Callers) Admit(now time.Time, name string, e limiter.Estimate) (a Admission, refusal *limiter.Refusal) {
	if a, refusal = c.Try(now, name, e); refusal != nil && refusal.MayClaim() {
		a.reservation, refusal = Hear(a.caller, e)
	}
	if refusal != nil {
		a.caller.Refused(now, refusal)
	}
	return a, refusal
}

// hearing is how long a request may wait until its replica has heard of the
// others, and look how often it is looked whether it has.
const hearing, look = 500 * time.Millisecond, 5 * time.Millisecond

// Hear admits a request that this replica's part of what is left of a limit has
// no room for, by a claim. Of a burst, one request at a time makes one. One
// that is larger than the part tries until its time is over.
func Hear(caller *limiter.Caller, e limiter.Estimate) (r limiter.Reservation, refusal *limiter.Refusal) {
	for until := time.Now().Add(hearing); ; time.Sleep(rand.N(hearing / 4)) {
		var claim *limiter.Claim
		if claim, refusal = caller.Claim(time.Now(), e); refusal == nil {
			if refusal = decide(claim, until); refusal == nil {
				return claim.Reservation, nil
			}
		}
		if refusal.Reason != limiter.Unheard || !time.Now().Before(until) {
			return limiter.Reservation{}, refusal
		}
	}
}

// decide waits until it is decided whether a claim's request is admitted, and
// returns why it is not.
func decide(claim *limiter.Claim, until time.Time) *limiter.Refusal {
	for {
		switch decided, refusal := claim.Decide(time.Now()); {
		case decided:
			return refusal
		case !time.Now().Before(until):
			return claim.Withdraw(time.Now())
		}
		time.Sleep(look)
	}
}

// Try is Admit, but the request may be tried again later, so a refusal is not
// counted.
func (c *Callers) Try(now time.Time, name string, e limiter.Estimate) (a Admission, refusal *limiter.Refusal) {
	a = c.admission(now, name)
	a.reservation, refusal = a.caller.Try(now, e)
	return a, refusal
}

// ShortBody is the size of bodies that are usually there as soon as the request
// is.
const ShortBody = 64 << 10

// LikelyCost estimates the cost of a request before its body is read, without
// the output. Of a long body, most may be pictures.
func LikelyCost(r *http.Request, route openaiapi.Route) (e limiter.Estimate) {
	if openaiapi.CostsTokens(r, route) {
		e.Prompt = max(1, openaiapi.PromptCost(min(r.ContentLength, ShortBody)))
	}
	return e
}

// Exceeded returns why none of the caller's requests is admitted now, or nil.
// The refusal says when one with the likely cost is. The Admission is good for
// Limits and Upload only.
func (c *Callers) Exceeded(now time.Time, name string, likely limiter.Estimate) (a Admission, refusal *limiter.Refusal) {
	if c == nil {
		return a, nil
	}
	if a = c.admission(now, name); !a.entry.limited && a.entry.settings.MaxRequests == 0 {
		return a, nil
	}
	if refusal = a.check(now, limiter.Estimate{Prompt: min(1, likely.Prompt)}); refusal == nil {
		return a, nil
	}
	if more := a.check(now, likely); more != nil && more.Reason == refusal.Reason {
		refusal = more
	}
	return a, refusal
}

// Refused counts that the request is refused.
func (a *Admission) Refused(refusal *limiter.Refusal) { a.caller.Refused(time.Now(), refusal) }

// Reserved counts that the request is refused because only shares of other
// tiers are left of the backends.
func (a *Admission) Reserved() {
	if a.caller != nil {
		a.caller.RefusedBy(time.Now(), limiter.ByReserve)
	}
}

// Upload counts a request among those that the caller has at a time while its
// body comes, or returns why it may not come. Uploaded must be called if there
// is no refusal.
func (a *Admission) Upload() *limiter.Refusal {
	refusal := a.caller.Upload()
	if refusal != nil {
		a.Refused(refusal)
	}
	return refusal
}

// Uploaded ends what Upload has begun.
func (a *Admission) Uploaded() { a.caller.Uploaded() }

// Unasked admits what a backend has begun without a request of the caller's.
func (c *Callers) Unasked(now time.Time, name string) (a Admission) {
	if c != nil {
		a = c.admission(now, name)
		a.reservation = a.caller.Unasked(now)
	}
	return a
}

// Check returns why Admit would not charge the caller's limits, or nil.
func (c *Callers) Check(now time.Time, name string, e limiter.Estimate) *limiter.Refusal {
	a := c.admission(now, name)
	return a.check(now, e)
}

func (a *Admission) check(now time.Time, e limiter.Estimate) *limiter.Refusal {
	refusal := a.caller.Check(now, e)
	if refusal != nil && refusal.MayClaim() {
		return nil // Admit hears the others
	}
	return refusal
}

func (c *Callers) admission(now time.Time, name string) Admission {
	c.kept.saver.Await() // what was saved is added when it comes
	return Admission{caller: c.kept.limiters.Get(now, name), entry: c.of(name), kept: c.kept}
}

// Use returns what a caller has used, and may use.
func (c *Callers) Use(now time.Time, name string) limiter.Snapshot {
	return c.admission(now, name).caller.Snapshot(now)
}

// Tier returns the number of the request's tier, counted from 1 in order of
// importance. 0: it has none, and is above all.
func (a *Admission) Tier() int { return a.reservation.Tier() }

// Demoted yields the ids of the limits that gave the request another tier.
func (a *Admission) Demoted(yield func(limiter.ID) bool) { a.reservation.Demoted(yield) }

// CountsTokens reports whether a limit needs the tokens of the reply.
func (a *Admission) CountsTokens() bool { return a.entry != nil && a.entry.tokens }

// Open reports whether there is something to settle.
func (a *Admission) Open() bool { return a.reservation.Open() }

// Prompt returns the tokens that the prompt was expected to have.
func (a *Admission) Prompt() int64 {
	prompt, _ := a.reservation.Estimated()
	return prompt
}

// Output returns the tokens that the output was expected to have.
func (a *Admission) Output() int64 {
	_, output := a.reservation.Estimated()
	return output
}

// Follow charges the output of a stream as it passes, as far as it is more than
// was expected.
func (a *Admission) Follow(r *usage.Reader) {
	if a.CountsTokens() && a.Open() {
		r.Follow(a, a.Output())
	}
}

// Spend implements usage.Spender.
func (a *Admission) Spend(output int64) { a.reservation.Spend(time.Now(), output) }

// Settle replaces the estimate with the real cost. Further calls do nothing.
func (a *Admission) Settle(now time.Time, cost limiter.Cost) {
	if a.Open() {
		a.reservation.Settle(now, cost)
		a.kept.saver.Changed()
	}
}

// Limited reports whether the caller has limits. It is cheap enough to be asked
// of each reply.
func (a *Admission) Limited() bool { return a.entry != nil && a.entry.limited }

// Limits returns the caller's limits: of each kind the one of which the
// smallest part is left.
func (a *Admission) Limits(now time.Time) (l quota.Limits) {
	for kind, use := range a.caller.Tightest(now) {
		l[kind] = quota.Fields{Limit: use.Allowed, Remaining: use.Left(), Reset: use.Reset, Known: use.Limit.Amount > 0}
	}
	return l
}

// rounded rounds a wait up to what is shown of it.
func rounded(d time.Duration) time.Duration {
	return (d + time.Millisecond - 1).Truncate(time.Millisecond)
}
