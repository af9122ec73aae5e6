// Package callerkeys finds the keys that a caller sends with a request,
// wherever SDKs put them: in headers, in the query, in WebSocket subprotocols.
//
// A caller is identified by the keys in a few places. But a request may hold keys
// in many more, for gateways that the balancer does not know. So every header and
// query parameter with a name that speaks of a key is kept from backends, and so is
// every value that is one of these keys.
package callerkeys

import (
	"net/http"
	"net/url"
	"slices"
	"strings"
)

// Headers are those with a key that identifies the caller.
var Headers = []string{"Authorization", "Api-Key", "X-Api-Key", "Ocp-Apim-Subscription-Key"}

// params are the query parameters with such a key.
var params = []string{"api-key", "subscription-key"}

// keyProtocol is the prefix of the WebSocket subprotocol in which browsers send
// a key, because they cannot set a header.
const keyProtocol = "openai-insecure-api-key."

// credentialProtocols are the prefixes of those that identify a caller.
var credentialProtocols = []string{keyProtocol, "openai-organization.", "openai-project."}

// Presented is what a caller identified itself with, and all other keys. Its methods that change it
// leave the request that it was taken from as it is.
type Presented struct {
	Header []Line
	// Protocols are the values of Sec-WebSocket-Protocol, which may hold keys.
	Protocols []string
	RawQuery  string

	keys keySet
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
	// otherKey: it has a key, but does not identify the caller.
	otherKey
	// private: it is for the balancer only. Forwarding headers would tell the
	// provider who the caller is, and Azure answers 431 to more than ten custom
	// headers. With x-ms-spillover-deployment a caller could move its request to
	// another deployment of the backend, and with X-HTTP-Method-Override or
	// X-Original-URL to another method or path. A referrer may hold a key.
	private
	protocol
	connection // which reverse_proxy reads
)

// kindOf tells by its canonical name what may become of a header. It is asked
// about every header of every request, so the usual ones come first.
func kindOf(name string) kind {
	switch name {
	case "Accept", "Accept-Encoding", "Accept-Language", "Content-Length", "Content-Type",
		"X-Stainless-Arch", "X-Stainless-Async", "X-Stainless-Helper-Method", "X-Stainless-Lang", "X-Stainless-Os",
		"X-Stainless-Package-Version", "X-Stainless-Raw-Response", "X-Stainless-Read-Timeout", "X-Stainless-Retry-Count",
		"X-Stainless-Runtime", "X-Stainless-Runtime-Version", "X-Stainless-Timeout",
		"Openai-Beta", "Traceparent", "Tracestate", "X-Client-Request-Id", "X-Ms-Client-Request-Id", "X-Ms-Useragent", "X-Request-Id":
		return public
	case "Authorization", "Api-Key", "X-Api-Key", "Ocp-Apim-Subscription-Key", "Openai-Organization", "Openai-Project":
		return credential
	case "Cookie", "Referer", "X-Ms-Spillover-Deployment", "Via", "X-Envoy-External-Address",
		"X-Http-Method", "X-Http-Method-Override", "X-Method-Override",
		"X-Original-Url", "X-Rewrite-Url", "X-Original-Host", "X-Host":
		return private
	case "Sec-Websocket-Protocol":
		return protocol
	case "User-Agent", "Connection", "Upgrade", "Te", "Trailer", "Transfer-Encoding", "Keep-Alive", "Incremental", "Alt-Svc",
		"Proxy-Connection", "Proxy-Authenticate", "Proxy-Authorization",
		":protocol", "Sec-Websocket-Key", "Sec-Websocket-Version", "Sec-Websocket-Extensions":
		return connection
	}
	switch {
	case strings.HasPrefix(name, "X-Forwarded-"): // before the words, because proxies add three of them
		return private
	case HoldsKey(name):
		return otherKey
	case hasWord(name, isOfAddress):
		return private
	}
	return public
}

// HoldsKey reports whether a header or a query parameter holds a key, by the words
// of its name.
func HoldsKey(name string) bool {
	return hasWord(name, isOfKey) && !strings.EqualFold(name, "Idempotency-Key") && !strings.EqualFold(name, "Sec-WebSocket-Key")
}

