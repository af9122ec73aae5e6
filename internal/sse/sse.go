// Package sse reads streamed replies, which are server-sent events, as they
// pass.
//
// A [Splitter] cuts a stream into its events, however the network has cut it
// into pieces. A [Watcher] looks into the events and answers three questions.
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

// Opening is what the first events of a stream amount to.
type Opening int

const (
	// Preamble: no event so far is for the user.
	Preamble Opening = iota
	// Content: the reply has begun.
	Content
	// Failure: an error came before any content.
	Failure
	// End: the stream says that it is over, and had no content.
	End
)

// Watcher reads a stream as it passes: first what it opens with, then whether
// it has an error and an end. The zero Watcher is at the beginning of a stream.
type Watcher struct {
	// Each, if it is set, is called with every event, for example to count
	// tokens or to learn the ids of stored objects. The event is valid during
	// the call only.
	Each func(Event)

	// Long, if it is set, is called with all data of events that are longer
	// than MaxEvent, as [Splitter.Long] is.
	Long func(data []byte)

	// Piece, if it is set, is called with the data of every event that has a
	// part of the content.
	Piece func(data []byte)

	// Opening is what the stream amounts to so far. Once it is more than a
	// Preamble, it stays.
	Opening Opening

	// OpensLong reports whether the stream opens with an event that may be an
	// error, and is longer than MaxEvent. Opening is Content then.
	// [LongFailure] finds the error in all that has come.
	OpensLong bool

	// Failure is the first error in the stream, before or after content. An
	// error in an event that is longer than MaxEvent does not count: it cannot
	// be read, so it is not known whose fault it is.
	Failure *Error

	// Pieces is how many events so far had a part of the content, each of which
	// is about a token.
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

// Finish records the end of the stream. It reads a last event without an empty
// line after it, but takes none that breaks off in its JSON for content: over
// HTTP/1.0, the end of a connection that was cut looks like the end of a reply.
func (w *Watcher) Finish() {
	w.splitter.End(func(e Event) {
		if w.Opening != Preamble || !bytes.HasPrefix(e.Data, []byte("{")) || json.Valid(e.Data) {
			w.take(e)
		}
	})
}

// Failing reports whether the stream has begun an event that may be an error,
// and has not ended it.
func (w *Watcher) Failing() bool {
	s := &w.splitter
	if !s.inEvent || s.within || s.long {
		return false // there is none, or it cannot be read
	}
	line, _ := cutField(s.partial.text, "data")
	for _, data := range [][]byte{s.data, line} {
		if isError(Event{Name: s.name[:s.named], Data: data}.Kind()) || mayHoldError(data) {
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
		if w.Failure == nil && (isError(kind) || !bytes.HasPrefix(kind, []byte("response.")) && mayHoldError(e.Tail)) {
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
// Events of chat completions have no kind: all of them have a part, except the
// first and the last ones.
func isPiece(kind []byte) bool { return len(kind) == 0 || bytes.HasSuffix(kind, []byte("delta")) }

// Kind returns what the event is, in the API's words, such as
// "response.completed": its name or, if it has none, the "type" that its data
// begins with. Events of chat completions have neither.
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

// ends reports whether a stream is over after an event of that kind. Streams of
// chat completions end with [DONE].
func ends(kind []byte) bool {
	switch string(kind) {
	case "response.completed", "response.incomplete", "response.failed", "error",
		"message_stop", // Anthropic's
		"image_generation.completed", "image_edit.completed", "speech.audio.done", "transcript.text.done":
		return true
	}
	return false
}

func isError(kind []byte) bool {
	return string(kind) == "error" || string(kind) == "response.failed"
}

func isPreamble(kind []byte) bool {
	switch string(kind) {
	case "response.created", "response.in_progress", "response.queued", "ping", "keepalive":
		return true
	}
	return false
}

// opening returns what the stream opens with if only preambles came before the
// event. An event of an unknown kind is content, and so is one that is too long
// to be read.
func (e Event) opening() (Opening, *Error) {
	kind := e.Kind()
	if isPreamble(kind) {
		return Preamble, nil
	}
	plain := bytes.HasSuffix(kind, []byte("delta")) || bytes.HasPrefix(kind, []byte("response.")) && !isError(kind)
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
	if chunk.Choices == nil || present(chunk.Usage) || slices.ContainsFunc(*chunk.Choices, func(c choice) bool { return !c.empty() }) {
		return Content, nil
	}
	return Preamble, nil
}

// hasText reports whether the event plainly has a text of a chat, as nearly all
// do: it need not be parsed then. A match is the name of a member, because the
// quotes in a text are escaped.
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

// report has the members of an event in which an error may be.
type report struct {
	Type     string          `json:"type"`
	Error    json.RawMessage `json:"error"`
	Response json.RawMessage `json:"response"`
}

// FailureIn returns the error that a message of a WebSocket is, or nil if it is
// none.
func FailureIn(message []byte) *Error { return Event{Data: message}.failure() }

// failure returns the error in the event, or nil if there is none or it cannot
// be read.
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
	case present(r.Error):
		return newError(r.Error)
	case string(kind) == "error":
		return newError(e.Data) // an error event of the Responses API has its fields at the top
	}
	return nil
}
