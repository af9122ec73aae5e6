package websocket

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"

	"github.com/openai-lb/caddy-openai-lb/internal/sse"
)

// maxReply is how much of a reply is read to make an event of it.
const maxReply = 64 << 10

// errorEvent is an error event of a WebSocket, as the Responses API sends it.
// Codex looks for the headers next to the error, and OpenAI's SDKs inside it.
type errorEvent struct {
	Type    string            `json:"type"`
	Status  int               `json:"status"`
	Error   map[string]any    `json:"error"`
	Headers map[string]string `json:"headers,omitempty"`
	Stream  string            `json:"stream_id,omitempty"`
}

// replyEvent returns the event for an error reply. stream is the id of the lane
// that it is about, or empty.
func replyEvent(res *http.Response, stream string) []byte {
	e := errorEvent{Type: "error", Status: res.StatusCode, Error: errorIn(res), Stream: stream}
	for name, values := range res.Header {
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

// errorIn returns the error in a reply, or one made from the reply's status.
func errorIn(res *http.Response) map[string]any {
	var reply struct {
		Error map[string]any `json:"error"`
	}
	body, _ := io.ReadAll(io.LimitReader(res.Body, maxReply)) // what can be read
	res.Body.Close()
	if json.Unmarshal(body, &reply) != nil || reply.Error == nil {
		return map[string]any{"type": "server_error", "code": nil, "message": http.StatusText(res.StatusCode), "param": nil}
	}
	return reply.Error
}

// realtimeEvent returns the event of a realtime session for an error reply. If
// a limit refused to begin a response, this is a failed response; otherwise, it
// is an error about the client's event with this id.
func realtimeEvent(res *http.Response, begins bool, id string) []byte {
	e := errorIn(res)
	event := map[string]any{"event_id": "event_" + rand.Text()}
	if begins && res.StatusCode == http.StatusTooManyRequests {
		event["type"] = "response.done"
		event["response"] = map[string]any{"object": "realtime.response", "id": "resp_" + rand.Text(),
			"status": "failed", "output": []any{}, "usage": nil,
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

// tellsClient reports whether a client needs this header of an error.
func tellsClient(name string) bool {
	switch name {
	case "retry-after", "retry-after-ms", "x-should-retry", "x-request-id":
		return true
	}
	return strings.HasPrefix(name, "x-ratelimit-")
}

// errorReply returns the reply for a backend's error event, or nil if the event
// is not an error. The event may contain a status and headers.
func errorReply(event []byte) *http.Response {
	failure := sse.FailureIn(event)
	if failure == nil {
		return nil
	}
	var names struct {
		Status     int            `json:"status"`
		StatusCode int            `json:"status_code"`
		Headers    map[string]any `json:"headers"`
		Error      struct {
			Headers map[string]any `json:"headers"`
		} `json:"error"`
	}
	d := json.NewDecoder(bytes.NewReader(event))
	d.UseNumber()        // and no float, which has another spelling
	_ = d.Decode(&names) // what can be read
	status := failure.Status
	if named := max(names.Status, names.StatusCode); 400 <= named && named <= 599 {
		status = named
	}
	header := http.Header{"Content-Type": {"application/json"}}
	for _, fields := range []map[string]any{names.Error.Headers, names.Headers} {
		for name, value := range fields {
			if lower := strings.ToLower(name); tellsClient(lower) || strings.HasPrefix(lower, "x-ms-") {
				header.Set(name, fmt.Sprint(value))
			}
		}
	}
	return &http.Response{
		Status: strconv.Itoa(status) + " " + http.StatusText(status), StatusCode: status, Proto: "HTTP/1.1",
		ProtoMajor: 1, ProtoMinor: 1,
		Header: header, Body: io.NopCloser(bytes.NewReader(failure.Body)), ContentLength: int64(len(failure.Body)),
	}
}
