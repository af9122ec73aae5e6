package keys

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
)

// The built-in schemes of auth, and the scheme that the module azure adds.
// Every other scheme is the name of a module, too.
const (
	SchemeAPIKey        = "api_key"
	SchemeBearer        = "bearer"
	schemePassthrough   = "passthrough"
	schemeNone          = "none"
	SchemeAzureIdentity = "azure_identity"
)

var builtIn = []string{SchemeAPIKey, SchemeBearer, schemePassthrough, schemeNone}

// SourceNamespace is the namespace of modules that implement [Source].
const SourceNamespace = "http.openai_lb.credentials"

// Schemes returns the allowed values of auth.
func Schemes() []string {
	schemes := slices.Clone(builtIn)
	for _, module := range caddy.GetModules(SourceNamespace) {
		schemes = append(schemes, module.ID.Name())
	}
	return schemes
}

// IsModule reports whether a scheme is the name of a module, which has options.
func IsModule(scheme string) bool { return !slices.Contains(builtIn, scheme) }

// CheckScheme returns an error if there is no such scheme.
func CheckScheme(scheme string) error {
	schemes := Schemes()
	switch {
	case slices.Contains(schemes, scheme):
		return nil
	case scheme == SchemeAzureIdentity:
		return errors.New("auth azure_identity is not in this build: add it with xcaddy build --with github.com/openai-lb/caddy-openai-lb/azure")
	}
	known := strings.ReplaceAll(strings.ToLower(scheme), "-", "_")
	switch {
	case slices.Contains(schemes, known):
		return fmt.Errorf("auth '%s' is not one of %s: expected '%s'", scheme, strings.Join(schemes, ", "), known)
	case strings.Trim(scheme, "abcdefghijklmnopqrstuvwxyz_") != "":
		scheme = "…" // it may be a key
	}
	return fmt.Errorf("auth '%s' is not one of %s", scheme, strings.Join(schemes, ", "))
}

// AuthConfig is the part of a backend's config for authentication.
type AuthConfig struct {
	// Scheme is one of [Schemes]. Default: the usual one of the host.
	Scheme string
	APIKey string
	// Options are the module's options, if the scheme is a module.
	Options json.RawMessage
	// Header has the headers that the config sets on every request.
	Header http.Header
	// Azure and OpenAI report whether the host belongs to that provider.
	Azure, OpenAI bool
}

// Provision chooses the scheme and sets up the source of credentials.
func (a *Auth) Provision(ctx caddy.Context, c AuthConfig) error {
	if err := c.Check(); err != nil {
		return err
	}
	a.Scheme = c.scheme()
	switch a.Scheme {
	case SchemeAPIKey, SchemeBearer:
		newCredential := Bearer
		if a.Scheme == SchemeAPIKey {
			newCredential = apiKey
		}
		key, err := newKey(c.APIKey, newCredential)
		if err != nil {
			return fmt.Errorf("api_key: %w", err)
		}
		a.Source = key
	case schemePassthrough:
		a.Passthrough = true
	case schemeNone:
	default:
		return a.load(ctx, c.Options)
	}
	if len(c.Options) > 0 {
		return fmt.Errorf("auth %s does not take auth_options", a.Scheme)
	}
	return nil
}

func (a *Auth) load(ctx caddy.Context, options json.RawMessage) error {
	module, err := ctx.LoadModuleByID(SourceNamespace+"."+a.Scheme, options)
	if err != nil {
		return fmt.Errorf("auth %s: %w", a.Scheme, err)
	}
	source, ok := module.(Source)
	if !ok {
		return fmt.Errorf("auth %s: a module of type %T is not a source of credentials", a.Scheme, module)
	}
	a.Source = source
	return nil
}

// scheme returns the scheme of the config, or the default.
func (c AuthConfig) scheme() string {
	switch {
	case c.Scheme != "":
		return c.Scheme
	case c.Azure:
		return SchemeAPIKey
	case c.APIKey != "" || c.OpenAI:
		return SchemeBearer
	}
	return schemeNone
}

// Check checks the scheme and the options that depend on it.
func (c AuthConfig) Check() error {
	scheme := c.scheme()
	if err := CheckScheme(scheme); err != nil {
		return err
	}
	hasKey := scheme == SchemeAPIKey || scheme == SchemeBearer
	switch {
	case hasKey && c.APIKey == "" && c.Scheme == "":
		return fmt.Errorf("api_key is required: auth defaults to %s for this host", scheme)
	case hasKey && c.APIKey == "":
		return fmt.Errorf("auth %s requires an api_key", scheme)
	case !hasKey && c.APIKey != "":
		return fmt.Errorf("auth %s does not take an api_key", scheme)
	case scheme == schemePassthrough || scheme == schemeNone:
		return nil
	}
	header := "Authorization"
	if scheme == SchemeAPIKey {
		header = "Api-Key"
	}
	for name := range c.Header {
		if strings.EqualFold(name, header) {
			return fmt.Errorf("header %s would replace the credential of auth %s: use auth none with header, or leave the header out",
				header, scheme)
		}
	}
	return nil
}
