// Package oidc identifies callers of openai_lb by tokens of an identity
// provider that speaks OpenID Connect, such as Entra ID: JWTs that are signed
// with a key of the issuer, and are for the audience of the load balancer.
//
// A token is verified in the process, without a request to the issuer. That
// needs the issuer's public keys, which are fetched in the background every
// hour. If a token names a key that is not known, the keys are fetched at once,
// because the issuer may have rotated them
// (TestARotatedKeyIsFetchedWhenATokenNamesIt). Anyone can send such tokens, so
// that happens at most once in ten seconds
// (TestAFloodOfUnknownKeysHardlyReachesTheIssuer). While the issuer is down,
// known keys go on verifying tokens, also after a reload
// (TestKnownKeysVerifyWhileTheIssuerIsDown,
// TestTheKeysOfAnIssuerThatIsDownSurviveReloads).
//
// A signature costs more than the rest of a request, so verified tokens are
// remembered until they expire (TestARememberedTokenExpires), in a table of
// limited size (TestOnlySomeTokensAreRemembered).
//
// A claim of the token is the caller's name, and another may name its tier
// (TestATokensCallerHasItsLimitsTierAndUse). Package go-oidc does the
// cryptography.
package oidc

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	openailb "github.com/openai-lb/caddy-openai-lb"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
)

func init() {
	caddy.RegisterModule(new(Identity))
}

// Identity identifies callers by tokens of one issuer. The issuer's keys are
// fetched in the background, and survive reloads of the config. They are used
// for as long as the issuer cannot be reached.
//
// Issuer and Audience may contain placeholders, such as {env.NAME}.
type Identity struct {
	// Issuer is the URL of the identity provider, exactly as its tokens name it
	// (`iss`). Required.
	Issuer string `json:"issuer"`

	// Audience is for whom tokens must be issued (`aud`). Required.
	Audience string `json:"audience"`

	// Caller is the claim that names the caller, such as `azp`, `appid` or
	// `sub`. Required.
	Caller string `json:"caller"`

	// Tier places callers in tiers of the pool. Default: tokens name no tier.
	Tier *Tier `json:"tier,omitempty"`

	logger   *zap.Logger
	issuer   *issuer
	shared   string // the key of the issuer in issuers
	verified cache
}

// Tier says which tier a caller has by a claim of its token.
type Tier struct {
	// Claim is the claim, which is a text or a list of texts. Required.
	Claim string `json:"claim"`

	// Values are values of the claim. Of those that a token has, the first in
	// this list decides. Required.
	Values []Value `json:"values"`
}

// Value is a value of a claim, and its tier.
type Value struct {
	// Value is the value. Required.
	Value string `json:"value"`

	// Tier is the name of a tier of the pool. Required.
	Tier string `json:"tier"`
}

// CaddyModule returns the Caddy module information.
func (*Identity) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.openai_lb.caller_identity.oidc",
		New: func() caddy.Module { return new(Identity) },
	}
}

// issuers are the issuers of all loaded configs.
var issuers = caddy.NewUsagePool()

// Provision sets up the module. Nothing is fetched before Caddy has started the
// config.
func (o *Identity) Provision(ctx caddy.Context) error {
	replacer := caddy.NewReplacer()
	for name, text := range map[string]*string{"issuer": &o.Issuer, "audience": &o.Audience} {
		var err error
		if *text, err = replacer.ReplaceOrErr(*text, true, true); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	if err := errors.Join(o.check(), checkIssuer(o.Issuer)); err != nil {
		return err
	}
	o.logger = ctx.Logger().With(zap.String("issuer", o.Issuer))
	value, _, err := issuers.LoadOrNew(o.Issuer, func() (caddy.Destructor, error) { return newIssuer(o.Issuer), nil })
	if err != nil {
		return err
	}
	o.issuer, o.shared = value.(*issuer), o.Issuer
	return observe.On(ctx, observe.Started, func() { o.issuer.start(o.logger) })
}

// Cleanup releases the issuer.
func (o *Identity) Cleanup() error {
	if o.issuer == nil {
		return nil
	}
	_, err := issuers.Delete(o.shared)
	return err
}

// Tiers implements openailb.CallerIdentity.
func (o *Identity) Tiers() []string {
	tiers := []string{}
	if o.Tier != nil {
		for _, v := range o.Tier.Values {
			tiers = append(tiers, v.Tier)
		}
	}
	return tiers
}

// Identify implements openailb.CallerIdentity. A token is verified once. Its
// outcome is good until the token expires, or the issuer's keys change.
func (o *Identity) Identify(ctx context.Context, token string) (*openailb.Identity, error) {
	now, digest := time.Now(), sha256.Sum256([]byte(token))
	if v, ok := o.verified.get(digest); ok && v.keys == o.issuer.keys.Load() {
		return v.result(now)
	}
	v, err := o.verify(ctx, now, token)
	if err == nil {
		o.verified.add(digest, v)
		_, err = v.result(now)
	}
	if v.unnamed != nil { // the issuer has signed it, so that no stranger can fill the log with this
		o.logger.Warn("token rejected", zap.String("reason", v.unnamed.Error()))
	} else if entry := o.logger.Check(zap.DebugLevel, "token rejected"); err != nil && entry != nil {
		entry.Write(zap.String("reason", err.Error()))
	}
	if err != nil {
		return nil, err
	}
	return &v.identity, nil
}

// verified has the facts about a token that the issuer has signed.
type verified struct {
	identity openailb.Identity
	// unnamed is why the token names no caller. nil: it does.
	unnamed error
	expires time.Time
	// keys are those of the issuer.
	keys *keySet
}

func (v *verified) result(now time.Time) (*openailb.Identity, error) {
	switch {
	case !now.Before(v.expires.Add(skew)):
		return nil, keys.ErrExpired
	case v.unnamed != nil:
		return nil, v.unnamed
	}
	return &v.identity, nil
}

// skew is by how much the clocks of the issuer and of the balancer may differ.
const skew = time.Minute

// Why a token is rejected. None has anything of the token.
var (
	errMalformed = errors.New("the token is not a JWT")
	errNoExpiry  = errors.New("the token has no valid exp")
	errTooEarly  = errors.New("the token is not valid yet")
	errSignature = errors.New("the signature does not match, or its algorithm is not allowed")
	errUnknown   = errors.New("the issuer has no such key")
	errNoKeyID   = errors.New("the token names no key, and the issuer has several")
)

// Interface guards
var (
	_ caddy.Provisioner       = (*Identity)(nil)
	_ caddy.CleanerUpper      = (*Identity)(nil)
	_ caddyfile.Unmarshaler   = (*Identity)(nil)
	_ openailb.CallerIdentity = (*Identity)(nil)
)
