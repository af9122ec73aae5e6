package affinity

import (
	"slices"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// The reasons why a backend was chosen, in placeholders and logs.
const (
	// None: by no affinity.
	None = "none"
	// Owner: its account is known to store the objects that the request names.
	Owner = "owner"
	// Asked: the owner was not known, so the accounts were asked.
	Asked = "asked"
	// Cache: by the session's key.
	Cache = "cache"
	// Home: the objects that the caller makes are there.
	Home = "home"
	// Learned: the choice was free, and the reply named objects.
	Learned = "learned"
)

// Why returns why a backend was chosen.
func (p *Placement) Why(a pool.Affinity) string {
	switch {
	case p.basis == owned:
		return Owner
	case p.asked():
		return Asked
	case a.Result != "":
		return Cache
	case p.maker.Chosen:
		return Home
	case p.ids == learnedIDs:
		return Learned
	}
	return None
}

// asked reports whether accounts are asked for what the request names. An
// input item, which may come whole, only counts once an account lacks it.
func (p *Placement) asked() bool {
	return p.wasAsked || len(p.missing) > 0 || p.Asks() && slices.ContainsFunc(p.unknown, func(it id) bool { return it.kind != openaiapi.ItemID })
}

// Result returns, for metrics, whether the owner of the objects that the
// request names was known. Both are empty if it names none.
func (p *Placement) Result() (kind, result string) {
	switch {
	case p.basis == owned:
		return Owner, "hit"
	case p.asked():
		return Owner, "miss"
	}
	return "", ""
}

// CameTo returns the result of the affinity that Why returns: hit, move or
// miss. It is empty if the choice was free.
func (p *Placement) CameTo(a pool.Affinity) string {
	if _, result := p.Result(); result != "" {
		return result
	}
	return string(a.Result)
}
