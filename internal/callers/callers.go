package callers

import (
	"maps"
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

// Callers limits the callers of a pool by the options of one config. Their use
// outlives the config.
type Callers struct {
	// blocks are the options of callers. They change with callers_file.
	blocks  atomic.Pointer[blocks]
	watched watched
	// placed are the tiers in which client_keys_file places callers, by caller.
	// It is nil if the file places none.
	placed atomic.Pointer[map[string]string]
	// byToken holds the tiers that tokens name. It is nil until the first
	// token.
	byToken atomic.Pointer[byToken]
	// started reports whether the options apply. They do between Start and
	// Close.
	started atomic.Bool
	// sets are the lists of backends that callers may use. The first one is
	// nil, which stands for all backends.
	sets [][]string
	kept *kept
	name string
	log  *zap.Logger
	// crossed receives the marks that the use of limits reaches.
	crossed func(limiter.Crossing)
	storage certmagic.Storage
	// location is the time zone in which days and months begin.
	location *time.Location
}

// Options are the arguments of New.
type Options struct {
	// Config includes the callers of callers_file. Written is the config
	// without them. It may be nil if there is no file.
	Config
	Written *Config
	// Pool is the name of the pool. Backends are its backends.
	Pool     string
	Backends []Backend
	// Storage is where the use of long windows is saved. If it is nil, nothing
	// is saved.
	Storage certmagic.Storage
	Logger  *zap.Logger
	// Crossed receives the marks that the use of limits reaches. It may be nil.
	Crossed func(limiter.Crossing)
}

// inUse keeps the limiters through config reloads.
var inUse = caddy.NewUsagePool()

// New returns the callers of a pool. It returns nil if the config has neither
// callers nor tiers. The config must have been checked. The result must be
// closed.
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

// Start applies the options. Until then, the options of the previous config
// apply, because the new config may still fail to load.
func (c *Callers) Start() {
	c.kept.configure(c.storage, c.log, c.crossed)
	c.started.Store(true)
	c.configure()
}

func (c *Callers) configure() {
	c.kept.limiters.Configure(time.Now(), func(name string) limiter.Settings { return c.of(name).settings })
}

// Close releases the resources that New acquired, and saves the use.
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

// Record returns the record of when the use was saved. It returns nil if c is
// nil.
func (c *Callers) Record() *pools.Record {
	if c == nil {
		return nil
	}
	return &c.kept.saver.Record
}

// LimitersOf returns the limiters of a pool in use. It returns nil if the pool
// does not limit callers.
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

// Reset clears the use of a pool's caller at all replicas, and saves that. It
// returns false if no request of such a caller is known.
func Reset(of, name string, order pool.Order) (known bool) {
	k := keptOf(of)
	if k == nil {
		return false
	}
	k.saver.Await()
	if !k.limiters.Reset(order.Time, name) {
		return false
	}
	k.logger.Load().Named("audit").Info("caller reset", zap.String("pool", of), zap.String("caller", name),
		zap.String("by", order.By), zap.String("reason", order.Reason))
	k.saver.Changed()
	k.saver.Save()
	return true
}

// Models returns the models that a caller may use. It returns nil if the caller
// may use all models.
func (c *Callers) Models(name string) []string {
	if c == nil {
		return nil
	}
	return c.of(name).models
}

// Listed returns the models that a caller may use and that its backends have.
// It returns nil if these may be any models.
func (c *Callers) Listed(name string) []string { return c.of(name).listed }

// Sets returns the lists of backends that callers may use, by their numbers. A
// list that is nil stands for all backends.
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

// ServiceTiers returns the service tiers that a caller may use. If it returns
// nil, the caller may use all in bodies, and none in the header.
func (c *Callers) ServiceTiers(name string) []string { return c.of(name).tiers }

// Deny reports whether all requests of a caller are refused. If so, it counts
// the request.
func (c *Callers) Deny(name string) bool {
	denied := c != nil && c.of(name).denied
	if denied {
		c.refusedBy(name, limiter.ByDeny)
	}
	return denied
}

// refusedBy counts a request that was refused for a reason other than a limit.
func (c *Callers) refusedBy(name string, by int) {
	now := time.Now()
	c.kept.limiters.Get(now, name).RefusedBy(now, by)
}

// Names returns the callers that have a block.
func (c *Callers) Names() []string { return slices.Collect(maps.Keys(c.blocks.Load().byName)) }

// Unlimited returns the names for which the config has neither a block nor a
// tier with limits, if it limits any caller at all.
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

// SeesEach reports whether each request of a caller must be read, because of
// its model, its service tier or its tokens.
func (c *Callers) SeesEach(name string) bool {
	return c != nil && (c.Models(name) != nil || c.ServiceTiers(name) != nil || c.LimitsTokens(name))
}

// Admission is a request's admission by its caller's limits, until it is
// settled. The zero Admission is that of a request without a caller.
type Admission struct {
	reservation limiter.Reservation
	caller      *limiter.Caller
	entry       *entry
	kept        *kept
}

// Admit charges the caller's limits with the estimate, or returns why the
// request is refused, and counts the refusal. If this replica's part of a limit
// is too small, Admit may wait to hear from the other replicas. After a
// refusal, the Admission may be used only for Limits.
func (c *Callers) Admit(now time.Time, name string, e limiter.Estimate) (a Admission, refusal *limiter.Refusal) {
	a = c.admission(now, name)
	a.reservation, refusal = a.caller.Admit(now, e)
	return a, refusal
}

// Try charges the caller's limits with the estimate, or returns why the request
// is refused. It does not wait for other replicas, and does not count the
// refusal, because the request may be tried again.
func (c *Callers) Try(now time.Time, name string, e limiter.Estimate) (a Admission, refusal *limiter.Refusal) {
	a = c.admission(now, name)
	a.reservation, refusal = a.caller.Try(now, e)
	return a, refusal
}

// ShortBody is the size up to which bodies usually arrive together with the
// headers.
const ShortBody = 64 << 10

// LikelyCost estimates the cost of a request before its body is read, without
// the output. Of a long body, only the first part counts, because most of it
// may be pictures.
func LikelyCost(r *http.Request, route openaiapi.Route) (e limiter.Estimate) {
	if openaiapi.CostsTokens(r, route) {
		e.Prompt = max(1, openaiapi.PromptCost(min(r.ContentLength, ShortBody)))
	}
	return e
}

// Exceeded returns the refusal of any request of the caller, if none can be
// admitted now, or nil. The refusal's wait is that of a request with the likely
// cost. The Admission may be used only for Limits, Refused and Upload.
func (c *Callers) Exceeded(now time.Time, name string,
	likely limiter.Estimate) (a Admission, refusal *limiter.Refusal) {
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

// Refused counts the refusal of the request.
func (a *Admission) Refused(refusal *limiter.Refusal) { a.caller.Refused(time.Now(), refusal) }

// Reserved counts a request that was refused because the rest of the backends'
// limits is reserved for other tiers.
func (a *Admission) Reserved() {
	if a.caller != nil {
		a.caller.RefusedBy(time.Now(), limiter.ByReserve)
	}
}

// Upload counts a request as in flight while its body is received. If the
// caller has too many requests, it returns the refusal. Otherwise Uploaded must
// be called later.
func (a *Admission) Upload() *limiter.Refusal {
	refusal := a.caller.Upload()
	if refusal != nil {
		a.Refused(refusal)
	}
	return refusal
}

// Uploaded records that the upload has ended.
func (a *Admission) Uploaded() { a.caller.Uploaded() }

// Unasked admits a response that a backend has started without a request of the
// caller.
func (c *Callers) Unasked(now time.Time, name string) (a Admission) {
	if c != nil {
		a = c.admission(now, name)
		a.reservation = a.caller.Unasked(now)
	}
	return a
}

// Check returns the refusal that Admit would return, or nil, without charging
// any limit.
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

// Use returns the state of a caller.
func (c *Callers) Use(now time.Time, name string) limiter.Snapshot {
	return c.admission(now, name).caller.Snapshot(now)
}

// Tier returns the number of the request's tier, counted from 1 in order of
// importance. It returns 0 for a request without a tier, which is more
// important than all tiers.
func (a *Admission) Tier() int { return a.reservation.Tier() }

// Demoted yields the IDs of the limits that moved the request to another tier.
func (a *Admission) Demoted(yield func(limiter.ID) bool) { a.reservation.Demoted(yield) }

// CountsTokens reports whether a limit needs the tokens of the reply.
func (a *Admission) CountsTokens() bool { return a.entry != nil && a.entry.tokens }

// Open reports whether the request was admitted and is not settled yet.
func (a *Admission) Open() bool { return a.reservation.Open() }

// Prompt returns the estimated tokens of the prompt.
func (a *Admission) Prompt() int64 {
	prompt, _ := a.reservation.Estimated()
	return prompt
}

// Output returns the estimated tokens of the output.
func (a *Admission) Output() int64 {
	_, output := a.reservation.Estimated()
	return output
}

// Follow charges the output of a stream while it passes, as far as it exceeds
// the estimate.
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

// Limited reports whether the caller has limits. It is cheap enough to call for
// each reply.
func (a *Admission) Limited() bool { return a.entry != nil && a.entry.limited }

// Limits returns, for each kind, the caller's limit with the smallest fraction
// left.
func (a *Admission) Limits(now time.Time) (l quota.Limits) {
	for kind, use := range a.caller.Tightest(now) {
		l[kind] = quota.Fields{Limit: use.Allowed, Remaining: use.Left(), Reset: use.Reset, Known: use.Limit.Amount > 0}
	}
	return l
}

// rounded rounds a wait up to milliseconds, which is the precision that clients
// see.
func rounded(d time.Duration) time.Duration {
	return (d + time.Millisecond - 1).Truncate(time.Millisecond)
}
