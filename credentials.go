package openailb

import (
	"net/http"
	"slices"
	"strings"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// credentialHeaders identify a caller, or choose whose budget it spends. They
// are for us, or for a backend with auth passthrough, and for nobody else.
var credentialHeaders = append([]string{"Openai-Organization", "Openai-Project"}, keyHeaders...)

// keyHeaders are those of them that hold a key.
var keyHeaders = []string{"Authorization", "Api-Key", "X-Api-Key", "Ocp-Apim-Subscription-Key"}

// privateHeaders are between the caller and us as well. Forwarding headers
// would tell the provider who the caller is, and Azure answers 431 to more
// than ten custom headers. With x-ms-spillover-deployment a caller could move
// its request to another deployment of the backend. A referrer may hold a key.
var privateHeaders = []string{
	"Cookie", "Referer", "X-Ms-Spillover-Deployment", "X-Real-Ip", "Forwarded", "Via",
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
	header http.Header
	// protocols are the WebSocket subprotocols, which may hold keys.
	protocols []string
	rawQuery  string
}

// takeCredentials removes what is private between the caller and us from the
// request and returns the caller's credentials.
func takeCredentials(r *http.Request) credentials {
	taken := credentials{header: make(http.Header), rawQuery: r.URL.RawQuery}
	for _, name := range credentialHeaders {
		if values, ok := r.Header[name]; ok {
			delete(r.Header, name)
			if values = slices.DeleteFunc(slices.Clone(values), isBasic); len(values) > 0 {
				taken.header[name] = values
			}
		}
	}
	removePrivateHeaders(r.Header)
	if protocols, ok := r.Header["Sec-Websocket-Protocol"]; ok {
		delete(r.Header, "Sec-Websocket-Protocol")
		taken.protocols = protocols
		if public := protocolsWithout(protocols, isKeyProtocol); public != nil {
			r.Header["Sec-Websocket-Protocol"] = public
		}
	}
	r.URL.RawQuery = openaiapi.DropParams(r.URL.RawQuery, credentialParams...)
	return taken
}

// isBasic reports whether a credential is a password for Caddy's own basic_auth
// (RFC 7617), which no provider takes.
func isBasic(value string) bool { return hasPrefixFold(strings.TrimSpace(value), "Basic ") }

func isKeyProtocol(protocol string) bool {
	return slices.ContainsFunc(keyProtocols, func(prefix string) bool { return hasPrefixFold(protocol, prefix) })
}

func hasPrefixFold(s, prefix string) bool {
	return len(s) >= len(prefix) && strings.EqualFold(s[:len(prefix)], prefix)
}

// protocolsWithout returns the subprotocols but for those to leave out, as one
// value, or nothing if none is left.
func protocolsWithout(values []string, leaveOut func(protocol string) bool) []string {
	var kept []string
	for _, value := range values {
		for protocol := range strings.SplitSeq(value, ",") {
			if protocol = strings.TrimSpace(protocol); protocol != "" && !leaveOut(protocol) {
				kept = append(kept, protocol)
			}
		}
	}
	if kept == nil {
		return nil
	}
	return []string{strings.Join(kept, ", ")}
}

// withdraw takes out the keys that are meant, wherever the caller put them. It
// asks about each key there is.
func (c *credentials) withdraw(meant func(key string) bool) {
	for _, name := range keyHeaders {
		values := slices.DeleteFunc(slices.Clone(c.header[name]), func(value string) bool {
			key := keyIn(value)
			return key != "" && meant(key)
		})
		if delete(c.header, name); len(values) > 0 {
			c.header[name] = values
		}
	}
	c.rawQuery = strings.Join(slices.DeleteFunc(strings.Split(c.rawQuery, "&"), func(pair string) bool {
		return slices.ContainsFunc(credentialParams, func(param string) bool {
			key, ok := openaiapi.Param(pair, param)
			return ok && key != "" && meant(key)
		})
	}), "&")
	c.protocols = protocolsWithout(c.protocols, func(protocol string) bool {
		if !hasPrefixFold(protocol, keyProtocols[0]) {
			return false
		}
		key := protocol[len(keyProtocols[0]):]
		return key != "" && meant(key)
	})
}

// none reports whether the caller has no key.
func (c *credentials) none() bool {
	none := true
	c.withdraw(func(string) bool {
		none = false
		return false
	})
	return none
}

// keyIn returns the key in a header's value, which may have a scheme in front,
// as Bearer is (RFC 6750).
func keyIn(value string) string {
	value = strings.TrimSpace(value)
	if i := strings.IndexAny(value, " \t"); i >= 0 {
		return strings.TrimSpace(value[i:])
	}
	return value
}
