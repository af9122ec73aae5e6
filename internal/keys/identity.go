package keys

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/directive"
)

// CallerIdentity identifies callers by tokens of an identity provider. Caddy
// modules in the namespace http.openai_lb.caller_identity implement it:
// `caller_identity <name>` uses the module of that name. Many requests use it
// concurrently.
type CallerIdentity interface {
	// Identify returns the caller of a token. The context ends with the
	// request, or 5 s after the request's first token. token has the form of a
	// JWT, three parts of base64url, but is not checked. The error is
	// ErrForeignToken if the token is not for the balancer, ErrExpired,
	// ErrIssuerUnavailable, or any other error for a token that must not be
	// accepted. Only a foreign token is passed to a backend. A module outside
	// of this repository cannot import these errors, so each of its errors
	// means that the token must not be accepted.
	Identify(ctx context.Context, token string) (*Identity, error)

	// Tiers returns the tiers that Identify may return. It is never nil.
	Tiers() []string
}

// Identity has the claims of a token about its caller.
type Identity struct {
	// Name is the caller's name, which must be valid by CheckName.
	Name string
	// Tier is the caller's tier. It is empty if the token names none.
	Tier string
	// Issued is when the token was issued. If a caller has several tokens, the
	// newest one decides the tier.
	Issued time.Time
}

// Reasons why a token does not identify its caller. Any other error means that
// the token must not be accepted.
var (
	// ErrForeignToken means that the token has another issuer or audience. It
	// may be for a backend.
	ErrForeignToken = errors.New("the token is not for the load balancer")
	// ErrIssuerUnavailable means that the token cannot be checked now, because
	// the keys of its issuer are not known.
	ErrIssuerUnavailable = errors.New("the issuer's keys are not available")
)

// namespaceOfIdentities is the namespace of modules that implement
// CallerIdentity.
const namespaceOfIdentities = "http.openai_lb.caller_identity"

// TokenOption is the option that names the module for tokens.
type TokenOption struct {
	// CallerIdentityRaw is a module that identifies callers by tokens of an
	// identity provider, such as `oidc`, next to client keys. Default: only
	// keys identify callers.
	//
	//	caller_identity <module> [{...}]
	CallerIdentityRaw json.RawMessage `json:"caller_identity,omitempty" caddy:"namespace=http.openai_lb.caller_identity inline_key=module"`
}

// Directive returns the option in a Caddyfile.
func (o *TokenOption) Directive() directive.Option {
	return directive.Module[CallerIdentity](&o.CallerIdentityRaw, namespaceOfIdentities, "module")
}

// LoadIdentity loads the module. It returns nil without the option.
func (o *TokenOption) LoadIdentity(ctx caddy.Context) (CallerIdentity, error) {
	return directive.Load[CallerIdentity](ctx, o, "CallerIdentityRaw", o.CallerIdentityRaw)
}

const (
	// maxToken is the maximum length of a token, in bytes. Longer ones are not
	// verified.
	maxToken = 16 << 10
	// minToken is the minimum length of a token: its signature alone is as
	// long. It excludes other words with dots, such as eu.west.1.
	minToken = 86
	// maxTokens is how many tokens of a request are verified. Verifying one
	// costs more than the rest of a request.
	maxTokens = 4
	// tokenPatience is how long a request waits for the keys of issuers, for
	// all of its tokens together.
	tokenPatience = 5 * time.Second
)

// tokens counts the tokens of a request and limits the time for them. Nearly
// all requests have at most one, for which the issuer's own time limit applies.
type tokens struct {
	ctx    context.Context
	cancel context.CancelFunc // nil before the second one
	began  time.Time
	number int
}

// next counts a token. It reports false if there are too many.
func (t *tokens) next() bool {
	switch t.number++; t.number {
	case 1:
		t.began = time.Now()
	case 2:
		t.ctx, t.cancel = context.WithDeadline(t.ctx, t.began.Add(tokenPatience))
	}
	return t.number <= maxTokens
}

func (t *tokens) end() {
	if t.cancel != nil {
		t.cancel()
	}
}

// isToken reports whether a key has the form of a signed JWT (RFC 7515 section
// 7.1). A JWT begins with a JSON object in base64url, so its first letter is
// always e.
func isToken(key string) bool {
	if key == "" || key[0] != 'e' {
		return false
	}
	dots := 0
	for i := range len(key) {
		switch c := key[i]; {
		case c == '.':
			dots++
		case c >= '0' && c <= '9' || c|0x20 >= 'a' && c|0x20 <= 'z' || c == '-' || c == '_':
		default:
			return false
		}
	}
	return dots == 2
}

// TokenTiers returns the tiers that tokens may name. It returns nil if tokens
// identify no callers.
func (c *Clients) TokenTiers() []string {
	if c == nil || c.config.Tokens == nil {
		return nil
	}
	return c.config.Tokens.Tiers()
}

// ofToken returns the caller of a token. mustRemove reports whether the token
// must not reach a backend.
func (c *Clients) ofToken(ctx context.Context, token string) (caller Caller, mustRemove bool, err error) {
	identity, err := c.config.Tokens.Identify(ctx, token)
	switch {
	case err == nil:
		return Caller{Name: identity.Name, Label: c.config.Label(identity.Name), Token: identity}, true, nil
	case errors.Is(err, ErrExpired), errors.Is(err, ErrIssuerUnavailable):
		return Caller{}, true, err
	}
	return Caller{}, !errors.Is(err, ErrForeignToken), errUnknownKey
}
