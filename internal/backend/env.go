package backend

import (
	"fmt"
	"os"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// FromEnv returns the backends that environment variables with this prefix
// describe. It also returns the prefix of each backend's variables, and how
// long a request may be idle.
func FromEnv(prefix string) (backends []*Backend, variables []string, idle time.Duration, err error) {
	env := parseEnvironment(os.Environ())
	all, err := env.backends(prefix)
	if err != nil {
		return nil, nil, 0, err
	}
	for _, d := range all {
		b, err := fromVariables(d)
		if err != nil {
			return nil, nil, 0, err
		}
		backends, variables = append(backends, b), append(variables, d.Prefix)
	}
	idle, err = env.timeout()
	return backends, variables, idle, err
}

// fromVariables makes a backend from its variables. Its errors contain no key.
func fromVariables(d described) (*Backend, error) {
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