func isOfKey(word string) bool {
	switch len(word) {
	case 3:
		return strings.EqualFold(word, "key")
	case 4:
		return strings.EqualFold(word, "auth")
	case 5:
		return strings.EqualFold(word, "token")
	case 6:
		return strings.EqualFold(word, "apikey") || strings.EqualFold(word, "secret") || strings.EqualFold(word, "cookie")
	case 8:
		return strings.EqualFold(word, "password")
	case 10:
		return strings.EqualFold(word, "credential")
	case 13:
		return strings.EqualFold(word, "authorization")
	}
	return false
}

// isOfAddress reports whether a word is one of those by which proxies name the
// headers with the address of a client, such as X-Real-Ip or X-Azure-ClientIP.
func isOfAddress(word string) bool {
	switch len(word) {
	case 2:
		return strings.EqualFold(word, "ip")
	case 4:
		return strings.EqualFold(word, "ipv4") || strings.EqualFold(word, "ipv6") || strings.EqualFold(word, "addr")
	case 8:
		return strings.EqualFold(word, "clientip") || strings.EqualFold(word, "socketip")
	case 9:
		return strings.EqualFold(word, "forwarded")
	}
	return false
}

// hasWord reports whether a name has a word for which is returns true. Words are
// separated by hyphens and underscores.
func hasWord(name string, is func(word string) bool) bool {
	for start, i := 0, 0; i <= len(name); i++ {
		if i == len(name) || name[i] == '-' || name[i] == '_' {
			if is(name[start:i]) {
				return true
			}
			start = i + 1
		}
	}
	return false
}

// IsCredential reports whether the header of a name identifies a caller, or
// chooses whose budget it spends.
func IsCredential(name string) bool { return kindOf(http.CanonicalHeaderKey(name)) == credential }

// Take separates what identifies the caller from what may go on: a header and
// a query without any key, and without anything that is meant for the balancer
// only.
func Take(header http.Header, rawQuery string) (presented Presented, goesOn http.Header, goesOnQuery string) {
	goesOn = make(http.Header, len(header))
	for name, values := range header {
		if kind := presented.take(name, values); kind == public || kind == connection {
			goesOn[name] = values
		}
	}
	goesOnQuery = presented.takeQuery(rawQuery)
	presented.clean(goesOn)
	return presented, goesOn, goesOnQuery
}

// unforwarded are fields that reverse_proxy adds unless they are there without a value.
var unforwarded = []string{"X-Forwarded-For", "X-Forwarded-Proto", "X-Forwarded-Host"}

// Split is Take for a header of which only the fields go on that reverse_proxy reads. Outgoing
// adds the others.
func Split(header http.Header, rawQuery string) (presented Presented, goesOn http.Header, goesOnQuery string) {
	goesOn = make(http.Header, len(unforwarded)+1) // and the user agent
	for name, values := range header {
		if presented.take(name, values) == connection {
			goesOn[name] = values
		}
	}
	goesOnQuery = presented.takeQuery(rawQuery)
	presented.clean(goesOn)
	for _, name := range unforwarded {
		goesOn[name] = nil
	}
	return presented, goesOn, goesOnQuery
}

// Outgoing returns the header for a backend: what reverse_proxy made of the header that it got,
// without what it says of the caller, and the public fields of split, which is the caller's header
// if Split was called with it. A key in proxied that does not identify a caller is one that the
// config adds (header_up). The values are shared with both headers.
func (p *Presented) Outgoing(proxied, split http.Header) http.Header {
	out := make(http.Header, len(proxied)+len(split)+1) // and a credential
	for name, values := range split {
		if kindOf(name) == public && !p.keys.inAny(values) {
			out[name] = values
		}
	}
	for _, value := range split["Connection"] {
		removeNamed(out, value)
	}
	for name, values := range proxied {
		if kind := kindOf(name); kind != credential && kind != private {
			out[name] = values
		}
	}
	return out
}

