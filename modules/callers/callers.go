package callers

import (
	"errors"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
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
	keptUse
	name string
	log  *zap.Logger
	// crossed receives the marks that the use of limits reaches.
	crossed func(ratelimit.Crossing)
	storage certmagic.Storage
	// location is the time zone in which days and months begin.
	location *time.Location
	// replicated reports whether replicas share state.
	replicated bool
}

// Options are the arguments of New.
type Options struct {
	// Config includes the callers of callers_file. Written is the config
	// without them. It may be nil if there is no file.
	Config
	Written *Config
	// AdmissionConfig describes the pool.
	seam.AdmissionConfig
	// Storage is where the use of long windows is saved. If it is nil, nothing
	// is saved.
	Storage certmagic.Storage
}

// open sets up the limits of callers. It returns nil without limits.
func (c *Config) open(ctx caddy.Context, o seam.AdmissionConfig) (seam.Admission, error) {
	config, err := c.WithFile()
	tokens := o.Keys.TokenTiers()
	if err := errors.Join(err, config.Check(o.Keys != nil, o.Backends), config.CheckTiers(tokens)); err != nil {
		return nil, err
	}
	for _, warning := range config.Unused(o.Keys.Names(), o.Keys.Tiers(), tokens) {
		o.Logger.Warn(warning)
	}
	if o.Keys == nil {
		return nil, nil
	}
	all := New(Options{Config: config, Written: c, AdmissionConfig: o, Storage: ctx.Storage()})
	if all == nil {
		return nil, nil
	}
	if c.CallersFile != nil {
		o.Files.Add("limits of callers", all.Read)
	}
	o.Entry.Callers = view{all, o.Keys}
	o.Keys.Watch(func(names []string, tiers map[string]string) {
		all.Place(tiers)
		if unlimited := all.Unlimited(names); unlimited != nil {
			o.Logger.Warn("client keys without a caller block have no limits: 'caller *' limits or refuses them",
				zap.String("pool", o.Pool), zap.Strings("callers", unlimited))
		}
	})
	return all, nil
}

// New returns the callers of a pool. It returns nil if the config has neither
// callers nor tiers. The config must have been checked. The result must be
// closed.
func New(o Options) *Callers {
	if len(o.Callers)+len(o.Tiers) == 0 && o.CallersFile == nil {
		return nil
	}
	c := &Callers{sets: [][]string{nil}, name: o.Pool, log: o.Logger, crossed: o.Crossed, storage: o.Storage,
		replicated: o.Replicated}
	c.location, _ = o.Location() // it was checked
	c.use(&o)
	c.watched.options, c.watched.applied = o, o.Callers
	if o.Written != nil {
		c.watched.options.Config = *o.Written
	}
	var again bool
	if c.keptUse, again = keep(subjectCallers, c.name); !again {
		c.kept.reportResets()
		c.Start()
	}
	return c
}

// Start implements seam.Admission.
func (c *Callers) Start() {
	c.kept.configure(c.storage, c.log, c.crossed)
	c.started.Store(true)
	c.configure()
}

func (c *Callers) configure() {
	c.kept.limiters.Configure(time.Now(), func(name string) limiter.Settings { return c.of(name).settings })
}

// Close implements seam.Admission. It saves the use.
func (c *Callers) Close() error {
	c.started.Store(false)
	return c.keptUse.Close()
}

// reset clears the use of a caller at all replicas, and saves that. It returns
// false if no request of such a caller is known.
func (k *kept) reset(name string, order pool.Order) (known bool) {
	k.saver.Await()
	if !k.limiters.Reset(order.Time, name) {
		return false
	}
	k.logger.Load().Named("audit").Info("caller reset", zap.String("pool", k.pool), zap.String("caller", name),
		zap.String("by", order.By), zap.String("reason", order.Reason))
	k.saver.Changed()
	k.saver.Save()
	return true
}

// Backends implements seam.Admission.
func (c *Callers) Backends() [][]string {
	lists := make([][]string, len(c.sets))
	for i, names := range c.sets[1:] {
		list := []string{}
		for _, b := range c.watched.options.Backends {
			if matches(names, b.Name) {
				list = append(list, b.Name)
			}
		}
		lists[1+i] = list
	}
	return lists
}

// Grant implements seam.Admission. If the caller has sent a token, it is placed
// in the tier that the token names.
func (c *Callers) Grant(caller keys.Caller) *seam.Grant {
	c.placeByToken(caller.Token)
	return &c.of(caller.Name).Grant
}

// Names returns the callers that have a block.
func (c *Callers) Names() []string { return slices.Collect(maps.Keys(c.blocks.Load().byName)) }

// Unlimited returns the names for which the config has neither a block nor a
// tier with limits, if it limits any caller at all.
func (c *Callers) Unlimited(names []string) (unlimited []string) {
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
