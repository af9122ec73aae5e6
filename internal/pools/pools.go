// Package pools keeps what belongs to all pools of the process.
//
// Its [Set] has the pools in use by their names. The status page, the metrics
// and the admin API find pools there. The newest pool of a name counts, because
// during a reload the old and the new configuration run side by side
// (TestTheNewestOfANameCounts). The health of a backend is shared by all pools
// that use it, and outlives each of them: see [LoadHealth].
//
// A [Saver] writes state to Caddy's storage, at intervals and at a stop. A
// storage that hangs delays the end of all pools together, and only once
// (TestAStorageThatHangsDelaysTheEndOfAllPoolsOnce).
//
// The package also adapts the selection policies of reverse_proxy, which choose
// among upstreams, to members of a pool.
package pools

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// Entry is a pool in use.
type Entry struct {
	// Name identifies the pool, also through config reloads.
	Name string
	Pool *pool.Pool
	// Rechecker is a *backend.Rechecker, which has the backends and their
	// transport. This package cannot import it. A plain reverse_proxy has none.
	Rechecker pool.Listener
	// Callers are the callers of the pool. It is nil if the pool does not limit
	// them.
	Callers Callers
	// Quota returns the use of a member's quotas. It is nil if no backend has
	// any.
	Quota func(m *pool.Member, now time.Time) []ratelimit.Use
	// Secrets are those of its config that come from files, or nil.
	Secrets *keys.Reloader
	// Records are the files that the pool keeps on disk. Some may be nil.
	Records []*Record
}

// Callers are the callers of a pool, for operators.
type Callers interface {
	// Snapshots returns the callers that have sent requests here, and those
	// that were included, sorted by name.
	Snapshots(now time.Time) []ratelimit.Snapshot
	// Include makes Snapshots also return callers of other replicas that the
	// config names: those of which these replicas have told, and those for
	// which known returns true. known may be nil.
	Include(now time.Time, known func(ratelimit.CallerID) bool)
	// Unlimited returns the callers that have keys, but no limits, although
	// others have some.
	Unlimited() []string
	// Forgotten returns how many callers were forgotten because there were too
	// many.
	Forgotten() int64
	// Reset clears the use of a caller at all replicas. It returns false if no
	// request of such a caller is known.
	Reset(name string, order pool.Order) (known bool)
}

// States returns the states of its records.
func (e *Entry) States() (states []State) {
	for _, r := range e.Records {
		if r != nil {
			states = append(states, r.State())
		}
	}
	return states
}

// Set is a set of pools in use. The zero Set is empty.
type Set struct {
	mu sync.Mutex
	// configs are the names in use by the config that they belong to: while one
	// config replaces another, both have pools of the same names.
	configs map[*prometheus.Registry]*names
	// entries are the newest of each name last.
	entries []*Entry
}

// names are the names of a config's pools.
type names struct {
	// taken are all names, with the options of their pools.
	taken map[string]digest
	// unnamed are the names that the operator did not choose, and keys reports
	// whether callers have keys for one of their pools.
	unnamed map[string]bool
	keys    bool
	warned  bool
	// ctx is the config's. It is done before the config is cleaned up.
	ctx context.Context
}

// Default is the set of the process.
var Default Set

// digest identifies the options of a pool, which may be secret.
type digest [sha256.Size]byte

// take records the options of the pool with this name. It is an error if
// another pool has the name, unless that has the same options.
func take(taken map[string]digest, name string, options []any) error {
	text, err := json.Marshal(options)
	if err != nil {
		return err
	}
	mine := digest(sha256.Sum256(text))
	if other, again := taken[name]; again && other != mine {
		return fmt.Errorf("pool '%s': another pool has this name, choose a different one", name)
	}
	taken[name] = mine
	return nil
}

