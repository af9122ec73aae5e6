package openailb

import "net/http"

// What tests outside of the package need of its inside.
var (
	BackendFromEnv  = backendFromEnv
	RegisterMetrics = registerMetrics
)

// UseSource makes a source that of a backend.
func (h *Handler) UseSource(backend string, source CredentialSource) {
	for _, b := range h.Backends {
		if b.Name == backend {
			b.source = source
		}
	}
}

// Replace puts another round tripper in the place of the one it returns.
func (t *Transport) Replace(next http.RoundTripper) (before http.RoundTripper) {
	before, t.roundTripper = t.roundTripper, next
	return before
}
