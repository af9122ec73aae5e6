// Package sse reads streamed replies, which are server-sent events, as they
// pass.
//
// A [Splitter] cuts a stream into its events, no matter how the network has cut
// it into pieces. A [Watcher] reads the events and answers three questions.
// Does the stream begin with content or with an error, although its status was
// 200? Does an error follow later? Has the stream said that it is complete?
//
// Neither changes a byte. A Splitter keeps only the beginning of a long event
// (TestASplitterKeepsOnlySoMuch), and the answers do not depend on how the
// stream was split (TestAWatcherSeesErrorsAndEndsHoweverTheStreamIsSplit). To
// cost little, a Watcher searches only the part of an event that differs from
// the events before it. Whole finds an error in a JSON reply that is not
// streamed.
package sse

import (
	"bytes"
	"encoding/json"
	"slices"
)

// Opening classifies the first events of a stream.
type Opening int

const (
	// Preamble means that no event so far is for the user.
	Preamble Opening = iota
	// Content means that the reply has begun.
	Content
	// Failure means that an error came before any content.
	Failure
	// End means that the stream said that it is over, without content.
	End
)

// Watcher reads a stream as it passes. It first classifies the beginning, and
// then looks for an error and the end. The zero Watcher is at the beginning of
// a stream.
type Watcher struct {
	// Each, if it is set, is called with every event, for example to count
	// tokens or to learn the ids of stored objects. The event is valid only
	// during the call.
	Each func(Event)

	// Long, if it is set, is called with all data of events that are longer
	// than MaxEvent, as [Splitter.Long] is.
	Long func(data []byte)

	// Piece, if it is set, is called with the data of every event that has a
	// part of the content.
	Piece func(data []byte)

	// Opening is the class of the stream's beginning so far. Once it is not
	// Preamble, it does not change.
	Opening Opening

	// OpensLong reports whether the stream opens with an event that may be an
	// error and is longer than MaxEvent. Opening is Content then. [LongFailure]
	// finds the error in the data so far.
	OpensLong bool

	// Failure is the first error in the stream, before or after content. An
	// error in an event that is longer than MaxEvent does not count: it cannot
	// be read, so its cause is unknown.
	Failure *Error

	// Pieces is how many events so far had a part of the content. Each of them
	// is about one token.
	Pieces int64

	// Ended reports whether the stream said that it is over.
	Ended bool

	splitter Splitter
	common   beginning
}

// Watch reads the next bytes of the stream.
func (w *Watcher) Watch(p []byte) {
	w.splitter.Long = w.Long
	w.splitter.Split(p, w.take)
}

// Finish records the end of the stream. It reads a last event that has no empty
// line after it. But an event whose JSON is cut does not count as content: over
// HTTP/1.0, a cut connection looks like the end of a reply.
func (w *Watcher) Finish() {
	w.splitter.End(func(e Event) {
		if w.Opening != Preamble || !bytes.HasPrefix(e.Data, []byte("{")) || json.Valid(e.Data) {
			w.take(e)
		}
	})
}

// Failing reports whether an event that may be an error has begun and not
// ended.
func (w *Watcher) Failing() bool {
	s := &w.splitter
	if !s.inEvent || s.inLongLine || s.long {
		return false // there is none, or it cannot be read
	}
	line, _ := cutField(s.partial.text, "data")
	for _, data := range [][]byte{s.data, line} {
		if mayBeError(Event{Name: s.name[:s.named], Data: data}.Kind()) || mayHoldError(data) {
			return true
		}
	}
	return false
}

// Take reads a message of a WebSocket as an event of a stream.
func (w *Watcher) Take(e Event) { w.take(e) }

func (w *Watcher) take(e Event) {
	e.Tail = skipText(w.common.skip(e.Data))
	if w.Each != nil {
		w.Each(e)
	}
	kind := e.Kind()
	done := bytes.HasPrefix(e.Data, []byte("[DONE]"))
	w.Ended = w.Ended || done || ends(kind)
	switch {
	case w.Opening != Preamble:
		isOther := !bytes.HasPrefix(kind, []byte("response."))
		if w.Failure == nil && (mayBeError(kind) || isOther && mayHoldError(e.Tail)) {
			w.Failure = e.failure()
		}
	case done:
		w.Opening = End
	default:
		w.Opening, w.Failure = e.opening()
		w.OpensLong = e.TooLong && e.mayBeLongError()
	}
	if w.Opening == Content && isPiece(kind) {
		w.Pieces++
		if w.Piece != nil && !done {
			w.Piece(e.Data)
		}
	}
}

// isPiece reports whether an event of that kind has a part of the content.
// Events of chat completions have no kind. All of them count, although the
// first and last ones have no content.
func isPiece(kind []byte) bool { return len(kind) == 0 || bytes.HasSuffix(kind, []byte("delta")) }

