package oidc

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	gooidc "github.com/coreos/go-oidc/v3/oidc"
	"github.com/go-jose/go-jose/v4"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
)

// algorithms are the only ones that are allowed: those of keys of which the
// other half is secret.
var algorithms = []jose.SignatureAlgorithm{jose.RS256, jose.RS384, jose.RS512, jose.ES256, jose.ES384, jose.ES512}

// claims are the claims of a token, by their exact names.
type claims map[string]json.RawMessage

// texts returns the texts of a claim, which is one or a list.
func (c claims) texts(name string) []string {
	var one string
	if json.Unmarshal(c[name], &one) == nil {
		return []string{one}
	}
	var list []any
	if json.Unmarshal(c[name], &list) != nil {
		return nil
	}
	var texts []string
	for _, element := range list {
		if text, ok := element.(string); ok {
			texts = append(texts, text)
		}
	}
	return texts
}

// time returns the time of a claim. ok reports whether it has a valid one.
func (c claims) time(name string) (at time.Time, ok bool) {
	var seconds float64
	if json.Unmarshal(c[name], &seconds) != nil || seconds < 0 || seconds > 1<<40 {
		return time.Time{}, false
	}
	return time.Unix(int64(seconds), 0), c[name] != nil && string(c[name]) != "null"
}

// isOurs reports whether a token says that it is of our issuer and audience.
func (o *Identity) isOurs(c claims) bool {
	return slices.Equal(c.texts("iss"), []string{o.Issuer}) && slices.Contains(c.texts("aud"), o.Audience)
}

// payload returns the claims of a token, unverified.
func payload(token string) (c claims, err error) {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return nil, errMalformed
	}
	var texts [3][]byte
	for i, part := range parts {
		if texts[i], err = base64.RawURLEncoding.Strict().DecodeString(part); err != nil { // a token has one spelling
			return nil, errMalformed
		}
	}
	if json.Unmarshal(texts[1], &c) != nil {
		return nil, errMalformed
	}
	return c, nil
}

// verify verifies a token. Without an error, the issuer has signed it, for our
// audience, and it is or was valid.
func (o *Identity) verify(ctx context.Context, now time.Time, token string) (*verified, error) {
	v := new(verified)
	c, err := payload(token)
	switch {
	case err != nil:
		return v, err
	case !o.isOurs(c):
		return v, keys.ErrForeignToken
	}
	if _, err := valid(c, now); err != nil {
		return v, err // no key is fetched for it
	}
	set := &keysFor{issuer: o.issuer}
	verifier := gooidc.NewVerifier(o.Issuer, set,
		&gooidc.Config{ClientID: o.Audience, SupportedSigningAlgs: names(algorithms), SkipExpiryCheck: true})
	signed, err := verifier.Verify(ctx, token)
	switch {
	case set.err != nil:
		return v, set.err
	case err != nil: // without the text, which may have some of the token
		return v, errSignature
	}
	c = nil // nothing that was not signed
	if err := signed.Claims(&c); err != nil {
		return v, errMalformed
	}
	v.keys = set.used
	o.name(v, c)
	v.expires, err = valid(c, now)
	return v, err
}

// valid returns when a token expires, or why it is not valid.
func valid(c claims, now time.Time) (expires time.Time, err error) {
	expires, ok := c.time("exp")
	switch {
	case !ok:
		return expires, errNoExpiry
	case !now.Before(expires.Add(skew)):
		return expires, keys.ErrExpired
	}
	for _, name := range []string{"nbf", "iat"} {
		if at, ok := c.time(name); ok && now.Before(at.Add(-skew)) || !ok && c[name] != nil {
			return expires, errTooEarly
		}
	}
	return expires, nil
}

// name records which caller and tier a token names.
func (o *Identity) name(v *verified, c claims) {
	var dated bool
	v.identity.Issued, dated = c.time("iat")
	switch texts := c.texts(o.Caller); {
	case o.Tier != nil && !dated:
		v.unnamed = errors.New("tier requires the claim iat")
	case len(texts) != 1:
		v.unnamed = fmt.Errorf("the claim %s is not one text", o.Caller)
	default:
		v.identity.Name = texts[0]
		if err := keys.CheckName(texts[0]); err != nil {
			v.unnamed = fmt.Errorf("the claim %s: %w", o.Caller, err)
		} else if strings.ContainsFunc(texts[0], isInvisible) || strings.TrimSpace(texts[0]) != texts[0] {
			v.unnamed = fmt.Errorf("the claim %s could be mistaken for another name", o.Caller)
		}
	}
	if o.Tier == nil {
		return
	}
	values := c.texts(o.Tier.Claim)
	for _, value := range o.Tier.Values {
		if slices.Contains(values, value.Value) {
			v.identity.Tier = value.Tier
			return
		}
	}
}

// isInvisible reports whether names may look alike that differ by a character
// only: it has no appearance, or stands for any that could not be read.
func isInvisible(r rune) bool {
	const brailleBlank = '\u2800'
	return r == utf8.RuneError || r == brailleBlank ||
		unicode.In(r, unicode.Other_Default_Ignorable_Code_Point, unicode.Variation_Selector, unicode.Cf)
}

func names(algorithms []jose.SignatureAlgorithm) (names []string) {
	for _, a := range algorithms {
		names = append(names, string(a))
	}
	return names
}

// keysFor are the keys of the issuer, for one token. It remembers what
// go-oidc's errors do not say.
type keysFor struct {
	issuer *issuer
	// used are the keys of which one has signed the token.
	used *keySet
	err  error
}

// VerifySignature implements gooidc.KeySet.
func (k *keysFor) VerifySignature(ctx context.Context, token string) (payload []byte, err error) {
	signed, err := jose.ParseSigned(token, algorithms)
	if err != nil {
		return nil, err
	}
	k.used = k.issuer.keys.Load()
	payload, err = k.used.verify(signed)
	if !errors.Is(err, errUnknown) {
		if errors.Is(err, errSignature) {
			k.issuer.due() // the issuer may have another key of that name by now. Strangers must not make requests wait
		}
		k.err = err
		return payload, err
	}
	current, trouble := k.issuer.renewed(ctx, k.used)
	if k.used = current; trouble == nil {
		payload, trouble = k.used.verify(signed)
	}
	k.err = trouble
	return payload, trouble
}
