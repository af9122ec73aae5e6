package keys

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"sync/atomic"
)

// Auth authenticates the attempts at one backend: with the backend's own
// credential, the caller's, or none. It also lists the keys that no reply of
// the backend may show.
type Auth struct {
	// Scheme is one of [Schemes].
	Scheme string
	// Source supplies the backend's own credential. It is nil if there is none.
	Source Source
	// Passthrough reports whether the caller's credential is passed to the
	// backend.
	Passthrough bool
	// InHeaders are the values of configured headers that may contain a key.
	InHeaders []string

	// known caches the secrets of attempts with the latest credential.
	known atomic.Pointer[secretsOf]
}

// secretsOf has the secrets of attempts with a credential.
type secretsOf struct {
	credential Credential
	secrets    Secrets
}

// Credential returns the credential for an attempt. It is empty if the backend
// has no credential.
func (a *Auth) Credential(ctx context.Context) (Credential, error) {
	if a.Source == nil {
		return Credential{}, nil
	}
	return a.Source.Credential(ctx)
}

// CanRenew reports whether the source may have another credential after a
// refusal. A key in the config itself does not change until the next config.
func (a *Auth) CanRenew() bool {
	key, isKey := a.Source.(*Key)
	return a.Source != nil && (!isKey || key.InFile())
}

// AudienceSource is a Source that has credentials for several audiences.
type AudienceSource interface {
	Source

	// RenewFor returns another credential after a refusal that may be about the
	// audience. text is the backend's error, which may name the audiences that
	// it accepts.
	RenewFor(ctx context.Context, refused Credential, text string) (Credential, error)
}

// Renew returns another credential after one was refused. It reports false if
// there is no other. aboutAudience is the part of the refusal that is about the
// audience of a token, or empty.
func (a *Auth) Renew(ctx context.Context, refused Credential, aboutAudience string) (Credential, bool) {
	if a.Source == nil {
		return refused, false
	}
	renew := a.Source.Renew
	if s, ok := a.Source.(AudienceSource); ok && aboutAudience != "" {
		renew = func(ctx context.Context, refused Credential) (Credential, error) {
			return s.RenewFor(ctx, refused, aboutAudience)
		}
	}
	renewed, err := renew(ctx, refused)
	return renewed, err == nil && renewed != refused
}

// atOnce is a canceled context, for calls that must not wait.
var atOnce = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// HasReplaced reports whether the source now has another credential than the
// refused one.
func (a *Auth) HasReplaced(refused Credential) bool {
	if a.Source == nil {
		return false
	}
	current, err := a.Source.Credential(atOnce)
	return err == nil && current != refused
}

// Outdated reports whether the credential of an attempt is a configured key
// that has changed since.
func (a *Auth) Outdated(credential Credential) bool {
	key, ok := a.Source.(*Key)
	return ok && *key.current.Load() != credential
}

// Authorize adds the credential to the header of a request. With passthrough,
// it adds the caller's keys to the header and the URL.
func (a *Auth) Authorize(header http.Header, u *url.URL, credential Credential, caller Presented) {
	if credential.Header != "" {
		header[http.CanonicalHeaderKey(credential.Header)] = []string{credential.Value}
	}
	if a.Passthrough {
		caller.putOn(header, u)
	}
}

// Secrets returns the keys that are sent with an attempt.
func (a *Auth) Secrets(credential Credential, caller Presented) Secrets {
	if known := a.known.Load(); !a.Passthrough && known != nil && known.credential == credential {
		return known.secrets
	}
	var s Secrets
	s.Add(credential.secret())
	for _, value := range a.InHeaders {
		s.Add(KeyIn(value))
		_, password, _ := (&http.Request{Header: http.Header{"Authorization": {value}}}).BasicAuth()
		s.Add(password)
	}
	if a.Passthrough {
		caller.each(s.Add)
	} else {
		a.known.Store(&secretsOf{credential, s})
	}
	return s
}

// Fingerprint returns a digest that identifies the credentials of a backend
// without containing them. These are the scheme, the identity of the source, if
// any, and configured headers that may be part of the credential, such as a
// gateway's key.
func (a *Auth) Fingerprint(identity string, header http.Header) string {
	sum := sha256.New()
	fmt.Fprintf(sum, "%q", a.Scheme)
	if identity != "" {
		fmt.Fprintf(sum, " %q", identity)
	}
	for _, name := range slices.Sorted(maps.Keys(header)) {
		if MayHoldKey(name) || isCredential(name) { // it decides which account pays
			fmt.Fprintf(sum, " %q %q", name, header[name])
		}
	}
	return hex.EncodeToString(sum.Sum(nil)[:16])
}
