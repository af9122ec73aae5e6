package sse

import "bytes"

// Watcher looks at a stream as it passes: whether it tells of an error, and
// whether it says that it is over. It keeps no more than the beginning of a
// line.
type Watcher struct {
	// Failed tells that an error event went by.
	Failed bool
	// Ended tells that the stream said it is over.
	Ended bool

	line []byte // the beginning of the current line
	seen bool   // the line has been judged
}

// longest is how much of a line it takes to know what it is.
const longest = len("event: response.incomplete\r")

// Watch takes in the next bytes of the stream.
func (w *Watcher) Watch(p []byte) {
	for rest := p; len(rest) > 0; {
		line, after, whole := bytes.Cut(rest, []byte("\n"))
		if !w.seen {
			w.line = append(w.line, line[:min(len(line), longest-len(w.line))]...)
			if whole || len(w.line) == longest {
				w.judge()
				w.seen = true
			}
		}
		if whole {
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
			w.Failed = true
		}
	case "event":
		switch string(value) {
		case "error", "response.failed":
			w.Failed, w.Ended = true, true
		case "response.completed", "response.incomplete":
			w.Ended = true
		}
	}
}
