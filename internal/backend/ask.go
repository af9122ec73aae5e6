package backend

import (
	"bytes"
	"context"
	"maps"
	"net/http"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// NewRequest returns a request of the balancer's own to the backend, with this
// credential and the backend's headers. Its path is the backend's path for the
// route. The returned secrets are the keys in the request.
func (b *Backend) NewRequest(ctx context.Context, credential keys.Credential, method string, route openaiapi.Route,
	query string, body []byte) (*http.Request, keys.Secrets, error) {
	u := *b.Origin
	u.RawQuery = query
	b.paths.Rewrite(&u, route, "", "")
	r, err := http.NewRequestWithContext(withUpstream(ctx, b.Origin), method, u.String(), bytes.NewReader(body))
	if err != nil {
		return nil, nil, err
	}
	secrets := b.Credentials.Secrets(credential, keys.Presented{})
	maps.Copy(r.Header, b.header)
	r.Host = b.host
	if len(body) > 0 {
		r.Header.Set("Content-Type", "application/json")
	}
	b.Credentials.Authorize(r.Header, r.URL, credential, keys.Presented{})
	return r, secrets, nil
}

// HasClassicPaths reports whether the backend has Azure's classic paths.
func (b *Backend) HasClassicPaths() bool { return b.paths.HasClassic() }
