package openaiapi

import (
	"net/http"
	"strings"

	"golang.org/x/net/http/httpguts"
)

// IsExtendedConnect reports whether the request opens a WebSocket over its own
// stream of HTTP/2 or HTTP/3 (RFC 8441, RFC 9220).
func IsExtendedConnect(r *http.Request) bool {
	return r.Method == http.MethodConnect &&
		(r.ProtoMajor == 2 && r.Header.Get(":protocol") == "websocket" || r.ProtoMajor == 3 && r.Proto == "websocket")
}

// IsHandshake reports whether the request opens a WebSocket by a GET over
// HTTP/1.1 (RFC 6455 section 4.1). A request with a body does not count,
// because some servers would read the body as frames.
func IsHandshake(r *http.Request) bool {
	return r.Method == http.MethodGet && r.ContentLength == 0 &&
		strings.EqualFold(r.Header.Get("Upgrade"), "websocket") &&
		httpguts.HeaderValuesContainsToken(r.Header["Connection"], "Upgrade")
}

// SetUpgrade makes a header that of a handshake, or of the answer to one, for
// the protocol. It uses the spelling of RFC 6455, because some servers accept
// the fields of WebSockets, and the protocol's name, only in that spelling.
func SetUpgrade(out http.Header, protocol string) {
	out["Connection"], out["Upgrade"] = []string{"Upgrade"}, []string{protocol}
	for name, usual := range map[string]string{
		"Sec-Websocket-Extensions": "Sec-WebSocket-Extensions",
		"Sec-Websocket-Key":        "Sec-WebSocket-Key",
		"Sec-Websocket-Protocol":   "Sec-WebSocket-Protocol",
		"Sec-Websocket-Version":    "Sec-WebSocket-Version",
	} {
		if values, ok := out[name]; ok {
			delete(out, name)
			out[usual] = values
		}
	}
}

// AsPost returns the HTTP request that corresponds to the first message of a
// WebSocket.
func AsPost(r *http.Request) *http.Request {
	post := r.Clone(r.Context())
	post.Method, post.Body, post.ContentLength = http.MethodPost, nil, 0
	for _, name := range []string{"Upgrade", "Connection", "Sec-Websocket-Key", "Sec-Websocket-Version",
		"Sec-Websocket-Protocol", "Sec-Websocket-Extensions"} {
		delete(post.Header, name)
	}
	post.Header["Content-Type"] = []string{TypeJSON}
	return post
}

// IsEchoOrTunnel reports whether a server may answer the request with a copy of
// it, which contains the backend's key (RFC 9110 section 9.3.8; TRACK is an old
// name of TRACE), or with a connection to any address. No API has such
// requests.
func IsEchoOrTunnel(r *http.Request) bool {
	return strings.EqualFold(r.Method, http.MethodTrace) || strings.EqualFold(r.Method, "TRACK") ||
		strings.EqualFold(r.Method, http.MethodConnect)
}
