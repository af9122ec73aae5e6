package openailb

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/callerkeys"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/redact"
	"github.com/openai-lb/caddy-openai-lb/internal/secret"
)

// The schemes of auth that are built in, and the one that the module azure
// adds. Every other scheme is the name of a module, too.
const (
	authAPIKey        = "api_key"
	authBearer        = "bearer"
	authPassthrough   = "passthrough"
	authNone          = "none"
	authAzureIdentity = "azure_identity"
)

var builtInSchemes = []string{authAPIKey, authBearer, authPassthrough, authNone}

// credentialsNamespace is the namespace of modules that are a CredentialSource.
const credentialsNamespace = "http.openai_lb.credentials"

// authSchemes lists what auth may be.
func authSchemes() []string {
	schemes := slices.Clone(builtInSchemes)
	for _, module := range caddy.GetModules(credentialsNamespace) {
		schemes = append(schemes, module.ID.Name())
	}
	return schemes
}

// checkAuth says what is wrong with a scheme, if anything is.
func checkAuth(scheme string) error {
	schemes := authSchemes()
	switch {
	case slices.Contains(schemes, scheme):
		return nil
	case scheme == authAzureIdentity:
		return errors.New("auth azure_identity is not in this build: add it with xcaddy build --with github.com/openai-lb/caddy-openai-lb/azure")
	}
	if strings.Trim(scheme, "abcdefghijklmnopqrstuvwxyz_") != "" {
		scheme = "…" // it may be a key
	}
	return fmt.Errorf("auth '%s' is not one of %s", scheme, strings.Join(schemes, ", "))
}

// CredentialSource supplies the credentials that authenticate requests to a
// backend. Caddy modules in the namespace http.openai_lb.credentials implement
// it: `auth <name>` uses the module of that name. Many requests use a source
// concurrently.
type CredentialSource interface {
	// Credential returns the credential for one attempt. It must not wait while
	// it has a valid one, nor after the context is done. After an error, the
	// request fails over to another backend, and this one is benched for a
	// minute, or for as long as the error's method RetryAfter() time.Duration
	// says. The error must not contain a secret.
	Credential(ctx context.Context) (Credential, error)

	// Renew returns another credential after the backend refused this one with
	// status 401. It returns the same one if there is no other.
	Renew(ctx context.Context, refused Credential) (Credential, error)

	// Identity identifies the account, and contains no secret. Backend state
	// survives a reload as long as the backend's URL and its Identity stay the
	// same.
	Identity() string
}

// Credential authenticates a request: a header and its value.
type Credential struct {
	Header string
	Value  string
}

// apiKey is the CredentialSource of a key in the config.
type apiKey struct {
	*secret.Key
	header string
}

// Credential implements CredentialSource.
func (k apiKey) Credential(context.Context) (Credential, error) {
	return Credential{Header: k.header, Value: k.Value()}, nil
}

// Renew implements CredentialSource.
func (k apiKey) Renew(_ context.Context, refused Credential) (Credential, error) {
	if k.InFile() {
		if err := k.Read(); err != nil {
			return refused, err
		}
	}
	return Credential{Header: k.header, Value: k.Value()}, nil
}

// chooseAuth decides on the scheme, and checks what is given next to it.
func (b *Backend) chooseAuth() error {
	b.auth = b.Auth
	host := b.url.Hostname()
	azure := openaiapi.IsAzure(host)
	if b.auth == "" {
		switch {
		case azure:
			b.auth = authAPIKey
		case b.APIKey != "" || openaiapi.IsOpenAI(host):
			b.auth = authBearer
		default:
			b.auth = authNone
		}
	}
	b.azure = azure || b.auth == authAPIKey || b.auth == authAzureIdentity
	if err := checkAuth(b.auth); err != nil {
		return err
	}
	hasKey := b.auth == authAPIKey || b.auth == authBearer
	switch {
	case hasKey && b.APIKey == "" && b.Auth == "":
		return fmt.Errorf("api_key is required: auth defaults to %s for this host", b.auth)
	case hasKey && b.APIKey == "":
		return fmt.Errorf("auth %s requires an api_key", b.auth)
	case !hasKey && b.APIKey != "":
		return fmt.Errorf("auth %s does not take an api_key", b.auth)
	}
	replaces := func(name string) bool { return strings.EqualFold(name, "Authorization") }
	if b.auth != authPassthrough && b.auth != authNone && slices.ContainsFunc(slices.Collect(maps.Keys(b.Header)), replaces) {
		return fmt.Errorf("header Authorization would replace the credential of auth %s: use auth none with header, or leave the header out", b.auth)
	}
	return nil
}

