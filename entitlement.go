package openailb

import (
	"encoding/binary"
	"hash/fnv"
	"maps"
	"slices"

	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/callers"
)

// entitlement is which backends of the pool the requests of some callers may use: all, or those of the option backends.
// To these requests, it is as if the pool had no others. It is made once for each list of the config.
type entitlement struct {
	// may reports whether they may use a backend, and allModels whether its account serves all models of those that they may
	// use. Both are by the index of the backend.
	may, allModels []bool
	// affinity places requests at the accounts of these backends.
	affinity *affinity.Affinity
	// set distinguishes these backends from others. 0: all.
	set uint64
}

// entitle returns the entitlement of callers with the option backends, or of all others if names is nil.
func entitle(names []string, targets []*target, a *affinity.Affinity) *entitlement {
	e := &entitlement{may: make([]bool, len(targets)), allModels: make([]bool, len(targets)), affinity: a}
	digest, all := fnv.New64a(), true
	var accounts []string
	for i, t := range targets {
		if e.may[i] = callers.Matches(names, t.Name); !e.may[i] {
			all = false
			continue
		}
		_, _ = digest.Write(binary.AppendUvarint(nil, uint64(i))) // it never fails
		if account := t.backend.AccountKey; !slices.Contains(accounts, account) {
			accounts = append(accounts, account)
		}
	}
	if !all {
		e.set, e.affinity = digest.Sum64(), a.Among(accounts)
	}
	e.findAllModels(targets)
	return e
}

// findAllModels finds the backends of accounts that serve all models of the backends that may be used. A backend that
// serves any model adds models that no list has.
func (e *entitlement) findAllModels(targets []*target) {
	lists := make(map[string][]string) // by account
	serveAny := make(map[string]bool)
	var models []string
	for i, t := range targets {
		if e.may[i] {
			account := t.backend.AccountKey
			serveAny[account] = serveAny[account] || t.backend.Models == nil
			lists[account] = slices.AppendSeq(lists[account], maps.Keys(t.backend.Models))
			models = slices.AppendSeq(models, maps.Keys(t.backend.Models))
		}
	}
	listed := !slices.Contains(slices.Collect(maps.Values(serveAny)), true)
	for i, t := range targets {
		account := t.backend.AccountKey
		e.allModels[i] = e.may[i] && (serveAny[account] ||
			listed && !slices.ContainsFunc(models, func(model string) bool { return !slices.Contains(lists[account], model) }))
	}
}

// hasAllModels reports whether an account serves all models that the requests may use, or none does.
func (e *entitlement) hasAllModels(targets []*target, account string) bool {
	some := false
	for i, t := range targets {
		if e.allModels[i] && t.backend.AccountKey == account {
			return true
		}
		some = some || e.allModels[i]
	}
	return !some
}
