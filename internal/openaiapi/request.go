package openaiapi

import (
	"bytes"
	"slices"
	"strings"
)

// Request is what a body asks for, and where it says so. The zero Request is that of a body that
// can hold no model.
type Request struct {
	// Model is the value of the "model". Of several the last one holds, as in the parsers the
	// providers use.
	Model string

	// HasModel tells whether there is one, be it an empty one.
	HasModel bool

	// Stream tells whether "stream", the last one, is true.
	Stream bool

	// models are the places of all values of "model", in order; none without HasModel.
	models []span

	// before and after go around the value of a model that is added at addAt. Without before,
	// none can be added.
	before, after string
	addAt         int

	// dashBoundary is what begins a form's delimiters: two dashes and the boundary. Only a form
	// has it.
	dashBoundary []byte
}

// span is a range of bytes, from start up to but not including end.
type span struct{ start, end int }

// WithModel returns the body in pieces, with the model in place of each that it names. A JSON
// object or a form that names none gets it as its first member or part. Of a body that was cut
// off only what came is known: a model that follows would stand beside the added one.
//
// The body stays as it is, the only piece, if all of it already says so, if it is neither object
// nor form, if its "model" is not one that could be read (null, say, or cut off), and if it is a
// form and the model cannot be written there, because it has a line break or the boundary in it:
// the form would get other parts.
//
// The body must be the one that was parsed. The pieces share its memory, so that a prompt of
// megabytes is not copied for each backend that is tried.
func (r Request) WithModel(body []byte, model string) [][]byte {
	value, ok := r.encode(model)
	if !ok || len(r.models) == 0 && r.before == "" {
		return [][]byte{body}
	}
	if len(r.models) == 0 {
		added := slices.Concat([]byte(r.before), value, []byte(r.after))
		return [][]byte{piece(body, 0, r.addAt), added, piece(body, r.addAt, len(body))}
	}
	differs := func(s span) bool { return !bytes.Equal(body[s.start:s.end], value) }
	if !slices.ContainsFunc(r.models, differs) {
		return [][]byte{body}
	}
	pieces := make([][]byte, 0, 2*len(r.models)+1)
	at := 0
	for _, s := range r.models {
		pieces = append(pieces, piece(body, at, s.start), value)
		at = s.end
	}
	return append(pieces, piece(body, at, len(body)))
}

// encode returns the model as it stands in the body, unless it cannot stand there. In a form, a
// delimiter begins with a line break or, as some readers have it, right after a part's headers.
func (r Request) encode(model string) (value []byte, ok bool) {
	if r.dashBoundary == nil {
		return quote(model), true
	}
	value = []byte(model)
	return value, !strings.ContainsAny(model, "\r\n") && !bytes.Contains(value, r.dashBoundary)
}

// piece is a part of the body whose capacity ends where it does, lest an append write into the
// body.
func piece(body []byte, start, end int) []byte {
	return body[start:end:end]
}
