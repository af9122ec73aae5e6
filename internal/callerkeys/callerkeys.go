// Package callerkeys finds the keys that a caller sends with a request,
// wherever SDKs put them: in headers, in the query, in WebSocket subprotocols.
package callerkeys

import (
	"net/http"
	"slices"
	"strings"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// Headers are those that hold a key.
var Headers = []string{"Authorization", "Api-Key", "X-Api-Key", "Ocp-Apim-Subscription-Key"}

// params are query parameters that hold a key.
var params = []string{"api-key", "subscription-key"}

// keyProtocol is the prefix of the WebSocket subprotocol in which browsers send
// a key, because they cannot set a header.
const keyProtocol = "openai-insecure-api-key."

// credentialProtocols are the prefixes of those that identify a caller.
var credentialProtocols = []string{keyProtocol, "openai-organization.", "openai-project."}

// Presented is what a caller identified itself with. Its methods that change it
// leave the request that it was taken from as it is.
type Presented struct {
	Header []Line
	// Protocols are the values of Sec-WebSocket-Protocol, which may hold keys.
	Protocols []string
	RawQuery  string
}

// Line is a header with all its values.
type Line struct {
	Name   string
	Values []string
}

// kind is what may become of a header.
type kind int

const (
	public kind = iota
	// credential: it identifies the caller, or chooses whose budget it spends.
	credential
	// private: it is for the balancer only. Forwarding headers would tell the
	// provider who the caller is, and Azure answers 431 to more than ten custom
	// headers. With x-ms-spillover-deployment a caller could move its request to
	// another deployment of the backend. A referrer may hold a key.
	private
	protocol
	connection // which only reverse_proxy reads
)

// kindOf tells by its canonical name what may become of a header. It is asked
// about every header of every request.
func kindOf(name string) kind {
	switch name {
	case "Authorization", "Api-Key", "X-Api-Key", "Ocp-Apim-Subscription-Key", "Openai-Organization", "Openai-Project":
		return credential
	case "Cookie", "Referer", "X-Ms-Spillover-Deployment", "X-Real-Ip", "Forwarded", "Via":
		return private
	case "Sec-Websocket-Protocol":
		return protocol
	case "Connection", "Upgrade", "Te", "Trailer", "Transfer-Encoding", "Keep-Alive", "Incremental", "Alt-Svc",
		"Proxy-Connection", "Proxy-Authenticate", "Proxy-Authorization":
		return connection
	}
	if strings.HasPrefix(name, "X-Forwarded-") {
		return private
	}
	return public
}

// IsCredential reports whether the header of a name identifies a caller, or
// chooses whose budget it spends.
func IsCredential(name string) bool { return kindOf(http.CanonicalHeaderKey(name)) == credential }

// Take separates what identifies the caller from what may go on: a header and
// a query without anything that is meant for the balancer only.
func Take(header http.Header, rawQuery string) (presented Presented, goesOn http.Header, goesOnQuery string) {
	presented.RawQuery = rawQuery
	goesOn = make(http.Header, len(header))
	for name, values := range header {
		switch kindOf(name) {
		case public, connection:
			goesOn[name] = values
		case protocol:
			presented.Protocols = values
			if kept := protocolsWithout(values, IsCredentialProtocol); kept != nil {
				goesOn[name] = kept
			}
		case credential:
			presented.add(name, values)
		}
	}
	return presented, goesOn, withoutKeys(rawQuery, anyKey)
}

// TakeFrom is Take for a header that stays where it is, and of which Public
// tells what goes on. It reports false if more than keys is to be taken out,
// because a part of the header is about the connection.
func TakeFrom(header http.Header, rawQuery string) (presented Presented, goesOnQuery string, ok bool) {
	presented.RawQuery = rawQuery
	for name, values := range header {
		switch kind := kindOf(name); {
		case kind == credential:
			presented.add(name, values)
		case name == "Connection" && len(values) == 1 && persists(values[0]):
		case kind == protocol, kind == connection:
			return Presented{}, "", false
		}
	}
	return presented, withoutKeys(rawQuery, anyKey), true
}

// persists reports whether the value of a Connection header says no more than
// what happens to the connection afterwards (RFC 9112 section 9.3).
func persists(value string) bool {
	return strings.EqualFold(value, "keep-alive") || strings.EqualFold(value, "close")
}

func anyKey(string) bool { return true }

// add takes in a header that identifies the caller.
func (p *Presented) add(name string, values []string) {
	if slices.ContainsFunc(values, isBasic) {
		values = slices.DeleteFunc(slices.Clone(values), isBasic)
	}
	if len(values) > 0 {
		p.Header = append(p.Header, Line{name, values})
	}
}

// withoutKeys returns the query without the parameters whose key matches, and
// every other byte as it was. A semicolon separates parameters as well as an
// ampersand, for some servers read it so.
func withoutKeys(rawQuery string, match func(key string) bool) string {
	if rawQuery == "" {
		return ""
	}
	return replaceKeys(rawQuery, func(_, key string) (string, bool) { return "", !match(key) })
}

// MaskQuery returns the query with the mask in place of every key.
func MaskQuery(rawQuery, mask string) string {
	return replaceKeys(rawQuery, func(name, key string) (string, bool) {
		if key == "" {
			return "", true
		}
		return name + "=" + mask, false
	})
}

// replaceKeys asks about each parameter that may hold a key, by the name as it
// is written, whether to keep it as it is, and if not, what to put in its
// place: nothing removes it.
func replaceKeys(rawQuery string, replace func(name, key string) (with string, keep bool)) string {
	var kept strings.Builder
	changed := false
	for rest, separator := rawQuery, ""; ; {
		pair, next, after := cutPair(rest)
		if with, keep := replaceKey(pair, replace); !keep {
			pair, changed = with, true
		}
		if pair != "" || !changed {
			if kept.Len() > 0 || !changed {
				kept.WriteString(separator)
			}
			kept.WriteString(pair)
		}
		if next == "" {
			break
		}
		separator, rest = next, after
	}
	if !changed {
		return rawQuery
	}
	return kept.String()
}

// cutPair cuts a query after its first parameter. A semicolon separates two as
// well, and so may one that is encoded, for who decodes the query first.
func cutPair(query string) (pair, separator, rest string) {
	for i := range len(query) {
		for _, separator := range []string{"&", ";", "%3B", "%3b", "%26"} {
			if strings.HasPrefix(query[i:], separator) {
				return query[:i], separator, query[i+len(separator):]
			}
		}
	}
	return query, "", ""
}

func replaceKey(pair string, replace func(name, key string) (with string, keep bool)) (with string, keep bool) {
	for _, param := range params {
		if key, ok := openaiapi.Param(pair, param); ok {
			name, _, _ := strings.Cut(pair, "=")
			return replace(name, key)
		}
	}
	return "", true
}

// Public returns the headers that neither identify the caller nor are for the
// balancer only. Their values are shared with the header.
func Public(header http.Header) http.Header {
	kept := make(http.Header, len(header)+1) // and a credential
	for name, values := range header {
		if kind := kindOf(name); kind == public || kind == protocol || kind == connection {
			kept[name] = values
		}
	}
	return kept
}

// isBasic reports whether a credential is a password for Caddy's own basic_auth
// (RFC 7617), which no provider takes.
func isBasic(value string) bool { return hasPrefixFold(strings.TrimSpace(value), "Basic ") }

// IsCredentialProtocol reports whether a WebSocket subprotocol identifies the
// caller.
func IsCredentialProtocol(protocol string) bool {
	return slices.ContainsFunc(credentialProtocols, func(prefix string) bool { return hasPrefixFold(protocol, prefix) })
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

// Remove takes out every key for which match returns true, wherever it is. It
// asks about each key that there is.
func (p *Presented) Remove(match func(key string) bool) {
	var kept []Line
	for _, line := range p.Header {
		if slices.Contains(Headers, line.Name) {
			line.Values = slices.DeleteFunc(slices.Clone(line.Values), func(value string) bool {
				key := KeyIn(value)
				return key != "" && match(key)
			})
		}
		if len(line.Values) > 0 {
			kept = append(kept, line)
		}
	}
	p.Header = kept
	p.RawQuery = withoutKeys(p.RawQuery, func(key string) bool { return key != "" && match(key) })
	p.Protocols = protocolsWithout(p.Protocols, func(protocol string) bool {
		if !hasPrefixFold(protocol, keyProtocol) {
			return false
		}
		key := protocol[len(keyProtocol):]
		return key != "" && match(key)
	})
}

// Each calls visit with every key.
func (p Presented) Each(visit func(key string)) {
	p.Remove(func(key string) bool {
		visit(key)
		return false
	})
}

// None reports whether the caller sent no key.
func (p Presented) None() bool {
	none := true
	p.Each(func(string) { none = false })
	return none
}

// KeyIn returns the key in a header's value, which may begin with a scheme, as
// Bearer is (RFC 6750).
func KeyIn(value string) string {
	value = strings.TrimSpace(value)
	if i := strings.IndexAny(value, " \t"); i >= 0 {
		return strings.TrimSpace(value[i:])
	}
	return value
}
