package keys

import (
	"iter"
	"net/http"
	"slices"
	"strings"
)

// CallerHeaders are the headers whose key identifies the caller.
var CallerHeaders = []string{"Authorization", "Api-Key", "X-Api-Key", "Ocp-Apim-Subscription-Key"}

// kind is the purpose of a header, which determines where it may go.
type kind int

const (
	public kind = iota
	// credential identifies the caller, or chooses whose budget the caller
	// spends.
	credential
	// otherKey contains a key, but does not identify the caller.
	otherKey
	// private is for the balancer only. Forwarding headers would show the
	// provider who the caller is, and Azure answers 431 to more than ten custom
	// headers. With x-ms-spillover-deployment, a caller could move its request
	// to another deployment of the backend, and with X-HTTP-Method-Override or
	// X-Original-URL to another method or path. A referrer may contain a key.
	private
	protocol
	// hop describes the connection to the caller, not the request (RFC 9110
	// section 7.6.1).
	hop
)

// kindOf returns the kind of a header by its canonical name. It is called for
// every header of every request, so the usual names come first.
func kindOf(name string) kind {
	switch name {
	case "Accept", "Accept-Encoding", "Accept-Language", "Content-Length", "Content-Type", "User-Agent",
		"X-Stainless-Arch", "X-Stainless-Async", "X-Stainless-Helper-Method", "X-Stainless-Lang", "X-Stainless-Os",
		"X-Stainless-Package-Version", "X-Stainless-Raw-Response", "X-Stainless-Read-Timeout", "X-Stainless-Retry-Count",
		"X-Stainless-Runtime", "X-Stainless-Runtime-Version", "X-Stainless-Timeout",
		"Openai-Beta", "Traceparent", "Tracestate", "X-Client-Request-Id", "X-Ms-Client-Request-Id", "X-Ms-Useragent", "X-Request-Id":
		return public
	case "Authorization", "Api-Key", "X-Api-Key", "Ocp-Apim-Subscription-Key", "Openai-Organization", "Openai-Project":
		return credential
	case "Cookie", "Referer", "X-Ms-Spillover-Deployment", "X-Ms-Service-Tier", "Via", "X-Envoy-External-Address",
		"X-Http-Method", "X-Http-Method-Override", "X-Method-Override",
		"X-Original-Url", "X-Rewrite-Url", "X-Original-Host", "X-Host":
		return private
	case "Sec-Websocket-Protocol":
		return protocol
	case "Connection", "Upgrade", "Te", "Trailer", "Transfer-Encoding", "Keep-Alive", "Alt-Svc",
		"Proxy-Connection", "Proxy-Authenticate", "Proxy-Authorization", ":protocol":
		return hop
	}
	switch {
	case strings.HasPrefix(name, "X-Forwarded-"): // before the words, because proxies add three of them
		return private
	case HoldsKey(name):
		return otherKey
	case hasWord(name, ofAddress):
		return private
	}
	return public
}

// HoldsKey reports whether a header or query parameter of a caller contains a
// key, judging by the words of its name.
func HoldsKey(name string) bool {
	return slices.Contains(CallerHeaders, name) ||
		hasWord(name, ofKey) && !strings.EqualFold(name, "Idempotency-Key") && !strings.EqualFold(name, "Sec-WebSocket-Key")
}

// MayHoldKey reports whether a configured header may contain a key, judging by
// any part of its name. It matches more names than [HoldsKey], because these
// headers are only hidden, and not removed.
func MayHoldKey(name string) bool {
	name = strings.ToLower(name)
	return slices.ContainsFunc([]string{"auth", "key", "token", "secret", "cookie", "credential", "password"},
		func(word string) bool {
			return strings.Contains(name, word)
		})
}

var (
	// ofKey are words in the names of headers and query parameters with a key.
	ofKey = []string{"key", "auth", "token", "apikey", "secret", "cookie", "password", "credential", "authorization"}
	// ofAddress are words in the names of headers in which proxies send a
	// client's address, such as X-Real-Ip or X-Azure-ClientIP.
	ofAddress = []string{"ip", "ipv4", "ipv6", "addr", "clientip", "socketip", "forwarded"}
)

// hasWord reports whether a name has one of the words. Words are separated by
// hyphens and underscores.
func hasWord(name string, words []string) bool {
	for start, i := 0, 0; i <= len(name); i++ {
		if i == len(name) || name[i] == '-' || name[i] == '_' {
			for _, word := range words {
				if len(word) == i-start && strings.EqualFold(word, name[start:i]) {
					return true
				}
			}
			start = i + 1
		}
	}
	return false
}

// HidesContent reports whether a header that says how to read the body would
// not reach the backend. Either Connection names it (RFC 9110 section 7.6.1),
// or its value is one of the keys. The backend would then read another body
// than the balancer.
func (p *Presented) HidesContent(header http.Header) bool {
	for name := range namedBy(header["Connection"]) {
		if hasPrefixFold(name, "Content-") {
			return true
		}
	}
	return p.keys.containsAny(header["Content-Type"]) || p.keys.containsAny(header["Content-Encoding"])
}

// namedBy yields the fields that the values of a Connection header name (RFC
// 9110 section 7.6.1).
func namedBy(connection []string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for _, value := range connection {
			if persists(value) {
				continue
			}
			for name := range strings.SplitSeq(value, ",") {
				if !yield(strings.TrimSpace(name)) {
					return
				}
			}
		}
	}
}

// isCredential reports whether the header identifies a caller, or chooses whose
// budget the caller spends.
func isCredential(name string) bool { return kindOf(http.CanonicalHeaderKey(name)) == credential }

// persists reports whether the value of a Connection header says only whether
// the connection stays open (RFC 9112 section 9.3).
func persists(value string) bool {
	return strings.EqualFold(value, "keep-alive") || strings.EqualFold(value, "close")
}

// isBasic reports whether a credential is a password for Caddy's own basic_auth
// (RFC 7617), which no provider accepts.
func isBasic(value string) bool { return hasPrefixFold(strings.TrimSpace(value), "Basic ") }
