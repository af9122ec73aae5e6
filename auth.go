package openailb

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"
	"golang.org/x/net/http/httpguts"
)

// The schemes of a backend's auth. Any other is the name of a module.
const (
	authAPIKey        = "api_key"
	authBearer        = "bearer"
	authPassthrough   = "passthrough"
	authNone          = "none"
	authAzureIdentity = "azure_identity"
)

var builtInSchemes = []string{authAPIKey, authBearer, authPassthrough, authNone}

// credentialsNamespace is that of the modules which are credential sources.
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
	return fmt.Errorf("auth '%s': expected one of %s", scheme, strings.Join(schemes, ", "))
}

// CredentialSource supplies the credentials with which a backend is told who
// we are. Caddy modules in the namespace http.openai_lb.credentials implement
// it: `auth <name>` uses the one of that name. Many requests use a source at
// once.
type CredentialSource interface {
	// Credential returns the credential for one attempt. It must not wait
	// while it has a valid one. An error, which must not hold a secret,
	// benches the backend for a minute, or for as long as its method
	// RetryAfter() time.Duration says, and the request goes to another.
	Credential(ctx context.Context) (Credential, error)

	// Renew returns a credential in place of one that the backend refused
	// with status 401, or that one again if there is no other.
	Renew(ctx context.Context, refused Credential) (Credential, error)

	// Identity tells apart whom the credentials stand for, without holding a
	// secret. What is known of a backend outlives a reload for as long as its
	// URL and this stay the same.
	Identity() string
}

// Credential authenticates a request: a header and its value.
type Credential struct {
	Header string
	Value  string
}

// apiKey is the CredentialSource of a key that is written in the config. One
// that comes from a file is read again when the file changes.
type apiKey struct {
	raw            string // with placeholders
	header, prefix string
	inFile         bool

	current atomic.Pointer[Credential]
	// changed is called after a change with the new key's digest.
	changed func(digest string)

	mu sync.Mutex // guards the reading
}

func newAPIKey(raw, header, prefix string) (*apiKey, error) {
	k := &apiKey{raw: raw, header: header, prefix: prefix, inFile: strings.Contains(raw, "{file.")}
	return k, k.read()
}

// read resolves the key. If that fails, the one before stays.
func (k *apiKey) read() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	key, err := resolveSecret(k.raw)
	if err != nil {
		return err
	}
	before := k.current.Load()
	now := Credential{Header: k.header, Value: k.prefix + key}
	if before != nil && *before == now {
		return nil
	}
	k.current.Store(&now)
	if before != nil && k.changed != nil {
		k.changed(k.digest())
	}
	return nil
}

// Credential implements CredentialSource.
func (k *apiKey) Credential(context.Context) (Credential, error) { return *k.current.Load(), nil }

// Renew implements CredentialSource.
func (k *apiKey) Renew(_ context.Context, refused Credential) (Credential, error) {
	if k.inFile {
		if err := k.read(); err != nil {
			return refused, err
		}
	}
	return *k.current.Load(), nil
}

// Identity implements CredentialSource. A file stands for what it holds.
func (k *apiKey) Identity() string {
	if k.inFile {
		return k.raw
	}
	return k.digest()
}

// digest tells keys apart without holding them.
func (k *apiKey) digest() string {
	sum := sha256.Sum256([]byte(k.current.Load().Value))
	return hex.EncodeToString(sum[:16])
}

// resolveSecret replaces the placeholders of a key and trims it. Its errors
// never hold the key, nor what a placeholder stands for.
func resolveSecret(key string) (string, error) {
	if strings.Count(key, "{") != strings.Count(key, "}") {
		return "", errors.New("it has a brace without its counterpart: expected {env.X} or {file./path}")
	}
	resolved, err := caddy.NewReplacer().ReplaceOrErr(key, true, true)
	if err != nil {
		return "", whyUnresolved(key, err)
	}
	resolved = strings.TrimSpace(resolved)
	if resolved == "" {
		return "", errors.New("it is empty")
	}
	if !httpguts.ValidHeaderFieldValue(resolved) || strings.ContainsAny(resolved, " \t") {
		return "", errors.New("it holds white space or control characters")
	}
	return resolved, nil
}