// Claim gives a pool its name in the config that is set up in ctx, for as long
// as that is in use. It is an error if another pool of the config has the name,
// unless that has the same options: Caddy makes two of a site that listens on
// two ports.
func (s *Set) Claim(ctx caddy.Context, name string, options ...any) error {
	config := ctx.GetMetricsRegistry() // each config has its own
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.configs[config]
	if n == nil {
		n = &names{taken: make(map[string]digest), unnamed: make(map[string]bool), ctx: ctx.Context}
		if s.configs == nil {
			s.configs = make(map[*prometheus.Registry]*names)
		}
		s.configs[config] = n
		context.AfterFunc(ctx.Context, func() { // it is no longer in use
			s.mu.Lock()
			defer s.mu.Unlock()
			delete(s.configs, config)
		})
	}
	return take(n.taken, name, options)
}

// Unnamed records that the operator did not choose the name of a pool that was
// claimed, and whether callers have keys for the pool. It reports, once for
// each config, whether there are several such pools, and keys: when the order
// of the pools changes, one of them gets the name of another, and the ids of
// its callers.
func (s *Set) Unnamed(ctx caddy.Context, name string, keys bool) (warn bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.configs[ctx.GetMetricsRegistry()]
	n.unnamed[name] = true
	n.keys = n.keys || keys
	warn = n.keys && len(n.unnamed) > 1 && !n.warned
	n.warned = n.warned || warn
	return warn
}

// fileState is where a Caddyfile's adapter keeps the names of its pools.
const fileState = "openai_lb.pools"

// NameInFile returns the name of the next pool of the Caddyfile of which the
// adapter has this state. The first pool without a name keeps none, and is the
// fallback. The others are numbered in the order of the file, because Caddy
// sets up the servers of a config in any order.
func NameInFile(state map[string]any, name, fallback string) string {
	names := inFile[bool](state, fileState)
	for n := 2; name == "" && names[fallback]; n++ {
		if numbered := fmt.Sprintf("%s_%d", fallback, n); !names[numbered] {
			name = numbered
		}
	}
	names[cmp.Or(name, fallback)] = true
	return name
}

// optionsInFile is where a Caddyfile's adapter keeps the digests of its pools'
// options.
const optionsInFile = "openai_lb.options"

// ClaimInFile returns the error of Claim that a pool of the Caddyfile will
// meet, because of one before it.
func ClaimInFile(state map[string]any, name string, options ...any) error {
	return take(inFile[digest](state, optionsInFile), name, options)
}

// inFile returns a map that a Caddyfile's adapter keeps.
func inFile[V any](state map[string]any, key string) map[string]V {
	kept, ok := state[key].(map[string]V)
	if !ok {
		kept = make(map[string]V)
		state[key] = kept
	}
	return kept
}

// IsNumbered reports whether NameInFile makes such a name of the fallback.
func IsNumbered(name, fallback string) bool {
	number, ok := strings.CutPrefix(name, fallback+"_")
	_, err := strconv.ParseUint(number, 10, 0)
	return ok && err == nil
}

// Add puts a pool into the set. Until Remove, it hides a pool of the same name
// that was added before: while one config replaces another, both have it.
func (s *Set) Add(e *Entry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.entries = append(s.entries, e)
}

// Remove removes a pool from the set.
func (s *Set) Remove(e *Entry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.entries = slices.DeleteFunc(s.entries, func(other *Entry) bool { return other == e })
}

// Names returns the names of the pools that a config has, and of those in use,
// which there may be a little longer.
func (s *Set) Names() (all []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range s.configs {
		if n.ctx.Err() == nil {
			all = slices.AppendSeq(all, maps.Keys(n.taken))
		}
	}
	for _, e := range s.entries {
		all = append(all, e.Name)
	}
	return all
}

// Entries returns the pools in use, in the order of their names.
func (s *Set) Entries() []*Entry {
	s.mu.Lock()
	defer s.mu.Unlock()
	newest := make(map[string]*Entry)
	for _, e := range s.entries {
		newest[e.Name] = e
	}
	return slices.SortedFunc(maps.Values(newest), func(a, b *Entry) int {
		return cmp.Or(cmp.Compare(len(a.Name), len(b.Name)), strings.Compare(a.Name, b.Name))
	})
}
