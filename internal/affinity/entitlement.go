package affinity

import (
	"encoding/binary"
	"hash/fnv"
	"maps"
	"slices"

	"github.com/openai-lb/caddy-openai-lb/internal/backend"
)

// Entitlement defines which backends of the pool some callers may use: all, or
// those of the option backends. For these callers, the pool's other backends do
// not exist. There is one Entitlement for each list of backends in the config.
type Entitlement struct {
	// May reports whether the callers may use a backend. AllModels reports
	// whether the backend's account serves all models of the backends that they
	// may use. Both are indexed by backend.
	May, AllModels []bool
	// Affinity places requests at the accounts of these backends.
	Affinity *Affinity
	// Set identifies the set of backends. It is 0 if the set contains all.
	Set uint64
	// accounts are the accounts of all backends, by backend.
	accounts []string
}

// Entitle returns the entitlement of callers that may use the backends with
// these names. If names is nil, they may use all backends.
func Entitle(names []string, backends []*backend.Backend, a *Affinity) *Entitlement {
	e := &Entitlement{May: make([]bool, len(backends)), AllModels: make([]bool, len(backends)), Affinity: a}
	digest, all := fnv.New64a(), true
	var accounts []string
	for i, b := range backends {
		e.accounts = append(e.accounts, b.AccountKey)
		if e.May[i] = names == nil || slices.Contains(names, b.Name); !e.May[i] {
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

// findAllModels sets AllModels. If a backend serves any model, only accounts
// with such a backend serve all models.
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

// HasAllModels reports whether the account serves all models that the callers
// may use. If no account does, it reports true.
func (e *Entitlement) HasAllModels(account string) bool {
	found := false
	for i, a := range e.accounts {
		if e.AllModels[i] && a == account {
			return true
		}
		found = found || e.AllModels[i]
	}
	return !found
}