// whyUnresolved says why the placeholders of a key stand for nothing. To Caddy,
// a file that cannot be read is just empty. What looks like no placeholder may
// be a part of the key.
func whyUnresolved(key string, err error) error {
	for _, match := range placeholder.FindAllStringSubmatch(key, -1) {
		switch name, path, _ := strings.Cut(match[1], "."); name {
		case "file":
			file, err := os.Open(path)
			if err != nil {
				return err
			}
			file.Close()
		case "env":
		default:
			return errors.New("it has a placeholder that is neither {env.X} nor {file./path}")
		}
	}
	return err
}

var placeholder = regexp.MustCompile(`\{([^{}]*)\}`)

// provisionAuth settles the scheme and sets up the source of credentials.
func (b *Backend) provisionAuth(ctx caddy.Context, host string) error {
	b.auth = b.Auth
	azure := isAzureHost(host)
	if b.auth == "" {
		switch {
		case azure:
			b.auth = authAPIKey
		case b.APIKey != "" || isOpenAIHost(host):
			b.auth = authBearer
		default:
			b.auth = authNone
		}
	}
	b.azure = azure || b.auth == authAPIKey || b.auth == authAzureIdentity
	if err := checkAuth(b.auth); err != nil {
		return err
	}
	switch {
	case (b.auth == authAPIKey || b.auth == authBearer) && b.APIKey == "":
		return fmt.Errorf("auth %s needs an api_key", b.auth)
	case b.auth != authAPIKey && b.auth != authBearer && b.APIKey != "":
		return fmt.Errorf("auth %s takes no api_key", b.auth)
	}
	header, prefix := "Authorization", "Bearer "
	switch b.auth {
	case authAPIKey:
		header, prefix = "Api-Key", ""
		fallthrough
	case authBearer:
		key, err := newAPIKey(b.APIKey, header, prefix)
		if err != nil {
			return fmt.Errorf("api_key: %w", err)
		}
		b.source = key
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
		return fmt.Errorf("auth %s: module %T is no source of credentials", b.auth, module)
	}
	b.source = source
	return nil
}

func (b *Backend) refuseAuthOptions() error {
	if len(b.AuthOptions) > 0 {
		return fmt.Errorf("auth %s takes no auth_options", b.auth)
	}
	return nil
}

// fingerprint tells credentials apart without holding them. A header may be a
// part of one: a gateway's key, a project.
func (b *Backend) fingerprint() string {
	sum := sha256.New()
	fmt.Fprintf(sum, "%q", b.auth)
	if b.source != nil {
		fmt.Fprintf(sum, " %q", b.source.Identity())
	}
	for _, name := range slices.Sorted(maps.Keys(b.header)) {
		fmt.Fprintf(sum, " %q %q", name, b.header[name])
	}
	return hex.EncodeToString(sum.Sum(nil)[:16])
}

// credential returns what authenticates an attempt, if anything of ours does.
func (b *Backend) credential(ctx context.Context) (Credential, error) {
	if b.source == nil {
		return Credential{}, nil
	}
	return b.source.Credential(ctx)
}

// renew returns a credential in place of one that was refused, or reports
// false if there is no other.
func (m *member) renew(ctx context.Context, refused Credential) (Credential, bool) {
	if m.backend.source == nil {
		return refused, false
	}
	renewed, err := m.backend.source.Renew(ctx, refused)
	if err != nil || renewed == refused {
		return refused, false
	}
	if c := m.logger.Check(zap.InfoLevel, "credential renewed"); c != nil {
		c.Write(zap.String("backend", m.name))
	}
	return renewed, true
}

// outdated reports whether a credential is an API key that was replaced since.
func (m *member) outdated(credential Credential) bool {
	if m.backend == nil {
		return false
	}
	key, ok := m.backend.source.(*apiKey)
	return ok && *key.current.Load() != credential
}

// authorize puts a credential on an outgoing request, or the caller's own if
// that is what the backend gets, and makes sure that it is the only one there.
func (b *Backend) authorize(out *http.Request, credential Credential, caller credentials) {
	for _, name := range credentialHeaders {
		delete(out.Header, name)
	}
	if credential.Header != "" {
		out.Header[http.CanonicalHeaderKey(credential.Header)] = []string{credential.Value}
	}
	if b.auth == authPassthrough {
		for name, values := range caller.header {
			out.Header[name] = values
		}
		if caller.protocols != nil {
			// in a handshake, reverse_proxy has it in the spelling of RFC 6455
			delete(out.Header, "Sec-Websocket-Protocol")
			out.Header["Sec-WebSocket-Protocol"] = caller.protocols
		}
		out.URL.RawQuery = caller.rawQuery
	}
}
