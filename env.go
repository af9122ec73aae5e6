package openailb

import (
	"cmp"
	"fmt"
	"os"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/acaenv"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// provisionFromEnv adds the backends that the environment describes. That
// happens here and not when the Caddyfile is read, so that they never appear in
// the config.
func (h *Handler) provisionFromEnv() error {
	if h.BackendsFromEnv == "" {
		return nil
	}
	env := acaenv.Parse(os.Environ())
	described, err := env.Backends(h.BackendsFromEnv)
	if err != nil {
		return err
	}
	if len(described) == 0 && len(h.Backends) == 0 {
		return fmt.Errorf("backends_from_env found no backend: expected variables like %s", acaenv.Example(h.BackendsFromEnv))
	}
	var prefixes []string
	for _, d := range described {
		b, err := backendFromEnv(d)
		if err != nil {
			return err
		}
		h.Backends = append(h.Backends, b)
		prefixes = append(prefixes, d.Prefix)
	}
	timeout, err := env.Timeout()
	if err != nil {
		return err
	}
	// the sample has one limit for how long a request may be idle
	for _, d := range []*caddy.Duration{&h.ResponseHeaderTimeout, &h.StreamFirstEventTimeout, &h.StreamIdleTimeout} {
		*d = cmp.Or(*d, caddy.Duration(timeout))
	}
	h.logger.Info("read backends from the environment", zap.Strings("variables", prefixes), zap.Duration("timeout", timeout))
	return nil
}

// backendFromEnv makes a backend of what variables say. Its errors hold no key.
func backendFromEnv(d acaenv.Backend) (*Backend, error) {
	u, err := openaiapi.ParseBaseURL(d.URL.Value)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", d.URL.Name, err)
	}
	// u.String escapes braces, which would be placeholders in the config
	b := &Backend{URL: u.String(), Priority: d.Priority, Deployment: d.Deployment}
	if d.APIKey.Value == "" {
		b.Auth = keys.SchemeAzureIdentity
		if err := keys.CheckScheme(b.Auth); err != nil {
			return nil, fmt.Errorf("%s is not set, and %w", d.APIKey.Name, err)
		}
		return b, nil
	}
	b.Auth, b.APIKey = keys.SchemeAPIKey, "{env."+d.APIKey.Name+"}"
	if _, err := keys.ResolveKey(b.APIKey); err != nil {
		return nil, fmt.Errorf("%s: %w", d.APIKey.Name, err)
	}
	return b, nil
}
