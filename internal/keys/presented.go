package keys

import (
	"net/http"
	"net/url"
	"slices"
	"strings"

	"golang.org/x/net/http/httpguts"
)

// Presented has all keys of a request, including those that identify the
// caller. Keys in a few places identify a caller, but a request may have keys
// in many more, for gateways that the balancer does not know. So Presented has
// every header and query parameter whose name suggests a key. A header that has
// one of these keys as its value is not sent to a backend. Methods that change
// a Presented do not change the request.
type Presented struct {
	Header []Line
	// Protocols are the values of Sec-WebSocket-Protocol, which may contain
	// keys.
	Protocols []string
	RawQuery  string

	keys keySet
}

// Line is a header with all its values.
type Line struct {
	Name   string
	Values []string
}

// Read finds the keys in a request. It also returns the query for a backend,
// which has no parameters with a key, and every other byte unchanged.
func Read(header http.Header, rawQuery string) (presented Presented, query string) {
	for name, values := range header {
		presented.take(name, values)
	}
	return presented, presented.takeQuery(rawQuery)
}

// Outgoing returns the header for a backend. It has the fields of the request
// that contain no keys, are not for the balancer only, and need not be removed
// by an intermediary (RFC 9110 section 7.6.1). It shares the values with the
// request's header. leaveOut reports whether to leave out a further field. It
// may be nil.
func (p *Presented) Outgoing(header http.Header, leaveOut func(name string) bool) http.Header {
	out := make(http.Header, len(header)+2) // and a User-Agent, and a credential
	for name, values := range header {
		if kindOf(name) == public && !p.keys.containsAny(values) && (leaveOut == nil || !leaveOut(name)) {
			out[name] = values
		}
	}
	if te := header["Te"]; te != nil && httpguts.HeaderValuesContainsToken(te, "trailers") {
		out["Te"] = []string{"trailers"}
	}
	for name := range namedBy(header["Connection"]) {
		out.Del(name)
	}
	isKey := func(protocol string) bool { return IsCredentialProtocol(protocol) || p.keys.contains(protocol) }
	if kept := protocolsWithout(p.Protocols, isKey); kept != nil {
		out["Sec-Websocket-Protocol"] = kept
	}
	if out["User-Agent"] == nil {
		out["User-Agent"] = []string{""} // otherwise net/http adds its own
	}
	return out
}

// take records a header if it contains a key.
func (p *Presented) take(name string, values []string) {
	switch kindOf(name) {
	case credential, otherKey:
		p.add(name, values)
	case protocol:
		p.Protocols = values
		p.keys.addProtocols(values)
	case public:
		for _, value := range values {
			p.addToken(value)
		}
	}
}

// add records a header that identifies the caller, or contains another key.
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

// addToken records a value as a key if it is a token. Gateways write tokens
// into headers of any name, such as Cf-Access-Jwt-Assertion.
func (p *Presented) addToken(value string) {
	if len(value) >= minToken && strings.Contains(value, ".") && isToken(KeyIn(value)) {
		p.keys.add(KeyIn(value))
	}
}

// takeQuery records the query, and returns it without the parameters whose name
// or value shows a key. Every other byte stays unchanged.
func (p *Presented) takeQuery(rawQuery string) string {
	p.RawQuery = rawQuery
	replaceParams(rawQuery, func(q param) (string, bool) {
		if HoldsKey(q.name) {
			p.keys.add(KeyIn(q.value))
		} else {
			p.addToken(q.value)
		}
		return "", true
	})
	return replaceParams(rawQuery,
		func(q param) (string, bool) { return "", !HoldsKey(q.name) && !p.keys.contains(q.value) })
}

// remove removes every key for which match returns true, in all places.
// identifies reports whether a key in this place identifies the caller.
func (p *Presented) remove(match func(key string, identifies bool) bool) {
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
			identifies, values := slices.Contains(CallerHeaders, line.Name), line.Values
			line.Values = nil // the request's stay as they are
			for _, value := range values {
				if !matches(KeyIn(value), identifies) {
					line.Values = append(line.Values, value)
				}
			}
		}
		if len(line.Values) > 0 {
			kept = append(kept, line)
		}
	}
	p.Header = kept
	p.RawQuery = replaceParams(p.RawQuery, func(q param) (string, bool) {
		switch {
		case slices.ContainsFunc(params, func(name string) bool { return strings.EqualFold(name, q.name) }):
			return "", !matches(q.value, true)
		case HoldsKey(q.name):
			return "", !matches(KeyIn(q.value), false)
		}
		return "", true
	})
	p.Protocols = protocolsWithout(p.Protocols, func(protocol string) bool {
		return hasPrefixFold(protocol, keyProtocol) && matches(protocol[len(keyProtocol):], true)
	})
	if removed.first == "" {
		return
	}
	// where no key is expected
	p.Header = slices.DeleteFunc(p.Header,
		func(line Line) bool { return !HoldsKey(line.Name) && removed.containsAny(line.Values) })
	p.RawQuery = replaceParams(p.RawQuery, func(q param) (string, bool) { return "", !removed.contains(q.value) })
	p.Protocols = protocolsWithout(p.Protocols, removed.contains)
}

func (p Presented) each(visit func(key string)) {
	p.remove(func(key string, _ bool) bool {
		visit(key)
		return false
	})
}

// None reports whether the caller sent no key that identifies it.
func (p Presented) None() bool {
	none := true
	p.remove(func(_ string, identifies bool) bool {
		none = none && !identifies
		return false
	})
	return none
}

func (p Presented) putOn(header http.Header, u *url.URL) {
	for _, line := range p.Header {
		header[line.Name] = line.Values
	}
	if p.Protocols != nil {
		// an attempt writes a handshake's headers as RFC 6455 spells them
		delete(header, "Sec-Websocket-Protocol")
		header["Sec-WebSocket-Protocol"] = p.Protocols
	}
	u.RawQuery = p.RawQuery
}