// provisionAuth sets up the source of credentials.
func (b *Backend) provisionAuth(ctx caddy.Context) error {
	if err := b.chooseAuth(); err != nil {
		return err
	}
	header, prefix := "Authorization", "Bearer "
	switch b.auth {
	case authAPIKey:
		header, prefix = "Api-Key", ""
		fallthrough
	case authBearer:
		key, err := secret.NewKey(b.APIKey, prefix)
		if err != nil {
			return fmt.Errorf("api_key: %w", err)
		}
		b.source = apiKey{key, header}
		return b.refuseAuthOptions()
	case authPassthrough, authNone:
		return b.refuseAuthOptions()
	}
	module, err := ctx.LoadModuleByID(credentialsNamespace+"."+b.auth, b.AuthOptions)
	if err != nil {
		return fmt.Errorf("auth %s: %w", b.auth, err)
	}
	source, ok := module.(CredentialSource)
	if !ok {
		return fmt.Errorf("auth %s: a module of type %T is not a source of credentials", b.auth, module)
	}
	b.source = source
	return nil
}

func (b *Backend) refuseAuthOptions() error {
	if len(b.AuthOptions) > 0 {
		return fmt.Errorf("auth %s does not take auth_options", b.auth)
	}
	return nil
}

// credential returns the credential for an attempt. It is empty with
// passthrough and none.
func (b *Backend) credential(ctx context.Context) (Credential, error) {
	if b.source == nil {
		return Credential{}, nil
	}
	return b.source.Credential(ctx)
}

// renew returns another credential after one was refused. It reports false if
// there is no other.
func (b *Backend) renew(ctx context.Context, refused Credential) (Credential, bool) {
	if b.source == nil {
		return refused, false
	}
	renewed, err := b.source.Renew(ctx, refused)
	return renewed, err == nil && renewed != refused
}

// atOnce is a context that is done, for calls that must not wait.
var atOnce = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// hasReplaced reports whether there is another credential by now.
func (b *Backend) hasReplaced(refused Credential) bool {
	if b.source == nil {
		return false
	}
	current, err := b.source.Credential(atOnce)
	return err == nil && current != refused
}

// outdated reports whether an attempt's credential is an API key that has
// changed in the meantime.
func (b *Backend) outdated(credential Credential) bool {
	key, ok := b.source.(apiKey)
	return ok && key.Value() != credential.Value
}

// secretsOf are the keys that go with an attempt at the backend.
func (b *Backend) secretsOf(credential Credential, caller callerkeys.Presented) redact.Secrets {
	if !b.passesThrough() {
		if known := b.secrets.Load(); known != nil && known.credential == credential {
			return known.secrets
		}
	}
	var s redact.Secrets
	s.Add(callerkeys.KeyIn(credential.Value))
	for _, value := range b.secretHeaders {
		s.Add(callerkeys.KeyIn(value))
	}
	if b.passesThrough() {
		caller.Each(s.Add)
	} else {
		b.secrets.Store(&knownSecrets{credential, s})
	}
	return s
}

// knownSecrets are the secrets of attempts with a credential.
type knownSecrets struct {
	credential Credential
	secrets    redact.Secrets
}

// authorize puts the credential on an outgoing request that has none, or the
// caller's own one with passthrough.
func (b *Backend) authorize(header http.Header, u *url.URL, credential Credential, caller callerkeys.Presented) {
	if credential.Header != "" {
		header[http.CanonicalHeaderKey(credential.Header)] = []string{credential.Value}
	}
	if b.passesThrough() {
		for _, line := range caller.Header {
			header[line.Name] = line.Values
		}
		if caller.Protocols != nil {
			// reverse_proxy writes a handshake's headers as RFC 6455 spells them
			delete(header, "Sec-Websocket-Protocol")
			header["Sec-WebSocket-Protocol"] = caller.Protocols
		}
		u.RawQuery = caller.RawQuery
	}
}
