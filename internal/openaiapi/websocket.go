package openaiapi

import (
	"net/http"
	"strings"

	"golang.org/x/net/http/httpguts"
)

// IsExtendedConnect reports whether the request opens a WebSocket that has its body as its
// stream (RFC 8441, RFC 9220). It opens none if its stream has ended. reverse_proxy recognizes it in the same way,
// but answers one that has ended with a 101, which HTTP/2 does not have (RFC 9113 section 8.6).
func IsExtendedConnect(r *http.Request) bool {
	return r.Method == http.MethodConnect && r.ContentLength != 0 &&
		(r.ProtoMajor == 2 && r.Header.Get(":protocol") == "websocket" || r.ProtoMajor == 3 && r.Proto == "websocket")
}

// IsHandshake reports whether the request opens a WebSocket: it is an extended CONNECT, the GET
// that reverse_proxy makes of one, or a GET over HTTP/1.1 (RFC 6455 section 4.1). That has no
// body: some servers would read it as frames.
func IsHandshake(r *http.Request) bool {
	return IsExtendedConnect(r) || r.Method == http.MethodGet && (r.ContentLength == 0 || r.ProtoMajor > 1) &&
		strings.EqualFold(r.Header.Get("Upgrade"), "websocket") && httpguts.HeaderValuesContainsToken(r.Header["Connection"], "Upgrade")
}

// AsPost returns a handshake as the request over HTTP that the first message of its WebSocket is.
func AsPost(r *http.Request) *http.Request {
	post := r.Clone(r.Context())
	post.Method, post.Body, post.ContentLength = http.MethodPost, nil, 0
	for _, name := range []string{":protocol", "Upgrade", "Connection", "Sec-Websocket-Key", "Sec-Websocket-Version", "Sec-Websocket-Protocol", "Sec-Websocket-Extensions"} {
		delete(post.Header, name)
	}
	post.Header["Content-Type"] = []string{TypeJSON}
	return post
}

// MethodOf returns the method that the request has at a backend: reverse_proxy makes an extended
// CONNECT a GET.
func MethodOf(r *http.Request) string {
	if IsExtendedConnect(r) {
		return http.MethodGet
	}
	return r.Method
}

// IsEchoOrTunnel reports whether a server may answer the request with a copy of it,
// which has the backend's key in it (RFC 9110 section 9.3.8; TRACK is an old name of
// TRACE), or with a connection to any address. No API has such requests.
func IsEchoOrTunnel(r *http.Request) bool {
	return strings.EqualFold(r.Method, http.MethodTrace) || strings.EqualFold(r.Method, "TRACK") ||
		strings.EqualFold(r.Method, http.MethodConnect) && !IsExtendedConnect(r)
}