// removeNamed removes the fields that the value of a Connection header names (RFC 9110 section 7.6.1).
func removeNamed(header http.Header, connection string) {
	if persists(connection) {
		return
	}
	for name := range strings.SplitSeq(connection, ",") {
		header.Del(strings.TrimSpace(name))
	}
}

// take records a header if it holds a key. It returns what may become of it.
func (p *Presented) take(name string, values []string) kind {
	kind := kindOf(name)
	switch kind {
	case credential, otherKey:
		p.add(name, values)
	case protocol:
		p.Protocols = values
		p.keys.addProtocols(values)
	}
	return kind
}

// clean removes from a header what has one of the keys as its value, and adds the subprotocols of a
// WebSocket that hold none.
func (p *Presented) clean(goesOn http.Header) {
	for name, values := range goesOn {
		if p.keys.inAny(values) {
			delete(goesOn, name)
		}
	}
	isKey := func(protocol string) bool { return IsCredentialProtocol(protocol) || p.keys.in(protocol) }
	if kept := protocolsWithout(p.Protocols, isKey); kept != nil {
		goesOn["Sec-Websocket-Protocol"] = kept
	}
}

// persists reports whether the value of a Connection header says no more than
// what happens to the connection afterwards (RFC 9112 section 9.3).
func persists(value string) bool {
	return strings.EqualFold(value, "keep-alive") || strings.EqualFold(value, "close")
}

// add records a header that identifies the caller, or has another key.
func (p *Presented) add(name string, values []string) {
	if slices.ContainsFunc(values, isBasic) {
		values = slices.DeleteFunc(slices.Clone(values), isBasic)
	}
	if len(values) == 0 {
		return
	}
	p.Header = append(p.Header, Line{name, values})
	if HoldsKey(name) {
		for _, value := range values {
			p.keys.add(KeyIn(value))
		}
	}
}

// takeQuery records the query, and returns it without the parameters that hold a
// key, by their names or their values, and with every other byte as it was.
func (p *Presented) takeQuery(rawQuery string) string {
	if rawQuery == "" {
		return ""
	}
	p.RawQuery = rawQuery
	replaceParams(rawQuery, func(q param) (string, bool) {
		if HoldsKey(q.name) {
			p.keys.add(KeyIn(q.value))
		}
		return "", true
	})
	return replaceParams(rawQuery, func(q param) (string, bool) { return "", !HoldsKey(q.name) && !p.keys.in(q.value) })
}

// minLength is how long a key is at least to be found by its value. Callers
// without a key send short words in its place, which other values may be, too.
const minLength = 8

// keySet is the keys of a request. Nearly every request has at most one.
type keySet struct {
	one  string
	more []string
	// shortest is how long the shortest one is, by which most values are ruled out.
	shortest int
}

func (k *keySet) add(key string) {
	switch {
	case len(key) < minLength, key == k.one:
		return
	case k.one == "":
		k.one, k.shortest = key, len(key)
	default:
		k.more, k.shortest = append(k.more, key), min(k.shortest, len(key))
	}
}

func (k *keySet) addProtocols(values []string) {
	protocolsWithout(values, func(protocol string) bool {
		if hasPrefixFold(protocol, keyProtocol) {
			k.add(protocol[len(keyProtocol):])
		}
		return true
	})
}

// in reports whether a value is one of the keys, alone or after a scheme, as
// Bearer is.
func (k *keySet) in(value string) bool {
	return k.one != "" && len(value) >= k.shortest &&
		(isKey(value, k.one) || slices.ContainsFunc(k.more, func(key string) bool { return isKey(value, key) }))
}

// inAny reports whether one of the values is one of the keys.
func (k *keySet) inAny(values []string) bool {
	for _, value := range values {
		if len(value) >= k.shortest && k.in(value) {
			return true
		}
	}
	return false
}

func isKey(value, key string) bool {
	value = strings.TrimSpace(value)
	return strings.HasSuffix(value, key) && (len(value) == len(key) || KeyIn(value) == key)
}

