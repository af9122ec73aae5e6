package seam

import (
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/calleroptions"
	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// AdmissionNamespace is the namespace of Caddy modules that implement
// AdmissionModule.
const AdmissionNamespace = "http.openai_lb.admission"

// AdmissionModule applies the options about callers. It reads and checks them,
// and opens the Admission of each pool that has limits. Without such a module,
// each of these options is an error. Callers may still have keys and tokens,
// and so names.
//
// The methods are called while a config is read or set up, and not during
// requests. They make no request and start no goroutine, because `caddy
// validate` calls them, too.
type AdmissionModule interface {
	// Directives returns the options in a Caddyfile, which are read to c.
	Directives(c *calleroptions.Config) directive.Options
	// Check returns an error if an option is not valid. It is called after a
	// Caddyfile was read. named reports whether callers have names. backends
	// are those of the pool, or nil if they are not known yet.
	Check(c *calleroptions.Config, named bool, backends []NamedBackend) error
	// Shared returns the options that other parts of the core apply.
	Shared(c *calleroptions.Config) (SharedOptions, error)
	// Open checks the options and sets up the limits of a pool's callers. It
	// returns nil without limits.
	Open(ctx caddy.Context, c *calleroptions.Config, o AdmissionConfig) (Admission, error)
	// OpenQuotas sets up the quotas of a pool's backends.
	OpenQuotas(ctx caddy.Context, o QuotaConfig) (Limits, error)
}

// QuotaConfig describes the quotas of the backends of a pool: what the options
// requests and tokens limit.
type QuotaConfig struct {
	Pool string
	// Quotas are the limits of each backend that has some, by its health key.
	Quotas map[string][]ratelimit.Limit
	// Location is the time zone in which days and months begin.
	Location *time.Location
	Logger   *zap.Logger
}

// SharedOptions are the options about callers that other parts of the core
// apply: client keys, waiting requests, and the choice of backends.
type SharedOptions struct {
	// TierNames are the names of the tiers, in order of importance.
	TierNames []string
	// Tiers are the tiers by their numbers. The first one, with number 0, is
	// that of requests without a tier. Tiers is nil if no tier keeps a share.
	Tiers []quota.Tier
	// Location is the time zone in which days begin.
	Location *time.Location
}

// Callers returns the module for the options about callers. In a build without
// one, it returns an AdmissionModule that refuses these options.
func Callers() AdmissionModule {
	modules := caddy.GetModules(AdmissionNamespace)
	if len(modules) == 0 {
		return everyone{}
	}
	return modules[0].New().(AdmissionModule)
}

// everyone is the AdmissionModule of a build without such a module: every
// caller may use everything. Each option about callers is an error that names
// the module that is missing.
type everyone struct{}

// Directives returns options that are errors.
func (everyone) Directives(*calleroptions.Config) directive.Options {
	options := make(directive.Options)
	for _, name := range []string{"caller", "callers_file", "tier", "timezone"} {
		options[name] = directive.Unavailable(Missing(name, "callers"))
	}
	return options
}

// Check returns an error if an option is set.
func (everyone) Check(c *calleroptions.Config, _ bool, _ []NamedBackend) error {
	switch {
	case len(c.Callers) > 0:
		return Missing("caller '"+c.Callers[0].Name+"'", "callers")
	case c.CallersFile != nil:
		return Missing("callers_file", "callers")
	case len(c.Tiers) > 0:
		return Missing("tier '"+c.Tiers[0].Name+"'", "callers")
	case c.Timezone != "":
		return Missing("timezone", "callers")
	}
	return nil
}

// Shared returns an error if an option is set.
func (e everyone) Shared(c *calleroptions.Config) (SharedOptions, error) {
	return SharedOptions{Location: time.UTC}, e.Check(c, false, nil)
}

// Open returns an error if an option is set, or if tokens name tiers.
func (e everyone) Open(_ caddy.Context, c *calleroptions.Config, o AdmissionConfig) (Admission, error) {
	if tiers := o.Keys.TokenTiers(); len(tiers) > 0 {
		return nil, Missing("caller_identity: tier '"+tiers[0]+"'", "callers")
	}
	return nil, e.Check(c, o.Keys != nil, o.Backends)
}

// OpenQuotas returns an error, because it is called if there are quotas.
func (everyone) OpenQuotas(caddy.Context, QuotaConfig) (Limits, error) {
	return nil, Missing("requests and tokens of a backend", "callers")
}

// Limits limits the use of the callers of a pool, or of its backends. It keeps
// the use through reloads and restarts. Replicas share it: see
// [Replication].Share.
//
// The methods Caller, Settle, Leave, Awaits and SettleLeft are called during
// requests, by many goroutines at a time. Caller may wait for a moment for use
// that was saved; no other method waits.
type Limits interface {
	// Start is called when the config is in use. Until then, the options of the
	// previous config apply.
	Start()
	// Record returns the state of the file that has the use, so that operators
	// see when writing fails.
	Record() *pools.Record
	// Caller returns the limiter of a caller, or of a backend by its health
	// key. It admits requests.
	Caller(now time.Time, name string) ratelimit.Limiter
	// Settle replaces the estimate of an admitted request with its real cost.
	// Further calls do nothing.
	Settle(now time.Time, r ratelimit.Reservation, cost ratelimit.Cost)
	// Leave ends the request of a response that goes on in the background. The
	// request is charged with its maximum output, until a reply to any request
	// reports the real use. The id may be empty.
	Leave(now time.Time, r ratelimit.Reservation, id string)
	// Awaits reports whether a response with this id was left in the background
	// and is not settled yet. The id is empty if a request names none.
	Awaits(id string) bool
	// SettleLeft replaces the charge of a response that was left in the
	// background with its real cost. A request of any caller may have returned
	// that cost.
	SettleLeft(now time.Time, id string, cost ratelimit.Cost)
	// Close is called when the config is no longer in use, or has not been set
	// up.
	Close() error
}

// Admission decides what the callers of a pool may use, and how much. Without
// one, every caller may use everything. Grant is called during requests, as the
// methods of Limits are.
type Admission interface {
	Limits
	// Backends returns the lists of backends that grants name by their numbers.
	// nil stands for all backends, and is the first one. The lists do not
	// change.
	Backends() [][]string
	// Grant returns what a caller may use. It is called when a request comes,
	// and applies to it until its end.
	Grant(caller keys.Caller) *Grant
	// Refuse returns the answer to a request that a limit refuses.
	Refuse(r *http.Request, now time.Time, name string, refusal *ratelimit.Refusal) apierror.Answer
	// Use returns what a caller sees of its own use and limits, for JSON. It
	// contains models, which is the caller's use of each model.
	Use(now time.Time, name string, models any) any
}

// AdmissionConfig describes the pool whose callers an Admission limits.
type AdmissionConfig struct {
	Pool     string
	Backends []NamedBackend
	// Keys knows the callers. It is nil if callers need no key, and so have no
	// names.
	Keys *keys.Clients
	// Files reloads files when they change.
	Files *keys.Reloader
	// Entry is the pool in the views of operators. The Admission sets its
	// Callers.
	Entry *pools.Entry
	// Replicated reports whether replicas share state.
	Replicated bool
	Logger     *zap.Logger
	// Crossed receives the marks that the use of limits reaches. It may be nil.
	Crossed func(ratelimit.Crossing)
}

// NamedBackend is a backend, as options about callers name it.
type NamedBackend struct {
	// Name is the backend's name. It is empty if it is not known yet.
	Name string
	// Models are the models that the backend lists. It is nil if the backend
	// serves any model, or if the models are not known yet.
	Models []string
}

// Grant says what a caller may use. It does not change.
type Grant struct {
	// Denied reports whether all requests of the caller are refused.
	Denied bool
	// Backends is the number of the list of backends that the caller may use,
	// in [Admission.Backends].
	Backends int
	// Models are the models that the caller may use. It is nil if the caller
	// may use all models.
	Models []string
	// Listed are the models that the caller's list of models shows. It is nil
	// if these are not known.
	Listed []string
	// ServiceTiers are the service tiers that the caller may use. If it is nil,
	// the caller may use all in bodies, and none in the header.
	ServiceTiers []string
	// Limited reports whether there are limits of requests or tokens, and
	// LimitsTokens whether there are some of tokens. LimitedModels are the
	// models that have limits of their own.
	Limited, LimitsTokens bool
	LimitedModels         []string
}

// SeesEach reports whether each request of the caller must be read, because of
// its model, its service tier or its tokens.
func (g *Grant) SeesEach() bool {
	return g.Models != nil || g.ServiceTiers != nil || g.LimitsTokens || g.LimitedModels != nil
}
