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

// Auth authenticates the attempts at one backend: with a credential of its own,
// the caller's, or none. It also lists the keys that no reply of the backend
// may show.
type Auth struct {
	// Scheme is one of [Schemes].
	Scheme string
	// Source supplies the backend's own credential. It is nil if there is none.
	Source Source
	// Passthrough reports whether the backend gets the caller's credential.
	Passthrough bool
	// InHeaders are the values of the config's headers that may hold a key.
	InHeaders []string

	// known are the secrets of attempts with the credential that was used last.
	known atomic.Pointer[secretsOf]
}

// secretsOf are the secrets of attempts with a credential.
type secretsOf struct {
	credential Credential
	secrets    Secrets
}

// Credential returns the credential for an attempt. It is empty if the backend
// has none of its own.
func (a *Auth) Credential(ctx context.Context) (Credential, error) {
	if a.Source == nil {
		return Credential{}, nil
	}
	return a.Source.Credential(ctx)
}

// CanRenew reports whether the source may have another credential after a
// refusal. A key in the config itself stays what it is until the next config.
func (a *Auth) CanRenew() bool {
	key, isKey := a.Source.(*Key)
	return a.Source != nil && (!isKey || key.InFile())
}

// AudienceSource is a Source that has credentials for several audiences.
type AudienceSource interface {
	Source

	// RenewFor is Renew after a refusal that may be about the audience. The
	// text of the backend may name those that it accepts.
	RenewFor(ctx context.Context, refused Credential, text string) (Credential, error)
}

// Renew returns another credential after one was refused. It reports false if
// there is no other. aboutAudience is what the refusal says about the audience
// of a token. It is empty if that is nothing.
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

// atOnce is a context that is done, for calls that must not wait.
var atOnce = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// HasReplaced reports whether there is another credential by now.
func (a *Auth) HasReplaced(refused Credential) bool {
	if a.Source == nil {
		return false
	}
	current, err := a.Source.Credential(atOnce)
	return err == nil && current != refused
}

// Outdated reports whether the credential of an attempt is a key of the config
// that has changed since.
func (a *Auth) Outdated(credential Credential) bool {
	key, ok := a.Source.(*Key)
	return ok && *key.current.Load() != credential
}

// Authorize sets the credential on the header and the URL of a request that has
// none, and the caller's with passthrough.
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

// Fingerprint identifies the credentials of a backend, and does not contain
// them. They are the scheme, the identity of the source, if there is one, and
// the headers of the config that may be a part of the credential, for example a
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
