package affinity

import (
	"encoding/binary"
	"hash/fnv"
	"maps"
	"slices"

	"github.com/openai-lb/caddy-openai-lb/internal/backend"
	"github.com/openai-lb/caddy-openai-lb/internal/callers"
)

// Entitlement is which backends of the pool the requests of some callers may
// use: all, or those of the option backends. To these requests, it is as if the
// pool had no others. It is made once for each list of the config.
type Entitlement struct {
	// May reports whether they may use a backend, and AllModels whether its
	// account serves all models of those that they may use. Both are by the
	// index of the backend.
	May, AllModels []bool
	// Affinity places requests at the accounts of these backends.
	Affinity *Affinity
	// Set distinguishes these backends from others. 0: all.
	Set uint64
	// accounts are those of all backends.
	accounts []string
}

// Entitle returns the entitlement of callers with the option backends, or of
// all others if names is nil.
func Entitle(names []string, backends []*backend.Backend, a *Affinity) *Entitlement {
	e := &Entitlement{May: make([]bool, len(backends)), AllModels: make([]bool, len(backends)), Affinity: a}
	digest, all := fnv.New64a(), true
	var accounts []string
	for i, b := range backends {
		e.accounts = append(e.accounts, b.AccountKey)
		if e.May[i] = callers.Matches(names, b.Name); !e.May[i] {
			all = false
			continue
		}
		_, _ = digest.Write(binary.AppendUvarint(nil, uint64(i))) // it never fails
		if account := b.AccountKey; !slices.Contains(accounts, account) {
			accounts = append(accounts, account)
		}
	}
	if !all {
		e.Set, e.Affinity = digest.Sum64(), a.Among(accounts)
	}
	e.findAllModels(backends)
	return e
}

// findAllModels finds the backends of accounts that serve all models of the
// backends that may be used. A backend that serves any model adds models that
// no list has.
func (e *Entitlement) findAllModels(backends []*backend.Backend) {
	lists := make(map[string]map[string]bool) // by account
	serveAny := make(map[string]bool)
	models := make(map[string]bool)
	for i, b := range backends {
		if !e.May[i] {
			continue
		}
		account := b.AccountKey
		serveAny[account] = serveAny[account] || b.Models == nil
		if lists[account] == nil {
			lists[account] = make(map[string]bool)
		}
		for model := range b.Models {
			lists[account][model], models[model] = true, true
		}
	}
	listed := !slices.Contains(slices.Collect(maps.Values(serveAny)), true)
	for i, b := range backends {
		e.AllModels[i] = e.May[i] && (serveAny[b.AccountKey] || listed && len(lists[b.AccountKey]) == len(models))
	}
}

// HasAllModels reports whether an account serves all models that the requests
// may use, or none does.
func (e *Entitlement) HasAllModels(account string) bool {
	some := false
	for i, its := range e.accounts {
		if e.AllModels[i] && its == account {
			return true
		}
		some = some || e.AllModels[i]
	}
	return !some
}
