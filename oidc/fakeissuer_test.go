package oidc

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
)

const audience = "api://openai-lb"

// signer is a key that an issuer signs with.
type signer struct {
	kid string
	alg jose.SignatureAlgorithm
	key crypto.Signer
}

// The keys are made once: RSA takes a while.
var (
	rsaKey      = sync.OnceValue(func() *rsa.PrivateKey { return newRSA(2048) })
	otherRSAKey = sync.OnceValue(func() *rsa.PrivateKey { return newRSA(2048) })
	ecKey       = sync.OnceValue(func() *ecdsa.PrivateKey {
		key, _ := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		return key
	})
)

func newRSA(bits int) *rsa.PrivateKey {
	key, _ := rsa.GenerateKey(rand.Reader, bits)
	return key
}

func firstKey() signer { return signer{"first", jose.RS256, rsaKey()} }
func nextKey() signer  { return signer{"next", jose.RS256, otherRSAKey()} }

// fakeIssuer is an identity provider: its discovery document and its keys.
type fakeIssuer struct {
	*httptest.Server

	mu sync.Mutex
	// keys are those that it publishes, and status is what it answers, if that
	// is not 200.
	keys   []jose.JSONWebKey
	status int
	// fetched is how often the keys were fetched.
	fetched int
	// claimed is the issuer that it says it is. Default: its URL.
	claimed string
}

func newFakeIssuer(t testing.TB, keys ...signer) *fakeIssuer {
	f := new(fakeIssuer)
	f.Server = httptest.NewServer(f)
	t.Cleanup(f.Close)
	f.publish(keys...)
	return f
}

// publish replaces the keys.
func (f *fakeIssuer) publish(keys ...signer) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.keys = nil
	for _, k := range keys {
		f.keys = append(f.keys, jose.JSONWebKey{Key: k.key.Public(), KeyID: k.kid, Use: "sig"})
	}
}

// answers has it answer with a status from now on.
func (f *fakeIssuer) answers(status int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.status = status
}

func (f *fakeIssuer) fetches() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.fetched
}

// ServeHTTP implements http.Handler.
func (f *fakeIssuer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	url := "http://" + r.Host
	switch {
	case f.status != 0:
		w.WriteHeader(f.status)
	case r.URL.Path == "/.well-known/openid-configuration":
		claimed := f.claimed
		if claimed == "" {
			claimed = url
		}
		_ = json.NewEncoder(w).Encode(map[string]string{"issuer": claimed, "jwks_uri": url + "/keys"})
	case r.URL.Path == "/keys":
		f.fetched++
		_ = json.NewEncoder(w).Encode(jose.JSONWebKeySet{Keys: f.keys})
	default:
		w.WriteHeader(http.StatusNotFound)
	}
}

// with are the claims of a token. Each test changes some.
type with map[string]any

// claimsOf returns those of a valid token, and these.
func claimsOf(issuer string, changed with) with {
	now := time.Now()
	said := with{"iss": issuer, "aud": audience, "azp": "team-one", "iat": now.Unix(), "nbf": now.Unix(), "exp": now.Add(time.Hour).Unix()}
	for name, value := range changed {
		if said[name] = value; value == nil {
			delete(said, name)
		}
	}
	return said
}

// token returns a token of the issuer, with these claims changed.
func (f *fakeIssuer) token(t testing.TB, by signer, changed with) string {
	t.Helper()
	return sign(t, by.alg, by.kid, by.key, claimsOf(f.URL, changed))
}

func sign(t testing.TB, alg jose.SignatureAlgorithm, kid string, key any, said with) string {
	t.Helper()
	options := new(jose.SignerOptions).WithType("JWT")
	if kid != "" {
		options.WithHeader("kid", kid)
	}
	s, err := jose.NewSigner(jose.SigningKey{Algorithm: alg, Key: key}, options)
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(said)
	if err != nil {
		t.Fatal(err)
	}
	signed, err := s.Sign(text)
	if err != nil {
		t.Fatal(err)
	}
	token, err := signed.CompactSerialize()
	if err != nil {
		t.Fatal(err)
	}
	return token
}
