// Package fleet knows all pools that are in use, for those who show them to
// operators or take their orders.
package fleet

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/caddyserver/caddy/v2"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// Entry is a pool in use.
type Entry struct {
	// Name tells pools apart, through config reloads.
	Name string
	Pool *pool.Pool
}

// Fleet is a set of pools. The zero Fleet is empty.
type Fleet struct {
	mu sync.Mutex
	// configs are the names in use by the config that they belong to: while one
	// config replaces another, both have pools of the same names.
	configs map[*prometheus.Registry]*names
	// entries are the newest of each name last.
	entries []*Entry
}

// names are those of a config's pools, and what has them.
type names struct {
	taken map[string]digest
	// unnamed are those of them that the operator did not choose, and keys reports
	// whether callers have keys for one of these.
	unnamed map[string]bool
	keys    bool
	warned  bool
}

// Default is the fleet of the process.
var Default Fleet

// digest stands for the options of a pool, which may be secret.
type digest [sha256.Size]byte

// Claim gives a pool its name in the config that is set up in ctx, for as long as
// that is in use. It is an error if another pool of the config has the name, unless
// that has the same options: Caddy makes two of a site that listens on two ports.
func (f *Fleet) Claim(ctx caddy.Context, name string, options ...any) error {
	text, err := json.Marshal(options)
	if err != nil {
		return err
	}
	mine := digest(sha256.Sum256(text))
	config := ctx.GetMetricsRegistry() // each config has its own
	f.mu.Lock()
	defer f.mu.Unlock()
	n := f.configs[config]
	if n == nil {
		n = &names{taken: make(map[string]digest), unnamed: make(map[string]bool)}
		if f.configs == nil {
			f.configs = make(map[*prometheus.Registry]*names)
		}
		f.configs[config] = n
		context.AfterFunc(ctx.Context, func() { f.giveBack(config) })
	}
	if other, taken := n.taken[name]; taken && other != mine {
		return fmt.Errorf("pool '%s': another pool has this name, choose a different one", name)
	}
	n.taken[name] = mine
	return nil
}

// Unnamed records that the operator did not choose the name of a pool that was
// claimed, and whether callers have keys for the pool. It reports, once for a
// config, that there are several such pools, and keys: when the order of the pools
// changes, one of them gets the name of another, and the ids of its callers.
func (f *Fleet) Unnamed(ctx caddy.Context, name string, keys bool) (warn bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := f.configs[ctx.GetMetricsRegistry()]
	n.unnamed[name] = true
	n.keys = n.keys || keys
	warn = n.keys && len(n.unnamed) > 1 && !n.warned
	n.warned = n.warned || warn
	return warn
}

// fileState is where a Caddyfile's adapter keeps the names of its pools.
const fileState = "openai_lb.pools"

// NameInFile returns the name of the next pool of a Caddyfile, whose adapter has
// this state. The first one without a name stays without, and is the fallback.
// Others are numbered in the order of the file, because Caddy sets up the servers
// of a config in any order.
func NameInFile(state map[string]any, name, fallback string) string {
	names, ok := state[fileState].(map[string]bool)
	if !ok {
		names = make(map[string]bool)
		state[fileState] = names
	}
	for n := 2; name == "" && names[fallback]; n++ {
		if numbered := fmt.Sprintf("%s_%d", fallback, n); !names[numbered] {
			name = numbered
		}
	}
	names[cmp.Or(name, fallback)] = true
	return name
}

// IsNumbered reports whether NameInFile makes such a name of the fallback.
func IsNumbered(name, fallback string) bool {
	number, ok := strings.CutPrefix(name, fallback+"_")
	_, err := strconv.ParseUint(number, 10, 0)
	return ok && err == nil
}

// giveBack frees the names of a config that is no longer in use.
func (f *Fleet) giveBack(config *prometheus.Registry) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.configs, config)
}

// Add puts a pool into the fleet. Until Remove, it hides one of the same name
// that was added before: while one config replaces another, both have it.
func (f *Fleet) Add(e *Entry) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.entries = append(f.entries, e)
}

// Remove takes a pool out of the fleet.
func (f *Fleet) Remove(e *Entry) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.entries = slices.DeleteFunc(f.entries, func(other *Entry) bool { return other == e })
}

// Entries returns the pools in use, in the order of their names.
func (f *Fleet) Entries() []*Entry {
	f.mu.Lock()
	defer f.mu.Unlock()
	newest := make(map[string]*Entry)
	for _, e := range f.entries {
		newest[e.Name] = e
	}
	var entries []*Entry
	for _, e := range newest {
		entries = append(entries, e)
	}
	slices.SortFunc(entries, func(a, b *Entry) int {
		return cmp.Or(cmp.Compare(len(a.Name), len(b.Name)), strings.Compare(a.Name, b.Name))
	})
	return entries
}
