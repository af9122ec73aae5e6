package openaiapi

import (
	"net/http"
	"strconv"
	"time"
)

// MakesClientSecret reports whether the reply to a request has a client secret,
// which a browser sends instead of a key to begin one realtime session.
func MakesClientSecret(method, operation string) bool {
	return method == http.MethodPost &&
		isOneOf(operation, "/realtime/client_secrets", "/realtime/translations/client_secrets", "/realtime/sessions", "/realtime/transcription_sessions")
}

// TakesClientSecret reports whether a request may have a client secret instead
// of a key.
func TakesClientSecret(r *http.Request, operation string) bool {
	if IsHandshake(r) {
		return operation == "/realtime" || operation == "/realtime/translations"
	}
	return r.Method == http.MethodPost && (operation == "/realtime/calls" || operation == "/realtime/translations/calls")
}

// ClientSecretIn returns the client secret in a reply, and when it expires. In
// the older API, both are in an inner object.
func ClientSecretIn(reply []byte) (secret string, until time.Time, ok bool) {
	begin := skipSpace(reply, 0)
	if begin >= len(reply) || reply[begin] != '{' {
		return "", time.Time{}, false
	}
	object := reply[begin:]
	if older := memberOf(object, "client_secret"); len(older) > 0 && older[0] == '{' {
		object = older
	}
	value, expires := memberOf(object, "value"), memberOf(object, "expires_at")
	if len(value) == 0 || value[0] != '"' {
		return "", time.Time{}, false
	}
	seconds, err := strconv.ParseFloat(string(expires), 64)
	if err != nil || seconds <= 0 || seconds > 1<<40 {
		return "", time.Time{}, false
	}
	return Text(value), time.Unix(int64(seconds), 0), true
}
