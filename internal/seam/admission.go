package seam

import (
	"net/http"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
)

// Admission decides what the callers of a pool may use, and how much. Package
// limiter counts their use; an Admission configures it, and keeps the use
// through reloads and restarts. Without one, every caller may use everything.
//
// The methods Grant, Caller, Settle, Leave, Awaits and SettleLeft are called
// during requests, by many goroutines at a time, so they must not allocate for
// each request. Caller may wait for a moment for use that was saved; no other
// method waits.
type Admission interface {
	// Start is called when the config is in use. Until then, the options of the
	// previous config apply.
	Start()
	// Record returns the state of the file that has the use, so that operators
	// see when writing fails.
	Record() *pools.Record
	// Backends returns the lists of backends that grants name by their numbers.
	// nil stands for all backends, and is the first one. The lists do not
	// change.
	Backends() [][]string
	// Grant returns what a caller may use. It is called when a request comes,
	// and applies to it until its end.
	Grant(who keys.Caller) *Grant
	// Caller returns the limiter of a caller, which admits its requests.
	Caller(now time.Time, name string) *limiter.Caller
	// Refuse returns the answer to a request that a limit refuses.
	Refuse(r *http.Request, now time.Time, name string, refusal *limiter.Refusal) apierror.Answer
	// Settle replaces the estimate of an admitted request with its real cost.
	// Further calls do nothing.
	Settle(now time.Time, r *limiter.Reservation, cost limiter.Cost)
	// Leave ends the request of a response that goes on in the background. The
	// request is charged with its maximum output, until a reply to any request
	// reports the real use. The id may be empty.
	Leave(now time.Time, r *limiter.Reservation, id string)
	// Awaits reports whether a response with this id was left in the background
	// and is not settled yet. The id is empty if a request names none.
	Awaits(id string) bool
	// SettleLeft replaces the charge of a response that was left in the
	// background with its real cost. A request of any caller may have returned
	// that cost.
	SettleLeft(now time.Time, id string, cost limiter.Cost)
	// Use returns what a caller sees of its own use and limits, for JSON. It
	// contains models, which is the caller's use of each model.
	Use(now time.Time, name string, models any) any
	// Close is called when the config is no longer in use, or has not been set
	// up.
	Close() error
}

// AdmissionConfig describes the pool whose callers an Admission limits.
type AdmissionConfig struct {
	Pool     string
	Backends []Backend
	// Keys knows the callers. It is nil if callers need no key, and so have no
	// names.
	Keys *keys.Clients
	// Files reloads files when they change.
	Files *keys.Reloader
	// Entry is the pool in the views of operators. The Admission sets the
	// fields about callers.
	Entry *pools.Entry
	// Replicated reports whether replicas share state.
	Replicated bool
	Logger     *zap.Logger
	// Crossed receives the marks that the use of limits reaches. It may be nil.
	Crossed func(limiter.Crossing)
}

// Backend is a backend, as options about callers name it.
type Backend struct {
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
	// LimitsTokens whether there are some of tokens.
	Limited, LimitsTokens bool
}

// SeesEach reports whether each request of the caller must be read, because of
// its model, its service tier or its tokens.
func (g *Grant) SeesEach() bool { return g.Models != nil || g.ServiceTiers != nil || g.LimitsTokens }
