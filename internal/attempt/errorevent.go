package attempt

import (
	"crypto/rand"
	"encoding/json"
	"net/http"
	"strings"
)

// errorEvent is an error in a WebSocket, as the Responses API sends it. Codex looks for the headers beside the error, and OpenAI's SDKs
// in it.
type errorEvent struct {
	Type    string            `json:"type"`
	Status  int               `json:"status"`
	Error   map[string]any    `json:"error"`
	Headers map[string]string `json:"headers,omitempty"`
	Stream  string            `json:"stream_id,omitempty"`
}

// errorEventOf returns the event for a reply that is an error. stream is the id of the lane that it is about, or empty.
func errorEventOf(status int, header http.Header, body []byte, stream string) []byte {
	e := errorEvent{Type: "error", Status: status, Error: errorIn(status, body), Stream: stream}
	for name, values := range header {
		if name = strings.ToLower(name); tellsClient(name) && len(values) > 0 {
			if e.Headers == nil {
				e.Headers = make(map[string]string)
			}
			e.Headers[name] = values[0]
		}
	}
	if e.Headers != nil {
		e.Error["headers"] = e.Headers
	}
	text, _ := json.Marshal(e) // what was JSON, and texts
	return text
}

// errorIn returns the error in a reply, or one that says what its status does.
func errorIn(status int, body []byte) map[string]any {
	var reply struct {
		Error map[string]any `json:"error"`
	}
	if json.Unmarshal(body, &reply) != nil || reply.Error == nil {
		return map[string]any{"type": "server_error", "code": nil, "message": http.StatusText(status), "param": nil}
	}
	return reply.Error
}

// realtimeError returns the event of a realtime session for a reply that is an error: a response that has failed, if a limit refused
// to begin one, or else an error about the client's event of this id.
func realtimeError(status int, body []byte, begins bool, id string) []byte {
	e := errorIn(status, body)
	event := map[string]any{"event_id": "event_" + rand.Text()}
	if begins && status == http.StatusTooManyRequests {
		event["type"] = "response.done"
		event["response"] = map[string]any{"object": "realtime.response", "id": "resp_" + rand.Text(), "status": "failed", "output": []any{}, "usage": nil,
			"status_details": map[string]any{"type": "failed", "error": e}}
	} else {
		event["type"], event["error"] = "error", e
		if e["event_id"] = any(nil); id != "" {
			e["event_id"] = id
		}
	}
	text, _ := json.Marshal(event) // what was JSON, and texts
	return text
}

// tellsClient reports whether a client has a use for a header of an error.
func tellsClient(name string) bool {
	switch name {
	case "retry-after", "retry-after-ms", "x-should-retry", "x-request-id":
		return true
	}
	return strings.HasPrefix(name, "x-ratelimit-")
}
