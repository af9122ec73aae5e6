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
	// Learned: the choice was free, and the reply named objects.
	Learned = "learned"
)

// Why returns why a backend was chosen.
func (h *Home) Why(a pool.Affinity) string {
	switch {
	case h.owns:
		return Owner
	case h.asked():
		return Asked
	case a.Result != "":
		return Cache
	case h.learned:
		return Learned
	}
	return None
}

// asked reports whether accounts are asked who has what the request names. An
// input item, which may come whole, only counts once an account lacks it.
func (h *Home) asked() bool {
	return len(h.missing) > 0 || h.Asks() && slices.ContainsFunc(h.unknown, func(it id) bool { return it.kind != openaiapi.Item })
}

// Result returns, for metrics, whether the owner of the objects that the
// request names was known. Both are empty if it names none.
func (h *Home) Result() (kind, result string) {
	switch {
	case h.owns:
		return Owner, "hit"
	case h.asked():
		return Owner, "miss"
	}
	return "", ""
}

// CameTo returns the result of the affinity that Why returns: hit, move or
// miss. It is empty if the choice was free.
func (h *Home) CameTo(a pool.Affinity) string {
	if _, result := h.Result(); result != "" {
		return result
	}
	return string(a.Result)
}
