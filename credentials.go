package openailb

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"golang.org/x/net/http/httpguts"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// The schemes of a backend's auth.
const (
	authAPIKey      = "api_key"
	authBearer      = "bearer"
	authPassthrough = "passthrough"
	authNone        = "none"
)

var authSchemes = []string{authAPIKey, authBearer, authPassthrough, authNone}

// credentialHeaders identify a caller, or choose whose budget it spends. They
// are for us, or for a backend with auth passthrough, and for nobody else.
var credentialHeaders = []string{
	"Authorization", "Api-Key", "X-Api-Key", "Ocp-Apim-Subscription-Key",
	"Openai-Organization", "Openai-Project",
}

// privateHeaders are between the caller and us as well. Forwarding headers
// would tell the provider who the caller is, and Azure answers 431 to more
// than ten custom headers. With x-ms-spillover-deployment a caller could move
// its request to another deployment of the backend.
var privateHeaders = []string{
	"Cookie", "X-Ms-Spillover-Deployment", "X-Real-Ip", "Forwarded", "Via",
}

func removePrivateHeaders(header http.Header) {
	for _, name := range privateHeaders {
		delete(header, name)
	}
	for name := range header {
		if strings.HasPrefix(name, "X-Forwarded-") {
			delete(header, name)
		}
	}
}

// credentialParams are query parameters that hold a caller's key.
var credentialParams = []string{"api-key", "subscription-key"}

// keyProtocols are the prefixes of WebSocket subprotocols in which browsers
// send what they cannot send in a header.
var keyProtocols = []string{"openai-insecure-api-key.", "openai-organization.", "openai-project."}

// credentials are what a caller identified itself with.
type credentials struct {
	header   http.Header
	rawQuery string
}

// takeCredentials removes what is private between the caller and us from the
// request and returns the caller's credentials.
func takeCredentials(r *http.Request) credentials {
	taken := credentials{header: make(http.Header), rawQuery: r.URL.RawQuery}
	for _, name := range credentialHeaders {
		if values, ok := r.Header[name]; ok {
			taken.header[name] = values
			delete(r.Header, name)
		}
	}
	removePrivateHeaders(r.Header)
	if protocols, ok := r.Header["Sec-Websocket-Protocol"]; ok {
		// reverse_proxy sends it in the spelling of RFC 6455
		taken.header["Sec-WebSocket-Protocol"] = protocols
		delete(r.Header, "Sec-Websocket-Protocol")
		if public := withoutKeys(protocols); public != "" {
			r.Header["Sec-Websocket-Protocol"] = []string{public}
		}
	}
	r.URL.RawQuery = openaiapi.DropParams(r.URL.RawQuery, credentialParams...)
	return taken
}

// withoutKeys returns the subprotocols that hold no key.
func withoutKeys(protocols []string) string {
	var public []string
	for _, value := range protocols {
		for protocol := range strings.SplitSeq(value, ",") {
			protocol = strings.TrimSpace(protocol)
			if !slices.ContainsFunc(keyProtocols, func(prefix string) bool { return strings.HasPrefix(protocol, prefix) }) {
				public = append(public, protocol)
			}
		}
	}
	return strings.Join(public, ", ")
}

// resolveSecret replaces the placeholders of a key and trims it. Its errors
// never hold the key, nor what a placeholder stands for.
func resolveSecret(key string) (string, error) {
	resolved, err := caddy.NewReplacer().ReplaceOrErr(key, true, true)
	if err != nil {
		return "", err
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

// fingerprint tells credentials apart without holding them. A header may be a
// part of one: a gateway's key, a project.
func (b *Backend) fingerprint() string {
	sum := sha256.New()
	fmt.Fprintf(sum, "%q %q", b.auth, b.apiKey)
	for _, name := range slices.Sorted(maps.Keys(b.header)) {
		fmt.Fprintf(sum, " %q %q", name, b.header[name])
	}
	return hex.EncodeToString(sum.Sum(nil)[:16])
}

// authorize puts the backend's credential on an outgoing request, and makes
// sure that it is the only one there.
func (b *Backend) authorize(out *http.Request, caller credentials) {
	for _, name := range credentialHeaders {
		delete(out.Header, name)
	}
	switch b.auth {
	case authAPIKey:
		out.Header["Api-Key"] = []string{b.apiKey}
	case authBearer:
		out.Header["Authorization"] = []string{"Bearer " + b.apiKey}
	case authPassthrough:
		for name, values := range caller.header {
			out.Header[name] = values
		}
		out.URL.RawQuery = caller.rawQuery
	}
}

// provisionAuth settles the scheme and resolves the key.
func (b *Backend) provisionAuth(host string) error {
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
	switch b.auth {
	case authAPIKey, authBearer:
		if b.APIKey == "" {
			return fmt.Errorf("auth %s needs an api_key", b.auth)
		}
		key, err := resolveSecret(b.APIKey)
		if err != nil {
			return fmt.Errorf("api_key: %w", err)
		}
		b.apiKey = key
	case authPassthrough, authNone:
		if b.APIKey != "" {
			return fmt.Errorf("auth %s takes no api_key", b.auth)
		}
	default:
		return fmt.Errorf("auth %q: expected one of %s", b.auth, strings.Join(authSchemes, ", "))
	}
	b.azure = azure || b.auth == authAPIKey
	return nil
}
