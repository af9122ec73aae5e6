package affinity

import (
	"fmt"
	"slices"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/replicas"
)

// Affinity stores which account owns which object, for the requests of one
// pool.
type Affinity struct {
	owners *savedOwners
	name   any // of the owners among those in use
	// accounts are those that the requests may use, and all are those of the
	// pool.
	accounts, all []string
	// storage is where owners are saved. nil: nowhere, because the other
	// replicas know them.
	storage certmagic.Storage
	logger  *zap.Logger
	// strict reports whether a caller reaches only what it made.
	strict bool
	// others is what other replicas know. They are told by the newest config's.
	others *replicas.Owners
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

// New returns the Affinity of a pool. The caller closes it.
func New(ctx caddy.Context, c Config) (*Affinity, error) {
	if c.Options == nil {
		c.Options = new(Options)
	}
	if err := c.Options.check(); err != nil {
		return nil, fmt.Errorf("affinity: %w", err)
	}
	a := &Affinity{strict: c.Callers == Strict, name: "ids of " + c.Pool, logger: c.Logger}
	if c.Link == nil {
		a.storage = ctx.Storage()
	}
	for _, account := range c.Accounts {
		if !slices.Contains(a.accounts, account) {
			a.accounts = append(a.accounts, account)
		}
	}
	a.all = a.accounts
	a.others = c.Link.Owners(c.Pool, a.all)
	kept, again, _ := inUse.LoadOrNew(a.name, func() (caddy.Destructor, error) {
		return newSavedOwners(c.Pool), nil
	})
	a.owners = kept.(*savedOwners)
	if !again {
		a.Start()
	}
	return a, nil
}

// Start applies the options to the owners. Those of the config before apply
// until the new one is in use, because it may fail.
func (a *Affinity) Start() {
	a.owners.configure(a.storage, a.logger)
	a.owners.others.Store(a.others)
}

// Among returns the Affinity of requests that may use only these of the
// accounts. It is not closed.
func (a *Affinity) Among(accounts []string) *Affinity {
	among := *a
	among.accounts = accounts
	return &among
}

// IsStrict reports whether a caller reaches only the objects that it made.
func (a *Affinity) IsStrict() bool { return a.strict }

// Record returns when the ids were saved. It is nil if Caddy's storage does not
// have them.
func (a *Affinity) Record() *pools.Record {
	if a == nil || a.storage == nil {
		return nil
	}
	return &a.owners.saver.Record
}

// Close releases what New acquired.
func (a *Affinity) Close() error {
	if a == nil {
		return nil
	}
	pools.SaveLast(a.owners.save)
	_, err := inUse.Delete(a.name)
	return err
}