// Kind returns the event's type in the API's terms, such as
// "response.completed". It is the event's name, or without one the "type" with
// which its data begins. Events of chat completions have neither.
func (e Event) Kind() []byte {
	if len(e.Name) > 0 && string(e.Name) != "message" { // the default name
		return e.Name
	}
	value, ok := bytes.CutPrefix(e.Data, []byte(`{"type":`))
	if !ok {
		return nil
	}
	value, ok = bytes.CutPrefix(bytes.TrimLeft(value, whiteSpace), []byte(`"`))
	kind, _, whole := bytes.Cut(value, []byte(`"`))
	if !ok || !whole {
		return nil
	}
	return kind
}

// ends reports whether an event of that kind ends a stream. Streams of chat
// completions end with [DONE] instead.
func ends(kind []byte) bool {
	switch string(kind) {
	case "response.completed", "response.incomplete", "response.failed", "error",
		"message_stop", // Anthropic's
		"image_generation.completed", "image_edit.completed", "speech.audio.done", "transcript.text.done":
		return true
	}
	return false
}

// mayBeError reports whether an event of that kind is an error, or may say that
// a response of a realtime session has failed.
func mayBeError(kind []byte) bool {
	switch string(kind) {
	case "error", "response.failed", "response.done":
		return true
	}
	return false
}

func isPreamble(kind []byte) bool {
	switch string(kind) {
	case "response.created", "response.in_progress", "response.queued", "ping", "keepalive":
		return true
	}
	return false
}

// opening classifies the beginning of a stream in which only preambles came
// before the event. An event of an unknown kind is content, and so is an event
// that is too long to be read.
func (e Event) opening() (Opening, *Error) {
	kind := e.Kind()
	if isPreamble(kind) {
		return Preamble, nil
	}
	plain := bytes.HasSuffix(kind, []byte("delta")) || bytes.HasPrefix(kind, []byte("response.")) && !mayBeError(kind)
	if e.TooLong || e.hasText() || plain && !mayHoldError(e.Data) { // a response.completed may be long
		return Content, nil
	}
	var chunk struct {
		report
		Choices *[]choice       `json:"choices"`
		Usage   json.RawMessage `json:"usage"`
	}
	err := json.Unmarshal(e.Data, &chunk)
	if failure := e.failureIn(chunk.report); failure != nil {
		return Failure, failure
	}
	if err != nil {
		return Content, nil
	}
	if isPreamble([]byte(chunk.Type)) { // which need not be the first member
		return Preamble, nil
	}
	if chunk.Choices == nil || present(chunk.Usage) ||
		slices.ContainsFunc(*chunk.Choices, func(c choice) bool { return !c.empty() }) {
		return Content, nil
	}
	return Preamble, nil
}

// hasText reports whether the event clearly has a text of a chat, as nearly all
// events do, so that it need not be parsed. A match is the name of a member,
// because quotes in a text are escaped.
func (e Event) hasText() bool {
	_, text, ok := bytes.Cut(e.Data, []byte(`"delta":{"content":"`))
	text = bytes.TrimLeft(text, whiteSpace) // which alone does not count
	return ok && len(text) > 0 && text[0] != '"' && !mayHoldError(e.Data)
}

// choice is one of the choices of a chat completion. In the first chunk it
// often has only a role.
type choice struct {
	Text         string                     `json:"text"`
	FinishReason json.RawMessage            `json:"finish_reason"`
	Delta        map[string]json.RawMessage `json:"delta"`
}

func (c choice) empty() bool {
	for name, value := range c.Delta {
		if name != "role" && present(value) {
			return false
		}
	}
	return c.Text == "" && !present(c.FinishReason)
}

// report has the members of an event that may have an error.
type report struct {
	Type     string          `json:"type"`
	Error    json.RawMessage `json:"error"`
	Response json.RawMessage `json:"response"`
}

// FailureIn returns the error in a message of a WebSocket, or nil if the
// message is not an error.
func FailureIn(message []byte) *Error { return Event{Data: message}.failure() }

// failure returns the error in the event. It returns nil if there is none or
// the event is too long.
func (e Event) failure() *Error {
	if e.TooLong {
		return nil
	}
	var r report
	_ = json.Unmarshal(e.Data, &r) // other data has none of these members
	return e.failureIn(r)
}

func (e Event) failureIn(r report) *Error {
	kind := e.Kind()
	if len(kind) == 0 {
		kind = []byte(r.Type)
	}
	switch {
	case string(kind) == "response.failed":
		var response struct {
			Error json.RawMessage `json:"error"`
		}
		_ = json.Unmarshal(r.Response, &response)
		return ofResponse(response.Error)
	case string(kind) == "response.done":
		var response struct {
			Status  string `json:"status"`
			Details struct {
				Error json.RawMessage `json:"error"`
			} `json:"status_details"`
		}
		_ = json.Unmarshal(r.Response, &response)
		if response.Status == "failed" && present(response.Details.Error) {
			return ofResponse(response.Details.Error)
		}
		return nil
	case present(r.Error):
		return newError(r.Error)
	case string(kind) == "error":
		return newError(e.Data) // an error event of the Responses API has its fields at the top
	}
	return nil
}
