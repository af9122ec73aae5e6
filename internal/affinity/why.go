package affinity

import "github.com/openai-lb/caddy-openai-lb/internal/pool"

// Why a backend was chosen, in placeholders and logs. All but None are kinds of
// affinity in metrics.
const (
	// None: by no affinity.
	None = "none"
	// Cache: by the session's key.
	Cache = "cache"
)

// Why tells why a backend was chosen.
func Why(a pool.Affinity) string {
	if a.Result == "" {
		return None
	}
	return Cache
}
