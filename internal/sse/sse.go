// Package sse reads the beginning of a streamed reply: whether it brings
// content yet, or an error in place of it, after a status that said 200.
package sse

import (
	"bytes"
	"cmp"
	"encoding/json"
	"net/http"
	"strconv"
)

// Opening is what the first events of a stream amount to.
type Opening int

const (
	// Preamble: no event so far is for the user.
	Preamble Opening = iota
	// Content: the reply has begun.
	Content
	// Failure: an error came before any content.
	Failure
	// End: the stream says that it is over, and brought nothing.
	End
)

// Error is an error that a stream brought, as a reply of its own.
type Error struct {
	// Status is the HTTP status that the error stands for.
	Status int
	// Body is the error in OpenAI's shape: {"error":…}.
	Body []byte
}

// Open tells what a stream amounts to that begins with these bytes. Only whole
// events count, but for what ends the stream when atEnd is set.
//
// Lines end with LF, CRLF or CR, comments and unknown fields are passed over,
// and "data:" needs no space after it (WHATWG HTML, "Server-sent events").
func Open(begin []byte, atEnd bool) (Opening, *Error) {
	var e event
	rest := bytes.TrimPrefix(begin, []byte("\xef\xbb\xbf"))
	for {
		line, after, whole := cutLine(rest)
		if !whole {
			if !atEnd {
				return Preamble, nil
			}
			// SDKs read a last event without the blank line after it, too
			e.add(line)
			return e.opening()
		}
		rest = after
		if len(line) > 0 {
			e.add(line)
			continue
		}
		if opening, failure := e.opening(); opening != Preamble {
			return opening, failure
		}
		e = event{}
	}
}

// event is one event of a stream.
type event struct {
	name string
	data []byte
}

// add takes in one line of the event.
func (e *event) add(line []byte) {
	name, value, _ := bytes.Cut(line, []byte(":"))
	value = bytes.TrimPrefix(value, []byte(" "))
	switch string(name) {
	case "event":
		e.name = string(value)
	case "data":
		if e.data != nil {
			e.data = append(e.data, '\n')
		}
		e.data = append(e.data, value...)
	}
}

// cutLine cuts the first line, which is whole if its end is there.
func cutLine(b []byte) (line, rest []byte, whole bool) {
	i := bytes.IndexAny(b, "\r\n")
	switch {
	case i < 0:
		return b, nil, false
	case b[i] == '\n':
		return b[:i], b[i+1:], true
	case i+1 < len(b) && b[i+1] == '\n':
		return b[:i], b[i+2:], true
	}
	return b[:i], b[i+1:], true
}

// opening tells what the event amounts to. What is not known is content.
func (e *event) opening() (Opening, *Error) {
	switch {
	case len(e.data) == 0:
		return Preamble, nil
	case string(e.data) == "[DONE]":
		return End, nil
	}
	var chunk struct {
		Type     string          `json:"type"`
		Error    json.RawMessage `json:"error"`
		Response struct {
			Error json.RawMessage `json:"error"`
		} `json:"response"`
		Choices *[]choice       `json:"choices"`
		Usage   json.RawMessage `json:"usage"`
	}
	if json.Unmarshal(e.data, &chunk) != nil && e.name == "" {
		return Content, nil
	}
	switch cmp.Or(chunk.Type, e.name) {
	case "response.created", "response.in_progress", "response.queued", "ping":
		return Preamble, nil
	case "response.failed":
		return Failure, newError(chunk.Response.Error)
	case "error":
		if !present(chunk.Error) {
			// the Responses API's error event has its fields at the top
			return Failure, newError(e.data)
		}
		return Failure, newError(chunk.Error)
	}
	if present(chunk.Error) {
		return Failure, newError(chunk.Error)
	}
	if chunk.Choices == nil {
		return Content, nil
	}
	for _, c := range *chunk.Choices {
		if !c.empty() {
			return Content, nil
		}
	}
	if present(chunk.Usage) {
		return Content, nil
	}
	return Preamble, nil
}

// choice is one of a chat completion's, of which a first chunk often tells no
// more than the role.
type choice struct {
	Text         string                     `json:"text"`
	FinishReason json.RawMessage            `json:"finish_reason"`
	Delta        map[string]json.RawMessage `json:"delta"`
}

func (c choice) empty() bool {
	for name, value := range c.Delta {
		if name != "role" && present(value) && string(value) != `""` && string(value) != "[]" {
			return false
		}
	}
	return c.Text == "" && !present(c.FinishReason)
}

// present reports whether a value is there. Some backends write an empty one
// where others have null.
func present(raw json.RawMessage) bool {
	switch string(raw) {
	case "", "null", `""`, "false", "{}":
		return false
	}
	return true
}

// Whole tells whether a JSON reply of status 200 is an error: if it has one at
// its top, and is no stored object that tells of an error in its past. creates
// tells that a response in it was made just now.
func Whole(body []byte, creates bool) *Error {
	if !bytes.Contains(body, []byte(`"error"`)) {
		return nil
	}
	var reply struct {
		Error  json.RawMessage `json:"error"`
		Object string          `json:"object"`
	}
	if json.Unmarshal(body, &reply) != nil || !present(reply.Error) {
		return nil
	}
	if reply.Object == "" || reply.Object == "error" || reply.Object == "response" && creates {
		return newError(reply.Error)
	}
	return nil
}

// newError makes a reply of the value of an "error".
func newError(raw json.RawMessage) *Error {
	if !present(raw) {
		raw = json.RawMessage(`{"message":"The backend's stream failed.","type":"server_error","param":null,"code":null}`)
	}
	var e struct {
		Type string `json:"type"`
		Code any    `json:"code"`
	}
	_ = json.Unmarshal(raw, &e) // an error that is a string has neither
	body := append([]byte(`{"error":`), raw...)
	return &Error{Status: statusOf(e.Type, e.Code), Body: append(body, '}')}
}

// statusOf maps an error to the status that it stands for. Microsoft Learn,
// "Azure OpenAI Responses API", has the first four; the others are OpenAI's.
func statusOf(kind string, code any) int {
	word, _ := code.(string)
	for _, w := range []string{word, kind} { // the code tells more than the type
		switch w {
		case "model_not_found", "DeploymentNotFound":
			return http.StatusNotFound
		case "invalid_api_key":
			return http.StatusUnauthorized
		case "too_many_requests", "rate_limit_error", "rate_limit_exceeded", "insufficient_quota",
			"tokens", "requests", "slow_down", "no_capacity":
			return http.StatusTooManyRequests
		case "forbidden":
			return http.StatusForbidden
		case "user_error", "invalid_request_error", "content_filter", "context_length_exceeded", "invalid_prompt":
			return http.StatusBadRequest
		case "server_is_overloaded", "overloaded_error", "service_unavailable_error":
			return http.StatusServiceUnavailable
		}
	}
	number, _ := strconv.Atoi(word)
	if n, ok := code.(float64); ok {
		number = int(n)
	}
	if number >= 400 && number <= 599 {
		return number
	}
	return http.StatusInternalServerError
}
