package pools

import (
	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// healths keeps what is known of every backend through config reloads, and
// shares it between handlers. A key is what the backend is: its base URL and a
// fingerprint of its credential, or a bare dial address.
var healths = caddy.NewUsagePool()

// LoadHealth returns the health of the backend with this key and counts one
// more user of it; the user gives it back with UnloadHealth.
func LoadHealth(key string) *pool.Health {
	value, _, _ := healths.LoadOrNew(key, func() (caddy.Destructor, error) { return new(pool.Health), nil })
	return value.(*pool.Health)
}

// UnloadHealth gives a health back.
func UnloadHealth(key string) error {
	_, err := healths.Delete(key)
	return err
}
