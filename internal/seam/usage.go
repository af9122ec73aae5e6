// Package seam has the interfaces between the core, which serves requests, and
// the optional modules, which the core does not know.
//
// A module registers itself with Caddy when it is imported, in the namespace of
// its seam. The core opens each module that records usage or hears events, and
// the first one for admission, for WebSockets and for replication, and calls it
// where the interface says so. If a module is left out of a build, there is
// nothing to call, and the core works without it. An option that needs the
// module is an error then, which names the module.
//
// There are five seams. An [AdmissionModule] decides what callers may use, and
// how much, and limits what backends get. A [UsageModule] records what requests
// have used, such as for a bill. An [EventsModule] hears when a cooldown starts
// or ends, and of the orders of operators. A [WebSocketModule] relays the
// messages of open WebSockets. A [ReplicationModule] shares what is learned
// with the other replicas of the balancer, and asks them.
//
// The core names a module only in the file that imports it
// (TestOnlyItsImportFileNamesAModule, TestTheCoreImportsNoModule). A module
// imports neither the root nor another module
// (TestAModuleImportsNeitherTheRootNorAnotherModule).
package seam

import (
	"fmt"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/internal/usage"
)

// Missing returns the error of an option in a build without the module that the
// option needs.
func Missing(option, module string) error {
	return fmt.Errorf("%s is not available: this binary was built without the module %s (build tag openai_lb_%[2]s)",
		option, module)
}

// UsageNamespace is the namespace of Caddy modules that implement UsageModule.
const UsageNamespace = "http.openai_lb.usage_recorders"

// UsageModule opens a recorder for each pool of a config.
type UsageModule interface {
	caddy.Module
	// OpenUsage opens the recorder of a pool. It makes no request and starts no
	// goroutine, because `caddy validate` calls it, too.
	OpenUsage(ctx caddy.Context, pool string) UsageRecorder
}

// UsageRecorder records what the requests of a pool have used, such as for a
// bill. It decides nothing about a request.
//
// Each request that cost something is recorded once, when it is over. Some
// responses go on in the background after that: they are recorded with an
// estimate and their id, and settled when the reply to a later request reports
// what they have used.
//
// The methods Record, Awaits and Settle are called during requests, by many
// goroutines at a time, so they must neither wait for a storage nor allocate
// for each request.
type UsageRecorder interface {
	// Start is called when the config is in use. Nothing is recorded before.
	Start()
	// Records returns the state of each file that the recorder writes, so that
	// operators see when writing fails.
	Records() []*pools.Record
	// Record records a request.
	Record(Usage)
	// Awaits reports whether a response was recorded with an estimate, and not
	// settled. The id is empty if a request names none.
	Awaits(id string) bool
	// Settle replaces the estimate for a response by the tokens that it has
	// used, and its service tier, unless that is empty.
	Settle(id string, reported usage.Tokens, serviceTier string)
	// OfCaller returns a caller's use of each model, for JSON. The answer to
	// GET /v1/usage contains it.
	OfCaller(now time.Time, caller string) any
	// Close is called when the config is no longer in use, or has not been set
	// up.
	Close() error
}

// Usage is the use of one request.
type Usage struct {
	// Time is when the request was over.
	Time time.Time
	// Caller is empty if callers need no key.
	Caller string
	// Model is the client's name for the model.
	Model   string
	Backend string
	// ServiceTier is the one that has served. It is empty if the reply names
	// none.
	ServiceTier string
	// Cost is the charge to the caller: the tokens that the backend has
	// reported, and an estimate of what it has not.
	Cost     ratelimit.Cost
	Reported usage.Tokens
	// LaterID is the id of a response that goes on in the background. It is
	// empty for others.
	LaterID string
}

// UsageRecorders are the recorders of a pool, one of each module.
type UsageRecorders []UsageRecorder

// OpenUsage opens the recorders of a pool.
func OpenUsage(ctx caddy.Context, pool string) (all UsageRecorders, err error) {
	for _, info := range caddy.GetModules(UsageNamespace) {
		module, err := ctx.LoadModuleByID(string(info.ID), nil)
		if err != nil {
			return all, err
		}
		all = append(all, module.(UsageModule).OpenUsage(ctx, pool))
	}
	return all, nil
}

// Record records a request with each recorder.
func (all UsageRecorders) Record(u Usage) {
	for _, r := range all {
		r.Record(u)
	}
}

// Awaits reports whether a recorder awaits what a response has used.
func (all UsageRecorders) Awaits(id string) bool {
	for _, r := range all {
		if r.Awaits(id) {
			return true
		}
	}
	return false
}

// Settle settles a response with each recorder.
func (all UsageRecorders) Settle(id string, reported usage.Tokens, serviceTier string) {
	for _, r := range all {
		r.Settle(id, reported, serviceTier)
	}
}

// OfCaller returns a caller's use by the first recorder, or an empty list
// without one.
func (all UsageRecorders) OfCaller(now time.Time, caller string) any {
	if len(all) == 0 {
		return []any{}
	}
	return all[0].OfCaller(now, caller)
}