// MaskQuery returns the query with the mask in place of every key.
func MaskQuery(rawQuery, mask string) string {
	return replaceParams(rawQuery, func(p param) (string, bool) {
		if p.value == "" || !HoldsKey(p.name) || strings.ContainsAny(p.name, notInNames) {
			return "", true
		}
		return p.written + "=" + mask, false
	})
}

// notInNames are characters that no name of a query parameter has. A text with one
// of them before an equals sign is something else.
const notInNames = " \t\n\"'`,:/<>(){}\\|"

// param is a parameter of a query: its name and value without their encoding, and
// the name as it is written.
type param struct{ name, value, written string }

// replaceParams asks about each parameter whether to keep it as it is, and if not,
// what to put in its place: nothing removes it. A semicolon separates parameters as
// well as an ampersand, for some servers read it so.
func replaceParams(rawQuery string, replace func(param) (with string, keep bool)) string {
	var kept strings.Builder
	changed := false
	for rest, separator := rawQuery, ""; ; {
		pair, next, after := cutPair(rest)
		written, value, _ := strings.Cut(pair, "=")
		if with, keep := replace(param{unescaped(written), unescaped(value), written}); !keep {
			if !changed {
				kept.WriteString(strings.TrimSuffix(rawQuery[:len(rawQuery)-len(rest)], separator))
				changed = true
			}
			pair = with
		}
		if changed && pair != "" {
			if kept.Len() > 0 {
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
		length := 0
		switch query[i] {
		case '&', ';':
			length = 1
		case '%':
			if rest := query[i+1:]; strings.HasPrefix(rest, "3B") || strings.HasPrefix(rest, "3b") || strings.HasPrefix(rest, "26") {
				length = 3
			}
		}
		if length > 0 {
			return query[:i], query[i : i+length], query[i+length:]
		}
	}
	return query, "", ""
}

// unescaped is a text of a query without its encoding, or as it is if it is badly
// encoded.
func unescaped(text string) string {
	if plain, err := url.QueryUnescape(text); err == nil {
		return plain
	}
	return text
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
// asks about each key that there is, and tells whether the key is where one
// identifies the caller.
func (p *Presented) Remove(match func(key string, identifies bool) bool) {
	var removed keySet
	matches := func(key string, identifies bool) bool {
		if key == "" || !match(key, identifies) {
			return false
		}
		removed.add(key)
		return true
	}
	var kept []Line
	for _, line := range p.Header {
		if HoldsKey(line.Name) {
			identifies := slices.Contains(Headers, line.Name)
			line.Values = slices.DeleteFunc(slices.Clone(line.Values), func(value string) bool { return matches(KeyIn(value), identifies) })
		}
		if len(line.Values) > 0 {
			kept = append(kept, line)
		}
	}
	p.Header = kept
	p.RawQuery = replaceParams(p.RawQuery, func(q param) (string, bool) {
		switch {
		case isIn(params, q.name):
			return "", !matches(q.value, true)
		case HoldsKey(q.name):
			return "", !matches(KeyIn(q.value), false)
		}
		return "", true
	})
	p.Protocols = protocolsWithout(p.Protocols, func(protocol string) bool {
		return hasPrefixFold(protocol, keyProtocol) && matches(protocol[len(keyProtocol):], true)
	})
	if removed.one == "" {
		return
	}
	// where no key is expected
	p.Header = slices.DeleteFunc(p.Header, func(line Line) bool { return !HoldsKey(line.Name) && removed.inAny(line.Values) })
	p.RawQuery = replaceParams(p.RawQuery, func(q param) (string, bool) { return "", !removed.in(q.value) })
	p.Protocols = protocolsWithout(p.Protocols, removed.in)
}

func isIn(names []string, name string) bool {
	return slices.ContainsFunc(names, func(n string) bool { return strings.EqualFold(n, name) })
}

// Each calls visit with every key.
func (p Presented) Each(visit func(key string)) {
	p.Remove(func(key string, _ bool) bool {
		visit(key)
		return false
	})
}

// None reports whether the caller sent no key that identifies it.
func (p Presented) None() bool {
	none := true
	p.Remove(func(_ string, identifies bool) bool {
		none = none && !identifies
		return false
	})
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
