// Package fleet knows all pools that are in use, for those who show them to
// operators or take their orders.
package fleet

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync"

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
	configs map[any]map[string]bool
	// entries are the newest of each name last.
	entries []*Entry
}

// Default is the fleet of the process.
var Default Fleet

// Name gives a pool of the config a name. Without one it is the fallback, made
// unique. It is an error if another pool of the config has the name.
func (f *Fleet) Name(config any, name, fallback string) (string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	names := f.configs[config]
	if names[name] {
		return "", fmt.Errorf("pool '%s': another pool has this name", name)
	}
	for n := 1; name == ""; n++ {
		unique := fallback
		if n > 1 {
			unique = fmt.Sprintf("%s_%d", fallback, n)
		}
		if !names[unique] {
			name = unique
		}
	}
	if names == nil {
		names = make(map[string]bool)
		if f.configs == nil {
			f.configs = make(map[any]map[string]bool)
		}
		f.configs[config] = names
	}
	names[name] = true
	return name, nil
}

// GiveBack frees the names of a config that is no longer in use.
func (f *Fleet) GiveBack(config any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.configs, config)
}

// Add puts a pool into the fleet. It replaces one of the same name, which
// belongs to a config that is going.
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
