package openaiapi

import (
	"bytes"
	"iter"
)

// TypeOf returns the first "type" of a server's event. It is empty without one.
func TypeOf(text []byte) []byte {
	value := memberOf(text, "type")
	if !isString(value) { // or it is cut off
		return nil
	}
	return value[1 : len(value)-1]
}

// ReadEvent reads a client's event in a session, which has its own model.
func (q *Request) ReadEvent(text []byte) {
	q.Body, q.Whole, q.PromptLength, q.Clarity = ParseJSON(text, nil), true, int64(len(text)), Clear
	if !q.Body.Clear {
		q.Clarity = Unclear
	}
	if q.Body.HasModel {
		q.Model = q.Body.Model
	}
	q.Cost = q.Body.Cost(q.PromptLength)
}

// ResponseIn returns the id and the status of the response that a server's
// event is about. They are empty if the event does not have them.
func ResponseIn(text []byte) (id, status string) {
	response := memberOf(text, "response")
	return Text(memberOf(response, "id")), Text(memberOf(response, "status"))
}

// CountsTokens reports whether an event of a server has a usage that counts
// tokens.
func CountsTokens(text []byte) bool { return memberOf(memberOf(text, "usage"), "output_tokens") != nil }

// ErrorEvent is an error event of a server, with the things that it is about.
type ErrorEvent struct {
	// About is the id of the client's event, and Stream the id of the lane.
	// They are empty if the error names none.
	About, Stream string
	// Active reports whether the error says that a response is already in
	// progress.
	Active bool
}

// ParseErrorEvent parses a server's error event.
func ParseErrorEvent(text []byte) ErrorEvent {
	e := memberOf(text, "error")
	return ErrorEvent{Text(memberOf(e, "event_id")), Text(memberOf(text, "stream_id")), Text(memberOf(e, "code")) == "conversation_already_has_active_response"}
}

// memberOf returns the value of a member of an object, or nil.
func memberOf(object []byte, member string) []byte {
	for name, value := range Members(object) {
		if string(name) == member {
			return value
		}
	}
	return nil
}

// Members yields the members of an object: their names, as written between the
// quotes, and their values. If the object is cut off, the last value is only
// its beginning.
func Members(object []byte) iter.Seq2[[]byte, []byte] {
	return func(yield func(name, value []byte) bool) {
		i := skipSpace(object, 0)
		if i >= len(object) || object[i] != '{' {
			return
		}
		for i < len(object) && (object[i] == '{' || object[i] == ',') {
			name, value := memberAt(object, i)
			if value < 0 || value == len(object) {
				return
			}
			end := skipValue(object, value)
			if end < 0 {
				yield(name, object[value:])
				return
			}
			if !yield(name, object[value:end]) {
				return
			}
			i = skipSpace(object, end)
		}
	}
}

// Text returns the text of a string value. It returns an empty string if the
// value is not a string or is cut off.
func Text(value []byte) string {
	if !isString(value) {
		return ""
	}
	s, _ := unquote(value)
	return s
}

// isString reports whether a value is a complete string.
func isString(value []byte) bool {
	return len(value) > 0 && value[0] == '"' && skipString(value, 0) == len(value)
}

// ClientEvent is an event that a client sends in a WebSocket.
type ClientEvent struct {
	// Type is the event's type, ID its own id, and Stream the id of the lane of
	// its response, if it names these.
	Type, ID, Stream string
	// Clear reports whether all servers read the same type: the event is one
	// JSON object that has one type.
	Clear bool
}

// ParseClientEvent parses the type and the ids of a client's event.
func ParseClientEvent(text []byte) (e ClientEvent) {
	i := skipSpace(text, 0)
	if i >= len(text) || text[i] != '{' {
		return e
	}
	e.Clear = true
	named := false
	for {
		name, value := memberAt(text, i)
		if value < 0 {
			end := endOf(text, i+1)
			e.Clear = e.Clear && end > 0 && skipSpace(text, end) == len(text)
			return e
		}
		end := skipValue(text, value)
		if end < 0 {
			e.Clear = false
			return e
		}
		switch isString := text[value] == '"'; {
		case isOdd(name, "type") || bytes.IndexByte(name, '\\') >= 0 && isOdd(decodeName(name), "type"):
			e.Clear = e.Clear && !named && isString && string(name) == "type"
			if named = true; isString {
				e.Type, _ = unquote(text[value:end])
			}
		case string(name) == "event_id" && isString:
			e.ID, _ = unquote(text[value:end])
		case string(name) == "stream_id" && isString:
			e.Stream, _ = unquote(text[value:end])
		}
		if i = skipSpace(text, end); i >= len(text) || text[i] != ',' {
			e.Clear = e.Clear && named && i < len(text) && text[i] == '}' && skipSpace(text, i+1) == len(text)
			return e
		}
	}
}

// SteerMessage is the type of a message with more input for a response in
// progress. The session then ends that response early and begins another one,
// without a further message from the client.
const SteerMessage = "response.steer"

// AudioMessage is the prefix of the types of messages with audio. After audio,
// a session may begin a response on its own.
const AudioMessage = "input_audio_buffer."
