package affinity

import "github.com/openai-lb/caddy-openai-lb/internal/pool"

// Why a backend was chosen, in placeholders and logs.
const (
	// None: by no affinity.
	None = "none"
	// Owner: its account is known to have what the request names.
	Owner = "owner"
	// Asked: nobody knew which account has it, so they were asked.
	Asked = "asked"
	// Cache: by the session's key.
	Cache = "cache"
	// Learned: the choice was free, and the reply named objects.
	Learned = "learned"
)

// Why tells why a backend was chosen.
func (h *Home) Why(a pool.Affinity) string {
	switch {
	case h.owns:
		return Owner
	case len(h.missing) > 0 || h.Asks():
		return Asked
	case a.Result != "":
		return Cache
	case h.learned:
		return Learned
	}
	return None
}

// Result tells, for metrics, whether the owner of what the request names was
// known. Both are empty if it names nothing.
func (h *Home) Result() (kind, result string) {
	switch {
	case h.owns:
		return Owner, "hit"
	case len(h.missing) > 0 || h.Asks():
		return Owner, "miss"
	}
	return "", ""
}

// CameTo tells of the affinity that Why tells whether the backend was the one
// where the request belongs. It is empty if the choice was free.
func (h *Home) CameTo(a pool.Affinity) string {
	if _, result := h.Result(); result != "" {
		return result
	}
	return string(a.Result)
}
