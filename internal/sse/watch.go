package sse

import "bytes"

// Watcher looks at a stream as it passes: whether it tells of an error, and
// whether it says that it is over. It keeps no more than the beginning of an
// event.
type Watcher struct {
	// Failure is the error that went by, if one did.
	Failure *Error
	// Ended tells that the stream said it is over.
	Ended bool

	line   []byte // the beginning of the current line
	seen   bool   // the line has been judged
	event  []byte // the beginning of the current event
	failed bool   // it is an error
}

// maxEvent is how much of an event is kept, for the sake of an error in it.
const maxEvent = 4 << 10

// longest is how much of a line it takes to know what it is.
const longest = len("event: response.incomplete\r")

// Watch takes in the next bytes of the stream.
func (w *Watcher) Watch(p []byte) {
	for rest := p; len(rest) > 0; {
		line, after, whole := bytes.Cut(rest, []byte("\n"))
		w.event = append(w.event, rest[:min(len(rest)-len(after), maxEvent-len(w.event))]...)
		if !w.seen {
			w.line = append(w.line, line[:min(len(line), longest-len(w.line))]...)
			if whole || len(w.line) == longest {
				w.judge()
				w.seen = true
			}
		}
		if whole {
			if len(bytes.TrimSuffix(w.line, []byte("\r"))) == 0 {
				w.endEvent()
			}
			w.line, w.seen = w.line[:0], false
		}
		rest = after
	}
}

// Finish judges a last line that has no end.
func (w *Watcher) Finish() {
	if !w.seen {
		w.judge()
	}
	w.endEvent()
}

func (w *Watcher) endEvent() {
	if w.failed && w.Failure == nil {
		if _, w.Failure = Open(w.event, true); w.Failure == nil {
			w.Failure = newError(nil) // too long to be read
		}
	}
	w.event, w.failed = w.event[:0], false
}

func (w *Watcher) judge() {
	name, value, _ := bytes.Cut(bytes.TrimSuffix(w.line, []byte("\r")), []byte(":"))
	value = bytes.TrimPrefix(value, []byte(" "))
	switch string(name) {
	case "data":
		switch {
		case bytes.HasPrefix(value, []byte("[DONE]")):
			w.Ended = true
		case bytes.HasPrefix(value, []byte(`{"error":`)) && !bytes.HasPrefix(bytes.TrimSpace(value[len(`{"error":`):]), []byte("null")):
			w.failed = true
		}
	case "event":
		switch string(value) {
		case "error", "response.failed":
			w.failed, w.Ended = true, true
		case "response.completed", "response.incomplete":
			w.Ended = true
		}
	}
}
