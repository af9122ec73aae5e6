package sse

import "bytes"

// Watcher looks at a stream as it passes: whether it tells of an error, and
// whether it says that it is over. It keeps no more than the beginning of a
// line, and of an error.
type Watcher struct {
	// Failure is the error that went by, if one did.
	Failure *Error
	// Ended tells that the stream said it is over.
	Ended bool

	line   []byte // the beginning of the current line
	seen   bool   // the line has been judged
	failed bool   // the current event is an error
	event  []byte // its beginning, from the line that told so
}

// maxEvent is how much of an error is kept.
const maxEvent = 4 << 10

// longest is how much of a line it takes to know what it is.
const longest = len("event: response.incomplete\r")

// Watch takes in the next bytes of the stream.
func (w *Watcher) Watch(p []byte) {
	for rest := p; len(rest) > 0; {
		line, after, whole := bytes.Cut(rest, []byte("\n"))
		if !w.seen {
			n := min(len(line), longest-len(w.line))
			w.line = append(w.line, line[:n]...)
			line = line[n:]
			if whole || len(w.line) == longest {
				w.judge()
			}
		}
		w.keep(line)
		if whole {
			w.keep([]byte("\n"))
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
	w.event, w.failed = nil, false
}

// keep adds to the event if that is an error.
func (w *Watcher) keep(p []byte) {
	if w.failed {
		w.event = append(w.event, p[:min(len(p), maxEvent-len(w.event))]...)
	}
}

// judge tells by its beginning what the line is.
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
	w.seen = true
	w.keep(w.line)
}
