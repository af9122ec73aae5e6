package affinity

import (
	"fmt"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/owners"
	"github.com/openai-lb/caddy-openai-lb/internal/replicas"
)

// Affinity stores which account owns which object, for the requests of one
// pool. A nil Affinity knows nothing and learns nothing.
type Affinity struct {
	owners   *savedOwners
	name     any // of the owners among those in use
	ttl      time.Duration
	accounts []string
	// configure applies the options to the owners.
	configure func()
	// strict reports whether a caller reaches only what it made.
	strict bool
	// others is what other replicas know, and patience how long a request waits
	// for that. They are told by the newest config's.
	others   *replicas.Owners
	patience time.Duration
}

// Config configures an Affinity.
type Config struct {
	*Options
	// Pool is the name of the pool, under which owners survive a reload.
	Pool string
	// Accounts are the accounts of the pool's backends, the best priority
	// first. They may repeat.
	Accounts []string
	// Link connects the pool with other replicas. It is nil without any.
	Link   *replicas.Link
	Logger *zap.Logger
}

// inUse keeps the owners through config reloads.
var inUse = caddy.NewUsagePool()

// New returns the Affinity of a pool, or nil if the options turn it off. The
// caller closes it.
func New(ctx caddy.Context, c Config) (*Affinity, error) {
	if c.Options == nil {
		c.Options = new(Options)
	}
	if err := c.Options.provision(); err != nil {
		return nil, fmt.Errorf("affinity: %w", err)
	}
	if *c.IDs == 0 {
		return nil, nil
	}
	strict := c.Callers == Strict
	if strict && !c.Save && c.Link == nil {
		c.Logger.Warn("callers strict without save or state: after a restart, callers cannot use objects that they created before")
	}
	a := &Affinity{strict: strict, name: "ids of " + c.Pool, ttl: time.Duration(c.IDsTTL), patience: time.Duration(c.LookupTimeout)}
	for _, account := range c.Accounts {
		if !slices.Contains(a.accounts, account) {
			a.accounts = append(a.accounts, account)
		}
	}
	a.others = c.Link.Owners(c.Pool, a.accounts)
	kept, again, _ := inUse.LoadOrNew(a.name, func() (caddy.Destructor, error) {
		return &savedOwners{memory: owners.NewMemory(*c.IDs)}, nil
	})
	a.owners = kept.(*savedOwners)
	a.configure = func() {
		a.owners.configure(*c.IDs, c.Save, ctx.Storage(), c.Pool, c.Logger)
		a.owners.others.Store(a.others)
	}
	if !again {
		a.Start()
	}
	return a, nil
}

// Start applies the options to the owners. Those of the config before apply until
// the new one is in use, because it may fail.
func (a *Affinity) Start() { a.configure() }

// IsStrict reports whether a caller reaches only the objects that it made.
func (a *Affinity) IsStrict() bool { return a != nil && a.strict }

// Close releases what New acquired.
func (a *Affinity) Close() error {
	if a == nil {
		return nil
	}
	a.owners.save()
	_, err := inUse.Delete(a.name)
	return err
}
