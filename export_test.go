package openailb

import (
	"net/http"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/openai-lb/caddy-openai-lb/internal/usage"
)

// What tests outside of the package need of its inside.

// UseSource makes a source that of a backend.
func (h *Handler) UseSource(backend string, source CredentialSource) {
	for _, b := range h.Backends {
		if b.Name == backend {
			b.Credentials.Source = source
		}
	}
}

// TokensOf returns the tokens of a request that is over.
func TokensOf(r *http.Request) usage.Tokens {
	return caddyhttp.GetVar(r.Context(), transactionVar).(shown).t.outcome.tokens
}
