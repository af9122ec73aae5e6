package affinity

import (
	"fmt"
	"slices"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/ownership"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
)

// Affinity routes the requests of one pool to the accounts that store the
// objects which they name. It remembers which account stores which object.
type Affinity struct {
	owners *savedOwners
	name   any // of the owners among those in use
	// accounts are the accounts that the requests may use. all are the accounts
	// of the pool.
	accounts, all []string
	// storage is where owners are saved. It is nil if the other replicas
	// remember them instead.
	storage certmagic.Storage
	logger  *zap.Logger
	// strict reports whether a caller reaches only objects that it made.
	strict bool
	// others gives access to the owners that other replicas know. It is nil if
	// there are none. Learned owners are sent through that of the newest
	// config.
	others ownership.Others
}

// Config configures an Affinity.
type Config struct {
	*Options
	// Pool is the name of the pool, under which owners survive a reload.
	Pool string
	// Accounts are the accounts of the pool's backends, the best priority
	// first. An account may be repeated.
	Accounts []string
	// Others gives access to the owners that other replicas know. It is nil if
	// there are none.
	Others ownership.Others
	Logger *zap.Logger
}

// inUse keeps the owners through config reloads.
var inUse = caddy.NewUsagePool()

// New returns the Affinity of a pool, which must be closed.
func New(ctx caddy.Context, c Config) (*Affinity, error) {
	if c.Options == nil {
		c.Options = new(Options)
	}
	if err := c.Options.check(); err != nil {
		return nil, fmt.Errorf("affinity: %w", err)
	}
	a := &Affinity{strict: c.Callers == Strict, name: "ids of " + c.Pool, logger: c.Logger, others: c.Others}
	if c.Others == nil {
		a.storage = ctx.Storage()
	}
	for _, account := range c.Accounts {
		if !slices.Contains(a.accounts, account) {
			a.accounts = append(a.accounts, account)
		}
	}
	a.all = a.accounts
	kept, again, _ := inUse.LoadOrNew(a.name, func() (caddy.Destructor, error) {
		return newSavedOwners(c.Pool), nil
	})
	a.owners = kept.(*savedOwners)
	if !again {
		a.Start()
	}
	return a, nil
}

// Start applies the options to the owners. Until then, the options of the
// previous config apply, because the new config may still fail to load.
func (a *Affinity) Start() {
	a.owners.configure(a.storage, a.logger)
	a.owners.others.Store(&a.others)
}

// Among returns an Affinity for requests that may use only these accounts. It
// need not be closed.
func (a *Affinity) Among(accounts []string) *Affinity {
	among := *a
	among.accounts = accounts
	return &among
}

// IsStrict reports whether a caller reaches only objects that it made.
func (a *Affinity) IsStrict() bool { return a.strict }

// Record returns the record of when the owners were saved. It returns nil if
// they are not saved in Caddy's storage.
func (a *Affinity) Record() *pools.Record {
	if a == nil || a.storage == nil {
		return nil
	}
	return &a.owners.saver.Record
}

// Close releases the resources that New acquired.
func (a *Affinity) Close() error {
	if a == nil {
		return nil
	}
	pools.SaveLast(a.owners.save)
	_, err := inUse.Delete(a.name)
	return err
}
