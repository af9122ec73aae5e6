package oidc

import (
	"context"
	"crypto/ecdsa"
	"crypto/rsa"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/go-jose/go-jose/v4"
)

const (
	// fetchTimeout limits a fetch, which is two requests.
	fetchTimeout = 10 * time.Second
	// maxAnswer is how long an answer of the issuer may be, in bytes.
	maxAnswer = 1 << 20
	// minBits is how long a key of RSA must be (RFC 7518 section 3.3).
	minBits = 2048
)

// source is where the keys of an issuer are.
type source struct {
	url    string
	client *http.Client
}

func newSource(url string) source {
	dialer := &net.Dialer{Timeout: 5 * time.Second}
	return source{url: url, client: &http.Client{
		Transport: &http.Transport{
			Proxy:                  http.ProxyFromEnvironment,
			DialContext:            dialer.DialContext,
			ForceAttemptHTTP2:      true,
			TLSHandshakeTimeout:    5 * time.Second,
			MaxResponseHeaderBytes: 64 << 10,
			IdleConnTimeout:        5 * time.Second, // enough for the two requests of a fetch
		},
		// the keys come from where the issuer says, and from nowhere else
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

// keySet are the keys that an issuer signs with.
type keySet struct {
	keys []jose.JSONWebKey
	// digest is that of the text in which they came.
	digest [sha256.Size]byte
}

// fetch fetches the keys of the issuer (OpenID Connect Discovery 1.0 section
// 4).
func (s *source) fetch(ctx context.Context) (*keySet, error) {
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	text, err := s.get(ctx, strings.TrimSuffix(s.url, "/")+"/.well-known/openid-configuration")
	if err != nil {
		return nil, err
	}
	var document struct {
		Issuer  string `json:"issuer"`
		JWKSURI string `json:"jwks_uri"`
	}
	if err := json.Unmarshal(text, &document); err != nil {
		return nil, errors.New("the discovery document is not valid JSON")
	}
	if document.Issuer != s.url {
		return nil, fmt.Errorf("the discovery document is that of the issuer %.200q", document.Issuer)
	}
	address, err := url.Parse(document.JWKSURI)
	if err != nil || address.Host == "" || !isSecure(address, strings.HasPrefix(s.url, "http:")) {
		return nil, errors.New("jwks_uri of the discovery document is not a URL with https")
	}
	if text, err = s.get(ctx, document.JWKSURI); err != nil {
		return nil, err
	}
	return parseKeys(text)
}

// get returns the document at an address. Its errors have nothing of the answer
// but its status.
func (s *source) get(ctx context.Context, address string) ([]byte, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, address, http.NoBody)
	if err != nil {
		return nil, err
	}
	r.Header.Set("Accept", "application/json")
	r.Header.Set("User-Agent", "caddy-openai-lb")
	res, err := s.client.Do(r)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s answers with status %d", address, res.StatusCode)
	}
	text, err := io.ReadAll(io.LimitReader(res.Body, maxAnswer+1))
	switch {
	case err != nil:
		return nil, err
	case len(text) > maxAnswer:
		return nil, fmt.Errorf("%s answers with more than %d bytes", address, maxAnswer)
	}
	return text, nil
}

// parseKeys reads a set of keys (RFC 7517). Keys of other kinds, or for
// something else, are left out.
func parseKeys(text []byte) (*keySet, error) {
	var set struct{ Keys []json.RawMessage }
	if err := json.Unmarshal(text, &set); err != nil {
		return nil, errors.New("the set of keys is not valid JSON")
	}
	found := &keySet{digest: sha256.Sum256(text)}
	for _, text := range set.Keys {
		var key jose.JSONWebKey
		if json.Unmarshal(text, &key) == nil && isUsable(key) {
			found.keys = append(found.keys, key)
		}
	}
	if found.keys == nil {
		return nil, errors.New("the set of keys has none of RSA with 2048 bits, or of an elliptic curve, for signatures")
	}
	return found, nil
}

func isUsable(key jose.JSONWebKey) bool {
	if key.Use != "" && key.Use != "sig" {
		return false
	}
	switch public := key.Key.(type) {
	case *rsa.PublicKey:
		return public.N.BitLen() >= minBits
	case *ecdsa.PublicKey:
		return true
	}
	return false
}

// verify returns the signed payload. The error is errUnknown if no key is the
// one that the signature names. nil has no keys.
func (s *keySet) verify(signed *jose.JSONWebSignature) ([]byte, error) {
	if s == nil {
		return nil, errUnknown
	}
	header, err := signed.Signatures[0].Header, errUnknown
	for _, key := range s.keys {
		if header.KeyID != "" && key.KeyID != header.KeyID || key.Algorithm != "" && key.Algorithm != header.Algorithm {
			continue
		}
		if header.KeyID == "" && len(s.keys) > 1 { // OpenID Connect Core 1.0 section 10.1
			return nil, errNoKeyID
		}
		text, wrong := signed.Verify(&key)
		if wrong == nil {
			return text, nil
		}
		err = errSignature
	}
	return nil, err
}
